"""The ASGI application: finds the operation of a request, checks the token, and runs the handler.

Appends and pixels, of which there are many, are found without a router; Starlette finds all other
operations. Each request is counted, and each error has one shape.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from tidelog.backends import Telemetry
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.codec.event_batch import one_batch, table_of, with_position
from tidelog.codec.event_json import batch_lines
from tidelog.coordination.tokens import close_home, is_closed_home, read_tokens
from tidelog.errors import (
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnknownOutcomeError,
    contained,
)
from tidelog.home import Home
from tidelog.model.event import Event
from tidelog.model.token import Scope as Right
from tidelog.server.api.by_id import WHO, ByIdHandlers
from tidelog.server.api.forward import Forwards
from tidelog.server.api.ingest import Ingest
from tidelog.server.api.open_topics import OpenTopics
from tidelog.server.api.openapi import description
from tidelog.server.api.pixel import PIXEL_PATH, Pixels
from tidelog.server.api.read import ByTimeHandlers, PartitionWatch, Reads
from tidelog.server.api.sql import SqlHandlers, SqlRunner
from tidelog.server.api.tail import Tails
from tidelog.server.console.site import PAGE_HEADERS, Console
from tidelog.server.http import limits
from tidelog.server.http.auth import ADMISSION, REFRESH_S, SOME_TOPIC, Admission, Gate
from tidelog.server.http.connection import (
    HEAD_TOO_LARGE,
    OLD_CYCLE,
    REFUSED,
    REQUEST_ID,
    Deliveries,
    OldCycle,
)
from tidelog.server.http.errors import (
    EVERY_ANSWER,
    BusyError,
    DisconnectedError,
    HeadError,
    MethodError,
    answer,
    answer_error,
    encode,
    status_of,
)
from tidelog.server.http.health import Health
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.logs import AccessLog, ErrorLog, request_id_of
from tidelog.server.http.metrics import Metrics
from tidelog.server.http.request import (
    TransferBudget,
    WholeRoute,
    check_conditions,
    check_host,
    check_length,
    check_path,
    check_query,
    headers_of,
    inflate,
    is_encoded,
)
from tidelog.server.http.usage import USAGE_S, ClientUsage, Read
from tidelog.server.options import ServeOptions

__all__ = ["APPEND", "OPERATIONS", "TRACK", "TRACK_TOPIC", "Operation", "ServerApp"]

_TICK_S = 1.0
_GONE = 499  # counted for clients that left before they were answered
_GET_ALONE = ("append", "track", "track_topic", "tail")  # HEAD would store, or never end
_UNCOUNTED = ("health", "ready")  # monitors ask as often as they like
_JSON_TYPE = (b"content-type", b"application/json")
_BEGUN = "tidelog.begun"  # in the scope of a request whose answer is on its way
_ID_ROUTE = "/topics/{topic}/ids/{id:path}"  # an id may hold slashes


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the API: its route, and the right that it needs."""

    name: str
    method: str
    path: str
    right: Right | None  # None: no token is needed
    route: str = ""  # where the router needs more than the path
    some: bool = False  # the right for one topic is enough; the answer has only such topics


APPEND = Operation("append", "POST", "/topics/{topic}/events", "append")
TRACK = Operation("track", "GET", "/track.gif", "pixel")
TRACK_TOPIC = Operation("track_topic", "GET", "/track/{topic}.gif", "pixel")
OPERATIONS = (
    APPEND,
    TRACK,
    TRACK_TOPIC,
    Operation("topics", "GET", "/topics", "read", some=True),
    Operation("topic", "GET", "/topics/{topic}", "read"),
    Operation("consumers", "GET", "/topics/{topic}/consumers", "read"),
    Operation("events", "GET", "/topics/{topic}/partitions/{partition}/events", "read"),
    Operation("range", "GET", "/topics/{topic}/events", "read"),
    Operation("tail", "GET", "/topics/{topic}/tail", "read"),
    Operation("get", "GET", "/topics/{topic}/ids/{id}", "read", _ID_ROUTE),
    Operation("update", "PUT", "/topics/{topic}/ids/{id}", "amend", _ID_ROUTE),
    Operation("delete", "DELETE", "/topics/{topic}/ids/{id}", "erase", _ID_ROUTE),
    Operation("journals", "GET", "/topics/{topic}/journals", "read"),
    Operation("sql", "POST", "/sql", "read", some=True),
    Operation("metrics", "GET", "/metrics", "read"),
    Operation("health", "GET", "/healthz", None),
    Operation("ready", "GET", "/readyz", None),
    Operation("openapi", "GET", "/openapi.json", None),
    Operation("docs", "GET", "/docs", None),
)

