"""Preserves Kafka's header names and times exactly.

**Reading.** The Python client returns header names as C strings: it raises for a name that is not
UTF-8, and truncates one at a NUL, so two names can become one. This module reads records through
librdkafka's C interface, with the library that the Python client brings. That takes three times as
long, so a range is read this way only from its first record with headers. librdkafka's public
functions return where a name begins but not its length, which is in memory just before it. The
first use tests that; if it does not hold, names with a NUL are refused.

**Header names.** Kafka stores any bytes; an event has text. A name that is not UTF-8, or begins
with ``tidelog.name:``, becomes ``tidelog.name:`` and its bytes, percent-encoded. So two names never
become one, and every text can be turned back. Kafka's clients write names as C strings, so neither
a NUL nor bytes that are not text. A record with such a name keeps the names of the event, with a
NUL as ``tidelog.text:`` and percent-encoding, and ends with the header ``tidelog-names``.

**Times.** Kafka stores any 64-bit number, -1 for none; events have times from 1970 to 9999. Any
other time becomes 0, and the header ``tidelog-kafka-time`` keeps it. Written back to Kafka, the
record has that time and no such header. Kafka's clients write the current time for 0. So 0 is
written as none, with the header, and is read as 0 without it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

import confluent_kafka.cimpl
from confluent_kafka import KafkaError, KafkaException

from tidelog.connectors.kafka.client import ClientWatch
from tidelog.connectors.source import SourcePartition
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model import limits

__all__ = [
    "NO_TIME",
    "Record",
    "RecordConsumer",
    "headers_with_time",
    "is_event_time",
    "kafka_headers",
    "raw_header_name",
    "text_header_name",
    "text_headers",
    "time_to_kafka",
]

_CONSUMER = 1  # of rd_kafka_type_t
_TEXT_BYTES = 512  # size of an error text
_AT_ONCE = 500
_MESSAGE = struct.Struct("@iPiPNPNqP")  # rd_kafka_message_t, which is public
_SIZES = struct.Struct("@NP")  # length of a name, and where its value is; just before it
_OUTDATED = -1  # the time of a record without one

_pointer, _text, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_Stats = ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _pointer, _size, _pointer)
_Error = ctypes.CFUNCTYPE(None, _pointer, ctypes.c_int, _text, _pointer)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rd_kafka_assign": (ctypes.c_int, [_pointer, _pointer]),
    "rd_kafka_conf_destroy": (None, [_pointer]),
    "rd_kafka_conf_new": (_pointer, []),
    "rd_kafka_conf_set": (ctypes.c_int, [_pointer, _text, _text, _pointer, _size]),
    "rd_kafka_conf_set_error_cb": (None, [_pointer, _Error]),
    "rd_kafka_conf_set_stats_cb": (None, [_pointer, _Stats]),
    "rd_kafka_consume_batch_queue": (ctypes.c_ssize_t, [_pointer, ctypes.c_int, _pointer, _size]),
    "rd_kafka_consumer_close": (ctypes.c_int, [_pointer]),
    "rd_kafka_destroy": (None, [_pointer]),
    "rd_kafka_header_add": (
        ctypes.c_int,
        [_pointer, _text, ctypes.c_ssize_t, _text, ctypes.c_ssize_t],
    ),
    "rd_kafka_header_get_all": (ctypes.c_int, [_pointer, _size, _pointer, _pointer, _pointer]),
    "rd_kafka_header_get_last": (ctypes.c_int, [_pointer, _pointer, _pointer, _pointer]),
    "rd_kafka_headers_destroy": (None, [_pointer]),
    "rd_kafka_headers_new": (_pointer, [_size]),
    "rd_kafka_message_destroy": (None, [_pointer]),
    "rd_kafka_message_headers": (ctypes.c_int, [_pointer, _pointer]),
    "rd_kafka_message_timestamp": (ctypes.c_int64, [_pointer, _pointer]),
    "rd_kafka_new": (_pointer, [ctypes.c_int, _pointer, _pointer, _size]),
    "rd_kafka_poll_set_consumer": (ctypes.c_int, [_pointer]),
    "rd_kafka_queue_destroy": (None, [_pointer]),
    "rd_kafka_queue_get_consumer": (_pointer, [_pointer]),
    "rd_kafka_topic_partition_list_add": (_pointer, [_pointer, _text, ctypes.c_int32]),
    "rd_kafka_topic_partition_list_destroy": (None, [_pointer]),
    "rd_kafka_topic_partition_list_new": (_pointer, [ctypes.c_int]),
    "rd_kafka_topic_partition_list_set_offset": (
        ctypes.c_int,
        [_pointer, _text, ctypes.c_int32, ctypes.c_int64],
    ),
}

Headers = list[tuple[str, bytes | None]]


class Record:
    """A record, or an error of its partition, with the methods of the Python client's messages."""

    __slots__ = ("_error", "_headers", "_key", "_offset", "_time_ms", "_value")

    def __init__(
        self,
        offset: int,
        time_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None,
        error: KafkaError | None = None,
    ) -> None:
        self._offset = offset
        self._time_ms = time_ms
        self._key = key
        self._value = value
        self._headers = headers
        self._error = error

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return (0, self._time_ms)

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> Headers | None:
        return self._headers

    def error(self) -> KafkaError | None:
        return self._error


