"""Producers: collect events into flushes.

``send`` puts an event into the open flush. When the flush is large or old enough, the producer
closes it and hands it to the queue (``flush_queue``). ``append`` makes flushes of many events at
once. The bytes in the buffer and on their way are limited; a full buffer blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from types import TracebackType

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.codec.event_batch import batch_bytes, check_events, stored_batch, table_of
from tidelog.codec.formats.batches import slices
from tidelog.codec.partitioner import partitions_for
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, InvalidError, TidelogError, UnknownOutcomeError
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import event_mark
from tidelog.log.producer.flush import (
    EVENT_OVERHEAD_BYTES,
    EventFields,
    Flush,
    FlushPart,
    SendFuture,
    positions_of,
)
from tidelog.log.producer.flush_queue import UPLOADS, FlushQueue
from tidelog.model import limits
from tidelog.model.event import (
    Event,
    Positions,
    check_event,
    check_timestamp,
    check_whole,
    headers_of,
)
from tidelog.model.topic import (
    ProducerState,
    Topic,
    check_producer_name,
    partition_for,
    unnamed_producer,
)

__all__ = ["Producer"]

_EVENTS_LAST = limits.SEGMENT_EVENTS_MAX - 1
_PLAIN_BYTES_MAX = _EVENTS_LAST * EVENT_OVERHEAD_BYTES  # as many events as fit into a segment


class Producer:
    """Appends events to one topic. Thread-safe. Close it, or use a ``with`` statement."""

    def __init__(self, context: Context, topic: Topic, name: str | None = None) -> None:
        if name is not None:
            check_producer_name(name)
        self._context = context
        self._topic = topic
        self._named = name is not None
        self._appender = Appender(context, topic, name or unnamed_producer(context.ids.new()))
        self._before: dict[int, ProducerState] = {}
        self._offsets: dict[int, dict[int, int]] = {}  # of what was sent before; read on demand
        self._sequence = -1  # the highest sequence used
        self._sent: dict[int, int] = {}  # the highest for each partition, in this process
        self._queue = FlushQueue(context, topic, self._appender, self._named)
        self._now_ms = context.clock.now_ms
        self._event_bytes_max = context.log_settings.event_bytes_max
        self._open = Flush(topic.name)
        # Has the queue's lock: signal handlers may raise inside Python's own events.
        self._lingering = threading.Condition(self._queue.lock)
        if self._named:
            self._before = self._appender.open_named()
            self._sequence = max(state.last for state in self._before.values())
        self._timer = threading.Thread(target=self._close_lingering, daemon=True)
        self._timer.start()

    @property
    def topic(self) -> str:
        """The name of the topic that it appends to.

        >>> producer.topic
        'orders'
        """
        return self._topic.name

    @property
    def incarnation(self) -> str:
        """Returns the incarnation of the topic that it appends to.

        >>> producer.incarnation == home.topic("orders").incarnation
        True
        """
        return self._topic.incarnation

    @property
    def last_sequence(self) -> int:
        """Returns the highest sequence of a named producer so far, across restarts; -1 if none.

        >>> with home.producer("orders", name="loader") as producer:
        ...     producer.last_sequence
        -1
        """
        return self._sequence

    @property
    def room(self) -> int:
        """Returns about how many bytes can be sent now without waiting.

        >>> producer.room > 0
        True
        """
        with self._queue.lock:  # else a flush that starts would count twice
            used = self._queue.held_bytes + self._open.size
        return self._context.log_settings.buffer_bytes - used

    def is_stored(self, sequence: int, key: bytes | None = None) -> bool:
        """Returns whether an earlier process stored this sequence under this producer's name.

        >>> with home.producer("orders", name="loader") as producer:
        ...     producer.is_stored(0)
        False
        """
        before = self._before.get(self._partition_and_sequence(key, sequence)[0])
        return before is not None and sequence <= before.last

    def marks(self) -> dict[int, bytes]:
        """Returns the marks that earlier processes with this name stored, by sequence.

        Each partition keeps the mark of its last sequence.

        >>> with home.producer("orders", name="loader") as producer:
        ...     producer.marks()
        {}
        """
        return {state.last: state.mark for state in self._before.values() if state.last >= 0}

    def send(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        id: str | None = None,
        timestamp: int | datetime | str | None = None,
        type: str | None = None,
        headers: Iterable[tuple[str, bytes | None]] | None = (),
        sequence: int | None = None,
        mark: bytes | None = None,
    ) -> SendFuture:
        """Puts one event into the buffer; returns a future for its position once it is durable.

        A named producer may give each event a ``sequence``, which must increase. A sequence that an
        earlier process has stored is not stored again: the future returns its first position. The
        last sequence of each partition is stored with a ``mark``, by default a digest of the
        event's value, key, id and type. Raises ``AlreadyExistsError`` if that sequence comes again
        with another mark.

        >>> producer.send(b"one more", key=b"customer-7").result().offset
        3
        """
        if (  # the common case: the open flush has room
            value.__class__ is bytes
            and key is None
            and timestamp is None
            and headers == ()
            and id is None
            and type is None
            and sequence is None
            and mark is None
        ):
            with self._queue.lock:
                flush = self._open
                own = len(value)
                size = flush.size + own + EVENT_OVERHEAD_BYTES
                if size < flush.limit and own <= self._event_bytes_max:
                    pending = flush.pending
                    index = len(pending.values)
                    try:  # a signal handler may raise between the two
                        pending.times.append(self._now_ms())
                        pending.values.append(value)
                    except BaseException:
                        pending.truncate(index, len(pending.fields))
                        raise
                    flush.size = size
                    return SendFuture(flush, index)
        if sequence is not None:
            sequence = check_whole("send: sequence", sequence)
        event = Event(value, key, id, timestamp, type, headers_of(headers))
        size = check_event(event, self._event_bytes_max) + EVENT_OVERHEAD_BYTES
        time_ms = self._now_ms() if timestamp is None else check_timestamp(timestamp)
        if mark is not None:
            self._check_given(mark)
        with self._queue.lock:
            if sequence is not None:
                partition, number = self._partition_and_sequence(key, sequence)
                known = self._repeated(partition, number)
                if known is not None:
                    self._check_mark(event, partition, number, mark)
                    return known
            self._make_room(size)  # waits without the lock, so sequences come after it
            partition, number = self._partition_and_sequence(key, sequence)
            fields = EventFields(id, key, type, event.headers, partition, number, mark)
            return self._enter(value, time_ms, fields, size)

    def send_json(
        self,
        value: object,
        key: bytes | None = None,
        *,
        id: str | None = None,
        timestamp: int | datetime | str | None = None,
        type: str | None = None,
        headers: Iterable[tuple[str, bytes | None]] | None = (),
    ) -> SendFuture:
        """Sends a value as JSON: what :mod:`json` takes, and dataclasses, dates and UUIDs.

        >>> producer.send_json({"amount": 12}, key=b"customer-7").result().offset
        3
        """
        try:
            encoded = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidError(f"event: its value cannot be encoded as JSON: {exc}") from exc
        return self.send(encoded, key, id=id, timestamp=timestamp, type=type, headers=headers)

    def append(
        self,
        events: Iterable[Event] | pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        expected_offset: int | None = None,
    ) -> Positions:
        """Stores many events; they are durable on return. They may land in several commits.

        With ``expected_offset``, they go to one partition in one commit, and only if that is its
        next offset: raises ``ConflictError`` otherwise. Raises ``PartialAppendError`` if only some
        events are stored; the error lists which are stored, which are not, and which are unknown.

        >>> [each.offset for each in producer.append([tidelog.Event(b"a")])]
        [3]
        """
        self._queue.guard.check()
        if self._named:
            raise InvalidError("append: a named producer counts its events: use send")
        return self._append(self.checked(events), partition, expected_offset)

    def checked(self, events: Iterable[Event] | pa.Table | pa.RecordBatch) -> pa.Table:
        """Returns events in stored columns. Raises ``InvalidError`` if one cannot be stored.

        >>> producer.checked([tidelog.Event(b"a")]).num_rows
        1
        """
        table = self._table_of(events)
        check_events(table, self._event_bytes_max)
        return table

    def append_own(self, events: Iterable[Event]) -> Positions:
        """Stores events of this home to which Tidelog has added something, such as dead letters.

        They were checked when they arrived. So neither the addition nor a lower ``event_bytes_max``
        makes them invalid.

        >>> len(producer.append_own([tidelog.Event(b"a")]))
        1
        """
        self._queue.guard.check()
        table = self._table_of(events)
        check_events(table, limits.EVENT_BYTES_CEILING, own=True)
        return self._append(table, None, None)

    def append_at(
        self, events: pa.Table, *, partition: int, find_end: Callable[[], int]
    ) -> Positions:
        """Stores events that were checked in one commit, at the offset that ``find_end`` returns.

        Calls it again after each conflict. What it raises refuses the events, and no others.

        >>> events = producer.checked([tidelog.Event(b"a")])
        >>> producer.append_at(events, partition=0, find_end=lambda: 3)[0].offset
        3
        """
        self._queue.guard.check()
        return self._append(events, partition, None, find_end)

    def _append(
        self,
        table: pa.Table,
        partition: int | None,
        expected_offset: int | None,
        find_end: Callable[[], int] | None = None,
    ) -> Positions:
        if partition is not None:
            self._topic.check_partition(partition)
        if expected_offset is not None and partition is None:
            raise InvalidError("append: expected_offset needs a partition: give both")
        if expected_offset is not None:
            expected_offset = check_whole("append: expected_offset", expected_offset)
        flushes: list[Flush] = []
        stopped: TidelogError | None = None
        is_whole = expected_offset is not None or find_end is not None
        for part in self._slices(table, whole=is_whole):
            flush = self._flush_of(part, partition)
            flush.expected_offset, flush.find_end = expected_offset, find_end
            flushes.append(flush)
            try:
                if stopped is None:
                    self._submit(flush)
            except TidelogError as exc:
                stopped = exc
            if stopped is not None:
                flush.finish(stopped)
        for flush in flushes:
            flush.wait(None)
        return positions_of(self._topic.name, [(flush, None) for flush in flushes])

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns when everything that was sent is durable; raises the first failure.

        Threads may share the producer: each gets each failure once, since its own events may be
        among those that failed. A failure is not raised again if the futures of all its events have
        raised it.

        >>> _ = producer.send(b"one more")
        >>> producer.flush()
        """
        with self._queue.lock:
            self._close_flush()
            waiting = list(self._queue.under_way.values())
        now_s = self._context.clock.monotonic_s
        end_s = None if timeout_s is None else now_s() + timeout_s
        for flush in waiting:
            if not flush.wait(None if end_s is None else max(0.0, end_s - now_s())):
                raise UnknownOutcomeError(
                    f"flush of `{self._topic.name}`: not durable after {timeout_s} s, and still "
                    "under way: wait longer"
                )
        self._queue.raise_unreported()

    def close(self) -> None:
        """Flushes and ends the threads; raises what :meth:`flush` would.

        >>> home.producer("orders").close()
        """
        with self._queue.lock:
            if self._queue.closed:
                return
            self._close_flush()
            self._queue.closed = True
            self._lingering.notify()
        self._queue.close()
        if not self._named:
            self._appender.close()
        self._queue.raise_unreported()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._queue.guard.is_foreign:  # a forked child leaves it to the parent
            self.close()

    # The buffer.

    def _partition_and_sequence(self, key: bytes | None, sequence: int | None) -> tuple[int, int]:
        """Returns the partition and sequence of an event; -1 for "the flush decides" and "none"."""
        partitions = self._topic.partitions
        if not self._named:
            if sequence is not None:
                raise InvalidError("send: only a named producer takes a sequence: give it a name")
            return (-1 if key is None else partition_for(key, partitions)), -1
        if sequence is None:
            sequence = self._sequence + 1
        if not 0 <= sequence <= limits.SEQUENCE_MAX:
            raise InvalidError(f"send: sequence is {sequence}: give 0 to {limits.SEQUENCE_MAX}")
        return (sequence % partitions if key is None else partition_for(key, partitions)), sequence

    def _repeated(self, partition: int, sequence: int) -> SendFuture | None:
        """Returns the future for a sequence that an earlier process stored; None for a new one."""
        before = self._before.get(partition)
        if before is None or sequence > before.last:
            return None
        if partition not in self._offsets:
            self._offsets[partition] = before.offsets()
        offset = self._offsets[partition].get(sequence)
        flush = Flush(self._topic.name)
        if offset is None:
            flush.finish(
                AlreadyExistsError(
                    f"producer: sequence {sequence} was stored before in "
                    f"`{self._topic.name}/{partition}`, too long ago to know its offset: continue "
                    f"after {before.last}"
                )
            )
        else:
            flush.partitions = np.array([partition], np.int32)
            part = FlushPart(partition, None, np.zeros(1, np.int64), None)
            flush.note_stored(part, offset)
            flush.finish()
        return SendFuture(flush, 0)

    def _check_given(self, mark: bytes) -> None:
        if not self._named:
            raise InvalidError("send: only a named producer takes a mark: give it a name")
        if not isinstance(mark, bytes) or not 1 <= len(mark) <= limits.PRODUCER_MARK_BYTES:
            raise InvalidError(f"send: mark: give 1 to {limits.PRODUCER_MARK_BYTES} bytes")

    def _check_mark(self, event: Event, partition: int, sequence: int, mark: bytes | None) -> None:
        """Raises ``AlreadyExistsError`` if another event was stored under this sequence."""
        before = self._before[partition]
        if sequence != before.last or not before.mark:
            return
        if mark is None:
            mark = event_mark(event.value, event.key, event.id, event.type)
        if mark != before.mark:
            raise AlreadyExistsError(
                f"producer: sequence {sequence} was stored before in "
                f"`{self._topic.name}/{partition}` with another event: open a producer under "
                "another name, or send the same events as before"
            )

    def _enter(
        self, value: bytes | None, time_ms: int, fields: EventFields, size: int
    ) -> SendFuture:
        """Puts one event into the open flush. The lock must be held since there was room."""
        if self._named:
            self._check_sequence(fields)
        flush = self._open
        index = len(flush.pending)
        flush.pending.add(value, time_ms, fields)
        if self._named:  # without a call, before which a signal handler might raise
            self._sent[fields.partition] = fields.sequence
            if fields.sequence > self._sequence:  # noqa: PLR1730
                self._sequence = fields.sequence
        flush.size += size
        if flush.size >= self._context.log_settings.segment_bytes or index >= _EVENTS_LAST:
            self._close_flush()
        elif not flush.lingers:
            self._lingering.notify()  # the timer looks when the lock is free
            flush.lingers = True
        if not self._named:
            room = self._context.log_settings.buffer_bytes - self._queue.held_bytes
            flush.limit = min(self._context.log_settings.segment_bytes, _PLAIN_BYTES_MAX, room)
        return SendFuture(flush, index)

    def _check_sequence(self, fields: EventFields) -> None:
        partition, sequence = fields.partition, fields.sequence
        if sequence <= self._sent.get(partition, -1):
            raise InvalidError(
                f"send: sequence {sequence} comes after {self._sent[partition]}: "
                "sequences of a producer must grow"
            )

    def _make_room(self, size: int) -> None:
        """Waits until the buffer has room for this much more. The lock must be held."""
        self._queue.wait_for_room(0)
        while (
            self._queue.held_bytes + self._open.size + size
            > self._context.log_settings.buffer_bytes
        ):
            self._close_flush()
            self._queue.wait_for_room(size)
            if self._queue.held_bytes + self._open.size == 0:
                return  # a single event may be larger than the buffer

    def _close_flush(self) -> None:
        """Starts the open flush on its way. The lock must be held."""
        if not self._open.pending:
            return
        flush, following = self._open, Flush(self._topic.name)
        try:
            self._queue.start(flush)
        finally:
            if flush.number >= 0:  # started, even if a signal handler has raised
                self._open = following

    def _close_lingering(self) -> None:
        """Starts a flush that has lingered, unless all uploads are busy. For the timer thread."""
        while True:
            with self._queue.lock:
                self._lingering.wait_for(lambda: self._open.lingers or self._queue.closed)
                flush = self._open
            if self._queue.closed:
                return
            self._context.clock.sleep(self._context.log_settings.linger_ms / 1000)
            with self._queue.lock:
                self._queue.state.wait_for(
                    lambda flush=flush: (  # type: ignore[misc]
                        self._queue.closed
                        or self._open is not flush
                        or len(self._queue.under_way) < UPLOADS
                    )
                )
                if self._open is flush and not self._queue.closed:
                    self._close_flush()

    # Tables.

    def _table_of(self, events: Iterable[Event] | pa.Table | pa.RecordBatch) -> pa.Table:
        now_ms = self._context.clock.now_ms()
        if isinstance(events, pa.Table | pa.RecordBatch):
            return stored_batch(events, now_ms)
        if not isinstance(events, Iterable) or isinstance(events, str | bytes):
            kind = type(events).__name__
            raise InvalidError(f"append: got {kind}: give a list of events or an Arrow table")
        return table_of(list(events), now_ms)

    def _slices(self, table: pa.Table, whole: bool) -> list[pa.Table]:
        if table.num_rows == 0:
            return []
        if whole:
            if table.num_rows > limits.SEGMENT_EVENTS_MAX:
                raise InvalidError(
                    f"append: {table.num_rows} events at an expected offset: "
                    f"at most {limits.SEGMENT_EVENTS_MAX} fit in one commit"
                )
            return [table]
        return list(
            slices(table, self._context.log_settings.segment_bytes, limits.SEGMENT_EVENTS_MAX)
        )

    def _flush_of(self, table: pa.Table, partition: int | None) -> Flush:
        if partition is None:
            keys = table.column("key")
            keyless = self._queue.keyless.next(keys.null_count) if keys.null_count else 0
            partitions = partitions_for(keys, self._topic.partitions, keyless)
        else:
            partitions = np.full(table.num_rows, partition, np.int32)
        return Flush.of_table(self._topic.name, table, partitions, batch_bytes(table))

    def _submit(self, flush: Flush) -> None:
        with self._queue.lock:
            self._close_flush()  # earlier events go first
            self._make_room(flush.size)
            self._close_flush()  # events that arrived meanwhile need the room that this one takes
            self._queue.start(flush)


def close_quietly(producer: Producer) -> TidelogError | None:
    """Flushes and closes a producer. Returns the error instead of raising it."""
    try:
        producer.close()
    except TidelogError as exc:
        return exc
    return None
