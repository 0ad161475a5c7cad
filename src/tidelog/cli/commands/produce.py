"""``tidelog produce``: lines of a file or a pipe become events."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import click

from tidelog.cli.append_lines import LineAppender, LineCounts, LinesReader, Parse, storing
from tidelog.cli.output import FailedError, Output, json_option, progress_bar
from tidelog.cli.terminal import Interruption
from tidelog.codec.event_json import event_of_line
from tidelog.codec.fields import FieldPaths, JsonLines
from tidelog.errors import InvalidError, TidelogError
from tidelog.home import Home, open_home
from tidelog.model.event import Event

__all__ = ["produce"]

_LINGER_LEAST_S = 0.05  # what a pipe gives within this time travels together
_LINE_FACTOR = 8  # an event as JSON may be so many times as long as the event


@click.command()
@click.argument("topic")
@click.argument("file", default="-", metavar="[FILE|-]")
@click.option(
    "--format",
    type=click.Choice(["lines", "json", "events"]),
    default="lines",
    show_default=True,
    help="lines: each line is a value. json: each line must be a JSON object. events: the output "
    "of `tidelog consume --json`.",
)
@click.option("--key-field", default="", metavar="F", help="The JSON field with the key.")
@click.option("--id-field", default="", metavar="F", help="The JSON field with the id.")
@click.option("--type-field", default="", metavar="F", help="The JSON field with the type.")
@click.option(
    "--time-field",
    default="",
    metavar="F",
    help="The JSON field with the time: ISO 8601, or a number since 1970 in seconds, "
    "milliseconds, microseconds or nanoseconds.",
)
@click.option(
    "--name",
    metavar="N",
    help="Produce under this name and count lines. The same input again, or a longer one, adds "
    "only the lines that are not stored yet. A last line without a newline waits for it. "
    "Another input under the same name is refused.",
)
@click.option(
    "--if-absent",
    is_flag=True,
    help="Refuse events whose ids the topic already has. Events go to the partitions of their ids.",
)
@json_option
@click.pass_obj
def produce(home_text: str | None, output: Output, /, topic: str, file: str, **given: Any) -> None:
    """Append the lines of a file or of standard input as events.

    A field may be nested (user.id), or be a JSON pointer (/user.id, for a name with a dot).
    An invalid line stops the command with its number; the lines before it are stored and counted.
    Ctrl-C finishes the current batch first.

    \b
    Examples:
      tidelog produce orders orders.txt
      tail -f app.log | tidelog produce logs
      tidelog produce clicks clicks.jsonl --format json --key-field user.id --time-field at
      tidelog produce logs app.log --name app.log
      tidelog produce orders new.jsonl --format json --id-field order --if-absent
      tidelog consume orders --name copy --json | tidelog produce copies --format events
    """
    name, if_absent = given.pop("name"), given.pop("if_absent")
    if if_absent and name is not None:
        raise InvalidError("produce: --if-absent goes by ids, --name by lines: give one of them")
    parse = _parser(given.pop("format"), given)
    if if_absent and parse is None:
        raise InvalidError("produce: plain lines have no ids: give --format json --id-field F")
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(open_home(home_text))
        source = stack.enter_context(_opened(file))
        into = stack.enter_context(storing(home, topic, name, parse, if_absent))
        stop = stack.enter_context(Interruption(follows=False))
        bytes_max = home.context.settings.event_bytes_max * _LINE_FACTOR
        reader = LinesReader(source, home.context.clock, stop.is_set, bytes_max)
        started_s = home.context.clock.monotonic_s()
        tally = LineCounts(topic)
        try:
            with progress_bar(f"produce {topic}", reader.size) as advance:
                _pump(home, (reader, name is not None), into, tally, advance)
        finally:
            tally.seconds = home.context.clock.monotonic_s() - started_s
            _show(tally, output, name is not None)
        if reader.unended is not None:
            click.echo(
                f"line {reader.unended}: has no newline yet: it is stored once it has one, "
                f"when you produce the input again under the name `{name}`",
                err=True,
            )
        if stop.is_set():
            click.echo(f"interrupted: {tally.stored()}", err=True)


def _pump(
    home: Home,
    source: tuple[LinesReader, bool],
    into: LineAppender,
    tally: LineCounts,
    advance: Callable[[int], None],
) -> None:
    """Store all lines of a reader; under a name, only those that have their newline."""
    reader, is_named = source
    linger_s = max(_LINGER_LEAST_S, home.context.settings.linger_ms / 1000)
    shown = count = 0
    try:
        for lines in reader.batches(linger_s, only_ended=is_named):
            into.store(lines, tally)
            count = lines.first + len(lines.lines) - 1
            advance(reader.read_bytes - shown)
            shown = reader.read_bytes
        if reader.has_ended:
            into.finish(count)
    except FailedError as exc:
        if "events" in exc.context:
            raise
        raise FailedError(f"{exc}: {tally.stored()}", **exc.context, events=tally.events) from exc
    except TidelogError as exc:
        if not tally.events:
            raise
        raise FailedError(f"{tally.stored()}, then: {exc}", events=tally.events) from exc


def _show(tally: LineCounts, output: Output, named: bool) -> None:
    rate = round(tally.events / tally.seconds) if tally.seconds else 0
    values: dict[str, Any] = {"topic": tally.topic, "events": tally.events}
    if named:
        values["repeated"] = tally.repeated
    values |= {"seconds": round(tally.seconds, 3), "events_per_s": rate}
    ends = sorted(tally.ends.items())
    if output.as_json:
        values["ends"] = [{"partition": partition, "end": end} for partition, end in ends]
    else:
        values["ends"] = ", ".join(f"{tally.topic}/{p}: {end}" for p, end in ends) or None
    output.record(values)


def _parser(format: str, given: dict[str, str]) -> Parse | None:
    """What makes events of lines; None where a line is the value as it is."""
    names = ("key_field", "id_field", "type_field", "time_field")
    fields = FieldPaths(*(given[name] for name in names))
    if fields.given() and format != "json":
        raise InvalidError(
            f"produce: lines of format {format} have no fields: give --format json too"
        )
    if format == "lines":
        return None
    return _events_of_lines if format == "events" else JsonLines(fields).events


def _events_of_lines(lines: Sequence[bytes]) -> list[Event | InvalidError]:
    return [_event_of_line(line) for line in lines]


def _event_of_line(line: bytes) -> Event | InvalidError:
    try:
        return event_of_line(line)
    except InvalidError as exc:
        return exc


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        source = open(file, "rb")  # noqa: SIM115 - closed below
    except OSError as exc:
        raise InvalidError(f"file `{file}`: cannot be read: {exc.strerror}: fix its path") from exc
    with source:
        yield source
