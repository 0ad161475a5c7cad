"""Batches of events, every format with every codec, and files of the ones in the others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats import Format, FormatSettings, open_format
from tidelog.model import limits

TYPED = "id bigint, user struct<name: string, tags: array<string>>"

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    *(("parquet", codec, {}) for codec in ("zstd", "snappy", "gzip", "lz4", "none")),
    *(("orc", codec, {}) for codec in ("zstd", "zlib", "snappy", "lz4", "none")),
    *(("avro", codec, {}) for codec in ("deflate", "snappy", "zstd", "none")),
    *(("jsonlines", codec, {}) for codec in ("gzip", "zstd", "none")),
    *(("jsonlines", codec, {"mode": "events"}) for codec in ("gzip", "zstd", "none")),
    *(("delimited", codec, {}) for codec in ("gzip", "zstd", "none")),
    ("delimited", "none", {"delimiter": ""}),
    ("delimited", "none", {"delimiter": "\x01ü"}),
    *(("sequence", codec, {}) for codec in ("zlib", "gzip", "none")),
    *(("sequence", codec, {"key": "msgpack"}) for codec in ("zlib", "gzip", "none")),
    *(("sequence", codec, {"compression": "record"}) for codec in ("zlib", "gzip")),
]


def label(variant: tuple[str, str, dict[str, Any]]) -> str:
    name, codec, settings = variant
    return "-".join([name, codec, *(f"{key}={value!r}" for key, value in settings.items())])


def opened(variant: tuple[str, str, dict[str, Any]]) -> Format:
    name, codec, settings = variant
    return open_format(name, codec, FormatSettings(**settings))


@dataclass(frozen=True)
class File:
    """What a writer left."""

    data: bytes
    sidecar: bytes | None
    misfits: pa.Table | None = None


def write(form: Format, batches: Sequence[pa.RecordBatch]) -> File:
    data, sidecar = io.BytesIO(), io.BytesIO() if form.sidecar_name("x") else None
    writer = form.writer(data, sidecar)
    misfits = [misfit for batch in batches if (misfit := writer.write(batch)) is not None]
    writer.close()
    writer.close()
    lost = sum(batch.num_rows for batch in misfits)
    assert writer.rows == sum(batch.num_rows for batch in batches) - lost
    assert writer.bytes_written == len(data.getvalue())
    found = pa.Table.from_batches(misfits) if misfits else None
    return File(data.getvalue(), None if sidecar is None else sidecar.getvalue(), found)


def read(form: Format, file: File) -> pa.Table:
    batches = list(form.read(file.data, file.sidecar))
    assert all(batch.schema.equals(EVENT_SCHEMA) for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, EVENT_SCHEMA)


def table(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches, EVENT_SCHEMA)


def batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Rows with what is given, and the plainest for the rest."""
    plain = {"topic": "orders", "partition": 3, "timestamp": 1_700_000_000_000}
    whole = [{"offset": index, **plain, **row} for index, row in enumerate(rows)]
    arrays = [
        pa.array([row.get(field.name) for row in whole], field.type) for field in EVENT_SCHEMA
    ]
    return pa.record_batch(arrays, schema=EVENT_SCHEMA)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.sampled_from(
    [b'{"a": 1}', b"[1,\n2]", b'{"a":\r\n"b"}', b"null", b"1", b'"x"', b'"a\nb"', b'{"a":', b"NaN"]
)
LINES = st.sampled_from([b"", b"\n", b"a\nb", b"\r", b"\n\n", "\x01ü".encode(), b"\xff\n", b"\x00"])
BYTES = st.binary(max_size=20) | TEXT.map(str.encode) | JSON | LINES
HEADERS = st.none() | st.lists(
    st.fixed_dictionaries({"name": TEXT | st.just("same"), "value": st.none() | BYTES}), max_size=4
)
TIMES = st.integers(0, limits.TIMESTAMP_MS_END - 1) | st.sampled_from(
    [0, 1, 999, 9_223_372_036_854, 9_223_372_036_855, limits.TIMESTAMP_MS_END - 1]
)
ROWS = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["orders", "ü", "a.b-c"]),
        "partition": st.integers(0, 2**31 - 1),
        "offset": st.integers(0, 2**63 - 1),
        "timestamp": TIMES,
        "id": st.none() | TEXT.filter(bool),
        "key": st.none() | BYTES,
        "value": st.none() | BYTES,
        "type": st.none() | TEXT,
        "headers": HEADERS,
    }
)
BATCHES = st.lists(st.lists(ROWS, max_size=6).map(batch), max_size=4)
