"""Kafka's messages as event columns.

The work for each message is the cost of all reading, so messages are taken apart by method objects
and ``map``, a few hundred at a time, and their bytes are joined at once: what was just copied out
of librdkafka is still in the processor's cache then, and its memory is used again for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from tidelog.codec.events import EVENT_SCHEMA, STORED_SCHEMA, with_position
from tidelog.errors import InternalError
from tidelog.model import limits
from tidelog.sources.base import SourcePartition

__all__ = ["Columns"]

_CHUNK_MESSAGES = 20_000
_CHUNK_BYTES = 32 << 20
_TIME = STORED_SCHEMA.field("timestamp").type
_HEADERS = STORED_SCHEMA.field("headers").type
_second = itemgetter(1)


class Columns:
    """Messages that wait to become a batch, column by column."""

    def __init__(self, partition: SourcePartition) -> None:
        self._partition = partition
        self._clear()

    def _clear(self) -> None:
        self._values = _Bytes(Message.value)
        self._keys = _Bytes(Message.key)
        self._times: list[Any] = []
        self._offsets: list[Any] = []
        self._header_counts: list[int] = []
        self._header_names: list[str] = []
        self._header_values: list[bytes] = []
        self._rows = self._bytes = 0

    @property
    def end(self) -> int:
        """The offset after the last message."""
        return int(self._offsets[-1][-1]) + 1

    @property
    def is_full(self) -> bool:
        """Whether a batch is worth making."""
        return self._rows >= _CHUNK_MESSAGES or self._bytes >= _CHUNK_BYTES

    def add(self, messages: Sequence[Message], at: int) -> int:
        """Take messages, the first of which stands at ``at`` or later; the size of their values."""
        rows = len(messages)
        offsets = np.fromiter(map(Message.offset, messages), np.int64, rows)
        if offsets[0] < at:
            raise InternalError(
                f"kafka partition `{self._partition.text}`: offset {offsets[0]} came after {at - 1}"
            )
        times = np.fromiter(map(_second, map(Message.timestamp, messages)), np.int64, rows)
        self._offsets.append(offsets)
        self._times.append(times)
        self._keys.add(messages)
        size = self._values.add(messages)
        self._add_headers(list(map(Message.headers, messages)))
        self._rows += rows
        self._bytes += size
        return size

    def _add_headers(self, rows: list[Any]) -> None:
        """Their names and values side by side; null is an empty value."""
        if not any(rows):
            self._header_counts += repeat(0, len(rows))
            return
        pairs = [pair for row in rows if row for pair in row]
        self._header_counts += [len(row) if row else 0 for row in rows]
        self._header_names += [name for name, _ in pairs]
        self._header_values += [value or b"" for _, value in pairs]

    def take(self) -> pa.RecordBatch:
        """All that waits, in event columns."""
        rows = self._rows
        offsets = np.concatenate([np.empty(0, np.int64), *self._offsets])
        if (np.diff(offsets) <= 0).any():
            raise InternalError(
                f"kafka partition `{self._partition.text}`: offsets do not rise "
                f"between {offsets[0]} and {offsets[-1]}"
            )
        times = np.concatenate([np.empty(0, np.int64), *self._times])
        times[(times < 0) | (times >= limits.TIMESTAMP_MS_END)] = 0
        columns = {
            "timestamp": pa.array(times).cast(_TIME),
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
        """The headers of each message; null for one without."""
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
    """A column of bytes, of which some may be null."""

    def __init__(self, take: Callable[[Message], Any]) -> None:
        self._take = take
        self._parts: list[pa.Array] = []

    def add(self, messages: Sequence[Message]) -> int:
        """Take it out of each message; how many bytes that is."""
        part = pa.array(list(map(self._take, messages)), pa.binary())
        self._parts.append(part)
        return int(part.nbytes)

    def array(self) -> pa.Array:
        """All of it."""
        return pa.concat_arrays(self._parts or [pa.array([], pa.binary())])
