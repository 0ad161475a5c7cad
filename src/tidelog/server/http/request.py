"""Reads requests: bodies, headers, paths and queries.

**Bodies.** One limit covers the bytes that all requests hold in the process. A request has a place
from the first byte of its body until its events are stored. It counts the bytes that have come, and
then what its events take in memory. All places together have one bound, and those of one client a
half of it; a client that is alone is always let in. When an upload does not fit, the largest one
that is slow loses its place: clients that send nothing, or bytes one by one, keep no other out.

**Headers** are found by name; one that is given twice never loses a value silently.

**Paths.** Routes match the whole path. What a path names is read, updated and erased, so a path
names exactly one thing. Starlette's own routes end at ``$``, which also matches before a last
newline, and ``.`` does not match newlines; and percent-encoded bytes that are not UTF-8 arrive here
as U+FFFD. Both would let a request for one id reach the event of another. In a query such bytes
would change what is stored or searched for.

**Compression.** Bodies may be gzip or zstd, up to the size that a plain body may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, unquote_to_bytes

import pyarrow as pa
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tidelog.clock import Clock
from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.server.http.errors import (
    BusyError,
    DisconnectedError,
    MediaTypeError,
    Pair,
    SlowError,
    TooLargeError,
)

__all__ = [
    "BODIES_BYTES_MAX",
    "EVENT_BYTES",
    "HEADER_BYTES",
    "PIECE_BYTES",
    "SINGLE",
    "BodyBuffer",
    "TransferBudget",
    "WholeRoute",
    "check_conditions",
    "check_host",
    "check_length",
    "check_parameters",
    "check_path",
    "check_query",
    "content_type",
    "framing_problem",
    "headers_of",
    "inflate",
    "is_encoded",
    "path_of",
    "target_problem",
    "with_authority",
]

BODIES_BYTES_MAX = 256 << 20  # of all requests together, until their events are stored
EVENT_BYTES = 600  # of an event in memory, beside its own bytes: what small events really cost
HEADER_BYTES = 200  # of one of its headers, the same
_WINDOW_S = 1.0  # over which the speed of an upload is measured
_SLOW_BYTES_S = 65_536  # a body below this speed may lose its place
PIECE_BYTES = 65_536  # of a large answer: as much as a connection keeps to be taken


class TransferBudget:
    """Reads bodies, up to a size each, and up to a size all together."""

    def __init__(self, bytes_max: int, clock: Clock, total_max: int | None = None) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._total_max = total_max
        self._now_s = clock.monotonic_s
        self._clients: dict[str, int] = {}  # bytes by client
        self._transfers: set[BodyBuffer] = set()  # whose bodies are on their way

    def buffer(self, client: str) -> BodyBuffer:
        """Returns the buffer of one request: a context that frees it at its end."""
        return BodyBuffer(self, client)

    def take(self, buffer: BodyBuffer, size: int) -> None:
        """Counts more bytes for a buffer. Raises ``BusyError``."""
        total_max = self._total_max or BODIES_BYTES_MAX
        while self.held - buffer.held and (
            self.held + size > total_max
            or (
                self._clients.get(buffer.client, 0) > buffer.held
                and self._clients[buffer.client] + size > total_max // 2
            )
        ):
            slow = self._slowest(buffer)
            if slow is None:
                raise BusyError("server: holds as many bytes as it may: try again", retry_after_s=1)
            slow.lose()
        self.held += size
        buffer.held += size
        self._clients[buffer.client] = self._clients.get(buffer.client, 0) + size

    def free(self, buffer: BodyBuffer) -> None:
        """Counts the bytes of a buffer no longer."""
        size, buffer.held = buffer.held, 0
        self.held -= size
        left = self._clients.get(buffer.client, 0) - size
        if left > 0:
            self._clients[buffer.client] = left
        else:
            self._clients.pop(buffer.client, None)

    async def receive(
        self, buffer: BodyBuffer, receive: Receive, headers: Mapping[bytes, bytes]
    ) -> bytes:
        """Returns the whole body.

        Raises ``TooLargeError``, ``BusyError``, ``SlowError`` or ``DisconnectedError``.
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
            self.take(buffer, len(body))
            return body
        return await self._receive_on(buffer, receive, body)

    async def _receive_on(self, buffer: BodyBuffer, receive: Receive, first: bytes) -> bytes:
        """Returns a body that comes in pieces; a place that is lost meanwhile cancels its task."""
        with self._transfer(buffer):
            pieces, piece, more = [first], first, True
            while True:
                self.take(buffer, len(piece))
                buffer.note(self._now_s(), len(piece))
                if buffer.held > self.bytes_max:
                    raise self._too_large()
                if not more:
                    return b"".join(pieces)
                message = await receive()
                if message["type"] != "http.request":
                    raise DisconnectedError
                piece = message.get("body", b"")
                pieces.append(piece)
                more = message.get("more_body", False)

    async def deliver(self, buffer: BodyBuffer, send: Send, message: Message) -> None:
        """Sends a body piece by piece, as the client reads it. Raises ``SlowError``."""
        body, more = message["body"], message.get("more_body", False)
        with self._transfer(buffer):
            for at in range(0, len(body), PIECE_BYTES):
                piece = bytes(body[at : at + PIECE_BYTES])
                is_last = at + PIECE_BYTES >= len(body)
                await send({**message, "body": piece, "more_body": more or not is_last})
                buffer.note(self._now_s(), len(piece))

    @contextlib.contextmanager
    def _transfer(self, buffer: BodyBuffer) -> Iterator[None]:
        """Tracks a body on its way. Raises ``SlowError`` if it loses its place."""
        buffer.begin(asyncio.current_task(), self._now_s())
        self._transfers.add(buffer)
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not buffer.is_lost or task is None:
                raise
            task.uncancel()
            raise SlowError(
                "request: its body came too slowly while others waited: send it again, faster"
            ) from None
        finally:
            self._transfers.discard(buffer)

    def _slowest(self, asking: BodyBuffer) -> BodyBuffer | None:
        """Returns the largest slow transfer, except the one that asks."""
        now_s = self._now_s()
        slow = [each for each in self._transfers if each is not asking and each.is_slow(now_s)]
        return max(slow, key=lambda each: each.held, default=None)

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"body: has more than {self.bytes_max} bytes: send it in parts, "
            "or let the operator raise --body-max",
            bytes_max=self.bytes_max,
        )


