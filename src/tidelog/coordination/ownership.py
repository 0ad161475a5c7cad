"""Rows that say who holds something: written whatever replies get lost, beaten, and watched.

A row that one process holds at a time: a partition's compiler, a pipeline's shard, the scribe.

1. take: owner and epoch + 1, by the version that was read  → dead: another takes it over
2. beat: write it again, by our own version                 → dead: seen to be silent
3. release: no owner                                        → free at once

An owner is taken for dead when its row has not changed for the time to live by the watcher's own
monotonic clock, or when its process is known to have ended. The epoch is what fences: it only
grows, and whoever works under the row checks its version in each write that counts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidelog.catalog.base import ABSENT, Change, Check, Put
from tidelog.context import Context
from tidelog.coordination.outcome import Sent
from tidelog.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidelog.model.partition_rows import HeldRow, decode_row, encode_row
from tidelog.process import ProcessGuard, RefusingLock

__all__ = [
    "Guard",
    "Ownership",
    "Silence",
    "beating",
    "put_held",
    "write_held",
    "write_repeatedly",
]

_ATTEMPTS = 20  # of one write whose replies get lost


def put_held(
    context: Context, where: str, row: str, value: bytes, version: str | None, what: str
) -> str | None:
    """Write a row as :func:`write_held` does, by itself."""
    return write_held(context, where, what, Put(row, value, version or ABSENT))


def write_held(context: Context, where: str, what: str, held: Put, *others: Change) -> str | None:
    """Write a row by the version that we know; its new version, or None: somebody else was first.

    Only this write carries its id, so a row that has it is ours. ``UnavailableError`` when nothing
    was written, ``UnknownOutcomeError`` when a reply was lost and no row shows what became of the
    write.
    """
    write_id = context.ids.new()
    sent = Sent()
    context = sent.noting(context)
    with sent.told(what, "try again"):
        for attempt in range(_ATTEMPTS):
            try:
                context.catalog.write(where, held, *others, write_id=write_id)
            except ConflictError:
                return None
            except UnknownOutcomeError:
                found = context.catalog.get(where, held.row)
                if found is None or found.version not in (held.expect, write_id):
                    return None
                if found.version != write_id:
                    context.clock.sleep(0.01 * attempt)
                    continue
            return write_id
        raise UnavailableError("replies keep getting lost")


def write_repeatedly(context: Context, where: str, *changes: Change) -> str:
    """Send a write again, under the same id, while replies get lost; its id, the rows' version.

    It may also land later than this returns, once more. So give expectations that then fail, or
    changes that do no harm at any later time. ``UnknownOutcomeError`` when replies keep getting
    lost, or one was and then nothing can be reached.
    """
    write_id = context.ids.new()
    delays = context.backoff.delays_s(context.random)
    sent = Sent()
    context = sent.noting(context)
    with sent.told(f"write to `{where}`", "try again"):
        while True:
            try:
                context.catalog.write(where, *changes, write_id=write_id)
                return write_id
            except UnknownOutcomeError:
                delay_s = next(delays, None)
                if delay_s is None:
                    raise
                context.clock.sleep(delay_s)


class Silence:
    """Watches a row whose owner may be dead, by this process's own monotonic clock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: tuple[str, float] = ("", 0.0)  # the row's version, and since when

    def is_over(self, mark: str, version: str) -> bool:
        """Whether the owner is known to have ended, or was silent for the time to live."""
        if self._context.processes.is_dead(mark):
            return True
        now_s = self._context.clock.monotonic_s()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > self._context.settings.lease_ttl_ms / 1000


@contextmanager
def beating(context: Context, beat: Callable[[], None]) -> Iterator[threading.Event]:
    """Heartbeats in a thread of their own while the body runs; the event is set by ``FencedError``.

    Another error is passed over: the next beat may come through, and if none does, whoever holds
    the row is fenced at its next write.
    """
    lost, ended = threading.Event(), threading.Event()

    def run() -> None:
        while not ended.wait(context.settings.lease_ttl_ms / 3000):
            try:
                beat()
            except FencedError:
                lost.set()
                return
            except Exception:  # noqa: BLE001, S112 - a driver's own error must not end the beats
                continue

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        ended.set()
        thread.join()


