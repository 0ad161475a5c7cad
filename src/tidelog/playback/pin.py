"""What a playback plays, fixed when it begins.

The end of each partition is read once: what is appended later is not part of the playback, so that
it ends, and is the same when it is resumed. As of an earlier state, ends are those that the topic
had then. What the range needs of each partition is noted too, so that a trim which takes some of it
away is told from one that does not.

A journal counts as committed when its newest run was: as of a time before that, a partition ends
where the journal begins. So compiling makes earlier states coarser, and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any

from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.playback import Floors, Pin, TimeRange
from tidelog.model.run import Head, Run, decode_row
from tidelog.model.topic import Topic
from tidelog.playback.slots import PartitionSlots, floors_of

__all__ = ["AsOf", "check_needed", "pin_topic", "trimmed"]

AsOf = int | Mapping[int, int] | None
"""A commit time in ms, ends by partition (others as they are now), or None for now."""

_ENTRIES = 4_000  # of floors, over all partitions; they must fit into a row


def pin_topic(
    log: Log, topic: Topic, times: TimeRange, as_of: AsOf = None, pool: Executor | None = None
) -> Pin:
    """Fix the ends of a topic, now or as of an earlier state.

    ``InvalidError`` for a partition that is not there and an end that was never reached,
    ``NotFoundError`` for one that was trimmed.
    """
    offsets = as_of if isinstance(as_of, Mapping) else {}
    for partition in offsets:
        topic.check_partition(partition)
    each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    entries = max(1, min(64, _ENTRIES // topic.partitions))

    def pinned(partition: int) -> tuple[int, int, Floors]:
        head, _ = read_head(log, topic, partition)
        while True:
            end = head.next
            if partition in offsets:
                end = _checked(topic, partition, head, offsets[partition])
            elif isinstance(as_of, int):
                end = _end_at(log, topic, partition, head, as_of)
            slots = PartitionSlots(log, topic, partition, times, head.journaled)
            floors = floors_of(slots, (head.start, end), entries)
            before, (head, _) = head, read_head(log, topic, partition)
            if head.compiled == before.compiled:  # else rows were replaced while they were read
                return before.start, end, floors

    starts, ends, floors = zip(*each(pinned, range(topic.partitions)), strict=True)
    return Pin(topic.incarnation, times, starts, ends, floors)


def check_needed(topic: Topic, pin: Pin, partition: int, time_ms: int, head: Head) -> None:
    """``NotFoundError`` when something from this time on was trimmed since the playback began.

    The head is one that was read after rows: a trim raises the start before it removes any.
    """
    needed = pin.floors[partition].needed(time_ms)
    if needed is not None and head.start > needed:
        raise trimmed(topic, partition, needed, head.start)


def trimmed(topic: Topic, partition: int, offset: int, start: int) -> NotFoundError:
    return NotFoundError(
        f"playback of `{topic.name}`: offsets {offset} to {start} of partition {partition} were "
        "trimmed while it ran, and may be part of it: begin another playback of what is left",
        partition=partition,
        offset=offset,
        start=start,
    )


def _checked(topic: Topic, partition: int, head: Head, end: int) -> int:
    if end > head.next or end < 0:
        raise InvalidError(
            f"partition `{topic.name}/{partition}`: as of offset {end}, but it ends at "
            f"{head.next}: give 0 to {head.next}"
        )
    if end < head.start:
        raise NotFoundError(
            f"partition `{topic.name}/{partition}`: as of offset {end}, but all before "
            f"{head.start} was trimmed: give {head.start} to {head.next}",
            partition=partition,
            start=head.start,
        )
    return end


def _end_at(log: Log, topic: Topic, partition: int, head: Head, time_ms: int) -> int:
    """The end at a commit time: a border between runs committed by then, and later ones.

    Found by halving, so it takes few looks; where clocks of producers differ there may be
    several such borders, and any of them is an end that the partition once had.
    """
    low, high = head.start, head.next  # all before `low` counts, nothing from `high` on
    while low < high:
        middle = (low + high) // 2
        run = _holder(log, topic, partition, head, middle)
        if run is None:
            return low
        if run.committed_ms <= time_ms:
            low = max(run.end, middle + 1)
        else:
            high = max(low, run.base)
    return min(low, head.next)


def _holder(log: Log, topic: Topic, partition: int, head: Head, offset: int) -> Run | None:
    where = layout.topic_partition(topic.incarnation, partition)
    if offset < head.journaled:
        bounds = "journal/", layout.journal_row(offset + 1)
    else:
        bounds = layout.run_row(head.journaled), layout.run_row(offset + 1)
    for row in log.catalog.scan(where, *bounds, 1, reverse=True):
        return decode_row(row.value, Run, f"a run of `{topic.name}/{partition}`")
    return None
