"""Notifies other systems that a partition has new events: debounced, and never silent about the
last.

The first event of a quiet partition notifies at once. While events go on, at most one notification
follows in each ``max_latency_ms``. Each partition has one row, ``state``. It holds the offset up to
which targets were notified, and which process checks again and when. Every process that committed
checks until the row covers its commit. A check:

1. Read the row. If it covers our commit: done. If another process has promised to check again
   later: defer, and check again when that should have happened, plus an allowance.
2. Read the head. If nothing is new: done.
3. Claim: put our id into the row, until sending should have finished; expects the row's version.
4. Send the newest offset to every target.
5. Record what was sent, with our promise to check again one ``max_latency_ms`` after the claim;
   expects our claim. If a target failed, record that instead, and when to retry.
6. Check again then, also for the processes that deferred to us.

What a crash after each step leaves, and what repairs it:

    the commit → events without a notification; the next committer at once, or :func:`repair`
    1, 2       → the same
    3          → a claim without a result; the process that deferred to it or the next committer,
                 once the claim ends, or :func:`repair`
    4          → the same, and the targets know: they are notified twice
    5          → everything, but no process checks again; each process that committed since checks

After a conflict, the check starts again at step 1. A lost reply is settled by reading the row; if
that does not settle it, the check also starts again. The worst case is a second notification.
``notified`` rises only after every target has accepted an offset at or past it. Clocks decide only
when to try: a promise that no correct clock could have made is ignored, so no check waits longer
than the longest promise.

:class:`Debounce` is the protocol, without threads and locks. If a topic is deleted at the same
moment, a notification row may stay behind: a few bytes, in an incarnation that is never read again.

:class:`Notifier` has the threads of a process. A commit to a topic with targets only records its
offset and, if no check is due, schedules one. So no producer ever waits for a target. A topic is
checked by one thread at a time, and another thread starts while all are in use: a target that hangs
delays only its own topic, and is tried less and less often. Before a check it reads the topic's row
again, at most once in ten seconds, for targets that were changed. So does a process that goes on
committing to a topic without targets; while it finds none, it writes nothing. :func:`repair` does
what a process leaves undone when it dies.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
from tidelog.log.topics import find_topic, read_head
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.topic import Topic, decode_row, encode_row

__all__ = [
    "CheckResult",
    "Debounce",
    "Notification",
    "Notifier",
    "NotifyState",
    "NotifyTarget",
    "RepairResult",
    "notify_again",
    "read_state",
    "repair",
]

_ROW = "state"
_ALLOWANCE_MS = 500  # how far clocks may differ, and how late a live process may be
_SENDING_MS = 5_000  # the time for sending in a claim; the timeout of our targets
_PAUSE_MS = 30_000  # the pause after targets refused or failed every attempt
_CONFLICTS_MAX = 5  # per check; each means that another process made progress


class Notification(msgspec.Struct, frozen=True):
    """What targets receive: events up to and including this offset are readable."""

    topic: str
    partition: int
    offset: int


class NotifyTarget(Protocol):
    """A receiver of notifications."""

    def send(self, notification: Notification) -> None:
        """Sends a notification; may be called again with the same or with an older offset.

        Raises ``InvalidError`` if the target refuses, so that a retry will not help. Any other
        error means that a later attempt may succeed. Returns or raises within seconds.
        """
        ...


class NotifyState(Persisted, frozen=True):
    """The row that all processes that notify for a partition share."""

    notified: int = 0  # targets know all lower offsets
    waiter: str = ""  # the process that sends now or has promised to check again
    until_ms: int = 0  # when it will have done so
    failures: int = 0  # of the targets, in a row


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check ended."""

    notified: int  # what the row covers now
    again_s: float | None = None  # when to check again, on the monotonic clock; None: no need
    sent: Notification | None = None  # what every target accepted
    error: Exception | None = None  # why a target did not
    gave_up: bool = False  # it refused, or failed all attempts of a backoff


class RepairResult(NamedTuple):
    """What one round of :func:`repair` did."""

    sent: list[Notification]
    waiting: list[int]  # partitions that another process has promised to check
    errors: list[Exception]


