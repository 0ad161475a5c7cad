"""Consumers: named readers whose members share a topic's partitions.

A member joins at its first poll. A thread of its own sends heartbeats and takes leases, so that a
slow handler keeps them (up to the maximum poll interval); it gives none back: a lease that the
member should release is released in ``poll``, when what it delivered has been committed. Exactly
the events after the last commit come again after a crash.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from datetime import datetime
from types import TracebackType
from typing import Any

import pyarrow as pa

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.errors import (
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
)
from tidelog.forks import ProcessGuard, RefusingLock
from tidelog.log.base import Log
from tidelog.log.handling import Handling, dead_letter_of, run
from tidelog.log.intake import Intake
from tidelog.log.lag import Lag, consumer_lag
from tidelog.log.lease import Membership
from tidelog.log.read import Reader, Stretch, find_offset
from tidelog.log.start import Start, check_start
from tidelog.log.topics import read_head
from tidelog.model import limits
from tidelog.model.event import Event, check_timestamp
from tidelog.model.topic import Topic

__all__ = ["Consumer"]

Append = Callable[[str, list[Event]], object]
"""Appends events to a topic: where dead letters go."""

_IDLE_FIRST_S = 0.02  # waits between looks at a quiet topic grow from here
_IDLE_LAST_S = 1.0
_LOOK_S = 0.4  # how soon a member sees that another has come or gone


class Consumer:
    """One member. Its calls come from one thread at a time; close it, or use a ``with``."""

    def __init__(
        self,
        log: Log,
        topic: Topic,
        name: str,
        start: Start = "earliest",
        pool: Executor | None = None,
        append: Append | None = None,
    ) -> None:
        if not 1 <= len(name) <= limits.CONSUMER_NAME_MAX or "/" in name:
            raise InvalidError(
                f"consumer name `{name[:80]}`: give 1 to {limits.CONSUMER_NAME_MAX} characters, "
                "without `/`"
            )
        check_start(start)
        self.name = name
        self.log = log
        self._topic = topic
        self._pool = pool
        self._append = append
        self._membership = Membership(log, topic, name, start)
        self._intakes: dict[int, Intake] = {}
        self._next = 0  # the partition to look at first in the next poll
        self._excess = 0  # how many leases to give back
        self._lock = threading.RLock()  # guards the membership; intakes are the poller's own
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._polled_s = 0.0
        self._trouble: BaseException | None = None
        self._guard = ProcessGuard(f"consumer `{name}`", self._leave_to_parent)

    # Reading.

    def poll(self, max_events: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """Events, in order within each partition; none after ``timeout_s`` without any."""
        with self._all_or_nothing():
            stretches = self._poll(max_events, timeout_s)
            return [event for stretch in stretches for event in stretch.events()]

    def poll_arrow(self, max_events: int = 50_000, timeout_s: float = 1.0) -> pa.Table:
        """The same as an Arrow table in event columns."""
        with self._all_or_nothing():
            stretches = self._poll(max_events, timeout_s)
            return pa.Table.from_batches([each.arrow() for each in stretches], EVENT_SCHEMA)

    def commit(self) -> None:
        """Store how far everything was delivered. ``FencedError`` for leases that were lost."""
        lost: FencedError | None = None
        for partition, intake in list(self._intakes.items()):
            held = self._membership.held.get(partition)
            same = held is not None and held.lease.epoch == intake.epoch
            if held and same and held.lease.cursor == intake.position and not intake.moved:
                continue
            try:
                with self._lock:
                    self._membership.commit(partition, intake.position, intake.epoch)
                intake.committed()
            except FencedError as exc:
                self._intakes.pop(partition, None)
                lost = exc
        if lost is not None:
            raise lost

    def seek(self, partition: int, to: int | datetime) -> None:
        """Go on from an offset, or from a time, in one partition; forward or back."""
        self._topic.check_partition(partition)
        if isinstance(to, datetime):
            to = find_offset(self.log, self._topic, partition, check_timestamp(to))
        head, _ = read_head(self.log, self._topic, partition)
        if not head.start <= to <= head.next:
            raise InvalidError(
                f"seek in `{self._topic.name}/{partition}`: offset {to} is outside of "
                f"[{head.start}, {head.next}]: give one inside"
            )
        self._ensure_joined()
        self._trouble = None  # what was wrong with the old place; a poll tells of anything else
        self._intake_of(partition).seek(to)

    def skip_to_end(self) -> None:
        """Leave out all that is there now, in the partitions that this member holds, and commit."""
        self._ensure_joined()
        for partition in self.partitions():
            head, _ = read_head(self.log, self._topic, partition)
            self._intake_of(partition).seek(head.next)
        self.commit()

    def lag(self) -> list[Lag]:
        """How far this consumer is behind, in every partition, whoever holds it."""
        return consumer_lag(self.log, self._topic, self.name)

    def partitions(self) -> list[int]:
        """The partitions that this member holds now."""
        with self._lock:
            return sorted(self._membership.held)

    def uncommitted(self) -> bool:
        """Whether something was delivered since the last commit."""
        return any(self._is_ahead(partition) for partition in self._intakes)

    def rewind(self, partition: int, offset: int) -> None:
        """Deliver again from ``offset`` on; the cursor stays. For a handler that failed."""
        intake = self._intakes.get(partition)
        if intake is not None:
            intake.rewind(offset)

    def caught_up(self) -> bool:
        """Whether all that the topic holds now was delivered here, or handled by other members."""
        self._ensure_joined()
        for lag in self.lag():
            intake = self._intakes.get(lag.partition)
            done = lag.start if lag.cursor is None else lag.cursor
            if (done if intake is None else max(done, intake.position)) < lag.end:
                return False
        return True

    def touch(self) -> None:
        """Say that the handler is alive, as each poll does."""
        self._polled_s = self.log.clock.monotonic_s()

    def run(
        self, handler: Callable[[Any], object], *, dead_letter: str | None = None, **how: Any
    ) -> int:
        """Poll, handle, commit, again and again; how many events were handled.

        ``how`` are the fields of :class:`Handling`: ``on_error``, ``retries``, ``types``,
        ``lag_ms``, ``until_caught_up``, … With ``on_error="dead-letter"`` events that a handler
        could not take go to the topic ``dead_letter``, with the reason.
        """
        if dead_letter is not None:
            how["dead_letter"] = functools.partial(self._bury, dead_letter)
        return run(self, handler, Handling(**how))

    def read_once(
        self, partition: int, max_events: int = 20, handler: Callable[[Event], object] | None = None
    ) -> dict[str, Any]:
        """Read a bounded number of events from one partition, for functions that were woken.

        ``{"events_read": n, "done": …}``: not done means that more is there, or that somebody else
        is reading it just now; call again. The cursor moves after each event that was handled.
        """
        self._topic.check_partition(partition)
        with self._lock:
            if not self._membership.take_once(partition):
                return {"events_read": 0, "done": False, "busy": True}
            intake = self._intake_of(partition)
        read = 0
        try:
            while read < max_events and (stretch := intake.take(max_events - read)) is not None:
                for event in stretch.events():
                    if handler is not None:
                        handler(event)
                    self._membership.commit(partition, (event.offset or 0) + 1, intake.epoch)
                    read += 1
            held = self._membership.held.get(partition)
            if held and held.lease.cursor != intake.position:
                self._membership.commit(partition, intake.position, intake.epoch)  # over erased
        finally:
            self._intakes.pop(partition, None)
            held = self._membership.held.get(partition)
            cursor = held.lease.cursor if held else -1
            if held:
                self._membership.release(partition)
        head, _ = read_head(self.log, self._topic, partition)
        return {"events_read": read, "done": cursor >= head.next, "busy": False}

    def close(self) -> None:
        """Release all leases at their cursors, so that others can go on at once."""
        self._guard.check()
        self._stop.set()
        self._wake.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
            with self._lock, contextlib.suppress(UnavailableError):
                self._membership.leave()
                self._intakes.clear()
        self.log.wakeups.forget(self._topic.incarnation, self._wake)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._guard.is_foreign:  # a forked child that ends leaves its leases to the parent
            self.close()

    # Inside.

    def _leave_to_parent(self) -> None:
        """In a forked child: leases and cursors are the parent's to write."""
        self._lock = RefusingLock(self._guard)  # type: ignore[assignment]

    def _bury(self, topic: str, events: list[Event], error: BaseException) -> None:
        if self._append is None:
            raise InvalidError("dead letters: this consumer cannot append: open it from a home")
        self._append(topic, [dead_letter_of(event, error, self.name) for event in events])

    def _poll(self, max_events: int, timeout_s: float) -> list[Stretch]:
        if max_events < 1:
            raise InvalidError(f"poll: max_events is {max_events}: give 1 or more")
        clock = self.log.clock
        end_s = clock.monotonic_s() + timeout_s
        wait_s = _IDLE_FIRST_S
        while True:
            self._ensure_joined()
            self._polled_s = clock.monotonic_s()
            trouble, self._trouble = self._trouble, None
            if trouble is not None:
                raise trouble
            self._release_excess()
            found = self._collect(max_events)
            if found:
                return found
            left_s = end_s - clock.monotonic_s()
            if left_s <= 0 or self._stop.is_set():
                return []
            self._wake.wait(min(wait_s, left_s))
            wait_s = _IDLE_FIRST_S if self._wake.is_set() else min(_IDLE_LAST_S, wait_s * 1.5)
            self._wake.clear()

    def _collect(self, max_events: int) -> list[Stretch]:
        """What the held partitions have, each getting its turn to be first."""
        held = self.partitions()
        found: list[Stretch] = []
        trouble: TidelogError | None = None
        room = max_events
        self._next += 1
        for step in range(len(held)):
            partition = held[(self._next + step) % len(held)]
            try:
                self._intake_of(partition).refresh()
                while room > 0 and (stretch := self._take(partition, room)) is not None:
                    found.append(stretch)
                    room -= stretch.batch.num_rows
            except TidelogError as exc:
                trouble = exc  # the other partitions go first
            if room == 0:
                break
        if trouble is not None and not found:
            raise trouble
        if not isinstance(trouble, UnavailableError):
            self._trouble = self._trouble or trouble  # it will not pass: the next poll tells
        return found

    def _take(self, partition: int, count: int) -> Stretch | None:
        intake = self._intake_of(partition)
        try:
            return intake.take(count)
        except NotFoundError as exc:
            if "start" not in exc.context:
                raise
            start = exc.context["start"]
            raise NotFoundError(
                f"consumer `{self.name}` on `{self._topic.name}/{partition}`: its cursor is at "
                f"{intake.position}, but what is below {start} was trimmed: "
                f"seek to {start} to accept the loss",
                partition=partition,
                cursor=intake.position,
                start=start,
            ) from exc

    def _intake_of(self, partition: int) -> Intake:
        held = self._membership.held.get(partition)
        intake = self._intakes.get(partition)
        if intake is None or (held is not None and held.lease.epoch != intake.epoch):
            if held is None:
                raise InvalidError(
                    f"consumer `{self.name}`: does not hold partition {partition} of "
                    f"`{self._topic.name}` now: poll first, or close the other members"
                )
            reader = Reader(self.log, self._topic, partition, self._pool)
            intake = Intake(reader, held.lease.cursor, held.lease.epoch)
            self._intakes[partition] = intake
        return intake

    def _is_ahead(self, partition: int) -> bool:
        held = self._membership.held.get(partition)
        intake = self._intakes.get(partition)
        return bool(held and intake and intake.delivered != held.lease.cursor)

    def _release_excess(self) -> None:
        """Give back what is more than our share, where nothing is waiting for a commit."""
        for partition in reversed(self.partitions()):
            if self._excess <= 0:
                return
            if not self._is_ahead(partition):
                self._intakes.pop(partition, None)
                with self._lock:
                    self._membership.release(partition)
                    self._excess -= 1

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What a poll has taken but could not give out, for whatever reason, comes again."""
        before = {partition: each.position for partition, each in self._intakes.items()}
        try:
            yield
        except BaseException:
            for partition, intake in list(self._intakes.items()):
                if partition in before:
                    intake.rewind(before[partition])
                else:
                    del self._intakes[partition]
            raise

    def _ensure_joined(self) -> None:
        if self._stop.is_set():
            raise InvalidError(f"consumer `{self.name}`: is closed: open another")
        self._guard.check()
        if self._keeper is None:
            self._polled_s = self.log.clock.monotonic_s()
            with self._lock:
                self._membership.join()
                self._look_around()
            self.log.wakeups.wait_on(self._topic.incarnation, self._wake)
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        """The keeper's thread: heartbeats, and a look around more often than that."""
        beat_s = self.log.settings.lease_ttl_ms / 3000
        beaten_s = self.log.clock.monotonic_s()
        while not self._stop.wait(min(beat_s, _LOOK_S)):
            now_s = self.log.clock.monotonic_s()
            if now_s - self._polled_s > self.log.settings.max_poll_interval_ms / 1000:
                continue  # the handler hangs: let others take over
            try:
                with self._lock:
                    if now_s - beaten_s >= beat_s:
                        self._membership.beat()
                        self._membership.check_held()
                        beaten_s = now_s
                    if self._look_around():
                        self._wake.set()
            except UnavailableError:
                continue  # nothing is lost: commits are fenced, and the next beat may come through
            except Exception as exc:  # noqa: BLE001 - raised by the next poll
                self._trouble = exc

    def _look_around(self) -> bool:
        """Take what we should have; whether something is new."""
        living = self._membership.alive()
        taken = self._membership.take_some(living)
        self._excess = len(self._membership.held) - self._membership.fair_share(living)
        return bool(taken)
