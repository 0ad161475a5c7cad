"""Which process works on what: rows that one process holds, and members that share work.

**Held rows** belong to one process at a time: a partition's compiler, or the scribe.

The steps, and what a crash after each one leaves:

    1. take: owner and epoch + 1, by the version that was read  → another process takes it over
    2. heartbeat: write it again, by our own version            → it is seen to be silent
    3. release: no owner                                        → free at once

An owner is considered dead when its row has not changed for the time to live by the watcher's own
monotonic clock, or when its process is known to have ended. The epoch is what fences. It only
grows, and the owner checks the row's version in each write that counts. A lost reply is settled by
the id of the write, which no other row has.

**Members** are processes that share work, such as a consumer's or the drivers of a pipeline. Each
member keeps a ``member`` row alive by rewriting it (its heartbeat). What it works on is in other
rows, each with an owner and an epoch. Members have liveness; those rows have ownership. The steps,
and what a crash after each one leaves:

    1. join: read the ``fence`` row, then check that the group
       still exists; put the ``member`` row if the fence is
       unchanged                                           → silent, and ignored after a while
    2. take work that is free or whose owner is dead:
       owner and epoch + 1, by the version that was read   → taken over after the time to live
    3. work: every write expects the version of that row   → the next owner resumes
    4. release: owner empty, by the version                → free
    5. leave: delete the ``member`` row                    → nothing

Every heartbeat expects the ``fence`` as it was when the member joined. An operation that must stop
all members changes it (``raise_fence``). So a member that joined before, however long it stalls,
leaves no row behind.

Clocks decide only when to try a takeover, and only one clock counts. A member is considered dead
when its row has not changed for the time to live *by the watcher's own monotonic clock*, or when
its process is known to have ended. No wall time of another host is compared with ours. Nothing is
taken from a living member: one that has more than its fair share releases the rest by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tidelog.catalog.base import ABSENT, Absent, Change, Check, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, attempts, pause, rounds, update
from tidelog.clock import looks
from tidelog.concurrency import ProcessGuard, RefusingLock
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites
from tidelog.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.times import Backoff
from tidelog.model.topic import HeldRow, decode_row, encode_row

__all__ = [
    "Fence",
    "Guard",
    "Member",
    "Membership",
    "Ownership",
    "Silence",
    "beating",
    "fair_share",
    "put_held",
    "raise_fence",
    "read_members",
    "write_held",
    "write_repeatedly",
]

_LOST_REPLIES = Backoff(20, base_ms=10, max_ms=200)  # of one write


def put_held(
    context: Context, where: str, row: str, value: bytes, version: str | None, what: str
) -> str | None:
    """Writes a single row, as :func:`write_held` does."""
    return write_held(context, where, what, Put(row, value, version or ABSENT))


def write_held(context: Context, where: str, what: str, held: Put, *others: Change) -> str | None:
    """Writes a row by the version that we know; returns its new version, or None after a conflict.

    Only this write has its id, so a row with it is ours. Raises ``UnavailableError`` if nothing was
    written, and ``UnknownOutcomeError`` if a reply was lost and no row shows the outcome.
    """
    write_id = context.ids.new()
    sent = SentWrites()
    context = sent.tracked(context)
    lost = UnavailableError("replies keep getting lost")
    with sent.unknown_if_any(what, "try again"):
        for number in rounds(_LOST_REPLIES.attempts, lost):
            try:
                context.catalog.write(where, held, *others, write_id=write_id)
            except ConflictError:
                return None
            except UnknownOutcomeError:
                found = context.catalog.get(where, held.row)
                if found is None or found.version not in (held.expect, write_id):
                    return None
                if found.version != write_id:
                    pause(context, number, _LOST_REPLIES)
                    continue
            return write_id
        raise lost


def write_repeatedly(context: Context, where: str, *changes: Change) -> str:
    """Sends a write again, under the same id, while replies get lost; returns the id.

    It may land once more after this returns. So use expectations that fail then, or changes that
    are harmless at any later time. Raises ``UnknownOutcomeError`` if replies keep getting lost, or
    if one was lost and then nothing can be reached.
    """
    write_id = context.ids.new()
    sent = SentWrites()
    context = sent.tracked(context)
    lost = UnavailableError("replies keep getting lost")
    with sent.unknown_if_any(f"write to `{where}`", "try again"):
        for number in rounds(context.backoff.attempts, lost):
            with contextlib.suppress(UnknownOutcomeError):
                context.catalog.write(where, *changes, write_id=write_id)
                break
            pause(context, number, context.backoff)
    return write_id


class Silence:
    """Watches a row whose owner may be dead, by this process's own monotonic clock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: tuple[str, float] = ("", 0.0)  # the row's version, and since when

    def is_owner_dead(self, mark: str, version: str) -> bool:
        """Returns whether the owner has certainly ended, or was silent for the time to live."""
        if self._context.processes.is_dead(mark):
            return True
        now_s = self._context.clock.monotonic_s()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > self._context.log_settings.lease_ttl_ms / 1000


