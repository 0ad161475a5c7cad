"""Reads a range of an archive: the files of its commits, merged by offset.

A plan names the files with their checksums and needs only the store, so it works where the catalog
cannot be reached.

**Carried ranges** come from another generation's files, completely or in part. A carried range is
read from the files alone. A completed one is read from the source, and the files add the events
that the source no longer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import one_batch
from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.connectors.merge import MergeInput, gathered, merged, within
from tidelog.connectors.source import (
    ChangingReader,
    Chunk,
    CountedRange,
    DividingReader,
    RangeReader,
    SourceRange,
)
from tidelog.coordination.pipeline_rows import Replays
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import FileEntry, Gap, Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store
from tidelog.store.fetch import fetched

__all__ = [
    "CarriedRange",
    "CarriedReader",
    "CompletedReader",
    "PlannedCommits",
    "is_number",
    "plan_commits",
]

_KINDS = ("data", "dead")  # of files with events


def plan_commits(
    range: SourceRange,
    manifests: Sequence[Manifest],
    written_as: ArchiveFormat,
    store: str,
    replays: Replays | None = None,
) -> PlannedCommits:
    """Plans what to read of the commits that a range touches.

    Raises ``InvalidError`` if it cuts a commit whose positions are not offsets.
    """
    form = _format(written_as)
    again = list(replays.counting()) if replays is not None else []
    commits = []
    for manifest in manifests:
        files = _with_sidecars(manifest, form)
        gone = [f for f in files if replays is not None and replays.replaces(f.data)]
        kept = [f for f in files if f not in gone]
        instead = _replay_files(again, form, [f.data for f in gone]) if gone else []
        commits.append(_plan_commit(manifest, [*kept, *instead], range))
    lost = tuple(gap for manifest in manifests for gap in manifest.lost)
    return PlannedCommits(range, tuple(commits), written_as, store, lost)


@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """A file with events, and its sidecar if its format has one."""

    data: FileEntry
    sidecar: FileEntry | None
    rows: tuple[int, int] | None = None  # the offsets to read; None: all


@dataclass(frozen=True, slots=True)
class _PlannedCommit:
    """What to read of one commit."""

    start: str
    files: tuple[_PlannedFile, ...]
    offsets: tuple[int, int] | None  # to read; None: positions are not offsets, so read all


@dataclass(frozen=True, slots=True)
class PlannedCommits:
    """A range, and the files that hold its events. Pickles."""

    range: SourceRange
    commits: tuple[_PlannedCommit, ...]
    written_as: ArchiveFormat
    store: str  # URL
    lost: tuple[Gap, ...]  # in the range: the archive's own source lost these events
    rewrites: tuple[str, ...] = ()  # manifests that running erasures write for these files

    @property
    def is_changing(self) -> bool:
        """Returns whether an erasure is replacing files of the plan."""
        return bool(self.rewrites)

    def read(self) -> Iterator[Chunk]:
        """Yields the same chunks as ``ArchiveSource.read``."""
        return gathered(self._pieces(open_store_here(self.store)), self.range.limit)

    def part(self, start: str, limit: str) -> PlannedCommits | None:
        """Implements ``DividingReader.part``: at any offset, or where commits begin and end."""
        if all(each.offsets for each in self.commits) and is_number(start) and is_number(limit):
            cut = (_cut_commit(each, int(start), int(limit)) for each in self.commits)
            commits = tuple(each for each in cut if each is not None)
        else:
            borders = {each.start: number for number, each in enumerate(self.commits)}
            borders |= {self.range.start: 0, self.range.limit: len(self.commits)}
            if start not in borders or limit not in borders:
                return None
            commits = self.commits[borders[start] : borders[limit]]
        return replace(self, range=replace(self.range, start=start, limit=limit), commits=commits)

    @property
    def files(self) -> list[tuple[FileEntry, FileEntry | None, tuple[int, int] | None]]:
        """Returns its files, each with its sidecar and the offsets to read; None: all."""
        every = [file for commit in self.commits for file in commit.files]
        return [(each.data, each.sidecar, each.rows) for each in every]

    def without(
        self, is_copied: Callable[[FileEntry], bool]
    ) -> tuple[PlannedCommits, list[tuple[FileEntry, FileEntry | None]]]:
        """Returns the plan without files that are copied, and those files with their sidecars.

        Files of replayed dead letters are read: they may hold events of several commits.
        """
        commits: list[_PlannedCommit] = []
        copied: list[tuple[FileEntry, FileEntry | None]] = []
        for commit in self.commits:
            whole = [f for f in commit.files if f.rows is None and is_copied(f.data)]
            copied += [(each.data, each.sidecar) for each in whole]
            commits.append(replace(commit, files=tuple(f for f in commit.files if f not in whole)))
        return replace(self, commits=tuple(commits)), copied

    def _pieces(self, store: Store) -> Iterator[tuple[pa.RecordBatch, str]]:
        forms = {"data": _format(self.written_as), "dead": open_format("parquet")}
        for commit in self.commits:
            for batch in merged(_stream(store, forms[f.data.kind], f) for f in commit.files):
                wanted = within(batch, *commit.offsets) if commit.offsets else batch
                if commit.offsets and wanted.num_rows:
                    yield wanted, str(wanted.column("offset")[-1].as_py() + 1)
                elif wanted.num_rows:
                    yield wanted, commit.start


def _format(written_as: ArchiveFormat) -> Format:
    return open_format(
        written_as.format, written_as.codec or None, settings_of(written_as.format_settings)
    )


def _plan_commit(
    manifest: Manifest, files: list[_PlannedFile], range: SourceRange
) -> _PlannedCommit:
    """Returns what to read of a commit: all of it, or the offsets in the range."""
    positions = (manifest.start, manifest.end, range.start, range.limit)
    if not all(map(is_number, positions)):
        return _PlannedCommit(manifest.start, tuple(files), None)
    first, last, start, end = map(int, positions)
    # Only the files have the other numbers: sequence numbers are far larger.
    own = [file for file in manifest.files if file.kind in _KINDS]
    if all(first <= file.first_offset <= file.last_offset < last for file in own):
        start, end = max(first, start), min(last, end)
        wanted = [f for f in files if f.data.first_offset < end and f.data.last_offset >= start]
        return _PlannedCommit(manifest.start, tuple(wanted), (start, end))
    if start > first or end < last:
        raise InvalidError(
            f"source partition `{range.partition.text}`: [{range.start}, {range.limit}) cuts the "
            f"commit [{manifest.start}, {manifest.end}), whose positions are not offsets: ask the "
            "source to cut a range"
        )
    return _PlannedCommit(manifest.start, tuple(files), None)


def _cut_commit(commit: _PlannedCommit, start: int, end: int) -> _PlannedCommit | None:
    """Returns what to read of a commit between two offsets; None if that is nothing."""
    first, last = commit.offsets or (start, end)
    first, last = max(first, start), min(last, end)
    if first >= last:
        return None
    files = [f for f in commit.files if f.data.first_offset < last and f.data.last_offset >= first]
    return replace(commit, files=tuple(files), offsets=(first, last))


def _with_sidecars(manifest: Manifest, form: Format) -> list[_PlannedFile]:
    named = {file.target: file for file in manifest.files}
    return [_with_sidecar(file, form, named) for file in manifest.files if file.kind in _KINDS]


def _replay_files(
    again: Sequence[tuple[Manifest, FileEntry]], form: Format, gone: Sequence[FileEntry]
) -> list[_PlannedFile]:
    """Returns the files that hold the events of dead letters after replays replaced them.

    Files of replays hold only former dead letters, but possibly of other commits too.
    """
    start = min(file.first_offset for file in gone)
    end = max(file.last_offset for file in gone) + 1
    found = []
    for manifest, file in again:
        if file.kind in _KINDS and file.first_offset < end and file.last_offset >= start:
            named = {each.target: each for each in manifest.files}
            found.append(replace(_with_sidecar(file, form, named), rows=(start, end)))
    return found


def _with_sidecar(file: FileEntry, form: Format, named: dict[str, FileEntry]) -> _PlannedFile:
    beside = form.sidecar_name(file.target) if file.kind == "data" else None
    if beside is not None and beside not in named:
        raise CorruptError(
            f"sidecar `{beside}`: its manifest does not name it: keep the manifest, and find out "
            "who wrote it",
            file=beside,
        )
    return _PlannedFile(file, named[beside] if beside else None)


def _stream(store: Store, form: Format, file: _PlannedFile) -> MergeInput:
    def batches() -> Iterator[pa.RecordBatch]:
        with ExitStack() as stack:
            data = stack.enter_context(fetched(store, file.data))
            beside = stack.enter_context(fetched(store, file.sidecar)) if file.sidecar else None
            for batch in form.read(data, beside):
                yield within(batch, *file.rows) if file.rows else batch

    first = max(file.data.first_offset, file.rows[0] if file.rows else 0)
    return MergeInput(f"archive file `{file.data.target}`", first, batches)


def is_number(position: str) -> bool:
    return position.isascii() and position.isdecimal()


_: type[RangeReader] = PlannedCommits
_dividing: type[DividingReader] = PlannedCommits


@dataclass(frozen=True, slots=True)
class CarriedRange:
    """What a pipeline must know about a range from another generation's files."""

    generation: int
    as_is: bool  # the files hold the output of a transform, so no other transform runs
    counted: CountedRange | None = None  # of ranges whose events the pipeline numbers itself
    note: bytes = b""  # identifies the source partition, for a source that tracks
    files: tuple[FileEntry, ...] = ()  # to copy beside what is read; `staged` is where they are


