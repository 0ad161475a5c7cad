"""A checksum inside an ORC file, where other readers do not mind it.

ORC has none, and its C++ reader does not fail on bad bytes but crashes. So a crc32c over the whole
file is put into its last part, the PostScript, as one more protobuf field, which readers pass
over. It is checked before the reader sees the file. The PostScript ends with the field ``magic``;
one byte comes after it, the length of both.

The C++ writer does not survive a sink that raises either, so errors of the sink wait here.
"""

from __future__ import annotations

from typing import Any

import crc32c
import pyarrow as pa

from tidelog.codec.formats.streams import READ_BYTES, CountedSink, exactly
from tidelog.errors import InternalError

__all__ = ["TailSink", "check_checksum"]

_MAGIC = bytes.fromhex("82f40303") + b"ORC"  # field 8000, text
_TAG = bytes.fromhex("fdf303")  # field 7999, four bytes, the lowest first
_TAIL_BYTES = 1 + 255  # the longest PostScript and its length
_END_BYTES = len(_TAG) + 4 + len(_MAGIC) + 1


class TailSink:
    """Holds the last bytes back until the file is finished, and then puts the checksum in."""

    closed = False

    def __init__(self, sink: CountedSink) -> None:
        self._sink = sink
        self._held = b""
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
        length = end[-1] + len(_TAG) + 4
        if end[:-1] != _MAGIC or length > 255:
            raise InternalError(f"orc: a file ends with {end.hex()}, expected its magic")
        self._give(body)
        end = _MAGIC + bytes([length])
        checksum = crc32c.crc32c(end, self._checksum)
        self._sink.write(_TAG + checksum.to_bytes(4, "little") + end)

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


def check_checksum(file: pa.NativeFile) -> None:
    """Read the file once; ``ValueError`` or ``EOFError`` unless it is as it was written."""
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
    tag, expected, rest = end[: len(_TAG)], end[len(_TAG) : len(_TAG) + 4], end[len(_TAG) + 4 :]
    if tag != _TAG or rest[:-1] != _MAGIC:
        raise ValueError("it has no checksum at its end, so it is cut off or was not written here")
    found = crc32c.crc32c(rest, found)
    if found != int.from_bytes(expected, "little"):
        raise ValueError(
            f"expected crc32c {int.from_bytes(expected, 'little'):08x}, found {found:08x}"
        )
    file.seek(0)