@contextmanager
def beating(context: Context, beat: Callable[[], None]) -> Iterator[threading.Event]:
    """Sends heartbeats from a thread while the body runs; ``FencedError`` sets the event.

    Ignores other errors: the next heartbeat may succeed, and if none does, the owner is fenced at
    its next write.
    """
    lost, ended = threading.Event(), threading.Event()

    def run() -> None:
        while not ended.wait(context.log_settings.lease_ttl_ms / 3000):
            try:
                beat()
            except FencedError:
                lost.set()
                return
            except Exception:  # noqa: BLE001, S112 - a driver's error must not end this
                continue

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        ended.set()
        thread.join()


Guard = Callable[[], tuple[Check, ...]]
"""What else must hold to create the row: ``ABSENT`` alone could become true again later."""

_LOOK_S = 0.2  # between looks at a row whose owner may be dead


class Ownership:
    """One process's view of such a row."""

    def __init__(
        self, context: Context, where: str, row: str, what: str, guard: Guard = tuple
    ) -> None:
        self.epoch = 0
        self._context = context
        self._where = where
        self._row = row
        self._what = what
        self._guard = guard
        self._id = context.ids.new()
        self._version = ""
        self._beat = 0
        self._silence = Silence(context)
        self._lock = threading.RLock()  # of a process's own heartbeats and takes
        self._process = ProcessGuard(what, self._leave_to_parent)

    def try_take(self) -> bool:
        """Step 1, if no living process has it; call it again to wait as a standby.

        Passes on what ``guard`` raises.
        """
        with self._lock:
            row = self._context.catalog.get(self._where, self._row)
            if row is None:
                return self._put(self._lease(1), None)
            lease = decode_row(row.value, HeldRow, self._what)
            if lease.owner and not self._can_take(lease, row.version):
                return False
            return self._put(self._lease(lease.epoch + 1), row.version)

    def take(self) -> bool:
        """Waits long enough to see whether an owner is dead; returns False if it is alive."""
        times = looks(self._context.clock, self._context.log_settings.dead_after_s, _LOOK_S)
        return any(self.try_take() for _ in times)

    def check(self) -> Check:
        """Returns a check that the row is as we last wrote it, for a write that counts."""
        self._process.check()
        return Check(self._row, self._version)

    def current(self) -> tuple[int, Check]:
        """Returns the epoch and the check for a write under it, read together.

        A heartbeat of our own may take the row again at any time.
        """
        with self._lock:
            return self.epoch, self.check()

    def is_ours(self) -> bool:
        """Reads the row after a write that did not land; returns whether it is still ours."""
        with self._lock:
            row = self._context.catalog.get(self._where, self._row)
            if row is None:
                return False
            lease = decode_row(row.value, HeldRow, self._what)
            if (lease.owner, lease.epoch) != (self._id, self.epoch):
                return False
            self._version = row.version
            return True

    def beat(self) -> None:
        """Step 2. Raises ``FencedError`` if another process has the row.

        May take a row without an owner again: a sweep empties the row of a compiler to fence what
        was in progress.
        """
        with self._lock:
            self._beat += 1
            if self._put(self._lease(self.epoch), self._version):
                return
            if not (self.is_ours() or self.try_take()):
                raise FencedError(
                    f"{self._what}: another process has claimed it, ours was epoch {self.epoch}: "
                    "stop this one"
                )

    def beating(self) -> contextlib.AbstractContextManager[threading.Event]:
        """Sends heartbeats while the body runs; sets the event when another process has the row."""
        return beating(self._context, self.beat)

    def release(self) -> None:
        """Step 3. Does nothing for a row that was lost, or in a forked child."""
        if self._process.is_foreign:
            return
        free = HeldRow("", self.epoch, self._beat)
        change = Put(self._row, encode_row(free), expect=self._version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError, UnavailableError):
            self._context.catalog.write(self._where, change, write_id=self._context.ids.new())

    def _leave_to_parent(self) -> None:
        """In a forked child: leaves the row to the parent."""
        self._lock = RefusingLock(self._process)  # type: ignore[assignment]

    def _lease(self, epoch: int) -> HeldRow:
        mark, now_ms = self._context.processes.mark(), self._context.clock.now_ms()
        return HeldRow(self._id, epoch, self._beat, mark, now_ms)

    def _put(self, lease: HeldRow, version: str | None) -> bool:
        """Writes our lease by the version that we know; returns False after a conflict."""
        wanted = Put(self._row, encode_row(lease), version or ABSENT)
        guards = () if version else self._guard()
        mine = write_held(self._context, self._where, self._what, wanted, *guards)
        if mine is not None:
            self.epoch, self._version = lease.epoch, mine
        return mine is not None

    def _can_take(self, lease: HeldRow, version: str) -> bool:
        return lease.owner == self._id or self._silence.is_owner_dead(lease.mark, version)


