"""Times in a field of a MessagePack map: numbers, text, or MessagePack's own timestamps."""

from __future__ import annotations

import msgspec

from tidelog.codec.parsers.base import Spec, TimeParser, shown
from tidelog.codec.parsers.folders import decoded_times, field_text
from tidelog.errors import InvalidError
from tidelog.model.decoding import check_msgpack_depth

__all__ = ["open_msgpack"]


def open_msgpack(spec: Spec) -> TimeParser:
    """Opens ``msgpack:FIELD``; a field inside maps is ``outer.inner``."""
    path = spec.path(spec.argument)
    what = f"field `{shown(spec.argument)}`"
    decoder = msgspec.msgpack.Decoder()

    def decode(value: bytes) -> str:
        check_msgpack_depth(value, "value is not MessagePack")
        try:
            record = decoder.decode(value)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as exc:
            raise InvalidError(f"value is not MessagePack: {shown(str(exc))}") from exc
        return field_text(record, path, what)

    return decoded_times(decode, what)
