"""``tidelog journals``, ``compile`` and ``scribe``: lists journals and makes them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from tidelog.api.run_metrics import check_metrics_file, write_metrics_file
from tidelog.cli.output import (
    FAILED,
    Output,
    Size,
    counted,
    echo_aside,
    json_option,
    progress_bar,
    to_seconds,
)
from tidelog.cli.pipeline_options import (
    spark_conf,
    task_options,
    tasks_of,
)
from tidelog.cli.terminal import Interruption, open_home
from tidelog.errors import InvalidError, TidelogError
from tidelog.home import Home
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import JournalEntry
from tidelog.journal.scribe import Rate, ScribeMetrics, ScribeOptions, Turn
from tidelog.model import defaults
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms

__all__ = ["journals", "policy_of", "policy_options"]

_COLUMNS = ("partition", "base", "end", "events", "first", "last", "format", "amended", "object")

start_option = click.option(
    "--start", "--from", "start", metavar="T", help="The first time: ISO 8601, or -2h."
)
end_option = click.option(
    "--end", metavar="T", help="The time to stop before. [default: the newest event]"
)


@click.command()
@click.argument("topic")
@start_option
@end_option
@click.option(
    "--presign",
    metavar="DURATION",
    help="Add URLs that work without credentials for this long, such as 1h.",
)
@json_option
@click.pass_obj
def journals(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """List the objects that hold a topic's events, with URLs.

    Other programs can read them. A journal is a Parquet object. Before it is compiled, a run is a
    part of an Arrow file: put the bytes `schema` of the object in front of those from `byte_start`
    to `byte_end`, and read an Arrow stream. Leave out the offsets in `deleted`; those in `updated`
    have another value now.

    \b
    Examples:
      tidelog journals orders
      tidelog journals orders --start -1d --presign 1h --json
    """
    with open_home(home_text) as home:
        _list(home, output, topic, given)


def _list(home: Home, output: Output, topic: str, given: dict[str, Any]) -> None:
    found = home.journals(topic, given["start"], given["end"], presign=given["presign"])
    if output.as_json:
        output.records((), (msgspec.to_builtins(each) for each in found))
        return
    columns = (*_COLUMNS, "url") if given["presign"] is not None else _COLUMNS
    output.records(columns, list(map(_row, found)), "There are no journals yet: `tidelog compile`.")


def _row(entry: JournalEntry) -> dict[str, Any]:
    amended = len(entry.deleted) + len(entry.updated)
    times = {"first": to_seconds(entry.first), "last": to_seconds(entry.last)}
    return {**msgspec.to_builtins(entry), **times, "amended": amended or None}


F = TypeVar("F", bound=Callable[..., Any])

_NEVER = 1 << 62  # events or bytes

_OPTIONS = (
    click.option(
        "--min-events",
        type=click.IntRange(min=1),
        metavar="N",
        help="Skip a partition while fewer events than this wait in it.",
    ),
    click.option(
        "--min-bytes",
        type=Size(1),
        metavar="SIZE",
        help="Skip a partition while fewer bytes than this wait in it, such as 1000000 or 64MB.",
    ),
    click.option(
        "--older-than",
        metavar="D",
        help="Skip a partition while its waiting events are younger than this, such as 1h.",
    ),
    click.option(
        "--amended",
        is_flag=True,
        help="Apply every update, delete and trim now instead of in bulk.",
    ),
)


def policy_options(command: F) -> F:
    """When something is compiled."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def policy_of(given: dict[str, Any], otherwise: CompilePolicy) -> CompilePolicy:
    """The policy that the options ask for; where none is given, another one's values."""
    amendments = 1 if given["amended"] else otherwise.min_amendments
    trimmed = 1 if given["amended"] else otherwise.min_trimmed
    wanted = [given["min_events"], given["min_bytes"], given["older_than"]]
    if all(each is None for each in wanted):
        return CompilePolicy(
            min_events=otherwise.min_events,
            min_bytes=otherwise.min_bytes,
            older_than_ms=otherwise.older_than_ms,
            min_amendments=amendments,
            min_trimmed=trimmed,
        )
    return CompilePolicy(
        min_events=given["min_events"] or _NEVER,
        min_bytes=given["min_bytes"] or _NEVER,
        older_than_ms=None if wanted[2] is None else duration_ms(wanted[2]),
        min_amendments=amendments,
        min_trimmed=trimmed,
    )


