"""Runs a server: listens, serves until a signal, and stops without losing acknowledged events.

1. listen on a socket, so that an address in use is an error before anything else happens; clients
   wait until step 3
2. read the tokens; without any, listen only on loopback, and behind no proxy
3. serve requests until SIGTERM or SIGINT
4. close the socket, end long polls and tails, and answer the requests under way
5. flush the buffers of producers (pixels with ``ack=0``), and return from ``serve``

A second signal ends the process at once, like a crash. Every acknowledged event is durable even
then, except those pixels.

**TLS.** Certificate files are read again when they change. A connection counts for its address from
the moment it is accepted, as one without TLS does: a client that never ends its handshake has its
share of them, for some seconds, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
import uvloop

from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.home import Home
from tidelog.local_files import locked_folder
from tidelog.server.app import ServerApp
from tidelog.server.http import limits
from tidelog.server.http.connection import Connection
from tidelog.server.options import ServeOptions

__all__ = [
    "Certificate",
    "TlsListener",
    "serve",
]

_BACKLOG = 2048  # connections that the system keeps until we take them
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SOCKET_MODE = 0o660  # a proxy that is in the group may connect
_PROBE_S = 5.0  # in which a process that listens on a unix socket accepts


def serve(
    home: Home,
    options: ServeOptions,
    on_listening: Callable[[str, bool], None],
    stop: threading.Event | None = None,
) -> None:
    """Serves a home until a signal comes, or until ``stop`` is set from another thread.

    ``on_listening`` is given the server's URL, and whether it is open to all on this machine.
    Raises ``InvalidError`` if it would listen elsewhere without tokens, and ``UnavailableError`` if
    the address is in use.
    """
    app = ServerApp(home, options)
    certificate = None
    if options.tls_cert is not None and options.tls_key is not None:
        certificate = Certificate(options.tls_cert, options.tls_key)
        app.refresh_certificate = certificate.refresh
    with _bound(options) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        scheme = "http" if certificate is None else "https"
        started = functools.partial(_tell, on_listening, listener, scheme, app)
        runner.run(_serve(app, options, listener, certificate, started, stop))


async def _serve(
    app: ServerApp,
    options: ServeOptions,
    listener: socket.socket,
    certificate: Certificate | None,
    on_started: Callable[[], None],
    stop: threading.Event | None,
) -> None:
    try:
        await app.start()
        if not options.may_be_open and not app.gate.has_tokens:
            where = "the proxy" if options.behind_proxy else f"`{options.host}`"
            raise InvalidError(
                f"serve: {where} can be reached from elsewhere, and the home has no tokens: create "
                "one with `tidelog token create`, or listen on 127.0.0.1 without --behind-proxy"
            )
        counts = limits.ConnectionCounts(limits.raise_files_max(), not options.behind_proxy)
        server = _Server(app, counts, certificate, stop, on_started)
        await server.serve(sockets=[listener])
    finally:
        await app.stop()


def _tell(
    on_listening: Callable[[str, bool], None],
    listener: socket.socket,
    scheme: str,
    app: ServerApp,
) -> None:
    on_listening(_url(listener, scheme), app.gate.is_open)


class _Server(uvicorn.Server):
    """uvicorn's server, with its signals and its stop as we promise them."""

    def __init__(
        self,
        app: ServerApp,
        counts: limits.ConnectionCounts,
        certificate: Certificate | None,
        stop: threading.Event | None,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=cast(
                    "type[asyncio.Protocol]",
                    functools.partial(Connection, counts, app),
                ),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=int(limits.IDLE_S),
                timeout_graceful_shutdown=int(limits.STOP_S),
            )
        )
        self._app = app
        self._counts = counts
        self._certificate = certificate
        self._stop = stop
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        certificate = self._certificate
        await super().startup(sockets if certificate is None else [])
        if certificate is not None:
            for each in sockets or ():
                each.listen(_BACKLOG)
                listener = TlsListener(each, certificate, self._counts, self._new_connection)
                self.servers.append(cast("asyncio.Server", listener))
        self._on_started()

    def _new_connection(self) -> Connection:
        given = (self.config, self.server_state, self.lifespan.state)
        return Connection(self._counts, self._app, *given)

    async def on_tick(self, counter: int) -> bool:
        stopped = self._stop is not None and self._stop.is_set()
        return await super().on_tick(counter) or stopped

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_waiting()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Notes signals, and does not raise them again at the end: a requested stop succeeds."""
        if threading.current_thread() is not threading.main_thread():
            yield  # others get no signals
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


@contextlib.contextmanager
def _bound(options: ServeOptions) -> Iterator[socket.socket]:
    """Returns a socket at the address. Raises ``UnavailableError`` or ``InvalidError``."""
    if options.socket is not None:
        with _bound_to_path(options.socket) as listener:
            yield listener
        return
    where = f"serve: address `{options.host}:{options.port}`"
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise InvalidError(f"{where}: is not known: {exc}") from exc
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)  # until then the system lets others bind to it as well
        except OSError as exc:
            raise UnavailableError(f"{where}: {exc.strerror}: choose another --port") from exc
        yield listener


@contextlib.contextmanager
def _bound_to_path(path: str) -> Iterator[socket.socket]:
    """Returns a unix socket for its user and group; replaces one that a dead process left."""
    where = f"serve: socket `{path}`"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with locked_folder(
                Path(path).parent
            ):  # of servers that start at once, the others see this one
                _remove_stale(path, where)
                listener.bind(path)
                os.chmod(path, _SOCKET_MODE)  # before it listens, so no other user gets in
                listener.listen(_BACKLOG)
        except TidelogError:
            raise  # says already what is wrong
        except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            raise InvalidError(f"{where}: {reason}: choose another path") from exc
        own = os.stat(path)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), own):  # not one of a later process
                    os.unlink(path)


def _remove_stale(path: str, where: str) -> None:
    """Removes a socket without a listener. Raises ``UnavailableError`` or ``InvalidError``."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidError(f"{where}: is a file, not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise UnavailableError(f"{where}: another process listens on it: stop that one first")


def _url(listener: socket.socket, scheme: str) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
