"""``GET /track.gif``: a request becomes an event, and is answered with an image of one pixel.

The event's value is JSON: ``params`` from the query, ``headers`` with the few below and those that
the operator lists, behind a proxy the client's ``address``, and on request ``method`` and ``path``.
What is not UTF-8 is ``{"base64": "..."}``, as in events. The parameters ``topic``, ``id``, ``key``
and ``t`` (its time) go into the event itself, ``token`` is for the gate, and ``ack=0`` asks for the
answer as soon as the event is in the buffer, from which a crash may lose it.
``/track/{topic}.gif`` is the same.
"""

from __future__ import annotations

import re

from starlette.types import Receive, Scope, Send

from tidelog.connectors.forward import Forwarder
from tidelog.errors import InvalidError
from tidelog.model.event import Event
from tidelog.model.topic import check_topic_name
from tidelog.server.api.forward import Forwards
from tidelog.server.api.ingest import Ingest
from tidelog.server.api.open_topics import OpenTopics
from tidelog.server.api.pixel_event import (
    GIF,
    HEADERS,
    HEADERS_KEPT,
    KeptRequest,
    Params,
    check_time,
    event_of_query,
    is_durable,
    parse_query,
)
from tidelog.server.http.auth import ADMISSION, Admission, Gate, bearer_of
from tidelog.server.http.errors import ForbiddenError, answer
from tidelog.server.http.metrics import Metrics
from tidelog.server.options import ServeOptions

__all__ = ["PIXEL_PATH", "Pixels"]

_PATH = "/track.gif"
PIXEL_PATH = re.compile(r"/track(/[^/]*)?\.gif")


class Pixels:
    """The handler of pixels."""

    def __init__(
        self,
        options: ServeOptions,
        gate: Gate,
        topics: OpenTopics,
        ingest: Ingest,
        forwards: Forwards,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._gate = gate
        self._topics = topics
        self._ingest = ingest
        self._forwards = forwards
        self._metrics = metrics
        more = (name for name in options.keep_headers if name not in HEADERS_KEPT)
        self._kept = KeptRequest(
            (*KeptRequest().headers, *((name, name.encode()) for name in more))
        )

    async def track(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """``GET /track.gif``, ``GET /track/{topic}.gif``"""
        params = parse_query(scope["query_string"])
        topic = self._topic(scope["path"], params)
        admission, may_choose = await self._admit(scope, headers, topic, params)
        address = self._gate.address(scope, headers) if self._options.behind_proxy else None
        durable = is_durable(params)
        kept = self._kept
        if self._options.keep_request:
            kept = kept._replace(method=scope["method"], path=scope["path"])
        event = event_of_query(params, headers, address, kept)
        if not may_choose:
            check_time(event, self._gate.now_ms())
        answered = list(HEADERS)
        forwarder = self._forwards.get(topic)
        if forwarder is not None:
            await self._forward(forwarder, event, durable)
        else:
            opened = self._topics.get(topic) or await self._topics.open(topic)
            if durable:
                (position,) = await self._ingest.send(opened, [event], admission)
                answered.append((b"tidelog-position", str(position).encode()))
            else:
                self._ingest.enter(opened, [event], admission)
        self._metrics.events_in += 1
        await answer(send, 200, answered, GIF)
        return 200

    async def _forward(self, forwarder: Forwarder, event: Event, durable: bool) -> None:
        self._ingest.check(event)
        if durable:
            await self._forwards.send(forwarder, event)
        else:
            self._forwards.send_unconfirmed(forwarder, event)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], topic: str, params: Params
    ) -> tuple[Admission, bool]:
        """Admits a pixel. Returns also whether it may choose ids and times, as a token that may
        append can, though not from a query.

        Raises ``UnauthorizedError``, ``ForbiddenError``, ``TooManyError``.
        """
        shown = params.get("token")
        in_query = shown if isinstance(shown, str) else None
        by_header = bearer_of(headers) is not None
        if topic in self._options.public_pixels and in_query is None and not by_header:
            admission = self._gate.admit_page(scope, headers)
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
        return admission, may_choose

    def _topic(self, path: str, params: Params) -> str:
        if path != _PATH:
            topic = path[len("/track/") : -len(".gif")]
            if "topic" in params:
                raise InvalidError("query: `topic` is in the path already: leave it out")
            return topic
        named = params.get("topic", self._options.topic_default)
        if not isinstance(named, str):
            raise InvalidError("query: names no topic, or several: give `topic` once, as UTF-8")
        check_topic_name(named)
        return named
