"""The checks of an archive's verification, and its report.

They check rows, manifests, the source, and the files of a range.

Each check yields the problems it finds: what is wrong, where, and what to do about it. Only
:func:`check_range` reads files, and it needs only their store: tasks run it ahead. It reports what
healthy files hold. A range with any problem is checked again by the caller, who knows the rows that
may explain it.

A source, or a partition of it, that cannot be reached is a problem: then nothing is proven. A
partition that the source no longer lists is a note: its retention or a person deleted it.

A range may have at most as many events as offsets outside its gaps; exactly as many if the source
has an event at each offset. A range from files of another generation was not read from the source,
and a partition that has ended, as a person accepted, is another one there. Neither is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tidelog.archive.read import ArchiveFiles
from tidelog.catalog.base import Row
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.archive.staging import is_published
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import Bounds, SkippingSource, SourcePartition, bounds_apart
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import ReplayedRange, read_progress
from tidelog.errors import CorruptError, TidelogError, unexpected
from tidelog.model.archive import Account, Archive, ArchiveFormat, DateFolder
from tidelog.model.pipeline import (
    Commit,
    FileCounts,
    FileEntry,
    Manifest,
    Progress,
    offsets_between,
)
from tidelog.model.topic import decode_row
from tidelog.pipeline.date_folders import FolderFiles
from tidelog.pipeline.gaps import late_spans, source_is_behind
from tidelog.pipeline.source_partitions import track
from tidelog.store import shared_store
from tidelog.store.base import Store, object_exists

__all__ = [
    "ArchiveVerifyOptions",
    "ArchiveVerifyReport",
    "Offsets",
    "Problem",
    "RangeFiles",
    "RangeFound",
    "RangeKey",
    "SourceCheck",
    "check_commits",
    "check_decided",
    "check_manifest",
    "check_range",
    "check_replay",
    "doubles_of",
    "erased_left",
    "folder_problems",
    "in_order",
    "read_offsets",
    "runs_of",
]


_PROBLEMS_MAX = 1_000  # kept of each list; all are counted
_KEEP = "keep everything as it is, and report it: no crash leaves this"
_MOVE = "move it out of the archive's folder, and keep it: the next driver publishes the range"
_STAGED = "restore it from a copy of the store: no driver can finish its range without it"
_MANIFEST = "restore the manifest from a copy of the store; if there is none, backfill the archive"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, or that a person may want to know."""

    kind: str  # a stable word
    where: str  # a source partition or a file
    what: str
    do: str


@dataclass
class ArchiveVerifyOptions:
    """What to check besides rows, manifests and the list of files."""

    generation: int | None = None
    source: bool = False  # ask it how many events there were
    deep: bool = False  # read every file
    progress: Callable[[int], None] = lambda _: None  # called with the size of each finished file


@dataclass
class ArchiveVerifyReport:
    """What was checked, and what was found."""

    archive: str
    generation: int
    partitions: int = 0
    ranges: int = 0
    files: int = 0  # that are there: of data, of dead letters, and sidecars
    data_files: int = 0
    dead_files: int = 0
    bytes: int = 0
    events: int = 0  # read from the source
    written: int = 0
    dead: int = 0  # now
    dropped: int = 0
    lost: int = 0  # gaps
    accounts: list[Account] = field(default_factory=list)  # recounted, by source partition
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)  # the first ones
    notes: list[Problem] = field(default_factory=list)
    others: list[int] = field(default_factory=list)  # generations that were checked too

    @property
    def is_clean(self) -> bool:
        """Returns whether no problem was found."""
        return not self.problem_count

    def count(self, files: Sequence[FileEntry]) -> None:
        """Counts files by kind, and their bytes."""
        data, dead, *_ = FileCounts.of(files)
        self.files, self.bytes = self.files + len(files), self.bytes + sum(f.size for f in files)
        self.data_files, self.dead_files = self.data_files + data, self.dead_files + dead

    @property
    def file_counts(self) -> FileCounts:
        """Returns the files that are there, by kind, for people."""
        data, dead = self.data_files, self.dead_files
        return FileCounts(data, dead, sidecars=self.files - data - dead)

    def add(self, *problems: Problem) -> None:
        """Counts problems, and keeps the first ones."""
        self.problem_count += len(problems)
        self.problems += problems[: max(0, _PROBLEMS_MAX - len(self.problems))]

    def include(self, other: ArchiveVerifyReport) -> None:
        """Adds what was found in another generation, but not its counts."""
        self.others.append(other.generation)
        prefix = f"generation {other.generation}: "
        self.problem_count += other.problem_count - len(other.problems)
        self.add(*(replace(each, where=prefix + each.where) for each in other.problems))
        for each in other.notes:
            self.note(each.kind, prefix + each.where, each.what, each.do)

    def note(self, kind: str, where: str, what: str, do: str) -> None:
        """Adds what is worth knowing and not a problem."""
        if len(self.notes) < _PROBLEMS_MAX:
            self.notes.append(Problem(kind, where, what, do))


