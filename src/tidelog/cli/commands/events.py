"""``tidelog produce``, ``consume``, ``peek``, ``tail`` and ``consumer``: events in and out.

``tidelog produce``: lines of a file or a pipe become events. ``tidelog consume``: a member of a
named consumer that prints events, or hands them on. ``tidelog peek`` and ``tidelog tail``: a look
at the newest events without a consumer. ``tidelog consumer``: listing, moving and deleting
consumers.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO

import click

from tidelog.api.append_lines import LineCounts
from tidelog.api.consumers import ConsumerHandle, DrainOptions, LostOffsets
from tidelog.api.input_lines import input_size
from tidelog.cli.output import (
    CommandGroup,
    Output,
    TimeLastCommand,
    counted,
    echo_aside,
    json_option,
    progress_bar,
    utf8,
    write_out,
)
from tidelog.cli.terminal import Interruption, ask_first, open_home, yes_option
from tidelog.codec.event_json import event_lines
from tidelog.errors import FailedError, InvalidError
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.seek import CursorMove
from tidelog.log.status import Lag
from tidelog.model.event import Event

__all__ = [
    "NO_CONSUMERS",
    "consume",
    "consumer",
    "owned",
    "peek",
    "produce",
    "tail",
]


@click.command()
@click.argument("topic")
@click.argument("file", default="-", metavar="[FILE|-]")
@click.option(
    "--format",
    type=click.Choice(["lines", "json", "csv", "events"]),
    default="lines",
    show_default=True,
    help="lines: each line is a value. json: each line must be a JSON object. csv: the first line "
    "names the fields, and each row becomes a JSON object of texts. events: the output of "
    "`tidelog consume --json`.",
)
@click.option("--key-field", default="", metavar="F", help="The JSON or CSV field with the key.")
@click.option("--id-field", default="", metavar="F", help="The JSON or CSV field with the id.")
@click.option("--type-field", default="", metavar="F", help="The JSON or CSV field with the type.")
@click.option(
    "--time-field",
    default="",
    metavar="F",
    help="The JSON or CSV field with the time: ISO 8601, or a number since 1970 in seconds, "
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
    If the first line ends with CR and LF, as Windows writes it, no line keeps its CR. Ctrl-C
    finishes the current batch first.

    \b
    Examples:
      tidelog produce orders orders.txt
      tail -f app.log | tidelog produce logs
      tidelog produce clicks clicks.jsonl --format json --key-field user.id --time-field at
      tidelog produce customers customers.csv --format csv --key-field id
      tidelog produce logs app.log --name app.log
      tidelog produce orders new.jsonl --format json --id-field order --if-absent
      tidelog consume orders --name copy --json | tidelog produce copies --format events
    """
    is_named = given["name"] is not None
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(open_home(home_text))
        source = stack.enter_context(_opened(file))
        stop = stack.enter_context(Interruption(follows=False))
        following = _ProduceProgress()
        given |= {"stopped": stop.is_set, "progress": following.update}
        try:
            with progress_bar(f"produce {topic}", partial(input_size, source)) as advance:
                following.advance = advance
                counts = home.append_lines(topic, source, **given)
        finally:
            if following.counts is not None:
                _show(following.counts, output, is_named)
        if counts.unended is not None:
            echo_aside(
                f"line {counts.unended}: has no newline yet: it is stored once it has one, "
                f"when you produce the input again under the name `{given['name']}`",
            )
        if stop.is_set():
            echo_aside(f"interrupted: {counts.stored()}")


_RATE_MIN = 10_000  # events: with fewer, the rate is that of the first commit


class _ProduceProgress:
    """Passes progress on to a bar, and keeps the counts for an append that fails."""

    def __init__(self) -> None:
        self.advance: Callable[[int], None] = lambda _: None
        self.counts: LineCounts | None = None
        self._shown = 0

    def update(self, counts: LineCounts) -> None:
        self.counts = counts
        self.advance(counts.read_bytes - self._shown)
        self._shown = counts.read_bytes