class RecordConsumer:
    """Reads one partition from an offset. Close it after use."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        partition: SourcePartition,
        offset: int,
        watch: ClientWatch,
    ) -> None:
        self._library = _library()
        self._what = f"kafka partition `{partition.text}`"
        # The callbacks must outlive the client.
        self._on_error = _Error(lambda _, code, reason, __: watch.note(_error(code, reason)))
        self._on_stats = _Stats(partial(_take_statistics, watch))
        self._client = self._open_client(properties)
        self._library.rd_kafka_poll_set_consumer(self._client)
        self._queue = self._library.rd_kafka_queue_get_consumer(self._client)
        self._taken = (ctypes.c_void_p * _AT_ONCE)()
        self._headers, self._name = ctypes.c_void_p(), ctypes.c_void_p()
        self._bytes, self._length = ctypes.c_void_p(), ctypes.c_size_t()
        self._assign(partition.topic.encode(), int(partition.name), offset)

    def consume(self, count: int, timeout_s: float) -> list[Record]:
        """Returns up to ``count`` records. Waits at most ``timeout_s`` for all of them."""
        library, taken = self._library, self._taken
        got = library.rd_kafka_consume_batch_queue(
            self._queue, int(timeout_s * 1000), taken, min(count, _AT_ONCE)
        )
        try:
            return [self._record(taken[number] or 0) for number in range(got)]
        finally:
            for number in range(got):
                library.rd_kafka_message_destroy(taken[number])

    def close(self) -> None:
        self._library.rd_kafka_queue_destroy(self._queue)
        self._library.rd_kafka_consumer_close(self._client)
        self._library.rd_kafka_destroy(self._client)

    def _open_client(self, properties: Mapping[str, Any]) -> int:
        library, text = self._library, ctypes.create_string_buffer(_TEXT_BYTES)
        conf = library.rd_kafka_conf_new()
        for name, value in properties.items():
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if library.rd_kafka_conf_set(conf, name.encode(), shown.encode(), text, _TEXT_BYTES):
                library.rd_kafka_conf_destroy(conf)
                reason = text.value.decode(errors="replace")
                raise InvalidError(f"{self._what}: {reason}: fix the address")
        library.rd_kafka_conf_set_error_cb(conf, self._on_error)
        library.rd_kafka_conf_set_stats_cb(conf, self._on_stats)
        client = library.rd_kafka_new(_CONSUMER, conf, text, _TEXT_BYTES)
        if not client:
            reason = text.value.decode(errors="replace")
            raise UnavailableError(f"{self._what}: {reason}: try again")
        return int(client)

    def _assign(self, topic: bytes, partition: int, offset: int) -> None:
        library = self._library
        wanted = library.rd_kafka_topic_partition_list_new(1)
        try:
            library.rd_kafka_topic_partition_list_add(wanted, topic, partition)
            library.rd_kafka_topic_partition_list_set_offset(wanted, topic, partition, offset)
            code = library.rd_kafka_assign(self._client, wanted)
        finally:
            library.rd_kafka_topic_partition_list_destroy(wanted)
        if code:
            raise KafkaException(KafkaError(code))

    def _record(self, message: int) -> Record:
        fields = _MESSAGE.unpack(ctypes.string_at(message, _MESSAGE.size))
        code, _, _, value, value_size, key, key_size, offset, _ = fields
        if code:
            return Record(offset, _OUTDATED, None, None, None, KafkaError(code))
        return Record(
            offset,
            self._library.rd_kafka_message_timestamp(message, None),
            ctypes.string_at(key, key_size) if key else None,
            ctypes.string_at(value, value_size) if value else None,
            self._headers_of(message, offset),
        )

    def _headers_of(self, message: int, offset: int) -> Headers | None:
        library, name, data, size = self._library, self._name, self._bytes, self._length
        if library.rd_kafka_message_headers(message, ctypes.byref(self._headers)):
            return None
        places = (ctypes.byref(name), ctypes.byref(data), ctypes.byref(size))
        found: list[tuple[bytes, bytes | None]] = []
        while not library.rd_kafka_header_get_all(self._headers, len(found), *places):
            raw = self._name_at(name.value or 0, offset)
            found.append((raw, ctypes.string_at(data, size.value) if data.value else None))
        return text_headers(found)

    def _name_at(self, name: int, offset: int) -> bytes:
        if _has_sizes(self._library):
            return ctypes.string_at(name, _name_size(name))
        # A lookup by C string is only valid if that is the whole name.
        if self._library.rd_kafka_header_get_last(
            self._headers, name, ctypes.byref(self._bytes), ctypes.byref(self._length)
        ):
            raise InvalidError(
                f"{self._what}: offset {offset}: a header's name has a NUL, which this build of "
                "librdkafka does not return: install confluent-kafka from its own wheel"
            )
        return ctypes.string_at(name)


@cache
def _library() -> Any:
    """Returns the library that the Python client is linked to."""
    library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _has_sizes(library: Any) -> bool:
    """Returns whether the length of a header name is before it, as in all librdkafka versions."""
    headers = library.rd_kafka_headers_new(2)
    try:
        name, data, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        for number, (wanted, value) in enumerate(((b"a\0bc", b"xyz"), (b"\0", None))):
            if library.rd_kafka_header_add(headers, wanted, len(wanted), value, len(value or b"")):
                return False
            places = (ctypes.byref(name), ctypes.byref(data), ctypes.byref(size))
            if library.rd_kafka_header_get_all(headers, number, *places) or not name.value:
                return False
            found = _name_size(name.value)
            if found != len(wanted) or ctypes.string_at(name.value, found) != wanted:
                return False
        return True
    finally:
        library.rd_kafka_headers_destroy(headers)


def _name_size(name: int) -> int:
    size, _ = _SIZES.unpack(ctypes.string_at(name - _SIZES.size, _SIZES.size))
    return int(size)


def _take_statistics(watch: ClientWatch, _: int, text: int, size: int, __: int) -> int:
    watch.take_statistics(ctypes.string_at(text, size).decode())
    return 0  # the library frees the text


def _error(code: int, reason: bytes | None) -> KafkaError:
    return KafkaError(code, (reason or b"").decode(errors="replace") or None)


_RAW = "tidelog.name:"
_TEXT = "tidelog.text:"
_MARK = "tidelog-names"
_MARK_HEADER = (_MARK, b"encoded")
_RAW_MARK_HEADER = (_MARK.encode(), b"encoded")
_SAFE = " !#$&'()*+,/:;=?@[]"


def text_header_name(raw: bytes) -> str:
    """Returns the header name of an event for the bytes in Kafka."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _escaped(_RAW, raw)
    return _escaped(_RAW, raw) if text.startswith(_RAW) else text


