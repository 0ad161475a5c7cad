"""Whole events as JSON, one on each line, as ``tidelog consume --json`` prints them.

Bytes are text where they are valid UTF-8, and else ``{"base64": "..."}``. Nothing else is needed to
read the events back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.formats.base import Data, Sink, check_batch, file_name
from tidelog.codec.formats.batches import PIECE_BYTES, slices
from tidelog.codec.formats.streams import (
    READ_BYTES,
    CountedSink,
    decoding,
    open_text,
    text_sink,
)
from tidelog.model.event import from_iso, to_iso

__all__ = ["EventLineWriter", "read_event_lines"]


class _Base64(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    base64: bytes


_Text = str | _Base64


class _Line(msgspec.Struct, gc=False):
    topic: str
    partition: int
    offset: int
    timestamp: str
    id: str | None
    key: _Text | None
    value: _Text | None
    type: str | None
    headers: list[tuple[str, _Text | None]]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)


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

    def write(self, batch: pa.RecordBatch) -> None:
        """Every event has a line: nothing is a misfit."""
        check_batch(batch)
        for piece in slices(batch, PIECE_BYTES):
            self._text.write(_encoder.encode_lines(_lines_of(piece)))
            self.rows += piece.num_rows

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
            yield _batch_of(_decoder.decode_lines(rest + lines))
            rest = rest_of_chunk
        if rest:
            raise EOFError("its last line is cut off")


def _lines_of(batch: pa.RecordBatch) -> Iterator[_Line]:
    columns = {name: batch.column(name) for name in EVENT_SCHEMA.names}
    return map(
        _Line,
        columns["topic"].to_pylist(),
        columns["partition"].to_pylist(),
        columns["offset"].to_pylist(),
        map(_iso, columns["timestamp"].cast(pa.int64()).to_pylist()),
        columns["id"].to_pylist(),
        map(_text_of, columns["key"].to_pylist()),
        map(_text_of, columns["value"].to_pylist()),
        columns["type"].to_pylist(),
        map(_pairs, columns["headers"].to_pylist()),
    )


def _batch_of(lines: list[_Line]) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {
        name: [getattr(line, name) for line in lines] for name in EVENT_SCHEMA.names
    }
    columns["timestamp"] = list(map(from_iso, columns["timestamp"]))
    for name in ("key", "value"):
        columns[name] = list(map(_bytes_of, columns[name]))
    columns["headers"] = [
        [{"name": name, "value": _bytes_of(value)} for name, value in each] or None
        for each in columns["headers"]
    ]
    arrays = [pa.array(columns[field.name], field.type) for field in EVENT_SCHEMA]
    return pa.record_batch(arrays, schema=EVENT_SCHEMA)


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, _Text | None]]:
    return [(each["name"], _text_of(each["value"])) for each in headers] if headers else []


def _text_of(value: bytes | None) -> _Text | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _Base64(value)


def _bytes_of(text: _Text | None) -> bytes | None:
    if isinstance(text, str):
        return text.encode()
    return None if text is None else text.base64


def _iso(time_ms: int) -> str:
    seconds, rest_ms = divmod(time_ms, 1000)
    return f"{_second(seconds)}{rest_ms:03}Z"


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    """The part of a time that many events share."""
    return to_iso(seconds * 1000)[:-4]
