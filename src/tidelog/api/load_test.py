# ruff: noqa: PLC0415 - the server's libraries may not be there
"""Sample traffic at a given rate: pixels or single events, and how long each took.

With a rate, a request's time counts from when it was due, so a server that falls behind cannot hide
it by being asked later. Without one, each connection sends the next request as soon as it has the
answer to the last.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote, urlsplit

import msgspec

from tidelog.clock import Clock, SystemClock, system_random
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.topic import check_topic_name
from tidelog.plugins import needs_extra

__all__ = [
    "ClientConnection",
    "Endpoint",
    "Latencies",
    "LoadPlan",
    "LoadReport",
    "load_test",
    "run_load",
]

_GROWTH = math.log(1.02)  # of a latency from one bucket to the next
_LEAST_S = 1e-6
_RECONNECT_S = 0.1
_ANSWER_S = 60.0  # after which a request counts as failed


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, where, and for how long."""

    url: str  # of the server, or of a pixel or a topic's events
    seconds: float = 30.0
    rate: float = 0.0  # requests a second; 0: as fast as they are answered
    connections: int = 16
    pixel: bool = False
    topic: str | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.rate < 0 or self.connections < 1:
            raise InvalidError(
                f"load: {self.seconds:g} s, rate {self.rate:g}, {self.connections} connections: "
                "give more than that"
            )


