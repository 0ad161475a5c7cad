"""The server's logs: warnings on standard error, and the access log.

Warnings go to standard error, one line a second at most. The access log has one JSON object per
request. A line has the time, the request's id, the client's address, the token's id, the method,
the path, the operation, the status and the milliseconds. It has no query, as that may hold a token,
and no id of an event, as that may be personal data, which an erasure does not find here. A thread
writes lines, so that no request waits for a disk; when more wait than it may hold, some are
dropped, and the next line counts them. The file is opened again for each write, so it can be
rotated; only its owner can read it. Standard error may be a pipe that nothing reads any more: lines
for which it has no room are dropped, so no request waits for it either.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from tidelog.clock import Clock
from tidelog.errors import InvalidError, TidelogError, contained
from tidelog.model.event import to_iso

__all__ = ["AccessLog", "ErrorLog", "request_id_of"]

_GAP_S = 1.0
_ERRORS_MAX = 20  # lines in this time


class ErrorLog:
    """Prints errors whose details clients do not see: each once a second, and few in all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = float("-inf")
        self._said: set[str] = set()  # since then
        self._unsaid = 0

    def add(self, error: TidelogError, request_id: str = "") -> None:
        """Prints an error, or only counts it if the same one was printed just now."""
        now_s = self._clock.monotonic_s()
        if now_s - self._since_s >= _GAP_S:
            self._since_s, self._said = now_s, set()
        line = f"{error.kind}: " + "".join(map(_visible, " ".join(error.message.split())))
        if line in self._said or len(self._said) >= _ERRORS_MAX:
            self._unsaid += 1
            return
        self._said.add(line)
        more = f" (and {self._unsaid} more before)" if self._unsaid else ""
        line += f" (request {request_id})" if request_id else ""
        say(f"error: {line}{more}")
        self._unsaid = 0


# Held from a look at the room of standard error until its use, so that no thread waits there.
_saying = threading.Lock()
_PIECE_BYTES = 4_096  # that a pipe with any room takes at once: PIPE_BUF


def say(line: str) -> None:
    """Prints a line on standard error, or nothing if that cannot be written, or not at once.

    A full disk, a closed pipe, or one that nothing reads must end neither a request nor what is
    done again and again, such as reading the tokens.
    """
    data = line.encode(errors="backslashreplace")[: _PIECE_BYTES - 1] + b"\n"
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        _write_at_once(data)


def _write_at_once(data: bytes) -> bool:
    """Writes up to ``_PIECE_BYTES`` to standard error. Returns False if it has no room for them."""
    with _saying:
        if not _has_room(0.0):
            return False
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
        return True


def _has_room(wait_s: float) -> bool:
    """Waits until standard error has room for a piece. Returns False if it has none in time."""
    try:
        file = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # not a file of the system
        return True
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


def _visible(char: str) -> str:
    """Returns a character that does not steer the operator's terminal."""
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def _json_visible(char: str) -> str:
    """Returns the same for a character of a JSON string, which stays one."""
    return char if char.isprintable() else json.dumps(char)[1:-1].replace("\x7f", "\\u007f")


