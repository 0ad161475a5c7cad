"""The journals and runs that cover a partition from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.catalog.base import Row
from tidelog.context import Context
from tidelog.errors import CorruptError
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.partition_rows import Head, Run, decode_row
from tidelog.model.topic import Topic

__all__ = ["MovedError", "covering", "is_settled", "read_row"]


class MovedError(CorruptError):
    """Rows were swapped or trimmed since the head was read: read it again and start over."""

    kind = "moved"


def covering(
    context: Context,
    topic: Topic,
    partition: int,
    head: Head,
    bounds: tuple[int, int] | None = None,
) -> Iterator[Run]:
    """Yields the journals and runs that hold some offsets, in order and without a gap.

    By default those of all readable offsets. Raises ``MovedError`` if they have changed since the
    head was read.
    """
    at, end = bounds or (0, head.next)
    at, end = max(at, head.start), min(end, head.next)
    for kind, until in (("journal", min(end, head.journaled)), ("run", end)):
        if at >= until:
            continue
        for row in _rows(context, topic, partition, kind, (at, until)):
            run = decode_row(row.value, Run, f"row `{row.row}` of `{topic.name}/{partition}`")
            if run.base > at or run.end <= at:
                break
            at = run.end
            yield run
        if at < until:
            raise _moved_error(topic, partition, at)


def read_row(context: Context, topic: Topic, partition: int, head: Head, base: int) -> Run:
    """Returns the journal or run that begins at an offset. Raises ``MovedError`` if it is gone."""
    where = layout.topic_partition(topic.incarnation, partition)
    name = layout.journal_row(base) if base < head.journaled else layout.run_row(base)
    row = context.catalog.get(where, name)
    if row is None:
        raise _moved_error(topic, partition, base)
    return decode_row(row.value, Run, f"row `{name}` of `{topic.name}/{partition}`")


def is_settled(context: Context, topic: Topic, partition: int, seen: Head, first: int) -> bool:
    """Returns whether nothing was compiled, or trimmed from an offset on, since a head was read.

    If so, every amendment of these offsets still has its row.
    """
    head, _ = read_head(context, topic, partition)
    return head.compiled == seen.compiled and head.start <= max(seen.start, first)


def _rows(
    context: Context, topic: Topic, partition: int, kind: str, bounds: tuple[int, int]
) -> Iterator[Row]:
    """Yields the rows of one kind, from the one that holds the first offset on."""
    where = layout.topic_partition(topic.incarnation, partition)
    named = layout.journal_row if kind == "journal" else layout.run_row
    first, end = named(bounds[0]), named(bounds[1])
    for row in context.catalog.scan(where, f"{kind}/", named(bounds[0] + 1), 1, reverse=True):
        first = row.row
    return context.catalog.scan(where, first, end)


def _moved_error(topic: Topic, partition: int, offset: int) -> MovedError:
    return MovedError(
        f"partition `{topic.name}/{partition}`: no row holds offset {offset}: keep the catalog, "
        "and run `tidelog verify`"
    )