@dataclass(slots=True)
class Latencies:
    """How long requests took, by buckets that are 2 % wide; so large runs need little memory."""

    buckets: Counter[int] = field(default_factory=Counter)
    most_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds the time of a request."""
        self.buckets[math.ceil(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _GROWTH)] += 1
        self.most_s = max(self.most_s, seconds)

    def quantile(self, share: float) -> float:
        """Returns a time in which this share of requests was answered; 0 without any."""
        left = share * self.buckets.total()
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if left <= 0:
                return min(_LEAST_S * math.exp(bucket * _GROWTH), self.most_s)
        return 0.0


@dataclass(slots=True)
class LoadReport:
    """The results of a run."""

    seconds: float = 0.0
    answered: int = 0  # well
    errors: Counter[str] = field(default_factory=Counter)  # by status, or what went wrong
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def per_s(self) -> float:
        """Requests a second that were answered well."""
        return self.answered / self.seconds if self.seconds else 0.0


def load_test(
    plan: LoadPlan, on_second: Callable[[LoadReport], None] = lambda report: None
) -> LoadReport:
    """Sends sample traffic to a server and returns how it was answered.

    The events are stored, so use a separate topic. ``on_second`` gets the report so far, once a
    second. Raises ``UnavailableError`` if no server listens.

    >>> tidelog.load_test(tidelog.LoadPlan("http://127.0.0.1:1", topic="trial", seconds=5))
    Traceback (most recent call last):
    tidelog.errors.UnavailableError: load: `http://127.0.0.1:1`: ...
    """
    return run_load(plan, SystemClock(), system_random(), on_second)


def run_load(
    plan: LoadPlan,
    clock: Clock,
    source: random.Random,
    on_second: Callable[[LoadReport], None] = lambda report: None,
) -> LoadReport:
    """Does the same, by another clock and with other randomness."""
    with needs_extra("the server", "uvloop", "serve"):
        import uvloop
    endpoint, requests = _requests(plan, source)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Load(plan, endpoint, requests, clock).run(on_second))


class _Load:
    """One run."""

    def __init__(
        self, plan: LoadPlan, endpoint: Endpoint, requests: list[bytes], clock: Clock
    ) -> None:
        self._plan = plan
        self._endpoint = endpoint
        self._requests = requests
        self._now_s = clock.monotonic_s
        self._numbers = itertools.count()
        self._report = LoadReport()
        self._began_s = 0.0

    async def run(self, on_second: Callable[[LoadReport], None]) -> LoadReport:
        try:
            first = await self._endpoint.connect()
        except OSError as exc:
            raise UnavailableError(f"load: `{self._plan.url}`: {exc}: start the server") from exc
        self._began_s = self._now_s()
        workers = [asyncio.create_task(self._work(first))]
        workers += [asyncio.create_task(self._work()) for _ in range(1, self._plan.connections)]
        telling = asyncio.create_task(self._tell(on_second))
        await asyncio.gather(*workers)
        telling.cancel()
        report = self._report
        report.seconds = self._now_s() - self._began_s
        missing = int(self._plan.rate * self._plan.seconds) - report.answered
        missing -= report.errors.total()
        if missing > 0:
            report.errors["not sent in time"] = missing
        return report

    async def _work(self, connection: ClientConnection | None = None) -> None:
        """Runs one connection, and opens it again when it breaks."""
        end_s = self._began_s + self._plan.seconds
        rate = self._plan.rate
        while (now_s := self._now_s()) < end_s:
            number = next(self._numbers)
            due_s = self._began_s + number / rate if rate else now_s
            if due_s >= end_s:
                break
            if due_s > now_s:
                await asyncio.sleep(due_s - now_s)
            try:
                if connection is None or connection.closed:
                    connection = await self._endpoint.connect()
                async with asyncio.timeout(_ANSWER_S):
                    status = await connection.ask(self._requests[number % len(self._requests)])
            except (OSError, TimeoutError) as exc:
                self._report.errors[type(exc).__name__] += 1
                if connection is not None:
                    connection.close()
                await asyncio.sleep(_RECONNECT_S)
                continue
            if status < 300:
                self._report.answered += 1
                self._report.latencies.add(self._now_s() - due_s)
            else:
                self._report.errors[str(status)] += 1
        if connection is not None:
            connection.close()

    async def _tell(self, on_second: Callable[[LoadReport], None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._report.seconds = self._now_s() - self._began_s
            on_second(self._report)


def _requests(plan: LoadPlan, source: random.Random) -> tuple[Endpoint, list[bytes]]:
    """Returns where to send, and a thousand different requests. Raises ``InvalidError``."""
    try:
        parts = urlsplit(plan.url)
    except ValueError as exc:
        raise InvalidError(f"load: URL `{plan.url}`: {exc}: give http://HOST:PORT") from exc
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise InvalidError(f"load: URL `{plan.url}`: give http://HOST:PORT")
    if parts.query or parts.fragment or parts.username:
        raise InvalidError(f"load: URL `{plan.url}`: give it without query, user and fragment")
    path, pixel = _path(plan, parts.path)
    token = f"authorization: Bearer {plan.token}\r\n" if plan.token else ""
    if not token.removesuffix("\r\n").isprintable() or not token.isascii():
        raise InvalidError("load: the token holds other than printable characters: look at it")
    host = f"host: {parts.netloc}\r\n{token}user-agent: tidelog-load\r\n"
    requests = []
    for _ in range(1_000):
        member, post = source.randrange(256), source.randrange(256)
        if pixel:
            query = f"type=Claps&member={member:02x}&post={post:02x}"
            requests.append(f"GET {path}{query} HTTP/1.1\r\n{host}\r\n".encode())
            continue
        value = {"MessageType": "Claps", "MemberId": f"{member:02x}", "PostId": f"{post:02x}"}
        text = msgspec.json.encode(value).decode()
        body = msgspec.json.encode({"key": f"Claps-{member:02x}-{post:02x}", "value": text})
        head = f"{host}content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        requests.append(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return Endpoint(parts.hostname, port, parts.scheme == "https"), requests


def _path(plan: LoadPlan, path: str) -> tuple[str, bool]:
    """Returns the path of a request, for a pixel with a begun query; and whether it is a pixel."""
    if path not in ("", "/"):
        if not path.isascii() or not path.isprintable() or " " in path:
            raise InvalidError(f"load: path `{path[:80]}`: give it as URLs have it")
        pixel = path.endswith(".gif")
        if plan.pixel and not pixel:
            raise InvalidError(f"load: path `{path[:80]}`: is not a pixel: leave out --pixel")
        topic = f"topic={quote(plan.topic, safe='')}&" if plan.topic and pixel else ""
        return (f"{path}?{topic}" if pixel else path), pixel
    if plan.topic is None:
        raise InvalidError("load: names no topic: give --topic")
    check_topic_name(plan.topic)
    if plan.pixel:
        return f"/track.gif?topic={plan.topic}&", True
    return f"/topics/{plan.topic}/events", False


class Endpoint:
    """Where requests go."""

    def __init__(self, host: str, port: int, secure: bool) -> None:
        self.host = host
        self.port = port
        self._context = ssl.create_default_context() if secure else None

    async def connect(self) -> ClientConnection:
        """Opens a connection. Raises ``OSError`` if no server listens."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            ClientConnection, self.host, self.port, ssl=self._context
        )
        return connection


class ClientConnection(asyncio.Protocol):
    """Sends a request, and gives the status of its answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        import httptools

        self._parser = httptools.HttpResponseParser(self)
        self._malformed = httptools.HttpParserError
        self._status = 0
        self.closed = False

    async def ask(self, request: bytes) -> int:
        """Reads a whole answer and returns its status. Raises ``ConnectionError`` if none comes."""
        if self._transport is None or self.closed:
            raise ConnectionError("closed before the request was sent")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Whatever is under way."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # The protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail("closed before the answer was complete")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._malformed as exc:
            self._fail(f"answered with something else than HTTP: {exc}")
            self.close()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done() and self._status >= 200:
            self._answer.set_result(self._status)

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
