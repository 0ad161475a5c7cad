"""The state of a topic for people: its partitions, and its consumers with their lag and members.

Of a deleted topic, it says where its partitions ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import chain

from tidelog.catalog.base import prefix_end
from tidelog.concurrency import describe_process
from tidelog.context import Context
from tidelog.coordination.ownership import Member
from tidelog.errors import NotFoundError
from tidelog.log.consumer.leases import decode_registered, read_lease
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import RunSelection, describe_run, read_run
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.topic import Head, Run, Topic, decode_row

__all__ = [
    "DeletedTopic",
    "Lag",
    "LeaseState",
    "MemberState",
    "Members",
    "PartitionState",
    "PartitionTotals",
    "RunTotals",
    "consumer_lag",
    "consumer_leases",
    "consumer_names",
    "partition_ends",
    "partition_states",
    "read_heads",
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


def read_heads(context: Context, topic: Topic) -> list[Head]:
    """Returns the heads of all partitions, in order; raises as ``read_head``."""
    return [read_head(context, topic, partition)[0] for partition in range(topic.partitions)]


def partition_ends(
    context: Context, topic: Topic, partitions: Iterable[int]
) -> dict[int, tuple[int, int]]:
    """Returns the start and the next offset of some partitions; raises as ``read_head``."""
    heads = {partition: read_head(context, topic, partition)[0] for partition in partitions}
    return {partition: (head.start, head.next) for partition, head in heads.items()}


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
        parts = read_run(context.store, run, what, RunSelection(start, columns=["timestamp"]))
        return run.end - start - sum(len(part.offsets) for part in parts)
    except NotFoundError:  # another journal has replaced it
        return _erased_from(run, start)


def _erased_from(run: Run, start: int) -> int:
    """Returns how many offsets of a run from the start on have no event; at least these."""
    return max(0, run.count - run.events - max(0, start - run.base))


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
        """Returns how many offsets are not handled yet. Counts erased events, not trimmed ones."""
        return self.end - max(self.start, self.cursor or 0)


def consumer_names(context: Context, topic: Topic) -> list[str]:
    """Returns all consumers of a topic, including those whose delete did not finish."""
    where, prefix = layout.consumers_partition(topic.incarnation), layout.consumer_row("")
    rows = context.catalog.scan(where, prefix, prefix_end(prefix))
    found = [decode_registered(row) for row in rows]
    return sorted(each.name for each in found if each.state != "deleted")


def consumer_lag(context: Context, topic: Topic, name: str) -> list[Lag]:
    """Returns how far a consumer is behind in every partition of a topic."""
    heads = (read_head(context, topic, partition)[0] for partition in range(topic.partitions))
    return [each.lag for each in consumer_leases(context, topic, name, heads)]


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A consumer's lease on one partition, and how far it is behind there."""

    lag: Lag
    epoch: int
    version: str  # of the lease; empty if there is none


def consumer_leases(
    context: Context, topic: Topic, name: str, heads: Iterable[Head]
) -> Iterator[LeaseState]:
    """Yields a consumer's leases, by partition; ``heads`` are those of the partitions in order."""
    for partition, head in enumerate(heads):
        lease, version = read_lease(context, topic, name, partition) or (None, "")
        cursor, owner = (lease.cursor, lease.owner) if lease else (None, "")
        lag = Lag(topic.name, name, partition, cursor, head.start, head.next, owner)
        yield LeaseState(lag, lease.epoch if lease else 0, version)


@dataclass(frozen=True, slots=True)
class MemberState:
    """A member of a consumer, by its last heartbeat."""

    id: str
    mark: str  # its host and process
    seen_ms: int
    is_silent: bool  # for longer than its leases last

    @property
    def process(self) -> str:
        """Returns its host and process, such as ``vm, process 31864``; empty if unknown."""
        return describe_process(self.mark)


