"""Finalize: how far an archive is complete, and ``_SUCCESS`` in the folders that are.

The *watermark* is a time before which all events are in. A source partition has reached the time of
its last committed event: the parser's time where folders are made of times, else the event's own.
One that is caught up with its source has reached the present, so a quiet one delays no folder; none
has reached more than that, so an event from the future does no harm. The present is the earlier of
this machine's time and the store's, so a clock that is ahead does none either. The least of these,
less the delay that events may be late by, is the watermark; it never goes back. An archive of an
archive is held against the source of the first one, whose positions it has too: being caught up
with an archive that lags says nothing.

A date folder with files is *final* when it ended before the watermark, however long ago: until it
is marked, it has a ``waiting`` row. Files that come later reopen it: its marker is deleted, targets
are notified, and after another delay without such files it is final again. So does setting files of
a marked folder aside (``forgotten``). A folder without files gets no marker: the watermark speaks
for it.

The row of a folder is the truth and the marker follows it. The steps:

1. look: the clock, the ends of the source, then the heads: the watermark
2. count: new files into ``folder`` rows, with a ``waiting`` row for each new folder; one that has a
   marker becomes ``reopening`` (``counting``)
3. reopen: delete ``_SUCCESS``, tell, row as ``reopened``
4. mark: row as ``marking``, delete the ``waiting`` row; put ``_SUCCESS``, notify, row as ``final``
5. the watermark into the registry row of the archive

========== ======================================== ========================================
dies after what is there                            who repairs
========== ======================================== ========================================
2          rows, markers not yet as they say        the next finalize, by ``unsettled`` rows
3 delete   ``reopening`` without a marker           the same; tells once more
3 tell     the same, and all know                   the same; they are told twice
4 row      ``marking`` without a marker             the same
4 put      ``marking`` with one                     the same; tells once more
4 tell     the same, and all know                   the same; they are told twice
5          all
========== ======================================== ========================================

Two at once are safe: rows change by their versions, and who finds its row changed looks again. A
marker that a stalled one puts or deletes too late is mended by itself or, since the row of a
folder that was reopened stays ``unsettled`` for another delay, by the next finalize.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from tidelog.archive.archive import check_active, find_archive
from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.codec.parsers import LayoutSettings
from tidelog.connectors.source import Bounds, Source, SourcePartition, SourceRange, waits
from tidelog.context import Context
from tidelog.coordination.ages import trusted_now_ms
from tidelog.coordination.pipeline_rows import change_archive, read_progress
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.notify.targets import open_target
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive, DateFolder, encode_success
from tidelog.model.event import to_iso
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.pipeline import Totals
from tidelog.pipeline.date_folders import DateFolders, FolderCounter
from tidelog.pipeline.endpoints import files_at, source_at, store_at
from tidelog.pipeline.source_partitions import track
from tidelog.store.base import Store

__all__ = ["FinalizeOptions", "FinalizeResult", "Finalizer", "FolderNotice", "Listener", "finalize"]

_ATTEMPTS = 50  # of a write that others keep changing


@dataclass(frozen=True, slots=True)
class FinalizeOptions:
    """How to finalize."""

    delay_ms: int = 3_600_000  # how late events may be
    notify: str = ""  # URL of whom to tell
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.delay_ms < 0:
            raise InvalidError(f"finalize: delay {self.delay_ms} ms: give a delay of 0 or more")


class Listener(Protocol):
    """Somebody to be told of folders."""

    def send(self, notification: FolderNotice) -> None:
        """Tell them; may be called again with the same. Any ``TidelogError`` when it failed."""
        ...


class FolderNotice(msgspec.Struct, frozen=True):
    """What others are told of a folder."""

    archive: str
    folder: str
    event: str  # final or reopened
    watermark: str  # of the archive when the folder was last marked
    files: int
    events: int


@dataclass(slots=True)
class FinalizeResult:
    """What a finalize did, or would do."""

    watermark_ms: int | None = None  # None: nothing is complete yet
    notices: list[FolderNotice] = field(default_factory=list)
    errors: list[TidelogError] = field(default_factory=list)  # of whom to tell


def finalize(
    context: Context, archive: Archive, how: FinalizeOptions | None = None
) -> FinalizeResult:
    """Finalize the promoted generation of an archive. Safe to repeat, and to run twice at once.

    ``UnavailableError`` when the source or a store cannot be reached. What could not be told to
    somebody is in ``errors``, and is told again by the next one.
    """
    how = how or FinalizeOptions()
    if how.notify:
        context.standing.check(f"notification target `{how.notify}`")
    target = cast(Listener, open_target(how.notify, context.environ)) if how.notify else None
    check_active(archive)
    sources = _sources(context, archive)
    files = store_at(context, archive.store) if how.dry_run else files_at(context, archive)
    return Finalizer(context, archive, sources, files, target).run(how)


def _sources(context: Context, archive: Archive) -> list[Source]:
    """What an archive reads; of a chain of archives what the first one reads comes first."""
    urls = [archive.source]
    names = {archive.name}
    while (address := parse_address(urls[0])).scheme == "archive" and address.path not in names:
        names.add(address.path)
        urls.insert(0, find_archive(context, address.path).source)
    return [source_at(context, url) for url in urls]


class Finalizer:
    """Finalizes one generation of one archive."""

    def __init__(
        self,
        context: Context,
        archive: Archive,
        sources: Sequence[Source],
        files: Store,
        target: Listener | None = None,
    ) -> None:
        self._context = context
        self._archive = archive
        self._sources = sources
        self._files = files
        self._target = target
        self._where = layout.pipeline_shards(archive.pipeline())
        self._folders = DateFolders(LayoutSettings(**archive.making().layout))

    def run(self, how: FinalizeOptions) -> FinalizeResult:
        """All steps."""
        now_ms = self._context.clock.now_ms() if how.dry_run else trusted_now_ms(self._context)
        done = FinalizeResult(self._watermark_ms(now_ms, how.delay_ms))
        counting = FolderCounter(self._context, self._archive, self._folders, now_ms)
        if how.dry_run:
            folders = {**self._candidates(done), **counting.foreseen()}
            for folder in folders.values():
                self._foresee(folder, done, _Due(how, done.watermark_ms, now_ms))
        else:
            counting.run()
            for row in self._candidates(done):
                self._settle(row, done, _Due(how, done.watermark_ms, now_ms))
        known = self._archive.watermark_ms
        if done.watermark_ms is None or (known is not None and known > done.watermark_ms):
            done.watermark_ms = known
        elif not how.dry_run:
            done.watermark_ms = self._move(done.watermark_ms)
        return done

    # The steps.

    def _watermark_ms(self, now_ms: int, delay_ms: int) -> int | None:
        """Step 1. What comes after the ends were read happened after ``now_ms``, but for delay."""
        source, bounds = self._ends()
        reached: list[int] = []
        for partition, held in bounds.items():
            head = read_progress(self._context, self._archive.pipeline(), partition.text)
            position = head.position if head else held.first
            if head and not head.is_of(held.incarnation):
                waiting = True  # it was made again, and its positions are others
            else:
                waiting = waits(source, SourceRange(partition, position, held.end))
            if not waiting:
                reached.append(now_ms)
                continue
            totals = head.totals if head else Totals()
            time_ms = totals.path_ms if totals.path_ms >= 0 else totals.event_ms
            if time_ms < 0:
                return None  # it has events, and nobody knows yet of what time
            reached.append(min(time_ms, now_ms))
        return max(0, min(reached) - delay_ms) if reached else None

    def _ends(self) -> tuple[Source, dict[SourcePartition, Bounds]]:
        """The ends of the first source of the chain that still exists, and that source."""
        for source in self._sources:
            track(self._context, self._archive.pipeline(), source)
        for source in self._sources[:-1]:
            with contextlib.suppress(NotFoundError):  # then the archive of it holds all there is
                return source, source.bounds(source.partitions())
        source = self._sources[-1]
        return source, source.bounds(source.partitions())

    def _candidates(self, done: FinalizeResult) -> dict[str, DateFolder]:
        """The folders that something may have to be done about, by their rows."""
        found: dict[str, DateFolder] = {}
        catalog = self._context.catalog
        for each in catalog.scan(self._where, "unsettled/", "unsettled0"):
            row = catalog.get(self._where, each.value.decode())
            if row is not None:
                found[row.row] = _decode(row)
        if done.watermark_ms is not None:
            for each in catalog.scan(self._where, *layout.waiting_rows(done.watermark_ms)):
                row = catalog.get(self._where, each.value.decode())
                if row is not None:
                    found[row.row] = _decode(row)
        return found

    def _settle(self, name: str, done: FinalizeResult, due: _Due) -> None:
        """Steps 3 and 4: what the row of a folder says, until it says nothing more."""
        for _ in range(_ATTEMPTS):
            row = self._context.catalog.get(self._where, name)
            if row is None:
                return
            folder = _decode(row)
            if not self._follow(folder, done):
                return
            after = due.after(folder)
            changes: list[Change] = [Put(name, encode_row(after), row.version)]
            index = layout.unsettled_row(folder.end_ms, folder.folder)
            settled = due.is_settled(after)
            if after == folder and not settled:
                return  # an open one, or one that waits for another delay to pass
            changes.append(Delete(index) if settled else Put(index, name.encode()))
            changes.append(Delete(layout.waiting_row(folder.end_ms, folder.folder)))
            try:
                self._context.catalog.write(self._where, *changes, write_id=self._context.ids.new())
            except (ConflictError, UnknownOutcomeError):
                continue  # the row tells what became of it
            if settled:
                return
        raise UnavailableError(f"row `{name}`: others keep changing it: try again")

    def _follow(self, folder: DateFolder, done: FinalizeResult) -> bool:
        """Make the marker as a row says, and tell others; False when somebody could not be told."""
        if folder.state in ("marking", "final"):
            self._put_marker(folder)
        elif folder.state in ("reopening", "reopened"):
            self._files.delete([self._marker(folder)])
        if folder.state not in ("marking", "reopening"):
            return True
        event = "final" if folder.state == "marking" else "reopened"
        notice = self._notice(folder, event, folder.watermark_ms)
        try:
            if self._target is not None:
                self._target.send(notice)
        except TidelogError as exc:
            done.errors.append(exc)  # the row stays as it is, so the next finalize tells them
            return False
        if notice not in done.notices:
            done.notices.append(notice)
        return True

    def _move(self, watermark_ms: int) -> int | None:
        """Step 5; the watermark as it is then."""
        mine = self._archive

        def edit(found: Archive) -> Archive:
            if (found.incarnation, found.generation) != (mine.incarnation, mine.generation):
                return found
            further_ms = max(found.watermark_ms or 0, watermark_ms)
            return msgspec.structs.replace(found, watermark_ms=further_ms)

        return change_archive(self._context, mine.name, edit).watermark_ms

    # Inside.

    def _foresee(self, folder: DateFolder, done: FinalizeResult, due: _Due) -> None:
        after = due.after(folder)
        if folder.state == "reopening":
            done.notices.append(self._notice(folder, "reopened", folder.watermark_ms))
        elif "marking" in (folder.state, after.state):
            done.notices.append(self._notice(folder, "final", after.watermark_ms))

    def _put_marker(self, folder: DateFolder) -> None:
        key, said = self._marker(folder), encode_success(self._archive.name, folder)
        for _ in range(_ATTEMPTS):
            try:
                self._files.put(key, said)
                return
            except AlreadyExistsError:
                try:
                    if self._files.get(key) == said:
                        return
                except NotFoundError:
                    continue
                self._files.delete([key])  # of an earlier time, put by one that was late
        raise UnavailableError(f"object `{key}`: others keep changing it: try again")

    def _marker(self, folder: DateFolder) -> str:
        return layout.success(f"{self._archive.folder()}/{folder.folder}")

    def _notice(self, folder: DateFolder, event: str, watermark_ms: int) -> FolderNotice:
        return FolderNotice(
            archive=self._archive.name,
            folder=folder.folder,
            event=event,
            watermark=to_iso(watermark_ms),
            files=folder.files,
            events=folder.events,
        )


@dataclass(frozen=True, slots=True)
class _Due:
    """What is to become of folders, at one time and with one watermark. Pure."""

    how: FinalizeOptions
    watermark_ms: int | None
    now_ms: int

    def after(self, folder: DateFolder) -> DateFolder:
        """A folder's row once its marker is as it says."""
        if folder.state == "marking":
            return msgspec.structs.replace(folder, state="final")
        if folder.state == "reopening":
            return msgspec.structs.replace(folder, state="reopened")
        if self.watermark_ms is None or folder.end_ms > self.watermark_ms:
            return folder
        first = folder.state == "open"
        again = folder.state == "reopened" and folder.files > 0 and self._is_over(folder.late_ms)
        if not first and not again:
            return folder
        return msgspec.structs.replace(
            folder, state="marking", watermark_ms=self.watermark_ms, marked_ms=self.now_ms
        )

    def is_settled(self, folder: DateFolder) -> bool:
        """Whether nothing is left to do about a folder, nor to be mended."""
        return folder.state == "final" and (not folder.late_ms or self._is_over(folder.marked_ms))

    def _is_over(self, since_ms: int) -> bool:
        return self.now_ms >= since_ms + self.how.delay_ms


def _decode(row: Row) -> DateFolder:
    return decode_row(row.value, DateFolder, f"row `{row.row}`")
