"""Reads the lines of a file or a pipe in batches: large ones if many lines come, soon if few.

Binary safe; a line ends with a newline, which is not part of it, or with the input. If the first
line ends with a carriage return too, lines end so, and it is not part of them either. Under a name
only lines that have their newline count, since the rest may come later. Memory is bounded by the
size of a batch and of the longest line.
"""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tidelog.clock import Clock
from tidelog.codec.fields import CsvRows
from tidelog.errors import FailedError

__all__ = ["InputLines", "LinesReader", "input_size"]

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
        self,
        source: BinaryIO,
        clock: Clock,
        stopped: Callable[[], bool],
        line_bytes_max: int,
        rows: CsvRows | None = None,
    ) -> None:
        self._source = source
        self._clock = clock
        self._stopped = stopped
        self._line_bytes_max = line_bytes_max
        self._rows = rows  # which lines are, if they are CSV
        self._end: bytes | None = None  # of lines, before their newline: a carriage return or none
        self._file = _file_of(source)
        self._waits = self._file is not None and not _is_regular(self._file)
        self._ended = False
        self.read_bytes = 0  # so far
        self.unended: int | None = None  # the number of a last line that was left out

    @property
    def has_header(self) -> bool:
        """Returns whether the first line names the fields of the others."""
        return self._rows is not None

    @property
    def has_ended(self) -> bool:
        """Returns whether the input was read to its end."""
        return self._ended

    def batches(self, linger_s: float, only_ended: bool = False) -> Iterator[InputLines]:
        """Yields all lines, or rows of CSV as JSON, as :meth:`_plain_batches` does."""
        if self._rows is None:
            yield from self._plain_batches(linger_s, only_ended)
            return
        number = 1
        for batch in self._plain_batches(linger_s, only_ended):
            done, failure = self._rows.objects(batch.lines)
            if done:
                yield InputLines(number, done)
                number += len(done)
            if failure is not None:  # what comes before it is stored
                raise failure
        if self._ended and self._rows.is_open:
            if not only_ended:
                raise FailedError(f"line {number}: a quoted field does not end", line=number)
            self.unended = number

    def _plain_batches(self, linger_s: float, only_ended: bool) -> Iterator[InputLines]:
        """Yields all lines; from a pipe, in each batch what has come within ``linger_s``.

        ``FailedError`` for a line that is too long. An unended line counts at the end of the
        input, but not with ``only_ended``, nor when reading was stopped before it.
        """
        number, rest = 1, b""
        while not self._ended and (data := self._gather(linger_s)):
            *lines, rest = (rest + data).split(b"\n")
            self._find_end(lines)
            if self._ended and rest and not only_ended:
                lines.append(rest)
                rest = b""
            if lines:
                yield InputLines(number, self._without_ends(lines))
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
                yield InputLines(number, self._without_ends([rest]))

    def _find_end(self, lines: list[bytes]) -> None:
        """Learns how lines end from the first that has its newline; one without keeps all bytes."""
        if self._end is None and lines:
            self._end = b"\r" if lines[0].endswith(b"\r") else b""

    def _without_ends(self, lines: list[bytes]) -> list[bytes]:
        """Returns lines without carriage returns, if the input's first line ends with one."""
        return [line.removesuffix(self._end) for line in lines] if self._end else lines

    def _gather(self, linger_s: float) -> bytes:
        """Waits for input and returns what there is; nothing at the end."""
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
        """Waits for input until a time. Returns False to go on without it."""
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


def input_size(source: BinaryIO) -> int | None:
    """Returns how many bytes an input has, where that can be known."""
    file = _file_of(source)
    return None if file is None or not _is_regular(file) else os.fstat(file).st_size