Handler = Callable[[Request], Awaitable[Response]]
Run = Callable[[Scope, Receive, Send, dict[bytes, bytes]], Awaitable[int]]


class ServerApp:
    """The ASGI application of one home. Start and stop it in a running loop."""

    def __init__(self, home: Home, options: ServeOptions) -> None:
        if options.body_bytes_max > home.context.log_settings.buffer_bytes:
            raise InvalidError(
                f"serve: body-max {options.body_bytes_max}: is more than a producer holds: give "
                f"at most buffer_bytes, {home.context.log_settings.buffer_bytes}"
            )
        self._home = home
        self._options = options
        spans = home.context.spans
        self._telemetry = spans if isinstance(spans, Telemetry) else None
        self._clock = home.context.clock
        self._now_s = home.context.clock.monotonic_s
        self._threads = ServerThreads()
        self._topics = OpenTopics(home, self._threads)
        link = self._telemetry.link if self._telemetry is not None else lambda: None
        self.gate = Gate(options, lambda: read_tokens(home.context), self._clock)
        self._ingest = Ingest(home, self._topics, self._threads, self.gate.check, link)
        self._bodies = TransferBudget(options.body_bytes_max, self._clock)
        self._deliveries = Deliveries(self._clock)
        catalog = home.catalog if isinstance(home.catalog, CheckedCatalog) else None
        self.metrics = Metrics(home.meter, self._buffered, catalog)
        self._prefix = home.context.ids.new()[:12].encode()  # of the ids of requests
        self._count = 0
        self._access: AccessLog | None = None
        self.refresh_certificate: Callable[[], None] | None = None  # of the listener
        self._error_log = ErrorLog(self._clock)
        self._usage = ClientUsage(home.context, options.audit_reads)
        self._forwards = Forwards(home, options, self._ingest, self._error_log.add)
        self._pixels = Pixels(
            options, self.gate, self._topics, self._ingest, self._forwards, self.metrics
        )
        self._sql = SqlRunner(home)
        self._health = Health(home)
        # Made once, since it needs no token and may be asked for often.
        self._description = functools.cache(lambda: encode(description(options)))
        self._console = Console(
            home,
            options,
            self.gate,
            self._threads,
            (self.metrics, self._usage, self._sql, self._error_log),
        )
        self._docs = functools.cache(self._console.docs)  # the same
        self._routes: list[tuple[WholeRoute, Operation, Handler | None]] = []
        self._watch: PartitionWatch | None = None
        self._repeated: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self) -> None:
        """Reads the tokens and starts everything. Raises if the home cannot be reached."""
        self._watch = PartitionWatch(self._home.context, self.metrics)
        parts = (self._home, self._threads, self._watch, self.metrics, self.gate.check)
        reads, tails = Reads(*parts), Tails(*parts)
        ids = ByIdHandlers(self._home, self._threads, self.metrics, self._bodies, self.gate.check)
        handlers: dict[str, Handler] = {
            "topics": reads.topics,
            "topic": reads.topic,
            "consumers": reads.consumers,
            "events": reads.events,
            "range": ByTimeHandlers(self._home, self._threads, self.metrics).events,
            "tail": tails.tail,
            "get": ids.get,
            "update": ids.update,
            "delete": ids.delete,
            "journals": ids.journals,
            "sql": SqlHandlers(self._sql, self._threads, self._bodies, self.gate.check).sql,
            "metrics": self._show_metrics,
            "health": self._health.alive,
            "ready": self._health.ready,
            "openapi": self._describe,
            "docs": self._show_docs,
        }
        for operation in OPERATIONS:
            handler = handlers.get(operation.name)
            path = operation.route or operation.path
            route = WholeRoute(path, handler or _nothing, methods=[operation.method])
            if operation.name in _GET_ALONE and route.methods:
                route.methods.discard("HEAD")
            self._routes.append((route, operation, handler))
        if self._options.access_log is not None:
            self._access = AccessLog(self._options.access_log, self._clock)
        await self._threads.run(_warm_up)
        async with anyio.create_task_group():
            pass  # its parts are imported with the first one, which takes longer than a tail may
        await self.gate.refresh()
        await self._threads.run(self._check_guard)
        await self._threads.run(self._forwards.connect)
        self._console.start(tails)
        self._repeat()

    def _check_guard(self) -> None:
        """Stays closed if the store knows a token that the catalog lost; else updates the store."""
        context = self._home.context
        if read_tokens(context).is_closed:
            close_home(context)
        elif self.gate.is_open and is_closed_home(context):
            self.gate.stay_closed()

    def _take_usage(self) -> tuple[Mapping[str, int], dict[Read, int]]:
        return self.gate.take_uses(), self._usage.take_reads()

    def stop_waiting(self) -> None:
        """Ends long polls, tails and queries, so that a stop need not wait for them."""
        self._is_stopping = True
        self._sql.stop()
        if self._watch is not None:
            self._watch.stop()

    async def stop(self) -> None:
        """Flushes what is buffered and releases threads. Call it after the last request."""
        self.stop_waiting()
        for each in self._repeated:
            each.cancel()
        await asyncio.gather(*self._repeated, return_exceptions=True)
        loop = asyncio.get_running_loop()
        in_thread = functools.partial(loop.run_in_executor, None)

        async def close(each: Callable[[], list[TidelogError]]) -> None:
            for error in await in_thread(each):
                self._error_log.add(error)

        async def store_usage() -> None:
            with contained("usage", self._error_log.add):
                await in_thread(self._usage.store, *self._take_usage())

        # At once, as each of them may wait for a store or a catalog that does not answer.
        await asyncio.gather(
            in_thread(self._console.stop),
            close(self._topics.close),
            close(self._forwards.close),
            store_usage(),
        )
        await in_thread(self._threads.close)
        self.gate.close()
        if self._access is not None:
            await loop.run_in_executor(None, self._access.close)
        self._health.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise InternalError(f"server: was asked for `{scope['type']}`: it speaks HTTP alone")
        began_s = self._now_s()
        metrics = self.metrics
        metrics.in_flight += 1
        request_id = self.id_of(scope)
        old = scope["state"].get(OLD_CYCLE)
        send = self._deliveries.bound(scope, _with_headers(scope, send, request_id, old))
        name, status = "none", _GONE
        try:
            name, run, headers = self._find_counted(scope)
            if self._telemetry is None:
                status = await run(scope, receive, send, headers)
            else:
                with self._telemetry.request(name, scope["method"], headers) as span:
                    status = await run(scope, receive, send, headers)
                    span.set_attribute("http.response.status_code", status)
        except DisconnectedError:
            status = scope.get(REFUSED, _GONE)
        except asyncio.CancelledError:
            if not self._is_stopping or _BEGUN in scope:
                raise
            status = await self._fail(send, _cut_off(scope, name), request_id)
        except TidelogError as exc:
            status = await self._fail(send, exc, request_id)
        except Exception as exc:  # noqa: BLE001 - a bug of ours must not close the door
            bug = InternalError(f"{type(exc).__name__}: {exc}")
            status = await self._fail(send, bug, request_id)
        finally:
            metrics.in_flight -= 1
            took_s = self._now_s() - began_s
            metrics.answered(name, status, took_s)
            if self._access is not None:
                self._note(scope, name, status, took_s, request_id)

    def id_of(self, scope: Scope) -> bytes:
        """Returns the id of a request: behind a proxy the one that it gives, else our own."""
        found: bytes | None = scope.get(REQUEST_ID)
        if found is None:
            self._count += 1
            own = b"%s-%d" % (self._prefix, self._count)
            found = request_id_of(scope["headers"], self._options.behind_proxy, own)
            scope[REQUEST_ID] = found
        return found

    def note_refused(self, scope: Scope, status: int) -> None:
        """Counts and logs a request that its connection refuses."""
        self.metrics.answered("none", status, 0.0)
        if self._access is not None:
            self._note(scope, "none", status, 0.0, self.id_of(scope))

    def _note(self, scope: Scope, name: str, status: int, took_s: float, request_id: bytes) -> None:
        """Adds a request to the access log."""
        admission: Admission | None = scope.get(ADMISSION)
        token = None if admission is None or admission.token is None else admission.token.id
        fields = dict(scope["headers"]) if self._options.behind_proxy else {}
        if self._access is not None:
            self._access.note(
                id=request_id.decode(),
                client=self.gate.address(scope, fields),
                token=token,
                method=scope["method"],
                path=scope["path"],
                operation=name,
                status=status,
                ms=round(took_s * 1000, 3),
            )

    def _find_counted(self, scope: Scope) -> tuple[str, Run, dict[bytes, bytes]]:
        """Finds the operation of a request, and its headers by name.

        Like :meth:`_find`, but counts requests that it refuses by address. Raises ``TooManyError``.
        """
        try:
            return *self._find(scope), headers_of(scope["headers"])
        except TidelogError:
            self.gate.count_visit(scope, dict(scope["headers"]))
            raise

    def _find(self, scope: Scope) -> tuple[str, Run]:
        """Finds the operation of a request.

        Raises ``NotFoundError``, ``MethodError``, ``HeadError`` or ``InvalidError``.
        """
        if scope.get("state") and HEAD_TOO_LARGE in scope["state"]:
            raise HeadError(
                f"request: its URL and headers have more than {limits.HEAD_BYTES_MAX} bytes, or "
                f"more than {limits.HEADERS_MAX} headers: send less"
            )
        check_host(scope)
        check_path(scope)
        path: str = scope["path"]
        is_pixel = PIXEL_PATH.fullmatch(path) is not None
        if not is_pixel:
            check_query(scope)
        if Console.has(path):
            return "console", self._console.run
        if scope["method"] == "POST":
            if path.startswith("/topics/") and path.endswith("/events") and path.count("/") == 3:
                return APPEND.name, self._append
        elif scope["method"] == "GET" and is_pixel:
            return TRACK.name, self._pixels.track
        allowed: set[str] = set()
        for route, operation, handler in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL and handler is not None:
                scope.update(child)
                return operation.name, functools.partial(self._run, operation, handler)
            if match is not Match.NONE:
                allowed |= route.methods or set()
        if not allowed:
            raise NotFoundError(f"path `{path[:80]}`: not found: see /docs")
        allow = ", ".join(sorted(allowed))
        raise MethodError(f"path `{path[:80]}`: allows {allow}: use one of them", allow=allow)

    async def _append(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """``POST /topics/{topic}/events``"""
        topic = scope["path"][len("/topics/") : -len("/events")]
        admission = scope[ADMISSION] = await self.gate.admit(scope, headers, "append", topic)
        check_length(headers)
        check_conditions(headers)
        with self._bodies.buffer(admission.client) as buffer:
            body = await buffer.read(receive, headers)
            if is_encoded(headers):
                bytes_max = self._options.body_bytes_max
                body = await self._threads.run(inflate, headers, body, bytes_max)
                buffer.charge(len(body))
            self.gate.check(admission)  # the body may have taken long
            if self._forwards.get(topic) is not None:
                count = await self._forwards.append(topic, headers, body, buffer.charge, admission)
                answered = self._forwards.answer(topic, count)
            else:
                given = (headers, body, buffer.charge, admission)
                positions = await self._ingest.append(topic, *given)
                count, answered = len(positions), await self._ingest.answer(topic, positions)
            self.metrics.events_in += count
            self.metrics.bytes_in += len(body)
        await answer(send, 201, [_JSON_TYPE], answered)
        return 201

    async def _run(
        self,
        operation: Operation,
        handler: Handler,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
    ) -> int:
        """Runs the handler of any other operation."""
        request = Request(scope, receive)
        if operation.right is not None:
            token = request.query_params.get("token") if operation.name == "tail" else None
            topic = SOME_TOPIC if operation.some else scope["path_params"].get("topic")
            admission = await self.gate.admit(scope, headers, operation.right, topic, token)
            scope[ADMISSION] = admission
            scope[WHO] = admission.who
        elif operation.name not in _UNCOUNTED:
            self.gate.count_visit(scope, headers)
        if operation.method in ("PUT", "DELETE"):
            check_conditions(headers)
        response = await handler(request)
        if operation.right == "read":  # only now, as a topic that is not there is not read
            self.gate.check(admission)  # it may have taken long, as a query does
            what = "home" if topic is None or operation.some else f"topic {topic}"
            self._usage.read(scope[WHO], operation.name, what)
        await response(scope, receive, send)
        return response.status_code

    async def _fail(self, send: Send, error: TidelogError, request_id: bytes) -> int:
        status = status_of(error)
        if status >= 500:
            self._error_log.add(error, request_id.decode())
        return await answer_error(send, error)

    async def _show_metrics(self, request: Request) -> Response:
        """``GET /metrics``"""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _describe(self, request: Request) -> Response:
        """``GET /openapi.json``"""
        return Response(self._description(), media_type="application/json")

    async def _show_docs(self, request: Request) -> Response:
        """``GET /docs``"""
        body = await self._threads.run(self._docs)
        return Response(body, headers=PAGE_HEADERS, media_type="text/html")

    def _repeat(self) -> None:
        """Starts what is done again and again. None of it waits for another: each may take long."""
        jobs: list[tuple[str, Callable[[], float], Callable[[], Awaitable[None]]]] = [
            ("appends", lambda: 0.0, self._time_out),
            ("tokens", lambda: REFRESH_S, self.gate.refresh),  # those that are known stay so
            ("usage", lambda: USAGE_S, self._store_usage),  # of one minute is lost, at worst
        ]
        if self.refresh_certificate is not None:
            jobs.append(("certificate", lambda: REFRESH_S, self._refresh_certificate))
        self._repeated = [asyncio.create_task(self._run_every(*job)) for job in jobs]

    async def _run_every(
        self, what: str, period_s: Callable[[], float], run: Callable[[], Awaitable[None]]
    ) -> None:
        ran_s = self._now_s()
        while True:
            await asyncio.sleep(_TICK_S)
            if self._now_s() - ran_s >= period_s():
                ran_s = self._now_s()
                with contained(what, self._error_log.add):
                    await run()

    async def _time_out(self) -> None:
        for topic in self._topics.all():
            topic.time_out(limits.ANSWER_S)

    async def _store_usage(self) -> None:
        uses, reads = self._take_usage()
        try:
            await self._threads.run(self._usage.store, uses, reads)
        except TidelogError:
            self.gate.put_back_uses(uses)
            self._usage.put_back(reads)
            raise

    async def _refresh_certificate(self) -> None:
        if self.refresh_certificate is not None:
            # In a thread of its own; if it fails, the old one stays.
            await asyncio.get_running_loop().run_in_executor(None, self.refresh_certificate)

    def _buffered(self) -> list[tuple[str, int]]:
        size = self._home.context.log_settings.buffer_bytes
        topics = [(each.topic.name, size - each.producer.room) for each in self._topics.all()]
        return [*topics, *self._forwards.waiting()]


def _cut_off(scope: Scope, name: str) -> TidelogError:
    """Returns the error of a request that was not done when the server had to stop."""
    if scope["method"] in ("GET", "HEAD") and name != TRACK.name:
        return BusyError(f"{name}: was not done when the server stopped: ask again")
    return UnknownOutcomeError(f"{name}: was not done when the server stopped: read back")


def _with_headers(scope: Scope, send: Send, request_id: bytes, old: OldCycle | None) -> Send:
    """Adds the request's id to each answer, and forbids browsers to guess types or embed it.

    A client of HTTP/1.0 that asks to keep its connection learns whether it is kept, which needs an
    answer whose length is known.
    """

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope[_BEGUN] = True
            headers = list(message["headers"])
            names = {name for name, _ in headers}
            headers += [pair for pair in EVERY_ANSWER if pair[0] not in names]
            headers.append((b"x-request-id", request_id))
            if old is not None and b"connection" not in names:
                kept = old.keep_alive and b"content-length" in names
                headers.append((b"connection", b"keep-alive" if kept else b"close"))
            message = {**message, "headers": headers}
        await send(message)

    return send_more


def _warm_up() -> None:
    """Makes a first batch, for which Arrow loads large libraries; no request waits for them."""
    table = table_of([Event(b"", b"", "-", 0, "", (("", b""),))], 0)
    batch = with_position(one_batch(table), "", 0, 0)
    batch_lines(batch)


async def _nothing(request: Request) -> Response:
    """Takes the place of operations that need no router."""
    raise InternalError(f"path `{request.url.path}`: was routed")
