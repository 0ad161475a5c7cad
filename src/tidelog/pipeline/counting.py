"""Files into folders: each committed file is counted in the row of its date folder, once.

A *lane* is a source partition of the archive, or of the replays of its dead letters. A *touch* is
what one committed range added to one folder. Touches are counted lane by lane in their order, some
at a time, by one write that also moves the lane's ``counted`` row and expects its version. So a
crash, a lost reply or a second counter at work leaves nothing half done: whoever comes next goes on
from ``counted``.

A folder that was marked as final, or was about to be, is made to be reopened by the same write. One
that never was gets a ``waiting`` row, which is deleted when it is marked, however late that is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.ages import trusted_now_ms
from tidelog.log.archives import read_manifests, read_partitions
from tidelog.log.base import Log
from tidelog.log.replays import replay_pipeline
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.folder import Counted, Folder
from tidelog.model.pipeline import Manifest
from tidelog.model.run import decode_row, encode_row
from tidelog.pipeline.folders import DateFolders, Span

__all__ = ["Counting", "reopen"]

_FOLDERS_AT_ONCE = 10  # in one write: two rows each, and the partition's own
_RANGES_AT_ONCE = 500
_ATTEMPTS = 50  # of a write that others keep changing


@dataclass(frozen=True, slots=True)
class _Lane:
    pipeline: str
    partition: str
    row: str


@dataclass(frozen=True, slots=True)
class _Touch:
    span: Span
    files: int
    events: int
    after: Counted  # once it is counted


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts the files of one generation of an archive."""

    log: Log
    archive: Archive
    folders: DateFolders
    now_ms: int

    def run(self) -> None:
        """Count all that is committed."""
        for lane in self._lanes():
            for _ in range(_ATTEMPTS):
                if self._count(lane):
                    break
            else:
                raise UnavailableError(
                    f"folders of `{lane.partition}`: others keep changing them: try again"
                )

    def foreseen(self) -> dict[str, Folder]:
        """The rows as counting would leave them; nothing is written."""
        found: dict[str, Folder] = {}
        for lane in self._lanes():
            counted, _ = self._counted(lane)
            for touch in self._touches(lane, counted):
                row = layout.folder_row(touch.span.end_ms, touch.span.folder)
                folder = found[row] if row in found else self._folder(row, touch.span)[0]
                found[row] = _with(folder, [touch], self.now_ms)
        return found

    def _lanes(self) -> Iterator[_Lane]:
        own = self.archive.pipeline()
        for pipeline, kind in ((own, "data"), (replay_pipeline(own), "dead")):
            for partition in read_partitions(self.log, pipeline):
                yield _Lane(pipeline, partition, layout.counted_row(kind, partition))

    def _count(self, lane: _Lane) -> bool:
        """Count one lane; False when somebody else came between."""
        counted, version = self._counted(lane)
        lot: dict[Span, list[_Touch]] = defaultdict(list)
        for number, touch in enumerate(self._touches(lane, counted), 1):
            lot[touch.span].append(touch)
            if len(lot) >= _FOLDERS_AT_ONCE or number % _RANGES_AT_ONCE == 0:
                version = self._write(lane, lot, touch.after, version)
                if not version:
                    return False
                lot = defaultdict(list)
        return not lot or bool(self._write(lane, lot, touch.after, version))

    def _write(
        self, lane: _Lane, lot: dict[Span, list[_Touch]], after: Counted, version: str
    ) -> str:
        """One write; the version that the ``counted`` row has then, or nothing."""
        changes: list[Change] = [Put(lane.row, encode_row(after), version or ABSENT)]
        for span, touches in lot.items():
            row = layout.folder_row(span.end_ms, span.folder)
            folder, known = self._folder(row, span)
            more = _with(folder, touches, self.now_ms)
            changes.append(Put(row, encode_row(more), known or ABSENT))
            index = layout.waiting_row if more.state == "open" else layout.unsettled_row
            changes.append(Put(index(span.end_ms, span.folder), row.encode()))
        write_id = self.log.ids.new()
        try:
            self.log.catalog.write(self._where, *changes, write_id=write_id)
        except (ConflictError, UnknownOutcomeError):
            return ""  # the rows tell what became of it
        return write_id

    def _touches(self, lane: _Lane, counted: Counted) -> Iterator[_Touch]:
        """What is not counted yet, in order."""
        ranges = read_manifests(self.log, lane.pipeline, lane.partition, counted.ordinal)
        for manifest in ranges:
            found = sorted(self._spans(manifest).items(), key=lambda each: each[0].folder)
            skipped = counted.folders if manifest.ordinal == counted.ordinal else 0
            for number, (span, (files, events)) in enumerate(found, 1):
                after = Counted(manifest.ordinal, number)
                if number == len(found):
                    after = Counted(manifest.ordinal + manifest.read)
                if number > skipped:
                    yield _Touch(span, files, events, after)

    def _spans(self, manifest: Manifest) -> dict[Span, tuple[int, int]]:
        """The dated folders that a range has put files into: how many, with how many events."""
        root = f"{self.archive.folder()}/"
        found: dict[Span, tuple[int, int]] = {}
        for file in manifest.files:
            if file.kind != "data" or not file.target.startswith(root):
                continue
            folder = file.target.removeprefix(root).rpartition("/")[0]
            for span in self.folders.spans(folder, file.path_ms):
                files, events = found.get(span, (0, 0))
                found[span] = (files + 1, events + file.events)
        return found

    def _counted(self, lane: _Lane) -> tuple[Counted, str]:
        row = self.log.catalog.get(self._where, lane.row)
        if row is None:
            return Counted(), ""
        return decode_row(row.value, Counted, f"row `{row.row}`"), row.version

    def _folder(self, row: str, span: Span) -> tuple[Folder, str]:
        found = self.log.catalog.get(self._where, row)
        if found is None:
            return Folder(span.folder, span.end_ms, span.length_ms), ""
        return decode_row(found.value, Folder, f"row `{row}`"), found.version

    @property
    def _where(self) -> str:
        return layout.pipeline_shards(self.archive.pipeline())


def reopen(log: Log, pipeline: str, span: Span) -> None:
    """Let the next finalize delete a folder's marker, and put it again after another delay."""
    where = layout.pipeline_shards(pipeline)
    row = layout.folder_row(span.end_ms, span.folder)
    for _ in range(_ATTEMPTS):
        found = log.catalog.get(where, row)
        folder = Folder(span.folder, span.end_ms, span.length_ms)
        if found is not None:
            folder = decode_row(found.value, Folder, f"row `{row}`")
        after = msgspec.structs.replace(folder, state="reopening", late_ms=trusted_now_ms(log))
        changes = (
            Put(row, encode_row(after), found.version if found is not None else ABSENT),
            Put(layout.unsettled_row(span.end_ms, span.folder), row.encode()),
        )
        try:
            log.catalog.write(where, *changes, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            continue  # the row shows what became of it
        return
    raise UnavailableError(f"row `{row}`: others keep changing it: try again")


def _with(folder: Folder, touches: list[_Touch], now_ms: int) -> Folder:
    """A folder's row with more files in it."""
    more = msgspec.structs.replace(
        folder,
        files=folder.files + sum(touch.files for touch in touches),
        events=folder.events + sum(touch.events for touch in touches),
    )
    if folder.state == "open":
        return more
    state = folder.state if folder.state in ("reopening", "reopened") else "reopening"
    return msgspec.structs.replace(more, state=state, late_ms=now_ms)