@dataclass(frozen=True, slots=True)
class CarriedReader:
    """Reads a range from another generation's files; pickles."""

    reader: RangeReader
    carried: CarriedRange

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return isinstance(self.reader, ChangingReader) and self.reader.is_changing

    def read(self) -> Iterator[Chunk]:
        return self.reader.read()

    def part(self, start: str, limit: str) -> CarriedReader | None:
        """Implements ``DividingReader.part``, if events keep their offsets."""
        if self.carried.counted is not None or not isinstance(self.reader, DividingReader):
            return None
        part = self.reader.part(start, limit)
        return None if part is None else replace(self, reader=part)


@dataclass(frozen=True, slots=True)
class CompletedReader:
    """Reads a range of a source, and from files the events that the source no longer has.

    Kafka's compaction deletes records inside the range that a partition still holds. A backup may
    be a copy without dead letters, or without some files. The live generation may have these
    events in its files. So a generation that is being built reads both, in offset order. For an
    offset in both, the source's event counts, and the files are opened at the first offset that the
    source lacks. If the source is a copy that may be older than updates of the files, their event
    counts.
    """

    reader: RangeReader
    files: RangeReader  # of a part of the range
    generation: int  # of the files
    is_copy: bool = False  # what ``reader`` reads may be older than the files

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return any(
            isinstance(each, ChangingReader) and each.is_changing
            for each in (self.reader, self.files)
        )

    def part(self, start: str, limit: str) -> RangeReader | None:
        """Implements ``DividingReader.part``, if both of its readers do."""
        if not (isinstance(self.reader, DividingReader) and isinstance(self.files, DividingReader)):
            return None
        reader, whole = self.reader.part(start, limit), self.files.range
        first, last = max(int(start), int(whole.start)), min(int(limit), int(whole.limit))
        if reader is None or first >= last:
            return reader  # the files have nothing of this part
        files = self.files.part(str(first), str(last))
        return None if files is None else replace(self, reader=reader, files=files)

    def read(self) -> Iterator[Chunk]:
        """Yields the chunks of the source, with the missing events in between."""
        rows, at = _FileRows(self.files), int(self.range.start)
        for chunk in self.reader.read():
            end = int(chunk.position)
            if self.is_copy or chunk.batch.num_rows < end - at:
                yield from _fill_chunk(chunk, rows, at, end, self.is_copy)
            else:
                yield chunk
            at = max(at, end)


