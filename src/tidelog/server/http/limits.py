"""Limits of a client: bytes, requests a second, and time; and threads for calls that block.

No limit waits. The catalog and the store are called in threads, away from the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import resource
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from tidelog.clock import Clock
from tidelog.errors import InvalidError, TidelogError

__all__ = [
    "ADDRESS_LINGERING_MAX",
    "ANSWER_S",
    "BODY_S",
    "CLIENT",
    "CLIENT_SHARE",
    "CONNECTIONS_LEAST",
    "CONNECTIONS_MAX",
    "CONNECT_S",
    "FILES_KEPT",
    "FORWARD_S",
    "HEADERS_MAX",
    "HEAD_BYTES_MAX",
    "HEAD_S",
    "IDLE_S",
    "LAST_S",
    "LINGERING_MAX",
    "LINGER_S",
    "PAGE_EVENTS_MAX",
    "PARAMETERS_MAX",
    "PARTITIONS_TAILED_MAX",
    "PRODUCERS_MAX",
    "RATE",
    "SQL_AT_ONCE",
    "SQL_BODY_BYTES_MAX",
    "SQL_CPU_S",
    "SQL_S",
    "STOP_S",
    "TAILS_MAX",
    "WAIT_S_MAX",
    "WRITE_S",
    "ConnectionCounts",
    "Rates",
    "ServerThreads",
    "client_of",
    "raise_files_max",
]

# Of a connection.
CONNECTIONS_MAX = 2_000  # at once; of more, only health checks are answered
CONNECTIONS_LEAST = 64  # with fewer a server does not start
CLIENT_SHARE = 4  # one client has a quarter of all connections at most, and of all tails
HEAD_BYTES_MAX = 32_768  # a request's line and headers
HEADERS_MAX = 100
HEAD_S = 10.0  # in which the head of a request must be there, from its first byte
BODY_S = 30.0  # in which its body must be there, from the end of its head
LAST_S = 2.0  # in which it must be there once the server stops
WRITE_S = 30.0  # in which a client must take what was written for it
IDLE_S = 60.0  # between two requests
LINGER_S = 2.0  # in which who was refused should have ended
ADDRESS_LINGERING_MAX = 16  # of one address beyond its share, for its health checks
LINGERING_MAX = 200  # beyond CONNECTIONS_MAX, for health checks; more are closed at once
FILES_KEPT = 96  # open files that are not connections: the store, the catalog, threads

RATE = 1_000.0  # requests a second of one token, or of an address without one, unless given

# Of a request.
FORWARD_S = 10.0  # in which the target of a forward acknowledges events
ANSWER_S = 60.0  # in which an append is durable, or said to have an unknown outcome
PARAMETERS_MAX = 200  # of a query
PAGE_EVENTS_MAX = 10_000  # in one page
WAIT_S_MAX = 30.0  # of a long poll
PARTITIONS_TAILED_MAX = 100  # by one tail, whose event ids name them all
TAILS_MAX = 500  # at once, long polls included
SQL_S = 30.0  # of one query, by the clock
SQL_CPU_S = 20.0  # of one query, of all its threads: a busy machine does not end a short query
SQL_AT_ONCE = 2  # queries; each is a process with up to two threads
SQL_BODY_BYTES_MAX = 1 << 20  # a query and its values

# Of the server.
PRODUCERS_MAX = 100  # topics that are open for writing at once; each has a few threads
CONNECT_S = 5.0  # in which a start waits for the targets of all forwards
STOP_S = 30.0  # in which requests under way may end after a signal

_CLIENTS_MAX = 20_000  # whose rates are known at once
_BURST_S = 2.0  # a client may send what it is allowed in this time at once


class ConnectionCounts:
    """How many connections the process may have, and how many each address has.

    Behind a proxy all come from one address, and only the total counts.
    """

    def __init__(self, files_max: int, per_address: bool) -> None:
        room = files_max - FILES_KEPT
        if room < CONNECTIONS_LEAST:
            raise InvalidError(
                f"serve: {files_max} open files are allowed (`ulimit -n`): allow "
                f"{FILES_KEPT + CONNECTIONS_LEAST} or more"
            )
        self._room = room
        self._per_address = per_address
        self._counts: dict[str, int] = {}

    @property
    def most(self) -> int:
        """Returns the most connections; beyond that only health checks are answered."""
        return min(CONNECTIONS_MAX, self._room * 3 // 4)

    @property
    def most_lingering(self) -> int:
        """Returns the same, including connections that wait for a health check or to be closed."""
        return self.most + min(LINGERING_MAX, self._room // 4)

    def enter(self, address: str) -> int:
        """Counts a connection. Returns how many its address has beyond its share."""
        client = client_of(address)
        self._counts[client] = self._counts.get(client, 0) + 1
        if not self._per_address:
            return 0
        return max(0, self._counts[client] - max(1, self.most // CLIENT_SHARE))

    def leave(self, address: str) -> None:
        """Counts a connection no longer, since it has ended."""
        client = client_of(address)
        left = self._counts.get(client, 0) - 1
        if left > 0:
            self._counts[client] = left
        else:
            self._counts.pop(client, None)


def raise_files_max() -> int:
    """Raises the limit of open files as far as the system allows. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX * 2 + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # what is allowed now must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft


