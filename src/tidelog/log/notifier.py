"""The thread that notifies for a process, behind its producers.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.base import Log
from tidelog.log.notify import Checked, Debounce, Notification, Target
from tidelog.model.topic import Topic

__all__ = ["Notifier"]

_ERRORS_KEPT = 100  # the newest; all are counted
_RETRY_S = 5.0  # after the catalog, which has its own retries, stayed out of reach
_PASSING = (ConflictError, UnavailableError, UnknownOutcomeError)

_Key = tuple[str, int]  # a topic's incarnation, and a partition


@dataclass(eq=False, slots=True)
class _Known:
    """What this process knows about one partition."""

    committed: int = 0  # the offset after our newest event
    notified: int = 0  # what is covered, as far as we have seen
    due_s: float | None = None  # of the next check, if one is planned
    running: bool = False
    failing: bool = False  # the last check could not reach a target

    @property
    def covered(self) -> bool:
        return self.notified >= self.committed


class _Task(NamedTuple):
    """One check to be made now."""

    key: _Key
    committed: int
    hurry: bool


class Notifier:
    """Notifies for all topics of a log that were given to :meth:`watch`. Close it in the end."""

    def __init__(self, log: Log, open_target: Callable[[str], Target]) -> None:
        self._log = log
        self._open_target = open_target
        self._waiter = log.ids.new()
        self._topics: dict[str, Debounce] = {}
        self._known: dict[_Key, _Known] = {}
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
        if not self._log.standing.owns(topic.home):
            return
        targets = [_Once(self._open_target(url)) for url in topic.notify]
        with self._changed:
            debounce = Debounce(self._log, topic, targets, self._waiter)
            self._topics.setdefault(topic.incarnation, debounce)
            if not self._listening:
                self._listening = True
                self._log.wakeups.listen(self._committed)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is due, and end the thread; whether all that was committed is covered.

        A promise of others, and our own next turn, are waited for where that fits into
        ``timeout_s``; where not, targets are told at once. Failing ones are left to ``repair``.
        """
        with self._changed:
            if self._closing_s is None:
                self._closing_s = self._log.clock.monotonic_s() + timeout_s
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
            known = self._known.setdefault(key, _Known())
            known.committed = max(known.committed, end)
            if known.due_s is None and not known.running:
                self._plan(key, self._log.clock.monotonic_s())
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

    def _next(self) -> _Task | None:
        """With the lock held: the next check, once it is due; None when all is over."""
        while True:
            now_s = self._log.clock.monotonic_s()
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
                return _Task(key, known.committed, too_late)
            else:
                self._changed.wait(due_s - now_s)

    def _check(self, task: _Task) -> None:
        incarnation, partition = task.key
        debounce = self._topics.get(incarnation)
        if debounce is None:  # a commit came in while the topic was forgotten
            self._forget(incarnation)
            return
        checked: Checked | None = None
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
                    self._plan(task.key, self._log.clock.monotonic_s() + _RETRY_S)

    def _settle(self, task: _Task, known: _Known, checked: Checked) -> None:
        known.notified = max(known.notified, checked.notified)
        known.failing = checked.error is not None
        if checked.error is not None and checked.gave_up:
            self._keep(checked.error)
        if checked.again_s is not None:
            self._plan(task.key, checked.again_s)
        elif known.committed > task.committed:
            self._plan(task.key, self._log.clock.monotonic_s())

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

    def __init__(self, target: Target) -> None:
        self._target = target
        self._taken: dict[int, int] = {}  # the newest offset of each partition

    def send(self, notification: Notification) -> None:
        if self._taken.get(notification.partition, -1) < notification.offset:
            self._target.send(notification)
            self._taken[notification.partition] = notification.offset


_: Callable[[Target], Target] = _Once
