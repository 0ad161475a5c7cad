"""Verifies an archive: compares rows, manifests, files and the source.

It changes nothing, and is correct while drivers, replays and promotes run, because of the order of
its reads: first it lists files; then, for each source partition, it reads the ``intent``, the
``head`` and the commits. So files published before the listing are named by an intent or commit
that is read after it. Files committed after the listing are looked up by name. Rows that look wrong
are read a second time.

With a task runner, tasks read the files of all ranges first (:func:`check_range`). What they found
counts for a range whose manifest is the same when its turn comes. Problems are found here only.

A *problem* needs a person. A *note* does not: leftovers of crashes, ranges in progress, accepted
gaps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

import msgspec
import numpy as np

from tidelog.archive.account import Recount, check_before, check_head, read_before
from tidelog.archive.read import ArchiveFiles, is_removed
from tidelog.archive.verify_checks import (
    ArchiveVerifyOptions,
    ArchiveVerifyReport,
    Offsets,
    Problem,
    RangeFiles,
    RangeFound,
    RangeKey,
    SourceCheck,
    check_commits,
    check_decided,
    check_manifest,
    check_range,
    check_replay,
    doubles_of,
    erased_left,
    folder_problems,
    in_order,
    read_offsets,
    runs_of,
)
from tidelog.archive.verify_remedies import damage_remedy, intent_remedy, replay_command
from tidelog.catalog.base import Row
from tidelog.catalog.update import read_if_stable
from tidelog.codec.parsers import FolderSettings
from tidelog.concurrency import Pool
from tidelog.connectors.archive.staging import is_published
from tidelog.connectors.by_url import store_at
from tidelog.context import Context
from tidelog.coordination.commits import Manifests, load_manifest, lost_rewrites, read_commits
from tidelog.coordination.pipeline_rows import (
    ReplayedRange,
    Replays,
    read_intent,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError
from tidelog.model import layout
from tidelog.model.archive import Archive, DateFolder, encode_success
from tidelog.model.pipeline import Commit, FileEntry, Intent, Manifest, Progress
from tidelog.model.topic import decode_row
from tidelog.pipeline.date_folders import DateFolders, FolderCounter
from tidelog.pipeline.forgotten_ranges import forgotten_files
from tidelog.store.base import Store

__all__ = ["verify_archive", "verify_generations"]

_AT_ONCE = 4  # files to read in parallel
_KEEP = "keep everything as it is, and report it"
_MOVE_OUT = "move it out of the folder: readers that list the folder read it as events"
_RESTORE_FIRST = (
    "leave it: a manifest or row that is missing or damaged may name it; restore that from a copy, "
    "then verify again"
)
_NONE: Offsets = np.empty(0, np.int64)


def verify_generations(
    context: Context, archive: Archive, how: ArchiveVerifyOptions
) -> ArchiveVerifyReport:
    """Verifies a generation, or all of them if ``how`` names none; the counts are the live one's.

    Only the live one is compared with the source. One that is deleted meanwhile is left out.
    """
    report = verify_archive(context, archive, how)
    if how.generation is not None:
        return report
    for number in sorted(archive.formats.keys() - {archive.generation}):
        if archive.state_of(number) != "removing":
            try:
                other = replace(how, generation=number, source=False)
                report.include(verify_archive(context, archive, other))
            except NotFoundError:
                if not is_removed(context, archive, number):
                    raise
    return report


def verify_archive(
    context: Context, archive: Archive, how: ArchiveVerifyOptions
) -> ArchiveVerifyReport:
    """Verifies one generation. Raises ``NotFoundError`` if a drop or a delete removes it."""
    look = _VerifyLook(context, archive, how)
    pipeline = archive.pipeline(how.generation)
    known = read_partitions(look.context, pipeline)
    look.read_ahead(pipeline, known)
    for partition in known:
        look.partition(pipeline, partition)
    look.source(known)
    both = (pipeline, replay_pipeline(pipeline))
    look.strays(both)
    look.markers(pipeline)
    look.folders(pipeline)
    for each in both:
        look.staged(each)
    if is_removed(context, archive, look.tally.generation):  # then some of it is not there
        raise NotFoundError(
            f"archive `{archive.name}`: generation {look.tally.generation} was removed meanwhile, "
            "or is being removed: verify the present one"
        )
    return look.tally


@dataclass(frozen=True, slots=True)
class _PartitionRows:
    """The rows of a source partition, in the order in which they must be read."""

    intent: Intent | None
    head: Progress | None
    commits: list[Commit]
    manifests: Manifests

    @classmethod
    def read(cls, context: Context, pipeline: str, partition: str) -> _PartitionRows:
        intent = read_intent(context, pipeline, partition)
        head = read_progress(context, pipeline, partition)
        commits = list(read_commits(context, pipeline, partition))
        return cls(intent, head, commits, Manifests(context, pipeline, partition))


class _VerifyLook:
    """One look at one generation."""

    def __init__(self, context: Context, archive: Archive, how: ArchiveVerifyOptions) -> None:
        number = archive.generation if how.generation is None else how.generation
        written_as = archive.format_of(number)
        self.context = replace(
            context, store=store_at(context, context.store.url)
        )  # bypasses the cache
        self.tally = ArchiveVerifyReport(archive.name, number)
        self._archive = archive
        self._how = how
        self._store: Store = store_at(context, archive.store)
        self._contents = ArchiveFiles(self._store, written_as)
        self._sizes = {
            info.key: info.size
            for folder in (archive.folder(number), archive.dead)
            for info in self._store.list(f"{folder}/")
        }
        self._ahead: dict[RangeKey, RangeFound] = {}  # what tasks have found
        self._recount = Recount("")  # of the current source partition
        self._named: set[str] = set()  # by manifests of commits
        self._coming: set[str] = set()  # by those of intents
        self._unread = 0  # missing or damaged manifests, whose files are unknown
        self._restore = f"restore it from a copy, or {damage_remedy(context, archive, number)}"
        self._source = SourceCheck(context, archive, number) if how.source else None

    def read_ahead(self, pipeline: str, partitions: list[str]) -> None:
        """Lets tasks read the data files of all ranges, if there is a runner."""
        runner, name = self.context.tasks, self._archive.name
        if runner is not None:
            work = self._ranges((pipeline, replay_pipeline(pipeline)), partitions)
            size = attrgetter("size")
            for each, found in runner.run(f"verify archive {name}", check_range, work, size):
                if found is not None:
                    self._ahead[each.key] = found
                    self._how.progress(each.size)

    def _ranges(self, pipelines: tuple[str, ...], partitions: list[str]) -> Iterator[RangeFiles]:
        """Yields the ranges that have data files, all of which are there."""
        written_as = self._archive.format_of(self.tally.generation)
        for pipeline in pipelines:
            for partition in partitions:
                manifests = Manifests(self.context, pipeline, partition)
                for committed in read_commits(self.context, pipeline, partition):
                    with contextlib.suppress(NotFoundError, CorruptError):  # reported later
                        manifest = manifests.of(committed)
                        files = tuple(each for each in manifest.files if each.kind == "data")
                        if files and all(self._sizes.get(f.target) == f.size for f in files):
                            where = self._archive.store
                            yield RangeFiles(where, written_as, manifest, files, self._how.deep)

    def partition(self, pipeline: str, partition: str) -> None:
        """Checks everything of one source partition."""
        self.tally.partitions += 1
        again = self._rows(replay_pipeline(pipeline), partition)  # of dead letters; read first
        rows = self._rows(pipeline, partition)
        recount = self._recount = Recount(partition, problems=self.tally.problem_count)
        dead: list[FileEntry] = []
        for manifest in self._manifests(partition, rows):
            recount.add(manifest)
            dead += [file for file in manifest.files if file.kind == "dead"]
            self.tally.events += manifest.read
            self.tally.dropped += manifest.dropped
            for gap in (each for each in manifest.lost if each.is_loss):
                self.tally.lost += 1
                what = f"{gap.start} to {gap.end} is a gap, by reason: {gap.reason}"
                self.tally.note("lost", partition, what, "nothing: it is on record")
            if self._source is not None:
                self.tally.add(*self._source.count(manifest))
        if self._source is not None:
            self.tally.add(*self._source.ends(partition, rows.head))
            for find in (self._source.late, self._source.waiting):
                for each in find(partition, rows.head):
                    self.tally.note(each.kind, each.where, each.what, each.do)
        made = list(dead)
        for manifest in self._manifests(partition, again, is_replay=True):
            made += [file for file in manifest.files if file.kind == "dead"]
            stretch = ReplayedRange.between(manifest.start, manifest.end)
            recount.add_replay(manifest, dead)
            dead, problems = check_replay(manifest, stretch, dead)
            self.tally.add(*problems)
        self._note_lacking(partition, recount)
        self._check_dead(partition, dead, made)
        recount.add_dead(dead)
        self._check_account(pipeline, recount, rows)

    def _note_lacking(self, partition: str, recount: Recount) -> None:
        """Notes what a transform upstream dropped, and what the folder that was read lacks.

        Notes each once: a topic may have many such offsets.
        """
        if dropped := sum(gap.offsets for gap in recount.gaps if gap.reason == "transform"):
            what = f"{dropped} offsets were dropped by a transform, before its files were read"
            self.tally.note("dropped", partition, what, "nothing: it is on record")
        if lacking := sum(gap.offsets for gap in recount.gaps if gap.reason == "files"):
            what = f"{lacking} offsets are in no file that was read"
            do = (
                "nothing, if no file of the folder was missing: some offsets never hold an event; "
                "else backfill from a complete copy, and promote it"
            )
            self.tally.note("files", partition, what, do)

    def _check_account(self, pipeline: str, recount: Recount, rows: _PartitionRows) -> None:
        """Checks that files, ranges, head and previous generation account for every offset."""
        if rows.head is None and not recount.commits:
            return
        account = recount.account(rows.head)
        self.tally.accounts.append(account)
        self.tally.add(*recount.check_offsets())
        # A missing or damaged file, manifest or row is a problem that explains the sum.
        if recount.problems == self.tally.problem_count:
            self.tally.add(*check_head(rows.head, recount))
            if not account.adds_up:
                self.tally.add(
                    Problem("account", recount.partition, account.problem, self._restore)
                )
        before = read_before(self.context, pipeline, recount.partition)
        for problem in check_before(before, account) if before is not None else ():
            if problem.kind == "account":
                self.tally.add(problem)
            else:
                self.tally.notes.append(problem)

    def source(self, partitions: list[str]) -> None:
        """Notes what of the source could not be compared; call it last."""
        if self._source is not None:
            self.tally.add(*self._source.unasked())
            for each in self._source.notes(partitions):
                self.tally.note(each.kind, each.where, each.what, each.do)

    def strays(self, pipelines: tuple[str, ...]) -> None:
        """Reports files that no manifest names; names that begin with ``_`` are not data."""
        folder = f"{self._archive.folder(self.tally.generation)}/"
        is_unknown = self._unread or any(each.kind == "rows" for each in self.tally.problems)
        unnamed = sorted(self._sizes.keys() - self._named - self._coming)
        forgotten = self._forgotten(pipelines) if unnamed else {}
        for key in unnamed:
            if key in forgotten:
                what = f"the catalog does not know its range, {self._sizes[key]} bytes"
                self.tally.note("forgotten", key, what, f"nothing: {forgotten[key]} sets it aside")
            elif key.startswith(folder):
                parts = key.removeprefix(folder).split("/")
                if not any(part.startswith("_") for part in parts):
                    what = f"no manifest names it, {self._sizes[key]} bytes"
                    do = _RESTORE_FIRST if is_unknown else _MOVE_OUT
                    self.tally.add(Problem("stray", key, what, do))
            elif key.rpartition("/")[2].startswith(f"{self.tally.generation}_"):
                what = f"no manifest names it, {self._sizes[key]} bytes, beside dead letters"
                self.tally.note("stray", key, what, "delete it, if it is of no use to you")

    def _forgotten(self, pipelines: tuple[str, ...]) -> dict[str, str]:
        """Returns files of ranges that a restored catalog lost, and which command sets them aside.

        None of an archive that ended: no driver comes.
        """
        if self._archive.ended is not None:
            return {}
        generation, found = self.tally.generation, {}
        run = "run" if generation == self._archive.generation else "backfill"
        replayed = replay_command(self._archive, generation)
        commands = (f"tidelog archive {run} {self._archive.name}", replayed)
        for pipeline, command in zip(pipelines, commands, strict=True):
            for file in forgotten_files(self.context, pipeline):
                if self._sizes.get(file.target) == file.size:
                    found[file.target] = f"the next `{command}`"
        if generation in self._archive.in_state("kept"):
            found = {key: f"{each} after a rollback to it" for key, each in found.items()}
        return found

    def markers(self, pipeline: str) -> None:
        """Compares the markers of final folders with their rows, which they follow from."""
        where = layout.pipeline_members(pipeline)
        for row in self.context.catalog.scan(where, "folder/", "folder0"):
            if self._marker_problem(row) is None:
                continue
            now = self.context.catalog.get(where, row.row)  # a finalize may be running
            problem = None if now is None else self._marker_problem(now)
            if problem is not None:
                self.tally.add(problem)
        self._check_unknown_markers(where)

    def _check_unknown_markers(self, where: str) -> None:
        """Reports markers without a row in folders without files: no finalize deletes them."""
        root = f"{self._archive.folder(self.tally.generation)}/"
        ends = layout.success("")
        marked = {key for key in self._sizes if key.startswith(root) and key.endswith(ends)}
        files = self._sizes.keys() - marked
        used = {above for key in files for above in accumulate(key.split("/"), "{}/{}".format)}
        left = {key for key in marked if key.removesuffix(ends) not in used}
        rows = self.context.catalog.scan(where, "folder/", "folder0") if left else ()
        known = {decode_row(row.value, DateFolder, f"row `{row.row}`").folder for row in rows}
        for key in sorted(left):
            if key.removeprefix(root).removesuffix(ends) not in known:
                what = "says that its folder is complete, which has no files and no row"
                self.tally.add(Problem("marker", key, what, "delete it"))

    def _marker_problem(self, row: Row) -> Problem | None:
        folder = decode_row(row.value, DateFolder, f"row `{row.row}`")
        if folder.state != "final":
            return None
        key = layout.success(f"{self._archive.folder(self.tally.generation)}/{folder.folder}")
        expected = encode_success(self._archive.name, folder)
        try:
            if self._store.get(key) == expected:
                return None
            what = f"does not say what its row says, {expected.decode()}"
        except NotFoundError:
            what = f"is not there; its row says {expected.decode()}"
        return Problem("marker", key, what, "put an object with these bytes in its place")

    def folders(self, pipeline: str) -> None:
        """Compares the rows of date folders with the files that manifests name in them."""
        if self._unread or any(each.kind == "rows" for each in self.tally.problems):
            return  # that explains any difference
        written_as = self._archive.format_of(self.tally.generation)
        as_live = msgspec.structs.replace(self._archive, generation=self.tally.generation)
        folders = DateFolders(FolderSettings(**written_as.layout))
        counter = FolderCounter(self.context, as_live, folders, 0)

        def read() -> list[Problem] | None:
            rows = self._folder_rows(pipeline)
            problems = list(folder_problems(rows, counter.recount())) if rows else []
            is_stable = not problems or rows == self._folder_rows(pipeline)
            return problems if is_stable else None  # a finalize changed the rows meanwhile

        if (problems := read_if_stable(self.context, read)) is None:
            what = "rows of date folders kept changing"
            self.tally.note("folder", self._archive.name, what, "verify again to compare them")
        self.tally.add(*problems or ())

    def _folder_rows(self, pipeline: str) -> dict[str, Row]:
        where = layout.pipeline_members(pipeline)
        scans = (("folder/", "folder0"), ("counted/", "counted0"))
        return {row.row: row for scan in scans for row in self.context.catalog.scan(where, *scan)}

    def staged(self, pipeline: str) -> None:
        """Reports what attempts have left, or have in progress."""
        found = list(self._store.list(layout.staging_of(pipeline)))
        if found:
            size = sum(info.size for info in found)
            what = f"{len(found)} staged files, {size} bytes: of a range under way, or of a crash"
            do = "nothing: `tidelog sweep` removes what nothing needs"
            self.tally.note("staging", layout.staging_of(pipeline), what, do)

    # Rows and manifests.

    def _rows(self, pipeline: str, partition: str) -> _PartitionRows:
        """Returns rows whose commits are contiguous; reads others again before it reports them."""
        rows = _PartitionRows.read(self.context, pipeline, partition)
        if list(check_commits(partition, rows.head, rows.commits)):
            rows = _PartitionRows.read(self.context, pipeline, partition)
            self.tally.add(*check_commits(partition, rows.head, rows.commits))
        return rows

    def _manifests(
        self, partition: str, rows: _PartitionRows, is_replay: bool = False
    ) -> Iterator[Manifest]:
        """Yields the manifests of all commits, and checks them with their data files."""
        if rows.intent is not None:
            self._note_intent(partition, rows.intent, is_replay)
        ordinal = 0
        for committed in rows.commits:
            stretch = ReplayedRange.between(committed.start, committed.end) if is_replay else None
            manifest = self._manifest(rows.manifests, committed, f"{partition}, {committed.start}")
            self.tally.ranges += 1
            if manifest is not None:
                self.tally.written += manifest.written
                self.tally.add(*check_manifest(committed, manifest, ordinal, stretch))
                self._name(manifest)
                self._check_files(manifest, [f for f in manifest.files if f.kind != "dead"])
                yield manifest
            ordinal += committed.events

    def _manifest(self, manifests: Manifests, committed: Commit, where: str) -> Manifest | None:
        try:
            return manifests.of(committed)
        except (NotFoundError, CorruptError) as exc:
            self._unreadable(committed.manifest, where, exc)
            return None

    def _unreadable(self, key: str, where: str, why: TidelogError) -> None:
        self._unread += 1
        self.tally.add(Problem("manifest", where, f"manifest `{key}`: {why}", self._restore))

    def _name(self, manifest: Manifest) -> None:
        for file in manifest.files:
            if file.target in self._named:
                self.tally.add(Problem("double", file.target, "two manifests name it", _KEEP))
            self._named.add(file.target)

    def _note_intent(self, partition: str, intent: Intent, is_replay: bool) -> None:
        what = f"{intent.start} to {intent.reach} is under way, or its driver died"
        do = intent_remedy(self._archive, self.tally.generation, is_replay)
        self.tally.note("intent", partition, what, do)
        key = intent.manifest
        try:
            files = load_manifest(self.context.store, key).files if key else ()
        except (NotFoundError, CorruptError) as exc:
            self._unreadable(key, partition, exc)
            files = ()
        self._coming |= {file.target for file in files}
        own = self._archive.pipeline(self.tally.generation)
        rows = self.context, replay_pipeline(own) if is_replay else own, partition
        self.tally.add(*check_decided(self._store, files, lambda: read_intent(*rows) == intent))

    # Files.

    def _check_dead(self, partition: str, dead: list[FileEntry], made: list[FileEntry]) -> None:
        """Checks the files that count among all files of dead letters ever made."""
        live = {file.target for file in dead}
        left = [f for f in made if f.target not in live and f.target in self._sizes]
        if left:
            what = f"{len(left)} files of dead letters that a replay has replaced are still there"
            command = replay_command(self._archive, self.tally.generation)
            do = f"the next `{command}` deletes them"
            self.tally.note("replaced", partition, what, do)
        self.tally.dead += sum(file.events for file in dead)
        nothing = Manifest("", partition, "", "", 0, 0, 0)  # dead letters need none
        self._check_files(nothing, dead)

    def _check_files(self, manifest: Manifest, files: list[FileEntry]) -> None:
        there = [f for f in files if self._is_there(manifest, f) and f.kind != "sidecar"]
        known = self._ahead.pop((tuple(there), manifest.erased), None) if there else None
        if known is not None:
            for file, events in zip(there, known.events, strict=True):
                self._recount.found(file.kind, events)
            self._recount.held(known.runs)
        elif there:
            look = self._read if self._how.deep else self._count
            with Pool(_AT_ONCE) as pool:
                found = list(pool.map(lambda file: look(manifest, file), there))
            self.tally.add(*(each for each in found if isinstance(each, Problem)))
            for file, each in zip(there, found, strict=True):
                if not isinstance(each, Problem):
                    self._recount.found(file.kind, each if isinstance(each, int) else len(each))
            held = [each for each in found if not isinstance(each, Problem | int)]
            self._check_offsets(manifest, np.concatenate([*held, _NONE]))
        self.tally.count(files)
        for file in files:
            if known is None or file.kind == "sidecar":
                self._how.progress(file.size)

    def _check_offsets(self, manifest: Manifest, offsets: Offsets) -> None:
        """Checks the offsets in the files of one range: each once, and none that was erased."""
        where = f"{manifest.partition}, {manifest.start} to {manifest.end}"
        known = in_order(offsets)
        twice = doubles_of(known)
        if len(twice):
            what = f"{len(twice)} offsets are in two of its files"
            self.tally.add(Problem("double", where, what, _KEEP))
        left = erased_left(known, manifest)
        if len(left):
            what = f"{len(left)} offsets that were erased are in its files, the first is {left[0]}"
            self.tally.add(Problem("erased", where, what, "erase them again"))
        self._recount.held(runs_of(known))

    def _is_there(self, manifest: Manifest, file: FileEntry) -> bool:
        size = self._sizes.get(file.target)
        if size == file.size:
            return True
        try:
            size = self._store.head(file.target).size  # since the listing it may have changed
            problem = "size", f"has {size} bytes, its manifest says {file.size}"
        except NotFoundError:
            problem = "missing", f"is not there; it held {file.events} events"
        if size == file.size:
            return True
        if not self._is_replaced(manifest, file):
            self.tally.add(self._file_problem(manifest, file, *problem))
        elif file.kind != "sidecar":
            self._recount.found(file.kind, file.events)  # they were there
        return False

    def _count(self, manifest: Manifest, file: FileEntry) -> int | Problem:
        """Returns how many events a file holds, from the file itself."""
        try:
            events = self._contents.count(manifest, file)
        except (CorruptError, NotFoundError, InvalidError) as exc:
            if self._is_replaced(manifest, file):
                return file.events  # they were there when its row was read
            return self._file_problem(manifest, file, "contents", str(exc))
        if events != file.events:
            what = f"holds {events} events, its manifest says {file.events}"
            return Problem("contents", file.target, what, self._restore)
        return events

    def _read(self, manifest: Manifest, file: FileEntry) -> Offsets | int | Problem:
        """Returns the offsets of a file that matches its manifest; reads its sidecar with it."""
        try:
            return read_offsets(self._contents, manifest, file)
        except (CorruptError, NotFoundError, InvalidError) as exc:
            if self._is_replaced(manifest, file):
                return file.events  # they were there when its row was read
            return self._file_problem(manifest, file, "contents", str(exc))

    def _file_problem(self, manifest: Manifest, file: FileEntry, kind: str, what: str) -> Problem:
        """Returns a problem of a file, which may need the manifest of its rewrite too."""
        own, do = self._archive.pipeline(self.tally.generation), self._restore
        for pipeline in (own, replay_pipeline(own)):
            for key in lost_rewrites(self.context, pipeline, manifest.partition, file.target):
                do = f"restore manifest `{key}` too, if a copy has it; {do}"
        return Problem(kind, file.target, what, do)

    def _is_replaced(self, manifest: Manifest, file: FileEntry) -> bool:
        """Returns whether a file has changed as recorded since its rows were read.

        An erasure or an update rewrites files, and a replay replaces dead letters.
        """
        pipeline, partition = self._archive.pipeline(self.tally.generation), manifest.partition
        if file.kind == "dead":
            replays = Replays(self.context, pipeline, partition)
            with contextlib.suppress(NotFoundError, CorruptError):  # manifests: already reported
                if any(f.target == file.target and not counts for f, counts in replays.dead()):
                    return True
        return any(
            other.target == file.target and other != file and is_published(self._store, other)
            for each in (pipeline, replay_pipeline(pipeline))
            for other in self._recorded(each, partition)
        )

    def _recorded(self, pipeline: str, partition: str) -> Iterator[FileEntry]:
        """Yields the files of a source partition as recorded now, and by erasures under way."""
        for committed in read_commits(self.context, pipeline, partition):
            for key in {committed.manifest, committed.rewrite} - {""}:
                with contextlib.suppress(NotFoundError, CorruptError):
                    for each in load_manifest(self.context.store, key).each_range:
                        yield from each.files
