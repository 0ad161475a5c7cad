"""Leases: how the members of a consumer share a topic's partitions. Starts no threads.

Each member keeps its ``member`` row alive by rewriting it (its heartbeat). Each partition has one
``lease`` row with its owner, epoch and cursor. Members have liveness; leases have ownership and
progress. The steps, and what a crash after each one leaves:

    1. join: read the ``fence`` row of the members, then the
       consumer's own row; put the ``member`` row if the
       fence is unchanged                                  → silent, and ignored after a while
    2. take a lease that is free or whose owner is dead:
       owner and epoch + 1, by the version that was read   → taken over after the time to live
    3. read, handle, and commit: the cursor, by the
       version of the lease                                → events after the cursor come again
    4. release: owner empty, by the version                → free, at the cursor
    5. leave: delete the ``member`` row                    → nothing

Every heartbeat expects the ``fence`` as it was when the member joined. A delete of the consumer
changes it (``delete``). So a member that joined before, however long it stalls, leaves no row
behind: it joins again, or finds that the consumer is being deleted.

A commit expects the lease exactly as this member last wrote it. A member that was considered dead
while it was only slow finds another version there, and gets ``FencedError``. What was read under
one epoch is committed under that epoch or not at all, even by the same member. A commit moves the
cursor forward, and back only if the caller asks for it. After a commit with an unknown outcome, the
cursor that this member remembers may differ from the stored one. Until a write has landed or the
row was read, a commit of the same cursor is not skipped.

Clocks decide only when to try a takeover, and only one clock counts. An owner is considered dead
when its row has not changed for the time to live *by the watcher's own monotonic clock*, or when
its process is known to have ended. No wall time of another host is compared with ours. For a
member, the watched row is its ``member`` row. A one-shot reader (:meth:`Leases.acquire_once`)
has none, so its lease row is watched, which each of its commits changes. A member that holds more
than its fair share releases leases by itself; no lease is taken from a living owner.

``start`` decides where a consumer begins the first time that a member takes a lease.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from tidelog.catalog.base import ABSENT, Check, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.ownership import Membership, fair_share, put_held
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.partition_reader import find_offset
from tidelog.log.topics import check_exists, read_head
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted
from tidelog.model.event import check_timestamp, check_utf8, check_whole, from_iso
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic, decode_row, encode_row

__all__ = [
    "HeldLease",
    "Lease",
    "Leases",
    "RegisteredConsumer",
    "Start",
    "check_consumer_name",
    "decode_registered",
    "parse_start",
    "read_lease",
    "read_lease_row",
    "resolve_start",
    "trimmed_error",
]


class RegisteredConsumer(Persisted, frozen=True):
    """A consumer of a topic. The row stays after the consumer is deleted (``delete``)."""

    name: str
    # ``deleting``: a delete checks for members. ``ending``: decided, and never undone.
    state: Literal["ready", "deleting", "ending", "deleted"] = "ready"


class Lease(Persisted, frozen=True):
    """The owner of a partition, its epoch, and its progress."""

    owner: str  # a member's id; empty if free
    epoch: int
    cursor: int  # the next offset to handle
    once: bool = False  # the owner is a one-shot reader, which has no heartbeat
    mark: str = ""  # of a one-shot owner's process
    deleted: bool = False  # of a deleted consumer: only the epoch counts, not the cursor


@dataclass(slots=True)
class HeldLease:
    """A lease that is ours, as we last wrote it."""

    partition: int
    lease: Lease
    version: str
    is_known: bool = True  # no later write has an unknown outcome


class Leases(Membership):
    """One member's view of a consumer: which members are alive, and which leases it holds."""

    def __init__(self, context: Context, topic: Topic, name: str, start: Start) -> None:
        where = layout.consumer_members(topic.incarnation, name)
        super().__init__(context, where, f"consumer `{name}`")
        self.held: dict[int, HeldLease] = {}
        self._topic = topic
        self._name = name
        self._start = start
        self._once_leases: dict[
            int, tuple[str, float]
        ] = {}  # of one-shot owners: version, since when

    def beat(self) -> None:
        """Sends a heartbeat; joins again after a delete. Raises ``NotFoundError`` during one."""
        if not self._beat():
            self.join()

    def check_held(self) -> None:
        """Drops leases that others have taken while we slept, or that were written twice."""
        for partition, held in list(self.held.items()):
            found = read_lease(self._context, self._topic, self._name, partition)
            if found is not None and found[1] == held.version:
                continue
            del self.held[partition]

    def fair_share(self, living: list[str]) -> int:
        """Returns how many partitions this member should hold."""
        return fair_share(self.id, living, self._topic.partitions)

    def acquire_share(self, living: list[str]) -> list[int]:
        """Step 2, until our share is full; returns the new partitions."""
        taken: list[int] = []
        share = self.fair_share(living)
        offset = living.index(self.id) if self.id in living else 0
        for step in range(self._topic.partitions):
            if len(self.held) >= share:
                break
            # Members start at different places, so that they seldom want the same lease.
            partition = (offset * share + step) % self._topic.partitions
            if partition not in self.held and self.take(partition, living):
                taken.append(partition)
        return taken

    def take(self, partition: int, living: list[str]) -> bool:
        """Step 2 for one partition; returns False if a living member has it."""
        return self._take(partition, Lease(self.id, 1, 0), living)

    def acquire_once(self, partition: int) -> bool:
        """Takes a lease for a short while, without being a member; returns whether it did.

        A silent owner loses its lease once this object has seen it unchanged for
        ``dead_after_s``: call again, or keep the object.
        """
        return self._take(
            partition, Lease(self.id, 1, 0, once=True, mark=self._context.processes.mark()), []
        )

    def commit(
        self, partition: int, cursor: int, epoch: int | None = None, *, back: bool = False
    ) -> None:
        """Step 3: moves the cursor.

        Raises ``FencedError`` if the lease is no longer ours, ``UnavailableError`` if the cursor
        has not moved, and ``UnknownOutcomeError`` if it may have. With ``epoch``, also raises
        ``FencedError`` if the lease is ours again under another epoch: what was read under the old
        one no longer counts. Raises ``InvalidError`` for a cursor that would move back without
        ``back``.
        """
        held = self.held.get(partition)
        if held is None or epoch not in (None, held.lease.epoch):
            raise FencedError(
                f"lease on `{self._topic.name}/{partition}`: not held by consumer "
                f"`{self._name}`: stop working on it",
                partition=partition,
            )
        if cursor < held.lease.cursor and not back:
            raise InvalidError(
                f"lease on `{self._topic.name}/{partition}`: its cursor is at {held.lease.cursor} "
                f"and would move back to {cursor}: seek to move it back"
            )
        if self._put(partition, msgspec.structs.replace(held.lease, cursor=cursor), held.version):
            return
        # Only we write a lease that is ours, under our epoch. Its version may come from an earlier
        # commit whose outcome was unknown.
        found = read_lease(self._context, self._topic, self._name, partition)
        if found is None or (found[0].owner, found[0].epoch) != (self.id, held.lease.epoch):
            self._raise_lost(partition, held)
            return
        lease, version = found
        if cursor <= lease.cursor and not back:
            self.held[partition] = HeldLease(partition, lease, version)
            return  # that earlier commit landed: the cursor stays
        if not self._put(partition, msgspec.structs.replace(lease, cursor=cursor), version):
            self._raise_lost(partition, held)

    def release(self, partition: int) -> None:
        """Step 4. Skips a lease that was lost, and does nothing in a forked child."""
        if self._guard.is_foreign:
            return
        held = self.held.pop(partition, None)
        if held is None:
            return
        free = Lease("", held.lease.epoch, held.lease.cursor)
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)
        change = Put("lease", encode_row(free), expect=held.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            self._context.catalog.write(where, change, write_id=self._context.ids.new())

    def leave(self) -> None:
        """Steps 4 and 5 for all leases."""
        self._guard.check()
        for partition in list(self.held):
            self.release(partition)
        super().leave()

    def _register(self) -> None:
        """Lists the consumer, in one write that also checks that its topic exists.

        A delete of the topic puts the ``closed`` row before it lists consumers: it finds a consumer
        that was added earlier, and none can be added later. Raises ``NotFoundError`` for a deleted
        topic, where the row would stay behind, and while the consumer is being deleted.
        """
        where = layout.consumers_partition(self._topic.incarnation)
        row = layout.consumer_row(self._name)

        def decide(rows: Rows) -> Decision[None]:
            found = rows[row]
            state = None if found is None else decode_registered(found).state
            if state == "ready":
                return Decision(None)
            if state in ("deleting", "ending"):
                raise NotFoundError(
                    f"consumer `{self._name}` of `{self._topic.name}`: is being deleted: delete it "
                    "again to finish"
                )
            check_exists(self._context, self._topic)
            wanted = rows.put(row, encode_row(RegisteredConsumer(self._name)))
            return Decision(None, [wanted, Check(layout.CLOSED_ROW, ABSENT)])

        update(self._context, where, [row], decide, f"consumer `{self._name}`")

    def _put(self, partition: int, lease: Lease, version: str | None) -> bool:
        """Writes our lease by the version that we know; returns False after a conflict."""
        self._guard.check()
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)
        what = f"lease on `{self._topic.name}/{partition}`"
        if partition in self.held:
            self.held[partition].is_known = False  # until a reply says what the row holds
        mine = put_held(self._context, where, "lease", encode_row(lease), version, what)
        if mine is not None:
            self.held[partition] = HeldLease(partition, lease, mine)
        return mine is not None

    def _raise_lost(self, partition: int, held: HeldLease) -> None:
        self.held.pop(partition, None)
        found = None
        with contextlib.suppress(UnavailableError):  # only the message needs it
            found = read_lease(self._context, self._topic, self._name, partition)
        now = f"held by `{found[0].owner}` (epoch {found[0].epoch})" if found else "by another"
        raise FencedError(
            f"lease on `{self._topic.name}/{partition}` lost: {now}, ours was epoch "
            f"{held.lease.epoch}: stop working on it",
            partition=partition,
        )

    def _take(self, partition: int, wanted: Lease, living: list[str]) -> bool:
        """Step 2: writes ``wanted`` with the next epoch, at the cursor that the lease has."""
        began_s = self._context.clock.monotonic_s()
        found = read_lease_row(self._context, self._topic, self._name, partition)
        if found is None or found[0].deleted:
            # Read the lease before the consumer's row: a delete that starts after we read that row
            # writes the lease, and then this take fails.
            self._once_leases.pop(partition, None)
            self._register()
            cursor = resolve_start(self._context, self._topic, partition, self._start)
            epoch, version = (1, None) if found is None else (found[0].epoch + 1, found[1])
            mine = msgspec.structs.replace(wanted, epoch=epoch, cursor=cursor)
            return self._took(partition, mine, version)
        lease, version = found
        # A lease in our own name that we do not hold comes from a take or release with a lost
        # reply.
        if lease.owner not in ("", self.id):
            if lease.owner in living:
                return False
            if lease.once:
                is_dead = self._is_once_owner_dead(partition, lease, version, began_s)
            else:
                is_dead = self._is_member_dead(lease.owner, began_s)
            if not is_dead:
                return False
        mine = msgspec.structs.replace(wanted, epoch=lease.epoch + 1, cursor=lease.cursor)
        return self._took(partition, mine, version)

    def _took(self, partition: int, lease: Lease, version: str | None) -> bool:
        """Records a lease that is certainly ours; if that is unknown, the next look takes it."""
        try:
            return self._put(partition, lease, version)
        except UnknownOutcomeError:
            return False

    def _is_once_owner_dead(
        self, partition: int, lease: Lease, version: str, began_s: float
    ) -> bool:
        """Returns whether a one-shot owner has ended, or was silent for ``dead_after_s``."""
        if self._context.processes.is_dead(lease.mark):
            return True
        known, since_s = self._once_leases.get(partition, ("", 0.0))
        if known != version:
            self._once_leases[partition] = (version, self._context.clock.monotonic_s())
            return False
        return began_s - since_s > self._context.log_settings.dead_after_s

    def _owns_nothing(self, member_id: str) -> bool:
        for partition in range(self._topic.partitions):
            found = read_lease(self._context, self._topic, self._name, partition)
            if found is not None and found[0].owner == member_id:
                return False
        return True


