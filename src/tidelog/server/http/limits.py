"""What a client may take: bytes, requests a second, and time. Nothing here waits."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping

from starlette.types import Receive

from tidelog.clock import Clock
from tidelog.server.http.errors import BusyError, DisconnectedError, TooLargeError

__all__ = [
    "ANSWER_S",
    "BODY_S",
    "CONNECTIONS_MAX",
    "HEADERS_MAX",
    "HEAD_BYTES_MAX",
    "HEAD_S",
    "IDLE_S",
    "LAST_S",
    "LINGERING_MAX",
    "LINGER_S",
    "PAGE_BYTES_MAX",
    "PAGE_EVENTS_MAX",
    "PARAMETERS_MAX",
    "PARTITIONS_TAILED_MAX",
    "PRODUCERS_MAX",
    "STOP_S",
    "TAILS_MAX",
    "WAIT_S_MAX",
    "WRITE_S",
    "Bodies",
    "Rates",
    "client_of",
]

# Of a connection.
CONNECTIONS_MAX = 2_000  # at once; more are answered with 503 and closed
HEAD_BYTES_MAX = 32_768  # a request's line and headers
HEADERS_MAX = 100
HEAD_S = 10.0  # in which the head of a request must be there, from its first byte
BODY_S = 30.0  # in which its body must be there, from the end of its head
LAST_S = 2.0  # in which it must be there once the server stops
WRITE_S = 30.0  # in which a client must take what was written for it
IDLE_S = 60.0  # between two requests
LINGER_S = 2.0  # in which who was refused should have ended
LINGERING_MAX = 200  # beyond CONNECTIONS_MAX; more than that are closed at once

# Of a request.
ANSWER_S = 60.0  # in which an append is durable, or said to have an unknown outcome
PARAMETERS_MAX = 200  # of a query
PAGE_EVENTS_MAX = 10_000  # in one page
PAGE_BYTES_MAX = 4 << 20  # of a page, beyond which it ends early
WAIT_S_MAX = 30.0  # of a long poll
PARTITIONS_TAILED_MAX = 100  # by one tail, whose event ids name them all
TAILS_MAX = 500  # at once, long polls included

# Of the server.
PRODUCERS_MAX = 100  # topics that are open for writing at once; each has a few threads
STOP_S = 30.0  # in which requests under way may end after a signal

_BODIES_BYTES = 256 << 20  # that are being received, of all requests together
_SMALL_BYTES = 65_536  # bodies up to this size do not count
_CLIENTS_MAX = 20_000  # whose rates are known at once
_BURST_S = 2.0  # a client may send what it is allowed in this time at once


class Bodies:
    """Reads bodies, up to a size each, and up to a size all together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._held = 0

    async def read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        """The whole body. ``TooLargeError``, ``BusyError``, ``DisconnectedError``."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 15 or int(length) > self.bytes_max):
            raise self._too_large()
        message = await receive()
        if message["type"] != "http.request":
            raise DisconnectedError
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > self.bytes_max:
                raise self._too_large()
            return body
        return await self._read_on(receive, body, int(length) if length.isdigit() else None)

    async def _read_on(self, receive: Receive, first: bytes, length: int | None) -> bytes:
        """A body in pieces; it is counted as large as it may become."""
        counted = self.bytes_max if length is None else length
        if counted <= _SMALL_BYTES:
            counted = 0
        if counted and self._held + counted > max(_BODIES_BYTES, self.bytes_max):
            raise BusyError("server: too many large bodies at once: try again")
        self._held += counted
        try:
            pieces, size, more = [first], len(first), True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise DisconnectedError
                piece = message.get("body", b"")
                pieces.append(piece)
                size += len(piece)
                if size > self.bytes_max:
                    raise self._too_large()
                more = message.get("more_body", False)
            return b"".join(pieces)
        finally:
            self._held -= counted

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"body: has more than {self.bytes_max} bytes: send it in parts, "
            "or let the operator raise --body-max",
            bytes_max=self.bytes_max,
        )


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
        """0 where a client may send now, else in how many seconds it may."""
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
    """Whose requests are counted together: an address, or the network of one of IPv6."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
