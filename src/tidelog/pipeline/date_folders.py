"""Counts each committed file once in the row of its date folder.

A *lane* is a source partition of the archive, or of the replays of its dead letters. A *touch* is
what one committed range added to one folder. Touches are counted lane by lane, in order. Each write
counts some of them, moves the lane's ``counted`` row and expects its version. So after a crash, a
lost reply or a race of two counters, the next process resumes from ``counted``.

The same write sets a folder that is final, or about to be, to be reopened. Any other folder gets a
``waiting`` row, which is deleted when the folder is marked, however late that is.

A folder is *dated* if its name is what the settings make of the times in it, and if no later time
has the same name: ``dt=2026-11-15``, ``red/2026/11``, but not ``offset=10000`` or ``hr=07`` alone.
A folder of hours is in a folder of days, and both are dated. A replay of dead letters may name
folders by other units or in another time zone: its files count in the dated folder that they are
in, whatever their own is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, product
from zoneinfo import ZoneInfo

import msgspec

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.codec.parsers import FolderSettings
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_partitions, replay_pipeline
from tidelog.coordination.trusted_time import trusted_now_ms
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.archive import Archive, CountedFiles, DateFolder
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import decode_row, encode_row

__all__ = [
    "DateFolders",
    "FolderCounter",
    "FolderFiles",
    "Span",
    "reopen",
]

_FOLDERS_AT_ONCE = 10  # in one write: two rows each, and the partition's own
_RANGES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class _CountLane:
    pipeline: str
    partition: str
    row: str


@dataclass(frozen=True, slots=True)
class _Touch:
    span: Span
    files: int
    events: int
    after: CountedFiles  # after counting it


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """What manifests say of the files in a dated folder."""

    folder: str
    files: int = 0
    events: int = 0
    erased: int = 0  # events that were in these files, and may have been when they were counted


@dataclass(frozen=True, slots=True)
class FolderCounter:
    """Counts the files of one generation of an archive."""

    context: Context
    archive: Archive
    folders: DateFolders
    now_ms: int

    def run(self) -> None:
        """Counts everything that is committed."""
        for lane in self._lanes():
            busy = UnavailableError(
                f"folders of `{lane.partition}`: others keep changing them: try again"
            )
            for _ in attempts(self.context, busy):
                if self._count(lane):
                    break

    def foreseen(self) -> dict[str, DateFolder]:
        """Returns the rows as counting would leave them, without writing."""
        found: dict[str, DateFolder] = {}
        for lane in self._lanes():
            counted, _ = self._read_counted(lane)
            for touch in self._touches(lane, counted):
                row = layout.folder_row(touch.span.end_ms, touch.span.folder)
                folder = found[row] if row in found else self._folder(row, touch.span)[0]
                found[row] = _with_files(folder, [touch], self.now_ms)
        return found

    def recount(self) -> dict[str, FolderFiles]:
        """Returns what the manifests say of everything counted so far, by the rows of folders.

        Raises ``NotFoundError`` or ``CorruptError`` for a manifest.
        """
        found: dict[str, FolderFiles] = {}
        for lane in self._lanes():
            counted, _ = self._read_counted(lane)
            for manifest in read_manifests(self.context, lane.pipeline, lane.partition):
                if manifest.ordinal > counted.ordinal:
                    break
                spans = sorted(self._spans(manifest).items(), key=lambda each: each[0].folder)
                if manifest.ordinal == counted.ordinal:
                    spans = spans[: counted.folders]
                for span, (files, events) in spans:
                    row = layout.folder_row(span.end_ms, span.folder)
                    known = found.get(row, FolderFiles(span.folder))
                    erased = sum(f.erased for f in manifest.files if span in self._spans_of(f))
                    found[row] = FolderFiles(
                        span.folder,
                        known.files + files,
                        known.events + events,
                        known.erased + erased,
                    )
        return found

    def _lanes(self) -> Iterator[_CountLane]:
        own = self.archive.pipeline()
        for pipeline, kind in ((own, "data"), (replay_pipeline(own), "dead")):
            for partition in read_partitions(self.context, pipeline):
                yield _CountLane(pipeline, partition, layout.counted_row(kind, partition))

    def _count(self, lane: _CountLane) -> bool:
        """Counts one lane. Returns False if another process interfered."""
        counted, version = self._read_counted(lane)
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
        self, lane: _CountLane, lot: dict[Span, list[_Touch]], after: CountedFiles, version: str
    ) -> str:
        """Writes once. Returns the new version of the ``counted`` row, or an empty string."""
        changes: list[Change] = [Put(lane.row, encode_row(after), version or ABSENT)]
        for span, touches in lot.items():
            row = layout.folder_row(span.end_ms, span.folder)
            folder, known = self._folder(row, span)
            more = _with_files(folder, touches, self.now_ms)
            changes.append(Put(row, encode_row(more), known or ABSENT))
            index = layout.waiting_row if more.state == "open" else layout.unsettled_row
            changes.append(Put(index(span.end_ms, span.folder), row.encode()))
        write_id = self.context.ids.new()
        try:
            self.context.catalog.write(self._where, *changes, write_id=write_id)
        except (ConflictError, UnknownOutcomeError):
            return ""  # the rows show the outcome
        return write_id

    def _touches(self, lane: _CountLane, counted: CountedFiles) -> Iterator[_Touch]:
        """Yields what is not counted yet, in order."""
        ranges = read_manifests(self.context, lane.pipeline, lane.partition, counted.ordinal)
        for manifest in ranges:
            found = sorted(self._spans(manifest).items(), key=lambda each: each[0].folder)
            skipped = counted.folders if manifest.ordinal == counted.ordinal else 0
            for number, (span, (files, events)) in enumerate(found, 1):
                after = CountedFiles(manifest.ordinal, number)
                if number == len(found):
                    after = CountedFiles(manifest.ordinal + manifest.read)
                if number > skipped:
                    yield _Touch(span, files, events, after)

    def _spans(self, manifest: Manifest) -> dict[Span, tuple[int, int]]:
        """Returns the dated folders of a range's files: how many files, with how many events."""
        found: dict[Span, tuple[int, int]] = {}
        for file in manifest.files:
            for span in self._spans_of(file):
                files, events = found.get(span, (0, 0))
                found[span] = (files + 1, events + file.events)
        return found

    def _spans_of(self, file: FileEntry) -> tuple[Span, ...]:
        root = f"{self.archive.folder()}/"
        if file.kind != "data" or not file.target.startswith(root):
            return ()
        return self.folders.spans(file.target.removeprefix(root).rpartition("/")[0], file.path_ms)

    def _read_counted(self, lane: _CountLane) -> tuple[CountedFiles, str]:
        row = self.context.catalog.get(self._where, lane.row)
        if row is None:
            return CountedFiles(), ""
        return decode_row(row.value, CountedFiles, f"row `{row.row}`"), row.version

    def _folder(self, row: str, span: Span) -> tuple[DateFolder, str]:
        found = self.context.catalog.get(self._where, row)
        if found is None:
            return DateFolder(span.folder, span.end_ms, span.length_ms), ""
        return decode_row(found.value, DateFolder, f"row `{row}`"), found.version

    @property
    def _where(self) -> str:
        return layout.pipeline_members(self.archive.pipeline())


