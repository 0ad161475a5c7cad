"""Converts CQL values to JSON, directly from their bytes.

The driver's own values are not used: a date after the year 9999 would fail a whole page of them.
Numbers, text, true and false become JSON values. The rest is text like that of CQL's ``SELECT
JSON``: a blob as ``0x…``, times as ISO 8601, a varint and a decimal by their digits, keys of a map
as text. Numbers that JSON lacks are text too: ``"NaN"``, ``"Infinity"``.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import count, repeat
from typing import Any

__all__ = [
    "ToJson",
    "fields_to_json",
    "quoted",
    "second_text",
    "to_json",
    "uuid_text",
    "values_to_json",
]

ToJson = Callable[[bytes], str]  # converts the bytes of a value to JSON text

quoted: Callable[[str], str] = json.encoder.encode_basestring

_DAY_ZERO = 1 << 31  # dates are days, with 1970-01-01 in the middle
_FIRST_DAY = date(1970, 1, 1).toordinal()
_LAST_DAY = date.max.toordinal()
_NS_DAY = 86_400 * 10**9
_DIGITS_BYTES_MAX = 1_700  # Python formats no longer numbers; these stay bytes

_int32 = struct.Struct(">i").unpack
_int64 = struct.Struct(">q").unpack
_uint32 = struct.Struct(">I").unpack
_float = struct.Struct(">f").unpack
_double = struct.Struct(">d").unpack


def to_json(kind: Any) -> ToJson:
    """Returns the function that converts the bytes of a CQL type to JSON."""
    name = kind.typename
    if getattr(kind, "fieldnames", None):  # a user type, whatever its name
        return _fields(kind.fieldnames, [to_json(each) for each in kind.subtypes])
    if name in ("frozen", "reversed"):
        return to_json(kind.subtypes[0])
    if hasattr(kind, "vector_size"):
        return _vector(to_json(kind.subtype), kind.subtype.serial_size(), kind.vector_size)
    if name in ("list", "set", "map", "tuple"):
        return _made_of(name, [to_json(each) for each in kind.subtypes])
    return _SCALARS.get(name, _hex)


def fields_to_json(kind: Any) -> tuple[ToJson, ToJson]:
    """Returns two functions for a user type: of the fields that are set, and of names of fields."""

    def names(data: bytes) -> str:
        numbers = [int.from_bytes(each or b"", "big") for each in _parts(data, 4, repeat(None))]
        known = [kind.fieldnames[number] for number in numbers if number < len(kind.fieldnames)]
        return f"[{','.join(map(quoted, known))}]"

    kinds = [to_json(each) for each in kind.subtypes]
    return _fields(kind.fieldnames, kinds, nulls=False), names


def values_to_json(kind: Any) -> ToJson:
    """Returns a function for the values of a map in key order: a list, as change logs store it."""
    value = to_json(kind.subtypes[1])

    def convert(data: bytes) -> str:
        parts = list(_parts(data, 4, repeat(None))) if data else []
        return f"[{','.join(_or_null(value, each) for each in parts[1::2])}]"

    return convert


def uuid_text(data: bytes) -> str:
    """Formats a uuid."""
    text = data.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def second_text(time_s: int) -> str:
    """Formats a time in whole seconds as ISO 8601."""
    days, rest = divmod(time_s, 86_400)
    return f"{_day(days)}T{_clock(rest)}"


@functools.lru_cache(1_000)
def _day(days: int) -> str:
    return date.fromordinal(_FIRST_DAY + days).isoformat()


def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


# Scalars. CQL allows most of them to be empty, which is not null.


def _whole(data: bytes) -> str:
    return str(int.from_bytes(data, "big", signed=True)) if data else '""'


def _int(data: bytes) -> str:
    return str(_int32(data)[0]) if data else '""'


def _bigint(data: bytes) -> str:
    return str(_int64(data)[0]) if data else '""'


def _digits(data: bytes) -> str:
    if len(data) > _DIGITS_BYTES_MAX:
        return _hex(data)
    return f'"{int.from_bytes(data, "big", signed=True)}"' if data else '""'


def _decimal(data: bytes) -> str:
    """Returns digits and scale as stored; written out they could be gigabytes."""
    if not 5 <= len(data) <= _DIGITS_BYTES_MAX:
        return _hex(data) if data else '""'
    scale, digits = _int32(data[:4])[0], str(int.from_bytes(data[4:], "big", signed=True))
    if scale == 0:
        return f'"{digits}"'
    sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits)
    if 0 < scale <= len(digits) + 6:
        digits = digits.rjust(scale + 1, "0")
        return f'"{sign}{digits[:-scale]}.{digits[-scale:]}"'
    return f'"{sign}{digits}E{-scale:+d}"'


def _text(data: bytes) -> str:
    return quoted(data.decode("utf-8", "replace"))


def _hex(data: bytes) -> str:
    return f'"0x{data.hex()}"'


def _boolean(data: bytes) -> str:
    if not data:
        return '""'
    return "true" if data != b"\0" else "false"


def _real(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _float64(data: bytes) -> str:
    return _real(_double(data)[0]) if data else '""'


def _float32(data: bytes) -> str:
    """Returns the shortest digits that give the same float, not those of a double."""
    if not data:
        return '""'
    value: float = _float(data)[0]
    if math.isfinite(value):
        for digits in range(6, 9):
            short = float(f"{value:.{digits}g}")
            if struct.pack(">f", short) == data:
                return repr(short)
    return _real(value)


def _uuid(data: bytes) -> str:
    return f'"{uuid_text(data)}"'


def _timestamp(data: bytes) -> str:
    """Returns ISO 8601 with milliseconds, or milliseconds if the year has not four digits."""
    if not data:
        return '""'
    ms: int = _int64(data)[0]
    days, rest = divmod(ms, 86_400_000)
    if not 1 <= _FIRST_DAY + days <= _LAST_DAY:
        return str(ms)
    return f'"{_day(days)}T{_clock(rest // 1000)}.{rest % 1000:03}Z"'


def _date(data: bytes) -> str:
    if not data:
        return '""'
    days = _uint32(data)[0] - _DAY_ZERO
    if not 1 <= _FIRST_DAY + days <= _LAST_DAY:
        return str(days)
    return f'"{_day(days)}"'


def _time(data: bytes) -> str:
    if not data:
        return '""'
    ns: int = _int64(data)[0]
    if not 0 <= ns < _NS_DAY:
        return str(ns)
    seconds, rest = divmod(ns, 10**9)
    return f'"{_clock(seconds)}.{rest:09}"'


def _inet(data: bytes) -> str:
    return f'"{ipaddress.ip_address(data)}"' if data else '""'


def _duration(data: bytes) -> str:
    """Returns months, days and nanoseconds, each an integer of variable length."""
    if not data:
        return '""'
    at, parts = 0, []
    for _ in range(3):
        value, at = _vint(data, at)
        parts.append((value >> 1) ^ -(value & 1))
    sign = "-" if min(parts) < 0 else ""
    months, days, ns = map(abs, parts)
    return f'"{sign}{months}mo{days}d{ns}ns"'


_SCALARS: dict[str, ToJson] = {
    "ascii": _text,
    "bigint": _bigint,
    "blob": _hex,
    "boolean": _boolean,
    "counter": _bigint,
    "date": _date,
    "decimal": _decimal,
    "double": _float64,
    "duration": _duration,
    "float": _float32,
    "inet": _inet,
    "int": _int,
    "smallint": _whole,
    "text": _text,
    "time": _time,
    "timestamp": _timestamp,
    "timeuuid": _uuid,
    "tinyint": _whole,
    "uuid": _uuid,
    "varchar": _text,
    "varint": _digits,
}


# Composite values.


def _made_of(name: str, kinds: Sequence[ToJson]) -> ToJson:
    if name == "map":
        return _mapping(*kinds)
    return _tuple(kinds) if name == "tuple" else _items(*kinds)


def _parts(data: bytes, at: int, times: Iterator[Any]) -> Iterator[bytes | None]:
    """Yields the bytes of each length-prefixed value; None for null."""
    for _ in times:
        if at >= len(data):
            return
        size: int = _int32(data[at : at + 4])[0]
        at += 4
        yield None if size < 0 else data[at : at + size]
        at += max(0, size)


def _or_null(kind: ToJson, data: bytes | None) -> str:
    return "null" if data is None else kind(data)


def _items(kind: ToJson) -> ToJson:
    def convert(data: bytes) -> str:
        if not data:
            return "[]"
        parts = _parts(data, 4, repeat(None, _int32(data[:4])[0]))
        return f"[{','.join(_or_null(kind, each) for each in parts)}]"

    return convert


def _mapping(key: ToJson, value: ToJson) -> ToJson:
    def convert(data: bytes) -> str:
        if not data:
            return "{}"
        parts = _parts(data, 4, repeat(None, 2 * _int32(data[:4])[0]))
        pairs = zip(parts, parts, strict=True)
        return f"{{{','.join(f'{_name(key, k)}:{_or_null(value, v)}' for k, v in pairs)}}}"

    return convert


def _name(kind: ToJson, data: bytes | None) -> str:
    """Returns the key of a map: JSON only has text there."""
    text = _or_null(kind, data)
    return text if text.startswith('"') else quoted(text)


def _tuple(kinds: Sequence[ToJson]) -> ToJson:
    def convert(data: bytes) -> str:
        found = zip(kinds, _parts(data, 0, repeat(None)), strict=False)
        values = [_or_null(kind, each) for kind, each in found]
        values += ["null"] * (len(kinds) - len(values))
        return f"[{','.join(values)}]"

    return convert


def _fields(names: Sequence[str], kinds: Sequence[ToJson], nulls: bool = True) -> ToJson:
    """Returns a function for a user type. A value lacks fields that were added after it."""
    labels = [f"{quoted(name)}:" for name in names]

    def convert(data: bytes) -> str:
        found = zip(labels, kinds, _parts(data, 0, repeat(None)), strict=False)
        texts = [
            f"{label}{_or_null(kind, each)}"
            for label, kind, each in found
            if nulls or each is not None
        ]
        return f"{{{','.join(texts)}}}"

    return convert


def _vector(kind: ToJson, size: int | None, length: int) -> ToJson:
    def convert(data: bytes) -> str:
        values = []
        at = 0
        for _ in repeat(None, length):
            width, at = (size, at) if size is not None else _vint(data, at)
            values.append(kind(data[at : at + width]))
            at += width
        return f"[{','.join(values)}]"

    return convert


def _vint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes an unsigned integer of variable length. Returns it and where it ends."""
    extra = next(n for n in count() if n == 8 or not data[at] & (0x80 >> n))
    first = data[at] & (0xFF >> extra) if extra < 8 else 0
    value = int.from_bytes(bytes([first]) + data[at + 1 : at + 1 + extra], "big")
    return value, at + 1 + extra
