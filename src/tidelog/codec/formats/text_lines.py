"""Records of text with a delimiter between them, and a sidecar beside them.

The format decides what a record looks like: its *shape* makes records of values. Lengths are in the
sidecar, so a value may contain the delimiter and still comes back whole.

Delimited text is each value followed by a delimiter, by default a line break. Values are written as
they are, so readers of the text alone must know that none contains the delimiter. A null value is
an empty record. Everything else is in the sidecar, so that everything comes back exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.formats.base import (
    ByteSink,
    Data,
    FileWriter,
    Format,
    FormatSettings,
    check_batch,
    check_settings,
    choose_codec,
    file_name,
)
from tidelog.codec.formats.batches import PIECE_BYTES, binary_array, binary_data
from tidelog.codec.formats.sidecar import Sidecar, SidecarWriter, check_sidecar, sidecar_name
from tidelog.codec.formats.streams import CountedSink, decoding, exactly, open_text, text_sink
from tidelog.codec.sizes import slices
from tidelog.errors import CorruptError, InvalidError

__all__ = [
    "EXTENSIONS",
    "DelimitedFormat",
    "LineWriter",
    "Shape",
    "ShapedRecords",
    "open_delimited",
    "plain",
    "read_lines",
]

EXTENSIONS = {"gzip": ".gz", "zstd": ".zst", "none": ""}


@dataclass(frozen=True, slots=True)
class ShapedRecords:
    """Records, none of which is null, and the values of those that differ from theirs."""

    records: pa.Array
    kept: pa.Array | None = None


Shape = Callable[[pa.Array], ShapedRecords]


def plain(values: pa.Array) -> ShapedRecords:
    """Returns each value as its own record, and a null as an empty one."""
    return ShapedRecords(pc.fill_null(values, b""))


class LineWriter:
    """Writes records to one sink and the rest to the other."""

    def __init__(
        self, sink: ByteSink, sidecar: ByteSink, codec: str, delimiter: bytes, shape: Shape
    ) -> None:
        self._counted = CountedSink(sink)
        self._text = text_sink(self._counted, codec)
        self._sidecar = SidecarWriter(sidecar)
        self._delimiter = pa.scalar(delimiter, pa.binary())
        self._shape = shape
        self._closed = False
        self.rows = 0

    @property
    def bytes_written(self) -> int:
        """Returns how much the compressor has written."""
        return self._counted.count

    @property
    def bytes_held(self) -> int:
        """Returns what the sidecar has collected."""
        return self._sidecar.bytes_held

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes a record for every value; there are no misfits."""
        check_batch(batch)
        for piece in slices(batch, PIECE_BYTES):
            shaped = self._shape(piece.column("value"))
            joined = pc.binary_join_element_wise(shaped.records, self._delimiter, b"")
            data = binary_data(joined)
            self._text.write(data)
            lengths = pc.binary_length(shaped.records)
            self._sidecar.append(piece, data, lengths.to_numpy(), shaped.kept)
            self.rows += piece.num_rows

    def flush(self) -> None:
        """Writes what the sidecar has collected."""
        self._sidecar.flush()

    def close(self) -> None:
        """Finishes both files."""
        if not self._closed:
            self._closed = True
            self._text.close()
            self._sidecar.finish()


def read_lines(
    format: str, data: Data, sidecar: Data, codec: str, delimiter: bytes
) -> Iterator[pa.RecordBatch]:
    """Yields the events of a data file and its sidecar."""
    what = file_name(format, data)
    rows_of = Sidecar(sidecar, what)
    with decoding(what):
        text = open_text(data, codec)
        for rows in rows_of.rows():
            lengths = rows.column("length").to_numpy() + len(delimiter)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            raw = exactly(text, int(offsets[-1]))
            joined = binary_array(offsets, raw)
            if delimiter and not pc.all(pc.ends_with(joined, delimiter)).as_py():
                raise CorruptError(
                    f"{what}: has no delimiter where its sidecar expects one: keep both"
                )
            records = pc.binary_slice(joined, 0, -len(delimiter)) if delimiter else joined
            yield rows_of.join(rows, records, raw)
        rows_of.check_end(text.read(1))


DELIMITER_BYTES_MAX = 16  # a delimiter is a mark, not a text; empty means none


def open_delimited(codec: str | None, settings: FormatSettings) -> DelimitedFormat:
    """Returns the format; checks its settings."""
    check_settings("delimited", settings, "delimiter")
    codec = choose_codec("delimited", codec, "gzip", "zstd", "none")
    text = "\n" if settings.delimiter is None else settings.delimiter
    try:
        delimiter = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidError(f"format `delimited`: delimiter {text!r} is not Unicode: {exc}") from exc
    if len(delimiter) > DELIMITER_BYTES_MAX:
        raise InvalidError(
            f"format `delimited`: its delimiter has {len(delimiter)} bytes: give "
            f"{DELIMITER_BYTES_MAX} at most"
        )
    return DelimitedFormat(codec, delimiter)


@dataclass(frozen=True, slots=True)
class DelimitedFormat:
    """Values with a delimiter after each, and a sidecar."""

    codec: str
    delimiter: bytes
    name: ClassVar[str] = "delimited"

    @property
    def extension(self) -> str:
        """Returns only the codec's suffix, as in Secor."""
        return EXTENSIONS[self.codec]

    def sidecar_name(self, name: str) -> str | None:
        """Returns a name beside the data file."""
        return sidecar_name(name)

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Starts a file and its sidecar."""
        beside: ByteSink = check_sidecar(self.name, sidecar)
        return LineWriter(sink, beside, self.codec, self.delimiter, plain)

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of both files."""
        beside: Data = check_sidecar(self.name, sidecar)
        return read_lines(self.name, data, beside, self.codec, self.delimiter)


_: type[Format] = DelimitedFormat
