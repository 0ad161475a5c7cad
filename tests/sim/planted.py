"""Bugs that others have shipped, and that this log once had, planted into the simulated worlds.

Each must be caught. ``python -m tests.sim planted`` counts the seeds that each one takes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from tests.sim import clients_planted as wrong
from tests.sim.audit import RecurringCatalog
from tests.sim.base import SimWorld
from tests.sim.clients import ClientsWorld, DeniedWorld, LossyWorld
from tests.sim.clients_worlds import KeysWorld, ReadersWorld
from tests.sim.lifecycle import LifecycleWorld
from tests.sim.rebalance import RebalanceWorld
from tests.sim.rollback_world import LastCommitWorld, RollbackWorld
from tests.sim.signals_world import SignalsWorld
from tests.sim.stale import check_kind
from tests.sim.world import Parts, World
from tidelog.catalog import update as settling
from tidelog.catalog.base import Catalog, Change, Delete, Put, WriteOutcome, judge
from tidelog.codec.partitioner import KeylessTurns
from tidelog.codec.segment import Segment
from tidelog.context import Context
from tidelog.coordination.audit import key_hash, read_records
from tidelog.erasure import delete
from tidelog.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal import recover
from tidelog.journal.stray_events import StrayEvents, TopicSnapshot, Unit, UnitEvents
from tidelog.log import late_readers, topics
from tidelog.log import notifier as notify
from tidelog.log import partition_reader as read
from tidelog.log.consumer import consumer as consumer_module
from tidelog.log.consumer import delete as consumer_delete
from tidelog.log.consumer import handler
from tidelog.log.consumer import seek as consumer_seek
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Lease, Leases, read_lease
from tidelog.log.maintenance import lost_commits, obsolete_rows, sweep, verify
from tidelog.log.maintenance.obsolete_rows import PRODUCER_EXPIRES_MS
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.notifier import CheckResult, Debounce, NotifyState
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import AppendPlan, StoredSegment
from tidelog.log.producer.copier import Copier
from tidelog.log.producer.flush import EventFields, FlushFailures, SendFuture
from tidelog.log.producer.producer import Producer
from tidelog.log.unused_objects import ObjectUses
from tidelog.model import layout
from tidelog.model.topic import AppenderView, Head, JournalOrigin, Piece, Topic, encode_row
from tidelog.store.base import ObjectInfo, exists_already
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore

__all__ = ["BUGS", "Bug", "OwnAttemptIsConflict", "notices", "seeds_needed"]

SEEDS_MAX = 200  # within which each is caught


@dataclass(frozen=True)
class Bug:
    """A world with a wrong part: what is replaced, and which promises it breaks."""

    breaks: str
    make: Callable[[int], SimWorld]
    healthy: Callable[[int], SimWorld]
    patches: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, wrong in self.patches:
                stack.enter_context(mock.patch.object(owner, name, wrong))
            yield


def seeds_needed(bug: Bug, seeds_max: int = SEEDS_MAX) -> int | None:
    """How many seeds it takes until a world notices; None where none of them does."""
    return next((seed + 1 for seed in range(seeds_max) if notices(bug, seed)), None)


def notices(bug: Bug, seed: int) -> bool:
    """Whether the bug's world notices it with this seed, and finds nothing without the bug."""
    with bug.planted():
        noticed = fails(bug.make(seed))
    return noticed and not fails(bug.healthy(seed))


def fails(world: SimWorld) -> bool:
    """Whether a world breaks a promise."""
    try:
        world.run()
    except (AssertionError, TidelogError) as exc:
        check_kind(exc)
        return True
    return False


# In the protocols' world.


class CounterBeforeData(Appender):
    """Gives out offsets first and stores the bytes afterwards."""

    def upload(self, segment: Segment) -> StoredSegment:
        key = layout.segment(self.topic.incarnation, self.topic.generation, self._context.ids.new())
        return StoredSegment(segment, key, self.topic.generation)

    def commit(
        self,
        stored: StoredSegment,
        piece: Piece,
        sequences: Sequence[int] | None = None,
        expected_offset: int | None = None,
    ) -> tuple[int, StoredSegment]:
        done = super().commit(stored, piece, sequences, expected_offset)
        self._context.store.put(stored.key, stored.segment.data)
        return done


class NoFence(Leases):
    """Commits whatever has become of the lease."""

    def commit(
        self, partition: int, cursor: int, epoch: int | None = None, *, back: bool = False
    ) -> None:
        held = self.held[partition]
        lease = Lease(self.id, held.lease.epoch, cursor)
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)
        write_id = self._context.ids.new()
        self._context.catalog.write(where, Put("lease", encode_row(lease)), write_id=write_id)
        held.lease, held.version = lease, write_id


