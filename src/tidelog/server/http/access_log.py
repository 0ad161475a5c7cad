"""What was asked and answered, as one JSON object per line; and the ids of requests.

A line has the time, the request's id, the client's address, the token's id, the method, the path,
the operation, the status and the milliseconds. It has no query, as that may hold a token, and no id
of an event, as that may be personal data, which an erasure does not find here. A thread writes
lines, so that no request waits for a disk; when more wait than it may hold, some are dropped, and
the next line counts them. The file is opened again for each write, so it can be rotated; only its
owner can read it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from typing import Any

import msgspec

from tidelog.clock import Clock
from tidelog.errors import InvalidError
from tidelog.model.event import to_iso

__all__ = ["AccessLog", "request_id_of"]

_LINES_MAX = 20_000  # that wait to be written
_EVERY_S = 0.2
_PATH_MAX = 500  # characters
_IDS = re.compile(r"^(/topics/[^/]*/ids/)[\s\S]*")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class AccessLog:
    """Writes lines to a file; ``-`` is standard error."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lines: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._stop = threading.Event()
        try:
            self._write([])
        except OSError as exc:
            raise InvalidError(f"serve: access log `{path}`: {exc.strerror}: fix the path") from exc
        self._thread = threading.Thread(target=self._run, name="tidelog-access", daemon=True)
        self._thread.start()

    def note(self, **fields: Any) -> None:
        """One request was answered."""
        if len(self._lines) >= _LINES_MAX:
            self._dropped += 1
            return
        self._lines.append({"at_ms": self._clock.now_ms(), **fields})

    def close(self) -> None:
        """Write what is left."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_EVERY_S)
            lines = []
            while self._lines:
                lines.append(self._line(self._lines.popleft()))
            if lines:
                try:
                    self._write(lines)
                except OSError as exc:  # a full disk must not end the log
                    self._dropped += len(lines)
                    print(f"error: access log: {exc.strerror}", file=sys.stderr, flush=True)

    def _line(self, fields: dict[str, Any]) -> bytes:
        at = to_iso(fields.pop("at_ms"))
        fields["path"] = _IDS.sub(r"\1*", fields["path"][:_PATH_MAX])
        dropped, self._dropped = self._dropped, 0
        more = {"dropped": dropped} if dropped else {}
        return msgspec.json.encode({"time": at, **fields, **more}) + b"\n"

    def _write(self, lines: list[bytes]) -> None:
        if self._path == "-":
            sys.stderr.write(b"".join(lines).decode())
            sys.stderr.flush()
            return
        with open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(b"".join(lines))


def request_id_of(headers: list[tuple[bytes, bytes]], trusted: bool, own: bytes) -> bytes:
    """The id of a request: behind a proxy the one that it gives, else our own."""
    if trusted:
        for name, value in headers:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return value
    return own