def read_lease(
    context: Context, topic: Topic, name: str, partition: int
) -> tuple[Lease, str] | None:
    """Returns the lease on a partition and its version; None if no member has ever had it."""
    found = read_lease_row(context, topic, name, partition)
    return None if found is None or found[0].deleted else found


def read_lease_row(
    context: Context, topic: Topic, name: str, partition: int
) -> tuple[Lease, str] | None:
    """Returns the same, including what a delete of the consumer has left."""
    row = context.catalog.get(layout.lease_partition(topic.incarnation, name, partition), "lease")
    return None if row is None else lease_of(topic, name, partition, row)


def lease_of(topic: Topic, name: str, partition: int, row: Row) -> tuple[Lease, str]:
    """Returns a lease and its version, from its row. Raises ``CorruptError``."""
    what = f"lease of consumer `{name}` on `{topic.name}/{partition}`"
    return decode_row(row.value, Lease, what), row.version


def decode_registered(row: Row) -> RegisteredConsumer:
    """Decodes a consumer's own row. Raises ``CorruptError``."""
    return decode_row(row.value, RegisteredConsumer, f"consumer row `{row.row}`")


Start = str | int | datetime
"""``earliest``, ``latest``, an offset, or a time: text (ISO 8601 or ``-15m``) or a datetime."""


