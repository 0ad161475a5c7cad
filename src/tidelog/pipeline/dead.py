"""Dead letters of an archive: read, and removed once a replay has replaced their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import crc32c
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.formats.base import MISFIT_SCHEMA
from tidelog.codec.formats.streams import decoding
from tidelog.errors import CorruptError, NotFoundError
from tidelog.home import Home
from tidelog.log.archives import read_partitions
from tidelog.log.base import Log
from tidelog.log.replays import Replays, dead_files
from tidelog.model.archive import Archive
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.pipeline import FileEntry
from tidelog.pipeline.places import store_at
from tidelog.store.base import Store

__all__ = ["dead_letters", "read_dead_files", "remove_replaced"]

_LOOKS = 5  # at the rows, when files of dead letters vanish under our eyes


def dead_letters(
    home: Home, archive: Archive, generation: int | None = None
) -> Iterator[pa.RecordBatch]:
    """All dead letters in event columns and ``error``, by source partition and offset.

    While a replay runs, each comes once at most, and those that stay dead do come.
    """
    store, pipeline = store_at(home, archive.store), archive.pipeline(generation)
    for partition in read_partitions(home.log, pipeline):
        after, looks = -1, 0
        while looks < _LOOKS:
            looks += 1
            for files in dead_files(home.log, pipeline, partition):
                last = max(file.last_offset for file in files)
                if last <= after:
                    continue
                try:
                    batches = read_dead_files(store, files)
                except NotFoundError:
                    if looks == _LOOKS:
                        raise
                    break  # replaced meanwhile
                for batch in batches:
                    yield batch.filter(pc.greater(batch.column("offset"), after))
                after = last
            else:
                break


def remove_replaced(log: Log, store: Store, archive: Archive, generation: int | None = None) -> int:
    """Delete files of dead letters that no longer count; how many. Idempotent."""
    pipeline = archive.pipeline(generation)
    replaced: set[str] = set()
    for partition in read_partitions(log, pipeline):
        replays = Replays(log, pipeline, partition)
        if replays.commits:
            replaced |= {file.target for file, counts in replays.dead() if not counts}
    if not replaced:
        return 0
    there = [info.key for info in store.list(f"{archive.dead}/") if info.key in replaced]
    store.delete(there)
    return len(there)


def read_dead_files(store: Store, files: Sequence[FileEntry]) -> list[pa.RecordBatch]:
    """The dead letters of some files, by offset. ``NotFoundError``, ``CorruptError``."""
    table = pa.concat_tables([_read_file(store, file) for file in files])
    if len(files) > 1:
        table = table.sort_by("offset")
    return list(table.combine_chunks().to_batches(max_chunksize=BATCH_EVENTS_MAX))


def _read_file(store: Store, file: FileEntry) -> pa.Table:
    try:
        data = store.get(file.target)
    except NotFoundError as exc:
        raise NotFoundError(
            f"dead letters `{file.target}`: the file is gone: restore it from a copy"
        ) from exc
    what = f"dead letters `{file.target}`"
    if len(data) != file.size or crc32c.crc32c(data) != file.crc:
        raise CorruptError(
            f"{what}: expected {file.size} bytes with crc32c {file.crc:08x}, found {len(data)} "
            f"with {crc32c.crc32c(data):08x}: keep it, and restore it from a copy"
        )
    with decoding(what):
        return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False).cast(MISFIT_SCHEMA)
