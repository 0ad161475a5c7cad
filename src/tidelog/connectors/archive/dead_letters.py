"""Dead letters of archives: which events an archive refuses, and the files that keep them.

An archive accepts exactly the events that a restore can put into a topic. Sources may have events
that no topic accepts, such as Kafka records with 20,000 headers, or files with empty ids. Such an
event becomes a dead letter, complete and with the reason; the events around it are archived. A
restore, which also reads dead letters, leaves it in the archive and counts it
(``archive.restore``). The limits are those for copies: neither Tidelog's own additions to an event
nor a lower ``event_bytes_max`` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.event_batch import EVENT_SCHEMA, problem_of_text, refused_events
from tidelog.codec.formats.base import MISFIT_SCHEMA
from tidelog.connectors.archive.staging import MakeEntry, StagedFiles
from tidelog.model.limits import EVENT_BYTES_CEILING, TIMESTAMP_MS_END
from tidelog.model.pipeline import FileEntry

__all__ = ["CHANGED", "DeadLetters", "encode_dead_letters", "split_refused"]

CHANGED = "tidelog-changed"  # header of a dead letter whose time or text was changed: why

_TIMES = EVENT_SCHEMA.field("timestamp").type
_HEADERS = EVENT_SCHEMA.field("headers").type
_FILE_BYTES = 32 << 20  # in memory; then a file of dead letters is stored


def split_refused(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Returns the events that an archive accepts, and the others with their errors, if any."""
    errors = {**refused_events(batch, EVENT_BYTES_CEILING, own=True), **_wrong_times(batch)}
    rows: dict[int, str] = {}  # of a source that are not valid events
    if "error" in batch.schema.names:
        given = enumerate(batch.column("error").to_pylist())
        rows = {row: error for row, error in given if error is not None}
        errors |= rows
        batch = batch.select(EVENT_SCHEMA.names)
    if not errors:
        return batch, None
    bad = np.zeros(batch.num_rows, bool)
    bad[list(errors)] = True
    reasons = [errors[row] for row in sorted(errors)]
    refused = _readable(
        batch.filter(pa.array(bad)), reasons, [row in rows for row in sorted(errors)]
    )
    misfits = pa.record_batch([*refused.columns, pa.array(reasons)], schema=MISFIT_SCHEMA)
    return batch.filter(pa.array(~bad)), misfits


def _wrong_times(batch: pa.RecordBatch) -> dict[int, str]:
    times = batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero((times < 0) | (times >= TIMESTAMP_MS_END))
    return {
        int(row): f"event: its time {int(times[row])} ms is outside of the years 1970 to 9999"
        for row in rows
    }


def _readable(refused: pa.RecordBatch, reasons: list[str], made: list[bool]) -> pa.RecordBatch:
    """Returns events whose time and text every reader can show. A header says what changed.

    Bytes that are not UTF-8 become ``\\xNN``, and times become the nearest valid one. The header
    stays with the event when it is restored. ``made`` rows, which were not valid events, also get
    it.
    """
    times = refused.column("timestamp").cast(pa.int64())
    shown = pc.max_element_wise(pc.min_element_wise(times, TIMESTAMP_MS_END - 1), 0)
    late = pc.not_equal(times, shown).to_pylist()
    changed = [one or other for one, other in zip(late, made, strict=True)]
    if problem_of_text(refused) is not None:
        rows = range(refused.num_rows)
        changed = [changed[row] or problem_of_text(refused.slice(row, 1)) for row in rows]
    if not any(changed):
        return refused
    columns: dict[str, Any] = {name: refused.column(name) for name in EVENT_SCHEMA.names}
    columns["timestamp"] = shown.cast(_TIMES)
    for name in ("id", "type"):
        columns[name] = pa.array(_texts(columns[name]), pa.string())
    headers = [_headers(each) for each in columns["headers"]]
    for row, reason in enumerate(reasons):
        if changed[row]:
            headers[row] = [*(headers[row] or ()), {"name": CHANGED, "value": reason.encode()}]
    columns["headers"] = pa.array(headers, _HEADERS)
    return pa.record_batch([columns[name] for name in EVENT_SCHEMA.names], schema=EVENT_SCHEMA)


def _headers(event: pa.ListScalar) -> list[dict[str, Any]] | None:
    if not event.is_valid:
        return None
    names = _texts(pc.struct_field(event.values, "name"))
    values = pc.struct_field(event.values, "value").to_pylist()
    return [{"name": n, "value": v} for n, v in zip(names, values, strict=True)]


def _texts(column: pa.Array) -> list[str | None]:
    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return [None if raw is None else raw.decode(errors="backslashreplace") for raw in found]


class DeadLetters:
    """Collects dead letters, and stages them in their own files, sorted by offset."""

    def __init__(self, uploads: StagedFiles, target: Callable[[int], str]) -> None:
        self._uploads = uploads
        self._target = target  # returns the target of a file by its first offset
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self.first = (-1, "")  # offset and error of one of the first
        self.count = 0

    def bury(self, rows: pa.RecordBatch, errors: pa.Array) -> None:
        """Adds events and their errors."""
        self.add(pa.record_batch([*rows.columns, errors], schema=MISFIT_SCHEMA))

    def add(self, misfits: pa.RecordBatch) -> None:
        """Adds events with an error column."""
        if misfits.num_rows == 0:
            return
        if not self.count:
            self.first = (misfits.column("offset")[0].as_py(), misfits.column("error")[0].as_py())
        self._waiting.append(misfits)
        self._bytes += misfits.nbytes
        self.count += misfits.num_rows
        if self._bytes >= _FILE_BYTES:
            self._stage()

    def close(self) -> None:
        """Stages the rest."""
        if self._waiting:
            self._stage()

    def _stage(self) -> None:
        table = pa.Table.from_batches(self._waiting, MISFIT_SCHEMA).sort_by("offset")
        self._waiting, self._bytes = [], 0
        self._uploads.add(encode_dead_letters(table), self._entry(table))

    def _entry(self, table: pa.Table) -> MakeEntry:
        offsets = table.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        times = pc.min_max(table.column("timestamp").cast(pa.int64())).as_py()
        return lambda staged, size, crc: FileEntry(
            staged=staged,
            target=self._target(first),
            size=size,
            crc=crc,
            events=table.num_rows,
            first_offset=first,
            last_offset=last,
            first_ms=times["min"],
            last_ms=times["max"],
            kind="dead",
        )


def encode_dead_letters(rows: pa.Table) -> bytes:
    """Returns the bytes of a file of dead letters, which is Parquet in every archive."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())
