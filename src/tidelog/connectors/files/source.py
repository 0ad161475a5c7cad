"""Files of a folder as a source: of a backup, without a home or catalog, or any other files.

Files named like those of archives are the source partitions that they came from, and positions are
offsets. Every other file is its own source partition, named by its path, and positions are rows.
Files of lines may grow and be rotated (``row_tracking``). A line counts once its newline is there.
A last line without one counts in a finished file: it is compressed, or in an object store, or
unchanged for a minute. Other files must be complete when they get their names.

A file that cannot be read, because of its name, its rights or a circular link, is an error of only
its own source partition, or of the one whose events it holds. So is an unreadable folder: known
files in it, and source partitions of an archive that may have files in it, wait for the right.

Files of one source partition may overlap (replayed dead letters do) and are merged. A file that
appears after its offsets were passed is an error, because its events would never be read. That
happens if dead letters are replayed, or an archive still writes to the folder; ``archive:NAME``
reads both.

The files of a backup only have their first offset. A missing file looks like offsets that never
held an event. So offsets that no file has are a gap with the reason ``files``, which claims
neither. With the home at hand, read ``archive:NAME`` instead, which knows. The longest holes of a
range, where a file may have been, become gaps of their own: if an archive of the folder gets the
events later, its readers go back for them. The other holes are counted in one gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.clock import Clock, SystemClock
from tidelog.concurrency import Pool
from tidelog.connectors.files.chain_tracking import ChainTracking, FilesBefore
from tidelog.connectors.files.listing import (
    Chain,
    FileAddress,
    FolderListing,
    ListedFile,
    clashes,
    listed,
    parse_file_address,
)
from tidelog.connectors.files.row_files import LongLineError, RowFile
from tidelog.connectors.files.row_marks import (
    PlannedRows,
    ReadBytes,
    RowMark,
    inode_of,
    mark_from,
    mark_of,
    matches,
    not_held,
)
from tidelog.connectors.files.row_tracking import BoundFiles, RowTracking
from tidelog.connectors.merge import MergeInput, gathered, merged, noted, within
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    ExplainingSource,
    KnownPartition,
    MissingOffsets,
    RangeReader,
    SkippingSource,
    Source,
    SourcePartition,
    SourceRange,
    SparseSource,
    TrackingSource,
    offset_at,
    range_offsets,
)
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.model.address import Address, parse_address
from tidelog.model.limits import (
    FILE_FINISHED_MS,
    FILE_GAP_OFFSETS,
    FILE_GAPS_PER_RANGE,
)
from tidelog.model.pipeline import Gap
from tidelog.store import open_store_here
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.fetch import opened

__all__ = [
    "FilesSource",
    "PlannedFiles",
    "PlannedRows",
    "holes_between",
    "holes_between_files",
    "missing_in_files",
    "open_files",
]


def open_files(address: Address) -> FilesSource:
    """Opens the source at ``file:PATH?format=F``; the path may be an address of a store."""
    return FilesSource(parse_file_address(address))


_AT_ONCE = 8  # files to look into in parallel; each is a round trip or two


@dataclass(frozen=True, slots=True)
class _Listing:
    """What is there, by source partition."""

    chains: dict[SourcePartition, Chain]
    rows: dict[SourcePartition, ObjectInfo]
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # why files are not read, by key


@dataclass(frozen=True, slots=True)
class _CountedLines:
    """The lines of a file when it was counted."""

    etag: str
    passed: ReadBytes  # up to the end of the last complete line
    ended: ReadBytes | None  # including the incomplete line after it, if any
    stopped: LongLineError | None = None  # the next line is too long

    @property
    def rows(self) -> int:
        return self.passed.rows

    @property
    def size(self) -> int:
        return self.passed.size if self.ended is None else self.ended.size

    def note(self, rows: int, etag: str, name: str) -> bytes:
        """Returns a mark of all rows that count."""
        is_open = self.ended is not None and rows > self.rows
        passed = self.ended if self.ended is not None and is_open else self.passed
        return passed.mark(is_open, etag, name).note()


class FilesSource:
    """The files of a folder, or one file."""

    def __init__(self, place: FileAddress, clock: Clock | None = None) -> None:
        self._place = place
        self._clock = clock or SystemClock()
        self._tracking = RowTracking(lambda info: _row_file(info, place), self._clock)
        self._lines: dict[str, _CountedLines] = {}  # of files of lines, by key
        self._ends: dict[tuple[str, str], int] = {}  # of files, by key and etag
        self._chains = ChainTracking()
        self._wide: dict[tuple[str, str], list[tuple[int, int]]] = {}  # parts of files with gaps
        self._seen = _Listing({}, {})

    @property
    def url(self) -> str:
        return self._place.url

    def partitions(self) -> list[SourcePartition]:
        listing = self._look(open_store_here(self._place.store))
        return sorted({*listing.chains, *listing.rows, *listing.errors})

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Uses what was read of files to find them again."""
        self._tracking.track(known)
        self._chains.track(known)

    def seen(self) -> dict[SourcePartition, str]:
        """Returns how many rows were seen in files, and up to which offsets a backup's files go."""
        return {**self._chains.seen(), **self._tracking.seen()}

    def renewed(self) -> dict[SourcePartition, bytes]:
        """Returns marks of files that were found under other names."""
        return self._tracking.renewed()

    def left_out(self) -> dict[str, str]:
        """Returns which files of the folder are not read, and why, as of the last listing."""
        return dict(self._seen.left_out)

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Returns what the files hold. Scans each file when it is first seen."""
        store = open_store_here(self._place.store)
        listing = self._look(store)
        found = {}
        for each in partitions:
            if each in listing.errors:
                raise listing.errors[each]
            if each in listing.rows:
                found[each] = self._row_bounds(store, each, listing.rows[each])
            else:
                files = self._files(listing, each)
                self._chains.check_late_files(each, files)
                first, end = self._offsets(store, files)
                self._chains.note_end(each, first, end)
                known = self._tracking.known(each)
                is_noted = known is not None and known.note and known.position != "0"
                note = b"" if is_noted else FilesBefore.of(files, end).note()
                found[each] = Bounds(
                    str(first), str(end), begins="retention" if first else "earliest", note=note
                )
        return found

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The last position is always the limit.

        Raises ``NotFoundError`` for a file that vanished or shrank. Raises ``CorruptError`` if a
        file does not match its name, or its sidecar is missing.
        """
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> PlannedFiles | PlannedRows:
        """Returns the range with its files, as of the last listing.

        Raises the errors of ``read``.
        """
        start, limit = range_offsets(range)
        store, listing = open_store_here(self._place.store), self._seen
        if range.partition not in listing.rows and range.partition not in listing.chains:
            listing = self._look(store)
        if range.partition in listing.errors:
            raise listing.errors[range.partition]
        if range.partition in listing.rows:
            info = listing.rows[range.partition]
            file, known = _row_file(info, self._place), self._tracking.known(range.partition)
            notes = (known.note, known.further) if known is not None else (b"", b"")
            name = self._tracking.name(range.partition)
            return PlannedRows(range, info, file, self._place.store, name, *notes)
        files = self._files(listing, range.partition)
        first, end = self._offsets(store, files)
        if start < first or limit > end:
            raise not_held(range, first, end)
        wanted = self._files_in_range(store, files, start, limit)
        note = FilesBefore.of(files, limit).note()
        return PlannedFiles(range, wanted, self._place.store, note)

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(offset_at(end), offset_at(start) + events))

    def reach(self, range: SourceRange, end: str) -> str:
        """Skips a gap in a backup's offsets in one step; walks small gaps inside files."""
        files = self._seen.chains.get(range.partition)
        if files is None or range.partition in self._seen.rows:
            return range.limit
        (start, limit), store = range_offsets(range), open_store_here(self._place.store)
        try:
            held = [part for file in files for part in self._parts(store, file)]
        except TidelogError:
            return range.limit  # reading the range reports the error
        if any(first < limit and last >= start for first, last in held):
            return range.limit
        return str(min((first for first, _ in held if first >= limit), default=offset_at(end)))

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Returns which offsets no file has, as of the last listing.

        Looks into files only if they themselves lack some, as between two events of a transaction.
        """
        start, limit = range_offsets(range)
        left = limit - start - read
        store, listing = open_store_here(self._place.store), self._seen
        if left and not (range.partition in listing.rows or range.partition in listing.chains):
            listing = self._look(store)
        if not left or range.partition in listing.rows:
            return MissingOffsets(absent=left)
        files = self._files_in_range(store, self._files(listing, range.partition), start, limit)
        spans = zip((file.first for file in files), self._ends_of(store, files), strict=True)
        holes = holes_between_files(list(spans), start, limit)
        if sum(end - first for first, end in holes) != left:
            offsets = (each.to_numpy() for file in files for each in file.offsets(store))
            inside = [each[(each >= start) & (each < limit)] for each in offsets]
            held = np.unique(np.concatenate([*inside, np.empty(0, np.int64)]))
            holes = holes_between(held, start, limit)
        return missing_in_files(range, holes, left)

    def _parts(self, store: Store, file: ListedFile) -> list[tuple[int, int]]:
        """Returns the first and last offset of each part of a file, split at large gaps."""
        (end,) = self._ends_of(store, (file,))
        if end - file.first <= FILE_GAP_OFFSETS:
            return [(file.first, end - 1)]
        known = (file.data.key, file.data.etag)
        if known not in self._wide:
            parts: list[tuple[int, int]] = []
            for offsets in file.offsets(store):
                found = offsets.to_numpy()
                cuts = np.flatnonzero(np.diff(found) > FILE_GAP_OFFSETS) + 1
                parts += [(int(p[0]), int(p[-1])) for p in np.split(found, cuts) if len(p)]
            self._wide[known] = parts
        return self._wide[known]

    def before(self, one: str, other: str) -> bool:
        return offset_at(one) < offset_at(other)

    def count(self, start: str, end: str) -> int | None:
        """Returns the exact number of rows; of a backup's offsets, some may hold no event."""
        return max(0, offset_at(end) - offset_at(start))

    def _look(self, store: Store) -> _Listing:
        found = listed(store, self._place)
        bound = self._bind(store, found)
        below = {
            each: error
            for folder, error in found.denied.items()
            for each in self._tracking.known_below(folder)
            if each not in bound.files  # without rights, its presence is unknown
        }
        double = clashes(found.chains, bound.files)
        missing = self._chains.missing({*found.chains, *bound.files})
        errors = {**missing, **double, **bound.errors, **found.errors, **below}
        left_out = {**bound.left_out, **found.left_out}
        self._seen = _Listing(found.chains, bound.files, errors, left_out)
        return self._seen

    def _bind(self, store: Store, found: FolderListing) -> BoundFiles:
        """Binds files of rows.

        A file that the store refuses to read becomes an error of its own.
        """
        while True:
            try:
                return self._tracking.bind(store, found.root, found.rows, found.only)
            except InvalidError as exc:
                names = [
                    name for name, info in found.rows.items() if exc.context.get("key") == info.key
                ]
                if not names:
                    raise
                for name in names:
                    del found.rows[name]
                    found.errors[SourcePartition(found.root, name)] = exc

    def _files(self, listing: _Listing, partition: SourcePartition) -> Chain:
        if partition not in listing.chains:
            raise NotFoundError(
                f"source partition `{partition.text}`: `{self.url}` has no file of it: put it "
                "back, or ask the source for its partitions",
                partition=partition.text,
            )
        return listing.chains[partition]

    def _offsets(self, store: Store, files: Chain) -> tuple[int, int]:
        """Returns the first offset and the end. Any file may have the last offset."""
        return files[0].first, max(self._ends_of(store, files))

    def _files_in_range(self, store: Store, files: Chain, start: int, limit: int) -> Chain:
        """Returns the files that may have offsets of a range."""
        pairs = zip(files, self._ends_of(store, files), strict=True)
        return tuple(file for file, end in pairs if file.first < limit and end > start)

    def _ends_of(self, store: Store, files: Chain) -> list[int]:
        """Returns the end offset of each file. Looks into new files in parallel."""
        new = [file for file in files if (file.data.key, file.data.etag) not in self._ends]
        with Pool(_AT_ONCE) as pool:
            for file, end in zip(new, pool.map(lambda each: each.end(store), new), strict=True):
                self._ends[file.data.key, file.data.etag] = end
        return [self._ends[file.data.key, file.data.etag] for file in files]

    def _row_bounds(self, store: Store, partition: SourcePartition, info: ObjectInfo) -> Bounds:
        file, known = _row_file(info, self._place), self._tracking.known(partition)
        mark = mark_from(known.further or known.note) if known is not None else None
        # A driver may die before it reads the file, and the file may be renamed until the next one.
        is_unknown = mark is None and (known is None or not offset_at(known.position))
        note, name = b"", self._tracking.name(partition)
        if not file.has_lines:
            rows = self._rows(store, info, file)
            if is_unknown and rows:
                note = mark_of(store, info, rows, name, file).note()
        else:
            counted = self._count(store, info, file)
            was_open = mark is not None and mark.is_open and _is_read(mark, known)
            if mark is not None and was_open and counted.size > mark.size:
                raise _went_on(partition, info, mark.rows)
            is_last = was_open or self._is_finished(info, file)
            rows = counted.rows + (counted.ended is not None and is_last)
            at = 0 if known is None else offset_at(known.position)
            if counted.stopped is not None and at >= rows:
                raise counted.stopped  # only now, because the lines before it are read first
            if is_unknown and rows:
                note = counted.note(rows, info.etag, name)
        self._tracking.note_end(partition, rows)
        incarnation = self._tracking.incarnation(store, partition, info)
        if known is not None and note:
            self._tracking.identify(partition, note)
        identity = note if known is None else known.note
        return Bounds("0", str(rows), incarnation, is_dense=True, note=note, identity=identity)

    def _is_finished(self, info: ObjectInfo, file: RowFile) -> bool:
        """Returns whether nothing will be added to a file."""
        remote = parse_address(self._place.store).scheme != "file"
        idle_ms = self._clock.now_ms() - info.modified_ms
        return remote or not file.is_plain or idle_ms >= FILE_FINISHED_MS

    def _count(self, store: Store, info: ObjectInfo, file: RowFile) -> _CountedLines:
        """Counts the lines of a file; of a file that has grown, reads only the new ones."""
        before = self._lines.get(info.key)
        if before is not None and before.etag == info.etag:
            return before
        passed = ReadBytes()
        if before is not None and file.is_plain:
            mark, inode = before.passed.mark(), inode_of(info.etag)
            whole = not inode or inode != inode_of(before.etag)
            passed = replace(before.passed) if matches(store, info, mark, None, whole) else passed
        ended: ReadBytes | None = None
        stopped: LongLineError | None = None
        with opened(store, info.key, info.size) as data:
            data.seek(passed.size)
            try:
                for found in file.lines(data, passed.rows):
                    if found.is_open:
                        ended = replace(passed)
                        ended.add(found.text, len(found.lines))
                    else:
                        passed.add(found.text, len(found.lines))
            except LongLineError as exc:
                stopped = exc
        counted = _CountedLines(info.etag, passed, ended, stopped)
        self._lines[info.key] = counted
        return counted

    def _rows(self, store: Store, info: ObjectInfo, file: RowFile) -> int:
        known = (info.key, info.etag)
        if known not in self._ends:
            with opened(store, info.key, info.size) as data:
                self._ends[known] = file.count(data)
        return self._ends[known]

    def __reduce__(self) -> tuple[Any, ...]:
        return FilesSource, (self._place,)

    def __repr__(self) -> str:
        return f"FilesSource({self.url!r})"


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """A range of a backup, and the files that may hold its events. Pickles."""

    range: SourceRange
    files: Chain
    store: str  # URL
    note: bytes = b""  # which files there were

    def read(self) -> Iterator[Chunk]:
        """Yields the same chunks as ``FilesSource.read``. The last one has the note."""
        chunks = gathered(self._pieces(open_store_here(self.store)), self.range.limit)
        return noted(chunks, lambda: self.note)

    def _pieces(self, store: Store) -> Iterator[tuple[pa.RecordBatch, str]]:
        start, limit = range_offsets(self.range)
        for batch in merged(_stream(store, file) for file in self.files):
            wanted = within(batch, start, limit)
            if wanted.num_rows:
                yield wanted, str(wanted.column("offset")[-1].as_py() + 1)