class CursorWithoutEpoch(Leases):
    """Expects the version that it finds, not the one that it wrote."""

    def commit(
        self, partition: int, cursor: int, epoch: int | None = None, *, back: bool = False
    ) -> None:
        found = read_lease(self._context, self._topic, self._name, partition)
        if found is not None:
            self.held[partition].version = found[1]
        super().commit(partition, cursor, epoch, back=True)


class OwnAttemptIsConflict(FaultyCatalog):
    """Takes a lost reply for another writer's win."""

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        try:
            self.faults.call(
                "write",
                lambda: self.inner.write(partition, *changes, write_id=write_id),
                TimeoutError,
            )
        except TimeoutError as exc:
            raise ConflictError("wrong: it may have landed") from exc


class _NoFloors:
    """A catalog that drops every write of a lone ``head``, which is how a sweep raises a floor."""

    def __init__(self, inner: Catalog) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        if [change.row for change in changes] != ["head"]:
            self._inner.write(partition, *changes, write_id=write_id)


def sweep_without_floor(context: Context, grace_ms: int) -> SweepReport:
    """Deletes what nothing refers to, without keeping out commits that are under way.

    Strays go after the grace, as a producer of this world never stalls for a week.
    """
    floorless: Any = _NoFloors(context.catalog)
    with mock.patch.object(sweep, "_kept_since", return_value=0):
        return sweep_home(replace(context, catalog=floorless), grace_ms)


class FencedOnce(Appender):
    """Notices a newer process once, and then writes under its old epoch."""

    def _check_fence(self, partition: int) -> None:
        state, version = self._state(partition)
        if state.epoch > self._epoch and getattr(self, "_noticed", None) != version:
            self._noticed = version
            raise FencedError("a newer process has the name")


class LandedBySequence(Appender):
    """Takes the same first sequence at the same offset for the producer's own write."""

    def _landed(self, partition: int, plan: AppendPlan) -> bool | None:
        self._forget(partition)
        head, head_version = self._head(partition)
        state, state_version = self._state(partition)
        if state.offset_of(plan.batch.first) == plan.batch.base:
            return True
        self._check_fence(partition)
        if head_version != plan.head_version or head.closed:
            if state_version is not None and state_version == plan.state_version:
                return False
            return self._is_ours(partition, plan.run, head)
        return None


# In the clients' world.


def settled_by_reads(self: Appender, partition: int, plan: AppendPlan) -> bool | None:
    """Lets a read that failed say that nothing was stored."""
    return self._landed(partition, plan)


def conflict_means_not_stored(self: Appender, partition: int, plan: AppendPlan) -> bool | None:
    """Takes a write whose reply was lost for one that never landed."""
    self._forget(partition)
    return False


def refused_means_not_stored(
    read_version: Callable[[str], str | None],
    partition: str,
    changes: Sequence[Change],
    write_id: str,
) -> WriteOutcome:
    """Lets a read that the catalog refuses say that nothing was stored."""
    try:
        versions = {change.row: read_version(change.row) for change in changes}
    except UnavailableError as exc:
        raise UnknownOutcomeError("no reply") from exc
    return judge(changes, versions, write_id)


def number_then_wait(
    self: Producer,
    value: bytes,
    key: bytes | None = None,
    *,
    sequence: int | None = None,
    mark: bytes | None = None,
    **_: Any,
) -> SendFuture:
    """Gives an event its number and then waits for room, without the lock."""
    size = len(value) + 100
    with self._queue.lock:
        partition, number = self._partition_and_sequence(key, sequence)
        known = self._repeated(partition, number) if self._named else None
        if known is not None:
            return known
        self._make_room(size)
        rest = EventFields(None, key, None, (), partition, number, mark)
        return self._enter(value, self._now_ms(), rest, size)


_next_turn = KeylessTurns.next


def two_turns(self: KeylessTurns, events: int) -> int:
    """Uses up two turns for each flush."""
    _next_turn(self, events)
    return _next_turn(self, events)


def take_until(self: Leases, partition: int) -> bool:
    """Writes into a one-shot lease when it is over, by the writer's wall clock."""
    until_ms = self._context.clock.now_ms() + self._context.log_settings.lease_ttl_ms
    return self._take(partition, Lease(self.id, 1, 0, once=True, mark=str(until_ms)), [])


