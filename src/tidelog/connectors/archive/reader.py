"""Reads a range of an archive: the files of its commits, merged by offset.

A plan names the files with their checksums and needs only the store, so it works where the catalog
cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa

from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.connectors.merge import MergeInput, gathered, merged, within
from tidelog.connectors.source import Chunk, DividingReader, RangeReader, SourceRange
from tidelog.coordination.pipeline_rows import Replays
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import FileEntry, Gap, Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store
from tidelog.store.fetch import fetched

__all__ = ["PlannedCommits", "is_number", "plan_commits"]

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