def _show(counts: LineCounts, output: Output, named: bool) -> None:
    rate = round(counts.events / counts.seconds) if counts.seconds else 0
    values: dict[str, Any] = {"topic": counts.topic, "events": counts.events}
    if named:
        values["repeated"] = counts.repeated
    values["seconds"] = round(counts.seconds, 3)
    if output.as_json or counts.events >= _RATE_MIN:
        values["events_per_s"] = rate
    ends = sorted(counts.ends.items())
    if output.as_json:
        values["ends"] = [{"partition": partition, "end": end} for partition, end in ends]
    else:
        values["ends"] = ", ".join(f"{counts.topic}/{p}: {end}" for p, end in ends)
    output.record(values, always=values.keys() - {"ends"})


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


Emit = Callable[[list[Event]], None]
"""Hands events on; they are out of our hands when it returns."""
NO_CONSUMERS = "There are no consumers yet: `tidelog consume TOPIC --name NAME` creates one."


@click.command()
@click.argument("topic")
@click.option(
    "--name",
    type=utf8,
    required=True,
    metavar="C",
    help="The consumer's name. Its cursor is stored under it.",
)
@click.option(
    "--from",
    "--start",
    "start",
    metavar="START",
    help="Where a new consumer begins: earliest, latest, an offset, or a time (ISO 8601, or "
    "-15m). A consumer with a cursor resumes there. [default: earliest]",
)
@click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@click.option("--follow", is_flag=True, help="Wait for more events until Ctrl-C or SIGTERM.")
@click.option(
    "--exec",
    "command",
    metavar="CMD",
    help="Run CMD in a shell for each batch, with the events as JSON lines on its standard input. "
    "If CMD fails, the batch is not committed and the command stops.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=1_000,
    show_default=True,
    metavar="N",
    help="The largest number of events between two commits.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Skip events that were trimmed before they were read.",
)
@json_option
@click.pass_obj
def consume(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """Read the events of a topic as a named consumer.

    Prints each value on a line, or with --json each event.

    Events are committed after they are printed and flushed: after a crash the last ones may come
    again, and none is missing. Without --follow it stops at the end of the topic. Members that run
    at the same time under one name share the partitions. Use --json where values may hold newlines,
    or are null (an empty line without it). To see the first few, give --max: events that `head`
    cuts off count as read.

    \b
    Examples:
      tidelog consume orders --name billing
      tidelog consume orders --name audit --from -15m --json
      tidelog consume orders --name mailer --follow --exec ./send-mails
    """
    emit: Emit = _print_events if output.as_json else _print_values
    if given["command"] is not None:
        emit = functools.partial(_run_command, given["command"])
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=given["follow"]):
        how = DrainOptions(
            follow=given["follow"],
            max_events=given["most"],
            max_batch=given["max_batch"],
            accept_loss=given["accept_loss"],
            stop=stop,
            on_open=_tell_cursors if given["start"] is not None else lambda _: None,
            on_loss=_tell_loss,
        )
        events = home.consumers(topic).drain(given["name"], emit, given["start"] or "earliest", how)
        if sys.stderr.isatty():
            echo_aside(counted(events, "event"))


def _tell_cursors(consumer: Consumer) -> None:
    """Say so where a start was given to a consumer that has one already."""
    if any(each.cursor is not None for each in consumer.lag()):
        echo_aside(
            f"consumer `{consumer.name}` has a cursor and resumes there: --from is "
            "for a new consumer",
        )


def _tell_loss(lost: LostOffsets) -> None:
    echo_aside(
        f"accepted: offsets {lost.cursor} to {lost.start} of partition {lost.partition} are lost",
    )


def _print_values(events: list[Event]) -> None:
    write_out(b"".join([(event.value or b"") + b"\n" for event in events]))


