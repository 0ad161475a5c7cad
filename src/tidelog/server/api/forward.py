"""``serve --forward NAME=URL``: events of this name go to Kafka or Kinesis, not into a topic.

Requests, tokens and limits are those of topics. A success response means that the target has
acknowledged the events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, wait

from tidelog.connectors.forward import Forwarder, open_forwarder
from tidelog.errors import (
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    contained,
)
from tidelog.home import Home
from tidelog.model.event import Event
from tidelog.server.api.ingest import IDEMPOTENCY_KEY, IF_ABSENT, Headers, Ingest
from tidelog.server.http import limits
from tidelog.server.http.auth import Admission
from tidelog.server.http.errors import encode
from tidelog.server.options import ServeOptions

__all__ = ["Forwards"]

_OF_TOPICS = (IDEMPOTENCY_KEY, IF_ABSENT)


class Forwards:
    """The names whose events go elsewhere."""

    def __init__(
        self,
        home: Home,
        options: ServeOptions,
        ingest: Ingest,
        on_error: Callable[[TidelogError], None],
    ) -> None:
        self._home = home
        self._ingest = ingest
        self._on_error = on_error  # of events that no request waits for
        self._open = {
            name: open_forwarder(url, environ=home.context.environ)
            for name, url in options.forwards.items()
        }

    def connect(self) -> None:
        """Connects to all targets. Raises if one does not exist, or a topic has its name.

        Targets are reached side by side. One that does not answer soon does not delay the others,
        nor the topics of this server: requests for it wait, or fail.
        """
        for name in self._open:
            try:
                self._home.topic(name)
            except NotFoundError:
                continue
            raise InvalidError(f"serve: forward `{name}`: a topic has this name: give another")
        done, _ = wait([each.connect_soon() for each in self._open.values()], limits.CONNECT_S)
        for each in done:
            with contextlib.suppress(UnavailableError):  # the first request tries it again
                each.result()

    def get(self, name: str) -> Forwarder | None:
        """Returns the forwarder of a name; None for topics."""
        return self._open.get(name)

    def waiting(self) -> list[tuple[str, int]]:
        """Returns the bytes that are on their way, by name."""
        return [(name, each.waiting_bytes) for name, each in self._open.items()]

    async def append(
        self,
        name: str,
        headers: Headers,
        body: bytes,
        charge: Callable[[int], None],
        admission: Admission,
    ) -> int:
        """Forwards the events of a body. Returns how many there were."""
        for each in _OF_TOPICS:
            if each.lower().encode() in headers:
                raise InvalidError(
                    f"header {each}: is for topics, and `{name}` is forwarded: leave it out"
                )
        forwarder = self._open[name]
        events = await self._ingest.events_of(headers, body, charge)
        call = await self._ingest.with_events(events, admission, forwarder.send_soon)
        return await self._acknowledged(forwarder, call)

    async def send(self, forwarder: Forwarder, event: Event) -> None:
        """Waits until the target has acknowledged an event."""
        await self._acknowledged(forwarder, forwarder.send_soon([event]))

    async def _acknowledged(self, forwarder: Forwarder, call: Future[int]) -> int:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), limits.FORWARD_S)
        except TimeoutError:
            raise forwarder.late_error(call, limits.FORWARD_S) from None

    def send_unconfirmed(self, forwarder: Forwarder, event: Event) -> None:
        """Sends an event that no request waits for. Reports an error to the server's operator."""
        forwarder.send_soon([event]).add_done_callback(self._report)

    def _report(self, call: Future[int]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, TidelogError):
            self._on_error(error)

    def answer(self, name: str, events: int) -> bytes:
        """Returns the body of a success."""
        return encode({"topic": name, "positions": [], "forwarded": events})

    def close(self) -> list[TidelogError]:
        """Sends what waits, and closes. Returns the errors of targets that failed."""
        errors: list[TidelogError] = []
        now_s = self._home.context.clock.monotonic_s
        until_s = now_s() + limits.FORWARD_S  # for all of them together
        for each in self._open.values():
            with contained(f"forward to `{each.url}`", errors.append):
                each.close(max(0.0, until_s - now_s()))
        return errors
