"""Names of headers that are not text: how they become text, and how Kafka's clients write them.

Kafka stores any bytes as the name of a header. Here names are text. A name that is not UTF-8
becomes ``tidelog.name:`` and its bytes, percent-encoded, so no two names become one. Clients of
Kafka write names as C strings, which have no NUL: a name with one is written in the same form, and
turned back when it is read.
"""

from __future__ import annotations

from urllib.parse import quote_from_bytes, unquote_to_bytes

__all__ = ["kafka_header_name", "text_header_name"]

_ESCAPED = "tidelog.name:"
_SAFE = " !#$&'()*+,/:;=?@[]"


def text_header_name(raw: bytes) -> str:
    """Return the name that an event's header has for the bytes that Kafka has."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _escaped(raw)
    if text.startswith(_ESCAPED):
        meant = unquote_to_bytes(text.removeprefix(_ESCAPED))
        if b"\0" in meant and _escaped(meant) == text:
            return text_header_name(meant)
    return text


def kafka_header_name(text: str) -> str:
    """Return the name to write into Kafka for the name of an event's header."""
    return _escaped(text.encode()) if "\0" in text else text


def _escaped(raw: bytes) -> str:
    return _ESCAPED + quote_from_bytes(raw, safe=_SAFE)
