"""``tidelog playback``: any range of times of a topic, to another place."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from tidelog.cli.output import (
    Output,
    TimeBar,
    counted,
    echo_aside,
    json_option,
    to_seconds,
    visible,
    write_out,
)
from tidelog.cli.pipeline_options import spark_conf
from tidelog.cli.terminal import Interruption, open_home
from tidelog.codec.event_json import batch_lines
from tidelog.connectors.sink import check_playback_sink
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.decoding import decode_json
from tidelog.model.event import check_timestamp, to_iso
from tidelog.model.playback import Pin, PlaybackState, check_playback_name
from tidelog.model.topic import Topic
from tidelog.playback.play import PlaybackResult, SlotCount, check_speed
from tidelog.playback.session import KnownPlayback

__all__ = ["playback"]

_TIME = re.compile(r"\d{4}-\d\d|-\d+[a-z]+$|now$|latest$")  # in place of a sink
_RATE_MIN = 1_000  # events: the rate of fewer says nothing
_CLOCK = slice(11, 23)  # the time of day in ISO 8601, with milliseconds
_NONE = "There are no named playbacks yet: `tidelog playback TOPIC --to SINK --resume NAME`."
_COLUMNS = ("name", "topic", "state", "events", "began", "start", "end", "sink")  # of a list


@click.command()
@click.argument("topic", required=False)
@click.option(
    "--start",
    "--from",
    "start",
    metavar="T",
    help="The first time: ISO 8601, -2h or earliest. [default: 15 minutes before the end]",
)
@click.option("--end", metavar="T", help="The time to stop before, or latest. [default: now]")
@click.option(
    "--to",
    "sink",
    metavar="SINK",
    help="The target. Without one the events are printed: their values, or with --json all of "
    "them. topic:NAME, file:PATH (JSON lines, or .parquet), stdout:, http(s)://…, "
    "kafka://host/TOPIC, kinesis://STREAM or null:.",
)
@click.option(
    "--speed",
    default="max",
    show_default=True,
    metavar="X",
    help="The speed: max, 1 for the original pace, or another factor. Pauses are kept.",
)
@click.option(
    "--resume", "name", metavar="NAME", help="Start a playback under this name, or resume it."
)
@click.option(
    "--as-of", metavar="T|P:O,…", help="Play the topic as it was at a time or at offsets."
)
@click.option("--parallel", is_flag=True, help="Play on Spark, without an order across slots.")
@click.option(
    "--master",
    metavar="URL",
    default="local[*]",
    show_default=True,
    help="The Spark master, such as local[*] or spark://host:7077.",
)
@click.option(
    "--conf",
    "confs",
    multiple=True,
    metavar="K=V",
    help="A Spark setting, NAME=VALUE. Repeatable.",
)
@click.option(
    "--params",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="A JSON file with the parameters: topic, start, end, to, speed, resume, as_of. Times are "
    "text, or milliseconds since 1970. - reads standard input. Options given here win.",
)
@click.option("--empty-slots", is_flag=True, help="Print slots without events too.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the summary.")
@click.option("--list", "listed", is_flag=True, help="List named playbacks.")
@click.option("--forget", metavar="NAME", help="Forget a named playback.")
@json_option
@click.pass_obj
def playback(home_text: str | None, output: Output, /, **given: Any) -> None:
    """Print the events of a time range, or play them elsewhere.

    Plays the last 15 minutes by default, without events that are appended after it began. Shows a
    progress bar on a terminal. In a pipe or with --empty-slots it prints a line for each slot, with
    its time, the number of events and the time of the first one.

    A playback with a name can be stopped or killed and resumed: it skips nothing, and writes
    nothing twice into a topic. A name is taken until you --forget it. Events that were played stay
    where they are.

    \b
    Examples:
      tidelog playback orders --start 2026-11-01 --end 2026-11-02
      tidelog playback orders --start earliest --json | tidelog produce copies --format events
      tidelog playback orders --to topic:orders-again
      tidelog playback orders --start -2h --end -1h --to stdout: --speed 10
      tidelog playback --params test.json
      tidelog playback orders --start 2026-11-01 --to kafka://host:9092/orders --resume november
      tidelog playback --list
      tidelog playback --forget november
    """
    listed, forgotten, topic = given.pop("listed"), given.pop("forget"), given.pop("topic")
    params = given.pop("params")
    if listed or forgotten is not None:
        wanted = params if topic is None else topic
        _refuse_more(wanted, given, both=listed and forgotten is not None)
        with open_home(home_text) as home:
            _names(home, output, forgotten)
        return
    if params is not None:
        topic = _add_params(topic, given, params)
    if topic is None:
        raise click.UsageError("Missing argument 'TOPIC'.")
    if given["sink"] is None:
        _print(home_text, output, topic, given)
        return
    options = _PlaybackOptions(**given)
    _play(home_text, topic, options, _Messages(output, options))


def _play(home_text: str | None, topic: str, options: _PlaybackOptions, how: _Messages) -> None:
    """Plays the events into a sink."""
    stop = threading.Event()
    with (
        open_home(home_text) as home,
        Interruption(stop, follows=False) as interrupt,
        contextlib.ExitStack() as bar,
    ):
        bar.enter_context(how.bar)
        clock = home.context.clock
        began_s = clock.monotonic_s()
        played = home.playback(
            topic,
            options.start,
            options.end,
            to=options.sink,
            name=options.name,
            speed=options.speed,
            as_of=options.as_of,
            empty_slots=options.empty_slots,
            spark=options.master if options.parallel else None,
            spark_conf=spark_conf(options.confs),
            stop=stop,
            on_begin=how.begins,
            on_wait=how.waits,
            on_slot=how.slot,
        )
        bar.close()
        if played.before is not None:
            how.finished(played.before)
            return
        how.summary(played, clock.monotonic_s() - began_s)
        if played.finished:
            interrupt.finished()
        else:
            how.say(_how_to_go_on(home_text, topic, options, played))


def _print(home_text: str | None, output: Output, topic: str, given: dict[str, Any]) -> None:
    """Prints the events of a time range: their values, or with ``--json`` the whole events."""
    context = click.get_current_context()
    for name in ("speed", "name", "as_of", "parallel", "confs", "empty_slots", "quiet"):
        if given[name] and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError("Missing option '--to'.")
    with open_home(home_text) as home:
        for batch in home.playback_arrow(topic, given["start"], given["end"]):
            if output.as_json:
                write_out(batch_lines(batch))
            else:
                values = batch.column("value").to_pylist()
                write_out(b"".join([(value or b"") + b"\n" for value in values]))


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    """What a file of parameters may hold."""

    topic: str | None = None
    start: str | int | None = None
    end: str | int | None = None
    to: str | None = None
    speed: str | float | None = None
    resume: str | None = None
    as_of: str | None = None


def _add_params(topic: str | None, given: dict[str, Any], path: str) -> str | None:
    """Adds what a file says and the command line does not; returns the topic."""
    try:
        found = decode_json(_read(path), _Params)
    except msgspec.MsgspecError as exc:
        names = ", ".join(_Params.__struct_fields__)
        raise InvalidError(
            f"playback: parameters in `{path}`: {exc}: give an object with {names}"
        ) from exc
    values = {
        "start": _time(found.start),
        "end": _time(found.end),
        "sink": found.to,
        "name": found.resume,
        "as_of": found.as_of,
        "speed": None if found.speed is None else str(found.speed),
    }
    context = click.get_current_context()
    for name, value in values.items():
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if value is not None and not is_given:
            given[name] = value
    return found.topic if topic is None else topic


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise InvalidError(
            f"playback: parameters in `{path}`: {exc.strerror}: give a file"
        ) from exc


def _time(value: str | int | None) -> str | None:
    return to_iso(check_timestamp(value)) if isinstance(value, int) else value


def _names(home: Home, output: Output, forgotten: str | None) -> None:
    """Forget a playback; else list all."""
    if forgotten is None:
        output.records(_COLUMNS, [_described(each) for each in home.playbacks.list()], _NONE)
    else:
        home.playbacks.forget(forgotten)
        output.record({"forgotten": forgotten})


def _described(found: KnownPlayback) -> dict[str, object]:
    pinned, state = found.pinned, found.state
    now = "finished" if state.finished_ms else "playing" if found.is_played else "stopped"
    return {
        "name": found.name,
        "topic": pinned.topic,
        "start": to_iso(pinned.pin.range.start_ms),
        "end": to_iso(pinned.pin.range.end_ms),
        "sink": pinned.sink,
        "events": state.number,
        "began": to_iso(pinned.began_ms),
        "state": now,
    }


def _refuse_more(topic: str | None, given: dict[str, Any], both: bool) -> None:
    """Raises if ``--list`` or ``--forget`` is given with anything else."""
    context = click.get_current_context()
    said = [
        name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if both or topic is not None or said:
        raise InvalidError("playback: --list and --forget take no other option: leave out the rest")


@dataclass(frozen=True, slots=True)
class _PlaybackOptions:
    """What was asked for."""

    sink: str
    start: str | None
    end: str | None
    speed: str
    name: str | None
    as_of: str | None
    parallel: bool
    master: str
    confs: tuple[str, ...]
    empty_slots: bool
    quiet: bool

    def __post_init__(self) -> None:
        check_speed(self.speed)
        if _TIME.match(self.sink):
            raise InvalidError(
                f"--to `{self.sink}`: is a time, and --to names the target: give the end of the "
                "range with --end"
            )
        check_playback_sink(self.sink, named=self.name is not None)
        if self.name is not None:
            check_playback_name(self.name)
        if self.confs and not self.parallel:
            raise InvalidError("--conf: is a setting of Spark: give --parallel too")
        if self.quiet and self.empty_slots:
            raise InvalidError("playback: --quiet and --empty-slots contradict: give one of them")
        if self.parallel and (self.name is not None or self.speed != "max" or self.empty_slots):
            raise InvalidError(
                "playback: --parallel goes as fast as it can, and cannot be resumed: leave out "
                "--resume, --speed and --empty-slots"
            )


class _Messages:
    """What is said on the way: beside the events where those go to standard output."""

    def __init__(self, output: Output, options: _PlaybackOptions) -> None:
        self._as_json = output.as_json
        self._name = options.name
        self._beside = options.sink.startswith("stdout:")
        mixed = self._beside and sys.stdout.isatty()  # events and the bar on one screen
        has_bar = sys.stderr.isatty() and not (
            mixed or output.as_json or options.quiet or options.empty_slots
        )
        self.bar = TimeBar("playback", shown=has_bar)
        self._has_lines = not options.quiet and not (has_bar and _is_seen(self._beside))
        self._is_quiet = options.quiet
        self._events = self._end_ms = 0

    def say(self, text: str) -> None:
        """A line for people."""
        if not self._as_json:
            echo_aside(text)

    def begins(self, topic: Topic, pin: Pin) -> None:
        times = pin.range
        self._end_ms = times.end_ms
        if self._is_quiet:
            return
        self._line(
            f"playback of {topic.name} from {to_iso(times.start_ms)} to {to_iso(times.end_ms)}",
            None,
        )
        self.bar.show("waiting for events")

    def waits(self) -> None:
        """Another process has it."""
        self.say(f"playback `{self._name}`: another process has it: waiting for its end")

    def finished(self, state: PlaybackState) -> None:
        """A playback that has nothing left to do."""
        name = self._name
        at = to_iso(state.finished_ms)
        self._line(
            f"playback `{name}` was finished at {at}, with {counted(state.number, 'event')}; to "
            f"play again, choose another name or run `tidelog playback --forget {name}`",
            {"playback": name, "events": state.number, "finished": True, "finished_at": at},
        )

    def slot(self, slot: SlotCount) -> None:
        """One slot, as it is done."""
        self._events += slot.events
        says = f"{to_seconds(to_iso(slot.slot_ms))}  {counted(self._events, 'event')}"
        self.bar.move(slot.slot_ms, self._end_ms, says)
        if not self._has_lines:
            return
        first = None if slot.first_ms is None else to_iso(slot.first_ms)
        text = f"{to_seconds(to_iso(slot.slot_ms))}: {counted(slot.events, 'event')}"
        if first is not None and slot.first_ms != slot.slot_ms:
            text += f", the first at {first[_CLOCK]}"
        self._line(text, {"slot": to_iso(slot.slot_ms), "first": first, "events": slot.events})

    def summary(self, played: PlaybackResult, seconds: float) -> None:
        """All of it."""
        per_s = round(played.events / seconds) if seconds > 0 else 0
        rate = f" ({per_s:,} events/s)" if played.events >= _RATE_MIN else ""
        self._line(
            ("Success: " if played.finished else "Stopped: ")
            + f"played {counted(played.events, 'event')} in {seconds:.1f} s{rate}"
            + (f", {played.left_out:,} left out as erased" if played.left_out else ""),
            {
                "events": played.events,
                "slots": played.slots,
                "left_out": played.left_out,
                "seconds": round(seconds, 3),
                "events_per_s": per_s,
                "finished": played.finished,
            },
        )

    def _line(self, text: str, record: dict[str, Any] | None) -> None:
        if not self._as_json:
            click.echo(visible(text, "\n\t"), err=self._beside)
        elif record is not None:
            click.echo(msgspec.json.encode(record), err=self._beside)


def _is_seen(beside: bool) -> bool:
    """Whether lines would be on the screen, like the bar."""
    return (sys.stderr if beside else sys.stdout).isatty()


def _how_to_go_on(
    home_text: str | None, topic: str, options: _PlaybackOptions, played: PlaybackResult
) -> str:
    """Returns what to say when it was stopped."""
    if options.name is not None:
        # The name keeps the range, the target and the progress, but not the pace.
        command = ["tidelog", *([] if home_text is None else ["--home", home_text])]
        command += ["playback", topic, "--to", options.sink, "--resume", options.name]
        command += [] if options.speed == "max" else ["--speed", options.speed]
        return f"Resume it with: {shlex.join(command)}"
    if played.last is None:
        return "It stopped waiting for events."
    return (
        f"It stopped after {to_iso(played.last.time_ms)}, partition {played.last.partition}, "
        f"offset {played.last.offset}. With --resume NAME it could resume there."
    )
