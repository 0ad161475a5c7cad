"""Connections: Uvicorn's, with timeouts and limits for each socket, and answers on their way.

A head that does not end, a body that trickles, a client that takes no answer: each is closed after
a time. A head that is too large reaches the app as a mark in its scope, and is refused there.
What is malformed gets status 400. None of these leaves a trace in a topic.

A client that is refused may still be sending. A socket that is closed with unread bytes is reset,
and the client sees the reset instead of the answer. After a refusal the server keeps reading for
``LINGER_S``, after a response for ``BODY_S``.

A server that is full still answers health checks, and one address cannot fill it alone.

Many requests that come in one piece are parsed a few at a time: the rest waits, unread, until those
before are answered. So one client cannot hold the loop, nor fill the memory, with requests.

Timers are armed for requests that do not come in one piece, so that most requests need none.

**Answers on their way** have one bound on the bytes that clients have not taken yet. A large answer
is given to the connection piece by piece, as the client takes it, and counts until the last one.
All answers together have one bound, and those of one client a half of it. An answer that does not
fit is refused with 503 before it begins; but first the largest one whose client is slow loses its
place, and its connection is closed. Small answers, which are most, are not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, Self, cast

from starlette.types import Message, Scope, Send
from uvicorn._types import HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tidelog.clock import Clock
from tidelog.errors import InvalidError
from tidelog.server.http import limits
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import (
    EVERY_ANSWER,
    BusyError,
    DisconnectedError,
    SlowError,
    encode,
)
from tidelog.server.http.limits import client_of
from tidelog.server.http.request import (
    PIECE_BYTES,
    TransferBudget,
    framing_problem,
    path_of,
    target_problem,
    with_authority,
)

__all__ = [
    "HEAD_TOO_LARGE",
    "OLD_CYCLE",
    "REFUSED",
    "REQUEST_ID",
    "Connection",
    "Deliveries",
    "OldCycle",
]


_HEALTH = (b"/healthz", b"/readyz")
_WAITING = ("/sql", "/console/sql")  # and tails, and long polls: their clients may leave
_SLICE = 4_096  # bytes that are parsed at a time: some hundred requests at most
_FULL = "server: too many connections: try again"
_STOPPED = (503, "unavailable", "server: stops before the request's body is there: send it again")
HEAD_TOO_LARGE = "tidelog.head_too_large"  # in the state of a scope
OLD_CYCLE = "tidelog.old_cycle"  # the same: a request of HTTP/1.0 that asks to keep its connection
REQUEST_ID = "tidelog.request_id"  # in a scope: what answers and logs call the request
REFUSED = "tidelog.refused"  # in a scope: the status with which its connection answered


class Refusals(Protocol):
    """What a connection needs to refuse a request without the app."""

    def id_of(self, scope: Scope) -> bytes:
        """Returns the id of a request."""
        ...

    def note_refused(self, scope: Scope, status: int) -> None:
        """Counts and logs a request that the app does not see."""
        ...


class OldCycle(Protocol):
    """A request of HTTP/1.0, which keeps its connection only if both sides say so."""

    keep_alive: bool


class _RefusedError(Exception):
    """Ends the parsing of what a client has sent: nothing after a refused request is read."""


class _AnyLength(int):
    """The length of an answer that ends with its connection, as HTTP/1.0 knows no chunks."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> Self:
        return self

    __hash__ = int.__hash__