def raw_header_name(text: str) -> bytes | None:
    """Returns the bytes in Kafka for the header name of an event; None if there are none."""
    if not text.startswith(_RAW):
        return text.encode()
    raw = unquote_to_bytes(text.removeprefix(_RAW))
    return raw if text_header_name(raw) == text else None


def text_headers(raw: Sequence[tuple[bytes, bytes | None]]) -> Headers:
    """Returns the headers of an event for those of a Kafka record."""
    if raw and raw[-1] == _RAW_MARK_HEADER:
        found = _headers_of_marked(raw[:-1])
        if found is not None:
            return found
    return [(text_header_name(name), value) for name, value in raw]


def kafka_headers(headers: Sequence[tuple[str, bytes | None]]) -> Headers:
    """Returns the headers to write to Kafka for those of an event."""
    names = [_exact(name) for name, _ in headers]
    if None not in names:
        return [(name or "", value) for name, (_, value) in zip(names, headers, strict=True)]
    return [*((_marked_name(name), value) for name, value in headers), _MARK_HEADER]


@lru_cache(10_000)
def _exact(text: str) -> str | None:
    """Returns the name in Kafka that is read as this text; None if clients cannot write it."""
    raw = raw_header_name(text)
    if raw is None or b"\0" in raw or text == _MARK:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _marked_name(text: str) -> str:
    """Returns a name as written in a marked record."""
    is_plain = "\0" not in text and text != _MARK and not text.startswith(_TEXT)
    return text if is_plain else _escaped(_TEXT, text.encode())


