"""Times in values that must be decoded one by one: the loop, and what the decoders share.

A decoder takes a value's bytes and gives the field as text, which is an epoch where it is a number,
else ISO 8601. For a bad value it raises ``InvalidError``, whose message is the row's error text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from tidelog.codec.parsers.base import FieldTimes, Found, TimeParser, shown
from tidelog.codec.parsers.engine import Engine
from tidelog.codec.parsers.texts import NULL_VALUE
from tidelog.codec.parsers.times import moment_reader
from tidelog.errors import InvalidError

__all__ = ["Decode", "decoded_times", "field_text", "time_text"]

Decode = Callable[[bytes], str]


def decoded_times(decode: Decode, what: str) -> TimeParser:
    """A time parser that decodes each value."""
    return FieldTimes(_Picker(decode).pick, moment_reader(what, Engine()))


@dataclass(frozen=True, slots=True)
class _Picker:
    decode: Decode

    def pick(self, batch: pa.RecordBatch) -> Found:
        decode = self.decode
        texts: list[str | None] = []
        errors: list[str | None] = []
        for value in batch.column("value").to_pylist():
            text = error = None
            if value is None:
                error = NULL_VALUE
            else:
                try:
                    text = decode(value)
                except InvalidError as exc:
                    error = exc.message
            texts.append(text)
            errors.append(error)
        return Found(pa.array(texts, pa.string()), pa.array(errors, pa.string()))


def field_text(record: Any, path: tuple[str, ...], what: str) -> str:
    """The text of a field inside maps inside a map."""
    for name in path:
        if not isinstance(record, dict) or name not in record:
            raise InvalidError(f"{what} is missing or null")
        record = record[name]
    return time_text(record, what)


def time_text(value: Any, what: str) -> str:
    """A decoded value as the text of a time; ``InvalidError`` where it cannot be one."""
    kind = type(value)
    if kind is int:
        if -(10**30) < value < 10**30:  # Python itself refuses to print very long ones
            return str(value)
        raise InvalidError(f"time is outside of the years 1970 to 9999: {what}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise InvalidError(f"{what} is not valid Unicode") from exc
        return str(value)
    if kind is float:
        return repr(value)
    if isinstance(value, date | datetime):
        return value.isoformat()
    if value is None:
        raise InvalidError(f"{what} is missing or null")
    raise InvalidError(f"{what} is {shown(kind.__name__)}, not a time")