def reopen(context: Context, pipeline: str, span: Span) -> None:
    """Lets the next finalize delete a folder's marker, and write it again after a delay."""
    where = layout.pipeline_members(pipeline)
    row = layout.folder_row(span.end_ms, span.folder)
    index = Put(layout.unsettled_row(span.end_ms, span.folder), row.encode())

    def decide(rows: Rows) -> Decision[None]:
        found = rows[row]
        folder = DateFolder(span.folder, span.end_ms, span.length_ms)
        if found is not None:
            folder = decode_row(found.value, DateFolder, f"row `{row}`")
        after = msgspec.structs.replace(folder, state="reopening", late_ms=trusted_now_ms(context))
        return Decision(None, [rows.put(row, encode_row(after)), index])

    update(context, where, [row], decide, f"row `{row}`")


def _with_files(folder: DateFolder, touches: list[_Touch], now_ms: int) -> DateFolder:
    """Returns a folder's row with more files in it."""
    more = msgspec.structs.replace(
        folder,
        files=folder.files + sum(touch.files for touch in touches),
        events=folder.events + sum(touch.events for touch in touches),
    )
    if folder.state == "open":
        return more
    state = folder.state if folder.state in ("reopening", "reopened") else "reopening"
    return msgspec.structs.replace(more, state=state, late_ms=now_ms)


