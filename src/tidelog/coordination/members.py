"""Members: processes that share work, such as a consumer's or the drivers of a pipeline.

Each member keeps a ``member`` row alive by rewriting it (its heartbeat). What it works on is in
other rows, each with an owner and an epoch. Members have liveness; those rows have ownership. The
steps, and what a crash after each one leaves:

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
from collections.abc import Sequence

from tidelog.catalog.base import ABSENT, Absent, Check, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.context import Context
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.process import ProcessGuard

__all__ = ["Fence", "Member", "Membership", "fair_share", "raise_fence", "read_members"]


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

    def _is_over(self, member_id: str, began_s: float) -> bool:
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