class Fence(Persisted, frozen=True):
    """How often all members were stopped; heartbeats expect an unchanged row."""

    changes: int


class Member(Persisted, frozen=True):
    """A member's heartbeat."""

    beat: int
    mark: str  # of its process
    seen_ms: int  # by its own wall clock; only shown, never compared
    once: bool = False  # it takes what is free and ends: no share of the work is kept for it


class Membership:
    """One member's view of a group: which members are alive."""

    once = False

    def __init__(self, context: Context, where: str, what: str) -> None:
        self.id = context.ids.new()
        self._context = context
        self._members = where  # the catalog partition of the rows
        self._what = what
        self._beats = 0
        self._fence: str | Absent = ABSENT  # the version of that row when we joined
        # Only the process that made it writes.
        self._guard = ProcessGuard(what)
        self._seen: dict[str, tuple[str, float]] = {}  # member row → version, since when
        self._heard: set[str] = set()  # ids of members whose row changed since we watch it
        self._once: set[str] = set()  # ids of members that keep no share

    def join(self) -> None:
        """Step 1."""
        busy = UnavailableError(f"{self._what}: too many writers at once: try again")
        for _ in attempts(self._context, busy):
            # Read the fence before the group's own row: an operation that starts after we read that
            # row changes the fence, and then the heartbeat fails.
            fence = self._context.catalog.get(self._members, layout.FENCE_ROW)
            self._register()
            self._fence = ABSENT if fence is None else fence.version  # only if that succeeded
            if self._beat():
                return

    def alive(self) -> list[str]:
        """Returns the ids of all living members, in order; deletes the rows of long dead ones."""
        clock = self._context.clock
        # Taken before the rows are read: a slow scan must not count as silence.
        began_s = clock.monotonic_s()
        ttl_s = self._context.log_settings.lease_ttl_ms / 1000
        living: list[str] = []
        seen: dict[str, tuple[str, float]] = {}
        once: set[str] = set()
        for row, member_id, member in _scan(self._context, self._members):
            version, since_s = self._seen.get(row.row, ("", 0.0))
            is_new = version != row.version
            if is_new and version:
                self._heard.add(member_id)
            seen[row.row] = (row.version, clock.monotonic_s() if is_new else since_s)
            silent = began_s - seen[row.row][1] > ttl_s
            if member_id == self.id or not (silent or self._context.processes.is_dead(member.mark)):
                living.append(member_id)
                if member.once:
                    once.add(member_id)
            elif self._owns_nothing(member_id):
                _remove(self._context, self._members, row)
        self._seen, self._once = seen, once
        return living

    def leave(self) -> None:
        """Step 5."""
        self._guard.check()
        change = Delete(layout.member_row(self.id))
        with contextlib.suppress(UnknownOutcomeError):
            self._context.catalog.write(self._members, change, write_id=self._context.ids.new())

    # What a group adds.

    def _register(self) -> None:
        """In step 1: raises if the group does not exist or is being deleted."""

    def _owns_nothing(self, member_id: str) -> bool:
        """Returns whether the row of a dead member may be deleted."""
        return True

    # Internals.

    def _beat(self) -> bool:
        """Returns whether the heartbeat was written: not if the fence changed since we joined."""
        self._guard.check()
        self._beats += 1
        mark, now_ms = self._context.processes.mark(), self._context.clock.now_ms()
        member = Member(self._beats, mark, now_ms, self.once)
        change = Put(layout.member_row(self.id), encode_row(member))
        fence = Check(layout.FENCE_ROW, self._fence)
        with contextlib.suppress(UnknownOutcomeError):  # the next heartbeat settles it
            try:
                self._context.catalog.write(
                    self._members, change, fence, write_id=self._context.ids.new()
                )
            except ConflictError:
                return False
        return True

    def _is_member_dead(self, member_id: str, began_s: float) -> bool:
        """Returns whether a member is dead; one that joined a moment ago is not."""
        row = self._context.catalog.get(self._members, layout.member_row(member_id))
        if row is None:
            return True
        member = decode_row(row.value, Member, row.row)
        if self._context.processes.is_dead(member.mark):
            return True
        known, since_s = self._seen.get(row.row, ("", 0.0))
        if known != row.version:
            self._seen[row.row] = (row.version, self._context.clock.monotonic_s())
            return False
        return began_s - since_s > self._context.log_settings.lease_ttl_ms / 1000


