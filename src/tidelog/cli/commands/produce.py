"""``tidelog produce``: lines of a file or a pipe become events."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import click

from tidelog.api.append_lines import LineCounts, input_size
from tidelog.cli.output import Output, echo_aside, json_option, progress_bar
from tidelog.cli.terminal import Interruption, open_home
from tidelog.errors import InvalidError

__all__ = ["produce"]


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
        values["ends"] = ", ".join(f"{counts.topic}/{p}: {end}" for p, end in ends) or None
    output.record(values)


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