def check_commits(
    partition: str, head: Progress | None, commits: Sequence[Commit]
) -> Iterator[Problem]:
    """Checks that each range begins where the last one ended, and that the head agrees.

    The head was read before the commits, so there may be more of them by now.
    """
    for one, other in pairwise(commits):
        if one.end != other.start:
            what = f"a range ends at {one.end}, and the next one begins at {other.start}"
            yield Problem("rows", partition, what, _KEEP)
    if not commits:
        if head is not None and head.ordinal:
            what = f"its head counts {head.ordinal} events, and there is no commit"
            yield Problem("rows", partition, what, _KEEP)
        return
    if head is None:
        yield Problem("rows", partition, f"has {len(commits)} commits, and no head", _KEEP)
        return
    events = files = dead = 0
    if head.position == commits[0].start and not head.ordinal:
        return
    for count, commit in enumerate(commits, 1):
        events, files, dead = events + commit.events, files + commit.files, dead + commit.dead
        if commit.end == head.position and head.ordinal == events:
            known = (head.totals.commits, head.totals.files, head.totals.dead)
            if known != (count, files, dead):
                what = (
                    f"its head counts {known[0]} commits, {known[1]} files and {known[2]} dead "
                    f"letters, its rows {count}, {files} and {dead}"
                )
                yield Problem("rows", partition, what, _KEEP)
            return
    what = (
        f"its head is at {head.position} after {head.ordinal} events, its last commit ends at "
        f"{commits[-1].end} after {events}"
    )
    yield Problem("rows", partition, what, _KEEP)


def check_decided(
    store: Store, files: Iterable[FileEntry], is_under_way: Callable[[], bool]
) -> Iterator[Problem]:
    """Checks that each file of a decided range is published, or can be.

    ``is_under_way`` reads whether the range is still under way: one that is committed needs nothing
    that it staged, and its files may have changed since.
    """
    for file in files:
        is_staged = object_exists(store, file.staged)
        if is_published(store, file) or not is_under_way():
            continue
        if object_exists(store, file.target) and not is_published(store, file):  # not just now
            what = f"has not the {file.size} bytes that its range has decided"
            yield Problem("decided", file.target, what, _MOVE)
        if not is_staged:
            yield Problem("missing", file.staged, f"is staged for `{file.target}`", _STAGED)


