"""Limits how deep a value from outside may nest, with the same limit on every interpreter.

Parsers in C recurse. How deep they get depends on the interpreter's version, its recursion limit
and how much of the stack is in use. So text and bytes from outside are measured before they are
parsed. Most contain fewer brackets than the limit, which one ``bytes.count`` shows; only the others
are scanned.
"""

from __future__ import annotations

import re

import numpy as np

from tidelog.errors import InvalidError
from tidelog.model.limits import NESTING_MAX

__all__ = ["check_json_depth", "check_msgpack_depth", "is_deep_json", "too_deep"]

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_OPENS = np.frombuffer(b"[{", np.uint8)
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
    brackets = _STRINGS.sub(b"", text).translate(None, _NO_BRACKETS)
    if not brackets:
        return False
    opens = np.isin(np.frombuffer(brackets, np.uint8), _OPENS)
    return bool(np.cumsum(np.where(opens, 1, -1)).max() > NESTING_MAX)


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
