"""Rewrites a file of an archive without some events: same format, columns and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.archive.read import ArchiveFiles
from tidelog.catalog.update import rounds
from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.codec.formats.base import MISFIT_SCHEMA, OwnColumns
from tidelog.connectors.archive.staging import Spool
from tidelog.errors import (
    ConflictError,
    InternalError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store.base import Store

__all__ = [
    "FILE_ATTEMPTS",
    "FileRewriter",
    "RewrittenFile",
    "file_busy",
    "replace_object",
]


class RewrittenFile:
    """The bytes of a file and its sidecar, if any, and how many events were removed or changed."""

    def __init__(
        self, data: bytes, sidecar: bytes | None, events: int, erased: int, updated: int = 0
    ) -> None:
        self.data = data
        self.sidecar = sidecar
        self.events = events
        self.erased = erased
        self.updated = updated


class FileRewriter:
    """Removes events from files of one generation, by offset."""

    def __init__(self, store: Store, written_as: ArchiveFormat) -> None:
        self._files = ArchiveFiles(store, written_as)
        settings = settings_of(written_as.format_settings)
        self._format: Format = open_format(written_as.format, written_as.codec or None, settings)

    def sidecar_name(self, target: str) -> str | None:
        """Returns the name of the sidecar of a data file."""
        return self._format.sidecar_name(target)

    def without(
        self, manifest: Manifest, file: FileEntry, offsets: np.ndarray[Any, Any]
    ) -> RewrittenFile | None:
        """Returns the file without these offsets; None if it has none of them.

        Raises ``CorruptError`` if it does not match the manifest.
        """
        gone = pa.array(offsets, pa.int64())

        def is_gone(batch: pa.RecordBatch) -> pa.Array:
            return pc.is_in(self._files.offsets(batch, file).cast(pa.int64()), gone)

        return self.without_rows(manifest, file, is_gone)

    def without_rows(
        self, manifest: Manifest, file: FileEntry, is_gone: Callable[[pa.RecordBatch], pa.Array]
    ) -> RewrittenFile | None:
        """Returns the same, without the rows of each batch that ``is_gone`` selects."""
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
            return RewrittenFile(_dead_letters(kept), None, events, erased)
        if not self._files.restorable:
            return RewrittenFile(self._own_columns(kept), None, events, erased)
        return RewrittenFile(*self._of_events(kept), events, erased)

    def with_values(
        self, manifest: Manifest, file: FileEntry, values: Mapping[int, bytes | None]
    ) -> RewrittenFile | None:
        """Returns the file with other values at these offsets; None if it has them already.

        Raises ``InvalidError`` for a file without values, and for values that do not fit its
        schema.
        """
        if file.kind == "data" and not self._files.restorable:
            raise InvalidError(f"archive file `{file.target}`: has columns, and no values")
        kept: list[pa.RecordBatch] = []
        updated = 0
        for batch in self._files.batches(manifest, file):
            part, changed = _with_values(batch, values)
            updated += changed
            kept.append(part)
        if not updated:
            return None
        events = sum(part.num_rows for part in kept)
        if file.kind == "dead":
            return RewrittenFile(_dead_letters(kept), None, events, 0, updated)
        try:
            return RewrittenFile(*self._of_events(kept), events, 0, updated)
        except InternalError as exc:
            raise InvalidError(
                f"archive file `{file.target}`: a new value does not fit the file's schema"
            ) from exc

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
        """Returns typed columns without the raw value: rows are copied unchanged."""
        if isinstance(self._format, OwnColumns):
            file = Spool()
            self._format.write_columns(file, kept)
            return file.take()
        table = pa.Table.from_batches(kept)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=self._format.codec, write_page_checksum=True)
        return bytes(sink.getvalue().to_pybytes())


def _with_values(
    batch: pa.RecordBatch, values: Mapping[int, bytes | None]
) -> tuple[pa.RecordBatch, int]:
    """Returns a batch with other values, by offset, and how many of them differ."""
    offsets = batch.column("offset").to_pylist()
    rows = [row for row, offset in enumerate(offsets) if offset in values]
    column, at = batch.column("value"), batch.schema.get_field_index("value")
    rows = [row for row in rows if column[row].as_py() != values[offsets[row]]]
    if not rows:
        return batch, 0
    found = column.to_pylist()
    for row in rows:
        found[row] = values[offsets[row]]
    changed = pa.array(found, column.type)
    return batch.set_column(at, batch.schema.field(at), changed), len(rows)


def _dead_letters(kept: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches(kept, MISFIT_SCHEMA), sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


FILE_ATTEMPTS = 50  # at one file that changes


def replace_object(
    store: Store, key: str, is_new: Callable[[bytes], bool], data: bytes | Callable[[], bytes]
) -> None:
    """Replaces an object until ``is_new`` says of its bytes that it has been replaced.

    So it is settled by what the object holds, whichever process replaced it. ``is_new`` raises for
    bytes that are neither the old nor the new ones.
    """
    for _ in rounds(FILE_ATTEMPTS, file_busy(key)):
        info, found = store.head(key), store.get(key)
        if is_new(found):
            return
        # Another erasure deletes a staged copy when it is done: then the next look ends.
        with contextlib.suppress(ConflictError, UnknownOutcomeError, NotFoundError):
            store.replace(key, data if isinstance(data, bytes) else data(), info.etag)


def file_busy(key: str) -> UnavailableError:
    """Returns the error of a file that others keep changing."""
    return UnavailableError(f"file `{key}`: others keep changing it: erase again")