def check_manifest(
    committed: Commit, manifest: Manifest, ordinal: int, stretch: ReplayedRange | None = None
) -> Iterator[Problem]:
    """Checks that a manifest matches its row, its numbers add up, and its files are in range.

    ``stretch`` is given for a replay: the offsets that it covers.
    """
    where = f"{manifest.partition}, {committed.start} to {committed.end}"
    row = (committed.start, committed.end, committed.events, committed.files, committed.dead)
    said = (manifest.start, manifest.end, manifest.read, len(manifest.files), manifest.dead)
    if row != said or manifest.ordinal != ordinal:
        what = (
            f"its row says (start, end, events, files, dead) {row} from event {ordinal} on, "
            f"manifest `{committed.manifest}` {said} from event {manifest.ordinal} on"
        )
        yield Problem("manifest", where, what, _MANIFEST)
    span = offsets_between(manifest.start, manifest.end)
    skipped = sum(gap.offsets for gap in manifest.lost)
    if stretch is None and span is not None:
        without = manifest.deleted + manifest.absent + skipped
        if span != manifest.read + without:
            what = (
                f"{span} offsets, but {manifest.read} events were read, {manifest.deleted} were "
                f"deleted before, {manifest.absent} were never there, {skipped} are in gaps"
            )
            yield Problem("account", where, what, _KEEP)
    parts = (manifest.written, manifest.dead, manifest.dropped, manifest.left_out)
    if manifest.read != sum(parts) or min(parts) < 0:
        what = (
            f"{manifest.read} events were read, but {parts[0]} written, {parts[1]} dead, "
            f"{parts[2]} dropped and {parts[3]} left out as erased"
        )
        yield Problem("counts", where, what, _KEEP)
    for kind, expected in (("data", manifest.written), ("dead", manifest.dead)):
        found = sum(file.events + file.erased for file in manifest.files if file.kind == kind)
        if found != expected:
            what = f"its {kind} files hold {found} events, {expected} were counted"
            yield Problem("counts", where, what, _KEEP)
    for file in manifest.files:
        yield from _check_entry(file)
    yield from _check_range(manifest, where, stretch)
    yield from _check_overlaps(manifest, where)


def check_replay(
    manifest: Manifest, stretch: ReplayedRange, dead: Sequence[FileEntry]
) -> tuple[list[FileEntry], list[Problem]]:
    """Checks that a replay read exactly the dead letters it replaces. Returns those that count.

    Events may have been erased from these before or after it read them.
    """
    replaced = [file for file in dead if stretch.holds(file)]
    events = sum(file.events for file in replaced)
    erased = sum(file.erased for file in replaced)
    problems = []
    if not events <= manifest.read <= events + erased:
        where = f"{manifest.partition}, replay {manifest.start} to {manifest.end}"
        what = (
            f"it read {manifest.read} dead letters, the files that it replaces held "
            f"{events + erased}, of which {erased} were erased"
        )
        problems.append(Problem("counts", where, what, _KEEP))
    left = [file for file in dead if not stretch.holds(file)]
    return [*left, *(file for file in manifest.files if file.kind == "dead")], problems


def _check_entry(file: FileEntry) -> Iterator[Problem]:
    if file.kind not in ("data", "dead"):
        return
    span = file.last_offset - file.first_offset + 1
    if not 1 <= file.events + file.erased <= span:
        what = (
            f"has {file.events} events between offsets {file.first_offset} and {file.last_offset}"
        )
        yield Problem("counts", file.target, what, _KEEP)
    if f"_{file.first_offset:020}" not in file.target.rpartition("/")[2]:
        what = f"its name does not show its first offset {file.first_offset}"
        yield Problem("name", file.target, what, _KEEP)


def _check_range(
    manifest: Manifest, where: str, stretch: ReplayedRange | None
) -> Iterator[Problem]:
    """Checks that offsets are between the positions or, without offsets, within the count.

    A chain keeps the numbers of the archive before it. These may be ahead of its own count by what
    that archive no longer has.
    """
    files = [file for file in manifest.files if file.kind in ("data", "dead")]
    allowed = [(manifest.ordinal, manifest.ordinal + manifest.read)]
    if stretch is not None:
        allowed = [(stretch.start, stretch.end)]
    elif offsets_between(manifest.start, manifest.end) is not None:
        allowed.append((int(manifest.start), int(manifest.end)))
    elif files:
        skipped = sum(gap.offsets for gap in manifest.lost)
        first = max(manifest.ordinal, min(file.first_offset for file in files))
        numbers = manifest.read + manifest.deleted + manifest.absent + skipped
        allowed.append((first, first + numbers))
    if not any(
        all(start <= f.first_offset and f.last_offset < end for f in files)
        for start, end in allowed
    ):
        first = min(file.first_offset for file in files)
        last = max(file.last_offset for file in files)
        what = f"its files hold offsets {first} to {last}, which are not in its range"
        yield Problem("range", where, what, _KEEP)


