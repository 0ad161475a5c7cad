"""Events by their ids over HTTP: found, updated and deleted; and the objects that hold a topic.

``GET``, ``PUT`` and ``DELETE /topics/{topic}/ids/{id}``, and ``GET /topics/{topic}/journals``. The
body of an update is the new value, as it is. Who amends is, for the audit, the token; without
tokens, the address that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidelog.api.journal import presign_s
from tidelog.codec.event_json import event_lines, is_event_line
from tidelog.erasure.delete import DeleteResult
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.journal.listing import JournalEntry
from tidelog.model.event import check_timestamp
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.playback import whole_range
from tidelog.server.api.read import limit_of
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import TooLargeError, encode
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.metrics import Metrics
from tidelog.server.http.request import (
    TransferBudget,
    check_parameters,
    content_type,
    headers_of,
    inflate,
    is_encoded,
)

__all__ = ["PRESIGN_S_MAX", "WHO", "ByIdHandlers"]

WHO = "tidelog.who"  # in the scope of a request: by what it was let in
_CURSOR_MAX = 200  # characters
PRESIGN_S_MAX = 3_600  # of URLs that are given over HTTP


class _After(msgspec.Struct, frozen=True, array_like=True):
    """Where the next page of a list of journals begins, and what it lists."""

    start_ms: int
    end_ms: int
    partition: int
    offset: int

    def text(self) -> str:
        return ".".join(map(str, msgspec.structs.astuple(self)))

    @classmethod
    def of_text(cls, text: str) -> _After:
        parts = text.split(".")
        if len(text) > _CURSOR_MAX or len(parts) != 4 or not all(map(_is_number, parts)):
            raise InvalidError("cursor: is not a valid cursor: start again without it")
        after = cls(*map(int, parts))
        check_timestamp(after.start_ms)
        check_timestamp(min(after.end_ms, TIMESTAMP_MS_END - 1))
        return after


class ByIdHandlers:
    """Handlers of requests that name an id, or ask for journals."""

    def __init__(
        self,
        home: Home,
        threads: ServerThreads,
        metrics: Metrics,
        bodies: TransferBudget,
        check: Callable[[Admission], None],
    ) -> None:
        self._check = check  # whether what let a request in still does
        self._home = home
        self._threads = threads
        self._metrics = metrics
        self._bodies = bodies

    async def get(self, request: Request) -> Response:
        """``GET /topics/{topic}/ids/{id}``"""
        check_parameters(request, ())
        topic, event_id = _named(request)
        event = await self._threads.run(self._home.get, topic, event_id)
        self._metrics.events_out += 1
        return _json_bytes(event_lines([event]).rstrip(b"\n"))

    async def update(self, request: Request) -> Response:
        """``PUT /topics/{topic}/ids/{id}``"""
        check_parameters(request, ("why",))
        topic, event_id = _named(request)
        headers = headers_of(request.scope["headers"])
        admission: Admission = request.scope[ADMISSION]
        with self._bodies.buffer(admission.client) as buffer:
            value = await buffer.read(request.receive, headers)
            bytes_max = self._home.context.log_settings.event_bytes_max
            if is_encoded(headers):
                value = await self._threads.run(inflate, headers, value, bytes_max)
                buffer.charge(len(value))
            if not value:
                raise InvalidError("body: is empty: give the new value; to erase, use DELETE")
            if len(value) > bytes_max:
                raise TooLargeError(
                    f"body: has {len(value)} bytes, a value at most {bytes_max}",
                    bytes_max=bytes_max,
                )
            why, who = request.query_params.get("why", ""), request.scope[WHO]
            is_json = content_type(headers) == b"application/json"

            def update() -> None:
                if is_json and is_event_line(value):
                    raise InvalidError(
                        "body: is an event as JSON, but an update needs the new value alone: send "
                        "the value without the event around it, or, if these bytes are the value, "
                        "send them as application/octet-stream"
                    )
                self._check(admission)  # the body, or the turn at a thread, may have taken long
                self._home.update(topic, event_id, value, why=why, who=who)

            await self._threads.run(update)
        return _json({"topic": topic, "id": event_id, "bytes": len(value)})

    async def delete(self, request: Request) -> Response:
        """``DELETE /topics/{topic}/ids/{id}``"""
        check_parameters(request, ("why",))
        topic, event_id = _named(request)
        why, who = request.query_params.get("why", ""), request.scope[WHO]
        admission: Admission = request.scope[ADMISSION]

        def delete() -> DeleteResult:
            self._check(admission)  # the turn at a thread may have taken long
            return self._home.delete(topic, event_id, why=why, who=who)

        done = await self._threads.run(delete)
        return _json({"topic": topic, "id": event_id, "deleted": done.events + done.archived})

    async def journals(self, request: Request) -> Response:
        """``GET /topics/{topic}/journals``"""
        check_parameters(request, ("start", "end", "limit", "cursor", "presign"))
        params = request.query_params
        limit = limit_of(params)
        presign = params.get("presign")
        expires_s = None if presign is None else self._presign_s(presign, request)
        cursor, start, end = (params.get(name) for name in ("cursor", "start", "end"))
        if cursor is not None and (start is not None or end is not None):
            raise InvalidError("query: a cursor knows its range: leave out start and end")
        if cursor is not None:
            after = _After.of_text(cursor)
        else:
            times = whole_range(start, end, self._home.context.clock.now_ms())
            after = _After(times.start_ms, times.end_ms, 0, 0)
        topic = request.path_params["topic"]
        found = await self._threads.run(self._list, topic, after, limit, expires_s)
        return _page(topic, after, found, limit, expires_s)

    def _presign_s(self, text: str, request: Request) -> int:
        """Returns how long URLs are valid: no longer than the token, as URLs cannot be revoked."""
        seconds = presign_s(text)
        if seconds > PRESIGN_S_MAX:
            raise InvalidError(
                f"presign `{text[:80]}`: give {PRESIGN_S_MAX} s at most: URLs outlive their token"
            )
        admission: Admission = request.scope[ADMISSION]
        token = admission.token
        if token is None or token.ends_ms is None:
            return seconds
        left_ms = token.ends_ms - self._home.context.clock.now_ms()
        return max(1, min(seconds, left_ms // 1000))

    def _list(
        self, name: str, after: _After, limit: int, expires_s: int | None
    ) -> list[JournalEntry]:
        """Returns one more than the page may have, if there are more."""
        begin = (after.partition, after.offset)
        presign = None if expires_s is None else f"{expires_s}s"
        times = after.start_ms, after.end_ms
        return list(
            islice(self._home.journals(name, *times, begin=begin, presign=presign), limit + 1)
        )


def _page(
    topic: str, after: _After, found: list[JournalEntry], limit: int, expires_s: int | None
) -> Response:
    headers = {"cache-control": "no-store"}
    following = None
    if len(found) > limit:
        first = found.pop()
        following = _After(after.start_ms, after.end_ms, first.partition, first.base).text()
        more = "" if expires_s is None else f"&presign={expires_s}s"
        link = f"/topics/{topic}/journals?cursor={following}&limit={limit}{more}"
        headers["link"] = f'<{link}>; rel="next"'
    answer = {"topic": topic, "next": following, "journals": found}
    return Response(encode(answer), headers=headers, media_type="application/json")


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["topic"], request.path_params["id"]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _json(value: dict[str, Any]) -> Response:
    return _json_bytes(encode(value))


def _json_bytes(body: bytes) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(body, headers=headers, media_type="application/json")