def is_over_by_wall_clock(
    self: Leases, partition: int, lease: Lease, version: str, began_s: float
) -> bool:
    """Compares that with another host's wall clock."""
    allowance_ms = self._context.log_settings.lease_ttl_ms // 2
    return self._context.clock.now_ms() > int(lease.mark) + allowance_ms


class RefusalIsExistence(FaultyStore):
    """Takes S3's 409, which means "try again", for "exists already"."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        super().__init__(inner, faults)

    def put(self, key: str, data: bytes) -> str:
        before = self.faults.counts[Fault.TRY_AGAIN]
        try:
            return super().put(key, data)
        except UnavailableError:
            if self.faults.counts[Fault.TRY_AGAIN] > before:
                raise exists_already(key) from None
            raise


def refusing_clients(seed: int) -> SimWorld:
    world = ClientsWorld(seed)
    world._faulty_store = RefusalIsExistence
    return world


def record_before_sending(
    self: Debounce, partition: int, end: int, claim: NotifyState, version: str
) -> CheckResult | None:
    """Records a notification first and sends it afterwards."""
    until_ms = self.context.clock.now_ms() + self.topic.max_latency_ms
    if self._write(partition, NotifyState(end, self.waiter, until_ms), version) is None:
        return None
    notification = notify.Notification(self.topic.name, partition, end - 1)
    error = self._tell(notification)
    return CheckResult(end, None, None if error else notification)


def any_promise(topic: Topic, state: NotifyState, me: str, now_ms: int) -> int:
    """Waits for a promise of any length, also one that only a wrong clock could make."""
    return max(0, state.until_ms - now_ms)


def forget_by_own_clock(
    context: Context, place: tuple[Topic, int], row: Any, newest_ms: int, now_ms: int
) -> bool:
    """Forgets a key that is a week old by the sweeper's clock and the producer's."""
    is_old = context.clock.now_ms() - row.state.seen_ms > PRODUCER_EXPIRES_MS
    return is_old and obsolete_rows._remove_producer(context, *place, row)


def no_readers(context: Context, topic: Topic, starts: Any, past: Any = False) -> list[Any]:
    """Finds no reader that a trim would pass."""
    return []


# In the topics' world.


def read_closed_head(context: Context, topic: Topic, partition: int) -> tuple[Head, str]:
    """Returns a head that a delete has closed, so that a reader takes what it misses for damage."""
    row = context.catalog.get(layout.topic_partition(topic.incarnation, partition), "head")
    if row is None:
        raise NotFoundError("deleted")
    return topics.head_of(topic, partition, row)


def no_closing(context: Context, topic: Topic, partition: int) -> None:
    """Deletes a topic without keeping out commits that are under way."""


def remove_heads_too(context: Context, partition: str) -> None:
    """Removes closed heads with the topic, so that a doubled creation makes an open one."""
    for row in context.catalog.scan(partition):
        context.catalog.write(partition, Delete(row.row), write_id=context.ids.new())


# In the world whose catalog goes back.


def list_nothing(row_id: str, objects: Any) -> list[Put]:
    """Takes the last mention of objects away, and lists them nowhere."""
    return []


def unnamed_is_garbage(self: ObjectUses, key: str) -> bool:
    """Takes for garbage what no row names."""
    return True


def never_shared(key: str) -> bool:
    """Doubts no object that a partition names."""
    return False


def noted_long_ago(info: ObjectInfo, since: Any) -> int:
    """Keeps strays for the grace only."""
    return 0


def week_from_upload(info: ObjectInfo, since: Any) -> int:
    """Keeps strays for a week from their date."""
    return info.modified_ms


_is_lost = lost_commits._Check._is_lost


def lost_by_dates(self: Any, known: AppenderView, listed: Any, stray: ObjectInfo) -> bool:
    """Takes a commit for lost only where its object is older than the stray that names it."""
    if not _is_lost(self, known, listed, stray):
        return False
    return bool(self._context.store.head(known.object).modified_ms <= stray.modified_ms)


_known = Appender.known


def known_of_own_runs(self: Appender, partitions: Sequence[int]) -> dict[int, AppenderView]:
    """Lets a segment name the last run only where its own appender has committed it."""
    return {
        partition: each if partition in self._states else AppenderView(next=each.next)
        for partition, each in _known(self, partitions).items()
    }


_fresh = itertools.count()


def recovery_without_numbers(origin: str, partition: int) -> str:
    """Lets each recovery of the same events count from zero."""
    return f"~recovery-{next(_fresh)}"


def no_claim(self: Appender, stored: StoredSegment, partition: int, now_ms: int) -> list[Put]:
    """Commits a copy of a segment without regard to a recovery of it."""
    return []


def had_by_its_row(self: Any, unit: Unit, places: Any, appender: Any) -> Any:
    """Takes the row of a unit's producer for a proof, though the events may be gone."""
    said = places <= appender.last_sequence(unit.partition)
    self._report.earlier += int(said.sum())
    return said


