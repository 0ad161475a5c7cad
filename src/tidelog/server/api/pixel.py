"""``GET /track.gif``: a request becomes an event, and is answered with an image of one pixel.

The event's value is JSON: ``params`` from the query, ``headers`` with the few below and those that
the operator lists, behind a proxy the client's ``address``, and on request ``method`` and ``path``.
What is not UTF-8 is ``{"base64": "..."}``, as in events. The parameters ``topic``, ``id``, ``key``
and ``t`` (its time) go into the event itself, ``token`` is for the gate, and ``ack=0`` asks for the
answer as soon as the event is in the buffer, from which a crash may lose it.
``/track/{topic}.gif`` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.types import Receive, Scope, Send

from tidelog.errors import InvalidError, NotFoundError
from tidelog.model.event import Event
from tidelog.model.topic import check_topic_name
from tidelog.server.api.ingest import Ingest, OpenTopics, time_of
from tidelog.server.http import limits
from tidelog.server.http.auth import ADMISSION, Gate
from tidelog.server.http.errors import ForbiddenError, Pair, answer
from tidelog.server.http.metrics import Metrics
from tidelog.server.options import ServeOptions

__all__ = [
    "GIF",
    "HEADERS",
    "HEADERS_KEPT",
    "OWN_PARAMETERS",
    "KeptRequest",
    "Params",
    "Pixels",
    "event_of_query",
    "is_durable",
    "parse_query",
]

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

Text = str | bytes  # bytes: not UTF-8
Params = dict[str, Text | list[Text]]

_PATH = "/track.gif"
_KEPT = tuple((name, name.encode()) for name in HEADERS_KEPT)
_encode = msgspec.json.Encoder().encode


class KeptRequest(NamedTuple):
    """What of a request its event keeps, beside the query."""

    headers: tuple[tuple[str, bytes], ...] = _KEPT  # by name, and as requests have them
    method: str | None = None
    path: str | None = None


class Pixels:
    """The handler of pixels."""

    def __init__(
        self,
        options: ServeOptions,
        gate: Gate,
        topics: OpenTopics,
        ingest: Ingest,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._gate = gate
        self._topics = topics
        self._ingest = ingest
        self._metrics = metrics
        more = (name for name in options.keep_headers if name not in HEADERS_KEPT)
        self._kept = KeptRequest((*_KEPT, *((name, name.encode()) for name in more)))

    async def track(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """``GET /track.gif``, ``GET /track/{topic}.gif``"""
        params = parse_query(scope["query_string"])
        topic = self._topic(scope["path"], params)
        await self._admit(scope, headers, topic, params)
        address = self._gate.address(scope, headers) if self._options.behind_proxy else None
        durable = is_durable(params)
        kept = self._kept
        if self._options.keep_request:
            kept = kept._replace(method=scope["method"], path=scope["path"])
        event = event_of_query(params, headers, address, kept)
        opened = self._topics.get(topic) or await self._topics.open(topic)
        answered = list(HEADERS)
        if durable:
            (position,) = await self._ingest.send(opened, [event])
            answered.append((b"tidelog-position", str(position).encode()))
        else:
            self._ingest.enter(opened, event)
        self._metrics.events_in += 1
        await answer(send, 200, answered, GIF)
        return 200

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], topic: str, params: Params
    ) -> None:
        """Admits a pixel. Only a token that may append chooses ids, and not from a query.

        Raises ``UnauthorizedError``, ``ForbiddenError``, ``TooManyError``.
        """
        shown = params.get("token")
        in_query = shown if isinstance(shown, str) else None
        by_header = b"authorization" in headers
        if topic in self._options.public_pixels and in_query is None and not by_header:
            self._gate.admit_page(scope, headers)
            may_choose = False
        else:
            admission = await self._gate.admit(scope, headers, "pixel", topic, in_query)
            scope[ADMISSION] = admission
            may_choose = admission.allows("append", topic)
            if in_query is not None and not by_header and admission.token is not None:
                may_choose = False
                if any(grant.scope != "pixel" for grant in admission.token.grants):
                    raise ForbiddenError(
                        f"token `{admission.token.id}`: may do more than send pixels, and queries "
                        "end in logs and in the source of pages: use one made with --pixel",
                        token=admission.token.id,
                    )
        if "id" in params and not may_choose:
            raise ForbiddenError(
                "query: this pixel may not choose the id of its event: leave out `id`, or send a "
                "token made with --append in a header"
            )

    def _topic(self, path: str, params: Params) -> str:
        if path != _PATH:
            topic = path[len("/track/") : -len(".gif")]
            if not path.startswith("/track/") or "/" in topic:
                raise NotFoundError(f"path `{path[:80]}`: not found: see /openapi.json")
            if "topic" in params:
                raise InvalidError("query: `topic` is in the path already: leave it out")
            return topic
        named = params.get("topic", self._options.topic_default)
        if not isinstance(named, str):
            raise InvalidError("query: names no topic, or several: give `topic` once, as UTF-8")
        check_topic_name(named)
        return named


def parse_query(query: bytes) -> Params:
    """The parameters of a query; those given more than once as a list.

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
    """Whether the answer waits for the event to be durable. ``InvalidError`` for other words."""
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
    """The event of a request, whose own parameters are taken out of ``params``."""
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
        timestamp=None if time is None else time_of(time),
    )


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