def _check_overlaps(manifest: Manifest, where: str) -> Iterator[Problem]:
    """Checks that files of a folder do not overlap; other folders and dead letters may.

    So may copies that a redo made, and what it wrote beside them: a deep check reads their offsets.
    """
    files = manifest.files[manifest.copied :]
    data = [file for file in files if file.kind == "data"]
    placed = sorted((file.target.rpartition("/")[0], file.first_offset, file) for file in data)
    for (folder, _, one), (other_folder, first, other) in pairwise(placed):
        if folder == other_folder and first <= one.last_offset:
            what = f"{one.target} and {other.target} both hold offsets {first} to {one.last_offset}"
            yield Problem("overlap", where, what, _KEEP)


class SourceCheck:
    """Asks a source once for its ends, and then for counts between positions."""

    def __init__(self, context: Context, archive: Archive, number: int) -> None:
        # One that is being built may read another source; from a promote on it reads the archive's.
        self._is_built = archive.state_of(number) == "building"
        given = archive.format_of(number).source if self._is_built else ""
        self._source = source = source_at(context, given or archive.source)
        track(context, archive.pipeline(number), source)
        self._context = context
        self._live = archive.pipeline()
        self._archive = archive.name  # for remedies
        self._read_to: dict[str, str] = {}  # the last end of a range that was read from the source
        self._errors: dict[SourcePartition, TidelogError] = {}
        self._failure: TidelogError | None = None
        found: dict[SourcePartition, Bounds] = {}
        try:
            found = bounds_apart(source, source.partitions(), self._errors)
        except Exception as exc:  # noqa: BLE001 - all else is verified, and this is a problem of it
            self._failure = unexpected("source", exc)
        self._bounds: dict[str, Bounds] = {each.text: held for each, held in found.items()}

    def unasked(self) -> Iterator[Problem]:
        """Yields what could not be reached, so nothing is known about it."""
        do = "make the source answer, then verify again"
        if self._failure is not None:
            yield Problem("source", self._source.url, f"cannot be reached: {self._failure}", do)
        for partition, error in sorted(self._errors.items()):
            yield Problem("source", partition.text, f"cannot be reached: {error}", do)

    def notes(self, partitions: Iterable[str]) -> Iterator[Problem]:
        """Yields what was not compared: deleted partitions, and what the source skips."""
        known = self._bounds.keys() | {each.text for each in self._errors}
        for each in partitions if self._failure is None else ():
            if each not in known:
                what = "the source no longer has it, so it was not compared"
                yield Problem("source", each, what, "nothing, if it was to be deleted there")
        if isinstance(self._source, SkippingSource):
            for each, why in sorted(self._source.left_out().items()):
                yield Problem("source", each, f"is not read: {why}", "nothing, if that is right")

    def count(self, manifest: Manifest) -> Iterator[Problem]:
        """Checks that as many events were read as there are in the range, without its gaps.

        A range from files of another generation read nothing from the source.
        """
        if manifest.filled:
            return
        self._read_to[manifest.partition] = manifest.end
        expected = self._expected(manifest)
        if expected is None:
            return
        too_few = manifest.read < expected and self._is_dense(manifest)
        if manifest.read > expected or too_few:
            where = f"{manifest.partition}, {manifest.start} to {manifest.end}"
            most = "" if too_few else "at most "
            what = f"{manifest.read} events were read, the source has {most}{expected} there"
            do = "keep everything as it is, and report it; then backfill the archive"
            yield Problem("source", where, what, do)

    def _expected(self, manifest: Manifest) -> int | None:
        """Returns the most events a range may have; None if unknown.

        The offsets decide, whatever the source counts now: a source archive counts fewer events
        after it was built again without erased ones.
        """
        offsets = offsets_between(manifest.start, manifest.end)
        if offsets is not None:
            return offsets - sum(gap.offsets for gap in manifest.lost)
        if manifest.lost:
            return None
        if isinstance(self._source, ArchiveSource):
            partition = SourcePartition.named(manifest.partition)
            return self._source.count_in(partition, manifest.start, manifest.end)
        return self._source.count(manifest.start, manifest.end)

    def _is_dense(self, manifest: Manifest) -> bool:
        """Returns whether the source had an event at each of its positions until now."""
        known = self._bounds.get(manifest.partition)
        if known is None or not known.is_dense:
            return False
        if manifest.incarnation != known.incarnation:  # a topic that was created again
            return False
        each = SourcePartition.named(manifest.partition)
        found = bounds_apart(self._source, [each], self._errors)
        return each in found and found[each].is_dense

    def ends(self, partition: str, head: Progress | None) -> Iterator[Problem]:
        """Checks that the source still is what was read, and has everything that was read."""
        held = self._bounds.get(partition)
        live = read_progress(self._context, self._live, partition)
        if held is None or head is None or head.ended or (live is not None and live.ended):
            return  # as a person accepted: it is another one
        if self._is_built:  # the live one's files may go on where a backup ends
            position = self._read_to.get(partition, held.first)
            head = msgspec.structs.replace(head, position=position)
        if self._is_another(held, head):
            # Read before the head: a driver may have committed events that came since.
            each = SourcePartition.named(partition)
            held = bounds_apart(self._source, [each], self._errors).get(each)
        if held is not None and self._is_another(held, head):
            what = f"the source ends at {held.end}, and {head.position} is committed: it is another"
            do = (
                "create a new archive for the present source, then run "
                f"`tidelog archive run {self._archive} --accept-loss`, which records that this one "
                "ends there"
            )
            yield Problem("source", partition, what, do)

    def late(self, partition: str, head: Progress | None) -> Iterator[Problem]:
        """Yields parts of gaps that the source, another archive, has now."""
        held = self._bounds.get(partition)
        if head is None or held is None or not isinstance(self._source, ArchiveSource):
            return
        for start, end in late_spans(head, held):
            what = f"{start} to {end} is a gap, and `{self._source.url}` has its events now"
            do = f"`tidelog archive backfill {self._archive}`, then promote the new generation"
            yield Problem("lost", partition, what, do)

    def waiting(self, partition: str, head: Progress | None) -> Iterator[Problem]:
        """Yields that the source, another archive, must first reach what was read."""
        held = self._bounds.get(partition)
        if head is None or held is None or self._is_built:
            return
        if source_is_behind(head, held, self._source):
            what = f"`{self._source.url}` ends at {held.end}, and {head.position} is committed"
            do = "nothing: reading resumes when that archive has reached this position; run it"
            yield Problem("behind", partition, what, do)

    def _is_another(self, held: Bounds, head: Progress) -> bool:
        """Returns whether these cannot be the bounds of the partition that a head is of."""
        if not head.is_of(held.incarnation):
            return True
        if source_is_behind(head, held, self._source):
            return False
        return self._source.before(held.end, head.position)


