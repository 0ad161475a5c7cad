"""A proxy before a real server that injects faults: for S3 and DynamoDB, and for CQL and Kafka.

``HttpProxy`` reads whole requests and replies, so it can answer in the server's place, shorten a
body so that its length still fits, and damage a byte. ``StreamProxy`` knows no protocol: it passes
chunks, and can cut, hold, delay and reset. Both can speak TLS to their clients. What happens is
decided by a ``FaultPlan``; nothing happens that it does not count. ``LossyProxy`` loses the replies
to some writes, for tests of one request.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.support.faults import FaultPlan, WireFault

HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_MARK_BYTES_MAX = 64
_HEAD_BYTES_MAX = 1 << 17
_RST_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends a reset


@dataclass(frozen=True)
class _Message:
    """One HTTP request or reply."""

    head: bytes  # the first line and the headers, with the empty line
    body: bytes

    @property
    def data(self) -> bytes:
        return self.head + self.body

    @property
    def first_line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: str) -> str | None:
        found = re.search(rb"(?im)^" + name.encode() + rb":[ \t]*(.*?)[ \t]*\r$", self.head)
        return found[1].decode() if found else None

    def with_body(self, body: bytes) -> _Message:
        """The same headers, with the length of another body."""
        head = re.sub(
            rb"(?im)^content-length:.*\r$", b"Content-Length: %d\r" % len(body), self.head
        )
        return _Message(head, body)


class _Proxy:
    """Accepts connections, and runs a thread for each."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = (host, port)
        self._tls = tls
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((HOST, 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The address for HTTP clients."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self.port}"

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._closing.set()
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
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._watch(ends, client)
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
                self._watch(ends, client)
            server = socket.create_connection(self._target)
            self._watch(ends, server)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._talk(client, server)

    def _watch(self, ends: contextlib.ExitStack, each: socket.socket) -> None:
        with self._lock:
            self._open.add(each)
        ends.callback(self._forget, each)

    def _forget(self, each: socket.socket) -> None:
        with self._lock:
            self._open.discard(each)
        cut(each)

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        raise NotImplementedError

    def _hang(self, client: socket.socket) -> None:
        """Keep the connection open without a word until the client closes it."""
        client.settimeout(0.2)
        while not self._closing.is_set():
            try:
                if not client.recv(_CHUNK_BYTES):
                    return
            except TimeoutError:
                continue


class _FaultyProxy(_Proxy):
    """Does what its plan decides."""

    def __init__(
        self, host: str, port: int, plan: FaultPlan, tls: ssl.SSLContext | None = None
    ) -> None:
        self.plan = plan
        super().__init__(host, port, tls)


class LossyProxy(_Proxy):
    """Loses replies to writes, on request; ``lost`` counts the replies that it kept back.

    It passes such a request on, waits until the server begins to answer, and cuts the connection.
    A write is a request with one of the given marks in it (a target header of DynamoDB, a prepared
    statement's id of CQL), so reads, heartbeats and control connections pass untouched.
    """

    def __init__(self, host: str, port: int, marks: Collection[bytes]) -> None:
        self.marks = set(marks)
        self.lost = 0
        self._to_lose = 0
        self._silent = False
        super().__init__(host, port)

    def lose(self, count: int) -> None:
        """Lose the replies to this many writes more."""
        with self._lock:
            self._to_lose += count

    def go_silent(self) -> None:
        """From now on hand no reply over, and cut nothing: clients wait in vain."""
        self._silent = True

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        condemned = threading.Event()
        pair = (client, server, condemned)
        threading.Thread(target=self._pass_replies, args=pair, daemon=True).start()
        self._pass_requests(*pair)

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, condemned: threading.Event
    ) -> None:
        seen = b""
        while chunk := client.recv(_CHUNK_BYTES):
            seen = seen[-_MARK_BYTES_MAX:] + chunk  # a mark may come in two pieces
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
        with contextlib.suppress(OSError):
            while chunk := server.recv(_CHUNK_BYTES):
                if condemned.is_set():
                    with self._lock:
                        self.lost += 1
                    break
                if not self._silent:
                    client.sendall(chunk)
        cut(client)
        cut(server)


class HttpProxy(_FaultyProxy):
    """For S3 and DynamoDB."""

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        reader, answers = client.makefile("rb"), server.makefile("rb")
        while (request := _read_request(reader, client)) is not None:
            fault = self.plan.choose(request.data, lambda fault: _fits(fault, request))
            if not self._exchange(client, server, answers, (request, fault)):
                return

    def _exchange(
        self,
        client: socket.socket,
        server: socket.socket,
        answers: object,
        task: tuple[_Message, WireFault],
    ) -> bool:
        """Handle one request; whether the connection lives on."""
        request, fault = task
        if fault is WireFault.LOSE_REQUEST:
            return False
        own = _own_answer(fault, request)
        if own is not None:
            client.sendall(own)
            return True
        server.sendall(request.data)
        reply = _read_reply(answers, request)
        if reply is None:
            return False
        if fault is WireFault.DUPLICATE:  # the client gets the first answer, as on a network
            server.sendall(request.data)
            if _read_reply(answers, request) is None:
                return False
        if fault is WireFault.LOSE_REPLY:
            return False
        if fault is WireFault.RESET:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
            return False
        if fault is WireFault.HANG:
            self._hang(client)
            return False
        if fault is WireFault.DELAY:
            time.sleep(self.plan.delay_s)  # the fault itself, no wait for a condition
        if fault is WireFault.CUT_REPLY:
            client.sendall(reply.data[: self._cut(len(reply.head), len(reply.data))])
            return False
        client.sendall(self._changed(fault, reply).data)
        return (reply.header("connection") or "").lower() != "close"

    def _changed(self, fault: WireFault, reply: _Message) -> _Message:
        if fault is WireFault.ERROR_500:
            return _Message(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", b"")
        if not reply.body or reply.header("content-length") is None:
            return reply
        if fault is WireFault.SHORTEN_REPLY:
            return reply.with_body(reply.body[: self._cut(0, len(reply.body))])
        # DynamoDB Local sends no checksum with refusals, as AWS does: their damage has no proof.
        if fault is WireFault.DAMAGE_REPLY and reply.header("x-amz-crc32") is not None:
            at = self._cut(0, len(reply.body))
            damaged = bytes([reply.body[at] ^ 0x01])
            return _Message(reply.head, reply.body[:at] + damaged + reply.body[at + 1 :])
        return reply

    def _cut(self, low: int, high: int) -> int:
        """A place before the end."""
        return min(low + int((high - low) * self.plan.fraction()), high - 1)


class StreamProxy(_FaultyProxy):
    """For CQL and Kafka: faults hit the reply that follows a chunk of a request.

    ``quiet_chunks`` requests at the beginning of each connection pass untouched: handshakes.
    ``marks`` limits faults to requests with one of these byte strings in them, if it has any.
    """

    quiet_chunks = 4

    def __init__(
        self, host: str, port: int, plan: FaultPlan, tls: ssl.SSLContext | None = None
    ) -> None:
        self.marks: set[bytes] = set()
        super().__init__(host, port, plan, tls)

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        fault: list[WireFault] = []
        replies = threading.Thread(
            target=self._pass_replies, args=(client, server, fault), daemon=True
        )
        replies.start()
        with contextlib.suppress(OSError):
            self._pass_requests(client, server, fault)
        _shut(server)
        replies.join()

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, fault: list[WireFault]
    ) -> None:
        passed = 0
        while chunk := client.recv(_CHUNK_BYTES):
            passed += 1
            if passed > self.quiet_chunks and self._is_marked(chunk):
                chosen = self.plan.choose(chunk, lambda each: each in _STREAM_FAULTS)
                if chosen is WireFault.LOSE_REQUEST:
                    _shut(client)
                    return
                if chosen is not WireFault.NONE:
                    fault[:] = [chosen]
            server.sendall(chunk)

    def _is_marked(self, chunk: bytes) -> bool:
        return not self.marks or any(mark in chunk for mark in self.marks)

    def _pass_replies(
        self, client: socket.socket, server: socket.socket, fault: list[WireFault]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := server.recv(_CHUNK_BYTES):
                chosen = fault.pop() if fault else WireFault.NONE
                if chosen is WireFault.DELAY:
                    time.sleep(self.plan.delay_s)  # the fault itself, no wait for a condition
                elif chosen is WireFault.CUT_REPLY:
                    client.sendall(chunk[: int(len(chunk) * self.plan.fraction())])
                    break
                elif chosen is WireFault.RESET:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
                    client.close()
                    return
                elif chosen is WireFault.LOSE_REPLY:
                    break
                elif chosen is WireFault.HANG:
                    while server.recv(_CHUNK_BYTES):  # taken from the server, never passed on
                        pass
                    break
                client.sendall(chunk)
        _shut(client)


_STREAM_FAULTS = {
    WireFault.CUT_REPLY,
    WireFault.DELAY,
    WireFault.HANG,
    WireFault.LOSE_REPLY,
    WireFault.LOSE_REQUEST,
    WireFault.RESET,
}


@contextlib.contextmanager
def http_proxy(
    endpoint: str, plan: FaultPlan, tls: ssl.SSLContext | None = None
) -> Iterator[HttpProxy]:
    """A proxy before ``http://host:port`` for the length of a block."""
    host, _, port = endpoint.removeprefix("http://").rstrip("/").partition(":")
    proxy = HttpProxy(host, int(port), plan, tls)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def stream_proxy(
    host: str, port: int, plan: FaultPlan, tls: ssl.SSLContext | None = None
) -> Iterator[StreamProxy]:
    """A proxy before any server for the length of a block."""
    proxy = StreamProxy(host, port, plan, tls)
    try:
        yield proxy
    finally:
        proxy.close()


# Messages.


def _fits(fault: WireFault, request: _Message) -> bool:
    """Whether a fault can happen to this request at all."""
    if fault is WireFault.CONFLICT_409:
        return _is_conditional_s3(request)
    if fault is WireFault.HTML_200:
        return not _is_conditional_s3(request)
    return True


def _is_conditional_s3(request: _Message) -> bool:
    writes = request.first_line.startswith((b"PUT", b"POST"))
    return writes and bool(request.header("if-none-match") or request.header("if-match"))


def _is_dynamodb(request: _Message) -> bool:
    return request.header("x-amz-target") is not None


def _own_answer(fault: WireFault, request: _Message) -> bytes | None:
    """What the proxy answers in the server's place; None where the server is asked."""
    if fault is WireFault.HTML_200:
        return _answer("200 OK", "text/html", b"<html><body>It works!</body></html>", request)
    if fault is WireFault.CONFLICT_409:
        return _answer(
            "409 Conflict", "application/xml", _s3("ConditionalRequestConflict"), request
        )
    if fault is not WireFault.SLOW_DOWN:
        return None
    if _is_dynamodb(request):
        body = b'{"__type":"com.amazonaws.dynamodb.v20120810#ThrottlingException","message":"slow"}'
        return _answer("400 Bad Request", "application/x-amz-json-1.0", body, request)
    return _answer("503 Slow Down", "application/xml", _s3("SlowDown"), request)


def _answer(status: str, kind: str, body: bytes, request: _Message) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if request.first_line.startswith(b"HEAD") else body)


def _s3(code: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        "<Message>injected</Message></Error>"
    ).encode()


def _read_request(reader: object, client: socket.socket) -> _Message | None:
    head = _read_head(reader)
    if head is None:
        return None
    message = _Message(head, b"")
    if (message.header("expect") or "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        message = _Message(re.sub(rb"(?im)^expect:.*\r\n", b"", head), b"")
    return _read_body(reader, message)


def _read_reply(reader: object, request: _Message) -> _Message | None:
    head = _read_head(reader)
    while head is not None and re.match(rb"HTTP/1\.1 1\d\d", head):
        head = _read_head(reader)
    if head is None:
        return None
    bodiless = request.first_line.startswith(b"HEAD") or re.match(rb"HTTP/1\.1 [23]04", head)
    return _Message(head, b"") if bodiless else _read_body(reader, _Message(head, b""))


def _read_head(reader: object) -> bytes | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line: bytes = reader.readline(_HEAD_BYTES_MAX)  # type: ignore[attr-defined]
        if not line:
            return None
        head += line
    return head


def _read_body(reader: object, message: _Message) -> _Message:
    read = reader.read  # type: ignore[attr-defined]
    if (message.header("transfer-encoding") or "").lower() == "chunked":
        body = b""
        while True:
            line: bytes = reader.readline(_HEAD_BYTES_MAX)  # type: ignore[attr-defined]
            size = int(line.split(b";")[0], 16)
            body += line + read(size + 2)
            if size == 0:
                return _Message(message.head, body)
    length = int(message.header("content-length") or 0)
    return _Message(message.head, read(length) if length else b"")


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def cut(each: socket.socket) -> None:
    """Close a socket and wake a thread that waits on it."""
    with contextlib.suppress(OSError):
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER):
            each.shutdown(socket.SHUT_RDWR)
    each.close()


@contextlib.contextmanager
def lossy_proxy(host: str, port: int, marks: Collection[bytes]) -> Iterator[LossyProxy]:
    """Run a proxy that loses replies for the length of a block."""
    proxy = LossyProxy(host, port, marks)
    try:
        yield proxy
    finally:
        proxy.close()
