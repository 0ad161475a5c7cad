"""Tell others that a partition has new events: debounced, and never silent about the last one.

The first event of a quiet partition notifies at once; then at most one more notification goes out
in each ``max_latency_ms`` while events go on. One row for each partition, ``state``, says up to
which offset targets were told, and who looks again when. Whoever committed checks until the row
covers its commit; a check goes like this:

1. read the row. Our commit is covered: done. Somebody else has promised to look again later:
   defer, and check again when that should be over, plus an allowance
2. read the head. Nothing is new: done
3. claim: put our id into the row, until the sending should be over; expects the row's version
4. send the newest offset to every target
5. record what they were told, with our promise to look again one ``max_latency_ms`` after the
   claim; expects our claim. Where a target failed, the record says so instead, and when to retry
6. check again then, also for those who deferred to us

What a crash after each step leaves behind, and who repairs it:

========== ==================================== ==============================================
dies after on disk                              repaired by
========== ==================================== ==============================================
the commit events that nobody was told of       the next committer at once; or :func:`repair`
1, 2       the same                             the same
3          a claim that nothing came of         who deferred to it, or the next committer, once
                                                it is over; or :func:`repair`
4          the same, and the targets know       the same; targets are told twice
5          all; nobody will look again          whoever committed since: each checks for itself
========== ==================================== ==============================================

A conflict sends the check back to step 1, a lost reply is settled by reading the row back, and what
that cannot tell goes to step 1 too: the worst is a second notification. ``notified`` rises only
after every target took an offset at or past it. Clocks decide only when to try: a promise that no
right clock could have made is ignored, so nobody is waited for longer than the longest promise.

No threads and no locks here; see ``notifier``. A notification row of a topic that is deleted in the
same moment may stay behind: a few bytes, in an incarnation that nobody reads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.run import decode_row, encode_row
from tidelog.model.topic import Topic

__all__ = [
    "Checked",
    "Debounce",
    "Notification",
    "NotifyState",
    "Repaired",
    "Target",
    "read_state",
    "repair",
]

_ROW = "state"
_ALLOWANCE_MS = 500  # how far clocks may differ, and how late a live waiter may be
_SENDING_MS = 5_000  # what a claim leaves for sending; the time-out of our targets
_PAUSE_MS = 30_000  # how long targets that refused, or failed every try, are left alone
_CONFLICTS_MAX = 5  # in one check; each means that somebody else got on


class Notification(msgspec.Struct, frozen=True):
    """What targets are told: events up to and with this offset are there to be read."""

    topic: str
    partition: int
    offset: int


class Target(Protocol):
    """Somebody to be told."""

    def send(self, notification: Notification) -> None:
        """Tell them; may be called again with the same or with an older offset.

        ``InvalidError`` where they refuse, so that repeating will not mend it; any other error
        means that a later try may succeed. Returns or raises within seconds.
        """
        ...


class NotifyState(Persisted, frozen=True):
    """The row that all who notify for a partition share."""

    notified: int = 0  # targets know all offsets below this
    waiter: str = ""  # who sends now, or has promised to look again
    until_ms: int = 0  # when it will have done so
    failures: int = 0  # of the targets, in a row


@dataclass(frozen=True, slots=True)
class Checked:
    """How a check ended."""

    notified: int  # what the row covers now
    again_s: float | None = None  # when to check again, on the monotonic clock; None: no need
    sent: Notification | None = None  # what every target took
    error: Exception | None = None  # why a target did not
    gave_up: bool = False  # it refused, or failed all the tries of a backoff


class Repaired(NamedTuple):
    """What one round of :func:`repair` did."""

    sent: list[Notification]
    waiting: list[int]  # partitions that somebody else has promised to look at
    errors: list[Exception]


@dataclass(frozen=True)
class Debounce:
    """One process's side of the protocol for one topic; ``waiter`` is an id of its own."""

    log: Log
    topic: Topic
    targets: Sequence[Target]
    waiter: str

    def check(self, partition: int, committed: int, *, hurry: bool = False) -> Checked:
        """See to it that targets know what was committed below offset ``committed``.

        ``hurry`` defers to nobody. ``NotFoundError`` once the topic is deleted; what the catalog
        raises otherwise leaves nothing wrong behind, and the check can be repeated.
        """
        for _ in range(_CONFLICTS_MAX):
            state, version = read_state(self.log, self.topic, partition)
            if state.notified >= committed and (hurry or state.waiter != self.waiter):
                return Checked(state.notified)
            wait_ms = _deferral_ms(self.topic, state, self.waiter, self.log.clock.now_ms())
            if wait_ms and not hurry:
                return Checked(state.notified, self._in(wait_ms))
            head, _ = read_head(self.log, self.topic, partition)
            if head.closed:
                raise NotFoundError(f"topic `{self.topic.name}`: is being deleted: stop notifying")
            if state.notified >= head.next:
                return Checked(state.notified)
            claimed = self._claim(partition, state, version)
            if claimed is None:
                continue
            checked = self._send(partition, head.next, *claimed)
            if checked is not None:
                return checked
        return Checked(state.notified, self._in(_ALLOWANCE_MS))

    def _claim(
        self, partition: int, state: NotifyState, version: str | None
    ) -> tuple[NotifyState, str] | None:
        """Step 3: the claim and its version; None where somebody else was first."""
        until_ms = self.log.clock.now_ms() + _SENDING_MS
        claim = msgspec.structs.replace(state, waiter=self.waiter, until_ms=until_ms)
        claimed = self._write(partition, claim, version)
        return (claim, claimed) if claimed else None

    def _send(self, partition: int, end: int, claim: NotifyState, version: str) -> Checked | None:
        """Steps 4 and 5; None where somebody has taken over meanwhile."""
        claimed_ms = self.log.clock.now_ms()
        notification = Notification(self.topic.name, partition, end - 1)
        error = self._tell(notification)
        now_ms = self.log.clock.now_ms()
        if error is None:
            until_ms = claimed_ms + self.topic.max_latency_ms
            told = NotifyState(end, self.waiter, until_ms)
            if self._write(partition, told, version) is None:
                return None
            return Checked(end, self._in(max(0, until_ms - now_ms)), notification)
        gave_up = isinstance(error, InvalidError) or not self._tries_left(claim.failures)
        delay_ms = _PAUSE_MS if gave_up else self._retry_ms(claim.failures)
        failed = NotifyState(claim.notified, self.waiter, now_ms + delay_ms, claim.failures + 1)
        self._write(partition, failed, version)  # where it fails, the claim's own end holds
        again_s = None if isinstance(error, InvalidError) else self._in(delay_ms)
        return Checked(claim.notified, again_s, error=error, gave_up=gave_up)

    def _tell(self, notification: Notification) -> Exception | None:
        """Send to every target; of their errors, one that a retry may mend goes first."""
        errors: list[Exception] = []
        for target in self.targets:
            try:
                target.send(notification)
            except Exception as exc:  # noqa: BLE001 - a target may be anybody's code
                errors.append(exc)
        errors.sort(key=lambda error: isinstance(error, InvalidError))
        return errors[0] if errors else None

    def _write(self, partition: int, state: NotifyState, version: str | None) -> str | None:
        """Put the row; its version, or None where it is not, or no longer, there."""
        where = layout.notify_partition(self.topic.incarnation, partition)
        change = Put(_ROW, encode_row(state), expect=version or ABSENT)
        write_id = self.log.ids.new()
        try:
            self.log.catalog.write(where, change, write_id=write_id)
        except ConflictError:
            return None
        except UnknownOutcomeError:
            row = self.log.catalog.get(where, _ROW)
            return write_id if row is not None and row.version == write_id else None
        return write_id

    def _tries_left(self, failures: int) -> bool:
        return failures + 1 < self.log.backoff.attempts

    def _retry_ms(self, failures: int) -> int:
        delays_s = list(self.log.backoff.delays_s(self.log.random))
        return min(_PAUSE_MS, int(delays_s[failures] * 1000))

    def _in(self, delay_ms: int) -> float:
        return self.log.clock.monotonic_s() + delay_ms / 1000


