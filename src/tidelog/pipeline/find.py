"""Where an event of the source is in an archive, told by rows and manifests.

One commit covers an offset, and its manifest names the few files that may hold it. Only these are
read, and none where a file holds every offset between its first and its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.log.archives import CommitRow, Manifests, read_progress
from tidelog.log.base import Log
from tidelog.log.replays import Replays
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import (
    Committed,
    FileEntry,
    Intent,
    Manifest,
    Progress,
)
from tidelog.model.run import decode_row
from tidelog.pipeline.contents import ArchiveFiles, source_partition
from tidelog.pipeline.places import store_at

__all__ = ["Found", "find_event"]

Status = Literal[
    "archived", "dead", "erased", "waiting", "before", "lost", "gap", "dropped", "unclear"
]


@dataclass(frozen=True, slots=True)
class Found:
    """Where an event is, or why it is nowhere."""

    partition: str
    offset: int
    status: Status
    says: str  # the same for people
    file: FileEntry | None = None
    row: pa.RecordBatch | None = None  # what the file has at that offset, if it was read

    @property
    def is_there(self) -> bool:
        """Whether the archive holds it, be it as a dead letter."""
        return self.file is not None


def find_event(
    home: Home,
    archive: Archive,
    partition: str,
    offset: int,
    generation: int | None = None,
    *,
    read: bool = False,
) -> Found:
    """Where the event at an offset of a source partition is; with ``read``, the event as well."""
    if offset < 0:
        raise InvalidError(f"offset {offset}: offsets begin at 0")
    name = source_partition(home, archive, partition, generation)
    reader = ArchiveFiles(store_at(home, archive.store), archive.making(generation))
    return _Search(home.log, archive.pipeline(generation), name, offset, reader, read).run()


@dataclass(frozen=True, slots=True)
class _Search:
    log: Log
    pipeline: str
    partition: str
    offset: int
    reader: ArchiveFiles
    read: bool

    def run(self) -> Found:
        head = read_progress(self.log, self.pipeline, self.partition)
        if head is None:
            return self._nowhere("waiting", "not archived yet: nothing of its partition is")
        by_offset = self._is_by_offset(head)
        if self.offset >= (int(head.position) if by_offset else head.ordinal):
            return self._waiting(head, by_offset)
        committed = self._covering(by_offset)
        if committed is None:
            return self._nowhere("before", "was never archived: the archive begins after it")
        manifest = self._manifest(committed)
        for gap in manifest.lost if by_offset else ():
            if int(gap.start) <= self.offset < int(gap.end):
                lost = f"offsets {gap.start} to {gap.end}"
                return self._nowhere("lost", f"was lost at the source (recorded): {lost}")
        found = self._in_files(manifest)
        if found is None and self._was_erased(manifest):
            return self._nowhere("erased", "was erased: it was deleted from its topic")
        return found or self._in_none(manifest, by_offset)

    def _was_erased(self, manifest: Manifest) -> bool:
        """Whether it was taken out of the files of its range, or of a replay."""
        replays = Replays(self.log, self.pipeline, self.partition)
        manifests = [manifest, *(where for where, _ in replays.counting(self.offset))]
        return any(self.offset in each.erased for each in manifests)

    def _waiting(self, head: Progress, by_offset: bool) -> Found:
        row = self.log.catalog.get(self._where, "intent")
        says = f"not archived yet (committed up to {head.position})"
        if row is not None and by_offset:
            intent = decode_row(row.value, Intent, f"intent of `{self.partition}`")
            if self.offset < int(intent.limit):
                says += f"; {intent.start} to {intent.limit} is under way"
        return self._nowhere("waiting", says)

    def _in_files(self, manifest: Manifest) -> Found | None:
        files = [
            (where, file)
            for where, file in self._candidates(manifest)
            if file.first_offset <= self.offset <= file.last_offset
        ]
        for where, file in files:
            is_dense = file.events == file.last_offset - file.first_offset + 1
            row = None
            if self.read or not is_dense:
                row = self.reader.row(where, file, self.offset)
            if row is None and (self.read or not is_dense):
                continue
            says = f"archived in {file.target}"
            if file.kind == "dead":
                error = f": {row.column('error')[0].as_py()}" if row is not None else ""
                says = f"a dead letter in {file.target}{error}"
            status: Status = "dead" if file.kind == "dead" else "archived"
            return Found(self.partition, self.offset, status, says, file, row)
        return None

    def _candidates(self, manifest: Manifest) -> Iterator[tuple[Manifest, FileEntry]]:
        """What counts of the range, and then what replays have made of its dead letters."""
        replays = Replays(self.log, self.pipeline, self.partition)
        for file in manifest.files:
            if file.kind != "sidecar" and not replays.replaces(file):
                yield manifest, file
        for where, file in replays.counting(self.offset):
            if file.kind != "sidecar":
                yield where, file

    def _in_none(self, manifest: Manifest, by_offset: bool) -> Found:
        gap = "no event at that offset: the source has none there"
        if not manifest.dropped:
            return self._nowhere("gap", gap)
        lost = sum(int(each.end) - int(each.start) for each in manifest.lost) if by_offset else 0
        is_dense = not by_offset or int(manifest.end) - int(manifest.start) - lost == manifest.read
        if is_dense:
            return self._nowhere("dropped", "dropped by the transform")
        return self._nowhere(
            "unclear",
            f"dropped by the transform, as {manifest.dropped} events of its range "
            f"{manifest.start} to {manifest.end} were, or {gap}",
        )

    def _nowhere(self, status: Status, says: str) -> Found:
        return Found(self.partition, self.offset, status, says)

    # Rows.

    def _is_by_offset(self, head: Progress) -> bool:
        """Whether positions are offsets; else events are numbered as they came."""
        if not _is_number(head.position):
            return False
        for committed in self._commits():
            if not (_is_number(committed.start) and _is_number(committed.end)):
                return False
            if committed.files:
                start, end = int(committed.start), int(committed.end)
                files = self._manifest(committed).files
                return all(start <= f.first_offset <= f.last_offset < end for f in files)
        return True

    def _covering(self, by_offset: bool) -> Committed | None:
        """The commit whose range holds the offset; those after it begin with a higher ordinal."""
        for row in self._rows(layout.commit_row(self.offset + 1, "")):
            for ordinal, committed in row.ranges():
                first, end = ordinal, ordinal + committed.events
                if by_offset:
                    first, end = int(committed.start), int(committed.end)
                if first <= self.offset < end:
                    return committed
        return None

    def _commits(self) -> Iterator[Committed]:
        """Ranges, the last one first."""
        for row in self._rows(None):
            yield from reversed(row.committed.parts)

    def _rows(self, before: str | None) -> Iterator[CommitRow]:
        """Rows of commits, the last one first; a merged one comes after those that it replaces."""
        rows = self.log.catalog.scan(self._where, "commit/", before or "commit0", reverse=True)
        return map(CommitRow.of, rows)

    def _manifest(self, committed: Committed) -> Manifest:
        return Manifests(self.log, self.pipeline, self.partition).of(committed)

    @property
    def _where(self) -> str:
        return layout.pipeline_partition(self.pipeline, self.partition)


def _is_number(position: str) -> bool:
    return position.isascii() and position.isdecimal()
