"""Dead letters of a range: events that no parser or schema takes, whole, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.formats.base import MISFIT_SCHEMA
from tidelog.errors import InvalidError
from tidelog.model.pipeline import FileEntry
from tidelog.sinks.uploads import Put, Uploads

__all__ = ["DeadLetters"]

_LEAST = 100  # dead letters that never stop a range, whatever their share
_FILE_BYTES = 32 << 20  # in memory; then a file of them is stored


class DeadLetters:
    """Collects them, and stages them in files of their own, sorted by offset."""

    def __init__(self, uploads: Uploads, target: Callable[[int], str]) -> None:
        self._uploads = uploads
        self._target = target  # where a file belongs whose first offset is this one
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self._first_error = ""
        self.count = 0

    def bury(self, rows: pa.RecordBatch, errors: pa.Array) -> None:
        """Events and why they are dead."""
        self.add(pa.record_batch([*rows.columns, errors], schema=MISFIT_SCHEMA))

    def add(self, misfits: pa.RecordBatch) -> None:
        """Events with their errors."""
        if misfits.num_rows == 0:
            return
        self._first_error = self._first_error or misfits.column("error")[0].as_py()
        self._waiting.append(misfits)
        self._bytes += misfits.nbytes
        self.count += misfits.num_rows
        if self._bytes >= _FILE_BYTES:
            self._stage()

    def close(self, what: str, read: int, share_max: float) -> None:
        """Stage the rest. ``InvalidError`` when there are too many among the events read."""
        if self.count >= _LEAST and self.count > share_max * read:
            raise InvalidError(
                f"source partition `{what}`: {self.count} of {read} events are dead letters, the "
                f"allowed share is {share_max}; the first: {self._first_error}: mend the parser, "
                "or allow a greater share of them"
            )
        if self._waiting:
            self._stage()

    def _stage(self) -> None:
        table = pa.Table.from_batches(self._waiting, MISFIT_SCHEMA).sort_by("offset")
        self._waiting, self._bytes = [], 0
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        self._uploads.add(sink.getvalue().to_pybytes(), self._entry(table))

    def _entry(self, table: pa.Table) -> Put:
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
