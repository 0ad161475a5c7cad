"""Decoders of our types, each made once and by one thread at a time.

msgspec works a type out when it first meets it, and other threads see it half done: one that
decodes the same type in that moment takes the whole process down. So all types are decoded by what
is made here, under a lock through which no fork cuts either. What is stored derives from
:class:`Persisted`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["Persisted", "decode_json", "decode_msgpack", "remedy"]

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
    """A value of a type; ``msgspec.MsgspecError`` for what is none."""
    found: T = _decoder(_of_json, msgspec.json.Decoder, kind).decode(data)
    return found


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """A value of a type; ``msgspec.MsgspecError`` for what is none."""
    found: T = _decoder(_of_msgpack, msgspec.msgpack.Decoder, kind).decode(data)
    return found


def remedy(error: msgspec.MsgspecError, otherwise: str) -> str:
    """What to do about stored data that does not decode.

    A field that this version does not know is not damage: a newer version wrote it, and a copy that
    is restored over it would lose what that version has committed.
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
