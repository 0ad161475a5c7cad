"""The segments that a partition's offsets came from, and whether a stray journal agrees.

Every offset belongs to one event for good, and each journal lists the segments that its offsets
came from. Compiles carry these lists over. A journal may list other segments than the partition's
rows, or reach past the partition's end. Either proves that the catalog had these commits and lost
them. No later commit or compile hides that. Trimmed offsets have no rows, and prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from tidelog.codec.journal_file import read_sources
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.maintenance.unused import origin_of
from tidelog.log.reader.partition_reader import Reader
from tidelog.log.topics import read_head
from tidelog.model.partition_rows import JournalOrigin, Run
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["contradiction"]


def contradiction(context: Context, topic: Topic, partition: int, info: ObjectInfo) -> str | None:
    """Returns how a journal that no row names contradicts the catalog; None if it does not.

    A journal that does not decode proves nothing, nor do rows whose objects are missing or damaged.
    """
    try:
        sources = _sources_of(context, info.key, info.size)
    except (CorruptError, NotFoundError):
        return None
    if not sources:
        return None
    head, _ = read_head(context, topic, partition)
    end = max(each.base + each.count for each in sources)
    if end > head.next:
        return (
            f"holds events of partition {partition} up to offset {end}, the catalog has them up to "
            f"{head.next}"
        )
    with contextlib.suppress(CorruptError, NotFoundError):  # trimmed since, or rows are lost
        for known in _read_origins(
            context, topic, partition, max(sources[0].base, head.start), end
        ):
            at = _first_difference(sources, known)
            if at is not None:
                return f"has another event at offset {at} of partition {partition} than the catalog"
    return None


def _read_origins(
    context: Context, topic: Topic, partition: int, start: int, end: int
) -> Iterator[Sequence[JournalOrigin]]:
    """Yields, for each row that holds offsets of ``[start, end)``, where they came from."""
    reader = Reader(context, topic, partition)
    at = start
    while at < end:
        runs = reader.runs(at)
        if not runs:
            return
        for run in runs:
            if run.base < end:
                parts = (each.between(start, end) for each in _sources_of_row(context, run))
                yield [part for part in parts if part is not None]
        at = runs[-1].end


def _sources_of_row(context: Context, run: Run) -> Sequence[JournalOrigin]:
    if run.journal is None:
        return [JournalOrigin(run.base, run.count, origin_of(run.object)[0], 0)]
    try:
        return _sources_of(context, run.object, run.byte_end)
    except (CorruptError, NotFoundError):
        return []


def _sources_of(context: Context, key: str, size: int) -> list[JournalOrigin]:
    return read_sources(partial(context.store.get, key), size, f"journal `{key}`")


def _first_difference(ones: Sequence[JournalOrigin], others: Sequence[JournalOrigin]) -> int | None:
    """Returns the first offset that differs between two lists; None if there is none."""
    found = [
        max(one.base, other.base)
        for one in ones
        for other in others
        if _differ(one.between(other.base, other.base + other.count), other)
    ]
    return min(found, default=None)


def _differ(part: JournalOrigin | None, other: JournalOrigin) -> bool:
    return part is not None and part != other.between(part.base, part.base + part.count)
