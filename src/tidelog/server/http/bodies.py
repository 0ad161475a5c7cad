"""Bodies of requests, and the one bound on the bytes that requests hold in the process.

A request has a place from the first byte of its body until its events are stored. It counts the
bytes that have come, and then what its events take in memory. All places together have one bound,
and those of one client a half of it; a client that is alone is always let in. When an upload does
not fit, the largest one that is slow loses its place: clients that send nothing, or bytes one by
one, keep no other out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from starlette.types import Receive

from tidelog.clock import Clock
from tidelog.server.http.errors import (
    BusyError,
    DisconnectedError,
    SlowError,
    TooLargeError,
)

__all__ = ["BODIES_BYTES_MAX", "EVENT_BYTES", "Bodies", "Place"]

BODIES_BYTES_MAX = 256 << 20  # of all requests together, until their events are stored
EVENT_BYTES = 600  # of an event in memory, beside its own bytes: what small events really cost
_WINDOW_S = 1.0  # over which the speed of an upload is measured
_SLOW_BYTES_S = 65_536  # an upload below this speed may lose its place


class Bodies:
    """Reads bodies, up to a size each, and up to a size all together."""

    def __init__(self, bytes_max: int, clock: Clock, total_max: int | None = None) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._total_max = total_max
        self._now_s = clock.monotonic_s
        self._clients: dict[str, int] = {}  # bytes by client
        self._uploads: set[Place] = set()  # whose bodies are not complete

    def place(self, client: str) -> Place:
        """A place for one request; used as a context, it is free again in the end."""
        return Place(self, client)

    def take(self, place: Place, size: int) -> None:
        """Count more bytes for a place. ``BusyError``."""
        total_max = self._total_max or BODIES_BYTES_MAX
        while self.held - place.held and (
            self.held + size > total_max
            or (
                self._clients.get(place.client, 0) > place.held
                and self._clients[place.client] + size > total_max // 2
            )
        ):
            slow = self._slowest(place)
            if slow is None:
                raise BusyError("server: holds as many bytes as it may: try again", retry_after_s=1)
            slow.lose()
        self.held += size
        place.held += size
        self._clients[place.client] = self._clients.get(place.client, 0) + size

    def free(self, place: Place) -> None:
        """Count the bytes of a place no more."""
        size, place.held = place.held, 0
        self.held -= size
        left = self._clients.get(place.client, 0) - size
        if left > 0:
            self._clients[place.client] = left
        else:
            self._clients.pop(place.client, None)

    async def receive(
        self, place: Place, receive: Receive, headers: Mapping[bytes, bytes]
    ) -> bytes:
        """The whole body.

        ``TooLargeError``, ``BusyError``, ``SlowError``, ``DisconnectedError``.
        """
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
            self.take(place, len(body))
            return body
        return await self._receive_on(place, receive, body)

    async def _receive_on(self, place: Place, receive: Receive, first: bytes) -> bytes:
        """A body in pieces; a place that is lost meanwhile cancels its task."""
        place.begin(asyncio.current_task(), self._now_s())
        self._uploads.add(place)
        try:
            pieces, piece, more = [first], first, True
            while True:
                self.take(place, len(piece))
                place.note(self._now_s())
                if place.held > self.bytes_max:
                    raise self._too_large()
                if not more:
                    return b"".join(pieces)
                message = await receive()
                if message["type"] != "http.request":
                    raise DisconnectedError
                piece = message.get("body", b"")
                pieces.append(piece)
                more = message.get("more_body", False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not place.is_lost or task is None:
                raise
            task.uncancel()
            raise SlowError(
                "request: its body came too slowly while others waited: send it again, faster"
            ) from None
        finally:
            self._uploads.discard(place)

    def _slowest(self, asking: Place) -> Place | None:
        """The largest upload that is slow, except the one that asks."""
        now_s = self._now_s()
        slow = [each for each in self._uploads if each is not asking and each.is_slow(now_s)]
        return max(slow, key=lambda each: each.held, default=None)

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"body: has more than {self.bytes_max} bytes: send it in parts, "
            "or let the operator raise --body-max",
            bytes_max=self.bytes_max,
        )


class Place:
    """What one request holds."""

    __slots__ = ("_bodies", "_bytes_s", "_seen", "_since_s", "_task", "client", "held", "is_lost")

    def __init__(self, bodies: Bodies, client: str) -> None:
        self.client = client
        self.held = 0
        self.is_lost = False
        self._bodies = bodies
        self._task: asyncio.Task[object] | None = None
        self._since_s = 0.0  # when the window began in which its speed is measured
        self._seen = 0  # bytes, when that began
        self._bytes_s = float("inf")  # speed in the window before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bodies.free(self)

    async def read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        """The whole body; see :meth:`Bodies.receive` for its errors."""
        return await self._bodies.receive(self, receive, headers)

    def charge(self, size: int) -> None:
        """Count what a body takes beside its own bytes. ``BusyError``."""
        self._bodies.take(self, size)

    def begin(self, task: asyncio.Task[object] | None, now_s: float) -> None:
        """Measure the speed from now on."""
        self._task, self._since_s = task, now_s

    def note(self, now_s: float) -> None:
        """Some bytes have come."""
        if now_s - self._since_s >= _WINDOW_S:
            self._bytes_s = (self.held - self._seen) / (now_s - self._since_s)
            self._since_s, self._seen = now_s, self.held

    def is_slow(self, now_s: float) -> bool:
        """Whether it sent little in the window before, or nothing for two."""
        return self._bytes_s < _SLOW_BYTES_S or now_s - self._since_s > 2 * _WINDOW_S

    def lose(self) -> None:
        """Free its bytes, and end its request."""
        self.is_lost = True
        self._bodies._uploads.discard(self)
        self._bodies.free(self)
        if self._task is not None:
            self._task.cancel()
