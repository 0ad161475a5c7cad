"""JSON objects of ours with a checksum, so that a damaged one is an error.

The first line is the value as JSON; the second one, ``{"crc32c":"0123abcd"}``, is the crc32c of the
first. Tools that read JSON values one after another can read both.
"""

from __future__ import annotations

from typing import TypeVar

import crc32c
import msgspec

from tidelog.errors import CorruptError
from tidelog.model.decoding import Persisted, decode_json, remedy

__all__ = ["open_json", "seal_json"]

S = TypeVar("S", bound=Persisted)


def seal_json(value: Persisted) -> bytes:
    """The bytes to store."""
    text = msgspec.json.encode(value)
    return text + _seal(text)


def open_json(data: bytes, kind: type[S], what: str) -> S:
    """The value of stored bytes. ``CorruptError`` where checksum or fields do not fit."""
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
