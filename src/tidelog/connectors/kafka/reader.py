"""Reads a range of a Kafka partition: turns librdkafka's messages into batches.

A range ends when an offset at or after its limit appears, of a message or of the end of the
partition. The offsets before it may hold no events, so nothing else shows the end. While librdkafka
skips messages that a reader must not see, its statistics show that it progresses.

The work per message dominates the cost of reading. So messages are taken apart by method objects
and ``map``, a few hundred at a time: more would keep Python's garbage collector busy. Their bytes
are joined at once, so the next messages reuse the same memory.

From the first record with headers on, records come through ``records``, because the Python client
does not return every header name unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidelog.clock import Clock
from tidelog.codec.event_batch import EVENT_SCHEMA, STORED_SCHEMA, with_position
from tidelog.connectors.kafka.client import ClientWatch, is_lasting, translated
from tidelog.connectors.kafka.records import RecordConsumer, headers_with_time
from tidelog.connectors.source import Chunk, SourcePartition
from tidelog.errors import InternalError, NotFoundError, UnavailableError
from tidelog.model import limits

__all__ = ["MessageColumns", "PartitionRead"]

_ASK_MESSAGES = 500
_ASK_BYTES = 4 << 20  # of messages to request at once, estimated from the size of the last ones
_ASK_S = 0.05  # how long a request waits for all of them
_GUESS_BYTES = _ASK_BYTES  # assumed size before the first message, so that it arrives alone
_CHUNK_MESSAGES = 20_000
_CHUNK_BYTES = 32 << 20
_HEADERS = STORED_SCHEMA.field("headers").type
_second = itemgetter(1)


class PartitionRead:
    """One pass over offsets of a partition."""

    def __init__(
        self,
        consumer: Consumer,
        partition: SourcePartition,
        watch: ClientWatch,
        timeout_s: float,
        clock: Clock,
        open_records: Callable[[int], RecordConsumer],
    ) -> None:
        self._consumer = consumer
        self._open_records = open_records  # takes the offset to begin at
        self._records: RecordConsumer | None = None
        self._partition = partition
        self._watch = watch
        self._timeout_s = timeout_s
        self._clock = clock
        self._what = f"kafka partition `{partition.text}`"
        self._message_bytes = _GUESS_BYTES

    def chunks(self, start: int, limit: int) -> Iterator[Chunk]:
        """Yields the events of ``[start, limit)``. The position of the last chunk is the limit."""
        try:
            yield from self._chunks(start, limit)
        finally:
            if self._records is not None:
                self._records.close()

    def _chunks(self, start: int, limit: int) -> Iterator[Chunk]:
        self._check_held(start, limit)
        columns = MessageColumns(self._partition)
        self._consumer.assign([self._topic_partition(start)])
        at, seen_s, fetched = start, self._clock.monotonic_s(), self._watch.fetched
        while at < limit:
            messages, end = self._take(at, limit)
            if self._records is None and _have_headers(messages):
                self._consumer.unassign()
                self._records = self._open_records(at)
                continue
            if messages:
                size = columns.add(messages, at)
                self._message_bytes = max(1, size // len(messages))
                self._watch.trouble = None  # data arrived, so the error is over
                at = columns.end
            if end >= limit:
                at = limit
            if messages or self._watch.fetched > fetched:
                seen_s, fetched = self._clock.monotonic_s(), self._watch.fetched
            elif self._clock.monotonic_s() - seen_s > self._timeout_s:
                raise self._silent(at, limit)
            if at < limit and columns.is_full:
                yield Chunk(columns.take(), str(at))
                seen_s = self._clock.monotonic_s()  # our own time is not Kafka's silence
        yield Chunk(columns.take(), str(limit))

    def _take(self, at: int, limit: int) -> tuple[list[Any], int]:
        """Returns the next messages before the limit, and the greatest offset known to follow."""
        count = max(1, min(_ASK_MESSAGES, limit - at, _ASK_BYTES // self._message_bytes))
        try:
            taken: list[Any] = (self._records or self._consumer).consume(count, _ASK_S)
        except KafkaException as exc:
            raise translated(self._what, exc.args[0], self._watch) from exc
        end = at
        if taken and any(map(type(taken[0]).error, taken)):
            taken, end = self._without_errors(taken, at, limit)
        if taken and _offset(taken[-1]) >= limit:
            end = limit
            taken = [message for message in taken if _offset(message) < limit]
        return taken, end

    def _without_errors(self, taken: list[Any], at: int, limit: int) -> tuple[list[Any], int]:
        """Returns the messages that are not errors, and the end of the partition if reached."""
        messages, end = [], at
        for message in taken:
            error = message.error()
            if error is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                end = max(end, _offset(message))
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._check_held(max(at, _offset(message)), limit)
                raise translated(self._what, error, self._watch)
            elif is_lasting(error):
                raise translated(self._what, error)
            else:
                self._watch.note(error)
        return messages, end

    def _check_held(self, start: int, limit: int) -> None:
        """Raises ``NotFoundError`` if part of a range was deleted or does not exist."""
        try:
            first, end = self._consumer.get_watermark_offsets(
                self._topic_partition(start), timeout=self._timeout_s
            )
        except KafkaException as exc:
            self._consumer.poll(0)  # delivers the client's callbacks
            raise translated(self._what, exc.args[0], self._watch) from exc
        if start < first:
            raise NotFoundError(
                f"{self._what}: offsets {start} to {first} are gone, the first is {first}: "
                f"continue from {first} if that loss is acceptable",
                lost_from=start,
                first=first,
            )
        if limit > end:
            raise NotFoundError(
                f"{self._what}: ends at offset {end}, but was seen to reach {limit}: it was "
                "created again, or its brokers lost events: decide where to continue",
                lost_from=min(start, end),
                first=first,
                end=end,
            )

    def _silent(self, at: int, limit: int) -> Exception:
        """Returns why no message arrives: the events were deleted, or no broker responds."""
        if self._watch.trouble is not None:
            return translated(self._what, self._watch.trouble)
        self._check_held(at, limit)
        return UnavailableError(
            f"{self._what}: nothing came from offset {at} on in {self._timeout_s:g} s, "
            f"{limit} is the end: see that its brokers answer, and try again"
        )

    def _topic_partition(self, offset: int) -> TopicPartition:
        return TopicPartition(self._partition.topic, int(self._partition.name), offset)


class MessageColumns:
    """Messages waiting to become a batch, column by column."""

    def __init__(self, partition: SourcePartition) -> None:
        self._partition = partition
        self._clear()

    def _clear(self) -> None:
        self._values, self._keys = _Bytes(), _Bytes()
        self._times = [np.empty(0, np.int64)]
        self._offsets = [np.empty(0, np.int64)]
        self._header_counts: list[int] = []
        self._header_names: list[str] = []
        self._header_values: list[bytes | None] = []
        self._rows = self._bytes = 0

    @property
    def end(self) -> int:
        """Returns the offset after the last message."""
        return int(self._offsets[-1][-1]) + 1

    @property
    def is_full(self) -> bool:
        """Returns whether there is enough for a batch."""
        return self._rows >= _CHUNK_MESSAGES or self._bytes >= _CHUNK_BYTES

    def add(self, messages: Sequence[Any], at: int) -> int:
        """Adds messages, the first at ``at`` or later. Returns the size of their values."""
        rows, kind = len(messages), type(messages[0])  # the Python client's class, or Record
        offsets = np.fromiter(map(kind.offset, messages), np.int64, rows)
        if offsets[0] < at:
            raise InternalError(
                f"kafka partition `{self._partition.text}`: offset {offsets[0]} came after {at - 1}"
            )
        times = np.fromiter(map(_second, map(kind.timestamp, messages)), np.int64, rows)
        headers = list(map(kind.headers, messages))
        self._offsets.append(offsets)
        self._times.append(_event_times(times, headers))
        self._keys.add(list(map(kind.key, messages)))
        size = self._values.add(list(map(kind.value, messages)))
        self._add_headers(headers)
        self._rows += rows
        self._bytes += size
        return size

    def _add_headers(self, rows: list[Any]) -> None:
        """Adds their names and values; a null value stays null."""
        if not any(rows):
            self._header_counts += repeat(0, len(rows))
            return
        pairs = [pair for row in rows if row for pair in row]
        self._header_counts += [len(row) if row else 0 for row in rows]
        self._header_names += [name for name, _ in pairs]
        self._header_values += [value for _, value in pairs]

    def take(self) -> pa.RecordBatch:
        """Returns all waiting messages in event columns."""
        rows = self._rows
        offsets = np.concatenate(self._offsets)
        if (np.diff(offsets) <= 0).any():
            raise InternalError(
                f"kafka partition `{self._partition.text}`: offsets do not rise "
                f"between {offsets[0]} and {offsets[-1]}"
            )
        times = np.concatenate(self._times)
        columns = {
            "timestamp": pa.array(times).cast(STORED_SCHEMA.field("timestamp").type),
            "key": self._keys.array(),
            "value": self._values.array(),
            "headers": self._headers(),
        }
        self._clear()
        stored = pa.record_batch(
            [columns.get(each.name, pa.nulls(rows, each.type)) for each in STORED_SCHEMA],
            schema=STORED_SCHEMA,
        )
        batch = with_position(stored, self._partition.topic, int(self._partition.name), 0)
        place = EVENT_SCHEMA.get_field_index("offset")
        return batch.set_column(place, EVENT_SCHEMA.field(place), pa.array(offsets))

    def _headers(self) -> pa.Array:
        """Returns the headers of each message; null for a message without headers."""
        if not self._header_names:
            return pa.nulls(len(self._header_counts), _HEADERS)
        counts = np.array(self._header_counts, np.int32)
        ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        names = pa.array(self._header_names, pa.string())
        values = pa.array(self._header_values, pa.binary())
        pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADERS.value_type))
        without = pa.array(counts == 0)
        return pa.ListArray.from_arrays(pa.array(ends), pairs, type=_HEADERS, mask=without)


class _Bytes:
    """A column of bytes with nulls."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._lengths = [np.empty(0, np.int32)]
        self._valid = [np.empty(0, np.bool_)]
        self._nulls = 0

    def add(self, values: list[Any]) -> int:
        """Adds values. Returns their size in bytes."""
        rows, nulls = len(values), values.count(None)
        self._nulls += nulls
        if nulls == rows:  # common for keys
            self._lengths.append(np.zeros(rows, np.int32))
            self._valid.append(np.zeros(rows, np.bool_))
            return 0
        valid = np.ones(rows, np.bool_)
        if nulls:
            valid[:] = [value is not None for value in values]
            values = [value or b"" for value in values]
        self._parts.append(b"".join(values))
        self._lengths.append(np.fromiter(map(len, values), np.int32, rows))
        self._valid.append(valid)
        return len(self._parts[-1])

    def array(self) -> pa.Array:
        """Returns all values. Arrow owns the memory and reuses it."""
        lengths, valid = np.concatenate(self._lengths), np.concatenate(self._valid)
        if self._nulls == len(valid):
            return pa.nulls(len(valid), pa.binary())
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        if ends[-1] > np.iinfo(np.int32).max:
            raise InternalError(f"kafka: {ends[-1]} bytes in one batch are more than Arrow takes")
        data = pa.allocate_buffer(int(ends[-1]))
        view, at = memoryview(data).cast("B"), 0
        for part in self._parts:
            view[at : at + len(part)] = part
            at += len(part)
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if self._nulls else None
        buffers = [bitmap, pa.py_buffer(ends.astype(np.int32)), data]
        return pa.Array.from_buffers(pa.binary(), len(lengths), buffers, self._nulls)


def _event_times(times: Any, headers: list[Any]) -> Any:
    """Returns valid event times. Any other time becomes 0, and a header keeps it."""
    odd = (times < 0) | (times >= limits.TIMESTAMP_MS_END)
    for row in np.flatnonzero(odd).tolist():
        headers[row] = headers_with_time(int(times[row]), headers[row] or [])
    times[odd] = 0
    return times


def _have_headers(messages: Sequence[Message]) -> bool:
    """Returns whether any message has headers. The client raises for a name that is not UTF-8."""
    try:
        return any(map(Message.headers, messages))
    except (SystemError, UnicodeDecodeError):
        return True


def _offset(message: Any) -> int:
    """Returns the offset of a received message."""
    offset = message.offset()
    return -1 if offset is None else int(offset)