_LINES_MAX = 20_000  # that wait to be written
_EVERY_S = 0.2
_ROOM_S = 2.0  # in which standard error takes the lines of one write; the rest is dropped
_CLOSE_S = 10.0  # in which what is left is written at the end
_PATH_MAX = 500  # characters
_PATH_SHORT = 150  # the same where each of them needs many bytes
_IDS = re.compile(r"^(/topics/[^/]*/ids/)[\s\S]*")
# In a path that leads nowhere: what follows `ids`, or the third name.
_LIKE_IDS = re.compile(r"(\bids\b/?)[\s\S]+", re.IGNORECASE)
_REST = re.compile(r"^(/*(?:console/+)?[^/]*/+[^/]*/+)[\s\S]+")
_WITHOUT_IDS = re.compile(r"/topics/[^/]+/(events|tail|consumers|journals|partitions/\d+/events)")
_UNKNOWN_PAGE = (404, 405, 429)  # statuses of a path that the console may not have
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class AccessLog:
    """Writes lines to a file; ``-`` is standard error."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lines: deque[dict[str, Any]] = deque()
        self._overflowed = 0  # lines for which there was no room
        self._dropped = 0  # lines that could not be written
        self._told = 0  # of both, by a line that was written
        self._stop = threading.Event()
        try:
            self._write([])
        except OSError as exc:
            raise InvalidError(f"serve: access log `{path}`: {exc.strerror}: fix the path") from exc
        self._thread = threading.Thread(target=self._run, name="tidelog-access", daemon=True)
        self._thread.start()

    def note(self, **fields: Any) -> None:
        """Adds the line of a request."""
        if len(self._lines) >= _LINES_MAX:
            self._overflowed += 1
            return
        fields["path"] = fields["path"][:_PATH_MAX]  # what waits for a slow disk is small
        self._lines.append({"at_ms": self._clock.now_ms(), **fields})

    def close(self) -> None:
        """Writes what is left, unless that takes long: a file may be a pipe that nothing reads."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_EVERY_S)
            with contained("access log", lambda error: say(f"error: {error.message}")):
                self._write_waiting()

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        telling = 0
        while self._lines:
            fields = self._lines.popleft()
            with contained("access log", self._drop):
                untold = 0 if lines else self._overflowed + self._dropped - self._told
                lines.append(self._line(fields, untold))
                telling += untold
        if lines:
            try:
                self._write(lines, telling)
            except (OSError, ValueError) as exc:  # a full disk must not end the log
                reason = exc.strerror if isinstance(exc, OSError) else exc
                say(f"error: access log: {reason}")

    def _drop(self, error: TidelogError) -> None:
        self._dropped += 1
        say(f"error: {error.message}")

    def _line(self, fields: dict[str, Any], dropped: int) -> bytes:
        at = to_iso(fields.pop("at_ms"))
        fields["path"] = _without_ids(**fields)
        more = {"dropped": dropped} if dropped else {}
        line = _json_line({"time": at, **fields, **more})
        if len(line) > _PIECE_BYTES:
            fields["path"] = fields["path"][:_PATH_SHORT]
            line = _json_line({"time": at, **fields, **more})
        return line

    def _write(self, lines: list[bytes], telling: int = 0) -> None:
        """Writes lines. Counts those that a full disk refuses, and leaves no half of one.

        The first line tells how many were dropped before: ``telling``.
        """
        data, at = b"", 0
        try:
            data = b"".join(lines)
            if self._path == "-":
                until_s = self._clock.monotonic_s() + _ROOM_S
                for piece in _pieces(lines):
                    while not _write_at_once(piece):
                        if not _has_room(until_s - self._clock.monotonic_s()):
                            raise OSError(errno.EAGAIN, "standard error has no room")
                    at += len(piece)
                self._told += telling
                return
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                while at < len(data):
                    at += os.write(file, data[at:])
            except OSError:
                half = at - (data.rfind(b"\n", 0, at) + 1)
                if half:
                    with contextlib.suppress(OSError):  # a pipe
                        os.ftruncate(file, os.fstat(file).st_size - half)
                raise
            finally:
                os.close(file)
            self._told += telling
        except Exception:
            written = data.count(b"\n", 0, at)
            self._dropped += len(lines) - written
            self._told += telling if written else 0
            raise


def _json_line(fields: dict[str, Any]) -> bytes:
    line = msgspec.json.encode(fields).decode()
    if not line.isprintable():
        line = "".join(map(_json_visible, line))
    return line.encode() + b"\n"


def _pieces(lines: list[bytes]) -> Iterator[bytes]:
    """Yields whole lines together, up to ``_PIECE_BYTES``."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > _PIECE_BYTES:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def _without_ids(path: str, operation: str, status: int, **others: object) -> str:
    """Returns the path of a request without the ids of events, or what may be meant as one."""
    is_unknown = operation == "none" or (operation == "console" and status in _UNKNOWN_PAGE)
    if not is_unknown:
        return _IDS.sub(r"\1*", path)
    if _LIKE_IDS.search(path):
        return _LIKE_IDS.sub(r"\1*", path)
    return path if _WITHOUT_IDS.fullmatch(path) else _REST.sub(r"\1*", path)


def request_id_of(headers: list[tuple[bytes, bytes]], trusted: bool, own: bytes) -> bytes:
    """Returns the id of a request: behind a proxy the one that it gives, else our own."""
    if trusted:
        for name, value in headers:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return value
    return own
