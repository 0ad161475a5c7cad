"""JSON lines, in two modes: a line is the event's value, or the whole event.

In mode ``value`` line *n* is event *n*, and every line is JSON, whatever the value was:

* a value that is JSON on one line stays as it is, byte for byte;
* JSON over several lines gets spaces for its line breaks, which means the same;
* text that is not JSON becomes a JSON string, other bytes ``{"base64": "..."}``, null ``null``.

The sidecar keeps the value itself if the line differs from it, so that everything comes back
exactly. In mode ``events`` a line is what ``tidelog consume --json`` prints, and there is no
sidecar: nothing else is needed to read the events. An empty list of headers comes back as none.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tidelog.codec.formats.batches import PIECE_BYTES, binary_data
from tidelog.codec.formats.sidecar import check_sidecar, sidecar_name
from tidelog.codec.formats.streams import READ_BYTES, CountedSink, decoding, open_text, text_sink
from tidelog.codec.formats.text_lines import EXTENSIONS, LineWriter, ShapedRecords, read_lines
from tidelog.codec.sizes import slices
from tidelog.model.decoding import is_deep_json

__all__ = [
    "EventLineWriter",
    "JsonLinesFormat",
    "is_text",
    "json_records",
    "open_jsonlines",
    "read_event_lines",
]

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


_: type[Format] = JsonLinesFormat


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