class BodyBuffer:
    """The bytes that one request holds, and how fast they move."""

    __slots__ = ("_bodies", "_bytes_s", "_moved", "_since_s", "_task", "client", "held", "is_lost")

    def __init__(self, bodies: TransferBudget, client: str) -> None:
        self.client = client
        self.held = 0
        self.is_lost = False
        self._bodies = bodies
        self._task: asyncio.Task[object] | None = None
        self._since_s = 0.0  # when the window began in which its speed is measured
        self._moved = 0  # bytes in that window
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
        """Returns the whole body; see :meth:`TransferBudget.receive` for its errors."""
        return await self._bodies.receive(self, receive, headers)

    def charge(self, size: int) -> None:
        """Counts what a body takes beside its own bytes. Raises ``BusyError``."""
        self._bodies.take(self, size)

    def begin(self, task: asyncio.Task[object] | None, now_s: float) -> None:
        """Measures the speed from now on."""
        self._task, self._since_s = task, now_s

    def note(self, now_s: float, size: int) -> None:
        """Counts bytes that were received or sent."""
        self._moved += size
        if now_s - self._since_s >= _WINDOW_S:
            self._bytes_s = self._moved / (now_s - self._since_s)
            self._since_s, self._moved = now_s, 0

    def is_slow(self, now_s: float) -> bool:
        """Returns whether little moved in the last window, or nothing for two."""
        return self._bytes_s < _SLOW_BYTES_S or now_s - self._since_s > 2 * _WINDOW_S

    def lose(self) -> None:
        """Frees its bytes, and ends its request."""
        self.is_lost = True
        self._bodies._transfers.discard(self)
        self._bodies.free(self)
        if self._task is not None:
            self._task.cancel()