def _print_events(events: list[Event]) -> None:
    write_out(event_lines(events))


def _run_command(command: str, events: list[Event]) -> None:
    """Run a shell command over a batch. ``FailedError`` unless it ends with 0."""
    done = subprocess.run(  # noqa: S602 - a shell is what was asked for
        command, shell=True, input=event_lines(events), check=False
    )
    if done.returncode == 0:
        return
    ended = f"exit code {done.returncode}"
    if done.returncode < 0:
        ended = f"signal {-done.returncode}"
    ranges = ", ".join(_range(list(each)) for _, each in groupby(events, lambda e: e.partition))
    raise FailedError(
        f"command `{command}`: ended with {ended} on {counted(len(events), 'event')}, {ranges}: "
        "they are not committed, and come again: fix it, and consume again",
        exit_code=done.returncode,
        events=len(events),
    )


def _range(events: list[Event]) -> str:
    """Returns the offsets of consecutive events, in words."""
    first, last = events[0].position, events[-1].position
    return f"`{first.topic}/{first.partition}` offsets {first.offset} to {last.offset + 1}"


@click.command()
@click.argument("topic")
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="The number of events.",
)
@json_option
@click.pass_obj
def peek(home_text: str | None, output: Output, /, topic: str, most: int) -> None:
    """Print the newest events of a topic, by time.

    Leaves no consumer behind.

    \b
    Examples:
      tidelog peek orders
      tidelog peek orders --max 100 --json
    """
    with open_home(home_text) as home:
        (_print_events if output.as_json else _print_values)(home.peek(topic, most))


@click.command()
@click.argument("topic")
@json_option
@click.pass_obj
def tail(home_text: str | None, output: Output, /, topic: str) -> None:
    """Print events as they are appended, until Ctrl-C.

    Leaves no consumer behind: events that are appended while it does not run are not printed.

    \b
    Examples:
      tidelog tail orders
      tidelog tail orders --json
    """
    emit = _print_events if output.as_json else _print_values
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=True):
        if sys.stderr.isatty():
            echo_aside(f"Waiting for new events of `{home.topic(topic).name}`. Ctrl-C ends it.")
        for event in home.tail(topic, stop=stop):
            emit([event])


@click.group(cls=CommandGroup)
def consumer() -> None:
    """List, show, move and delete consumers.

    \b
    Examples:
      tidelog consumer list orders
      tidelog consumer seek orders billing -1h
      tidelog consumer delete orders billing
    """


@consumer.command("list")
@click.argument("topic", required=False)
@json_option
@click.pass_obj
def list_(home_text: str | None, output: Output, /, topic: str | None) -> None:
    """List the consumers of a topic, or of all topics.

    \b
    Examples:
      tidelog consumer list
      tidelog consumer list orders --json
    """
    with open_home(home_text) as home:
        names = [each.name for each in home.topics()] if topic is None else [topic]
        rows = [
            {"topic": name, "consumer": each.name, "lag": each.behind()}
            for name in names
            for each in home.consumers(name)
        ]
        output.records(("topic", "consumer", "lag"), rows, NO_CONSUMERS)


def owned(consumer: ConsumerHandle, output: Output) -> Iterator[tuple[Lag, str | None]]:
    """Yields the lag of each partition with its owner: the process, or in JSON the member's id."""
    lags = consumer.lag()
    names: dict[str, str] = {}
    if not output.as_json and any(each.owner for each in lags):
        names = {each.id: each.process for each in consumer.members()}
    for each in lags:
        yield each, names.get(each.owner) or each.owner or None


