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

The thread that notifies for a process, behind its producers.

A commit to a topic with targets only notes its offset and, where no check is due anyway, asks for
one; the thread does the rest, so that no producer ever waits for a target. One thread serves all
topics: a target that hangs delays others of this process by its own time-out, and is tried more and
more rarely. What a process leaves undone when it dies, ``notify.repair`` does.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tidelog.catalog.base import ABSENT, Put
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.topic import Topic

__all__ = [
    "CheckResult",
    "Debounce",
    "Notification",
    "Notifier",
    "NotifyState",
    "NotifyTarget",
    "RepairResult",
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


class NotifyTarget(Protocol):
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
class CheckResult:
    """How a check ended."""

    notified: int  # what the row covers now
    again_s: float | None = None  # when to check again, on the monotonic clock; None: no need
    sent: Notification | None = None  # what every target took
    error: Exception | None = None  # why a target did not
    gave_up: bool = False  # it refused, or failed all the tries of a backoff


class RepairResult(NamedTuple):
    """What one round of :func:`repair` did."""

    sent: list[Notification]
    waiting: list[int]  # partitions that somebody else has promised to look at
    errors: list[Exception]


@dataclass(frozen=True)
class Debounce:
    """One process's side of the protocol for one topic; ``waiter`` is an id of its own."""

    context: Context
    topic: Topic
    targets: Sequence[NotifyTarget]
    waiter: str

    def check(self, partition: int, committed: int, *, hurry: bool = False) -> CheckResult:
        """See to it that targets know what was committed below offset ``committed``.

        ``hurry`` defers to nobody. ``NotFoundError`` once the topic is deleted; what the catalog
        raises otherwise leaves nothing wrong behind, and the check can be repeated.
        """
        for _ in range(_CONFLICTS_MAX):
            state, version = read_state(self.context, self.topic, partition)
            if state.notified >= committed and (hurry or state.waiter != self.waiter):
                return CheckResult(state.notified)
            wait_ms = _deferral_ms(self.topic, state, self.waiter, self.context.clock.now_ms())
            if wait_ms and not hurry:
                return CheckResult(state.notified, self._in(wait_ms))
            head, _ = read_head(self.context, self.topic, partition)
            if head.closed:
                raise NotFoundError(f"topic `{self.topic.name}`: is being deleted: stop notifying")
            if state.notified >= head.next:
                return CheckResult(state.notified)
            claimed = self._claim(partition, state, version)
            if claimed is None:
                continue
            checked = self._send(partition, head.next, *claimed)
            if checked is not None:
                return checked
        return CheckResult(state.notified, self._in(_ALLOWANCE_MS))

    def _claim(
        self, partition: int, state: NotifyState, version: str | None
    ) -> tuple[NotifyState, str] | None:
        """Step 3: the claim and its version; None where somebody else was first."""
        until_ms = self.context.clock.now_ms() + _SENDING_MS
        claim = msgspec.structs.replace(state, waiter=self.waiter, until_ms=until_ms)
        claimed = self._write(partition, claim, version)
        return (claim, claimed) if claimed else None

    def _send(
        self, partition: int, end: int, claim: NotifyState, version: str
    ) -> CheckResult | None:
        """Steps 4 and 5; None where somebody has taken over meanwhile."""
        claimed_ms = self.context.clock.now_ms()
        notification = Notification(self.topic.name, partition, end - 1)
        error = self._tell(notification)
        now_ms = self.context.clock.now_ms()
        if error is None:
            until_ms = claimed_ms + self.topic.max_latency_ms
            told = NotifyState(end, self.waiter, until_ms)
            if self._write(partition, told, version) is None:
                return None
            return CheckResult(end, self._in(max(0, until_ms - now_ms)), notification)
        gave_up = isinstance(error, InvalidError) or not self._tries_left(claim.failures)
        delay_ms = _PAUSE_MS if gave_up else self._retry_ms(claim.failures)
        failed = NotifyState(claim.notified, self.waiter, now_ms + delay_ms, claim.failures + 1)
        self._write(partition, failed, version)  # where it fails, the claim's own end holds
        again_s = None if isinstance(error, InvalidError) else self._in(delay_ms)
        return CheckResult(claim.notified, again_s, error=error, gave_up=gave_up)

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
        write_id = self.context.ids.new()
        try:
            self.context.catalog.write(where, change, write_id=write_id)
        except ConflictError:
            return None
        except UnknownOutcomeError:
            row = self.context.catalog.get(where, _ROW)
            return write_id if row is not None and row.version == write_id else None
        return write_id

    def _tries_left(self, failures: int) -> bool:
        return failures + 1 < self.context.backoff.attempts

    def _retry_ms(self, failures: int) -> int:
        delays_s = list(self.context.backoff.delays_s(self.context.random))
        return min(_PAUSE_MS, int(delays_s[failures] * 1000))

    def _in(self, delay_ms: int) -> float:
        return self.context.clock.monotonic_s() + delay_ms / 1000


def repair(context: Context, topic: Topic, targets: Sequence[NotifyTarget]) -> RepairResult:
    """Notify for every partition with events that nobody was told of; for daemons, now and then.

    One round that waits for nobody: partitions where a promise to look is not over are left for the
    next round. Idempotent; ``NotFoundError`` once the topic is deleted.
    """
    debounce = Debounce(context, topic, targets, context.ids.new())
    repaired = RepairResult([], [], [])
    for partition in range(topic.partitions):
        try:
            head, _ = read_head(context, topic, partition)
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


def read_state(context: Context, topic: Topic, partition: int) -> tuple[NotifyState, str | None]:
    """A partition's row and its version; None as version where nothing was ever notified."""
    where = layout.notify_partition(topic.incarnation, partition)
    row = context.catalog.get(where, _ROW)
    if row is None:
        return NotifyState(), None
    what = f"notifications of `{topic.name}/{partition}`"
    return decode_row(row.value, NotifyState, what), row.version


def _deferral_ms(topic: Topic, state: NotifyState, me: str, now_ms: int) -> int:
    """How long to leave the partition to its waiter; 0 for not at all."""
    left_ms = state.until_ms - now_ms + (0 if state.waiter == me else _ALLOWANCE_MS)
    longest_ms = max(topic.max_latency_ms, _PAUSE_MS) + 2 * _ALLOWANCE_MS
    return left_ms if 0 < left_ms <= longest_ms else 0


_ERRORS_KEPT = 100  # the newest; all are counted
_RETRY_S = 5.0  # after the catalog, which has its own retries, stayed out of reach
_PASSING = (ConflictError, UnavailableError, UnknownOutcomeError)

_Key = tuple[str, int]  # a topic's incarnation, and a partition


@dataclass(eq=False, slots=True)
class _PartitionState:
    """What this process knows about one partition."""

    committed: int = 0  # the offset after our newest event
    notified: int = 0  # what is covered, as far as we have seen
    due_s: float | None = None  # of the next check, if one is planned
    running: bool = False
    failing: bool = False  # the last check could not reach a target

    @property
    def covered(self) -> bool:
        return self.notified >= self.committed


class _CheckTask(NamedTuple):
    """One check to be made now."""

    key: _Key
    committed: int
    hurry: bool


class Notifier:
    """Notifies for all topics of a log that were given to :meth:`watch`. Close it in the end."""

    def __init__(self, context: Context, open_target: Callable[[str], NotifyTarget]) -> None:
        self._context = context
        self._open_target = open_target
        self._waiter = context.ids.new()
        self._topics: dict[str, Debounce] = {}
        self._known: dict[_Key, _PartitionState] = {}
        self._due: list[tuple[float, int, _Key]] = []  # a heap; what was planned anew stays in it
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._listening = False
        self._thread: threading.Thread | None = None
        self._closing_s: float | None = None  # when :meth:`close` waits no longer
        self._errors: deque[Exception] = deque(maxlen=_ERRORS_KEPT)
        self._error_count = 0

    @property
    def errors(self) -> list[Exception]:
        """Why targets were not told, the newest last; each after all tries of a backoff."""
        with self._changed:
            return list(self._errors)

    @property
    def error_count(self) -> int:
        """How many there were, with those that are no longer kept."""
        return self._error_count

    def watch(self, topic: Topic) -> None:
        """Notify what this process commits to the topic from now on; idempotent.

        A topic without targets costs nothing. A copy never notifies its original's targets.
        ``InvalidError`` where a target cannot be opened.
        """
        if not topic.notify or topic.incarnation in self._topics:
            return
        if not self._context.standing.owns(topic.home):
            return
        targets = [_Once(self._open_target(url)) for url in topic.notify]
        with self._changed:
            debounce = Debounce(self._context, topic, targets, self._waiter)
            self._topics.setdefault(topic.incarnation, debounce)
            if not self._listening:
                self._listening = True
                self._context.wakeups.listen(self._committed)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is due, and end the thread; whether all that was committed is covered.

        A promise of others, and our own next turn, are waited for where that fits into
        ``timeout_s``; where not, targets are told at once. Failing ones are left to ``repair``.
        """
        with self._changed:
            if self._closing_s is None:
                self._closing_s = self._context.clock.monotonic_s() + timeout_s
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._changed:
            return all(known.covered for known in self._known.values())

    # In a producer's thread.

    def _committed(self, incarnation: str, partition: int, end: int) -> None:
        """After a commit: returns at once, whatever the targets do, and never raises."""
        if incarnation not in self._topics:
            return
        key = (incarnation, partition)
        with self._changed:
            if self._closing_s is not None:
                return
            known = self._known.setdefault(key, _PartitionState())
            known.committed = max(known.committed, end)
            if known.due_s is None and not known.running:
                self._plan(key, self._context.clock.monotonic_s())
                self._changed.notify_all()
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="tidelog-notify", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads: the next commit tries again
            self._keep(exc)
        else:
            self._thread = thread

    def _plan(self, key: _Key, due_s: float) -> None:
        self._known[key].due_s = due_s
        heapq.heappush(self._due, (due_s, next(self._order), key))

    # In the notifier's own thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                task = self._next()
            if task is None:
                return
            self._check(task)

    def _next(self) -> _CheckTask | None:
        """With the lock held: the next check, once it is due; None when all is over."""
        while True:
            now_s = self._context.clock.monotonic_s()
            end_s = self._closing_s
            if end_s is not None and (now_s >= end_s or not self._due):
                return None
            if not self._due:
                self._changed.wait()
                continue
            due_s, _, key = self._due[0]
            known = self._known.get(key)
            if known is None or known.due_s != due_s:
                heapq.heappop(self._due)  # planned anew since, or the topic is gone
                continue
            too_late = end_s is not None and due_s > end_s
            if end_s is not None and (known.covered or (known.failing and too_late)):
                heapq.heappop(self._due)
                known.due_s = None
            elif due_s <= now_s or too_late:
                heapq.heappop(self._due)
                known.due_s, known.running = None, True
                return _CheckTask(key, known.committed, too_late)
            else:
                self._changed.wait(due_s - now_s)

    def _check(self, task: _CheckTask) -> None:
        incarnation, partition = task.key
        debounce = self._topics.get(incarnation)
        if debounce is None:  # a commit came in while the topic was forgotten
            self._forget(incarnation)
            return
        checked: CheckResult | None = None
        error: Exception | None = None
        try:
            checked = debounce.check(partition, task.committed, hurry=task.hurry)
        except NotFoundError:
            self._forget(incarnation)  # deleted: nobody is to be told any more
            return
        except Exception as exc:  # noqa: BLE001 - kept for who asks; the thread must live on
            error = exc
        with self._changed:
            known = self._known[task.key]
            known.running = False
            if checked is not None:
                self._settle(task, known, checked)
            elif error is not None:
                self._keep(error)
                if isinstance(error, _PASSING):
                    self._plan(task.key, self._context.clock.monotonic_s() + _RETRY_S)

    def _settle(self, task: _CheckTask, known: _PartitionState, checked: CheckResult) -> None:
        known.notified = max(known.notified, checked.notified)
        known.failing = checked.error is not None
        if checked.error is not None and checked.gave_up:
            self._keep(checked.error)
        if checked.again_s is not None:
            self._plan(task.key, checked.again_s)
        elif known.committed > task.committed:
            self._plan(task.key, self._context.clock.monotonic_s())

    def _keep(self, error: Exception) -> None:
        self._errors.append(error)
        self._error_count += 1

    def _forget(self, incarnation: str) -> None:
        with self._changed:
            self._topics.pop(incarnation, None)
            for key in [key for key in self._known if key[0] == incarnation]:
                del self._known[key]


class _Once:
    """Spares a target what it took already, when a check is repeated for the sake of another."""

    def __init__(self, target: NotifyTarget) -> None:
        self._target = target
        self._taken: dict[int, int] = {}  # the newest offset of each partition

    def send(self, notification: Notification) -> None:
        if self._taken.get(notification.partition, -1) < notification.offset:
            self._target.send(notification)
            self._taken[notification.partition] = notification.offset


_: Callable[[NotifyTarget], NotifyTarget] = _Once
