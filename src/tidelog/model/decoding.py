"""Decodes and encodes our types. Each decoder is created once and by one thread at a time.

msgspec analyzes a type on first use, and other threads see it half done: a thread that decodes the
same type at that moment crashes the process. So everything decodes through this module, under a
lock that forks respect too. Stored types derive from :class:`Persisted`.

**What is stored can be read.** msgspec does not compare a value with its field's type when it
encodes, only when it decodes. A caller's ``1.0`` or ``True`` in place of a whole number would be
stored, and from then on each reader would report damage. So :func:`pack_stored` and
:func:`pack_json` decode what they have encoded, and refuse a value before it is written.

:func:`seal_json` stores a JSON object with a checksum, so that damage is an error. The first line
is the value as JSON. The second one, ``{"crc32c":"0123abcd"}``, is the crc32c of the first. Tools
that read a sequence of JSON values can read both.

**Depth.** The depth of a value from outside has one limit on every interpreter. Parsers in C
recurse. How deep they get depends on the interpreter's version, its recursion limit and how much of
the stack is in use. So text and bytes from outside are measured before they are parsed. Most
contain fewer brackets than the limit, which one ``bytes.count`` shows; only the others are scanned,
piece by piece: one call about megabytes would keep every other thread from running.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import NESTING_MAX

__all__ = [
    "Persisted",
    "check_json_depth",
    "check_msgpack_depth",
    "decode_json",
    "decode_msgpack",
    "is_deep_json",
    "json_items",
    "open_json",
    "pack_json",
    "pack_stored",
    "remedy",
    "seal_json",
    "too_deep",
]

T = TypeVar("T")
D = TypeVar("D")

_making = threading.Lock()
_of_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_of_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release
)


class Persisted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A type that is stored in rows or objects.

    A field that this version does not know is an error: dropping it on the next write would destroy
    what another version needs. ``layout.FORMAT`` changes with the fields of any of these types.
    """


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """Returns a value of a type. Raises ``msgspec.MsgspecError`` for invalid data."""
    found: T = _decoder(_of_json, msgspec.json.Decoder, kind).decode(data)
    return found


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """Returns a value of a type. Raises ``msgspec.MsgspecError`` for invalid data."""
    found: T = _decoder(_of_msgpack, msgspec.msgpack.Decoder, kind).decode(data)
    return found


def remedy(error: msgspec.MsgspecError, otherwise: str) -> str:
    """Returns what to do about stored data that does not decode.

    A field that this version does not know is not damage: a newer version wrote it, and restoring a
    copy over it would lose what that version has committed.
    """
    if "unknown field" in str(error):
        return "a newer version of tidelog wrote it: update tidelog"
    return otherwise


def _decoder(made: dict[Any, D], make: Callable[[Any], D], kind: Any) -> D:
    decoder = made.get(kind)
    if decoder is None:
        with _making:
            decoder = made.setdefault(kind, make(kind))
    return decoder


S = TypeVar("S", bound=Persisted)


def pack_stored(value: Persisted) -> bytes:
    """Returns a value as MessagePack. Raises ``InvalidError`` if a field has another type."""
    return _pack(value, msgspec.msgpack.encode, decode_msgpack)


def pack_json(value: Persisted) -> bytes:
    """Returns a value as JSON. Raises ``InvalidError`` if a field has another type."""
    return _pack(value, msgspec.json.encode, decode_json)