Guard = Callable[[], tuple[Check, ...]]
"""What else must hold for the row to be made: ``ABSENT`` alone could come true again later."""

_LOOK_S = 0.2  # between looks at a row whose owner may be dead


class Ownership:
    """One process's view of such a row."""

    retakes = True  # at a beat, where nobody has it any more

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
        self._lock = threading.RLock()  # of a process's own beats and takes
        self._process = ProcessGuard(what, self._leave_to_parent)

    def try_take(self, force: bool = False) -> bool:
        """Step 1, if nobody living has it, or by ``force``; call it again to stand by.

        What ``guard`` raises comes through.
        """
        with self._lock:
            row = self._context.catalog.get(self._where, self._row)
            if row is None:
                return self._put(self._lease(self._next_epoch(0)), None)
            lease = decode_row(row.value, HeldRow, self._what)
            if lease.owner and not force and not self._is_over(lease, row.version):
                return False
            return self._put(self._lease(self._next_epoch(lease.epoch)), row.version)

    def _next_epoch(self, epoch: int) -> int:
        """The epoch to take the row with, which has had this one."""
        return epoch + 1

    def take(self) -> bool:
        """Wait as long as it takes to see that an owner is dead; False: it is alive."""
        clock = self._context.clock
        until_s = clock.monotonic_s() + 1.5 * self._context.settings.lease_ttl_ms / 1000
        while True:
            is_last = clock.monotonic_s() > until_s  # before the look: then a stall costs no look
            if self.try_take():
                return True
            if is_last:
                return False
            clock.sleep(_LOOK_S)

    def check(self) -> Check:
        """For a write that counts: the row is as we last wrote it."""
        self._process.check()
        return Check(self._row, self._version)

    def current(self) -> tuple[int, Check]:
        """The epoch, and the check for a write under it: of one moment, since a beat of our own
        may take the row anew at any time.
        """
        with self._lock:
            return self.epoch, self.check()

    def is_ours(self) -> bool:
        """Look again, after a write that did not land: whether the row is ours, perhaps beaten."""
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
        """Step 2. ``FencedError`` when another process has the row.

        One that nobody has may be taken anew: a sweep empties the row of a compiler, to fence what
        was under way.
        """
        with self._lock:
            self._beat += 1
            if self._put(self._lease(self.epoch), self._version):
                return
            if not (self.is_ours() or (self.retakes and self.try_take())):
                raise FencedError(
                    f"{self._what}: another process has taken it, ours was epoch {self.epoch}: "
                    "stop this one"
                )

    def beating(self) -> contextlib.AbstractContextManager[threading.Event]:
        """Heartbeats while the body runs; the event is set when another process has the row."""
        return beating(self._context, self.beat)

    def release(self) -> None:
        """Step 3; one that was lost needs none, and a forked child has none to release."""
        if self._process.is_foreign:
            return
        free = HeldRow("", self.epoch, self._beat)
        change = Put(self._row, encode_row(free), expect=self._version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError, UnavailableError):
            self._context.catalog.write(self._where, change, write_id=self._context.ids.new())

    def _leave_to_parent(self) -> None:
        """In a forked child: the row is the parent's to write."""
        self._lock = RefusingLock(self._process)  # type: ignore[assignment]

    def _lease(self, epoch: int) -> HeldRow:
        mark, now_ms = self._context.processes.mark(), self._context.clock.now_ms()
        return HeldRow(self._id, epoch, self._beat, mark, now_ms)

    def _put(self, lease: HeldRow, version: str | None) -> bool:
        """Write our lease by the version that we know; False when somebody else was first."""
        wanted = Put(self._row, encode_row(lease), version or ABSENT)
        guards = () if version else self._guard()
        mine = write_held(self._context, self._where, self._what, wanted, *guards)
        if mine is not None:
            self.epoch, self._version = lease.epoch, mine
        return mine is not None

    def _is_over(self, lease: HeldRow, version: str) -> bool:
        return lease.owner == self._id or self._silence.is_over(lease.mark, version)