def fair_share(member_id: str, living: Sequence[str], count: int) -> int:
    """Returns how many of ``count`` things a member should have; shares differ by one at most."""
    if member_id not in living:
        return 0
    extra = count % len(living)
    return count // len(living) + (living.index(member_id) < extra)


def read_members(context: Context, where: str) -> dict[str, Member]:
    """Returns the rows of all members by id, also of dead ones."""
    return {member_id: member for _, member_id, member in _scan(context, where)}


def raise_fence(context: Context, where: str, what: str) -> None:
    """Stops all members at their next heartbeat, and removes their rows.

    The row of a member that joins during this call stays. Whether it joined before the fence
    changed cannot be seen: then it is silent, and considered dead after the time to live.
    """
    before = {row.row for row, _, _ in _scan(context, where)}

    def decide(rows: Rows) -> Decision[None]:
        row = rows[layout.FENCE_ROW]
        changes = 0 if row is None else decode_row(row.value, Fence, f"fence of {what}").changes
        return Decision(None, [rows.put(layout.FENCE_ROW, encode_row(Fence(changes + 1)))])

    # Then the versions of their rows are final: only a member that leaves still deletes its own.
    update(context, where, [layout.FENCE_ROW], decide, f"fence of {what}")
    for row, _, _ in _scan(context, where):
        if row.row in before:
            _remove(context, where, row)


def _remove(context: Context, where: str, row: Row) -> None:
    """Deletes the row of a member that is dead or was stopped, unless it was written again."""
    with contextlib.suppress(ConflictError, UnknownOutcomeError):
        change = Delete(row.row, expect=row.version)
        context.catalog.write(where, change, write_id=context.ids.new())


def _scan(context: Context, where: str) -> list[tuple[Row, str, Member]]:
    found = []
    for row in context.catalog.scan(where, layout.member_row(""), "member0"):
        member_id = row.row.removeprefix(layout.member_row(""))
        found.append((row, member_id, decode_row(row.value, Member, f"member `{member_id}`")))
    return found