class _Outlet:
    """What the app writes an answer to; it is closed once the client has seen the answer."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Flow(FlowControl):
    """Uvicorn's flow control, which also pauses while bytes that were read wait to be parsed."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One client's socket."""

    flow: _Flow
    url = b""  # until a request begins

    _patience: asyncio.TimerHandle | None = None  # for what it should send
    _slowness: asyncio.TimerHandle | None = None  # for what it should take
    _in_head = True
    _complete = True  # the request that came last
    _head_bytes = 0  # of a head that is not complete yet
    _body_bytes = 0  # of the body that comes now
    _framing_bytes = 0  # that came last in a body, and are not of it
    _refused = False  # answered without the app, and only read until it ends
    _late: tuple[int, str, str] | None = None  # a refusal that waits for the answers before it
    _is_unseen = False  # the app does not see the request that came last
    _is_stopping = False  # with the server
    _is_ending = False  # closed after the answers to what the client has sent
    _surplus = False  # beyond the number of connections: only a health check is answered
    _address: str | None = None  # that is counted
    _waiting = memoryview(b"")  # bytes that are parsed once the requests before are answered

    def __init__(
        self,
        counts: limits.ConnectionCounts,
        refusals: Refusals,
        *given: Any,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._counts = counts
        self._refusals = refusals
        self.before_made: Callable[[], None] = lambda: None  # called when it can be used

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._outlet = cast(asyncio.Transport, _Outlet(transport, self._close_answered))
        self.before_made()
        self._address = self.client[0] if self.client else ""
        beyond = self._counts.enter(self._address)
        if beyond > limits.ADDRESS_LINGERING_MAX:
            self._refuse(503, "unavailable", "server: too many connections of this address")
            transport.close()
            return
        self._surplus = beyond > 0 or len(self.connections) > self._counts.most
        if len(self.connections) > self._counts.most_lingering:
            self._refuse(503, "unavailable", _FULL)
            return
        self._wait(limits.LINGER_S if self._surplus else limits.HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._counts.leave(self._address)
            self._address = None
        self._relax()
        if self._slowness is not None:
            self._slowness.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refusing() or self.transport.is_closing():
            return
        if len(data) <= _SLICE and not self._waiting and not self.pipeline:
            self._parse(data)
            return
        self._waiting = memoryview(bytes(self._waiting) + data)
        self._parse_waiting()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self._is_ending and is_last:
            self.transport.close()
        elif self._late is not None and is_last:
            self._refuse(*self._late)
        elif self._waiting:
            self._parse_waiting()

    def _parse_waiting(self) -> None:
        """Parses what waits, until a request has to wait for the one before it."""
        while self._waiting and not (self.pipeline or self._is_refusing()):
            if self.transport.is_closing():
                break
            size = max(_SLICE, self._body_left())
            data, self._waiting = bytes(self._waiting[:size]), self._waiting[size:]
            self._parse(data)
        if self._is_refusing() or self.transport.is_closing():
            self._waiting = memoryview(b"")
            return
        self.flow.is_held = bool(self._waiting)
        if self.flow.is_held:
            self._relax()  # it is not the client who is slow
            self.flow.pause_reading()
        elif not self.pipeline:
            self.flow.resume_reading()

    def _body_left(self) -> int:
        """Returns how many bytes of the current body are to come, by its length header."""
        if self._in_head:
            return 0
        given = [int(value) for name, value in self.headers if name == b"content-length"]
        return given[0] - self._body_bytes if given else 0

    def _parse(self, data: bytes) -> None:
        in_body, before = not self._in_head, self._body_bytes
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_refusing():
            return
        is_framing = in_body and not self._in_head and self._body_bytes == before
        self._framing_bytes = self._framing_bytes + len(data) if is_framing else 0
        kept = self._head_bytes if self._in_head else self._framing_bytes  # by the parser
        if kept > limits.HEAD_BYTES_MAX:
            self._refuse_head()
        elif self._patience is None and not (self._complete and self._is_busy()):
            self._wait(limits.HEAD_S if self._in_head else limits.BODY_S)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection of a client that is done with sending but waits for its answer.

        For tails, long polls and queries it has gone: otherwise the server would not notice that
        such a client has, and a query would take a processor for nothing. TLS has no half of a
        connection: asyncio would close it all the same, and print a warning for each.
        """
        if self._refused or self.scheme == "https" or not self._is_busy():
            return None
        if _may_last(self.cycle.scope):
            return None
        if self._late is not None:
            return True  # it is refused after the answers before it
        if self._in_head:
            self._relax()  # of a request that was cut off, if there is one
            self.cycle.keep_alive = False
            return True
        if not self.pipeline:
            return None  # the app reads a body that was cut off, and sees its end
        self.pipeline.popleft()  # such a body, behind requests that are whole
        self._relax()
        self._is_ending = True
        return True

    def _is_refusing(self) -> bool:
        """Returns whether nothing that comes now is read: a request was refused, or will be."""
        return self._refused or self._late is not None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._complete = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores headers after a body: no proxy has looked at them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._relax()
        if self._is_too_large():
            self.scope["state"][HEAD_TOO_LARGE] = True
        if self._surplus and self.url.partition(b"?")[0] not in _HEALTH:
            self._refuse(503, "unavailable", _FULL)
            raise _RefusedError
        version = self.parser.get_http_version()
        problem = target_problem(self.url) or framing_problem(
            version, self.headers, self.parser.should_upgrade()
        )
        if problem:
            self._refuse(400, InvalidError.kind, problem)
            raise _RefusedError
        self.headers[:] = with_authority(self.url, self.headers)
        if version == "1.0":
            self.expect_100_continue = False  # it would take that for the answer
        super().on_headers_complete()  # raises for a URL that is none: still in the head then
        self.cycle.transport = self._outlet
        if version == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()
        # After a wish for another protocol, the parser reads nothing more.
        if (self._surplus or self.parser.should_upgrade()) and self.cycle is not None:
            self.cycle.keep_alive = False
        elif version == "1.0" and self.parser.should_keep_alive():
            self.cycle.keep_alive = True  # uvicorn never does; `ab -k` and old proxies ask for it
            self.scope["state"][OLD_CYCLE] = self.cycle
        self._head_bytes = self._body_bytes = 0
        self._in_head = False

    def on_body(self, body: bytes) -> None:
        if not self._is_refusing():  # else it has no request of its own
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refusing():
            return
        self._complete = self._in_head = True
        self._relax()
        super().on_message_complete()

    def shutdown(self) -> None:
        """Closes the connection as the server stops; a body on its way has a moment left."""
        self._is_stopping = True
        if self._refused:
            self.transport.close()
            return
        super().shutdown()
        if not self._complete and not self.transport.is_closing():
            self._relax()
            self._patience = self.loop.call_later(limits.LAST_S, self._refuse, *_STOPPED)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slowness = self.loop.call_later(limits.WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slowness is not None:
            self._slowness.cancel()
            self._slowness = None

    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._is_too_large():  # a URL that the parser does not take any more
            self._refuse_head()
            return
        self._refuse(400, InvalidError.kind, "request: is not HTTP/1.1: send well-formed requests")

    def _is_busy(self) -> bool:
        """Returns whether the app works on a request."""
        return self.cycle is not None and not self.cycle.response_complete

    def _is_too_large(self) -> bool:
        """Returns whether the head so far is too large, without a body that came with it."""
        if len(self.headers) > limits.HEADERS_MAX:
            return True
        if self._head_bytes <= limits.HEAD_BYTES_MAX:
            return False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        return size > limits.HEAD_BYTES_MAX

    def _wait(self, seconds: float) -> None:
        self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _relax(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        """Refuses a request that did not come in time; an app that reads its body sees the end."""
        self._patience = None
        what = "head" if self._in_head else "body"
        self._refuse(408, "timeout", f"request: its {what} did not come in time: send it at once")

    def _refuse_head(self) -> None:
        self._refuse(431, "headers_too_large", "request: its headers are too large")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answers without the app, unless it has begun to answer this request, and ends.

        While the app answers an earlier request, that is answered first: it may have stored events.
        """
        if self._refused or self.transport.is_closing():
            return
        busy = self._is_busy()
        if busy and (self._in_head or self.pipeline):  # a later request than the one at work
            if not self._in_head:
                self.pipeline.popleft()  # it has no body, so the app does not see it
                self._is_unseen = True
            self._late = self._late or (status, kind, message)
            self._relax()
            return
        self._refused = True
        if not self.cycle.response_started if busy else self._in_head:
            body = encode({"error": {"kind": kind, "message": message, "context": {}}})
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                *EVERY_ANSWER,
                (b"x-request-id", self._note_refused(status, busy)),
            ]
            if status == 503:
                headers.append((b"retry-after", b"1"))
            head = b"".join(b"%s: %s\r\n" % pair for pair in headers)
            shown = b"" if self.url and self.parser.get_method() == b"HEAD" else body
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + shown)
        if busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._relax()
        self._linger()

    def _note_refused(self, status: int, busy: bool) -> bytes:
        """Notes a refusal, in the app's own scope if it has the request. Returns its id."""
        if busy and not self._is_unseen:
            scope = cast(Scope, self.cycle.scope)
            scope[REFUSED] = status
            return self._refusals.id_of(scope)
        scope = {"headers": self.headers or [], "client": self.client}
        if self.url:  # else no request came
            scope["method"] = self.parser.get_method().decode("latin-1")
            scope["path"] = path_of(self.url)
            self._refusals.note_refused(scope, status)
        return self._refusals.id_of(scope)

    def _close_answered(self) -> None:
        """Closes after an answer. Reads on while the client still sends the request's body."""
        if self._complete or self._in_head or self.pipeline:
            self.transport.close()
            return
        self._refused = True
        self._relax()
        self._linger(limits.LINGER_S if self._is_stopping else limits.BODY_S)

    def _linger(self, seconds: float = limits.LINGER_S) -> None:
        """Ends our side, and closes when the client does or after a time.

        TLS cannot end one side alone: there only the answer says that nothing follows it.
        """
        if len(self.connections) > self._counts.most_lingering:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.is_held = False
        self.flow.resume_reading()
        self._patience = self.loop.call_later(seconds, self.transport.close)


def _may_last(scope: HTTPScope) -> bool:
    """Returns whether the answer to a request may take long, or never end."""
    path = scope["path"]
    return path in _WAITING or path.endswith("/tail") or b"wait=" in scope["query_string"]


class Deliveries:
    """The answers of one server that are on their way."""

    def __init__(self, clock: Clock) -> None:
        self._bodies = TransferBudget(0, clock)

    def bound(self, scope: Scope, send: Send) -> Send:
        """Returns a ``send`` that keeps an answer within the bound."""
        start: Message | None = None  # held back: a large body may yet be refused

        async def send_bounded(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if len(message.get("body", b"")) <= PIECE_BYTES:
                if start is not None:
                    began, start = start, None
                    await send(began)
                await send(message)
                return
            with self._bodies.buffer(_client(scope)) as buffer:
                try:
                    buffer.charge(len(message["body"]))
                    if start is not None:
                        began, start = start, None
                        await send(began)
                    await self._bodies.deliver(buffer, send, message)
                except (BusyError, SlowError) as exc:
                    if start is None:  # too late to say so
                        raise DisconnectedError from exc
                    start = None
                    raise

        return send_bounded


def _client(scope: Scope) -> str:
    admission: Admission | None = scope.get(ADMISSION)
    if admission is not None:
        return admission.client
    client = scope.get("client")
    return client_of(client[0]) if client else ""
