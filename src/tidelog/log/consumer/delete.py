"""Deletes a consumer: removes its cursors and members, so that trims no longer wait for it.

The steps, and what a crash after each one leaves:

    1. check that no member is alive, unless forced. If one
       is, put ``ready`` back where a call that died has left
       ``deleting``                                          → nothing
    2. consumer row as ``deleting``, by its version, even if
       another call wrote ``deleting``: the new version is
       ours alone. Not if another consumer got the name
       since step 1                                          → no member can join; delete again
    3. check again, without waiting. If a member joined since
       step 1, put ``ready`` back                            → the same
    4. consumer row as ``ending``, by the version of step 2.
       From here on the delete never goes back, and later
       calls continue with step 5 without a check            → delete again
    5. write every lease as ``deleted``, with no owner and a
       higher epoch, even a lease that is missing or is
       already deleted                                       → its member is fenced; the same
    6. change the ``fence`` of the members                   → heartbeats fail; the same
    7. delete the ``member`` rows, by their versions         → the same
    8. consumer row as ``deleted``, by the version of step 4 → the name is free

Every write of steps 5 to 7 depends on the decision of step 4: read the row, check that the consumer
row still has the version of step 4, then write the row by the version that was read. A call that
finds another version stops. So a call that stalls, however long, changes no row that was written
after another call took over: that call writes every lease, and its write of the consumer row ended
our version.

Any call may put ``ready`` back in step 1 or 3, even over another call's ``deleting``. That ends the
other call's version, so it has not reached step 4 and never will. After step 4 no call checks for
members: the first one did, and cursors may be deleted already. So a consumer stays in ``deleting``
or ``ending`` only until the next call ends, with or without living members.

The fence is a counter that tells which consumer has the name. Step 6 raises it after the decision
and before the name is free. A prompt reads the fence before the consumer row, so it never names a
later consumer. Step 2 reads the row, then the fence, and writes the row by its version. So it never
marks a consumer that was created after the prompt or after the call.

The rows of consumers, leases and fences stay, a few bytes each, until the topic is deleted. So a
delayed repeat of an old write, which expects no row or an older version, brings nothing back.
Epochs only grow, so what a member read before the delete is never committed after it. A member
reads the lease or the fence before it reads the consumer row. So a member that saw ``ready`` fails
to take a lease after step 5, and fails its heartbeat after step 6. None of its rows is left when
the name is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from tidelog.catalog.base import Change, Delete, Row
from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.concurrency import describe_process
from tidelog.context import Context
from tidelog.coordination.ownership import Fence, Member, put_held
from tidelog.coordination.registry import check_shown
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.consumer.leases import (
    Lease,
    RegisteredConsumer,
    decode_registered,
    lease_of,
    read_lease_row,
)
from tidelog.log.consumer.seek import consumer_not_found
from tidelog.log.status import consumer_names
from tidelog.model import layout, limits
from tidelog.model.address import nearest
from tidelog.model.event import check_utf8
from tidelog.model.topic import Topic, decode_row, encode_row

__all__ = ["check_delete", "consumer_version", "delete_consumer"]


T = TypeVar("T")

_State = Literal["ready", "deleting", "ending", "deleted"]
_LOOK_S = 0.2  # between two checks for a heartbeat


def consumer_version(context: Context, topic: Topic, name: str) -> str:
    """Returns a version that differs from that of a later consumer of the same name.

    Raises ``NotFoundError``.
    """
    return _Deletion(context, topic, name).look()[0]


def check_delete(
    context: Context, topic: Topic, name: str, *, force: bool = False, shown: str = ""
) -> None:
    """Raises what :func:`delete_consumer` would raise, and changes nothing."""
    _Deletion(context, topic, name).check(force, shown)


def delete_consumer(
    context: Context, topic: Topic, name: str, *, force: bool = False, shown: str = ""
) -> None:
    """Deletes a consumer with its cursors. Raises ``NotFoundError``, also if it was already
    deleted.

    Raises ``InvalidError`` while a member is alive, unless ``force``. That is known at once for
    members that were closed and for processes of this machine; otherwise it takes 1.5 times
    ``lease_ttl_ms``. ``shown`` is the ``consumer_version`` that a person confirmed
    (``check_shown``).
    """
    _Deletion(context, topic, name).run(force, shown)


@dataclass(frozen=True, slots=True)
class _Sign:
    """A row that a living reader keeps changing."""

    version: str
    who: str


class _OvertakenError(Exception):
    """Another call has changed the consumer row since step 4."""


class _Deletion:
    """The steps for one consumer."""

    def __init__(self, context: Context, topic: Topic, name: str) -> None:
        check_utf8("consumer name", name)
        self._context = context
        self._topic = topic
        self._name = name
        self._what = f"consumer `{name[:80]}` of `{topic.name}`"
        self._row = layout.consumer_row(name)
        self._where = layout.consumers_partition(topic.incarnation)
        self._members = layout.consumer_members(topic.incarnation, name)

    def look(self) -> tuple[str, RegisteredConsumer, Row]:
        """Returns which consumer has the name, and its row.

        Reads the fence first: it may be that of an earlier consumer, but never of a later one.
        """
        which = self._which()
        found, row = self._read_consumer()
        return (f"{which}/ending" if found.state == "ending" else which), found, row

    def check(self, force: bool, shown: str) -> None:
        """Does step 1 alone."""
        wanted, found, _ = self.look()
        if found.state != "ending":
            check_shown(self._what, shown, wanted)
            if not force:
                self._wait_for_silence()

    def run(self, force: bool, shown: str) -> None:
        """Runs steps 1 to 8."""
        wanted, found, row = self.look()
        silent: Mapping[str, _Sign] = {}
        if found.state != "ending":
            check_shown(self._what, shown, wanted)
            if not force:
                with self._ready_if_alive(row.version, found.state == "deleting"):
                    silent = self._wait_for_silence()
        state, version = self._begin(wanted)
        if state == "deleting":
            if not force:
                with self._ready_if_alive(version):
                    self._refuse_new(silent, self._signs())
            decided = self._put("ending", version)
            if decided is None:
                self._check_deleted("deleting", "ending", "ready")
                return
            version = decided
        try:
            for partition in range(self._topic.partitions):
                self._end_lease(partition, version)
            self._raise_fence(version)
            self._remove_members(version)
        except _OvertakenError:
            self._check_deleted("ending")
            return
        if self._put("deleted", version) is None:
            self._check_deleted("ending")

    def _read_consumer(self) -> tuple[RegisteredConsumer, Row]:
        return self._checked(self._context.catalog.get(self._where, self._row))

    def _checked(self, row: Row | None) -> tuple[RegisteredConsumer, Row]:
        """The consumer of a row. ``NotFoundError`` where there is none."""
        found = None if row is None else decode_registered(row)
        if row is None or found is None or found.state == "deleted":
            like = nearest(self._name, consumer_names(self._context, self._topic))
            raise consumer_not_found(self._topic, self._name, like)
        return found, row

    def _which(self) -> str:
        """Returns the fence: how often the name became free, since each delete raises it before."""
        row = self._context.catalog.get(self._members, layout.FENCE_ROW)
        return f"{self._topic.incarnation}/{self._deletes(row)}"

    def _deletes(self, fence: Row | None) -> int:
        """How often consumers of this name were deleted, from the fence's row."""
        if fence is None:
            return 0
        return decode_row(fence.value, Fence, f"fence of {self._what}").changes

    def _begin(self, wanted: str) -> tuple[_State, str]:
        """Step 2: returns ``deleting``, or ``ending`` if that was already decided, and the version.

        Raises ``NotFoundError`` if another consumer than ``wanted`` has the name by now. A decided
        delete is finished, whichever consumer it is for.
        """

        def decide(rows: Rows) -> Decision[tuple[_State, str]]:
            # May be ``deleting``, by a call that died or one that runs now.
            found, _ = self._checked(rows[self._row])
            state: _State = "ending" if found.state == "ending" else "deleting"
            if state == "deleting" and self._which() != wanted:  # the fence is read last here
                raise NotFoundError(
                    f"{self._what}: was deleted and made again meanwhile: nothing was deleted by "
                    "this call: look at it, then delete again"
                )
            change = rows.put(self._row, encode_row(RegisteredConsumer(self._name, state)))
            return Decision((state, rows.write_id), [change])

        return self._update(self._where, self._row, decide)

    @contextlib.contextmanager
    def _ready_if_alive(self, version: str, is_deleting: bool = True) -> Iterator[None]:
        """Puts ``ready`` back and deletes nothing if a member is found to be alive."""
        try:
            yield
        except InvalidError:
            if is_deleting:
                self._put("ready", version)
            raise

    def _put(self, state: _State, version: str) -> str | None:
        """Changes the consumer row by its version.

        Returns the new version, or None after a conflict.
        """
        wanted = encode_row(RegisteredConsumer(self._name, state))
        return put_held(self._context, self._where, self._row, wanted, version, self._what)

    def _check_deleted(self, *unfinished: _State) -> None:
        """Returns if another call, or a delete of the topic, has finished the delete.

        Raises if the row is in one of the ``unfinished`` states. After step 4 that is only
        ``ending``: the row changes to ``deleted``, after which the name may be in use again.
        """
        row = self._context.catalog.get(self._where, self._row)
        if row is not None and decode_registered(row).state in unfinished:
            raise UnavailableError(f"{self._what}: another call deletes it too: delete it again")

    def _check_ours(self, version: str) -> None:
        """Raises if another call has changed the consumer row since step 4.

        A write after this check must expect a version that was read before it.
        """
        row = self._context.catalog.get(self._where, self._row)
        if row is None or row.version != version:
            raise _OvertakenError

    def _wait_for_silence(self) -> Mapping[str, _Sign]:
        """Step 1: returns the rows that have not changed for long enough."""
        clock = self._context.clock
        first = self._signs()
        began_s = clock.monotonic_s()
        patience_s = self._context.log_settings.dead_after_s
        while True:
            looked_s = clock.monotonic_s()  # before the check: a slow one must not count as silence
            signs = self._signs()
            self._refuse_new(first, signs)
            if not signs or looked_s - began_s > patience_s:
                return first
            clock.sleep(_LOOK_S)

    def _refuse_new(self, silent: Mapping[str, _Sign], signs: Mapping[str, _Sign]) -> None:
        for key, sign in signs.items():
            if silent.get(key) != sign:
                raise InvalidError(
                    f"{self._what}: {sign.who} is alive: stop it first, or delete with --force",
                    member=sign.who,
                )

    def _signs(self) -> dict[str, _Sign]:
        """Returns what living readers change: member rows, and leases of one-shot readers."""
        signs = {}
        for row in self._context.catalog.scan(self._members, "member/", "member0"):
            member = decode_row(row.value, Member, f"member row `{row.row}`")
            if not self._context.processes.is_dead(member.mark):
                signs[row.row] = _Sign(row.version, f"member {_shown(row.row[7:], member.mark)}")
        for partition in range(self._topic.partitions):
            found = read_lease_row(self._context, self._topic, self._name, partition)
            if found is None or not found[0].once or not found[0].owner:
                continue
            lease, version = found
            if not self._context.processes.is_dead(lease.mark):
                who = f"a reader of partition {partition} {_shown(lease.owner, lease.mark)}"
                signs[f"lease/{partition}"] = _Sign(version, who)
        return signs

    def _end_lease(self, partition: int, version: str) -> None:
        """Step 5 for one partition.

        Also writes a lease that an earlier delete has ended: a member may have read it, and the
        consumer as ``ready``, before this delete started.
        """
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)

        def decide(rows: Rows) -> Decision[None]:
            row = rows["lease"]
            self._check_ours(version)
            epoch = 1
            if row is not None:
                epoch += lease_of(self._topic, self._name, partition, row)[0].epoch
            ended = encode_row(Lease("", epoch, 0, deleted=True))
            return Decision(None, [rows.put("lease", ended)])

        self._update(where, "lease", decide)

    def _raise_fence(self, version: str) -> None:
        """Step 6: makes the heartbeats of all current members fail."""

        def decide(rows: Rows) -> Decision[None]:
            row = rows[layout.FENCE_ROW]
            self._check_ours(version)
            raised = encode_row(Fence(self._deletes(row) + 1))
            return Decision(None, [rows.put(layout.FENCE_ROW, raised)])

        self._update(self._members, layout.FENCE_ROW, decide)

    def _remove_members(self, version: str) -> None:
        """Step 7. Reads a row again if its member removes it in the meantime."""
        for _ in attempts(self._context, self._busy()):
            rows = list(self._context.catalog.scan(self._members, "member/", "member0"))
            self._check_ours(version)
            with contextlib.suppress(ConflictError, UnknownOutcomeError):
                for first in range(0, len(rows), limits.CHANGES_MAX):
                    some = rows[first : first + limits.CHANGES_MAX]
                    gone: list[Change] = [Delete(each.row, each.version) for each in some]
                    self._context.catalog.write(
                        self._members, *gone, write_id=self._context.ids.new()
                    )
                return

    def _update(self, where: str, row: str, decide: Callable[[Rows], Decision[T]]) -> T:
        return update(self._context, where, [row], decide, self._what)

    def _busy(self) -> UnavailableError:
        return UnavailableError(f"{self._what}: too many writers at once: delete it again")


def _shown(member_id: str, mark: str) -> str:
    """Returns a member's id, and its process if known."""
    process = describe_process(mark)
    return f"`{member_id}` ({process})" if process else f"`{member_id}`"
