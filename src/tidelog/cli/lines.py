"""Lines from a file or a pipe, in batches: many at a time where there are many, soon where few.

Binary safe; a line ends with a newline, which is not part of it, or with the input. A caller that
counts lines over several inputs uses only those that have their newline: the rest may come later.
Memory is bounded by the size of a batch, and by that of the longest line.
"""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tidelog.cli.output import FailedError
from tidelog.clock import Clock

__all__ = ["InputLines", "LinesReader"]

_BATCH_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_LOOK_S = 0.2  # how soon a reader that waits for input sees that it should stop


@dataclass(frozen=True, slots=True)
class InputLines:
    """Some lines that follow one another."""

    first: int  # the number of the first one; people count from 1
    lines: list[bytes]


class LinesReader:
    """Reads an input to its end, or until ``stopped`` says so."""

    def __init__(
        self, source: BinaryIO, clock: Clock, stopped: Callable[[], bool], line_bytes_max: int
    ) -> None:
        self._source = source
        self._clock = clock
        self._stopped = stopped
        self._line_bytes_max = line_bytes_max
        self._file = _file_of(source)
        self._waits = self._file is not None and not _is_regular(self._file)
        self._ended = False
        self.read_bytes = 0  # so far
        self.unended: int | None = None  # the number of a last line that was left out

    @property
    def has_ended(self) -> bool:
        """Whether the input was read to its end."""
        return self._ended

    def size(self) -> int | None:
        """All bytes of the input, where that can be known."""
        if self._file is None or self._waits:
            return None
        return os.fstat(self._file).st_size

    def batches(self, linger_s: float, only_ended: bool = False) -> Iterator[InputLines]:
        """All lines; from a pipe, in each batch what has come within ``linger_s``.

        ``FailedError`` for a line that is too long. An unended line counts at the end of the
        input, but not with ``only_ended``, nor when reading was stopped before it.
        """
        number, rest = 1, b""
        while not self._ended and (data := self._gather(linger_s)):
            *lines, rest = (rest + data).split(b"\n")
            if self._ended and rest and not only_ended:
                lines.append(rest)
                rest = b""
            if lines:
                yield InputLines(number, lines)
                number += len(lines)
            if len(rest) > self._line_bytes_max:
                raise FailedError(
                    f"line {number}: is longer than {self._line_bytes_max} bytes: "
                    "split it, or raise event_bytes_max",
                    line=number,
                )
        if self._ended and rest:
            if only_ended:
                self.unended = number
            else:
                yield InputLines(number, [rest])

    def _gather(self, linger_s: float) -> bytes:
        """What is there, once there is something; nothing at the end."""
        parts: list[bytes] = []
        size = 0
        until_s: float | None = None
        while size < _BATCH_BYTES and self._ready(until_s):
            data = self._read()
            if not data:
                self._ended = True
                break
            parts.append(data)
            size += len(data)
            if until_s is None:
                until_s = self._clock.monotonic_s() + linger_s
        self.read_bytes += size
        return b"".join(parts)

    def _ready(self, until_s: float | None) -> bool:
        """Wait for input until a time, or until it comes; False to go on without it."""
        while not self._stopped():
            left_s = _LOOK_S if until_s is None else until_s - self._clock.monotonic_s()
            if not self._waits or select.select([self._source], [], [], max(0.0, left_s))[0]:
                return True
            if until_s is not None:
                return False
        return False

    def _read(self) -> bytes:
        if self._file is None:
            return self._source.read(_READ_BYTES)
        return os.read(self._file, _READ_BYTES)


def _file_of(source: BinaryIO) -> int | None:
    try:
        return source.fileno()
    except io.UnsupportedOperation:
        return None


def _is_regular(file: int) -> bool:
    return stat.S_ISREG(os.fstat(file).st_mode)
