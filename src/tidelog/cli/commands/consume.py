"""``tidelog consume``: a member of a named consumer that prints events, or hands them on."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import click

from tidelog.cli.interruption import Interruption
from tidelog.cli.output import FailedError, Output, counted, json_option, write_out
from tidelog.cli.text import utf8
from tidelog.codec.event_json import event_lines
from tidelog.errors import FencedError, NotFoundError
from tidelog.home import Home, open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Start
from tidelog.model.event import Event
from tidelog.model.times import moment_ms

__all__ = ["consume"]

_WAIT_S = 0.5  # how soon a signal is seen while nothing comes
_PATIENCE = 1.5  # times to live of a lease, after which a dead member's is taken over

Emit = Callable[[list[Event]], None]
"""Hands events on; they are out of our hands when it returns."""


@click.command()
@click.argument("topic")
@click.option(
    "--name", type=utf8, required=True, metavar="C", help="The consumer; its cursor is kept."
)
@click.option(
    "--from",
    "--start",
    "start",
    metavar="START",
    help="Where a new consumer begins: earliest (the default), latest, an offset, or a time "
    "(ISO 8601, or -15m). One that has read before goes on at its cursor.",
)
@click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option("--follow", is_flag=True, help="Wait for more, until Ctrl-C or SIGTERM.")
@click.option(
    "--exec",
    "command",
    metavar="CMD",
    help="Run CMD in a shell for each batch, with the events as JSON lines on its standard "
    "input. If it fails, the batch is not committed, and consuming ends.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=1_000,
    show_default=True,
    metavar="N",
    help="At most so many events are printed, or handed to CMD, between two commits.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Where events were trimmed before they were read, go on with what is left.",
)
@json_option
@click.pass_obj
def consume(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """Read events as a consumer: each value on a line, or with --json each event.

    What was printed is committed after it was flushed, so after a crash the last events may come
    again, and none is missing. Without --follow it ends when all that is there was read. Members
    that run at the same time under one name share the partitions. Use --json where values may hold
    newlines, or are null (an empty line without it). To see the first few, give --max: events that
    `head` cuts off count as read.

    \b
    Examples:
      tidelog consume orders --name billing
      tidelog consume orders --name audit --from -15m --json
      tidelog consume orders --name mailer --follow --exec ./send-mails
    """
    options = _ConsumeOptions(topic, **given)
    emit: Emit = _print_events if output.as_json else _print_values
    if options.command is not None:
        emit = functools.partial(_run_command, options.command)
    with open_home(home_text) as home, Interruption(follows=options.follow) as stop:
        reading = _ConsumeRun(home, options, emit, stop)
        reading.run()
        if sys.stderr.isatty():
            click.echo(counted(reading.events, "event"), err=True)


@dataclass(frozen=True, slots=True)
class _ConsumeOptions:
    """What was asked for."""

    topic: str
    name: str
    start: str | None
    most: int | None
    follow: bool
    command: str | None
    max_batch: int
    accept_loss: bool


class _ConsumeRun:
    """One run of the command: reads, hands on, commits."""

    def __init__(
        self, home: Home, options: _ConsumeOptions, emit: Emit, stop: Interruption
    ) -> None:
        self._home = home
        self._options = options
        self._emit = emit
        self._stop = stop
        self._start = _start_of(options.start or "earliest", home.context.clock.now_ms())
        self.events = 0  # handed on so far

    def run(self) -> None:
        """Until all is read, or as much as was asked for, or a signal comes."""
        lost: NotFoundError | None = None
        while True:
            # After a loss a new member joins: it stands at its cursors in all partitions.
            with self._member() as consumer:
                if lost is None and self._options.start is not None:
                    _tell_cursors(consumer)
                try:
                    if lost is not None:
                        _accept(consumer, lost)
                    self._drain(consumer)
                    return
                except NotFoundError as exc:
                    if not self._options.accept_loss or "cursor" not in exc.context:
                        raise
                    lost = exc

    def _member(self) -> Consumer:
        return self._home.consumer(self._options.topic, self._options.name, self._start)

    def _drain(self, consumer: Consumer) -> None:
        joined_s = self._home.context.clock.monotonic_s()
        wait_s = _WAIT_S if self._options.follow else 0.0
        is_last_look = False  # one more after all patience, as this process may have stalled
        while not self._stop.is_set() and self.events != self._options.most:
            events = consumer.poll(self._room(), wait_s)
            if events:
                self._emit(events)
                # A partition that another member has now is read again by that one.
                with contextlib.suppress(FencedError):
                    consumer.commit()
                self.events += len(events)
                is_last_look = False
            elif not self._options.follow:
                behind = {each.partition for each in consumer.lag() if each.events}
                if not behind or (is_last_look and behind.isdisjoint(consumer.partitions())):
                    return
                waited_s = self._home.context.clock.monotonic_s() - joined_s
                is_last_look = (
                    waited_s > _PATIENCE * self._home.context.settings.lease_ttl_ms / 1000
                )
                wait_s = _WAIT_S

    def _room(self) -> int:
        if self._options.most is None:
            return self._options.max_batch
        return min(self._options.max_batch, self._options.most - self.events)


def _tell_cursors(consumer: Consumer) -> None:
    """Say so where a start was given to a consumer that has one already."""
    if any(each.cursor is not None for each in consumer.lag()):
        click.echo(
            f"consumer `{consumer.name}` has read before and goes on at its cursor: "
            "--from is for a new one",
            err=True,
        )


def _accept(consumer: Consumer, lost: NotFoundError) -> None:
    partition, cursor, start = (lost.context[name] for name in ("partition", "cursor", "start"))
    if (consumer.lag()[partition].cursor or 0) >= start:
        return  # another member has accepted it since, and read on: its cursor stays
    consumer.seek(partition, start)
    consumer.commit()
    click.echo(f"accepted: offsets {cursor} to {start} of partition {partition} are lost", err=True)


def _start_of(text: str, now_ms: int) -> Start:
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdecimal():
        return int(text)
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=moment_ms(text, now_ms))


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
        "they are not committed, and come again: mend it, and consume again",
        exit_code=done.returncode,
        events=len(events),
    )


def _range(events: list[Event]) -> str:
    """Where events of one partition stand that follow one another."""
    first, last = events[0].position, events[-1].position
    return f"`{first.topic}/{first.partition}` offsets {first.offset} to {last.offset + 1}"