def _headers_of_marked(raw: Sequence[tuple[bytes, bytes | None]]) -> Headers | None:
    """Returns the headers of a marked record; None if the mark is not Tidelog's."""
    found: Headers = []
    try:
        for name, value in raw:
            text = written = name.decode()
            if written.startswith(_TEXT):
                text = unquote_to_bytes(written.removeprefix(_TEXT)).decode()
            if _marked_name(text) != written:
                return None
            found.append((text, value))
    except UnicodeDecodeError:
        return None
    return found


def _escaped(prefix: str, raw: bytes) -> str:
    return prefix + quote_from_bytes(raw, safe=_SAFE)


NO_TIME = -1  # Kafka's own value
_HEADER = "tidelog-kafka-time"
_ZERO = (_HEADER, b"0")
_TIMES = range(-(1 << 63), 1 << 63)


def is_event_time(time_ms: int) -> bool:
    """Returns whether an event can have this time."""
    return 0 <= time_ms < limits.TIMESTAMP_MS_END


def headers_with_time(time_ms: int, headers: Headers) -> Headers:
    """Returns the headers of an event whose time becomes 0 because it is not a valid one."""
    if time_ms == NO_TIME and headers and headers[-1] == _ZERO:
        return headers[:-1]
    return [*headers, (_HEADER, b"%d" % time_ms)]


def time_to_kafka(headers: Headers) -> tuple[int, Headers]:
    """Returns the time and headers to write to Kafka for an event with time 0."""
    for at in range(len(headers) - 1, -1, -1):
        name, value = headers[at]
        kept = _time(value) if name == _HEADER else None
        if kept is not None:
            return kept, [*headers[:at], *headers[at + 1 :]]
    return NO_TIME, [*headers, _ZERO]


def _time(text: bytes | None) -> int | None:
    """Parses the time in a header; None if this module did not write it."""
    digits = (text or b"").removeprefix(b"-")
    if text is None or not digits.isdigit() or len(digits) > 19:
        return None
    time_ms = int(text)
    is_ours = b"%d" % time_ms == text and time_ms in _TIMES and not is_event_time(time_ms)
    return time_ms if is_ours else None