def folder_problems(rows: dict[str, Row], files: dict[str, FolderFiles]) -> Iterator[Problem]:
    """Yields the differences between rows of date folders and the files counted in them."""
    counted = {
        row.row: decode_row(row.value, DateFolder, f"row `{row.row}`")
        for row in rows.values()
        if row.row.startswith("folder/")
    }
    for name in sorted({*counted, *files}):
        said, found = counted.get(name), files.get(name)
        known = (said.files, said.events) if said else (0, 0)
        now = (found.files, found.events) if found else (0, 0)
        erased = found.erased if found else 0
        # An erasure before or after the count: the row keeps what was counted.
        if known[0] != now[0] or not now[1] <= known[1] <= now[1] + erased:
            folder = said.folder if said else found.folder if found else name
            what = (
                f"its row says {known[0]} files with {known[1]} events, and manifests name "
                f"{now[0]} with {now[1]}"
            )
            yield Problem("folder", folder, what, _KEEP)


Offsets = npt.NDArray[np.int64]
RangeKey = tuple[tuple[FileEntry, ...], tuple[int, ...]]
"""The files of a range and its erased offsets: what was found of them holds while they are same."""

_NONE: Offsets = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RangeFiles:
    """The files of a range that exist, to check anywhere; pickles."""

    store: str  # URL
    written_as: ArchiveFormat
    manifest: Manifest
    files: tuple[FileEntry, ...]  # without sidecars
    deep: bool  # read them, not only their footers

    @property
    def key(self) -> RangeKey:
        return self.files, self.manifest.erased

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class RangeFound:
    """What healthy files of a range hold."""

    events: tuple[int, ...]  # by file
    runs: Offsets  # first and last of each run of offsets; none unless files were read


