"""Erases events from archives: rewrites the files that hold them, under their own names.

An erasure names offsets of source partitions. Each committed range whose files hold some of them
goes through these steps; the row is the range's ``commit``:

1. intend: the key of a future manifest into the row; no
   sweep touches what is staged under its epoch from now on → crash: the next erasure resumes at 2
2. decide: stage every file without those events, then put
   that manifest, create-only: the content is decided       → crash: the next one resumes at 3
3. replace each file by its etag with its staged copy       → crash: the next one does the rest
4. commit, in one write: the row names the new manifest,
   and ``erased`` counts the events                         → crash: tables list the old files
5. delete what was staged                                   → crash: the same
6. correct the entries of every table that lists the files,
   whether or not drivers keep it up to date                → crash: the next one corrects them
7. done: clear the erasure in the row

A file keeps its name, so a reader that lists the folder sees each event once at every moment. A
file that loses all its events stays, empty, so no late copy of a driver can bring it back. Between
steps 3 and 4 the bytes of a file differ from its manifest: a reader of the manifest gets an error,
and reads again. A table that cannot be reached does not stop the erasure: the row stays at step 6,
a later erasure from the same range still begins at step 1, and the error is raised at the end. If a
staged copy was deleted before its file was replaced, the range begins again at step 1, with another
key. If other files of the range were replaced by then, that copy is staged again. Dead letters that
a replay replaced are deleted first. One may do that at any step: such a file counts as done. So
does a generation that is dropped meanwhile, whose files go before its rows.

With a task runner, tasks stage files (step 2) and replace them (step 3). A task that runs twice
stages under other names, which sweeps delete, and replaces a file once, by its etag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter

import msgspec
import numpy as np

from tidelog.archive.dead_letters import remove_replaced
from tidelog.archive.derived_archives import (
    UNKNOWN_ORIGIN,
    Origin,
    is_of_topic,
    partitions_of,
    reachable_archives_of,
    with_later_ones,
)
from tidelog.archive.generations import finish_removals
from tidelog.archive.tables import correct_entries
from tidelog.catalog.base import ABSENT, Check, Put, Row
from tidelog.catalog.update import pause, rounds
from tidelog.concurrency import TaskRunner
from tidelog.connectors.archive.staging import discard_files
from tidelog.connectors.by_url import files_at
from tidelog.context import Context
from tidelog.coordination.commits import load_manifest, manifests_by_range, read_commit_rows
from tidelog.coordination.pipeline_rows import (
    read_archive,
    read_erased_row,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.erasure.aside_files import AsideFiles, aside_origins
from tidelog.erasure.rewrite_range import (
    FileReplace,
    Offsets,
    RangeRewrite,
    RangeRewriter,
    Values,
    changed_files,
    files_of,
    holds_here,
    manifest_without,
    replace_file,
    replace_here,
    stage_here,
)
from tidelog.erasure.unfinished_ranges import are_some_between, finish_remedy, is_under_way
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
    contained,
)
from tidelog.log.ledger import ErasedIds, read_ledger
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Commit, ErasedEvents, FileEntry, Manifest
from tidelog.model.topic import Topic, decode_row, encode_row
from tidelog.store.base import Store

__all__ = [
    "ArchiveErasure",
    "PartitionRewriter",
    "RangeToSettle",
    "erase_aside",
    "erase_from_archive",
    "erase_from_archives",
    "finish_rewrites",
    "settle_ranges",
]

_ATTEMPTS = 50  # at one range that changes
_AHEAD = 200  # ranges whose files tasks rewrite at once


@dataclass(slots=True)
class ArchiveErasure:
    """What was erased from one generation of an archive, or updated in it."""

    archive: str
    generation: int
    files: int = 0
    events: int = 0
    ranges: int = 0
    updated: int = 0  # events that got another value
    waiting: int = 0  # unfinished ranges that may have been planned before the deletes
    unfinished: dict[str, str] = field(default_factory=dict)  # what finishes these, by pipeline
    failed: dict[str, TidelogError] = field(default_factory=dict)  # tables that list old files

    def add(self, later: ArchiveErasure) -> None:
        """Adds what a later look at the same generation did; what is left is what that found."""
        self.files += later.files
        self.events += later.events
        self.ranges += later.ranges
        self.updated += later.updated
        self.waiting, self.unfinished, self.failed = later.waiting, later.unfinished, later.failed


def erase_from_archives(
    context: Context,
    topic: Topic,
    deleted: Mapping[int, Collection[int]],
    on_error: Callable[[TidelogError], None] | None = None,
) -> list[ArchiveErasure]:
    """Removes deleted events of a topic from every archive that was made of it.

    ``deleted`` has offsets by partition. An archive that has not reached an offset skips it when it
    reads the topic. Idempotent, and safe to kill and to run twice at once. An archive with an error
    does not stop the others: the error goes to ``on_error``, or is raised at the end.
    """
    reports: list[ArchiveErasure] = []
    errors: list[TidelogError] = []

    def look() -> list[tuple[Archive, int]]:
        return reachable_archives_of(context, topic) if deleted else []

    for archive, generation in with_later_ones(look):
        with contained(f"archive `{archive.name}`", errors.append):
            own = partitions_of(context, archive.pipeline(generation), topic)
            offsets = {name: sorted(deleted.get(number, ())) for name, number in own.items()}
            report = erase_from_archive(context, archive, generation, offsets)
            if archive.name not in [each.archive for each in reports]:  # once for all generations
                ledger = partial(read_ledger, context, topic)
                erase_aside(context, archive, ledger, partial(is_of_topic, topic=topic), report)
            reports.append(report)
            errors += report.failed.values()
    for error in errors:
        if on_error is None:
            raise error
        on_error(error)
    return reports


def erase_from_archive(
    context: Context, archive: Archive, generation: int, offsets: Mapping[str, Sequence[int]]
) -> ArchiveErasure:
    """Removes events from one generation, by source partition and offset; dead letters too.

    ``failed`` of the result has the tables that could not be corrected.
    """
    report = ArchiveErasure(archive.name, generation)
    if archive.state_of(generation) == "removing":
        finish_removals(context, archive)  # all of it is deleted
        return report
    store = files_at(context, archive)
    own = archive.pipeline(generation)
    if any(offsets.values()):
        _remove_replaced(context, store, archive, generation)
    for pipeline in (own, replay_pipeline(own)):  # a replay moves events from one to the other
        todo: list[RangeToSettle] = []
        for partition in read_partitions(context, pipeline):
            wanted = np.array(sorted(offsets.get(partition, ())), np.int64)
            if len(wanted):
                rewriter = PartitionRewriter(
                    context, store, archive, generation, pipeline, partition
                )
                # Before the rows are read, on purpose.
                if is_under_way(context, pipeline, partition, wanted):
                    report.waiting += 1
                    report.unfinished[pipeline] = finish_remedy(archive, pipeline)
                todo += [RangeToSettle(rewriter, row, wanted) for row in rewriter.rows(wanted)]
        settle_ranges(context, todo, report)
    return report


def finish_rewrites(context: Context, archive: Archive, generation: int) -> ArchiveErasure:
    """Finishes erasures of a generation that crashed half-way, of all events.

    Their topic may be deleted since; then no later erasure would finish these ranges.
    """
    report = ArchiveErasure(archive.name, generation)
    store = files_at(context, archive)
    own, nothing = archive.pipeline(generation), np.array([], np.int64)
    for pipeline in (own, replay_pipeline(own)):
        for partition in read_partitions(context, pipeline):
            rewriter = PartitionRewriter(context, store, archive, generation, pipeline, partition)
            for row in rewriter.rows(nothing):
                rewriter.settle(row, nothing, report)
    return report


def erase_aside(
    context: Context,
    archive: Archive,
    erased: Callable[[], ErasedIds],
    is_wanted: Callable[[Origin], bool],
    report: ArchiveErasure,
) -> None:
    """Removes events from the files of an archive that were set aside after a restore.

    Files of unwanted source partitions, or other incarnations of them, do not change.
    """
    store = files_at(context, archive)
    if next(iter(store.list(layout.aside_folder(archive.root))), None) is not None:
        origins = aside_origins(context, archive)
        aside = AsideFiles(store, archive, lambda key: is_wanted(origins.get(key, UNKNOWN_ORIGIN)))
        files, events = aside.erase(erased())
        report.files += files
        report.events += events


@dataclass(frozen=True)
class RangeToSettle:
    """A commit that may hold events which are to be erased or updated."""

    rewriter: PartitionRewriter
    row: str
    wanted: Offsets


def settle_ranges(context: Context, todo: Sequence[RangeToSettle], report: ArchiveErasure) -> None:
    """Does all steps for ranges, one after the other; tasks work ahead for some at a time."""
    for first in range(0, len(todo), _AHEAD):
        some = todo[first : first + _AHEAD]
        if context.tasks is not None:
            _rewrite_ahead(context.tasks, some)
        for each in some:
            each.rewriter.settle(each.row, each.wanted, report)


def _rewrite_ahead(runner: TaskRunner, todo: Sequence[RangeToSettle]) -> None:
    """Lets tasks stage and replace files. ``settle`` does what they have not done."""
    title, size = f"erase from {len(todo)} ranges of archives", attrgetter("size")
    ranges = (work for n, each in enumerate(todo) if (work := each.rewriter.work_of(n, each)))
    staged: list[RangeRewrite] = []
    for work, holds_some in runner.run(title, holds_here, ranges, size):
        each = todo[work.number]
        staged += filter(None, [each.rewriter.begin(each, work, holds_some)])
    files: list[FileReplace] = []
    for work, entries in runner.run(title, stage_here, staged, size):
        files += todo[work.number].rewriter.record_staged(work, todo[work.number], entries)
    for file, _ in runner.run(title, replace_here, files, size):
        todo[file.number].rewriter.note_replaced(file.after)


class PartitionRewriter:
    """Rewrites the committed ranges of one source partition: erases events, or updates values."""

    values: Values | None = None  # that events get instead of being erased
    has_changed = False  # a file here, or another process was about to change one
    output: set[str] | None = None  # gets files that keep their values

    def __init__(
        self,
        context: Context,
        store: Store,
        archive: Archive,
        generation: int,
        pipeline: str,
        partition: str,
    ) -> None:
        self._context = context
        self._store = store
        self._archive = archive
        self._generation = generation
        self._pipeline = pipeline
        self._partition = partition
        self._where = layout.pipeline_partition(pipeline, partition)
        self._without_events: set[str] = set()  # manifests of ranges in which tasks found nothing
        self._staged: dict[str, dict[str, FileEntry]] = {}  # by tasks, by future manifest
        self._replaced: set[FileEntry] = set()  # by tasks

    @cached_property
    def _ranges(self) -> RangeRewriter:
        written_as = self._archive.format_of(self._generation)
        return RangeRewriter(self._store, written_as, self.values, self.output)

    @cached_property
    def _manifests(self) -> Mapping[tuple[str, str], Sequence[Manifest]]:
        return manifests_by_range(self._context.store, self._pipeline, self._partition)

    def rows(self, wanted: Offsets) -> Iterator[str]:
        """Yields the commits that may hold some of these offsets."""
        for row in list(read_commit_rows(self._context, self._pipeline, self._partition)):
            if row.committed.rewrite or (len(wanted) and _may_hold(row.committed, wanted)):
                yield row.name

    def settle(self, row_name: str, wanted: Offsets, report: ArchiveErasure) -> None:
        """Does all steps for one range, whichever process began them, until it is erased."""
        busy = UnavailableError(
            f"archive `{self._archive.name}`, `{self._partition}`: others keep changing its "
            "ranges: erase again"
        )
        for number in rounds(_ATTEMPTS, busy):
            row = self._row(row_name)
            if row is None:
                return  # the generation was dropped
            committed = self._decode(row)
            self.has_changed |= bool(committed.rewrite)
            try:
                if not committed.rewrite:
                    if not self._holds_some(committed, wanted):
                        return
                    self._intend(row, committed)
                elif committed.rewrite != committed.manifest:
                    self._carry_out(row, committed, wanted, report)
                elif not self._correct_tables(row, committed, report):
                    if not self._holds_some(committed, wanted):
                        return
                    self._intend(row, committed)
            except (ConflictError, UnknownOutcomeError):
                pause(self._context, number)
            except (CorruptError, NotFoundError):
                if self._is_dropped():
                    return  # its files are deleted before its rows
                if not self._has_moved(row) and not self._repair(row, committed, wanted):
                    raise

    def work_of(self, number: int, each: RangeToSettle) -> RangeRewrite | None:
        """Returns a range to search; None if another erasure has begun it, or it is unreadable."""
        with contextlib.suppress(NotFoundError, CorruptError):
            committed = self._committed(each.row)
            if committed is not None and not committed.rewrite:
                ranges = load_manifest(self._context.store, committed.manifest).each_range
                if self.values is not None and any(manifest.as_is for manifest in ranges):
                    return None  # its files are to be noted here
                where = (self._archive.store, self._archive.format_of(self._generation))
                return RangeRewrite.of(number, where, tuple(ranges), each.wanted, self.values)
        return None

    def begin(
        self, each: RangeToSettle, work: RangeRewrite, holds_some: bool
    ) -> RangeRewrite | None:
        """Step 1. Returns the range to stage; None if it holds nothing, or has changed."""
        with contextlib.suppress(ConflictError, UnknownOutcomeError, NotFoundError, CorruptError):
            row = self._row(each.row)
            committed = None if row is None else self._decode(row)
            if row is None or committed is None or committed.rewrite:
                return None
            if load_manifest(self._context.store, committed.manifest).each_range != work.ranges:
                return None
            if not holds_some:
                self._without_events.add(committed.manifest)
                return None
            self._intend(row, committed)
            begun = self._row(each.row)
            if begun is not None and (now := self._decode(begun)).rewrite:
                return replace(work, staging=self._staging(now))
        return None

    def record_staged(
        self, work: RangeRewrite, each: RangeToSettle, entries: dict[str, FileEntry]
    ) -> list[FileReplace]:
        """Step 2, with staged files. Returns the files to replace."""
        with contextlib.suppress(NotFoundError, CorruptError, UnknownOutcomeError):
            committed = self._committed(each.row)
            changed: list[tuple[FileEntry, FileEntry]] = []
            if committed is not None and committed.rewrite not in ("", committed.manifest):
                old = load_manifest(self._context.store, committed.manifest)
                if old.each_range == work.ranges:  # else others have erased more of them since
                    self._staged[committed.rewrite] = entries
                    changed = changed_files(old, self._decide_or_read(committed, old, each.wanted))
                    entries = self._staged.pop(committed.rewrite, {})
            discard_files(self._store, list(entries.values()))
            files = (FileReplace(work.number, work.store, *pair) for pair in changed)
            return [file for file in files if file.after.kind != "dead"]
        return []

    def note_replaced(self, file: FileEntry) -> None:
        """Notes that a task has done step 3 for a file."""
        self._replaced.add(file)

    def _is_dropped(self) -> bool:
        """Returns whether the generation or the archive is deleted by now; finishes that."""
        try:
            found = read_archive(self._context, self._archive.name)
        except NotFoundError:
            return True
        if found.incarnation != self._archive.incarnation or self._generation not in found.formats:
            return True
        if found.state_of(self._generation) != "removing":
            return False
        finish_removals(self._context, found)
        return True

    def _row(self, name: str) -> Row | None:
        """Returns the row of a commit, or the one it was merged into since its name was read."""
        row = self._context.catalog.get(self._where, name)
        if row is not None:
            return row
        _, ordinal, start = name.split("/", 2)
        for each in read_commit_rows(self._context, self._pipeline, self._partition, int(ordinal)):
            if each.holds(start):
                return self._context.catalog.get(self._where, each.name)
        return None

    def _committed(self, name: str) -> Commit | None:
        row = self._row(name)
        return None if row is None else self._decode(row)

    def _holds_some(self, committed: Commit, wanted: Offsets) -> bool:
        if committed.manifest in self._without_events:
            self._without_events.discard(committed.manifest)
            return False
        manifest = load_manifest(self._context.store, committed.manifest)
        return self._ranges.holds_some(manifest.each_range, wanted)

    def _has_moved(self, row: Row) -> bool:
        """Returns whether another erasure has written the row since: then the files differ too."""
        found = self._context.catalog.get(self._where, row.row)
        return found is None or found.version != row.version

    def _repair(self, row: Row, committed: Commit, wanted: Offsets) -> bool:
        """Returns whether files are no longer in the way that a restored catalog does not know.

        Earlier erasures have rewritten them: dead letters that a replay has replaced, which no
        event needs, and files that lack nothing except erased events.
        """
        if _remove_replaced(self._context, self._store, self._archive, self._generation):
            return True
        head, found = self._context.catalog.get(self._where, "head"), None
        with contextlib.suppress(NotFoundError, CorruptError):
            old = load_manifest(self._context.store, committed.manifest)
            found = self._ranges.find_rewrite(old, self._manifests, wanted)
        if found is None or head is None or found == self._begun(committed):
            return False
        key = self._new_manifest()  # a sweep may delete the forgotten one at any time
        self._context.store.put(key, seal_json(found))
        resumed = msgspec.structs.replace(committed, rewrite=key)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            self._write(row, resumed, Check("head", head.version))
        return True

    def _begun(self, committed: Commit) -> Manifest | None:
        """Returns the manifest of the rewrite that a row names; None if it is not decided."""
        with contextlib.suppress(NotFoundError, CorruptError):
            return load_manifest(self._context.store, committed.rewrite or committed.manifest)
        return None

    def _intend(self, row: Row, committed: Commit) -> None:
        """Step 1."""
        self.has_changed = True
        self._write(row, msgspec.structs.replace(committed, rewrite=self._new_manifest()))

    def _new_manifest(self) -> str:
        head = read_progress(self._context, self._pipeline, self._partition)
        epoch = head.epoch if head else 0
        return layout.manifest(self._pipeline, epoch, self._partition, self._context.ids.new())

    def _carry_out(
        self, row: Row, committed: Commit, wanted: Offsets, report: ArchiveErasure
    ) -> None:
        """Steps 2 to 4."""
        old = load_manifest(self._context.store, committed.manifest)
        new = self._decide_or_read(committed, old, wanted)
        changed = changed_files(old, new)
        there = [each for each in changed if self._ranges.is_there(each[1])]
        if self._ranges.has_lost_copies(old, new, there):
            self._intend(row, committed)
            return
        for before, after in changed:
            try:
                self._replace(before, after)
            except NotFoundError:
                if self._ranges.is_there(after):
                    raise
        done = msgspec.structs.replace(committed, manifest=committed.rewrite)
        self._write(row, done, *self._count_row(changed))
        report.ranges += sum(
            one != other for one, other in zip(old.each_range, new.each_range, strict=True)
        )
        report.files += sum(after.kind != "sidecar" for _, after in changed)
        report.events += sum(after.erased - before.erased for before, after in changed)
        report.updated += sum(after.updated - before.updated for before, after in changed)

    def _count_row(self, changed: Sequence[tuple[FileEntry, FileEntry]]) -> list[Put]:
        """In step 4: returns the row that counts what was erased from this source partition."""
        more = {"data": 0, "dead": 0, "updated": 0}
        for before, after in changed:
            if after.kind in more:
                more[after.kind] += after.erased - before.erased
                more["updated"] += after.updated - before.updated
        if not any(more.values()):
            return []
        row = self._context.catalog.get(self._where, layout.ERASED)
        known = read_erased_row(row)
        total = ErasedEvents(
            known.data + more["data"], known.dead + more["dead"], known.updated + more["updated"]
        )
        return [Put(layout.ERASED, encode_row(total), row.version if row else ABSENT)]

    def _decide_or_read(self, committed: Commit, old: Manifest, wanted: Offsets) -> Manifest:
        with contextlib.suppress(NotFoundError):
            return load_manifest(self._context.store, committed.rewrite)
        try:
            return self._decide(committed, old, wanted)
        except CorruptError:  # another erasure may have decided, and may be replacing files
            with contextlib.suppress(NotFoundError):
                return load_manifest(self._context.store, committed.rewrite)
            raise

    def _decide(self, committed: Commit, old: Manifest, wanted: Offsets) -> Manifest:
        """Step 2. Returns the manifest that counts: ours, or that of a faster process."""
        staged = self._staged.pop(committed.rewrite, None)
        if staged is None:
            staged = self._ranges.stage(old.each_range, wanted, self._staging(committed))
        ranges = tuple(self._manifest_after(each, staged, wanted) for each in old.each_range)
        new = msgspec.structs.replace(old, ranges=ranges) if old.ranges else ranges[0]
        try:
            self._context.store.put(committed.rewrite, seal_json(new))
        except AlreadyExistsError:
            discard_files(self._store, list(staged.values()))
            return load_manifest(self._context.store, committed.rewrite)
        return new

    def _staging(self, committed: Commit) -> str:
        epoch = layout.manifest_epoch(committed.rewrite)
        return layout.staging(self._pipeline, self._partition, epoch, self._context.ids.new())

    def _manifest_after(
        self, old: Manifest, staged: Mapping[str, FileEntry], wanted: Offsets
    ) -> Manifest:
        """Returns the manifest of a range with its staged files; an update has another."""
        return manifest_without(old, staged, wanted)

    def _replace(self, before: FileEntry, after: FileEntry) -> None:
        """Step 3 for one file."""
        if after not in self._replaced:
            replace_file(self._store, before, after)

    def _correct_tables(self, row: Row, committed: Commit, report: ArchiveErasure) -> bool:
        """Steps 5 to 7. Returns whether every table could be corrected."""
        files = files_of(load_manifest(self._context.store, committed.manifest))
        discard_files(self._store, files)
        correct_entries(self._context, self._archive, self._generation, files, report.failed)
        if report.failed:
            return False
        self._write(row, msgspec.structs.replace(committed, rewrite=""))
        return True

    def _write(self, row: Row, committed: Commit, *more: Put | Check) -> None:
        change = Put(row.row, encode_row(committed), expect=row.version)
        self._context.catalog.write(self._where, change, *more, write_id=self._context.ids.new())

    def _decode(self, row: Row) -> Commit:
        return decode_row(row.value, Commit, f"commit `{row.row}`")


def _remove_replaced(context: Context, store: Store, archive: Archive, generation: int) -> bool:
    """Deletes dead letters that a replay has replaced and died before it deleted them."""
    with contextlib.suppress(NotFoundError, CorruptError):  # manifests: found where they are needed
        return bool(remove_replaced(context, store, archive, generation))
    return False


def _may_hold(committed: Commit, wanted: Offsets) -> bool:
    """Returns whether some of the offsets are in a range that has files."""
    return committed.files > 0 and are_some_between(committed.start, committed.end, wanted)
