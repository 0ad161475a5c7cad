"""Decoders of our types, each created once and by one thread at a time.

msgspec analyzes a type on first use, and other threads see it half done: a thread that decodes the
same type at that moment crashes the process. So everything decodes through this module, under a
lock that forks respect too. Stored types derive from :class:`Persisted`.

:func:`seal_json` stores a JSON object with a checksum, so that damage is an error. The first line
is the value as JSON. The second one, ``{"crc32c":"0123abcd"}``, is the crc32c of the first. Tools
that read a sequence of JSON values can read both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import crc32c
import msgspec

from tidelog.errors import CorruptError

__all__ = [
    "Persisted",
    "decode_json",
    "decode_msgpack",
    "open_json",
    "remedy",
    "seal_json",
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


def seal_json(value: Persisted) -> bytes:
    """Returns the bytes to store."""
    text = msgspec.json.encode(value)
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