class Members:
    """Watches the members of a topic's consumers, for a process that looks repeatedly."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[str, float]]] = {}
        """By consumer: each member's row, its version, and since when it is the same."""

    def list(self, context: Context, topic: Topic, name: str) -> list[MemberState]:
        """Returns the members of a consumer. Those that are seen for the first time are alive.

        Silence counts by our own clock, since the clocks of hosts may differ.
        """
        now_s, ttl_s = context.clock.monotonic_s(), context.log_settings.lease_ttl_ms / 1000
        where = layout.consumer_members(topic.incarnation, name)
        before = self._seen.get(name, {})
        seen: dict[str, tuple[str, float]] = {}
        found = []
        for row in context.catalog.scan(where, "member/", "member0"):
            member = decode_row(row.value, Member, f"member row `{row.row}`")
            dead = context.processes.is_dead(member.mark)
            version, since_s = before.get(row.row, ("", 0.0))
            seen[row.row] = (row.version, since_s if version == row.version else now_s)
            silent = dead or now_s - seen[row.row][1] > ttl_s
            member_id = row.row.removeprefix("member/")
            found.append(MemberState(member_id, member.mark, member.seen_ms, silent))
        self._seen[name] = seen
        return found


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Runs from the start up to an offset."""

    at: int
    runs: int = 0
    bytes: int = 0
    erased: int = 0  # offsets whose events were deleted and compiled
    first_ms: int | None = None
    last_ms: int | None = None


@dataclass(slots=True)
class PartitionTotals:
    """Counts a partition's runs piece by piece, so that no request reads them all.

    A count continues as runs are added. When the oldest runs are trimmed or compiled into journals,
    it starts again, and ``shown`` keeps the count before until the new one has reached the end.
    """

    shown: RunTotals | None = None  # None: never yet counted to the end
    _mark: tuple[int, int] = (-1, -1)
    _going: RunTotals = field(default_factory=lambda: RunTotals(0))

    def count_on(
        self, context: Context, topic: Topic, partition: int, head: Head, rows: int
    ) -> int:
        """Reads about ``rows`` run rows at most; returns how many it has read."""
        mark = (head.start, head.compiled)
        if mark != self._mark:
            self._mark, self._going = mark, RunTotals(head.start)
        if self._going.at >= head.next:
            self.shown = self._going
            return 0
        read = 0
        reader = Reader(context, topic, partition)
        while self._going.at < head.next and read < rows:
            try:
                runs = reader.runs(self._going.at)
            except NotFoundError:  # trimmed meanwhile: the next head says so
                return read
            if not runs:
                break
            read += len(runs)
            before = self._going
            held = [run for run in runs if run.events]  # an emptied journal has no times
            first = [run.first_ms for run in held]
            last = [run.last_ms for run in held]
            self._going = RunTotals(
                at=runs[-1].end,
                runs=before.runs + len(runs),
                bytes=before.bytes + sum(run.byte_end - run.byte_start for run in runs),
                erased=before.erased + sum(_erased_from(run, head.start) for run in runs),
                first_ms=min([*first, *_known(before.first_ms)], default=None),
                last_ms=max([*last, *_known(before.last_ms)], default=None),
            )
        if self._going.at >= head.next:
            self.shown = self._going
        return read


def _known(time_ms: int | None) -> list[int]:
    return [] if time_ms is None else [time_ms]


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """A deleted topic. Its closed heads remain and record where its partitions ended."""

    incarnation: str
    ends: tuple[int, ...]  # by partition

    @classmethod
    def read(cls, context: Context, incarnation: str) -> DeletedTopic | None:
        """Returns what is left of an incarnation; None if its topic is not deleted."""
        ends: list[int] = []
        while True:
            where = layout.topic_partition(incarnation, len(ends))
            row = context.catalog.get(where, "head")
            head = None if row is None else decode_row(row.value, Head, f"head of `{where}`")
            if head is None or not head.closed:
                return cls(incarnation, tuple(ends)) if ends else None
            ends.append(head.next)

    @classmethod
    def named(cls, context: Context, name: str) -> DeletedTopic | None:
        """Returns the only deleted topic of a name; None if there are none or several."""
        rows = context.catalog.scan(layout.REGISTRY, layout.deleted_row(""), "deleted0")
        found = [row.row for row in rows if row.value == name.encode()]
        if len(found) != 1:
            return None
        return cls.read(context, found[0].removeprefix(layout.deleted_row("")))

    def unread(self, partition: int, position: str) -> int:
        """Returns how many offsets of a partition come after a reader's position."""
        end = self.ends[partition] if partition < len(self.ends) else 0
        return max(0, end - (int(position) if position.isdecimal() else 0))
