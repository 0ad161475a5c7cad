"""What each partition of a topic holds, for people who look at it."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.run import Run, decode_row
from tidelog.model.topic import Topic

__all__ = ["PartitionState", "partition_states"]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition as it was when somebody looked. Runs and bytes are None when not counted."""

    partition: int
    start: int  # the first offset that can be read
    next: int  # the offset that the next event gets
    runs: int | None = None
    bytes: int | None = None  # in the store, after compression
    last_ms: int | None = None  # the latest event time

    @property
    def events(self) -> int:
        """How many events can be read."""
        return self.next - self.start


def partition_states(log: Log, topic: Topic, pool: Executor, runs: bool) -> list[PartitionState]:
    """All partitions in order; ``runs`` reads every run's row, else only the heads are read.

    ``NotFoundError`` once the topic is deleted.
    """
    look = _with_runs if runs else _head_only
    return list(pool.map(lambda partition: look(log, topic, partition), range(topic.partitions)))


def _head_only(log: Log, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(log, topic, partition)
    return PartitionState(partition, head.start, head.next)


def _with_runs(log: Log, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(log, topic, partition)
    where = layout.topic_partition(topic.incarnation, partition)
    count = size = 0
    last_ms: int | None = None
    for row in log.catalog.scan(where, "run/", layout.run_row(head.next)):
        run = decode_row(row.value, Run, f"row `{row.row}` of `{topic.name}/{partition}`")
        if run.end > head.start:
            count += 1
            size += run.byte_end - run.byte_start
            last_ms = run.last_ms if last_ms is None else max(last_ms, run.last_ms)
    return PartitionState(partition, head.start, head.next, count, size, last_ms)