@dataclass(frozen=True)
class Debounce:
    """One process's side of the protocol for one topic; ``waiter`` is an id of its own."""

    context: Context
    topic: Topic
    targets: Sequence[NotifyTarget]
    waiter: str

    def check(self, partition: int, committed: int, *, hurry: bool = False) -> CheckResult:
        """Makes sure that targets know what was committed below offset ``committed``.

        ``hurry`` never defers. Raises ``NotFoundError`` if the topic is deleted. After any other
        error of the catalog, the check can be repeated.
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
        """Step 3: returns the claim and its version; None if another process was first."""
        until_ms = self.context.clock.now_ms() + _SENDING_MS
        claim = msgspec.structs.replace(state, waiter=self.waiter, until_ms=until_ms)
        claimed = self._write(partition, claim, version)
        return (claim, claimed) if claimed else None

    def _send(
        self, partition: int, end: int, claim: NotifyState, version: str
    ) -> CheckResult | None:
        """Steps 4 and 5; returns None if another process has taken over in the meantime."""
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
        self._write(partition, failed, version)  # if this fails, the claim still ends by itself
        again_s = None if isinstance(error, InvalidError) else self._in(delay_ms)
        return CheckResult(claim.notified, again_s, error=error, gave_up=gave_up)

    def _tell(self, notification: Notification) -> Exception | None:
        """Sends to every target; returns an error that a retry may fix before any other."""
        errors: list[Exception] = []
        for target in self.targets:
            try:
                target.send(notification)
            except Exception as exc:  # noqa: BLE001 - a target may be foreign code
                errors.append(exc)
        errors.sort(key=lambda error: isinstance(error, InvalidError))
        return errors[0] if errors else None

    def _write(self, partition: int, state: NotifyState, version: str | None) -> str | None:
        """Puts the row; returns its version, or None if it is not, or no longer, there."""
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
    """Notifies for every partition with events that targets do not know; for daemons, periodically.

    One round that does not wait: it leaves partitions with an open promise to the next round.
    Idempotent. Raises ``NotFoundError`` if the topic is deleted.
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


def notify_again(
    context: Context, topic: Topic, partition: int, targets: Sequence[NotifyTarget]
) -> Notification | None:
    """Notifies about a partition's newest event, whether targets know it or not.

    For a reader that stops before the end and wants to be woken again. Returns what was sent, or
    None if the partition never had an event. It writes nothing: checks go on as before, and the
    worst case is a second notification. Raises the error of the first target that failed, after
    all others had their attempt, and ``NotFoundError`` if the topic is deleted.
    """
    head, _ = read_head(context, topic, partition)
    if head.closed:
        raise NotFoundError(f"topic `{topic.name}`: is being deleted: stop notifying")
    if not head.next:
        return None
    notification = Notification(topic.name, partition, head.next - 1)
    error = Debounce(context, topic, targets, "")._tell(notification)
    if error is not None:
        raise error
    return notification


def read_state(context: Context, topic: Topic, partition: int) -> tuple[NotifyState, str | None]:
    """Returns a partition's row and its version; version None if nothing was ever notified."""
    where = layout.notify_partition(topic.incarnation, partition)
    row = context.catalog.get(where, _ROW)
    if row is None:
        return NotifyState(), None
    what = f"notifications of `{topic.name}/{partition}`"
    return decode_row(row.value, NotifyState, what), row.version


def _deferral_ms(topic: Topic, state: NotifyState, me: str, now_ms: int) -> int:
    """Returns how long to leave the partition to its waiter; 0 to check now."""
    left_ms = state.until_ms - now_ms + (0 if state.waiter == me else _ALLOWANCE_MS)
    longest_ms = max(topic.max_latency_ms, _PAUSE_MS) + 2 * _ALLOWANCE_MS
    return left_ms if 0 < left_ms <= longest_ms else 0


_ERRORS_KEPT = 100  # the newest; all are counted
_TARGETS_S = 10.0  # between looks at the topic's targets
_THREADS_MAX = 8  # for topics whose targets hang; one serves all that do not
_RETRY_S = 5.0  # after the catalog, which has its own retries, was unreachable
_PASSING = (ConflictError, UnavailableError, UnknownOutcomeError)

_routing = attrgetter("notify", "home", "max_latency_ms")  # of a topic
_Key = tuple[str, int]  # a topic's incarnation, and a partition


