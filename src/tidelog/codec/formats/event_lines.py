"""Whole events as JSON, one on each line, as ``tidelog consume --json`` prints them.

Nothing else is needed to read the events back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidelog.codec.event_json import batch_lines, batch_of_lines
from tidelog.codec.formats.base import Data, Sink, check_batch, file_name
from tidelog.codec.formats.batches import PIECE_BYTES
from tidelog.codec.formats.streams import (
    READ_BYTES,
    CountedSink,
    decoding,
    open_text,
    text_sink,
)
from tidelog.codec.sizes import slices

__all__ = ["EventLineWriter", "read_event_lines"]


class EventLineWriter:
    """Writes events as lines."""

    def __init__(self, sink: Sink, codec: str) -> None:
        self._counted = CountedSink(sink)
        self._text = text_sink(self._counted, codec)
        self._closed = False
        self.rows = 0

    @property
    def bytes_written(self) -> int:
        """What the compressor has given out."""
        return self._counted.count

    @property
    def bytes_held(self) -> int:
        """Nothing but the compressor's window."""
        return 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Every event has a line: nothing is a misfit."""
        check_batch(batch)
        for piece in slices(batch, PIECE_BYTES):
            self._text.write(batch_lines(piece))
            self.rows += piece.num_rows

    def flush(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Finish the file."""
        if not self._closed:
            self._closed = True
            self._text.close()


def read_event_lines(format: str, data: Data, codec: str) -> Iterator[pa.RecordBatch]:
    """The events of a file; the last line must be a whole one."""
    with decoding(file_name(format, data)):
        text = open_text(data, codec)
        rest = b""
        while chunk := text.read(READ_BYTES):
            lines, line_break, rest_of_chunk = chunk.rpartition(b"\n")
            if not line_break:
                rest += chunk
                continue
            yield batch_of_lines(rest + lines)
            rest = rest_of_chunk
        if rest:
            raise EOFError("its last line is cut off")