@consumer.command()
@click.argument("topic")
@click.argument("name", type=utf8)
@json_option
@click.pass_obj
def show(home_text: str | None, output: Output, /, topic: str, name: str) -> None:
    """Show the cursor, the lag and the owner of each partition.

    \b
    Examples:
      tidelog consumer show orders billing
    """
    with open_home(home_text) as home:
        rows = [
            {
                "partition": each.partition,
                "cursor": each.cursor,
                "end": each.end,
                "lag": each.events,
                "owner": owner,
            }
            for each, owner in owned(home.consumers(topic).get(name), output)
        ]
        output.records(("partition", "cursor", "end", "lag", "owner"), rows)


@consumer.command(cls=TimeLastCommand)
@click.argument("topic")
@click.argument("name", type=utf8)
@click.argument("to", type=utf8)
@click.option(
    "--partition",
    type=click.IntRange(min=0),
    metavar="P",
    help="Move the cursor of this partition only. [default: all]",
)
@yes_option
@json_option
@click.pass_obj
def seek(home_text: str | None, output: Output, /, topic: str, name: str, **given: Any) -> None:
    """Move the cursors of a consumer.

    TO is earliest, latest, an offset, or a time: ISO 8601, or -15m. Members that run continue from
    there. Asks first on a terminal. In scripts, pass --yes.

    \b
    Examples:
      tidelog consumer seek orders billing earliest
      tidelog consumer seek orders billing --partition 0 4711 --yes
      tidelog consumer seek orders billing -15m
    """
    with open_home(home_text) as home:
        found = home.consumers(topic).get(name)
        if not given["yes"]:
            wanted = given["partition"]
            each = range(found.topic.partitions) if wanted is None else [wanted]
            plan = [found.plan_seek(given["to"], partition) for partition in each]
            question = f"Move consumer `{name}` of `{topic}` to {given['to']}? {_effect(plan)}"
            ask_first(f"consumer `{name}` of `{topic}`", question, False, "moving")
        rows = [
            {
                "partition": move.partition,
                "from": move.cursor,
                "to": move.to,
                "skipped": move.skipped,
                "again": move.again,
            }
            for move in found.seek(given["to"], given["partition"])
        ]
        output.records(("partition", "from", "to", "skipped", "again"), rows)


def _effect(plan: list[CursorMove]) -> str:
    """Returns what a seek skips and repeats, in a sentence."""
    skipped, again = sum(each.skipped for each in plan), sum(each.again for each in plan)
    parts = [f"skips {counted(skipped, 'event')}"] if skipped else []
    parts += [f"delivers {counted(again, 'event')} again"] if again else []
    return f"It {' and '.join(parts)}." if parts else "It changes nothing."


@consumer.command()
@click.argument("topic")
@click.argument("name", type=utf8)
@click.option(
    "--force",
    is_flag=True,
    help="Delete it even if a member is alive. That member begins again as a new consumer.",
)
@yes_option
@json_option
@click.pass_obj
def delete(
    home_text: str | None, output: Output, /, topic: str, name: str, force: bool, yes: bool
) -> None:
    """Delete a consumer with its cursors. Its topic keeps all events.

    Trims and topic deletes wait for every consumer, even for one that never comes back. Asks first
    on a terminal. In scripts, pass --yes.

    Refuses while a member is alive. Where one may be alive on another machine, it watches for a
    sign of life for 15 seconds (1.5 times lease_ttl_ms).

    \b
    Examples:
      tidelog consumer delete orders billing
      tidelog consumer delete orders billing --yes --force
    """
    with open_home(home_text) as home:
        found = home.consumers(topic).get(name, deleting=True)
        lag = found.behind()
        told = f"{counted(lag, 'event')} of `{topic}`" if lag else f"all events of `{topic}`"
        has = "has not read" if lag else "has read"
        question = f"Delete consumer `{name}`, which {has} {told}?"
        if not yes:
            found.delete(force=force, dry_run=True)
        ask_first(f"consumer `{name}` of `{topic}`", question, yes)
        found.delete(force=force)
        output.say(f"Deleted consumer `{name}` of `{topic}`.")
        if output.as_json:
            output.record({"topic": topic, "name": name, "deleted": True})
