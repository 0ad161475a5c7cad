"""Events and their positions, and the checks before anything is written.

:class:`Positions` has those of an append's events, without one object per position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from numbers import Integral
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

from tidelog.errors import InvalidError
from tidelog.model import limits

__all__ = [
    "Event",
    "Headers",
    "Position",
    "Positions",
    "check_event",
    "check_event_bytes",
    "check_header_count",
    "check_headers",
    "check_id_bytes",
    "check_timestamp",
    "check_utf8",
    "from_iso",
    "headers_of",
    "id_list",
    "parse_timestamp",
    "to_iso",
    "wrong_type",
]

Headers = tuple[tuple[str, bytes | None], ...]  # a null value is not an empty one

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_parse_json = msgspec.json.Decoder().decode


class Event(msgspec.Struct, frozen=True, gc=False):
    """What is appended and read. When read, it also has topic, partition and offset."""

    value: bytes | None  # None is a tombstone, and is stored
    key: bytes | None = None
    id: str | None = None
    timestamp: int | datetime | str | None = None  # ms UTC, or ISO 8601; None: when it is sent
    type: str | None = None
    headers: Headers = ()
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None

    @property
    def position(self) -> Position:
        """Returns the position of an event that was read.

        >>> str(next(home.read("orders")).position)
        'orders/0/0'
        """
        if self.topic is None or self.partition is None or self.offset is None:
            raise InvalidError(
                "event: has no position before it is appended: use what append returns"
            )
        return Position(self.topic, self.partition, self.offset)

    @property
    def time(self) -> datetime:
        """Returns the event's time in UTC.

        >>> next(home.read("orders")).time.isoformat()
        '2026-11-14T...+00:00'
        """
        if self.timestamp is None:
            raise InvalidError("event: has no time before it is appended: give it a timestamp")
        return _EPOCH + check_timestamp(self.timestamp) * _MILLISECOND

    def json(self) -> Any:
        """Returns the value, decoded from JSON; raises ``InvalidError`` if it is not valid.

        >>> next(home.read("orders")).json()["total"]
        10
        """
        try:
            return _parse_json(self.value or b"null")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            where = "event" if self.offset is None else f"event `{self.position}`"
            raise InvalidError(
                f"{where}: its value is not valid JSON: {exc}: read `event.value`, which is bytes"
            ) from exc


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """The position of an event. It exists only for durable events."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


def check_event(event: Event, bytes_max: int = limits.EVENT_BYTES_MAX) -> int:
    """Raises ``InvalidError`` for an event that cannot be stored as it is; returns its size.

    ``codec.event_batch.check_events`` applies the same rules to tables. Every way into a topic uses
    one of the two. The event's headers must be a tuple, see :func:`headers_of`.
    """
    size = _size("value", event.value, bytes) + _size("key", event.key, bytes)
    id_size = _size("id", event.id, str)
    if event.id is not None:
        check_id_bytes(id_size)
    size += id_size + _size("type", event.type, str)
    size += check_headers(event.headers)
    check_header_count(len(event.headers))
    check_event_bytes(size, bytes_max)
    if event.timestamp is not None:
        check_timestamp(event.timestamp)
    return size


def check_timestamp(timestamp: int | datetime | str) -> int:
    """Returns a time in milliseconds, from an integer, an aware datetime or ISO 8601."""
    if isinstance(timestamp, str):
        return from_iso(timestamp)
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidError(f"timestamp {timestamp}: has no time zone: give an aware datetime")
        timestamp = (timestamp - _EPOCH) // _MILLISECOND  # exact, unlike seconds in a float
    if type(timestamp) is not int:
        raise InvalidError(
            f"timestamp {timestamp!r}: give whole milliseconds, ISO 8601 or an aware datetime"
        )
    if not 0 <= timestamp < limits.TIMESTAMP_MS_END:
        raise InvalidError(
            f"timestamp {timestamp}: is outside of the years 1970 to 9999: give milliseconds UTC"
        )
    return timestamp


def parse_timestamp(text: str) -> int:
    """Returns the ms of a time in text: whole milliseconds, or ISO 8601."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return check_timestamp(int(text))
    return from_iso(text)


def to_iso(timestamp_ms: int) -> str:
    """Returns ISO 8601 with milliseconds and ``Z``; the end of all times is in the year 10000."""
    if timestamp_ms == limits.TIMESTAMP_MS_END:
        return "10000-01-01T00:00:00.000Z"  # not a valid datetime
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03}Z"


def from_iso(text: str) -> int:
    """Returns milliseconds from ISO 8601; a time without a zone is UTC."""
    try:
        if "\0" in text:  # Python would stop reading there
            raise ValueError
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidError(f"time `{text}`: is not ISO 8601: give 2026-11-15T10:00:00Z") from exc
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return check_timestamp(moment)


def wrong_type(name: str, given: type, wanted: type) -> InvalidError:
    """Returns the error for a field of an event that has another type than text or bytes."""
    give = "text" if wanted is str else "bytes"
    if wanted is bytes and issubclass(given, str):
        give = "bytes, such as text.encode(),"
    elif name == "value":
        give = "bytes (`send_json` encodes other values)"
    return InvalidError(f"event: {name} is {given.__name__}: give {give} or None")


def _size(name: str, value: Any, kind: type) -> int:
    if value is None:
        return 0
    if not isinstance(value, str | bytes) or not isinstance(value, kind):
        raise wrong_type(name, type(value), kind)
    return len(value) if isinstance(value, bytes) else _text_size(name, value)


def _text_size(name: str, text: str) -> int:
    """Returns the size as UTF-8. Raises ``InvalidError`` for a lone surrogate."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidError(f"event: its {name} {text!r} is not valid Unicode: give text") from exc


