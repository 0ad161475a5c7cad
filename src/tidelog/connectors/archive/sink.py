"""Writes the files of an archive: events in folders, in any format, and dead letters.

A writer handles one range of a source partition. Without a parser (a *backup*) all its events go
into one folder in source order. With one, each goes into the folder that the parser returns. An
event that the parser, the schema or a restore (``dead_letters``) refuses becomes a dead letter with
the reason. More dead letters than the configured share stop the range. Several writers may write
parts of it, so that is decided after all of them (``ArchiveSink.judge``).

Memory is bounded, whatever the folders. Events wait by folder until there are enough of one for a
part of a file; if too many wait, all are written. A file is closed when it is large enough, when
too many files are open and it is the largest, or when its format keeps events in memory and another
file must be written. A range may write more files of the same folder later. Events beyond the
maximum number of folders are dead letters, because a path computed from data may be anything.

Names follow Secor:
``<root>/g<generation>/<topic>/<folders>/<generation>_<partition>_<offset>.<ext>``, with the offset
of the file's first event, so names are unique in an archive. After ranges were set aside
(``pipeline.forgotten_ranges``), names get a suffix, ``_<suffix>``, so a repeated range never reuses
the name of a file that was set aside. Topic and partition are escaped like data
(``codec.parsers.base``), so that every reader lists them and every store accepts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.formats import FileWriter, Format, FormatSettings, open_format
from tidelog.codec.parsers import FolderSettings, Parser, open_parser, parts_of_events
from tidelog.codec.parsers.base import escaped
from tidelog.connectors.archive.dead_letters import DeadLetters, split_refused
from tidelog.connectors.archive.staging import (
    FolderRows,
    MakeEntry,
    Spool,
    StagedFiles,
    copy_files,
    discard_files,
    is_published,
    portion_of,
    publish_files,
    shares_of,
)
from tidelog.connectors.sink import (
    CopyingSink,
    FileSink,
    JudgingSink,
    RangeWriter,
    Sink,
    WriterResult,
)
from tidelog.errors import AlreadyExistsError, InternalError, InvalidError, NotFoundError
from tidelog.model import defaults
from tidelog.model.address import address_below
from tidelog.model.layout import aside_folder, success
from tidelog.model.limits import FILE_PARTITION_BYTES_MAX, RANGE_FOLDERS_MAX
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store, check_owner, object_exists

__all__ = [
    "ArchiveSink",
    "ArchiveSinkSettings",
    "OpenFile",
]

_PUBLISH_AT_ONCE = 8
_PART_ROWS = 131_072  # of one folder; then they are written
_PART_BYTES = 64 << 20
_SPOOL_BYTES = 64 << 20  # of all open files in memory; the rest is on disk


@dataclass(frozen=True, slots=True)
class ArchiveSinkSettings:
    """How an archive writes its files; plain values."""

    store: str  # URL of the store with staging and the archive
    root: str  # the archive's folder there
    dead: str  # the folder of its dead letters
    generation: int = 1
    parser: str | None = None  # None: a backup
    layout: FolderSettings = field(default_factory=FolderSettings)
    format: str = "parquet"
    codec: str | None = None
    format_settings: FormatSettings = field(default_factory=FormatSettings)
    file_bytes_max: int = defaults.ARCHIVE_FILE_BYTES
    open_files_max: int = 50
    held_bytes_max: int = 64 << 20  # of waiting events; then all are written
    folders_max: int = RANGE_FOLDERS_MAX
    dead_share_max: float = defaults.DEAD_SHARE
    suffix: str = ""  # of all names, after ranges were set aside
    name: str = ""  # of the archive, for messages
    is_building: bool = False  # a generation that is not promoted yet
    owner: str = ""  # content of `_owner` in the root, checked before publishing; empty: any


class ArchiveSink:
    """Writes the files of one archive. Pickles; opens its store where it is used."""

    def __init__(self, settings: ArchiveSinkSettings) -> None:
        self._settings = settings
        open_format(settings.format, settings.codec, settings.format_settings)
        if settings.parser is not None:
            open_parser(settings.parser, settings.layout)
        elif settings.layout != FolderSettings():
            raise InvalidError(
                "archive: granularity, time zone and formats of folders are for archives with a "
                "parser: leave them out of a backup"
            )
        if not 0 <= settings.dead_share_max <= 1:
            raise InvalidError(f"archive: dead_share_max is {settings.dead_share_max}: give 0 to 1")

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return ArchiveWriter(self._settings, self._store(), partition, staging)

    def publish(self, manifest: Manifest) -> int:
        self._check_owner()
        publish_files(self._store(), manifest.files, at_once=_PUBLISH_AT_ONCE)
        return 0

    def discard(self, manifest: Manifest) -> None:
        discard_files(self._store(), manifest.files)

    def judge(self, partition: str, staged: WriterResult) -> None:
        """Raises ``InvalidError`` if too many events of a range are dead letters."""
        share_max, events = self._settings.dead_share_max, staged.events + staged.dead
        if staged.dead >= _LEAST and staged.dead > share_max * events:
            raise InvalidError(
                f"source partition `{partition}`: {staged.dead} of {events} events are dead "
                f"letters (allowed share: {share_max}), the first: {staged.why_dead}: "
                f"{self._other_parser()}, or raise --dead-share",
                offset=staged.first_dead,
            )

    def _other_parser(self) -> str:
        """Returns how to choose another parser."""
        name, number = self._settings.name or "NAME", self._settings.generation
        backfill = f"`tidelog archive backfill {name} --parser PARSER`"
        if self._settings.is_building:
            return f"run `tidelog archive drop {name} {number}`, then {backfill}"
        return f"run {backfill}, then `tidelog archive promote {name}`"

    def published(self, manifest: Manifest) -> list[FileEntry]:
        store = self._store()
        return [file for file in manifest.files if is_published(store, file)]

    def with_suffix(self, suffix: str) -> ArchiveSink:
        other = copy(self)
        other._settings = replace(self._settings, suffix=suffix)
        return other

    def aside(self, file: FileEntry, name: str) -> str:
        root = self._settings.root
        generation, *parts = file.target.removeprefix(f"{root}/").split("/")
        # An erasure keeps these names, so they have no part that was made of an event.
        path = "/".join([generation, *parts[:1], *parts[1 + file.named :]])
        return f"{aside_folder(root)}{name}/{path}"

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        self._check_owner()
        store = self._store()
        for file in files:
            # Another driver copied it before, or deleted it since.
            with contextlib.suppress(AlreadyExistsError, NotFoundError):
                store.copy(file.target, self.aside(file, name))
        store.delete([file.target for file in files])

    def copy(self, files: Sequence[FileEntry], staging: str) -> tuple[FileEntry, ...]:
        return copy_files(self._store(), files, staging, _PUBLISH_AT_ONCE)

    def folders(self) -> FolderSettings:
        return self._settings.layout

    def folder(self, file: FileEntry) -> str:
        return file.target.removeprefix(f"{self._root}/").rpartition("/")[0]

    def has_success(self, folder: str) -> bool:
        return object_exists(self._store(), success(f"{self._root}/{folder}"))

    @property
    def _root(self) -> str:
        """Returns the folder of its generation."""
        return f"{self._settings.root}/g{self._settings.generation}"

    def _check_owner(self) -> None:
        settings = self._settings
        if settings.owner:
            where = f"archive in `{address_below(settings.store, settings.root)}`"
            key = f"{settings.root}/_owner"
            check_owner(self._store(), key, settings.owner.encode(), where)

    def _store(self) -> Store:
        return open_store_here(self._settings.store)


class _Folder:
    """Events waiting for a folder."""

    __slots__ = ("bytes", "path", "rows", "waiting")

    def __init__(self, path: str) -> None:
        self.path = path
        self.waiting: list[FolderRows] = []
        self.rows = self.bytes = 0

    def add(self, share: FolderRows) -> None:
        self.waiting.append(share)
        self.rows += share.rows
        self.bytes += share.bytes

    def take(self) -> list[FolderRows]:
        taken = self.waiting
        self.waiting, self.rows, self.bytes = [], 0, 0
        return taken


class ArchiveWriter:
    """Stages the files of one range."""

    def __init__(
        self, settings: ArchiveSinkSettings, store: Store, partition: str, staging: str
    ) -> None:
        self._settings = settings
        self._partition = partition
        topic, _, name = partition.rpartition("/")
        self._topic_folder = escaped(topic)
        self._name = escaped(name, FILE_PARTITION_BYTES_MAX)
        self._format = open_format(settings.format, settings.codec, settings.format_settings)
        self._parser: Parser | None = None
        if settings.parser is not None:
            self._parser = open_parser(settings.parser, settings.layout)
        self._uploads = StagedFiles(store, staging)
        self._dead = DeadLetters(self._uploads, self._dead_target)
        self._folders: dict[str, _Folder] = {}  # all folders of the range
        self._open: dict[str, OpenFile] = {}  # by path
        self._held = 0  # bytes of portions that are not fully written
        self._last_offset = -1

    def write(self, batch: pa.RecordBatch) -> None:
        self._check_order(batch)
        batch, refused_events = split_refused(batch)
        if refused_events is not None:
            self._dead.add(refused_events)
        if not batch.num_rows:
            return
        shares = self._laid_out(batch)
        if shares:
            self._held += shares[0][1].portion.bytes
        refused = []
        for path, share in shares:
            folder = self._folder(path)
            if folder is None:
                refused.append(share)
                continue
            folder.add(share)
            if folder.rows >= _PART_ROWS or folder.bytes >= self._part_bytes:
                self._write_folder(folder)
        if refused:
            self._bury(refused)
        if self._held > self._settings.held_bytes_max:
            for folder in self._folders.values():
                if folder.waiting:
                    self._write_folder(folder)

    def close(self) -> WriterResult:
        for path in [*self._open, *self._folders]:
            self._write_shares(self._folders[path])
            self._finish(path)
        self._dead.close()
        files = self._uploads.close()
        pa.default_memory_pool().release_unused()  # a worker lives on, and may have other work
        written = sum(file.events for file in files if file.kind == "data")
        first, why = self._dead.first
        return WriterResult(files, written, self._dead.count, first_dead=first, why_dead=why)

    def _laid_out(self, batch: pa.RecordBatch) -> list[tuple[str, FolderRows]]:
        if self._parser is None:
            return [("", portion_of(batch))]
        layout = self._parser.lay_out(batch)
        if layout.errors.null_count < batch.num_rows:
            bad = pc.is_valid(layout.errors)
            self._dead.bury(batch.filter(bad), layout.errors.filter(bad))
        return list(shares_of(batch, layout))

    def _folder(self, path: str) -> _Folder | None:
        """Returns the folder of a path; None if there are too many."""
        found = self._folders.get(path)
        if found is None and len(self._folders) < self._settings.folders_max:
            found = self._folders[path] = _Folder(path)
        return found

    @property
    def _part_bytes(self) -> int:
        return min(_PART_BYTES, self._settings.file_bytes_max)

    def _write_folder(self, folder: _Folder) -> None:
        """Writes the events of a folder as one part of its file, within all limits."""
        self._make_room(folder.path)
        self._write_shares(folder)
        file = self._open[folder.path]
        file.writer.flush()
        if file.writer.bytes_written >= self._settings.file_bytes_max:
            self._finish(folder.path)
        self._spool_to_disk()

    def _write_shares(self, folder: _Folder) -> None:
        for share in folder.take():
            if folder.path not in self._open:
                self._open[folder.path] = OpenFile(self._format)
            misfits = self._open[folder.path].write(share)
            if misfits is not None:
                self._dead.add(misfits)
            self._release(share)

    def _make_room(self, path: str) -> None:
        """Closes files of other folders, so that this one can be written."""
        others = {name: file.writer for name, file in self._open.items() if name != path}
        # Many writers that keep events in memory, such as ORC's, would fragment the heap.
        ending = [name for name, writer in others.items() if writer.bytes_held]
        left = {name: others[name].bytes_written for name in others if name not in ending}
        while len(left) >= self._settings.open_files_max:
            ending.append(max(left, key=lambda name: left[name]))
            del left[ending[-1]]
        for name in ending:
            self._finish(name)

    def _spool_to_disk(self) -> None:
        spooled = {path: file.spooled_bytes for path, file in self._open.items()}
        while sum(spooled.values()) > _SPOOL_BYTES:
            largest = max(spooled, key=lambda path: spooled[path])
            self._open[largest].to_disk()
            del spooled[largest]

    def _finish(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is None:
            return
        file.writer.close()
        if file.writer.rows == 0:
            return
        settings = self._settings
        name = self._file_name(file.first_offset, self._format.extension)
        parts = [settings.root, f"g{settings.generation}", self._topic_folder, path]
        folder = "/".join(part for part in parts if part)
        named = parts_of_events(path, settings.parser or "", settings.layout, file.path_ms)
        self._uploads.add(file.data.take(), file.entry(f"{folder}/{name}", "data", named))
        beside = self._format.sidecar_name(name)
        if beside is not None and file.sidecar is not None:
            entry = file.entry(f"{folder}/{beside}", "sidecar", named)
            self._uploads.add(file.sidecar.take(), entry)

    def _bury(self, shares: list[FolderRows]) -> None:
        """Makes dead letters of rows without a folder; copies them, so the portion can be freed."""
        rows = np.concatenate([np.arange(share.start, share.end) for share in shares])
        reason = pa.scalar(f"its range has more than {self._settings.folders_max} folders")
        self._dead.bury(shares[0].portion.batch.take(pa.array(rows)), pa.repeat(reason, len(rows)))
        for share in shares:
            self._release(share)

    def _release(self, share: FolderRows) -> None:
        share.portion.left -= 1
        if share.portion.left == 0:
            self._held -= share.portion.bytes

    def _dead_target(self, offset: int) -> str:
        return f"{self._settings.dead}/{self._topic_folder}/{self._file_name(offset, '.parquet')}"

    def _file_name(self, offset: int, extension: str) -> str:
        settings = self._settings
        further = f"_{settings.suffix}" if settings.suffix else ""
        return f"{settings.generation}_{self._name}_{offset:020}{further}{extension}"

    def _check_order(self, batch: pa.RecordBatch) -> None:
        offsets = batch.column("offset").to_numpy()
        if int(offsets[0]) <= self._last_offset or bool((np.diff(offsets) <= 0).any()):
            raise InternalError(
                f"source partition `{self._partition}`: offsets fall after "
                f"{self._last_offset}: a source must give them in order"
            )
        self._last_offset = int(offsets[-1])


_: type[Sink] = ArchiveSink
_aside: type[FileSink] = ArchiveSink
_judging: type[JudgingSink] = ArchiveSink
_copying: type[CopyingSink] = ArchiveSink


def _with_own_values(misfits: pa.RecordBatch | None, share: FolderRows) -> pa.RecordBatch | None:
    """Returns rows that a schema refuses with the events' own values, for dead letters."""
    if misfits is None or share.portion.values is None:
        return misfits
    rows = pc.index_in(misfits.column("offset"), share.own.column("offset"))
    at = misfits.schema.get_field_index("value")
    own = share.own.column("value").take(rows).cast(misfits.schema.field(at).type)
    return misfits.set_column(at, misfits.schema.field(at), own)


