"""A row that one process holds at a time: a partition's compiler, or the scribe.

The steps, and what a crash after each one leaves:

    1. take: owner and epoch + 1, by the version that was read  → another process takes it over
    2. heartbeat: write it again, by our own version            → it is seen to be silent
    3. release: no owner                                        → free at once

An owner is considered dead when its row has not changed for the time to live by the watcher's own
monotonic clock, or when its process is known to have ended. The epoch is what fences. It only
grows, and the owner checks the row's version in each write that counts. A lost reply is settled by
the id of the write, which no other row has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidelog.catalog.base import ABSENT, Change, Check, Put
from tidelog.catalog.update import pause, rounds
from tidelog.clock import looks
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites
from tidelog.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidelog.model.partition_rows import HeldRow, decode_row, encode_row
from tidelog.model.times import Backoff
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

    def is_over(self, mark: str, version: str) -> bool:
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
            if lease.owner and not self._is_over(lease, row.version):
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

    def _is_over(self, lease: HeldRow, version: str) -> bool:
        return lease.owner == self._id or self._silence.is_over(lease.mark, version)
