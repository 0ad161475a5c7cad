"""Files of text: delimited values, or JSON lines, with a sidecar beside them.

The format decides what a record looks like: its *shape* makes records of values. Lengths are in the
sidecar, so a value may contain the delimiter and still comes back whole.

**Delimited text** is each value followed by a delimiter, by default a line break. Values are
written as they are, so readers of the text alone must know that none contains the delimiter. A null
value is an empty record. Everything else is in the sidecar, so that everything comes back exactly.

**JSON lines** have two modes: a line is the event's value, or the whole event. In mode ``value``
line *n* is event *n*, and every line is JSON, whatever the value was:

* a value that is JSON on one line stays as it is, byte for byte;
* JSON over several lines gets spaces for its line breaks, which means the same;
* text that is not JSON becomes a JSON string, other bytes ``{"base64": "..."}``, null ``null``.

The sidecar keeps the value itself if the line differs from it, so that everything comes back
exactly. In mode ``events`` a line is what ``tidelog consume --json`` prints, and there is no
sidecar: nothing else is needed to read the events. An empty list of headers comes back as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_json import batch_lines, batch_of_lines
from tidelog.codec.formats.base import (
    ByteSink,
    Data,
    FileWriter,
    Format,
    FormatSettings,
    check_batch,
    check_no_sidecar,
    check_settings,
    choose_codec,
    choose_setting,
    file_name,
)
from tidelog.codec.formats.batches import (
    PIECE_BYTES,
    READ_BYTES,
    CountedSink,
    binary_array,
    binary_data,
    decoding,
    exactly,
    open_text,
    slices,
    text_sink,
)
from tidelog.codec.formats.parquet import Sidecar, SidecarWriter, check_sidecar, sidecar_name
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.decoding import is_deep_json

__all__ = [
    "EXTENSIONS",
    "DelimitedFormat",
    "LineWriter",
    "Shape",
    "ShapedRecords",
    "is_text",
    "json_records",
    "open_delimited",
    "open_jsonlines",
    "plain",
    "read_event_lines",
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


_BREAKS = (0x0A, 0x0D)  # Hadoop's line reader ends a line at a carriage return
_decode = msgspec.json.Decoder(msgspec.Raw).decode  # checks, and builds nothing
_NOT_JSON = msgspec.DecodeError


def open_jsonlines(codec: str | None, settings: FormatSettings) -> JsonLinesFormat:
    """Returns the format; checks its settings."""
    check_settings("jsonlines", settings, "mode")
    codec = choose_codec("jsonlines", codec, "gzip", "zstd", "none")
    return JsonLinesFormat(
        codec, choose_setting("jsonlines", "mode", settings.mode, "value", "events")
    )


@dataclass(frozen=True, slots=True)
class JsonLinesFormat:
    """One JSON text on each line."""

    codec: str
    mode: str
    name: ClassVar[str] = "jsonlines"

    @property
    def extension(self) -> str:
        """Returns ``.jsonl`` and the codec's suffix."""
        return f".jsonl{EXTENSIONS[self.codec]}"

    def sidecar_name(self, name: str) -> str | None:
        """Returns a name beside the data file; whole events need none."""
        return sidecar_name(name) if self.mode == "value" else None

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Starts a file, and its sidecar in mode ``value``."""
        if self.mode == "events":
            check_no_sidecar("jsonlines` in mode `events", sidecar)
            return EventLineWriter(sink, self.codec)
        beside: ByteSink = check_sidecar(self.name, sidecar)
        return LineWriter(sink, beside, self.codec, b"\n", json_records)

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of a file."""
        if self.mode == "events":
            check_no_sidecar("jsonlines` in mode `events", sidecar)
            return read_event_lines(self.name, data, self.codec)
        beside: Data = check_sidecar(self.name, sidecar)
        return read_lines(self.name, data, beside, self.codec, b"\n")


def json_records(values: pa.Array) -> ShapedRecords:
    """Returns each value as JSON on one line, and the values that differ from their line."""
    filled = pc.fill_null(values, b"")
    texts: list[bytes] = filled.to_pylist()
    wrong = _not_json(texts)
    if _has_breaks(filled) or not _is_utf8(filled):
        wrong += [
            index
            for index, text in enumerate(texts)
            if b"\n" in text or b"\r" in text or not is_text(text)
        ]
    if not wrong:
        return ShapedRecords(filled)
    kept: list[bytes | None] = [None] * len(texts)
    nulls = values.is_null().to_numpy(zero_copy_only=False)
    for index in sorted(set(wrong)):
        kept[index] = None if nulls[index] else texts[index]
        texts[index] = _as_line(kept[index])
    return ShapedRecords(pa.array(texts, pa.binary()), pa.array(kept, pa.binary()))


def _as_line(value: bytes | None) -> bytes:
    if value is None:
        return b"null"
    if not is_text(value):
        return msgspec.json.encode({"base64": value})
    if _not_json([value]):
        return msgspec.json.encode(value.decode())
    return value.replace(b"\n", b" ").replace(b"\r", b" ")  # JSON has none inside of strings


def _not_json(texts: list[bytes]) -> list[int]:
    wrong = []
    for index, text in enumerate(texts):
        if is_deep_json(text):
            wrong.append(index)
            continue
        try:
            _decode(text)
        except _NOT_JSON:
            wrong.append(index)
    return wrong


def _has_breaks(values: pa.Array) -> bool:
    data = np.frombuffer(binary_data(values), np.uint8)
    return any(bool((data == each).any()) for each in _BREAKS)


def _is_utf8(values: pa.Array) -> bool:
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def is_text(value: bytes) -> bool:
    """Returns whether bytes are UTF-8, so that JSON can contain them as they are."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


_is_format: type[Format] = JsonLinesFormat


class EventLineWriter:
    """Writes events as lines."""

    def __init__(self, sink: ByteSink, codec: str) -> None:
        self._counted = CountedSink(sink)
        self._text = text_sink(self._counted, codec)
        self._closed = False
        self.rows = 0

    @property
    def bytes_written(self) -> int:
        """Returns how much the compressor has written."""
        return self._counted.count

    @property
    def bytes_held(self) -> int:
        """Returns 0: only the compressor's window is in memory."""
        return 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes a line for every event; there are no misfits."""
        check_batch(batch)
        for piece in slices(batch, PIECE_BYTES):
            self._text.write(batch_lines(piece))
            self.rows += piece.num_rows

    def flush(self) -> None:
        """Does nothing, since nothing is held."""

    def close(self) -> None:
        """Finishes the file."""
        if not self._closed:
            self._closed = True
            self._text.close()


def read_event_lines(format: str, data: Data, codec: str) -> Iterator[pa.RecordBatch]:
    """Yields the events of a file; the last line must be complete."""
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