@click.command("compile")
@click.argument("topic", required=False)
@click.option("--all", "is_all", is_flag=True, help="Compile all topics.")
@policy_options
@task_options
@json_option
@click.pass_obj
def compile_(
    home_text: str | None, output: Output, /, topic: str | None, is_all: bool, **given: Any
) -> None:
    """Compact a topic into journals, with updates and deletes applied.

    Journals are fewer and larger objects. Offsets do not change, and readers continue undisturbed.
    By default it compiles all waiting runs. It compiles a journal again once it has 1,000
    amendments or several small neighbors, or once an amendment has waited for a day; it prints how
    many still wait. To finish an erasure, use --amended, then `tidelog sweep`. Safe to kill and to
    repeat. Exit code 1 if another process is compiling the same partition.

    \b
    Examples:
      tidelog compile orders
      tidelog compile --all --min-events 100000 --older-than 1h
      tidelog compile orders --amended
      tidelog compile --all --master spark://host:7077
    """
    if (topic is None) != is_all:
        only = "only one of them" if is_all else "one of them"
        raise InvalidError(f"compile: a topic or --all: give {only}")
    policy = policy_of(given, CompilePolicy(min_events=1))
    tasks = tasks_of(given)
    with open_home(home_text) as home, Interruption(follows=False) as interruption:
        topics = None if topic is None else [topic]
        count = sum(each.state == "ready" for each in home.topics()) if topic is None else 1

        with progress_bar("compile", lambda: home.compile_bytes(topics, policy)) as advance:
            report = home.compile_all(
                topics,
                policy,
                **tasks,
                go_on=lambda: not interruption.is_set(),
                on_swap=lambda swapped: advance(swapped.bytes_before),
            )
        waiting = home.amendments_waiting(topics)
        values = {"topics": count, **asdict(report), "amendments_waiting": waiting}
        output.record(values, always=("topics", "journals", "events"))
        if waiting:
            what = "--all" if topic is None else topic
            output.say(
                f"{counted(waiting, 'update or delete', 'updates and deletes')} not applied yet: "
                f"few wait for more, a day at most; `tidelog compile {what} --amended` applies all"
            )
    if not report.is_clean:
        sys.exit(FAILED)


@click.command()
@click.option(
    "--every",
    default=defaults.SCRIBE_EVERY,
    show_default=True,
    metavar="N",
    help="The time between two turns.",
)
@click.option(
    "--discard-older",
    default=defaults.SCRIBE_DISCARD,
    show_default=True,
    metavar="M",
    help="Drop turns that have waited this long.",
)
@click.option(
    "--budget",
    default=defaults.SCRIBE_BUDGET,
    show_default=True,
    metavar="D",
    help="The time limit of one turn.",
)
@click.option(
    "--max-amendments",
    type=click.IntRange(min=1),
    metavar="N",
    help="End a turn after the journal that brings the applied amendments to N.",
)
@click.option("--once", is_flag=True, help="Run one turn and stop, for cron.")
@policy_options
@click.option(
    "--grace",
    default=defaults.SWEEP_GRACE,
    show_default=True,
    metavar="D",
    help="Sweep only objects older than this.",
)
@click.option(
    "--sweep-every",
    default=defaults.SWEEP_EVERY,
    show_default=True,
    metavar="D",
    help="The time between two sweeps.",
)
@click.option("--no-sweep", is_flag=True, help="Do not sweep.")
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep Prometheus metrics in this file, for a textfile collector.",
)
@task_options
@json_option
@click.pass_obj
def scribe(home_text: str | None, output: Output, /, once: bool, **given: Any) -> None:
    """Compile, apply amendments and sweep in the background.

    Covers all topics and their archives. One scribe works at a time; others wait as standbys. A
    turn is due every N minutes; turns that have waited longer than M are dropped, so at most M/N
    wait. A turn that runs out of time resumes in the next one. Ctrl-C and SIGTERM let the swap
    under way finish. With --once the exit code is 1 if anything fails in the turn (`errors` is not
    empty), if its sweep refuses a topic, if it runs out of time, or if another scribe is at work.

    \b
    Examples:
      tidelog scribe
      tidelog scribe --every 1m --discard-older 10m --budget 30s --json
      tidelog scribe --once --amended --grace 0s
      tidelog scribe --master spark://host:7077
    """
    grace_ms = None if given["no_sweep"] else duration_ms(given["grace"])
    how = ScribeOptions(
        rate=Rate(duration_ms(given["every"]), duration_ms(given["discard_older"])),
        policy=policy_of(given, CompilePolicy()),
        budget_ms=duration_ms(given["budget"]),
        grace_ms=grace_ms,
        sweep_every_ms=0 if once else duration_ms(given["sweep_every"]),
        max_amendments=given["max_amendments"],
    )
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=not once):
        context = _Log(home, output, given["metrics_file"])
        conf = spark_conf(given["confs"])
        tasks = home.spark_tasks(given["master"], conf) if given["master"] else None
        worker = home.scribe(how, stop.is_set, tasks)
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
        if file is not None:
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
        """Reports a turn that has ended."""
        self._metrics.add(turn)
        self._show(turn)
        self._write_metrics()

    def error(self, error: TidelogError) -> None:
        """Reports an error that may be gone in the next turn."""
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
            text += "; can be resumed"
        self._output.say(text)
        for each in turn.troubles:
            where = f"{each.topic}: " if each.topic else ""
            echo_aside(f"error: {where}{' '.join(str(each.error).split())}")

    def _write_metrics(self) -> None:
        if self._file is not None:
            write_metrics_file(self._file, self._metrics.text())
