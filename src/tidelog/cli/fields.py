"""Key, id and time of an event from the fields of its own JSON.

A field is a name, or a path of names with dots between them (``user.id``). A time is ISO 8601
text, or a number since 1970 whose size tells its unit, as in Secor: seconds, or from 10^12 on
milliseconds, from 10^15 on microseconds, from 10^18 on nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tidelog.errors import InvalidError
from tidelog.model.depth import check_json_depth
from tidelog.model.event import Event, check_timestamp, from_iso

__all__ = ["Fields", "event_of_json"]

_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields to take; None for what an event shall not have."""

    key: str | None = None
    id: str | None = None
    time: str | None = None

    def given(self) -> bool:
        """Whether any is."""
        return any((self.key, self.id, self.time))


def event_of_json(line: bytes, fields: Fields) -> Event:
    """The event whose value is this line, which must be a JSON object. ``InvalidError``."""
    check_json_depth(line)
    try:
        values = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidError(f"is no JSON object: {exc}") from exc
    key = None if fields.key is None else _text(values, fields.key).encode()
    event_id = None if fields.id is None else _text(values, fields.id)
    time = None if fields.time is None else _time(values, fields.time)
    return Event(line, key, event_id, time)


def _find(values: dict[str, Any], field: str) -> Any:
    """A field that is there; null is as good as missing, since it says nothing."""
    found: Any = values.get(field)
    if found is None:
        found = values
        for name in field.split("."):
            found = found.get(name) if isinstance(found, dict) else None
    if found is None:
        raise InvalidError(f"has no field `{field}`, or null in it")
    return found


def _text(values: dict[str, Any], field: str) -> str:
    found = _find(values, field)
    if isinstance(found, str):
        return found
    if isinstance(found, dict | list):
        raise InvalidError(f"field `{field}` holds no plain value: name one that does")
    return msgspec.json.encode(found).decode()  # a number or a boolean, as JSON writes it


def _time(values: dict[str, Any], field: str) -> int:
    found = _find(values, field)
    if isinstance(found, str):
        return from_iso(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise InvalidError(f"field `{field}` holds no time: name one with ISO 8601 or a number")
    size = abs(found)
    if size >= 10**18:
        return check_timestamp(int(found // 10**6))
    if size >= 10**15:
        return check_timestamp(int(found // 10**3))
    if size >= 10**12:
        return check_timestamp(int(found))
    return check_timestamp(round(found * 1000))