def in_order(offsets: Offsets) -> Offsets:
    """Returns offsets in order; most often they are, and a sort would take as long as the read."""
    return np.sort(offsets) if bool((np.diff(offsets) < 0).any()) else offsets


def doubles_of(ordered: Offsets) -> Offsets:
    """Returns the offsets that repeat the one before, of offsets in order."""
    doubles: Offsets = ordered[1:][np.diff(ordered) == 0]
    return doubles


def runs_of(ordered: Offsets) -> Offsets:
    """Returns the first and last of each run of consecutive offsets, of offsets in order."""
    if not len(ordered):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate([[0], breaks + 1])]
    lasts = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    return np.stack([firsts, lasts], axis=1)


def check_range(work: RangeFiles) -> RangeFound | None:
    """Returns what the files of a range hold; None, or an error, if something is wrong."""
    contents = ArchiveFiles(shared_store(work.store), work.written_as)
    if not work.deep:
        counts = tuple(contents.count(work.manifest, file) for file in work.files)
        is_healthy = counts == tuple(file.events for file in work.files)
        return RangeFound(counts, runs_of(_NONE)) if is_healthy else None
    found = [read_offsets(contents, work.manifest, file) for file in work.files]
    known = in_order(np.concatenate([*found, _NONE]))
    if len(doubles_of(known)) or len(erased_left(known, work.manifest)):
        return None
    return RangeFound(tuple(map(len, found)), runs_of(known))


def read_offsets(contents: ArchiveFiles, manifest: Manifest, file: FileEntry) -> Offsets:
    """Returns the offsets in a file. Raises ``CorruptError`` if they are not as its manifest says.

    Reads its sidecar with it. Raises ``NotFoundError`` and ``InvalidError`` too.
    """
    parts: Sequence[Offsets] = [
        contents.offsets(batch, file).to_numpy() for batch in contents.batches(manifest, file)
    ]
    offsets: Offsets = np.concatenate([*parts, _NONE])
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (-1, -1)
    found, expected = (len(offsets), *ends), (file.events, file.first_offset, file.last_offset)
    if file.erased:  # its first or last event may be erased
        expected = (file.events, *ends)
    if found != expected or bool((np.diff(offsets) <= 0).any()):
        raise CorruptError(
            f"holds (events, first and last offset) {found}, its manifest says {expected}"
        )
    return offsets


def erased_left(ordered: Offsets, manifest: Manifest) -> Offsets:
    """Returns the erased offsets of a range that its files still hold, of offsets in order."""
    erased = np.unique(np.array(manifest.erased, np.int64))
    after = np.searchsorted(ordered, erased, "right")
    left: Offsets = erased[after > np.searchsorted(ordered, erased, "left")]
    return left
