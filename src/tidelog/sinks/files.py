"""The files of an archive: events laid out by partition names, in any format.

A writer takes one range of a source partition. Without a parser (a *backup*) all its events go into
one folder in source order; with one, each goes into the folder that the parser says. A file ends
when it is large enough; when too many are open, the largest ends and a further file of the same
range begins later. What no parser or schema takes goes to the dead letters with its reason; more of
them than the set share stops the range.

Names are Secor's: ``<root>/g<generation>/<topic>/<names>/<generation>_<partition>_<offset>.<ext>``,
where the offset is that of the file's own first event. So names and contents follow from the range
alone, and no two files of an archive can have one name.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.clock import RandomIds
from tidelog.codec.formats import FileWriter, Format, FormatSettings, open_format
from tidelog.codec.formats.base import MISFIT_SCHEMA
from tidelog.codec.parsers import LayoutSettings, Parser, open_parser
from tidelog.errors import InternalError, InvalidError
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.sinks.base import RangeWriter, Sink, Written
from tidelog.sinks.publish import discard_files, publish_files
from tidelog.store.base import Store
from tidelog.store.here import open_store_here

__all__ = ["FilesSettings", "FilesSink"]

_SPOOL_BYTES = 16 << 20  # of a file in memory; the rest goes to disk
_DEAD_LEAST = 100  # dead letters that never stop a range, whatever their share


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """How an archive lays down its files; plain values."""

    store: str  # URL of the store that holds both staging and the archive
    root: str  # the archive's folder in it
    dead: str  # the folder of its dead letters
    generation: int = 1
    parser: str | None = None  # None: a backup
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    format: str = "parquet"
    codec: str | None = None
    format_settings: FormatSettings = field(default_factory=FormatSettings)
    file_bytes_max: int = 200_000_000
    open_files_max: int = 50
    dead_share_max: float = 0.1


class FilesSink:
    """Lays down the files of one archive. Pickles; opens its store where it is used."""

    def __init__(self, settings: FilesSettings) -> None:
        self._settings = settings
        open_format(settings.format, settings.codec, settings.format_settings)
        if settings.parser is not None:
            open_parser(settings.parser, settings.layout)
        if not 0 <= settings.dead_share_max <= 1:
            raise InvalidError(f"archive: dead_share_max is {settings.dead_share_max}: give 0 to 1")

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return FilesWriter(self._settings, self._store(), partition, staging)

    def publish(self, manifest: Manifest) -> None:
        publish_files(self._store(), manifest.files)

    def discard(self, manifest: Manifest) -> None:
        discard_files(self._store(), manifest.files)

    def _store(self) -> Store:
        return open_store_here(self._settings.store)


class _OpenFile:
    """A file that is being written, and what is known of it."""

    def __init__(self, form: Format, first_offset: int) -> None:
        self.first_offset = first_offset
        self.last_offset = first_offset
        self.first_ms = self.last_ms = self.path_ms = -1
        self.data = _spool()
        self.sidecar = _spool() if form.sidecar_name("x") else None
        self.writer: FileWriter = form.writer(self.data, self.sidecar)

    def write(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        misfits = self.writer.write(batch)
        times = pc.min_max(batch.column("timestamp").cast(pa.int64())).as_py()
        self.first_ms = times["min"] if self.first_ms < 0 else min(self.first_ms, times["min"])
        self.last_ms = max(self.last_ms, times["max"])
        self.last_offset = batch.column("offset")[-1].as_py()
        return misfits


class FilesWriter:
    """Stages the files of one range."""

    def __init__(self, settings: FilesSettings, store: Store, partition: str, staging: str) -> None:
        self._settings = settings
        self._store = store
        self._topic, _, self._name = partition.rpartition("/")
        self._staging = f"{staging}/{RandomIds().new()}"  # a repeated task has names of its own
        self._format = open_format(settings.format, settings.codec, settings.format_settings)
        self._parser: Parser | None = None
        if settings.parser is not None:
            self._parser = open_parser(settings.parser, settings.layout)
        self._open: dict[str, _OpenFile] = {}
        self._dead: list[pa.RecordBatch] = []
        self._files: list[FileEntry] = []
        self._last_offset = -1
        self._read = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._check_order(batch)
        self._read += batch.num_rows
        if self._parser is None:
            self._add("", batch)
            return
        layout = self._parser.lay_out(batch)
        if layout.errors.null_count < batch.num_rows:
            bad = pc.is_valid(layout.errors)
            self._bury(batch.filter(bad), layout.errors.filter(bad))
        codes = layout.paths.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        names = layout.paths.dictionary.to_pylist()
        for code, rows in _groups(codes):
            if code >= 0:
                whole = len(rows) == batch.num_rows
                placed = batch if whole else batch.take(pa.array(rows))
                self._add(names[code], placed, layout.times[int(rows[-1])].as_py())

    def close(self) -> Written:
        for path in list(self._open):
            self._finish(path)
        dead = sum(batch.num_rows for batch in self._dead)
        if dead >= _DEAD_LEAST and dead > self._settings.dead_share_max * self._read:
            raise InvalidError(
                f"source partition `{self._topic}/{self._name}`: {dead} of {self._read} events are "
                f"dead letters, the allowed share is {self._settings.dead_share_max}; the first: "
                f"{self._dead[0].column('error')[0].as_py()}: mend the parser, or allow more"
            )
        if dead:
            self._stage_dead()
        written = sum(file.events for file in self._files if file.kind == "data")
        return Written(tuple(self._files), written, dead)

    def _add(self, path: str, batch: pa.RecordBatch, path_ms: int | None = None) -> None:
        if path not in self._open:
            if len(self._open) >= self._settings.open_files_max:
                sizes = {name: file.writer.bytes_written for name, file in self._open.items()}
                self._finish(max(sizes, key=lambda name: sizes[name]))
            self._open[path] = _OpenFile(self._format, batch.column("offset")[0].as_py())
        file = self._open[path]
        file.path_ms = -1 if path_ms is None else path_ms
        misfits = file.write(batch)
        if misfits is not None:
            self._dead.append(misfits)
        if file.writer.bytes_written >= self._settings.file_bytes_max:
            self._finish(path)

    def _finish(self, path: str) -> None:
        file = self._open.pop(path)
        file.writer.close()
        if file.writer.rows == 0:
            return
        settings = self._settings
        name = f"{settings.generation}_{self._name}_{file.first_offset:020}{self._format.extension}"
        parts = [settings.root, f"g{settings.generation}", self._topic, path]
        folder = "/".join(part for part in parts if part)
        self._stage(file.data, f"{folder}/{name}", file, "data")
        beside = self._format.sidecar_name(name)
        if beside is not None and file.sidecar is not None:
            self._stage(file.sidecar, f"{folder}/{beside}", file, "sidecar")

    def _stage(self, data: IO[bytes], target: str, file: _OpenFile, kind: str) -> None:
        data.seek(0)
        content = data.read()
        data.close()
        staged = f"{self._staging}/{len(self._files)}"
        self._store.put(staged, content)
        self._files.append(
            FileEntry(
                staged=staged,
                target=target,
                size=len(content),
                crc=crc32c.crc32c(content),
                events=file.writer.rows if kind == "data" else 0,
                first_offset=file.first_offset,
                last_offset=file.last_offset,
                first_ms=file.first_ms,
                last_ms=file.last_ms,
                kind=kind,
                path_ms=file.path_ms,
            )
        )

    def _bury(self, rows: pa.RecordBatch, errors: pa.Array) -> None:
        columns = [*rows.columns, errors]
        self._dead.append(pa.record_batch(columns, schema=MISFIT_SCHEMA))

    def _stage_dead(self) -> None:
        table = pa.Table.from_batches(self._dead, MISFIT_SCHEMA).sort_by("offset")
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue().to_pybytes()
        first = table.column("offset")[0].as_py()
        name = f"{self._settings.generation}_{self._name}_{first:020}.parquet"
        times = pc.min_max(table.column("timestamp").cast(pa.int64())).as_py()
        staged = f"{self._staging}/{len(self._files)}"
        self._store.put(staged, content)
        self._files.append(
            FileEntry(
                staged=staged,
                target=f"{self._settings.dead}/{self._topic}/{name}",
                size=len(content),
                crc=crc32c.crc32c(content),
                events=table.num_rows,
                first_offset=first,
                last_offset=table.column("offset")[-1].as_py(),
                first_ms=times["min"],
                last_ms=times["max"],
                kind="dead",
            )
        )

    def _check_order(self, batch: pa.RecordBatch) -> None:
        offsets = batch.column("offset").to_numpy()
        if int(offsets[0]) <= self._last_offset or bool((np.diff(offsets) <= 0).any()):
            raise InternalError(
                f"source partition `{self._topic}/{self._name}`: offsets fall after "
                f"{self._last_offset}: a source must give them in order"
            )
        self._last_offset = int(offsets[-1])


def _groups(codes: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each code with the rows that have it, in their order."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    return [(int(ordered[start]), order[start:end]) for start, end in pairwise(cuts) if end > start]


def _spool() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)


_: type[Sink] = FilesSink
