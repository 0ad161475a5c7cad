"""``tidelog replay`` and ``tidelog journals``: a range of times, as events or as objects."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from tidelog.cli.output import Output, json_option, to_seconds, write_out
from tidelog.codec.event_json import batch_lines
from tidelog.home import Home, open_home
from tidelog.journal.listing import JournalEntry
from tidelog.model.playback import whole_range

__all__ = ["journals", "replay"]

_COLUMNS = ("partition", "base", "end", "events", "first", "last", "format", "amended", "object")

start_option = click.option(
    "--start", "--from", "start", metavar="T", help="From this time on: ISO 8601, or -2h."
)
end_option = click.option(
    "--end", metavar="T", help="Up to this time, which is not part of it; default: all there are."
)


@click.command()
@click.argument("topic")
@start_option
@end_option
@json_option
@click.pass_obj
def replay(
    home_text: str | None, output: Output, topic: str, start: str | None, end: str | None
) -> None:
    """Print the events of a time range, in order of time.

    Prints their values, or with --json the whole events.

    Late events come in their place, and all events of equal times. For other places than standard
    output, speeds, and to stop and go on, there is `tidelog playback`.

    \b
    Examples:
      tidelog replay orders --start 2026-11-01 --end 2026-11-02
      tidelog replay orders --start -2h --json | tidelog produce copies --format events
    """
    with open_home(home_text) as home:
        times = whole_range(start, end, home.context.clock.now_ms())
        for batch in home.playback_arrow(topic, times.start_ms, times.end_ms):
            if output.as_json:
                write_out(batch_lines(batch))
            else:
                values = batch.column("value").to_pylist()
                write_out(b"".join([(value or b"") + b"\n" for value in values]))


@click.command()
@click.argument("topic")
@start_option
@end_option
@click.option(
    "--presign", metavar="DURATION", help="With URLs by which anybody can get them for so long: 1h."
)
@json_option
@click.pass_obj
def journals(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """List the objects that hold a topic's events, with URLs.

    Other programs can read them.

    A journal is a Parquet object. Before it is compiled, a run is a part of an Arrow file: put the
    bytes `schema` of the object in front of those from `byte_start` to `byte_end`, and read an
    Arrow stream. Leave out the offsets in `deleted`; those in `updated` have another value now.

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
    output.records(columns, map(_row, found))


def _row(entry: JournalEntry) -> dict[str, Any]:
    amended = len(entry.deleted) + len(entry.updated)
    times = {"first": to_seconds(entry.first), "last": to_seconds(entry.last)}
    return {**msgspec.to_builtins(entry), **times, "amended": amended or None}