def _fill_chunk(
    chunk: Chunk, rows: _FileRows, start: int, end: int, files_count: bool
) -> Iterator[Chunk]:
    """Yields a chunk that ends at an offset, in parts of bounded size.

    For an offset in both, the event of the files counts if ``files_count``.
    """
    left = chunk.batch
    for found in rows.between(start, end):
        offsets = _offsets(found)
        more = found if files_count else _without(found, _offsets(left))
        if not more.num_rows:
            continue
        border = int(offsets[-1]) + 1
        before, left = within(left, 0, border), within(left, border, end)
        if files_count:
            before = _without(before, offsets)
        both = one_batch([before, more.cast(before.schema)])
        order = np.argsort(_offsets(both), kind="stable")
        yield Chunk(both.take(pa.array(order)), str(border))
    yield replace(chunk, batch=left)


def _without(batch: pa.RecordBatch, offsets: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Returns the events of a batch that have other offsets."""
    return batch.filter(pa.array(np.isin(_offsets(batch), offsets, invert=True)))


class _FileRows:
    """The events of files, from the first requested offset on."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._chunks: Iterator[Chunk] | None = None
        self._left: pa.RecordBatch | None = None  # of the last batch

    def between(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yields the events of ``[start, end)``. Calls must go forward."""
        if self._chunks is None:
            self._chunks = self._reader.read()
        while True:
            batch = self._left
            if batch is None:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                batch = chunk.batch
            wanted = within(batch, start, end)
            rest = batch.slice(np.searchsorted(_offsets(batch), end))
            self._left = rest if rest.num_rows else None
            if wanted.num_rows:
                yield wanted
            if self._left is not None:
                return


def _offsets(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = batch.column("offset").to_numpy()
    return found
