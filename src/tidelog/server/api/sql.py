"""``POST /sql``: a query of the topics that a token may read, in a process of its own.

Few queries run at once, one of each client, so that the rest of the server keeps its processors.
The query of a client that disconnects is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from tidelog.api.sql_process import EVERYTHING, SqlAccess, SqlLimits, SqlResult, run_apart
from tidelog.codec.event_json import json_problem
from tidelog.errors import InvalidError, TidelogError
from tidelog.home import Home
from tidelog.model.decoding import check_json_depth, decode_json
from tidelog.model.token import Token
from tidelog.server.http import limits
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import BusyError, DisconnectedError, MediaTypeError, encode
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.request import (
    TransferBudget,
    check_parameters,
    content_type,
    headers_of,
    inflate,
    is_encoded,
)

__all__ = ["QueryEnd", "SqlHandlers", "SqlRunner", "end_with_client"]

T = TypeVar("T")
_SMALL = 4_096  # bytes of a body that the loop itself parses
_LIMITS = SqlLimits(limits.SQL_S, limits.SQL_CPU_S, rows=limits.PAGE_EVENTS_MAX)


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    values: list[Any] | dict[str, Any] | None = None


class QueryEnd:
    """Ends one query, before or while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def note(self, child: subprocess.Popen[bytes]) -> None:
        """Notes the process of the query."""
        with self._lock:
            self._child = child
            if self._is_ended:
                child.kill()

    def end(self) -> None:
        """Kills the process, or prevents the query from beginning."""
        with self._lock:
            self._is_ended = True
            if self._child is not None:
                self._child.kill()  # does nothing to one that has ended


async def end_with_client(receive: Receive, end: QueryEnd, work: Awaitable[T]) -> T:
    """Returns what ``work`` returns.

    Ends the query and raises ``DisconnectedError`` if the client disconnects.
    """
    answer = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        end.end()
        with contextlib.suppress(TidelogError):
            await answer
        raise DisconnectedError
    finally:
        left.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class SqlRunner:
    """Runs the queries of all clients. Blocks, so call it in a thread."""

    def __init__(self, home: Home) -> None:
        self._config = home.config
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes] | None] = {}  # by client
        self._is_stopped = False

    def run(
        self,
        query: str,
        token: Token | None,
        client: str,
        end: QueryEnd,
        values: list[Any] | dict[str, Any] | None = None,
        bounds: SqlLimits = _LIMITS,
    ) -> SqlResult:
        """Returns the rows of a query that may see what a token may read; None: everything.

        ``BusyError`` if too many run, or one of the same client; ``InvalidError``.
        """
        with self._lock:
            if client in self._running or len(self._running) >= limits.SQL_AT_ONCE:
                which = "your last query" if client in self._running else "other queries"
                raise BusyError(f"sql: {which} still run: try again in a moment", retry_after_s=1)
            self._running[client] = None
        access = EVERYTHING if token is None else SqlAccess.of_token(token)

        def note(child: subprocess.Popen[bytes]) -> None:
            self._note(client, child)
            end.note(child)

        try:
            return run_apart(self._config, query, values, access, bounds, note)
        finally:
            with self._lock:
                del self._running[client]

    def _note(self, client: str, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running[client] = child
            if self._is_stopped:
                child.kill()

    def stop(self) -> None:
        """Ends all queries, and those that begin later."""
        with self._lock:
            self._is_stopped = True
            for child in self._running.values():
                if child is not None:
                    child.kill()


class SqlHandlers:
    """Answers ``POST /sql``."""

    def __init__(
        self,
        runner: SqlRunner,
        threads: ServerThreads,
        bodies: TransferBudget,
        check: Callable[[Admission], None],
    ) -> None:
        self._check = check  # whether what let a request in still does
        self._runner = runner
        self._threads = threads
        self._bodies = bodies

    async def sql(self, request: Request) -> Response:
        """``POST /sql``"""
        check_parameters(request, ())
        admission: Admission = request.scope[ADMISSION]
        headers = headers_of(request.scope["headers"])
        kind = content_type(headers)
        if kind != b"application/json":
            raise MediaTypeError(
                'body: is not JSON: send {"query": "select …"} as application/json'
            )
        with self._bodies.buffer(admission.client) as buffer:
            body = await buffer.read(request.receive, headers)
            if is_encoded(headers):
                body = await self._threads.run(inflate, headers, body, limits.SQL_BODY_BYTES_MAX)
        self._check(admission)  # the body may have taken long
        asked = _asked(body) if len(body) <= _SMALL else await self._threads.run(_asked, body)
        end = QueryEnd()
        work = self._threads.run(
            self._runner.run, asked.query, admission.token, admission.client, end, asked.values
        )
        found = await end_with_client(request.receive, end, work)
        return Response(
            _encoded(found), headers={"cache-control": "no-store"}, media_type="application/json"
        )


def _asked(body: bytes) -> _Query:
    if len(body) > limits.SQL_BODY_BYTES_MAX:
        raise InvalidError(f"body: has more than {limits.SQL_BODY_BYTES_MAX} bytes: give fewer")
    check_json_depth(body, "body")
    try:
        return decode_json(body, _Query)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidError(f'body: {json_problem(body, exc)}: send {{"query": "…"}}') from exc


def _encoded(found: SqlResult) -> bytes:
    """Returns the answer; rows are JSON already."""
    head = encode({"columns": found.columns, "is_whole": found.is_whole})
    return head[:-1] + b',"rows":[' + b",".join(found.lines) + b"]}"
