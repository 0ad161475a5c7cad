"""``GET /track.gif``: a request becomes an event, and is answered with an image of one pixel.

The event's value is JSON: ``params`` from the query, ``headers`` with the few below, and behind a
proxy the client's ``address``. The parameters ``topic``, ``id``, ``key`` and ``t`` (its time) go
into the event itself, ``token`` is for the gate, and ``ack=0`` asks for the answer as soon as the
event is in the buffer, from which a crash may lose it. ``/track/{topic}.gif`` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_plus

import msgspec

from tidelog.errors import InvalidError
from tidelog.model.event import Event
from tidelog.server import limits
from tidelog.server.answers import Pair
from tidelog.server.ingest import time_of

__all__ = ["GIF", "HEADERS", "HEADERS_KEPT", "OWN_PARAMETERS", "event_of_query", "parse_query"]

GIF = bytes.fromhex(  # 1x1, transparent
    "47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b"
)
HEADERS: tuple[Pair, ...] = (
    (b"content-type", b"image/gif"),
    (b"cache-control", b"no-store, max-age=0"),
    (b"access-control-allow-origin", b"*"),
    (b"cross-origin-resource-policy", b"cross-origin"),
)
HEADERS_KEPT = ("user-agent", "referer", "accept-language")
OWN_PARAMETERS = ("topic", "id", "key", "t", "token", "ack")

_KEPT = tuple((name, name.encode()) for name in HEADERS_KEPT)
_encode = msgspec.json.Encoder().encode


def parse_query(query: bytes) -> dict[str, str | list[str]]:
    """The parameters of a query; those given more than once as a list.

    What is no UTF-8 is replaced, since a page cannot be told of its mistake.
    """
    found: dict[str, str | list[str]] = {}
    if not query:
        return found
    parts = query.decode("utf-8", "replace").split("&")
    if len(parts) > limits.PARAMETERS_MAX:
        raise InvalidError(f"query: has more than {limits.PARAMETERS_MAX} parameters: send fewer")
    for part in parts:
        name, _, value = part.partition("=")
        if not name:
            continue
        if "%" in part or "+" in part:
            name, value = unquote_plus(name), unquote_plus(value)
        before = found.get(name)
        if before is None:
            found[name] = value
        elif isinstance(before, list):
            before.append(value)
        else:
            found[name] = [before, value]
    return found


def event_of_query(
    params: dict[str, str | list[str]], headers: Mapping[bytes, bytes], address: str | None
) -> Event:
    """The event of a request, whose own parameters are taken out of ``params``."""
    own = {name: _once(name, params.pop(name)) for name in OWN_PARAMETERS if name in params}
    value: dict[str, object] = {"params": params}
    kept = {name: headers[raw].decode("utf-8", "replace") for name, raw in _KEPT if raw in headers}
    value["headers"] = kept
    if address is not None:
        value["address"] = address
    time, key = own.get("t"), own.get("key")
    return Event(
        value=_encode(value),
        key=None if key is None else key.encode(),
        id=own.get("id"),
        timestamp=None if time is None else time_of(time),
    )


def _once(name: str, value: str | list[str]) -> str:
    if isinstance(value, list):
        raise InvalidError(f"query: `{name}` is given {len(value)} times: give it once")
    return value