def keep_nothing(self: Any, objects: Any) -> None:
    """Lets a journal go when what it holds of lost units is recovered, whatever else it holds."""


def no_witness(self: Copier, *given: object) -> None:
    """Acknowledges staged events before the store says that they were committed."""


def never_recovered(self: Appender, *given: object) -> None:
    """Commits a copy of a segment that a recovery has appended."""


def no_sources(self: StrayEvents, key: str, data: bytes) -> list[JournalOrigin]:
    """Takes a journal for another origin than the segments that it was made of."""
    return []


def absent_by_dates(self: Any, unit: Unit, events: UnitEvents) -> Any:
    """Compares when a delete was given with the date of the object that holds the event."""
    held = [] if unit.segment is None else [unit.segment]
    stored_ms = max(info.modified_ms for info in [*held, *(info for info, _ in unit.journals)])
    records = [each for each, _ in read_records(self._context, self._topic) if each.op == "delete"]
    gone = {each.key for each in records if each.at_ms >= stored_ms}
    keys = events.table.column("key").to_pylist()
    return np.array([r for r, k in enumerate(keys) if not k or key_hash(k) not in gone], np.int64)


def present_by_id(self: TopicSnapshot, events: pa.Table) -> tuple[Any, Any]:
    """Takes any event with an id for the same one, also one that the recovery has appended."""
    ids = events.column("id").to_pylist()
    there = self._lookup.find(sorted({each for each in ids if each is not None})).events
    return np.array([each in there for each in ids], np.bool_), np.zeros(len(ids), np.bool_)


def _protocols(breaks: str, **parts: Any) -> Bug:
    return Bug(breaks, lambda seed: World(seed, Parts(**parts)), World)


def _in(world: type[SimWorld], breaks: str, *patches: tuple[Any, str, Any]) -> Bug:
    return Bug(breaks, world, world, patches)


_clients = partial(_in, ClientsWorld)
_readers = partial(_in, ReadersWorld)
_keys = partial(_in, KeysWorld)
_signals = partial(_in, SignalsWorld)
_topics = partial(_in, LifecycleWorld)
_rollback = partial(_in, RollbackWorld)
_last_commit = partial(_in, LastCommitWorld)
_lossy = partial(_in, LossyWorld)
_members = partial(_in, RebalanceWorld)

