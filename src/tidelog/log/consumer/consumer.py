"""Consumers: named readers whose members share a topic's partitions.

A member joins at its first poll. A thread of its own sends heartbeats and takes leases, so that a
slow handler keeps them, up to the maximum poll interval. That thread releases no lease: ``poll``
releases a lease that the member should give up, after it has committed what it delivered. After a
crash, exactly the events after the last commit are delivered again.

Events belong to the lease under which they were read (its epoch). If the member loses a lease and
takes it again, reading resumes at the lease's cursor. It drops the positions, seeks and errors of
the old epoch, and ``commit`` or ``poll`` raises ``FencedError`` for a commit or seek that was lost.

A quiet partition is read about once a second, whatever the timeouts of polls are (``Pace``). Events
that this process commits are delivered at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import Unpack

import pyarrow as pa

from tidelog.clock import looks
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.concurrency import Flag, ProcessGuard, RefusingLock
from tidelog.context import Context
from tidelog.coordination.audit import DeadLetterRecorder
from tidelog.coordination.outcome import SentWrites
from tidelog.errors import FencedError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.consumer import handler as handlers
from tidelog.log.consumer.delivery import LeaseReader, all_or_nothing, one_by_one
from tidelog.log.consumer.leases import (
    Leases,
    Start,
    check_consumer_name,
    parse_start,
    trimmed_error,
)
from tidelog.log.partition_reader import LAST_S, OffsetEvents, Reader, find_offset
from tidelog.log.status import Lag, consumer_lag
from tidelog.log.topics import read_head
from tidelog.model.event import Event, check_timestamp, check_whole
from tidelog.model.topic import Topic

__all__ = ["Consumer"]

_LOOK_S = 0.4  # how soon a member notices that another has joined or left
_LOOK_SETTLED_S = 1.0  # the same, while it holds its share and members do not change
_WAIT_MIN_S = 0.005  # the shortest wait between polls of the catalog


class Consumer:
    """One member. Call it from one thread at a time. Close it, or use a ``with`` statement."""

    def __init__(
        self,
        context: Context,
        topic: Topic,
        name: str,
        start: Start = "earliest",
        pool: Executor | None = None,
        append: handlers.Append | None = None,
    ) -> None:
        check_consumer_name(name)
        start = parse_start(start, context.clock.now_ms())
        self.name = name
        self.context = context
        self._topic = topic
        self._pool = pool
        self._append = append
        self._leases = Leases(context, topic, name, start)
        self._readers: dict[int, LeaseReader] = {}
        self._next = 0  # the partition to read first in the next poll
        self._excess = 0  # how many leases to release
        # Guards the membership; only the polling thread uses lease readers.
        self._lock = threading.RLock()
        self._wake = Flag()
        self._stop = Flag()
        self._keeper: threading.Thread | None = None
        self._polled_s = 0.0
        # The error, and where it occurred.
        self._trouble: tuple[BaseException, LeaseReader | None] | None = None
        self._living: list[str] = []  # the members at the last look
        self._is_settled = False  # they were the same at the look before
        self._guard = ProcessGuard(f"consumer `{name}`", self._leave_to_parent)

    # Reading.

    def poll(self, max_events: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """Returns events, in order within each partition; empty after ``timeout_s`` without any.

        >>> [event.id for event in consumer.poll(max_events=2)]
        ['order-1', 'order-2']
        """
        with all_or_nothing(self._readers):
            parts = self._poll(max_events, timeout_s)
            return [event for part in parts for event in part.events()]

    def poll_arrow(self, max_events: int = 50_000, timeout_s: float = 1.0) -> pa.Table:
        """Returns the same as an Arrow table in event columns.

        >>> consumer.poll_arrow().num_rows
        3
        """
        with all_or_nothing(self._readers):
            parts = self._poll(max_events, timeout_s)
            return pa.Table.from_batches([each.arrow() for each in parts], EVENT_SCHEMA)

    def commit(self) -> None:
        """Stores how far everything was delivered.

        Cursors move back only after a :meth:`seek`. Raises ``FencedError`` for leases that were
        lost, ``UnavailableError`` if no cursor has moved, and ``UnknownOutcomeError`` if some have
        or may have.

        >>> _ = consumer.poll()
        >>> consumer.commit()
        """
        lost: FencedError | None = None
        sent = SentWrites()
        with sent.unknown_if_any(f"commit of consumer `{self.name}`", "commit again"):
            for partition, reader in list(self._readers.items()):
                try:
                    with self._lock:
                        sent.any |= self._commit(partition, reader)
                except FencedError as exc:
                    self._readers.pop(partition, None)
                    lost = exc
        if lost is not None:
            raise lost

    def seek(self, partition: int, to: int | datetime) -> None:
        """Continues from an offset or a time in one partition, forward or back.

        >>> _ = consumer.poll()
        >>> consumer.seek(0, 1)
        >>> [event.offset for event in consumer.poll()]
        [1, 2]
        """
        self._topic.check_partition(partition)
        if isinstance(to, datetime):
            to = find_offset(self.context, self._topic, partition, check_timestamp(to))
        to = check_whole("seek: offset", to)
        head, _ = read_head(self.context, self._topic, partition)
        if not head.start <= to <= head.next:
            raise InvalidError(
                f"seek in `{self._topic.name}/{partition}`: offset {to} is outside of "
                f"[{head.start}, {head.next}]: give one inside"
            )
        self._ensure_joined()
        self._trouble = None  # it belongs to the old position; a poll raises any other
        before = self._readers.get(partition)
        if before is not None and not self._is_current(partition, before):
            del self._readers[partition]
        self._reader_of(partition).seek(to)

    def skip_to_end(self) -> None:
        """Skips everything that is there now, in the partitions of this member, and commits.

        >>> consumer.skip_to_end()
        """
        self._ensure_joined()
        for partition in self.partitions():
            head, _ = read_head(self.context, self._topic, partition)
            self._reader_of(partition).seek(head.next)
        self.commit()

    def lag(self) -> list[Lag]:
        """Returns how far this consumer is behind, in every partition, for all members.

        >>> [lag.events for lag in consumer.lag()]
        [3]
        """
        lags = consumer_lag(self.context, self._topic, self.name)
        for lag in lags:
            reader = self._readers.get(lag.partition)
            if reader is not None and lag.end > reader.position:
                reader.pace.hurry()  # the next poll reads this partition at once
        return lags

    def partitions(self) -> list[int]:
        """Returns the partitions that this member holds now.

        >>> _ = consumer.poll()
        >>> consumer.partitions()
        [0]
        """
        with self._lock:
            return sorted(self._leases.held)

    def uncommitted(self) -> bool:
        """Returns whether something was delivered since the last commit.

        >>> _ = consumer.poll()
        >>> consumer.uncommitted()
        True
        """
        return any(self._is_ahead(partition) for partition in self._readers)

    def rewind(self, partition: int, offset: int) -> None:
        """Delivers again from ``offset`` on, without moving the cursor. For a handler that failed.

        Does nothing if the lease was lost since: the next owner starts at the cursor.

        >>> _ = consumer.poll()
        >>> consumer.rewind(0, 2)
        >>> [event.offset for event in consumer.poll()]
        [2]
        """
        reader = self._readers.get(partition)
        if reader is not None and self._is_current(partition, reader):
            reader.rewind(offset)

    def caught_up(self) -> bool:
        """Returns whether everything in the topic now was delivered here or handled by other
        members.

        >>> _ = consumer.poll()
        >>> consumer.caught_up()
        True
        """
        self._ensure_joined()
        for lag in self.lag():
            reader = self._readers.get(lag.partition)
            done = lag.start if lag.cursor is None else lag.cursor
            if reader is not None and self._is_current(lag.partition, reader):
                done = max(done, reader.done)
            if done < lag.end:
                return False
        return True

    def touch(self) -> None:
        """Reports that the handler is alive, as each poll does.

        >>> consumer.touch()
        """
        self._polled_s = self.context.clock.monotonic_s()

    def __iter__(self) -> Iterator[Event]:
        """Yields events as they come, for ever; commits each batch after its last event.

        A commit in the loop covers the events that were yielded. What a ``break`` leaves of a
        batch comes again with the next poll or loop.
        """
        while True:
            with all_or_nothing(self._readers):
                coming = self.one_by_one(self.poll())
            yield from coming
            with contextlib.suppress(FencedError):  # another member has that partition now
                self.commit()

    def one_by_one(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yields polled events, so that a commit covers only those that were yielded.

        >>> next(consumer.one_by_one(consumer.poll())).offset
        0
        """
        return one_by_one(events, self._readers)

    def run(
        self,
        handler: handlers.Handler,
        *,
        dead_letter: str | None = None,
        **how: Unpack[handlers.HandlerSettings],
    ) -> int:
        """Polls, handles and commits in a loop; returns how many events were handled.

        :class:`HandlerOptions` explains ``on_error``, ``retries``, ``types``, ``lag_ms`` and the
        others. With ``on_error="dead-letter"``, failed events go to the topic ``dead_letter``.

        >>> consumer.run(lambda event: None, until_caught_up=True)
        3
        """
        to = None
        if dead_letter:
            places = (f"topic:{self._topic.name}", dead_letter, f"consumer `{self.name}`")
            record = DeadLetterRecorder(self.context, *places)
            to = handlers.dead_letter_to(self._append, dead_letter, self.name, record)
        options = handlers.HandlerOptions(dead_letter=to, **how)
        return handlers.run(self, handler, options, lambda: all_or_nothing(self._readers))

    def read_once(
        self,
        partition: int,
        max_events: int = 20,
        handler: Callable[[Event], object] | None = None,
        *,
        wait_s: float = 0.0,
    ) -> handlers.ReadOnceResult:
        """Reads a limited number of events from one partition, for functions that were woken.

        Returns ``{"events_read": n, "done": …}``. If not done, there is more, or another reader has
        the partition (``busy``): call again. The cursor moves after each handled event.

        A reader that died on another machine is replaced after this consumer has seen no sign of it
        for 1.5 times ``lease_ttl_ms``. Keep the consumer between calls, or pass that time as
        ``wait_s`` in a process that makes only one call.

        >>> home.consumer("orders", "billing").read_once(0, max_events=2)
        {'events_read': 2, 'done': False, 'busy': False}
        """
        self._topic.check_partition(partition)
        read, most = 0, check_whole("read: max_events", max_events)
        if not self._acquire_once(partition, wait_s):
            return {"events_read": 0, "done": False, "busy": True}
        reader = self._reader_of(partition)
        sent = SentWrites()  # the handler's own errors pass unchanged
        what = f"read of `{self._topic.name}/{partition}`"
        unknown_if_sent = functools.partial(sent.unknown_if_any, what, "read again")
        try:
            while read < most:
                with unknown_if_sent():
                    part = reader.take(most - read)
                if part is None:
                    break
                for event in part.events():
                    if handler is not None:
                        handler(event)
                    with unknown_if_sent():
                        self._leases.commit(partition, (event.offset or 0) + 1, reader.epoch)
                    sent.any = True
                    read += 1
            held = self._leases.held.get(partition)
            if held and held.lease.cursor != reader.position:
                with unknown_if_sent():  # over erased events
                    self._leases.commit(partition, reader.position, reader.epoch)
        finally:
            self._readers.pop(partition, None)
            held = self._leases.held.get(partition)
            cursor = held.lease.cursor if held else -1
            if held:
                self._leases.release(partition)
        head, _ = read_head(self.context, self._topic, partition)
        return {"events_read": read, "done": cursor >= head.next, "busy": False}

    def end_poll(self) -> None:
        """Ends a poll that waits in another thread, before its timeout. Close the member then.

        >>> consumer.end_poll()
        """
        self._guard.check()
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Releases all leases at their cursors, so that others can continue at once.

        >>> home.consumer("orders", "billing").close()
        """
        self.end_poll()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
            with self._lock, contextlib.suppress(UnavailableError):
                self._leases.leave()
                self._readers.clear()
        self.context.wakeups.forget(self._topic.incarnation, self._wake)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._guard.is_foreign:  # a forked child leaves its leases to the parent
            self.close()

    # Internals.

    def _leave_to_parent(self) -> None:
        """In a forked child: leaves leases and cursors to the parent."""
        self._lock = RefusingLock(self._guard)  # type: ignore[assignment]

    def _poll(self, max_events: int, timeout_s: float) -> list[OffsetEvents]:
        if (max_events := check_whole("poll: max_events", max_events)) < 1:
            raise InvalidError(f"poll: max_events is {max_events}: give 1 or more")
        clock = self.context.clock
        end_s = clock.monotonic_s() + timeout_s
        for reader in self._readers.values():
            reader.put_back()
        while True:
            self._ensure_joined()
            self._polled_s = clock.monotonic_s()
            self._raise_trouble()
            self._release_excess()
            found = self._collect(max_events)
            if found:
                return found
            now_s = clock.monotonic_s()
            if now_s >= end_s or self._wait(min(end_s - now_s, self._quiet_s(now_s))):
                return []

    def _wait(self, seconds: float) -> bool:
        """Waits until a poll is due, or this process commits something; returns whether to end."""
        self._wake.wait(max(_WAIT_MIN_S, seconds))
        self._wake.clear()
        return self._stop.is_set()

    def _quiet_s(self, now_s: float) -> float:
        """Returns how long until a partition is read again, or a lease may become ours."""
        readers = [self._readers.get(partition) for partition in self.partitions()]
        return min([LAST_S, *(0.0 if r is None else r.pace.wait_s(now_s) for r in readers)])

    def _collect(self, max_events: int) -> list[OffsetEvents]:
        """Returns what the partitions of this member have; each takes its turn to be first."""
        held = self.partitions()
        found: list[OffsetEvents] = []
        trouble: tuple[Exception, LeaseReader | None] | None = None
        room = max_events
        self._next += 1
        for step in range(len(held)):
            partition = held[(self._next + step) % len(held)]
            reader: LeaseReader | None = None
            try:
                reader = self._current(partition)
                if reader is not None:
                    for part in self._take(partition, reader, room):
                        found.append(part)
                        room -= part.batch.num_rows
            except Exception as exc:  # noqa: BLE001 - what was found must be returned first
                trouble = exc, reader
            if room == 0:
                break
        if trouble is not None and not found:
            raise trouble[0]
        if trouble is not None and not isinstance(trouble[0], UnavailableError):
            self._trouble = self._trouble or trouble  # it will not go away: the next poll raises it
        return found

    def _take(self, partition: int, reader: LeaseReader, room: int) -> Iterator[OffsetEvents]:
        """Yields what one partition has, up to ``room`` events, if a poll of it is due."""
        committed = self.context.wakeups.newest(self._topic.incarnation, partition)
        clock, pace = self.context.clock, reader.pace
        if not reader.is_reading() and not pace.is_due(clock.monotonic_s(), committed):
            return
        pace.looked(committed)
        taken = False
        try:
            reader.refresh()
            while room > 0 and (part := reader.take(room)) is not None:
                taken = True
                room -= part.batch.num_rows
                yield part
        except NotFoundError as exc:
            if "start" not in exc.context:
                raise
            place, start = f"{self._topic.name}/{partition}", exc.context["start"]
            raise trimmed_error(self.name, place, partition, reader.position, start) from exc
        if taken:
            pace.found()
        else:
            pace.missed(clock.monotonic_s())

    def _raise_trouble(self) -> None:
        """Raises an error that occurred since the last poll, unless its lease was lost since."""
        trouble, self._trouble = self._trouble, None
        if trouble is None:
            return
        error, reader = trouble
        if reader is None or any(
            each is reader and self._is_current(partition, each)
            for partition, each in self._readers.items()
        ):
            raise error

    def _current(self, partition: int) -> LeaseReader | None:
        """Returns the reader of the lease that we hold now; None if we hold none.

        Drops a lease reader of an earlier epoch: reading resumes at the lease's cursor. Raises
        ``FencedError`` if a seek is dropped with it.
        """
        held = self._leases.held.get(partition)
        if held is None:
            return None
        reader = self._readers.get(partition)
        if reader is not None and reader.epoch == held.lease.epoch:
            return reader
        rows = Reader(self.context, self._topic, partition, self._pool)
        self._readers[partition] = LeaseReader(rows, held.lease.cursor, held.lease.epoch)
        if reader is not None and reader.moved:
            raise FencedError(
                f"lease on `{self._topic.name}/{partition}`: was lost before the seek to "
                f"{reader.delivered} was committed, and is at {held.lease.cursor} now: "
                "seek again",
                partition=partition,
            )
        return self._readers[partition]

    def _reader_of(self, partition: int) -> LeaseReader:
        reader = self._current(partition)
        if reader is None:
            raise InvalidError(
                f"consumer `{self.name}`: does not hold partition {partition} of "
                f"`{self._topic.name}` now: poll first, or close the other members"
            )
        return reader

    def _is_current(self, partition: int, reader: LeaseReader) -> bool:
        """Returns whether we still hold the lease under which a lease reader reads."""
        held = self._leases.held.get(partition)
        return held is not None and held.lease.epoch == reader.epoch

    def _is_ahead(self, partition: int) -> bool:
        """Returns whether events that were read under our current lease wait for a commit."""
        held = self._leases.held.get(partition)
        reader = self._readers.get(partition)
        if held is None or reader is None or held.lease.epoch != reader.epoch:
            return False
        return reader.moved or reader.delivered > held.lease.cursor

    def _commit(self, partition: int, reader: LeaseReader) -> bool:
        """Moves one cursor to what was delivered; returns whether it had to move.

        Raises ``FencedError`` if the lease is another one.
        """
        held = self._leases.held.get(partition)
        if held is not None and held.lease.epoch == reader.epoch:
            cursor = held.lease.cursor
            if reader.done < cursor and not reader.moved:
                return False  # events before the cursor are delivered again: it stays
            if reader.done == cursor and held.is_known and not reader.moved:
                reader.committed()  # a seek is stored anyway: the lease may be another's by now
                return False
        self._leases.commit(partition, reader.done, reader.epoch, back=reader.moved)
        reader.committed()
        return True

    def _acquire_once(self, partition: int, wait_s: float) -> bool:
        """Takes a partition for a one-shot read; watches its owner for up to ``wait_s``."""
        for _ in looks(self.context.clock, wait_s, _LOOK_S):
            with self._lock:
                if self._leases.acquire_once(partition):
                    return True
        return False

    def _release_excess(self) -> None:
        """Releases what exceeds our share, where nothing waits for a commit."""
        for partition in reversed(self.partitions()):
            with self._lock:
                if self._excess <= 0:
                    return
                if partition in self._leases.held and not self._is_ahead(partition):
                    self._readers.pop(partition, None)
                    self._leases.release(partition)
                    self._excess -= 1

    def _ensure_joined(self) -> None:
        if self._stop.is_set():
            raise InvalidError(f"consumer `{self.name}`: is closed: open another")
        self._guard.check()
        if self._keeper is None:
            self._polled_s = self.context.clock.monotonic_s()
            with self._lock:
                self._leases.join()
                self._look_around()
            self.context.wakeups.wait_on(self._topic.incarnation, self._wake)
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        """Sends heartbeats, and looks around more often than that. Runs in its own thread."""
        beat_s = self.context.log_settings.lease_ttl_ms / 3000
        beaten_s = self.context.clock.monotonic_s()
        while not self._stop.wait(min(beat_s, self._look_s())):
            now_s = self.context.clock.monotonic_s()
            if now_s - self._polled_s > self.context.log_settings.max_poll_interval_ms / 1000:
                continue  # the handler hangs: let others take over
            try:
                with self._lock:
                    if now_s - beaten_s >= beat_s:
                        self._leases.beat()
                        self._leases.check_held()
                        beaten_s = now_s
                    if self._look_around():
                        self._wake.set()
            except UnavailableError:
                continue  # nothing is lost: commits are fenced, and the next heartbeat may succeed
            except Exception as exc:  # noqa: BLE001 - raised by the next poll
                self._trouble = exc, None

    def _look_s(self) -> float:
        """Returns the wait until the next look around: shorter while members change."""
        held, share = len(self._leases.held), self._leases.fair_share(self._living)
        return _LOOK_SETTLED_S if self._is_settled and held == share else _LOOK_S

    def _look_around(self) -> bool:
        """Takes the leases that we should have; returns whether something is new."""
        living = self._leases.alive()
        self._is_settled = living == self._living
        self._living = living
        taken = self._leases.acquire_share(living)
        self._excess = len(self._leases.held) - self._leases.fair_share(living)
        return bool(taken)