def _row_file(info: ObjectInfo, place: FileAddress) -> RowFile:
    form, codec = place.format_of(info.key)
    delimiter = "\n" if place.delimiter is None else place.delimiter
    return RowFile(f"file `{info.key}`", form, codec, delimiter.encode(), info.modified_ms)


def _stream(store: Store, file: ListedFile) -> MergeInput:
    return MergeInput(f"file `{file.data.key}`", file.first, lambda: file.batches(store))


def _is_read(mark: RowMark, known: KnownPartition | None) -> bool:
    """Returns whether the marked rows were read, and not only seen."""
    return known is not None and (bool(known.further) or mark.rows <= offset_at(known.position))


def _went_on(partition: SourcePartition, info: ObjectInfo, rows: int) -> InvalidError:
    return InvalidError(
        f"source partition `{partition.text}`: file `{info.key}` counted as finished, and its "
        f"line {rows} was read without a newline; now it has grown: put the rest into a new file",
        file=info.key,
    )


_: type[Source] = FilesSource
_reader: type[RangeReader] = PlannedFiles
_tracking: type[TrackingSource] = FilesSource
_leaving: type[SkippingSource] = FilesSource
_sparse: type[SparseSource] = FilesSource
_explaining: type[ExplainingSource] = FilesSource


Hole = tuple[int, int]
"""Offsets without an event: from the first up to, not including, the second."""


