"""TLS: accepts connections, with certificates that may change while the server runs.

Certificate files are read again when they change. A connection counts for its address from
the moment it is accepted, as one without TLS does: a client that never ends its handshake has its
share of them, for some seconds, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable

from tidelog.errors import InvalidError
from tidelog.server.http import limits
from tidelog.server.http.connection import Connection

__all__ = ["Certificate", "TlsListener"]

_ACCEPTED_AT_ONCE = 100  # before others have their turn
_PAUSE_S = 0.1  # after a failure to accept, such as no open file being left


class TlsListener:
    """Accepts connections on a listening socket. Create it in a running loop."""

    def __init__(
        self,
        listener: socket.socket,
        certificate: Certificate,
        counts: limits.ConnectionCounts,
        new_connection: Callable[[], Connection],
    ) -> None:
        self._listener = listener
        self._certificate = certificate
        self._counts = counts
        self._new_connection = new_connection
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stops accepting, and ends the handshakes that are under way."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits for the handshakes to end."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # the system has no room for it: try again, but not at once
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            self._enter(accepted, address[0])

    def _enter(self, accepted: socket.socket, address: str) -> None:
        connection = self._new_connection()
        beyond = self._counts.enter(address)
        is_counted = True

        def leave() -> None:  # it counts itself from now on, or is no more
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self._counts.leave(address)

        total = len(connection.connections) + len(self._handshakes)
        if beyond > limits.ADDRESS_LINGERING_MAX or total >= self._counts.most_lingering:
            leave()
            accepted.close()
            return
        accepted.setblocking(False)
        connection.before_made = leave
        patience_s = limits.LINGER_S if beyond else limits.HEAD_S
        task = self._loop.create_task(self._shake_hands(accepted, connection, patience_s))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        task.add_done_callback(lambda done: leave())

    async def _shake_hands(
        self, accepted: socket.socket, connection: Connection, patience_s: float
    ) -> None:
        with contextlib.suppress(OSError):  # the client left, or does not speak TLS
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._certificate.context,
                ssl_handshake_timeout=patience_s,
                ssl_shutdown_timeout=limits.LINGER_S,
            )


class Certificate:
    """A certificate and its key; connections that begin later have the newest one."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key
        self._seen = self._marks()
        self.context = self._load()

    def refresh(self) -> None:
        """Reads the files again if they have changed. After ``InvalidError`` the old one stays."""
        marks = self._marks()
        if marks == self._seen:
            return
        self.context = self._load()
        self._seen = marks

    def _load(self) -> ssl.SSLContext:
        """Returns a context of its own: a load that fails leaves a context without a key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as exc:
            raise InvalidError(
                f"serve: certificate `{self._cert}` with key `{self._key}`: {exc}: fix the files"
            ) from exc
        return context

    def _marks(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(path) for path in (self._cert, self._key)]
        except OSError as exc:
            raise InvalidError(
                f"serve: file `{exc.filename}`: {exc.strerror}: give a certificate and its key"
            ) from exc
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _no_password() -> str:
    raise ValueError("the key has a password")
