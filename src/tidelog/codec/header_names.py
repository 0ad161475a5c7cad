"""Names of headers that are not text: how they become text, and how Kafka's clients write them.

Kafka stores any bytes as the name of a header. Here names are text. A name that is not UTF-8, and
one that begins with ``tidelog.name:``, becomes ``tidelog.name:`` and its bytes, percent-encoded: so
no two names become one, and the bytes can be restored from each text.

Clients of Kafka write names as C strings, so neither a NUL nor bytes that are not text. A record
with such a name is written with the names as they are here, those with a NUL as ``tidelog.text:``
and percent-encoded, and with the header ``tidelog-names`` at its end, which says so to its readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import quote_from_bytes, unquote_to_bytes

__all__ = ["kafka_headers", "raw_header_name", "text_header_name", "text_headers"]

Headers = list[tuple[str, bytes | None]]

_RAW = "tidelog.name:"
_TEXT = "tidelog.text:"
_MARK = "tidelog-names"
_MARK_HEADER = (_MARK, b"encoded")
_RAW_MARK_HEADER = (_MARK.encode(), b"encoded")
_SAFE = " !#$&'()*+,/:;=?@[]"


def text_header_name(raw: bytes) -> str:
    """Return the name that an event's header has for the bytes that Kafka has."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _escaped(_RAW, raw)
    return _escaped(_RAW, raw) if text.startswith(_RAW) else text


def raw_header_name(text: str) -> bytes | None:
    """Return the bytes whose name in an event is this text; None where no bytes have it."""
    if not text.startswith(_RAW):
        return text.encode()
    raw = unquote_to_bytes(text.removeprefix(_RAW))
    return raw if text_header_name(raw) == text else None


def text_headers(raw: Sequence[tuple[bytes, bytes | None]]) -> Headers:
    """Return the headers that an event has for those of a record of Kafka."""
    if raw and raw[-1] == _RAW_MARK_HEADER:
        found = _unmarked(raw[:-1])
        if found is not None:
            return found
    return [(text_header_name(name), value) for name, value in raw]


def kafka_headers(headers: Sequence[tuple[str, bytes | None]]) -> Headers:
    """Return the headers to write into Kafka for those of an event."""
    names = [_exact(name) for name, _ in headers]
    if None not in names:
        return [(name or "", value) for name, (_, value) in zip(names, headers, strict=True)]
    return [*((_written(name), value) for name, value in headers), _MARK_HEADER]


@lru_cache(10_000)
def _exact(text: str) -> str | None:
    """The name in Kafka that is read as this text; None where no client can write that."""
    raw = raw_header_name(text)
    if raw is None or b"\0" in raw or text == _MARK:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _written(text: str) -> str:
    """A name in a marked record."""
    is_plain = "\0" not in text and text != _MARK and not text.startswith(_TEXT)
    return text if is_plain else _escaped(_TEXT, text.encode())


def _unmarked(raw: Sequence[tuple[bytes, bytes | None]]) -> Headers | None:
    """The headers of a marked record; None where another one than Tidelog has marked it."""
    found: Headers = []
    try:
        for name, value in raw:
            text = written = name.decode()
            if written.startswith(_TEXT):
                text = unquote_to_bytes(written.removeprefix(_TEXT)).decode()
            if _written(text) != written:
                return None
            found.append((text, value))
    except UnicodeDecodeError:
        return None
    return found


def _escaped(prefix: str, raw: bytes) -> str:
    return prefix + quote_from_bytes(raw, safe=_SAFE)