def headers_of(headers: Any) -> Headers:
    """Returns headers as a tuple, from any iterable, which may be used up by this; empty for None.

    Raises ``InvalidError`` for an object that is not iterable.
    """
    if headers.__class__ is tuple:
        return headers
    if headers is None:
        return ()
    if not isinstance(headers, Iterable):
        kind = type(headers).__name__
        raise InvalidError(f"event: its headers are {kind}: give pairs of a name and bytes")
    return tuple(headers)


def check_headers(headers: Headers) -> int:
    """Returns the size of headers. Raises ``InvalidError`` unless they are pairs of a name and
    bytes.

    Does not check their count: see :func:`check_header_count`.
    """
    size = 0
    for header in headers:
        if not isinstance(header, tuple | list) or len(header) != 2:
            raise InvalidError(f"event: header {header!r}: give pairs of a name and bytes")
        name, value = header
        if not isinstance(name, str) or not (value is None or isinstance(value, bytes)):
            raise InvalidError(
                f"event: header {header!r}: give pairs of a name and bytes, or None as the value"
            )
        size += _text_size("header's name", name) + len(value or b"")
    return size + len(headers) * limits.HEADER_OVERHEAD_BYTES


def check_header_count(count: int, most: int = limits.HEADERS_MAX) -> None:
    """Raises ``InvalidError`` for more headers than an event may have."""
    if count > most:
        raise InvalidError(
            f"event: has {count} headers, at most {most} are allowed: put them into its value"
        )


def check_whole(what: str, value: int) -> int:
    """Returns a whole number as an ``int``, also one of numpy's.

    Raises ``InvalidError`` for anything else. A ``1.0`` or ``True`` passes for a number until it is
    stored.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidError(f"{what}: is {value!r}: give a whole number")
    return int(value)


def id_list(ids: str | Iterable[str]) -> list[str]:
    """Returns the ids that a call got as one or as several. Raises ``InvalidError`` for others."""
    listed = [ids] if isinstance(ids, str) else list(ids)
    for each in listed:
        if not isinstance(each, str):
            raise InvalidError(f"id: is {type(each).__name__}: give text")
    return listed


def check_utf8(what: str, text: str) -> None:
    """Raises ``InvalidError`` for text with a lone surrogate, which UTF-8 cannot store."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidError(f"{what} {text[:80]!r}: is not valid Unicode: give text") from exc


def check_event_bytes(size: int, bytes_max: int, room: int = 0) -> None:
    """Raises ``InvalidError`` for an event that is too large: value, key, id, type and headers
    together.

    ``room`` is what Tidelog itself may have added to it.
    """
    if size > bytes_max + room:
        raise InvalidError(
            f"event: has {size} bytes, at most {bytes_max} are allowed: "
            "split it, or raise event_bytes_max",
            bytes=size,
            bytes_max=bytes_max,
        )


def check_id_bytes(size: int) -> None:
    """Raises ``InvalidError`` for an id that is too long to be found or deleted."""
    if size == 0:
        raise InvalidError("event: its id is empty: give text, or no id")
    if size > limits.ID_BYTES_MAX:
        raise InvalidError(
            f"event: its id has {size} bytes, at most {limits.ID_BYTES_MAX} are allowed: shorten it"
        )


class Positions(Sequence[Position]):
    """One position for each event given, in the same order."""

    def __init__(
        self,
        topic: str,
        partitions: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        self.topic = topic
        self.partitions = partitions
        self.offsets = offsets

    @classmethod
    def joined(cls, topic: str, parts: Sequence[Positions]) -> Positions:
        """Returns several as one."""
        return cls(
            topic,
            np.concatenate([part.partitions for part in parts] or [np.empty(0, np.int32)]),
            np.concatenate([part.offsets for part in parts] or [np.empty(0, np.int64)]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> Positions: ...
    def __getitem__(self, index: int | slice) -> Position | Positions:
        if isinstance(index, slice):
            return Positions(self.topic, self.partitions[index], self.offsets[index])
        return Position(self.topic, int(self.partitions[index]), int(self.offsets[index]))

    def __iter__(self) -> Iterator[Position]:
        for partition, offset in zip(self.partitions.tolist(), self.offsets.tolist(), strict=True):
            yield Position(self.topic, partition, offset)

    def __repr__(self) -> str:
        return f"Positions({len(self)} events of {self.topic})"
