"""Answers on their way: one bound on the bytes that clients have not taken yet.

A large answer is given to the connection piece by piece, as the client takes it, and counts until
the last one. All answers together have one bound, and those of one client a half of it. An answer
that does not fit is refused with 503 before it begins; but first the largest one whose client is
slow loses its place, and its connection is closed. Small answers, which are most, are not counted.
"""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from tidelog.clock import Clock
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import BusyError, DisconnectedError, SlowError
from tidelog.server.http.limits import client_of
from tidelog.server.http.request import PIECE_BYTES, Bodies

__all__ = ["Deliveries"]


class Deliveries:
    """The answers of one server that are on their way."""

    def __init__(self, clock: Clock) -> None:
        self._bodies = Bodies(0, clock)

    def bound(self, scope: Scope, send: Send) -> Send:
        """Return a way to send an answer that is within the bound."""
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
            with self._bodies.place(_client(scope)) as place:
                try:
                    place.charge(len(message["body"]))
                    if start is not None:
                        began, start = start, None
                        await send(began)
                    await self._bodies.deliver(place, send, message)
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
