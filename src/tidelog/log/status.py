"""The state of each partition of a topic, and the lag of its consumers, for people."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain

from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.log.consumer.leases import decode_registered, read_lease
from tidelog.log.reader.partition_reader import Reader
from tidelog.log.reader.run_reader import Cut, describe_run, read_run
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.partition_rows import Head, Run, decode_row
from tidelog.model.topic import Topic

__all__ = [
    "Lag",
    "PartitionState",
    "consumer_lag",
    "consumer_names",
    "partition_states",
]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition at one point in time. Runs and bytes are None if they were not counted."""

    partition: int
    start: int  # the first readable offset
    next: int  # the offset of the next event
    runs: int | None = None  # including journals
    bytes: int | None = None  # in the store, after compression
    last_ms: int | None = None  # the latest event time
    erased: int = 0  # offsets without an event; 0 if runs were not counted

    @property
    def events(self) -> int:
        """Returns how many events are readable; an upper limit if runs were not counted."""
        return self.next - self.start - self.erased


def partition_states(
    context: Context, topic: Topic, pool: Executor, runs: bool
) -> list[PartitionState]:
    """Returns all partitions in order; reads every run's row if ``runs``, otherwise only the heads.

    Raises ``NotFoundError`` if the topic was deleted.
    """
    look = _with_runs if runs else _head_only
    return list(
        pool.map(lambda partition: look(context, topic, partition), range(topic.partitions))
    )


def _head_only(context: Context, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(context, topic, partition)
    return PartitionState(partition, head.start, head.next)


def _with_runs(context: Context, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(context, topic, partition)
    amendments = Reader(context, topic, partition).amendments(head.start, head.next)
    count = size = erased = 0
    last_ms: int | None = None
    for run in _runs(context, topic, partition, head):
        count += 1
        size += run.byte_end - run.byte_start
        erased += _count_erased(context, topic, partition, run, head.start)
        erased += sum(row.kind == "delete" for row in amendments.of_run(run).rows)
        if run.events:
            last_ms = run.last_ms if last_ms is None else max(last_ms, run.last_ms)
    return PartitionState(partition, head.start, head.next, count, size, last_ms, erased)


def _count_erased(context: Context, topic: Topic, partition: int, run: Run, start: int) -> int:
    """Returns how many offsets from the start on have no event in a run.

    Reads a journal that reaches below the start, since some of its offsets may have been trimmed.
    """
    if run.base >= start or run.count == run.events:
        return run.count - run.events
    what = describe_run(topic.name, partition, run)
    try:
        parts = read_run(context.store, run, what, Cut(start, columns=["timestamp"]))
        return run.end - start - sum(len(part.offsets) for part in parts)
    except NotFoundError:  # another journal has replaced it
        return max(0, run.count - run.events - (start - run.base))


def _runs(context: Context, topic: Topic, partition: int, head: Head) -> Iterator[Run]:
    """Yields journals and runs from the start on.

    Counts what is compiled meanwhile at most once.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    first, last = layout.run_row(head.journaled), layout.run_row(head.next)
    at = head.start
    for row in chain(
        context.catalog.scan(where, "journal/", "journal0"),
        context.catalog.scan(where, first, last),
    ):
        run = decode_row(row.value, Run, f"row `{row.row}` of `{topic.name}/{partition}`")
        if run.end > at:
            yield run
            at = run.end


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind in one partition."""

    topic: str
    consumer: str
    partition: int
    cursor: int | None  # None: no member has read it yet
    start: int
    end: int
    owner: str

    @property
    def events(self) -> int:
        """Returns how many offsets are not handled yet, including erased events."""
        return self.end - (self.start if self.cursor is None else self.cursor)


def consumer_names(context: Context, topic: Topic) -> list[str]:
    """Returns all consumers of a topic, including those whose delete did not finish."""
    where, prefix = layout.consumers_partition(topic.incarnation), layout.consumer_row("")
    rows = context.catalog.scan(where, prefix, prefix + "\U0010ffff")
    found = [decode_registered(row) for row in rows]
    return sorted(each.name for each in found if each.state != "deleted")


def consumer_lag(context: Context, topic: Topic, name: str) -> list[Lag]:
    """Returns how far a consumer is behind in every partition of a topic."""
    lags = []
    for partition in range(topic.partitions):
        head, _ = read_head(context, topic, partition)
        found = read_lease(context, topic, name, partition)
        cursor = found[0].cursor if found else None
        owner = found[0].owner if found else ""
        lags.append(Lag(topic.name, name, partition, cursor, head.start, head.next, owner))
    return lags
