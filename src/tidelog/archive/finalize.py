"""Finalize: how far an archive is complete, and ``_SUCCESS`` in its complete folders.

The *watermark* is a time before which all events are in. A source partition has reached the time of
its last committed event: the parser's time if folders are made of times, otherwise the event's own.
A partition that has caught up with its source has reached the present, so a quiet one delays no
folder. An event from the future shows nothing: events that wait behind it may be hours old. So one
that is more than five minutes (``CLOCK_AHEAD_MS``) ahead when it is committed does not count. The
present is the earlier of this machine's time and the store's, so a clock that is ahead does no
harm. A change log is read some time behind the present (``Bounds.until_ms``), so a partition of it
has reached only that time. The watermark is the least of these, minus the delay by which events may
be late; it never goes back. An archive of an archive is compared with the source of the first one,
whose positions it has too: having caught up with an archive that lags means nothing. What that
source no longer lists (expired shards, deleted files and topics) is compared with the archives in
between.

A date folder with files is *final* when it ended before the watermark, however long ago. Until it
is marked, it has a ``waiting`` row. Later files reopen it: its marker is deleted, listeners are
notified, and after another delay without such files it is final again. Setting files of a marked
folder aside (``pipeline.forgotten_ranges``) does the same. A folder without files gets no marker:
the watermark covers it.

The row of a folder decides, and the marker follows. The steps:

1. look: the clock, the ends of the source, then the heads: the watermark
2. count: new files into ``folder`` rows, with a ``waiting`` row for each new folder; one that has a
   marker becomes ``reopening`` (``pipeline.date_folders``)
3. reopen: delete ``_SUCCESS``, notify, row as ``reopened``
4. mark: row as ``marking``, delete the ``waiting`` row; put ``_SUCCESS``, notify, row as ``final``
5. the watermark into the registry row of the archive

============ ======================================== ========================================
crash after  what is there                            what repairs it
============ ======================================== ========================================
2            rows, markers not yet as they say        the next finalize, by ``unsettled`` rows
3 delete     ``reopening`` without a marker           the same; notifies again
3 notify     the same, and all are notified           the same; notifies a second time
4 row        ``marking`` without a marker             the same
4 put        ``marking`` with one                     the same; notifies again
4 notify     the same, and all are notified           the same; notifies a second time
5            everything
============ ======================================== ========================================

Two at once are safe: rows change by version, and a process whose row changed looks again. A stalled
process that puts or deletes a marker too late fixes it itself. Otherwise the next finalize does,
because the row of a reopened folder stays ``unsettled`` for another delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from tidelog.archive.archive import check_active, find_archive
from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.catalog.update import attempts, pause, rounds
from tidelog.codec.parsers import FolderSettings
from tidelog.connectors.by_url import files_at, source_at, store_at
from tidelog.connectors.source import Bounds, Source, SourcePartition, SourceRange, waits
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import change_archive, read_progress
from tidelog.coordination.trusted_time import trusted_now_ms
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.notify_targets import open_target, shown_target
from tidelog.model import defaults, layout, limits
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive, DateFolder, encode_success
from tidelog.model.event import to_iso
from tidelog.model.pipeline import Totals
from tidelog.model.times import duration_ms
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.date_folders import DateFolders, FolderCounter
from tidelog.pipeline.source_partitions import track
from tidelog.store.base import Store

__all__ = ["FinalizeOptions", "FinalizeResult", "Finalizer", "FolderNotice", "Listener", "finalize"]

_ATTEMPTS = 50  # of a write that conflicts


@dataclass(frozen=True, slots=True)
class FinalizeOptions:
    """How to finalize."""

    delay_ms: int = duration_ms(defaults.FINALIZE_DELAY)  # how late events may be
    notify: str = ""  # URL to notify
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.delay_ms < 0:
            raise InvalidError(f"finalize: delay {self.delay_ms} ms: give a delay of 0 or more")


class Listener(Protocol):
    """Receives notices about folders."""

    def send(self, notification: FolderNotice) -> None:
        """Notifies; may repeat the same notice. Raises a ``TidelogError`` if it failed."""
        ...


class FolderNotice(msgspec.Struct, frozen=True):
    """A notice about a folder."""

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
    errors: list[TidelogError] = field(default_factory=list)  # of listeners

    @property
    def is_clean(self) -> bool:
        """Returns whether every listener was notified."""
        return not self.errors


def finalize(
    context: Context, archive: Archive, how: FinalizeOptions | None = None
) -> FinalizeResult:
    """Finalizes the live generation of an archive. Safe to repeat, and to run twice at once.

    Raises ``UnavailableError`` if the source or a store cannot be reached. ``errors`` has failed
    notices, which the next finalize sends again.
    """
    how = how or FinalizeOptions()
    if how.notify:
        context.identity.check(f"notification target `{shown_target(how.notify)}`")
    target = cast(Listener, open_target(how.notify, context.environ)) if how.notify else None
    check_active(archive)
    sources = _sources(context, archive)
    files = store_at(context, archive.store) if how.dry_run else files_at(context, archive)
    return Finalizer(context, archive, sources, files, target).run(how)


def _sources(context: Context, archive: Archive) -> list[Source]:
    """Returns what an archive reads; for a chain, the source of the first archive comes first."""
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
        self._where = layout.pipeline_members(archive.pipeline())
        self._folders = DateFolders(FolderSettings(**archive.format_of().layout))

    def run(self, how: FinalizeOptions) -> FinalizeResult:
        """Runs all steps."""
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
        """Step 1. Events after the ends were read are after ``now_ms``, except late ones."""
        reached: list[int] = []
        for partition, (source, held) in self._ends().items():
            head = read_progress(self._context, self._archive.pipeline(), partition.text)
            position = head.position if head else held.first
            if head and head.ended:
                waiting = False  # a person decided that no more of it is archived
            elif head and not head.is_of(held.incarnation):
                waiting = True  # it was created again, with other positions
            else:
                waiting = self._waits(source, SourceRange(partition, position, held.end))
            if not waiting:
                reached.append(now_ms if held.until_ms is None else min(now_ms, held.until_ms))
                continue
            totals = head.totals if head else Totals()
            time_ms = totals.path_ms if totals.path_ms >= 0 else totals.event_ms
            if time_ms < 0 or time_ms > now_ms + limits.CLOCK_AHEAD_MS:
                return None  # it has events of unknown time
            reached.append(min(time_ms, now_ms))
        return max(0, min(reached) - delay_ms) if reached else None

    def _waits(self, source: Source, range: SourceRange) -> bool:
        """Returns whether there may be more for the archive. Raises if its own source lost it."""
        try:
            return waits(source, range)
        except NotFoundError:
            if source is self._sources[-1]:
                raise
            return True  # the first source holds it no longer, and the archives in between do

    def _ends(self) -> dict[SourcePartition, tuple[Source, Bounds]]:
        """Returns what each source partition ends with, and the source that says so.

        That is the first one of the chain that lists it: those after it may lag.
        """
        found: dict[SourcePartition, tuple[Source, Bounds]] = {}
        missing: list[NotFoundError] = []
        for source in self._sources:
            track(self._context, self._archive.pipeline(), source)
        for source in self._sources:
            try:
                bounds = source.bounds(source.partitions())
            except NotFoundError as exc:  # then the archives of it hold everything
                missing.append(exc)
            else:
                found = {**{each: (source, held) for each, held in bounds.items()}, **found}
        if len(missing) == len(self._sources):
            raise missing[-1]
        return found

    def _candidates(self, done: FinalizeResult) -> dict[str, DateFolder]:
        """Returns the folders that may need work, by their rows."""
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
        """Steps 3 and 4: does what the row of a folder says until it is settled."""
        busy = UnavailableError(f"row `{name}`: others keep changing it: try again")
        for number in rounds(_ATTEMPTS, busy):
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
                return  # open, or waiting for another delay
            changes.append(Delete(index) if settled else Put(index, name.encode()))
            changes.append(Delete(layout.waiting_row(folder.end_ms, folder.folder)))
            try:
                self._context.catalog.write(self._where, *changes, write_id=self._context.ids.new())
            except (ConflictError, UnknownOutcomeError):
                pause(self._context, number)
                continue  # the row shows the outcome
            if settled:
                return

    def _follow(self, folder: DateFolder, done: FinalizeResult) -> bool:
        """Makes the marker match the row, and notifies. Returns False if a notice failed."""
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
            done.errors.append(exc)  # the row does not change, so the next finalize notifies again
            return False
        if notice not in done.notices:
            done.notices.append(notice)
        return True

    def _move(self, watermark_ms: int) -> int | None:
        """Step 5. Returns the watermark after it."""
        mine = self._archive

        def edit(found: Archive) -> Archive:
            if (found.incarnation, found.generation) != (mine.incarnation, mine.generation):
                return found
            further_ms = max(found.watermark_ms or 0, watermark_ms)
            return msgspec.structs.replace(found, watermark_ms=further_ms)

        return change_archive(self._context, mine.name, edit).watermark_ms

    # Internals.

    def _foresee(self, folder: DateFolder, done: FinalizeResult, due: _Due) -> None:
        after = due.after(folder)
        if folder.state == "reopening":
            done.notices.append(self._notice(folder, "reopened", folder.watermark_ms))
        elif "marking" in (folder.state, after.state):
            done.notices.append(self._notice(folder, "final", after.watermark_ms))

    def _put_marker(self, folder: DateFolder) -> None:
        key, said = self._marker(folder), encode_success(self._archive.name, folder)
        busy = UnavailableError(f"object `{key}`: others keep changing it: try again")
        for _ in attempts(self._context, busy):
            try:
                self._files.put(key, said)
                return
            except AlreadyExistsError:
                try:
                    if self._files.get(key) == said:
                        return
                except NotFoundError:
                    continue
                self._files.delete([key])  # of an earlier time, put by a late process

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
    """Decides about folders at one time and with one watermark. Pure."""

    how: FinalizeOptions
    watermark_ms: int | None
    now_ms: int

    def after(self, folder: DateFolder) -> DateFolder:
        """Returns a folder's row after its marker matches."""
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
        """Returns whether there is nothing left to do or repair for a folder."""
        return folder.state == "final" and (not folder.late_ms or self._is_over(folder.marked_ms))

    def _is_over(self, since_ms: int) -> bool:
        return self.now_ms >= since_ms + self.how.delay_ms


def _decode(row: Row) -> DateFolder:
    return decode_row(row.value, DateFolder, f"row `{row.row}`")
