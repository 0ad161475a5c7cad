"""Two numbers inside an ORC file, where other readers do not mind them.

ORC has no checksum, and its C++ reader does not fail on bad bytes but crashes; and a stripe is cut
by its size after compression, so that one may hold more than an Arrow array can. So a crc32c over
the whole file and the size of its largest row are put into the last part, the PostScript, as
protobuf fields of their own, which readers pass over. The PostScript ends with the field
``magic``; one byte comes after it, the length of both.

The C++ writer does not survive a sink that raises either, so errors of the sink wait here.
"""

from __future__ import annotations

from typing import Any

import crc32c
import pyarrow as pa

from tidelog.codec.formats.streams import READ_BYTES, CountedSink, exactly
from tidelog.errors import InternalError

__all__ = ["TailSink", "check_tail"]

_MAGIC = bytes.fromhex("82f40303") + b"ORC"  # field 8000, text
_LARGEST = bytes.fromhex("f5f303")  # field 7998, four bytes, the lowest first
_CHECKSUM = bytes.fromhex("fdf303")  # field 7999, likewise
_OWN_BYTES = len(_LARGEST) + 4 + len(_CHECKSUM) + 4
_TAIL_BYTES = 1 + 255  # the longest PostScript and its length
_END_BYTES = _OWN_BYTES + len(_MAGIC) + 1


class TailSink:
    """Holds the last bytes back until the file is finished, and then puts the checksum in."""

    closed = False

    def __init__(self, sink: CountedSink) -> None:
        self._sink = sink
        self._held = b""
        self.largest = 0  # bytes of a row, as whoever writes the rows knows them
        self._failure: Exception | None = None
        self._checksum = 0

    def write(self, data: Any, /) -> int:
        """Everything but the last bytes goes on; never raises."""
        if self._failure is None:
            whole = self._held + bytes(data)
            try:
                self._give(whole[:-_TAIL_BYTES])
            except Exception as exc:  # noqa: BLE001 - kept for check
                self._failure = exc
            self._held = whole[-_TAIL_BYTES:]
        return len(data)

    def check(self) -> None:
        """Raise what the sink raised."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """The last bytes, with the checksum in them."""
        self.check()
        body, end = self._held[: -len(_MAGIC) - 1], self._held[-len(_MAGIC) - 1 :]
        length = end[-1] + _OWN_BYTES
        if end[:-1] != _MAGIC or length > 255:
            raise InternalError(f"orc: a file ends with {end.hex()}, expected its magic")
        self._give(body + _LARGEST + self.largest.to_bytes(4, "little"))
        end = _MAGIC + bytes([length])
        checksum = crc32c.crc32c(end, self._checksum)
        self._sink.write(_CHECKSUM + checksum.to_bytes(4, "little") + end)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def _give(self, data: bytes) -> None:
        if data:
            self._checksum = crc32c.crc32c(data, self._checksum)
            self._sink.write(data)


def check_tail(file: pa.NativeFile) -> int:
    """Read the whole file once; the size of its largest row.

    ``ValueError`` or ``EOFError`` unless every byte is as it was written.
    """
    left = file.size() - _END_BYTES
    if left <= 0:
        raise EOFError("it is too short")
    file.seek(0)
    found = 0
    while left:
        chunk = exactly(file, min(left, READ_BYTES))
        found = crc32c.crc32c(chunk, found)
        left -= len(chunk)
    end = exactly(file, _END_BYTES)
    largest, expected = end[3:7], int.from_bytes(end[10:14], "little")
    if (end[:3], end[7:10], end[14:-1]) != (_LARGEST, _CHECKSUM, _MAGIC):
        raise ValueError("it has no checksum at its end, so it is cut off or was not written here")
    found = crc32c.crc32c(end[14:], crc32c.crc32c(end[:7], found))
    if found != expected:
        raise ValueError(f"expected crc32c {expected:08x}, found {found:08x}")
    file.seek(0)
    return int.from_bytes(largest, "little")