@dataclass(eq=False, slots=True)
class _PartitionState:
    """What this process knows about one partition."""

    committed: int = 0  # the offset after our newest event
    notified: int = 0  # what the row covers, as far as we know
    due_s: float | None = None  # of the next check, if one is planned
    running: bool = False
    failing: bool = False  # the last check could not reach a target

    @property
    def covered(self) -> bool:
        return self.notified >= self.committed


class _CheckTask(NamedTuple):
    """One check that is due."""

    key: _Key
    committed: int
    hurry: bool


class Notifier:
    """Notifies for all topics passed to :meth:`watch`. Close it in the end."""

    def __init__(self, context: Context, open_target: Callable[[str], NotifyTarget]) -> None:
        self._context = context
        self._open_target = open_target
        self._waiter = context.ids.new()
        self._topics: dict[str, Debounce] = {}
        self._looked_s: dict[str, float] = {}  # when their rows were read
        self._silent: set[str] = set()  # incarnations that have had no targets since ``watch``
        self._known: dict[_Key, _PartitionState] = {}
        self._due: list[tuple[float, int, _Key]] = []  # a heap; rescheduled checks stay in it
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._listening = False
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that wait for something to do
        self._busy: set[str] = set()  # incarnations that a thread checks now
        self._closing_s: float | None = None  # when :meth:`close` stops waiting
        self._errors: deque[Exception] = deque(maxlen=_ERRORS_KEPT)
        self._error_count = 0

    @property
    def errors(self) -> list[Exception]:
        """Returns why targets were not notified, newest last.

        Each after all attempts of a backoff.
        """
        with self._changed:
            return list(self._errors)

    @property
    def error_count(self) -> int:
        """Returns how many errors there were, including those no longer kept."""
        return self._error_count

    def watch(self, topic: Topic) -> None:
        """Notifies about what this process commits to the topic from now on; idempotent.

        A topic without targets costs a read in ten seconds, while it is committed to. A copy never
        notifies its original's targets. Raises ``InvalidError`` if a target cannot be opened.
        """
        if topic.incarnation in self._topics:
            return
        debounce = self._debounce(topic)
        with self._changed:
            if not debounce.targets:
                self._silent.add(topic.incarnation)
            self._topics.setdefault(topic.incarnation, debounce)
            self._looked_s[topic.incarnation] = self._context.clock.monotonic_s()
            if not self._listening:
                self._listening = True
                self._context.wakeups.listen(self._committed)

    def _debounce(self, topic: Topic) -> Debounce:
        urls = topic.notify if self._context.identity.owns(topic.home) else ()
        targets = [_Once(self._open_target(url)) for url in urls]
        return Debounce(self._context, topic, targets, self._waiter)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Sends what is due and ends the threads; returns whether all commits are covered.

        Waits for promises of others and for our own next turn if that fits into ``timeout_s``;
        otherwise notifies at once. Failing targets are left to ``repair``.
        """
        with self._changed:
            if self._closing_s is None:
                self._closing_s = self._context.clock.monotonic_s() + timeout_s
            self._changed.notify_all()
            threads = list(self._threads)
        until_s = self._context.clock.monotonic_s() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until_s - self._context.clock.monotonic_s()))
        with self._changed:
            return all(each.covered or key[0] in self._silent for key, each in self._known.items())

    # In a producer's thread.

    def _committed(self, incarnation: str, partition: int, end: int) -> None:
        """Runs after a commit: returns at once, whatever the targets do, and never raises."""
        if incarnation not in self._topics:
            return
        key = (incarnation, partition)
        with self._changed:
            if self._closing_s is not None:
                return
            known = self._known.setdefault(key, _PartitionState())
            known.committed = max(known.committed, end)
            if known.due_s is None and not known.running:
                now_s = self._context.clock.monotonic_s()
                due_s = self._looked_s[incarnation] + _TARGETS_S
                if incarnation in self._silent and now_s < due_s and not self._threads:
                    return  # a later commit looks, so a process that ends soon starts no thread
                self._plan(key, max(now_s, due_s) if incarnation in self._silent else now_s)
                self._changed.notify_all()
            if not self._idle and len(self._threads) < _THREADS_MAX:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="tidelog-notify", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads: the next commit tries again
            self._keep(exc)
        else:
            self._threads.append(thread)

    def _plan(self, key: _Key, due_s: float) -> None:
        self._known[key].due_s = due_s
        heapq.heappush(self._due, (due_s, next(self._order), key))

    # In the notifier's own threads.

    def _run(self) -> None:
        while True:
            with self._changed:
                task = self._next()
            if task is None:
                return
            self._check(task)

    def _next(self) -> _CheckTask | None:
        """Returns the next check once it is due; None to end. The lock must be held."""
        while True:
            now_s = self._context.clock.monotonic_s()
            end_s = self._closing_s
            key = self._first()
            if end_s is not None and (now_s >= end_s or not self._due):
                return None
            if key is None:
                self._wait(None if end_s is None else end_s - now_s)
                continue
            known = self._known[key]
            due_s = known.due_s or 0.0
            too_late = end_s is not None and due_s > end_s
            is_over = known.covered or key[0] in self._silent or (known.failing and too_late)
            if end_s is not None and is_over:
                known.due_s = None
            elif due_s <= now_s or too_late:
                known.due_s, known.running = None, True
                self._busy.add(key[0])
                return _CheckTask(key, known.committed, too_late)
            else:
                self._wait(due_s - now_s)

    def _first(self) -> _Key | None:
        """Returns the check that is due first, of the topics that no thread checks now."""
        later = []
        found = None
        while self._due and found is None:
            due_s, _, key = self._due[0]
            known = self._known.get(key)
            if known is None or known.due_s != due_s:
                heapq.heappop(self._due)  # rescheduled or begun since, or the topic is deleted
            elif key[0] in self._busy:
                later.append(heapq.heappop(self._due))
            else:
                found = key
        for each in later:
            heapq.heappush(self._due, each)
        return found

    def _wait(self, seconds: float | None) -> None:
        self._idle += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._idle -= 1

    def _check(self, task: _CheckTask) -> None:
        try:
            self._check_now(task)
        finally:
            with self._changed:
                self._busy.discard(task.key[0])
                self._changed.notify_all()

    def _check_now(self, task: _CheckTask) -> None:
        incarnation, partition = task.key
        checked: CheckResult | None = None
        error: Exception | None = None
        try:
            debounce = self._current(incarnation)
            if incarnation in self._silent:
                checked = CheckResult(task.committed)
            else:
                checked = debounce.check(partition, task.committed, hurry=task.hurry)
        except NotFoundError:
            # Deleted, also if a commit arrived while it was forgotten: nothing to notify about.
            self._forget(incarnation)
            return
        except Exception as exc:  # noqa: BLE001 - kept in ``errors``; the thread must go on
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

    def _current(self, incarnation: str) -> Debounce:
        """Returns the protocol of a topic, with the targets that it has now.

        Raises ``NotFoundError`` if the topic was deleted.
        """
        known, now_s = self._topics.get(incarnation), self._context.clock.monotonic_s()
        if known is None:
            raise NotFoundError(f"topic of incarnation {incarnation}: is deleted: stop notifying")
        if now_s - self._looked_s[incarnation] < _TARGETS_S:
            return known
        found = find_topic(self._context, known.topic.name)
        if found.incarnation != incarnation:
            raise NotFoundError(f"topic `{found.name}`: is another one now: stop notifying")
        if _routing(found) != _routing(known.topic):
            known = self._topics[incarnation] = self._debounce(found)
            if known.targets:
                self._silent.discard(incarnation)
        self._looked_s[incarnation] = now_s
        return known

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
            self._silent.discard(incarnation)
            for key in [key for key in self._known if key[0] == incarnation]:
                del self._known[key]


class _Once:
    """Skips a target that accepted an offset when a check is repeated for another target."""

    def __init__(self, target: NotifyTarget) -> None:
        self._target = target
        self._taken: dict[int, int] = {}  # the newest offset of each partition

    def send(self, notification: Notification) -> None:
        if self._taken.get(notification.partition, -1) < notification.offset:
            self._target.send(notification)
            self._taken[notification.partition] = notification.offset


_: Callable[[NotifyTarget], NotifyTarget] = _Once
