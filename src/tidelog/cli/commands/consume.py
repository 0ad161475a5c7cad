"""``tidelog consume``: a member of a named consumer that prints events, or hands them on.

``tidelog consumer``: removing a consumer that is not used any more.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any

import click

from tidelog.api.consumers import DrainOptions, LostOffsets
from tidelog.cli.output import (
    CommandGroup,
    FailedError,
    Output,
    counted,
    json_option,
    utf8,
    write_out,
)
from tidelog.cli.terminal import Interruption, ask_first, yes_option
from tidelog.codec.event_json import event_lines
from tidelog.home import open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.event import Event

__all__ = ["consume", "consumer"]

Emit = Callable[[list[Event]], None]
"""Hands events on; they are out of our hands when it returns."""


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
            click.echo(counted(events, "event"), err=True)


def _tell_cursors(consumer: Consumer) -> None:
    """Say so where a start was given to a consumer that has one already."""
    if any(each.cursor is not None for each in consumer.lag()):
        click.echo(
            f"consumer `{consumer.name}` has a cursor and resumes there: --from is "
            "for a new consumer",
            err=True,
        )


def _tell_loss(lost: LostOffsets) -> None:
    click.echo(
        f"accepted: offsets {lost.cursor} to {lost.start} of partition {lost.partition} are lost",
        err=True,
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
    """Where events of one partition stand that follow one another."""
    first, last = events[0].position, events[-1].position
    return f"`{first.topic}/{first.partition}` offsets {first.offset} to {last.offset + 1}"


@click.group(cls=CommandGroup)
def consumer() -> None:
    """Delete consumers.

    `tidelog lag` lists them.

    \b
    Examples:
      tidelog lag orders
      tidelog consumer delete orders billing
    """


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
        told = f"{lag} events of `{topic}`" if lag else f"all events of `{topic}`"
        has = "has not read" if lag else "has read"
        question = f"Delete consumer `{name}`, which {has} {told}?"
        ask_first(f"consumer `{name}` of `{topic}`", question, yes)
        found.delete(force=force)
        output.say(f"Deleted consumer `{name}` of `{topic}`.")
        if output.as_json:
            output.record({"topic": topic, "name": name, "deleted": True})