def holes_between_files(spans: Iterable[Hole], start: int, limit: int) -> list[Hole]:
    """Returns the offsets of ``[start, limit)`` that are outside of all spans, in order."""
    holes: list[Hole] = []
    at = start
    filled = sorted((first, end) for first, end in spans if first < end)
    for first, end in [*filled, (limit, limit)]:
        if at < min(first, limit):
            holes.append((at, min(first, limit)))
        at = max(at, end)
    return holes


def holes_between(offsets: npt.NDArray[np.int64], start: int, limit: int) -> list[Hole]:
    """Returns the offsets of ``[start, limit)`` that are not among these, which are in order."""
    inside = offsets[np.searchsorted(offsets, start) : np.searchsorted(offsets, limit)]
    edges = np.concatenate([[start - 1], inside, [limit]])
    before = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[at]) + 1, int(edges[at + 1])) for at in before]


def missing_in_files(range: SourceRange, holes: Sequence[Hole], offsets: int) -> MissingOffsets:
    """Returns the holes of a range as gaps; ``offsets`` is how many offsets have no event.

    The two differ if files came or vanished since the range was read. Then only the number is
    known.
    """
    if sum(end - first for first, end in holes) != offsets:
        holes = ()
    longest = sorted(holes, key=lambda hole: hole[0] - hole[1])[:FILE_GAPS_PER_RANGE]
    gaps = [Gap(str(first), str(end), "files", end - first) for first, end in sorted(longest)]
    if others := offsets - sum(gap.offsets for gap in gaps):
        gaps.append(Gap(range.start, range.limit, "files", others))
    return MissingOffsets(gaps=tuple(gaps))
