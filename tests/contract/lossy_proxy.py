"""A proxy before a real server that can lose replies: requests take effect unanswered.

Told to lose the reply to a write, it passes the request on, waits until the server begins to
answer, and cuts the connection instead of handing the answer over. It knows no protocol: a write is
a request with one of the given marks in it (a target header of DynamoDB, a prepared statement's id
of CQL), so reads, heartbeats and control connections pass untouched.
"""

import contextlib
import socket
import threading
from collections.abc import Collection, Iterator

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
MARK_BYTES_MAX = 64


class LossyProxy:
    """Listens on a port of its own; ``lost`` counts the replies that it kept back."""

    def __init__(self, host: str, port: int, marks: Collection[bytes]) -> None:
        self.marks = set(marks)
        self.lost = 0
        self._target = (host, port)
        self._to_lose = 0
        self._silent = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, count: int) -> None:
        """Lose the replies to this many writes more."""
        with self._lock:
            self._to_lose += count

    def go_silent(self) -> None:
        """From now on hand no reply over, and cut nothing: whoever asks waits in vain."""
        self._silent = True

    def close(self) -> None:
        """Stop listening and cut what is open."""
        cut(self._listener)
        with self._lock:
            rest = list(self._open)
        for each in rest:
            cut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                cut(client)
                continue
            with self._lock:
                self._open |= {client, server}
            condemned = threading.Event()
            for pump in (self._pass_requests, self._pass_replies):
                threading.Thread(
                    target=self._run, args=(pump, client, server, condemned), daemon=True
                ).start()

    def _run(
        self, pump: object, client: socket.socket, server: socket.socket, condemned: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            pump(client, server, condemned)  # type: ignore[operator]
        cut(client)
        cut(server)
        with self._lock:
            self._open -= {client, server}

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, condemned: threading.Event
    ) -> None:
        seen = b""
        while chunk := client.recv(CHUNK_BYTES):
            seen = seen[-MARK_BYTES_MAX:] + chunk  # a mark may come in two pieces
            if any(mark in seen for mark in self.marks):
                seen = b""
                with self._lock:
                    if self._to_lose:
                        self._to_lose -= 1
                        condemned.set()
            server.sendall(chunk)

    def _pass_replies(
        self, client: socket.socket, server: socket.socket, condemned: threading.Event
    ) -> None:
        while chunk := server.recv(CHUNK_BYTES):
            if condemned.is_set():
                with self._lock:
                    self.lost += 1
                return
            if not self._silent:
                client.sendall(chunk)


@contextlib.contextmanager
def lossy_proxy(host: str, port: int, marks: Collection[bytes]) -> Iterator[LossyProxy]:
    """A proxy for the length of a block."""
    proxy = LossyProxy(host, port, marks)
    try:
        yield proxy
    finally:
        proxy.close()


def cut(each: socket.socket) -> None:
    """Close a socket and wake whoever waits on it."""
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
