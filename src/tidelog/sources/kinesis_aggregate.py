"""Records of Kinesis that hold several: as the producer library (KPL) puts them together.

Such a record is four magic bytes, a protobuf message and its MD5. The message has two tables, of
partition keys and of explicit hash keys, and the records that name their entries. What only looks
like one, or is damaged, is not taken apart: its bytes stay an event as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["MAGIC", "UserRecord", "hash_of", "user_records"]

MAGIC = b"\xf3\x89\x9a\xc2"
_MD5_BYTES = 16
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5  # protobuf's kinds of fields
_VARINT_BITS = 64
_HASH_END = 1 << 128


class UserRecord(NamedTuple):
    """What a producer gave to the library."""

    key: str
    hash_key: str | None
    data: bytes
    tags: tuple[tuple[str, bytes], ...] = ()


def user_records(data: bytes) -> list[UserRecord] | None:
    """The records inside of one; None where it is not put together, damaged or empty."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _MD5_BYTES:
        return None
    message, digest = data[len(MAGIC) : -_MD5_BYTES], data[-_MD5_BYTES:]
    if hashlib.md5(message, usedforsecurity=False).digest() != digest:
        return None
    try:
        return _message(message) or None
    except ValueError:
        return None


def hash_of(key: str, hash_key: str | None) -> int:
    """By which Kinesis chooses a shard."""
    if hash_key is not None:
        return int(hash_key)
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest())


def _message(message: bytes) -> list[UserRecord]:
    keys: list[str] = []
    hash_keys: list[str] = []
    parts: list[bytes] = []
    for number, value in _fields(message):
        if number == 1:
            keys.append(_text(value))
        elif number == 2:
            hash_keys.append(_hash_key(_text(value)))
        elif number == 3:
            parts.append(_bytes(value))
    return [_record(part, keys, hash_keys) for part in parts]


def _record(part: bytes, keys: list[str], hash_keys: list[str]) -> UserRecord:
    key: str | None = None
    hash_key: str | None = None
    data: bytes | None = None
    tags: list[tuple[str, bytes]] = []
    for number, value in _fields(part):
        if number == 1:
            key = _entry(keys, value)
        elif number == 2:
            hash_key = _entry(hash_keys, value)
        elif number == 3:
            data = _bytes(value)
        elif number == 4:
            tags.append(_tag(_bytes(value)))
    if key is None or data is None:
        raise ValueError("a record without key or data")
    return UserRecord(key, hash_key, data, tuple(tags))


def _tag(part: bytes) -> tuple[str, bytes]:
    name, content = "", b""
    for number, value in _fields(part):
        if number == 1:
            name = _text(value)
        elif number == 2:
            content = _bytes(value)
    return name, content


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message; ``ValueError`` where it breaks off."""
    at, end = 0, len(message)
    while at < end:
        head, at = _varint(message, at)
        kind = head & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield head >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_LONG, _SHORT):
            size = 8 if kind == _LONG else 4
        else:
            raise ValueError(f"kind {kind} of a field")
        if size > end - at:
            raise ValueError("a field breaks off")
        yield head >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < _VARINT_BITS:
        if at >= len(message):
            raise ValueError("a number breaks off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number does not end")


def _entry(table: list[str], value: int | bytes) -> str:
    if not isinstance(value, int) or value >= len(table):
        raise ValueError("an entry that no table has")
    return table[value]


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()  # what is no UTF-8 is a ValueError too


def _hash_key(text: str) -> str:
    if not (text.isascii() and text.isdecimal()) or int(text) >= _HASH_END:
        raise ValueError("no hash key")
    return text
