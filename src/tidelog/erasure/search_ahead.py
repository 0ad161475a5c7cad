"""Searches objects for erased events ahead, in tasks that need only the store.

A task reports whether an object is clean: it was decoded completely, and nothing in it has one of
the ids or keys, or is at an erased offset. What is not clean is searched again by the caller, who
knows what the rows say about it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.archive.erased_events import Deletions
from tidelog.archive.read import ArchiveFiles
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import counting_files
from tidelog.erasure.matcher import EventMatcher, own_column, rows_of
from tidelog.log.run_reader import read_run
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.partition_rows import Run
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store import shared_store
from tidelog.store.base import ObjectInfo, Store

__all__ = ["clean_files", "clean_objects"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _ArchivedFile:
    """A file of an archive, to search anywhere; pickles."""

    store: str  # URL
    making: ArchiveFormat
    manifest: Manifest  # with sidecars only
    file: FileEntry
    erased: tuple[int, ...]  # offsets between its first and last


@dataclass(frozen=True, slots=True)
class _TopicObject:
    """A segment or journal, to search anywhere; pickles."""

    store: str  # URL
    key: str
    size: int
    runs: tuple[Run, ...]  # that count; those of a journal are all of it

    @property
    def is_segment(self) -> bool:
        """Returns whether it may have pieces besides the runs that count."""
        return all(run.journal is None for run in self.runs)


def clean_files(
    context: Context,
    archive: Archive,
    generation: int,
    wanted: Mapping[str, Collection[int]],
    sought: EventMatcher,
    progress: Progress = lambda _: None,
) -> set[FileEntry]:
    """Returns the files of a generation that hold none of the events; none without a runner.

    ``wanted`` has the source partitions to search, with offsets that were erased there.
    """
    runner = context.tasks
    if runner is None:
        return set()
    function = functools.partial(_is_clean_file, _without_places(sought))
    work = _files(context, archive, generation, wanted)
    title = f"search archive {archive.name}"
    found: set[FileEntry] = set()
    for each, is_clean in runner.run(title, function, work, lambda item: item.file.size):
        if is_clean:
            found.add(each.file)
            progress(each.file.size)
    return found


def clean_objects(
    context: Context,
    store: Store,
    objects: Iterable[tuple[ObjectInfo, Sequence[Run]]],
    sought: EventMatcher,
    progress: Progress,
) -> set[str]:
    """Returns the segments and journals that hold none of the events; none without a runner.

    ``objects`` come with the runs that count in each of them.
    """
    runner = context.tasks
    if runner is None:
        return set()
    function = functools.partial(_is_clean_object, _without_places(sought))
    work = (_TopicObject(store.url, info.key, info.size, tuple(runs)) for info, runs in objects)
    found: set[str] = set()
    for each, is_clean in runner.run("search topic", function, work, lambda item: item.size):
        if is_clean:
            found.add(each.key)
            progress(each.size)
    return found


def _files(
    context: Context, archive: Archive, generation: int, wanted: Mapping[str, Collection[int]]
) -> Iterator[_ArchivedFile]:
    making = archive.making(generation)
    for partition, erased in wanted.items():
        offsets = sorted(erased)
        for manifest, file in counting_files(context, archive.pipeline(generation), partition):
            sidecars = tuple(each for each in manifest.files if each.kind == "sidecar")
            beside = msgspec.structs.replace(manifest, files=sidecars, erased=())
            first = bisect.bisect_left(offsets, file.first_offset)
            after = bisect.bisect_right(offsets, file.last_offset)
            inside = tuple(offsets[first:after])
            yield _ArchivedFile(archive.store, making, beside, file, inside)


def _without_places(sought: EventMatcher) -> EventMatcher:
    """Returns what finds the same ids and keys, and is small: it goes out with every task."""
    ids, keys = sought.deletions.by_id, sought.deletions.by_key
    return EventMatcher(Deletions(by_id={i: {} for i in ids}, by_key={k: {} for k in keys}))


def _is_clean_file(sought: EventMatcher, work: _ArchivedFile) -> bool:
    gone = pa.array(work.erased, pa.int64())
    reader = ArchiveFiles(shared_store(work.store), work.making)
    return not any(
        _has_some(sought, batch, gone) for batch in reader.batches(work.manifest, work.file)
    )


def _has_some(sought: EventMatcher, batch: pa.RecordBatch, gone: pa.Array) -> bool:
    if sought.hidden(batch) or sought.rows(batch):
        return True
    column = own_column(batch, "offset") if len(gone) else None
    return column is not None and bool(pc.any(pc.is_in(column.cast(pa.int64()), gone)).as_py())


def _is_clean_object(sought: EventMatcher, work: _TopicObject) -> bool:
    store = shared_store(work.store)
    data = store.get(work.key)
    if work.is_segment and any(sought.rows(batch) for batch in rows_of(data)):
        return False
    for run in work.runs:  # also compares checksums
        piece = data[run.byte_start : run.byte_end]
        if any(sought.rows(r.batch) for r in read_run(store, run, work.key, data=piece)):
            return False
    return True
