"""A lean HTTP client for sample traffic: one connection, one request at a time."""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

import httptools

__all__ = ["ClientConnection", "Endpoint"]


class Endpoint:
    """Where requests go."""

    def __init__(self, host: str, port: int, secure: bool) -> None:
        self.host = host
        self.port = port
        self._context = ssl.create_default_context() if secure else None

    async def connect(self) -> ClientConnection:
        """A connection. ``OSError`` where nobody listens."""
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
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self.closed = False

    async def ask(self, request: bytes) -> int:
        """The status of the whole answer. ``ConnectionError`` where none comes."""
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
        except httptools.HttpParserError as exc:
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