def _pack(
    value: Persisted, encode: Callable[[Any], bytes], decode: Callable[[bytes, type[Any]], Any]
) -> bytes:
    try:
        data = encode(value)
        decode(data, type(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as exc:
        raise InvalidError(
            f"{type(value).__name__}: cannot be stored: {exc}: give a value of that type"
        ) from exc
    return data


def seal_json(value: Persisted) -> bytes:
    """Returns the bytes to store. Raises ``InvalidError`` if a field has another type."""
    text = pack_json(value)
    return text + _seal(text)


def open_json(data: bytes, kind: type[S], what: str) -> S:
    """Returns the value of stored bytes. Raises ``CorruptError`` for a wrong checksum or field."""
    text, _, rest = data.partition(b"\n")
    if b"\n" + rest != _seal(text):
        raise CorruptError(
            f"{what}: its checksum does not match: keep it, and restore it from a copy"
        )
    try:
        return decode_json(text, kind)
    except msgspec.MsgspecError as exc:
        advice = remedy(exc, "keep it, and restore it from a copy")
        raise CorruptError(f"{what}: {exc}: {advice}") from exc


def _seal(text: bytes) -> bytes:
    return b'\n{"crc32c":"%08x"}\n' % crc32c.crc32c(text)


_PIECE = 65_536  # bytes of JSON that one call scans
_ESCAPES = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{},"')
_COMMA = ord(",")
_STEPS = np.zeros(256, np.int8)  # into brackets, and out of them
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_MAPS_AND_ARRAYS = frozenset((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
_NO_CONTAINERS = bytes(byte for byte in range(256) if byte not in _MAPS_AND_ARRAYS)


def check_json_depth(data: bytes | str, what: str = "") -> None:
    """Raises ``InvalidError`` for JSON that nests deeper than ``NESTING_MAX``.

    Invalid JSON passes unless it opens more brackets than that: its parser reports it.
    """
    if is_deep_json(data):
        raise too_deep(what)


def is_deep_json(data: bytes | str) -> bool:
    """Returns whether JSON nests deeper than ``NESTING_MAX``."""
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if text.count(b"[") + text.count(b"{") <= NESTING_MAX:
        return False
    return any(depths.max(initial=0) > NESTING_MAX for _, depths in _structure(text))


def json_items(text: bytes) -> int:
    """Returns how many items the outermost array or object of a JSON text has, or 1 if none.

    Takes little memory and never long in one call, unlike a parser. Other texts have any number.
    """
    commas = 0
    for marks, depths in _structure(text):
        commas += int(np.count_nonzero((marks == _COMMA) & (depths == 1)))
    return commas + 1


def _structure(text: bytes) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Yields brackets and commas outside of strings, with the depth after each, piece by piece."""
    at, depth, is_inside = 0, 0, False  # a string
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # half of an escape
            piece = text[at : at + _PIECE + 1]
        at += len(piece)
        plain = _ESCAPES.sub(b"", piece) if b"\\" in piece else piece
        parts = plain.translate(None, _NO_MARKS).split(b'"')
        marks = np.frombuffer(b"".join(parts[is_inside::2]), np.uint8)
        is_inside ^= len(parts) % 2 == 0
        depths = depth + np.cumsum(_STEPS[marks], dtype=np.int64)
        depth = int(depths[-1]) if len(depths) else depth
        yield marks, depths


def check_msgpack_depth(data: bytes, what: str = "") -> None:
    """Raises ``InvalidError`` for MessagePack that nests deeper than ``NESTING_MAX``.

    Invalid MessagePack passes unless it opens more levels than that.
    """
    if len(data.translate(None, _NO_CONTAINERS)) > NESTING_MAX and _msgpack_depth(data):
        raise too_deep(what)


def too_deep(what: str) -> InvalidError:
    """Returns the error for a value that nests too deeply."""
    start = f"{what}: " if what else ""
    return InvalidError(f"{start}is nested too deeply: the limit is {NESTING_MAX} levels")


# Bytes and text: size of the length.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENDED = {0xC7: 1, 0xC8: 2, 0xC9: 4}  # the same, and a type byte
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # length's size, each


def _msgpack_depth(data: bytes) -> bool:
    """Returns whether a value nests too deeply; walks it without recursion."""
    left = [1]  # values still to come, by level
    place, end = 0, len(data)
    while left and place < end:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        kind = data[place]
        place += 1
        inner = 0
        if 0x80 <= kind <= 0x8F:
            inner = 2 * (kind & 0x0F)
        elif 0x90 <= kind <= 0x9F:
            inner = kind & 0x0F
        elif 0xA0 <= kind <= 0xBF:
            place += kind & 0x1F
        elif kind in _CONTAINERS:
            size, each = _CONTAINERS[kind]
            inner = each * int.from_bytes(data[place : place + size])
            place += size
        elif kind in _FIXED:
            place += _FIXED[kind]
        elif kind in _SIZED or kind in _EXTENDED:
            size = _SIZED.get(kind) or _EXTENDED[kind]
            place += size + int.from_bytes(data[place : place + size]) + (kind in _EXTENDED)
        if inner:
            left.append(inner)
            if len(left) - 1 > NESTING_MAX:
                return True
    return False