def check_consumer_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that cannot be part of a row."""
    check_utf8("consumer name", name)
    if not 1 <= len(name) <= limits.CONSUMER_NAME_MAX or "/" in name:
        raise InvalidError(
            f"consumer name `{name[:80]}`: give 1 to {limits.CONSUMER_NAME_MAX} characters, "
            "without `/`"
        )


def parse_start(start: Start, now_ms: int) -> Start:
    """Returns a start without text, except ``earliest`` and ``latest``; an offset may be text.

    A time that is relative to now is fixed here. Raises ``InvalidError`` for an invalid start.
    """
    if isinstance(start, str) and start.isascii() and start.isdecimal():
        return int(start)
    if isinstance(start, datetime):
        check_timestamp(start)
    elif not isinstance(start, str):
        start = check_whole("start", start)
        if start < 0:
            raise InvalidError(f"start {start}: give an offset of 0 or more")
    elif start not in ("earliest", "latest"):
        since_ms = moment_ms(start, now_ms)
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=since_ms)
    return start


def resolve_start(context: Context, topic: Topic, partition: int, start: Start) -> int:
    """Returns the offset to begin with, within what the partition holds now."""
    if isinstance(start, datetime):
        return find_offset(context, topic, partition, check_timestamp(start))
    head, _ = read_head(context, topic, partition)
    if isinstance(start, int):
        return min(max(start, head.start), head.next)
    if start == "earliest":
        return head.start
    if start == "latest":
        return head.next
    return find_offset(context, topic, partition, from_iso(start))


def trimmed_error(consumer: str, place: str, partition: int, cursor: int, start: int) -> Exception:
    """Returns the error of a consumer whose next events were trimmed."""
    return NotFoundError(
        f"consumer `{consumer}` on `{place}`: its cursor is at {cursor}, but what is below {start} "
        f"was trimmed: seek to {start} to accept the loss, or give `tidelog consume` --accept-loss",
        partition=partition,
        cursor=cursor,
        start=start,
    )