class OpenFile:
    """A file and, if its format has one, its sidecar."""

    def __init__(self, form: Format) -> None:
        self.first_offset = self._last_offset = -1
        self._first_ms = self._last_ms = self._path_ms = -1
        self.data = Spool()
        self.sidecar = Spool() if form.sidecar_name("x") else None
        self.writer: FileWriter = form.writer(self.data, self.sidecar)

    @property
    def spooled_bytes(self) -> int:
        """Returns how many encoded bytes are in memory."""
        return self.data.bytes_held + (self.sidecar.bytes_held if self.sidecar else 0)

    def to_disk(self) -> None:
        """Frees that memory."""
        self.data.to_disk()
        if self.sidecar is not None:
            self.sidecar.to_disk()

    def write(self, share: FolderRows) -> pa.RecordBatch | None:
        """Adds the rows of a folder. Returns those that the schema refuses."""
        misfits = _with_own_values(self.writer.write(share.batch), share)
        rows = slice(share.start, share.end)
        offsets, times = share.portion.offsets[rows], share.portion.times[rows]
        lost = [] if misfits is None else misfits.column("offset").to_numpy()
        kept = np.setdiff1d(offsets, lost) if len(lost) else offsets
        if self.first_offset < 0:
            self.first_offset = int(kept[0]) if len(kept) else -1
            self._first_ms = int(times[0])
        self._first_ms = min(self._first_ms, int(times.min()))
        self._last_ms = max(self._last_ms, int(times.max()))
        self._last_offset = int(kept[-1]) if len(kept) else self._last_offset
        self._path_ms = share.path_ms
        return misfits

    @property
    def path_ms(self) -> int:
        """Returns the parser's time of the last event; -1 if its path has none."""
        return self._path_ms

    def entry(self, target: str, kind: str, named: int = 0) -> MakeEntry:
        """Returns the manifest entry to record once the file is stored."""
        return lambda staged, size, crc: FileEntry(
            staged=staged,
            target=target,
            size=size,
            crc=crc,
            events=self.writer.rows if kind == "data" else 0,
            first_offset=self.first_offset,
            last_offset=self._last_offset,
            first_ms=self._first_ms,
            last_ms=self._last_ms,
            kind=kind,
            path_ms=self._path_ms,
            named=named,
        )


_LEAST = 100  # this many dead letters never stop a range, whatever their share