_DAYS_MAX = 400  # a name that does not change within a year is not a time
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SAMPLE = datetime(2028, 1, 15)  # noqa: DTZ001 - in a month of 31 days, and a year of 366
_ZERO = datetime(1970, 1, 1)  # noqa: DTZ001 - on the zone's own clocks
_UNITS = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))
_QUARTERS = sorted(range(-26 * 4, 26 * 4 + 1), key=abs)  # clocks of two zones differ by less
_SHIFTS = [timedelta(minutes=15 * each) for each in _QUARTERS]


@dataclass(frozen=True, slots=True)
class Span:
    """A dated folder, and until when events belong in it."""

    folder: str
    end_ms: int
    length_ms: int


@dataclass(frozen=True, slots=True)
class _Level:
    """Folders of days, of hours in them, or of minutes."""

    format: str
    unit: timedelta
    parts: int  # of the whole name


class DateFolders:
    """Parses the names of folders that one choice of settings makes."""

    def __init__(self, settings: FolderSettings) -> None:
        self._zone = ZoneInfo(settings.time_zone)
        every = (settings.date_format, settings.hour_format, settings.minute_format)
        depth = 1 + ("day", "hour", "minute").index(settings.granularity)
        names = accumulate(every[:depth], lambda above, name: f"{above}/{name}")
        self._levels = [
            _Level(name, unit, name.count("/") + 1)
            for name, unit in zip(names, _UNITS, strict=False)
        ]
        self._known: dict[str, tuple[Span, ...]] = {}

    def spans(self, folder: str, time_ms: int) -> tuple[Span, ...]:
        """Returns the dated folders that this one is or is in, by the time of an event in it.

        Empty if the folder is not dated.
        """
        if folder not in self._known:
            self._known[folder] = tuple(self._spans(folder, time_ms))
        return self._known[folder]

    def _spans(self, folder: str, time_ms: int) -> list[Span]:
        if time_ms < 0:
            return []
        try:
            moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone(self._zone)
            local = moment.replace(tzinfo=None)
            depth = len(folder.split("/"))
            found = list(self._spans_below(folder, depth - self._levels[-1].parts, local))
            return found or self._spans_of_replay(folder, local)
        except OverflowError:
            return []  # no clock can show the end of the year 9999

    def _spans_of_replay(self, folder: str, local: datetime) -> list[Span]:
        """Returns the dated folders that this one is in, if a replay named it.

        That may have used other units of folders, or another time zone.
        """
        first = self._levels[0]
        if _span(first, local.strftime(first.format), local) is None:
            return []  # no name by these settings is dated
        for above, shift in product(range(len(folder.split("/"))), _SHIFTS):
            found = list(self._spans_below(folder, above, local + shift))
            if found:
                return found
        return []

    def _spans_below(self, folder: str, above: int, moment: datetime) -> Iterator[Span]:
        """Yields the dated folders after some parts of a folder's name, by a local time in it."""
        parts = folder.split("/")
        for level in self._levels if above >= 0 else ():
            name = "/".join(parts[above : above + level.parts])
            span = _span(level, name, moment)
            if span is None:
                return
            first, end = (self._utc_ms(local) for local in span)
            yield Span("/".join(parts[: above + level.parts]), end, end - first)

    def _utc_ms(self, local: datetime) -> int:
        """Returns when the zone's clocks last show this time, ignoring jumps."""
        both = (local.replace(tzinfo=self._zone, fold=fold) for fold in (0, 1))
        return max((moment - _EPOCH) // timedelta(milliseconds=1) for moment in both)


def _span(level: _Level, name: str, moment: datetime) -> tuple[datetime, datetime] | None:
    """Returns the first time with this name, and the first without it; None if not dated."""
    if moment.strftime(level.format) != name:
        return None
    try:
        first = moment - (moment - _ZERO) % level.unit
        while (first - level.unit).strftime(level.format) == name:
            first -= level.unit
            if moment - first > timedelta(days=_DAYS_MAX):
                return None
        end = first + level.unit
        while end.strftime(level.format) == name:
            end += level.unit
            if end - moment > timedelta(days=_DAYS_MAX):
                return None
        again = (first + timedelta(days=day) for day in range(_DAYS_MAX))
        if any(each >= end and each.strftime(level.format) == name for each in again):
            return None
    except OverflowError:
        return None  # no clock can show the end of the year 9999
    return first, end
