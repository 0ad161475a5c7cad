"""Events as JSON, both ways: what ``consume --json`` prints, ``produce --format events`` takes.

One event is one object on one line::

    {"topic": "orders", "partition": 0, "offset": 41, "timestamp": "2026-11-15T10:00:00.000Z",
     "id": null, "key": "customer-7", "value": "...", "type": null, "headers": [["name", "value"]]}

Bytes (key, value, and the values of headers) are text where they are valid UTF-8, and else
``{"base64": "..."}``. A value of null is a tombstone. Read back, only ``value`` must be there;
``timestamp`` may also be whole milliseconds, and the position is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from tidelog.errors import InvalidError
from tidelog.model.event import Event, from_iso, to_iso

__all__ = ["event_lines", "event_of_line"]


class _Base64(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    base64: bytes


_Text = str | _Base64


class _Printed(msgspec.Struct, gc=False):
    topic: str | None
    partition: int | None
    offset: int | None
    timestamp: str
    id: str | None
    key: _Text | None
    value: _Text | None
    type: str | None
    headers: list[tuple[str, _Text]]


class _Given(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    value: _Text | None
    key: _Text | None = None
    id: str | None = None
    timestamp: str | int | None = None
    type: str | None = None
    headers: list[tuple[str, _Text]] | None = None
    topic: Any = None
    partition: Any = None
    offset: Any = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Given)


def event_lines(events: Iterable[Event]) -> bytes:
    """Each event as a JSON object on a line of its own."""
    return _encoder.encode_lines(map(_printed, events))


def event_of_line(line: bytes) -> Event:
    """The event that a line describes, without its position. ``InvalidError``."""
    try:
        given = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidError(f"is no event as JSON: {exc}") from exc
    time = given.timestamp
    return Event(
        value=_bytes_of(given.value),
        key=_bytes_of(given.key),
        id=given.id,
        timestamp=from_iso(time) if isinstance(time, str) else time,
        type=given.type,
        headers=tuple((name, _bytes_of(value) or b"") for name, value in given.headers or ()),
    )


def _printed(event: Event) -> _Printed:
    return _Printed(
        event.topic,
        event.partition,
        event.offset,
        _iso(event.timestamp),
        event.id,
        None if event.key is None else _text_of(event.key),
        None if event.value is None else _text_of(event.value),
        event.type,
        [(name, _text_of(value)) for name, value in event.headers],
    )


def _text_of(value: bytes) -> _Text:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _Base64(value)


def _bytes_of(text: _Text | None) -> bytes | None:
    if isinstance(text, str):
        return text.encode()
    return None if text is None else text.base64


def _iso(time_ms: Any) -> str:
    seconds, rest_ms = divmod(int(time_ms), 1000)
    return f"{_second(seconds)}{rest_ms:03}Z"


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    """The part of a time that many events share."""
    return to_iso(seconds * 1000)[:-4]
