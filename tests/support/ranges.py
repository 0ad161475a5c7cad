"""Ranges for sinks, as a pipeline would give them: staged, and told in a manifest."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA, table_of, with_position
from tidelog.connectors.sink import Sink
from tidelog.model.event import Event
from tidelog.model.pipeline import Manifest

EVERYTHING = (
    Event(None, b"k", None, 5, None, (("h", b"1"), ("h", b""), ("\u00e4", b"\xff\x00"))),
    Event(b"", None, None, 6),
    Event(b"\xff\x00", b"", None, 7, None, (("h", b"2"), ("null", None))),
    Event(b"plain", b"key", None, 0),
    Event(b"late", b"key", None, 253_402_300_799_999),
)
NAMED = (
    Event(b"with id", b"k", "id-1", 8, "created", (("h", b"1"),)),
    Event(None, None, "id-2", 9),
    Event(b"typed", None, None, 10, "deleted"),
)


def batch_of(events: Sequence[Event], partition: int = 0, base: int = 0) -> pa.RecordBatch:
    """Events in event columns, as a source gives them."""
    if not events:
        return pa.RecordBatch.from_pylist([], schema=EVENT_SCHEMA)
    table = table_of(events, 0).combine_chunks()
    return with_position(table.to_batches()[0], "from", partition, base)


def stage(
    sink: Sink, batches: Sequence[pa.RecordBatch], ordinal: int = 0, source: str = "from/0"
) -> Manifest:
    """A range of a source partition, staged and recorded."""
    writer = sink.writer(source, f"staging/pipe/0000000001/{uuid.uuid4().hex}")
    for batch in batches:
        writer.write(batch)
    written = writer.close()
    read = sum(batch.num_rows for batch in batches)
    return Manifest(
        pipeline="pipe",
        partition=source,
        start=str(ordinal),
        end=str(ordinal + read),
        ordinal=ordinal,
        read=read,
        written=written.events,
        files=written.files,
    )
