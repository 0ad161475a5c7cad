"""Byte streams: sinks that count, text streams that compress, and errors of decoders.

The caller owns its sinks: whatever is closed here, they stay open.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from tidelog.codec.formats.base import ByteSink, Data
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError

__all__ = [
    "READ_BYTES",
    "ZLIB_LEVEL",
    "CountedSink",
    "TextSink",
    "decoding",
    "exactly",
    "open_data",
    "open_text",
    "text_sink",
]

READ_BYTES = 4 << 20  # per read, for a file that is read from start to end
ZLIB_LEVEL = 3  # twice as fast as 6, and its files are 5% larger

_DEVICE = re.compile(r"\[errno \d+\]", re.IGNORECASE)  # ORC keeps only an error's text
_BAD_BYTES = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,  # of an invalid length
    RecursionError,
    struct.error,
    zlib.error,
    msgspec.MsgspecError,
)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns any error of a decoder on bad bytes into ``CorruptError``, even ``InvalidError``.

    A store's error about an object, such as missing rights, is not an error of a decoder.
    """
    try:
        yield
    except NotFoundError:
        raise
    except _BAD_BYTES as exc:
        if isinstance(exc, InvalidError) and "key" in exc.context:
            raise
        if isinstance(exc, OSError) and (exc.errno is not None or _DEVICE.search(str(exc))):
            raise UnavailableError(f"{what}: cannot be read ({exc}): try again") from exc
        reason = " ".join(str(exc).split())[:200]
        raise CorruptError(
            f"{what}: does not decode ({reason or type(exc).__name__}): "
            "keep it, and restore it from a copy"
        ) from exc


def open_data(data: Data) -> pa.NativeFile:
    """Returns bytes, a path or an open file as one kind of file. Raises ``NotFoundError``."""
    if isinstance(data, bytes | bytearray | memoryview | pa.Buffer):
        return pa.BufferReader(data)
    if isinstance(data, str | os.PathLike):
        try:
            return pa.OSFile(os.fspath(data), "rb")
        except FileNotFoundError as exc:
            raise NotFoundError(f"file `{os.fspath(data)}`: is not there: give another") from exc
        except OSError as exc:
            raise UnavailableError(f"file `{os.fspath(data)}`: cannot be opened ({exc})") from exc
    if isinstance(data, pa.NativeFile):
        return data
    return pa.PythonFile(data, "r")


def exactly(stream: pa.NativeFile, size: int) -> bytes:
    """Returns exactly this many bytes. Raises ``EOFError``."""
    if not 0 <= size < 1 << 31:
        raise ValueError(f"a part of it has {size} bytes")
    data: bytes = stream.read(size)
    if len(data) != size:
        raise EOFError(f"it ends {size - len(data)} bytes too early")
    return data


class CountedSink:
    """Counts what goes to a sink, and keeps it open when a writer above closes it."""

    closed = False

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self.count = 0

    def write(self, data: Any, /) -> int:
        """Writes everything, even if the sink accepts a part at a time."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left:
            taken = self._sink.write(left)
            if taken is None:  # an Arrow stream accepts all, and returns nothing
                break
            left = left[taken:]
        self.count += size
        return size

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class TextSink(Protocol):
    """A stream of text, compressed or not."""

    def write(self, data: Any, /) -> Any: ...

    def close(self) -> None: ...


def text_sink(sink: CountedSink, codec: str) -> TextSink:
    """Returns a sink that compresses text: as ``gzip``, as one ``zstd`` frame, or ``none``."""
    if codec == "gzip":
        return _GzipSink(sink)
    if codec == "zstd":
        zstd: TextSink = pa.CompressedOutputStream(pa.PythonFile(sink, "w"), "zstd")
        return zstd
    return sink


def open_text(data: Data, codec: str) -> pa.NativeFile:
    """Returns the text of a file, to be read from start to end."""
    file = open_data(data)
    if codec == "none":
        return file
    if file.size() == 0:
        raise EOFError("it is empty, and not even an empty file would be")
    return pa.CompressedInputStream(file, codec)


class _GzipSink:
    """One gzip member without name or time, so that the same text gives the same file."""

    def __init__(self, sink: CountedSink) -> None:
        self._sink = sink
        self._compressor = zlib.compressobj(ZLIB_LEVEL, zlib.DEFLATED, 31)

    def write(self, data: Any, /) -> None:
        self._sink.write(self._compressor.compress(data))

    def close(self) -> None:
        self._sink.write(self._compressor.flush())
