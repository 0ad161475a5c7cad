"""``tidelog scribe``: compiles, applies amendments and sweeps in the background."""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tidelog.cli.commands.compile import policy_of, policy_options
from tidelog.cli.interruption import Interruption
from tidelog.cli.metrics_file import check_metrics_file, write_metrics_file
from tidelog.cli.output import FAILED, Output, counted, echo_aside, json_option
from tidelog.errors import TidelogError
from tidelog.home import Home, open_home
from tidelog.journal.compile_policy import CompilePolicy
from tidelog.journal.scribe import Rate, ScribeMetrics, ScribeOptions, Turn
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms

__all__ = ["scribe"]


@click.command()
@click.option("--every", default="10m", show_default=True, metavar="N", help="Between two turns.")
@click.option(
    "--discard-older",
    default="60m",
    show_default=True,
    metavar="M",
    help="Turns that waited so long are dropped.",
)
@click.option("--budget", default="5m", show_default=True, metavar="D", help="Time of one turn.")
@click.option("--once", is_flag=True, help="One turn now, and end: for cron.")
@policy_options
@click.option(
    "--grace",
    default="1h",
    show_default=True,
    metavar="D",
    help="Its sweeps leave alone what is younger than this.",
)
@click.option(
    "--sweep-every", default="1h", show_default=True, metavar="D", help="Between two sweeps."
)
@click.option("--no-sweep", is_flag=True, help="Compile only.")
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep Prometheus text in this file, for a textfile collector.",
)
@json_option
@click.pass_obj
def scribe(home_text: str | None, output: Output, /, once: bool, **given: Any) -> None:
    """Compile, apply amendments and sweep in the background.

    Covers all topics and their archives.

    One scribe works at a time; others wait as standbys. Every N minutes there is a
    turn; those that waited longer than M are dropped, so at most M/N wait. A turn that runs out of
    time resumes in the next one. Ctrl-C and SIGTERM let the swap under way finish. With --once the
    exit code is 1 if anything fails in the turn (`errors` is not empty), if its sweep refuses a
    topic, if it runs out of time, or if another scribe is at work.

    \b
    Examples:
      tidelog scribe
      tidelog scribe --every 1m --discard-older 10m --budget 30s --json
      tidelog scribe --once --amended --grace 0s
    """
    grace_ms = None if given["no_sweep"] else duration_ms(given["grace"])
    how = ScribeOptions(
        rate=Rate(duration_ms(given["every"]), duration_ms(given["discard_older"])),
        policy=policy_of(given, CompilePolicy()),
        budget_ms=duration_ms(given["budget"]),
        grace_ms=grace_ms,
        sweep_every_ms=0 if once else duration_ms(given["sweep_every"]),
    )
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=not once):
        context = _Log(home, output, given["metrics_file"])
        worker = home.scribe(how, stop.is_set)
        if not once:
            context.tell(
                "started",
                f"A turn every {given['every']}, by one scribe at a time; Ctrl-C ends it.",
            )
            worker.run(stop.wait, context.turn, context.error)
            context.tell("stopped", "Stopped.")
            return
        turn = worker.once()
        if turn is None:
            context.tell("busy", "Another scribe of this home is at work.")
        else:
            context.turn(turn)
    if turn is None or not turn.succeeded:
        sys.exit(FAILED)


class _Log:
    """One line for each turn, and the metrics."""

    def __init__(self, home: Home, output: Output, file: Path | None) -> None:
        self._home = home
        self._output = output
        check_metrics_file(file)
        self._file = file
        self._metrics = ScribeMetrics()

    def tell(self, state: str, text: str) -> None:
        """What the scribe does now."""
        if self._output.as_json:
            self._output.record({"scribe": state, "at": to_iso(self._home.context.clock.now_ms())})
        else:
            self._output.say(text)

    def turn(self, turn: Turn) -> None:
        """A turn is over."""
        self._metrics.add(turn)
        self._show(turn)
        self._write_metrics()

    def error(self, error: TidelogError) -> None:
        """Something went wrong that the next turn may find well."""
        self._metrics.errors += 1
        if self._output.as_json:
            self._output.record({"scribe": "error", **error.as_json()})
        else:
            echo_aside(f"error: {' '.join(error.message.split())}")
        self._write_metrics()

    def _show(self, turn: Turn) -> None:
        compiled = turn.compiled
        if self._output.as_json:
            swept = turn.swept
            self._output.record(
                {
                    "scribe": "turn",
                    "at": to_iso(turn.began_ms),
                    "seconds": turn.seconds,
                    "finished": turn.finished,
                    "topics": turn.topics,
                    **asdict(compiled),
                    "erased_events": turn.erased,
                    "swept_objects": None if swept is None else swept.objects_deleted,
                    "swept_bytes": None if swept is None else swept.bytes_deleted,
                    "tickets_waiting": turn.waiting,
                    "tickets_dropped": turn.dropped,
                    "errors": [
                        {"topic": each.topic, **each.error.as_json()} for each in turn.troubles
                    ],
                }
            )
            return
        text = (
            f"{to_iso(turn.began_ms)}  {turn.seconds:.1f} s, "
            f"{counted(turn.topics, 'topic')}, {counted(compiled.runs, 'run')} into "
            f"{counted(compiled.journals, 'journal')}, {counted(compiled.events, 'event')}, "
            f"{counted(compiled.amendments, 'amendment')}"
        )
        if turn.erased:
            text += f", {counted(turn.erased, 'event')} erased from archives"
        if turn.swept is not None:
            text += f", {turn.swept.objects_deleted} objects swept"
        if not turn.finished:
            text += "; to be gone on with"
        self._output.say(text)
        for each in turn.troubles:
            where = f"{each.topic}: " if each.topic else ""
            echo_aside(f"error: {where}{' '.join(str(each.error).split())}")

    def _write_metrics(self) -> None:
        if self._file is not None:
            write_metrics_file(self._file, self._metrics.text())