def repair(log: Log, topic: Topic, targets: Sequence[Target]) -> Repaired:
    """Notify for every partition with events that nobody was told of; for daemons, now and then.

    One round that waits for nobody: partitions where a promise to look is not over are left for the
    next round. Idempotent; ``NotFoundError`` once the topic is deleted.
    """
    debounce = Debounce(log, topic, targets, log.ids.new())
    repaired = Repaired([], [], [])
    for partition in range(topic.partitions):
        try:
            head, _ = read_head(log, topic, partition)
            checked = debounce.check(partition, head.next)
        except NotFoundError:
            raise
        except Exception as exc:  # noqa: BLE001 - other partitions need theirs
            what = f"topic `{topic.name}`: partition {partition}"
            repaired.errors.append(unexpected(what, exc))
            continue
        if checked.sent is not None:
            repaired.sent.append(checked.sent)
        elif checked.error is not None:
            repaired.errors.append(checked.error)
        elif checked.again_s is not None:
            repaired.waiting.append(partition)
    return repaired


def read_state(log: Log, topic: Topic, partition: int) -> tuple[NotifyState, str | None]:
    """A partition's row and its version; None as version where nothing was ever notified."""
    where = layout.notify_partition(topic.incarnation, partition)
    row = log.catalog.get(where, _ROW)
    if row is None:
        return NotifyState(), None
    what = f"notifications of `{topic.name}/{partition}`"
    return decode_row(row.value, NotifyState, what), row.version


def _deferral_ms(topic: Topic, state: NotifyState, me: str, now_ms: int) -> int:
    """How long to leave the partition to its waiter; 0 for not at all."""
    left_ms = state.until_ms - now_ms + (0 if state.waiter == me else _ALLOWANCE_MS)
    longest_ms = max(topic.max_latency_ms, _PAUSE_MS) + 2 * _ALLOWANCE_MS
    return left_ms if 0 < left_ms <= longest_ms else 0