BUGS: dict[str, Bug] = {
    "counter before data": _protocols("P1, P2", appender=CounterBeforeData),
    "acknowledge before commit": _protocols("P1", acknowledge_early=True),
    "no fence": _protocols("P3", membership=NoFence),
    "sweep without a floor": _protocols("P1", sweep=sweep_without_floor),
    "cursor without epoch": _protocols("P3", membership=CursorWithoutEpoch),
    "a version that recurs": _protocols("P1, P2", catalog=RecurringCatalog),
    "own attempt taken for a conflict": _protocols("P1", faulty=OwnAttemptIsConflict),
    "fenced appender writes again": _protocols("P1", appender=FencedOnce),
    "fenced producer acknowledged": _protocols("P1", appender=LandedBySequence),
    "unavailable though stored": _lossy("P1, P7", (Appender, "_settled", settled_by_reads)),
    "lost reply taken for nothing stored": _clients(
        "P1", (Appender, "_settled", conflict_means_not_stored)
    ),
    "refusal after a lost reply means not stored": Bug(
        "P1", DeniedWorld, DeniedWorld, ((settling, "_read_outcome", refused_means_not_stored),)
    ),
    "one failure kept at a time": _clients("P1", (FlushFailures, "add", wrong.keep_one_failure)),
    "future of one event answers for its flush": _clients(
        "P1", (SendFuture, "result", wrong.result_tells_the_flush)
    ),
    "failure raised in one thread only": _clients(
        "P1", (FlushFailures, "due", wrong.due_to_one_thread)
    ),
    "number before there is room": _clients("P7", (Producer, "send", number_then_wait)),
    "two turns for a keyless flush": _clients("P7", (KeylessTurns, "next", two_turns)),
    "commit under another lease": _members(
        "P1, P3", (Consumer, "_commit", wrong.commit_polled_ahead)
    ),
    "commit left out by a stale cursor": _members(
        "P3", (Consumer, "_commit", wrong.commit_unless_remembered)
    ),
    "one-shot lease by a foreign clock": _readers(
        "P3",
        (Leases, "acquire_once", take_until),
        (Leases, "_is_once_owner_dead", is_over_by_wall_clock),
    ),
    "refusal taken for existence": Bug("P7", refusing_clients, ClientsWorld),
    "notified before it is sent": _clients("P1", (Debounce, "_send", record_before_sending)),
    "promise of any length": _clients("P1", (notify, "_deferral_ms", any_promise)),
    "key forgotten by two clocks": _keys("P1", (sweep, "forget_producer", forget_by_own_clock)),
    "trim passes a reader": _readers("P7", (late_readers, "readers_behind", no_readers)),
    "failed poll rewinds the next lease": _members(
        "P3",
        (consumer_module, "all_or_nothing", wrong.back_to_positions),
        (Consumer, "_commit", wrong.commit_position),
    ),
    "commit passes the rest of a loop": _lossy(
        "P3", (consumer_module, "one_by_one", wrong.yield_all)
    ),
    "interrupted run passes events": _signals(
        "P3", (handler, "run", wrong.run_without_putting_back)
    ),
    "interrupted poll passes events": _signals(
        "P3", (consumer_module, "all_or_nothing", wrong.undo_after_errors)
    ),
    "interrupted start of a flush": _signals("P1", (Producer, "_close_flush", wrong.close_late)),
    "doubled release of a lease": _members(
        "P3", (Leases, "release", wrong.release_without_version)
    ),
    "consumer deleted by a call that was overtaken": _members(
        "P3", (consumer_delete._Deletion, "_check_ours", wrong.never_overtaken)
    ),
    "delete of a consumer that began meanwhile": _members(
        "P3", (consumer_delete._Deletion, "_begin", wrong.mark_whichever)
    ),
    "cursor of a deleted consumer moved": _members(
        "P3", (consumer_seek, "check_consumer", wrong.no_check_of_a_consumer)
    ),
    "heartbeat passes a delete": _members("P3", (Leases, "_beat", wrong.beat_whatever)),
    "deleted topic read as damage": _topics("P7", (read, "read_head", read_closed_head)),
    "delete without closing": _topics("P1", (topics, "_close_head", no_closing)),
    "heads go with their topic": _topics("P1", (topics, "remove_partition", remove_heads_too)),
    "garbage is what no row names": _rollback(
        "P1",
        (obsolete_rows, "list_unused", list_nothing),
        (ObjectUses, "is_settled", unnamed_is_garbage),
    ),
    "segments name own runs only": _rollback("P1", (Appender, "known", known_of_own_runs)),
    "strays go after the grace": _last_commit("P1", (sweep, "_kept_since", noted_long_ago)),
    "named objects are never doubted": _rollback(
        "P1", (sweep, "is_shared", never_shared), (verify, "is_shared", never_shared)
    ),
    "the week begins at the upload": _last_commit("P1", (sweep, "_kept_since", week_from_upload)),
    "journals prove by their names": _rollback(
        "P1", (lost_commits, "contradiction", lambda *_: None)
    ),
    "recovery without numbers": _rollback(
        "P1", (recover, "recovery_producer", recovery_without_numbers)
    ),
    "copy committed beside a recovery": _rollback(
        "P1", (Appender, "_claim", no_claim), (Appender, "_recovered_at", never_recovered)
    ),
    "claim outlives its events": _rollback("P1", (recover._Recovery, "_had", had_by_its_row)),
    "journal goes with a part of its events": _rollback(
        "P1", (recover._Recovery, "keep", keep_nothing)
    ),
    "journal recovered beside its segments": _rollback("P1", (StrayEvents, "_sources", no_sources)),
    "deletes recovered by dates": _rollback("P1", (recover._Recovery, "_absent", absent_by_dates)),
    "strays are not searched for deletes": _rollback(
        "P1, P5", (delete, "search_strays", lambda *_: {})
    ),
    "one event of an id recovered": _rollback("P1", (TopicSnapshot, "look", present_by_id)),
    "segment for each attempt": _rollback("P1", (Appender, "commit_at", wrong.upload_again)),
    "staged commits leave no witness": _rollback("P1", (Copier, "bear_witness", no_witness)),
    "proof by dates": _rollback("P1", (lost_commits._Check, "_is_lost", lost_by_dates)),
}