class Rates:
    """How many requests a second each client may send; 0 for as many as it likes.

    Each client has one number, the time at which all that it has sent would have been due. What is
    known of clients is bounded: those that have been silent longest are forgotten.
    """

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._gap_s = 1.0 / per_s if per_s else 0.0
        self._now_s = clock.monotonic_s
        self._due_s: dict[str, float] = {}

    def take(self, client: str) -> int:
        """Returns 0 if a client may send now, else in how many seconds it may."""
        if not self._gap_s:
            return 0
        now_s = self._now_s()
        due_s = self._due_s.pop(client, now_s)
        early_s = due_s - now_s - max(_BURST_S - self._gap_s, 0.0)
        if early_s > 0:
            self._due_s[client] = due_s
            return math.ceil(early_s)
        if len(self._due_s) >= _CLIENTS_MAX:
            del self._due_s[next(iter(self._due_s))]
        self._due_s[client] = max(due_s, now_s) + self._gap_s
        return 0


def client_of(address: str) -> str:
    """Returns whose requests are counted together: an IPv4 address, or a network of IPv6."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))


P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 16
_LARGE_THREADS = 2  # large bodies take turns: each of them takes a processor for a while


CLIENT: ContextVar[str] = ContextVar("tidelog.client", default="")
"""Whose request the present task answers."""


class _Turns:
    """Decides who gets the next free thread: clients take turns, however much each wants."""

    def __init__(self, threads: int) -> None:
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, in turn

    async def enter(self) -> None:
        """Waits for a thread. Call :meth:`leave` afterwards."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(CLIENT.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was given a thread at the same moment
            raise

    def leave(self) -> None:
        """Gives the thread to the client whose turn it is."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class ServerThreads:
    """A pool of threads for calls that block, which the event loop can await."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "tidelog-serve")
        self._turns = _Turns(_THREADS)
        self.large = ThreadPoolExecutor(_LARGE_THREADS, "tidelog-large")

    async def run_large(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call that keeps a processor busy, in threads that no other requests wait for."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.large, lambda: _done(call, *args, **kwargs))

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call in a thread. If the caller is cancelled, the call still runs to its end."""
        loop = asyncio.get_running_loop()
        await self._turns.enter()
        try:
            done = loop.run_in_executor(self.pool, lambda: _done(call, *args, **kwargs))
        except BaseException:
            self._turns.leave()
            raise
        done.add_done_callback(lambda _: self._turns.leave())
        return await done

    def close(self) -> None:
        """Closes the pools after running calls have ended; drops calls that have not begun."""
        self.large.shutdown(wait=True, cancel_futures=True)
        self.pool.shutdown(wait=True, cancel_futures=True)


def _done(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of a call. Drops the frames of an error, which may hold a whole body."""
    try:
        return call(*args, **kwargs)
    except TidelogError as exc:
        raise exc.with_traceback(None)  # noqa: B904 - it keeps its own cause
