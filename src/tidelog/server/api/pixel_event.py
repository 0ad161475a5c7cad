"""The event of a pixel: what a query, its headers and its path become.

It needs none of the server's libraries, as functions of AWS Lambda make such events too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from tidelog.errors import InvalidError
from tidelog.model.event import Event, parse_timestamp
from tidelog.server.http import limits

__all__ = [
    "AHEAD_MS_MAX",
    "GIF",
    "HEADERS",
    "HEADERS_KEPT",
    "OWN_PARAMETERS",
    "KeptRequest",
    "Params",
    "check_time",
    "event_of_query",
    "is_durable",
    "parse_query",
]

GIF = bytes.fromhex(  # 1x1, transparent
    "47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b"
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"image/gif"),
    (b"cache-control", b"no-store, max-age=0"),
    (b"access-control-allow-origin", b"*"),
    (b"cross-origin-resource-policy", b"cross-origin"),
)
HEADERS_KEPT = ("user-agent", "referer", "accept-language")
AHEAD_MS_MAX = 86_400_000  # of the time that a visitor chooses
OWN_PARAMETERS = ("topic", "id", "key", "t", "token", "ack")

Text = str | bytes  # bytes: not UTF-8
Params = dict[str, Text | list[Text]]

_KEPT = tuple((name, name.encode()) for name in HEADERS_KEPT)
_encode = msgspec.json.Encoder().encode


class KeptRequest(NamedTuple):
    """What of a request its event keeps, beside the query."""

    headers: tuple[tuple[str, bytes], ...] = _KEPT  # by name, and as requests have them
    method: str | None = None
    path: str | None = None


def parse_query(query: bytes) -> Params:
    """Returns the parameters of a query; those given more than once as a list.

    Values that are not UTF-8 are bytes. ``InvalidError`` for such a name, and for one without any.
    """
    found: Params = {}
    if not query:
        return found
    parts = query.split(b"&")
    if len(parts) > limits.PARAMETERS_MAX:
        raise InvalidError(f"query: has more than {limits.PARAMETERS_MAX} parameters: send fewer")
    for part in parts:
        raw_name, _, raw_value = part.partition(b"=")
        if not part:
            continue
        if not raw_name:
            raise InvalidError("query: a parameter has no name: give it as name=value")
        name, value = _decoded(raw_name), _decoded(raw_value)
        if isinstance(name, bytes):
            raise InvalidError(
                "query: the name of a parameter is not UTF-8: percent-encode its UTF-8 bytes"
            )
        before = found.get(name)
        if before is None:
            found[name] = value
        elif isinstance(before, list):
            before.append(value)
        else:
            found[name] = [before, value]
    return found


def is_durable(params: Params) -> bool:
    """Returns whether the answer waits until the event is durable. Raises ``InvalidError``."""
    given = params.get("ack", "1")
    if given not in ("0", "1"):
        raise InvalidError("query: `ack` is neither 0 nor 1: give one of them, once")
    return given == "1"


def event_of_query(
    params: Params,
    headers: Mapping[bytes, bytes],
    address: str | None,
    kept: KeptRequest = KeptRequest(),  # noqa: B008 - immutable
) -> Event:
    """Returns the event of a request; removes its own parameters from ``params``."""
    own = {name: _once(name, params.pop(name)) for name in OWN_PARAMETERS if name in params}
    value: dict[str, object] = {"params": {name: _shown(each) for name, each in params.items()}}
    value["headers"] = {
        name: _shown(_text(headers[raw])) for name, raw in kept.headers if raw in headers
    }
    if kept.method is not None:
        value |= {"method": kept.method, "path": kept.path}
    if address is not None:
        value["address"] = address
    key = own.pop("key", None)
    texts = {name: _own_text(name, each) for name, each in own.items()}
    time = texts.get("t")
    return Event(
        value=_encode(value),
        key=key.encode() if isinstance(key, str) else key,
        id=texts.get("id"),
        timestamp=None if time is None else parse_timestamp(time),
    )


def check_time(event: Event, now_ms: int) -> None:
    """Refuses the time of a pixel from far in the future. Raises ``InvalidError``.

    Any visitor of a page could send one, and a trim by time would keep all that comes after it.
    """
    if isinstance(event.timestamp, int) and event.timestamp > now_ms + AHEAD_MS_MAX:
        raise InvalidError("query: `t` is more than a day ahead: leave it out, or fix the clock")


def _once(name: str, value: Text | list[Text]) -> Text:
    if isinstance(value, list):
        raise InvalidError(f"query: `{name}` is given {len(value)} times: give it once")
    return value


def _own_text(name: str, value: Text) -> str:
    if isinstance(value, bytes):
        raise InvalidError(f"query: `{name}` is not UTF-8: percent-encode its UTF-8 bytes")
    return value


def _decoded(raw: bytes) -> Text:
    if b"%" in raw or b"+" in raw:
        raw = unquote_to_bytes(raw.replace(b"+", b" "))
    return _text(raw)


def _text(raw: bytes) -> Text:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _shown(value: Text | list[Text]) -> object:
    """Returns the JSON value of text, of bytes that are not text, or of a list of these."""
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return value if isinstance(value, str) else {"base64": value}
