"""A file of an archive without some of its events: the same format, columns and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.codec.formats.base import MISFIT_SCHEMA, OwnColumns
from tidelog.errors import InternalError
from tidelog.model.archive import Making
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.contents import ArchiveFiles
from tidelog.sinks.spool import Spool
from tidelog.store.base import Store

__all__ = ["Lessened", "Lessener"]


class Lessened:
    """The bytes of a file, and of its sidecar where it has one, and how many events are gone."""

    def __init__(self, data: bytes, sidecar: bytes | None, events: int, erased: int) -> None:
        self.data = data
        self.sidecar = sidecar
        self.events = events
        self.erased = erased


class Lessener:
    """Takes events out of files of one generation, by their offsets."""

    def __init__(self, store: Store, making: Making) -> None:
        self._files = ArchiveFiles(store, making)
        settings = settings_of(making.format_settings)
        self._format: Format = open_format(making.format, making.codec or None, settings)

    def sidecar_name(self, target: str) -> str | None:
        """What the sidecar of a data file is called."""
        return self._format.sidecar_name(target)

    def without(
        self, manifest: Manifest, file: FileEntry, offsets: np.ndarray[Any, Any]
    ) -> Lessened | None:
        """The file without these offsets; None when it has none of them.

        ``CorruptError`` unless it is as the manifest says.
        """
        gone = pa.array(offsets, pa.int64())

        def is_gone(batch: pa.RecordBatch) -> pa.Array:
            return pc.is_in(self._files.offsets(batch, file).cast(pa.int64()), gone)

        return self.without_rows(manifest, file, is_gone)

    def without_rows(
        self, manifest: Manifest, file: FileEntry, is_gone: Callable[[pa.RecordBatch], pa.Array]
    ) -> Lessened | None:
        """The same, for the rows of each batch that ``is_gone`` says."""
        kept: list[pa.RecordBatch] = []
        erased = 0
        for batch in self._files.batches(manifest, file):
            part = batch.filter(pc.invert(is_gone(batch)))
            erased += batch.num_rows - part.num_rows
            kept.append(part)
        if not erased:
            return None
        events = sum(part.num_rows for part in kept)
        if file.kind == "dead":
            return Lessened(_dead_letters(kept), None, events, erased)
        if not self._files.restorable:
            return Lessened(self._own_columns(kept), None, events, erased)
        return Lessened(*self._of_events(kept), events, erased)

    def _of_events(self, kept: list[pa.RecordBatch]) -> tuple[bytes, bytes | None]:
        data = Spool()
        sidecar = Spool() if self._format.sidecar_name("x") else None
        writer = self._format.writer(data, sidecar)
        for batch in kept:
            misfits = writer.write(batch) if batch.num_rows else None
            if misfits is not None and misfits.num_rows:
                raise InternalError("a file's own events do not fit its schema any more")
        writer.close()
        return data.take(), sidecar.take() if sidecar else None

    def _own_columns(self, kept: list[pa.RecordBatch]) -> bytes:
        """Typed columns without the raw value: rows are copied as they are."""
        if isinstance(self._format, OwnColumns):
            file = Spool()
            self._format.write_columns(file, kept)
            return file.take()
        table = pa.Table.from_batches(kept)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=self._format.codec, write_page_checksum=True)
        return bytes(sink.getvalue().to_pybytes())


def _dead_letters(kept: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches(kept, MISFIT_SCHEMA), sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())