SINGLE = frozenset(
    (
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"last-event-id",
        b"origin",
        b"referer",
        b"user-agent",
    )
)
_OWN = b"tidelog-"  # how the names of headers begin that are Tidelog's


def headers_of(pairs: Sequence[Pair]) -> dict[bytes, bytes]:
    """Returns headers by name; values of a name that may be a list are joined with commas.

    ``InvalidError`` for two values where only one can count.
    """
    found = dict(pairs)
    return found if len(found) == len(pairs) else _joined(pairs)


def _joined(pairs: Sequence[Pair]) -> dict[bytes, bytes]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    for name, given in values.items():
        if len(given) > 1 and (name in SINGLE or name.startswith(_OWN)):
            shown = name.decode("latin-1").title()
            raise InvalidError(f"header `{shown}`: is given {len(given)} times: give it once")
    return {
        name: (b"; " if name == b"cookie" else b", ").join(given) for name, given in values.items()
    }


_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
_ANY, _NO_SLASH = r"[\s\S]*", "[^/]+"
_REPLACED = "\ufffd"
_CONDITIONS = (b"if-match", b"if-none-match", b"if-unmodified-since", b"content-range")
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_-]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")


class WholeRoute(Route):
    """A route whose parameters take any character, and that matches nothing but the whole path.

    ``{name}`` takes no slash and is not empty; ``{name:path}`` takes all that follows.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.path_regex = _pattern(path)


def target_problem(url: bytes) -> str:
    """Returns why a request's URL names nothing; empty if it may.

    The parser drops what follows a ``#``, and the rest would be the id of another event.
    """
    return "request: its URL has a `#`: write it as %23" if b"#" in url else ""


def path_of(url: bytes) -> str:
    """Returns the path of a URL that may be malformed, without its query."""
    authority = _AUTHORITY.match(url)
    rest = url if authority is None else url[authority.end() :]
    return unquote(re.split(rb"[?#]", rest, maxsplit=1)[0].decode("latin-1"))


def framing_problem(version: str, headers: Sequence[Pair], upgrades: bool) -> str:
    """Returns why the end of a request, or its body, is unknown; empty if both are known."""
    if version not in ("1.0", "1.1"):
        return f"request: is HTTP/{version[:8]}: send HTTP/1.1"
    for name, value in headers:
        if name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
            return "header `Transfer-Encoding`: only `chunked` is known, and only in HTTP/1.1"
        if upgrades and name in (b"content-length", b"transfer-encoding"):
            return "request: has a body and asks for another protocol: drop Upgrade"
    return ""


def with_authority(url: bytes, headers: Sequence[Pair]) -> list[Pair]:
    """Returns headers whose ``Host`` is that of an absolute URL, as HTTP asks for."""
    authority = _AUTHORITY.match(url)
    if authority is None or sum(name == b"host" for name, _ in headers) > 1:
        return list(headers)
    rest = [pair for pair in headers if pair[0] != b"host"]
    return [(b"host", authority[1]), *rest]


def check_host(scope: Scope) -> None:
    """Raises ``InvalidError`` for HTTP/1.1 without a ``Host``, and for one that is not a host."""
    given = [value for name, value in scope["headers"] if name == b"host"]
    if not given and scope["http_version"] == "1.1":
        raise InvalidError("request: HTTP/1.1 without a Host header: give one")
    if not all(map(_HOST.fullmatch, given)):
        raise InvalidError("header `Host`: is not a host with or without a port: fix it")


def check_length(headers: Mapping[bytes, bytes]) -> None:
    """Raises ``InvalidError`` for an append without a length: HTTP ignores the bytes after it."""
    if b"content-length" not in headers and b"transfer-encoding" not in headers:
        raise InvalidError(
            "request: has neither Content-Length nor Transfer-Encoding, so its body is ignored: "
            "send one of them, `Content-Length: 0` for an empty value"
        )


def check_conditions(headers: Mapping[bytes, bytes]) -> None:
    """Raises ``InvalidError`` for a change that is asked for on a condition, or for a part."""
    for name in _CONDITIONS:
        if name in headers:
            shown = name.decode().title()
            raise InvalidError(f"header `{shown}`: is not supported for changes: leave it out")


def check_path(scope: Scope) -> None:
    """Raises ``InvalidError`` for a path that is not UTF-8: it names nothing."""
    path: str = scope["path"]
    if _REPLACED not in path:  # U+FFFD itself, or bytes that are not text
        return
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError as exc:
        raise InvalidError(
            f"path `{path[:80]}`: is not UTF-8: percent-encode the UTF-8 bytes of names and ids"
        ) from exc


def check_query(scope: Scope) -> None:
    """Raises ``InvalidError`` for a query that is not percent-encoded UTF-8."""
    query: bytes = scope.get("query_string") or b""
    try:
        if not query.isascii():
            raise ValueError("not ASCII")
        if b"%" in query:
            unquote_to_bytes(query).decode()
    except ValueError as exc:
        raise InvalidError(
            "query: is not UTF-8 with percent-encoding: percent-encode the UTF-8 bytes of each text"
        ) from exc


def _pattern(path: str) -> re.Pattern[str]:
    found, at = "", 0
    for match in _PARAMETER.finditer(path):
        found += re.escape(path[at : match.start()])
        found += f"(?P<{match[1]}>{_ANY if match[2] else _NO_SLASH})"
        at = match.end()
    return re.compile(found + re.escape(path[at:]) + r"\Z")


_GZIP = 16 + zlib.MAX_WBITS
_GZIP_PIECE = 16_384  # bytes of a body at a time: each member copies what follows it in its piece
_GZIP_MEMBERS_MAX = 10_000  # a member costs microseconds, however empty it is
_PLAIN = (b"", b"identity")


def content_type(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the media type of a body, without its parameters; empty if there is none."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def is_encoded(headers: Mapping[bytes, bytes]) -> bool:
    """Returns whether a body is compressed, by its headers."""
    return headers.get(b"content-encoding", b"").strip().lower() not in _PLAIN


def inflate(headers: Mapping[bytes, bytes], body: bytes, bytes_max: int) -> bytes:
    """Decompresses a body. Raises ``MediaTypeError``, ``TooLargeError`` or ``InvalidError``."""
    kind = headers[b"content-encoding"].strip().lower()
    try:
        if not body:
            raise EOFError("is empty")
        if kind in (b"gzip", b"x-gzip"):
            found = _gunzip(body, bytes_max)
        elif kind == b"zstd":
            with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
                found = stream.read(bytes_max + 1)
        else:
            raise MediaTypeError(
                f"body: Content-Encoding `{kind[:80].decode('latin-1')}`: give gzip, zstd or none"
            )
    except (zlib.error, OSError, EOFError, pa.ArrowException) as exc:
        raise InvalidError(f"body: is not {kind.decode()}: fix Content-Encoding") from exc
    if len(found) > bytes_max:
        raise TooLargeError(
            f"body: has more than {bytes_max} bytes when it is inflated: send it in parts",
            bytes_max=bytes_max,
        )
    return found


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    """Decompresses all members of a gzip file, up to one byte more than the bound."""
    found: list[bytes] = []
    room, at = bytes_max + 1, 0
    for _ in range(_GZIP_MEMBERS_MAX):
        member = zlib.decompressobj(_GZIP)
        while not member.eof and room:
            piece = body[at : at + _GZIP_PIECE]
            if not piece:
                raise EOFError("ends before its end")
            at += len(piece)
            found.append(member.decompress(piece, room))
            room -= len(found[-1])
        at -= len(member.unused_data)
        if at == len(body) or not room:
            return b"".join(found)
    raise EOFError("has too many members")


def check_parameters(request: Request, known: Iterable[str]) -> None:
    """Refuses parameters that no handler reads, and those that are given twice."""
    names = tuple(known)
    seen = [name for name, _ in request.query_params.multi_items()]
    for name in seen:
        if name not in names:
            hint = nearest(name[:80], names) if names else ""
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            raise InvalidError(f"query: unknown parameter `{name[:80]}`{hint}: {takes}")
        if seen.count(name) > 1:
            raise InvalidError(f"query: `{name}` is given more than once: give it once")
