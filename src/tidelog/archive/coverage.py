"""Compares generations: what one covers of its source, and what another lacks of that.

**Coverage.** A generation covers, of each source partition, everything from its beginning to its
position except its gaps. If positions are offsets, coverage is a set of intervals. If the pipeline
numbers events itself (Kinesis, Scylla), readers of the archive have positions that are borders of
commits. Then another generation covers a commit only if it has both of its borders.

**Missing events.** Positions and gaps say what a generation covers. Within a range, the source may
have had fewer events than offsets: records that Kafka compacted, holes of a backup, events that a
transform of another archive dropped. The other generation may have read them earlier, or from
elsewhere. So the offsets themselves are compared, for ranges that report something missing. A range
that was read or completed from that generation's files has everything they have.

What was erased is left out of the comparison by the audits, which name it. Counts of erased events
would excuse others. A range only counts, and does not list, the offsets that its own transform
dropped. So a range lacks something if more offsets are missing than that, if one of them lies in a
gap that the range lists, or if its source lacked more offsets than the other generation does. Fewer
missing offsets prove nothing. There are two proofs that all of them were dropped
(``DroppedEvents``):

- The other generation has the same range, read it from the same source, and found at least as many
  offsets without an event. What a source has lost stays lost, so it lacks these offsets too.
- The source still has the events, so the range has read them. It must not have more events than the
  range has read: then some came back, as files that were missing.

**Damaged commits.** Files or manifests of a commit may be missing or damaged. A backfill skips such
commits after a person accepts that, one whole commit at a time. What is left of such a commit stays
in the files of its generation.

**Unknown incarnations.** Files of a backup do not name their topic's incarnation: a topic that was
deleted and created again has other events at the same offsets. So some events that both hold are
compared, if a generation is built of a backup, or if the live one was. They are different if none
has the same time, id, key or value: an update or a transform may change some of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tidelog.archive.read import ArchiveFiles, is_changing
from tidelog.catalog.update import read_stable
from tidelog.codec.event_json import plain_rows
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import source_at, store_at
from tidelog.connectors.source import Bounds, RangeReader, Source, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.commits import read_commits_to, read_manifests
from tidelog.coordination.pipeline_rows import (
    counting_files,
    read_partitions,
    read_progress,
)
from tidelog.errors import CorruptError, TidelogError, UnavailableError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import BeginReason, FileEntry, Gap, Manifest, Progress
from tidelog.pipeline.tasks import NO_ERASED_ROWS, ErasedRows
from tidelog.store.base import Store
from tidelog.store.fetch import fetched

__all__ = [
    "SAMPLE_OFFSETS",
    "Coverage",
    "DroppedEvents",
    "LackingEvents",
    "MissingRange",
    "alike_ranges",
    "are_offsets",
    "are_other_events",
    "damaged_spans",
    "held_spans",
    "is_behind",
    "is_by_offset",
    "is_same_sequence",
    "missing_ranges",
    "read_covered",
    "unknown_topics",
    "without",
]

Interval = tuple[int, int]
"""Offsets from the first up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a generation covers of one source partition."""

    begin: str
    end: str
    incarnation: str = ""
    gaps: tuple[Gap, ...] = ()
    borders: tuple[str, ...] = ()  # of its commits, in order, if positions are not offsets
    begins: BeginReason = "earliest"
    note: bytes = b""  # identifies it for a source that tracks

    @property
    def by_offset(self) -> bool:
        """Returns whether its positions are offsets, which can be cut anywhere."""
        return are_offsets(self.begin, self.end, *self.borders)

    def intervals(self) -> list[Interval]:
        """Returns the covered offsets, including gaps that are only some of their offsets."""
        return self._without(gap for gap in self.gaps if not gap.is_partial)

    def claimed(self) -> list[Interval]:
        """Returns the covered offsets, including those that its files lacked.

        Most of these never held an event. ``LackingEvents`` shows if another generation has one.
        """
        return self._without(gap for gap in self.gaps if not gap.is_partial and gap.is_loss)

    def _without(self, gaps: Iterable[Gap]) -> list[Interval]:
        spans = [(int(gap.start), int(gap.end)) for gap in gaps]
        return without([(int(self.begin), int(self.end))], spans)


@dataclass(frozen=True, slots=True)
class MissingRange:
    """A part of a source partition that one generation covers and another does not."""

    partition: str
    start: str
    end: str

    @property
    def text(self) -> str:
        """Returns its name for messages."""
        return f"`{self.partition}` from {self.start} to {self.end}"


def are_offsets(*positions: str) -> bool:
    """Returns whether positions are offsets."""
    return all(each.isascii() and each.isdecimal() for each in positions)


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """Returns intervals minus the ``taken`` ones."""
    left = sorted(each for each in intervals if each[0] < each[1])
    for start, end in taken:
        pieces = [((a, min(b, start)), (max(a, end), b)) for a, b in left]
        left = [each for pair in pieces for each in pair if each[0] < each[1]]
    return left


def is_same_sequence(
    one: Coverage | Bounds | Progress, other: Coverage | Bounds | Progress
) -> bool:
    """Returns whether positions of two source partitions with one name may be compared.

    An unknown incarnation may be any: a backup has none.
    """
    return not one.incarnation or not other.incarnation or one.incarnation == other.incarnation


def held_spans(
    source: Source,
    partition: SourcePartition,
    held: Bounds,
    covered: Coverage,
    *,
    complete: bool = False,
) -> list[Interval]:
    """Returns which covered offsets of a source partition its source still holds.

    Excludes another incarnation, and the source's own gaps. If they must be ``complete``, also
    excludes where a transform upstream of the source has dropped some of them.
    """
    if not is_same_sequence(held, covered) or not are_offsets(held.first, held.end):
        return []
    spans = [(int(held.first), int(held.end))]
    if isinstance(source, ArchiveSource):
        begin, end = int(covered.begin), int(covered.end)
        known = [gap for gap in source.gaps(partition) if not gap.is_partial]
        if complete:
            known += (gap for gap in source.gaps(partition) if gap.reason == "transform")
        gaps = [(int(gap.start), int(gap.end)) for gap in known]
        spans = without(spans, [(max(begin, a), min(end, b)) for a, b in gaps if a < end])
    return spans


def read_covered(context: Context, pipeline: str, partition: str) -> Coverage | None:
    """Returns what a pipeline covers of a source partition; None if it has not begun."""
    head = read_progress(context, pipeline, partition)
    if head is None:
        return None
    begin = head.position if head.begin is None else head.begin.position
    borders: tuple[str, ...] = ()
    if not are_offsets(begin, head.position):
        commits = read_commits_to(context, pipeline, partition, head.position)
        borders = (*(commit.start for commit in commits), head.position)
    begins: BeginReason = "earliest" if head.begin is None else head.begin.reason
    return Coverage(begin, head.position, head.incarnation, head.gaps, borders, begins, head.note)


def unknown_topics(
    context: Context, archive: Archive, bounds: Mapping[SourcePartition, Bounds]
) -> set[SourcePartition]:
    """Returns where a source, or the live generation, may have events of another topic."""
    found: set[SourcePartition] = set()
    for partition, held in bounds.items():
        old = read_covered(context, archive.pipeline(), partition.text)
        if not held.incarnation or (old is not None and not old.incarnation):
            found.add(partition)
    return found


def is_behind(context: Context, archive: Archive, old: int, new: int) -> bool:
    """Returns whether a generation is behind another one's position anywhere."""
    for partition in read_partitions(context, archive.pipeline(old)):
        before = read_progress(context, archive.pipeline(old), partition)
        now = read_progress(context, archive.pipeline(new), partition)
        if before is None or (now is not None and now.position == before.position):
            continue
        if now is None or not are_offsets(now.position, before.position):
            return True
        if int(now.position) < int(before.position):
            return True
    return False


def missing_ranges(context: Context, archive: Archive, old: int, new: int) -> list[MissingRange]:
    """Returns what one generation covers and another does not, by source partition.

    ``lacking`` compares what their files hold within that.
    """
    missing: list[MissingRange] = []
    for partition in read_partitions(context, archive.pipeline(old)):
        before = read_covered(context, archive.pipeline(old), partition)
        if before is not None:
            now = read_covered(context, archive.pipeline(new), partition)
            missing += _lacks(partition, before, now)
    return missing


def _lacks(partition: str, old: Coverage, new: Coverage | None) -> list[MissingRange]:
    """Returns the ranges of one source partition that the new generation lacks."""
    if new is not None and not is_same_sequence(old, new):
        new = None  # another topic or file with this name
    if not old.by_offset:
        return _lacks_borders(partition, old.borders, () if new is None else new.borders)
    have = new.claimed() if new is not None and new.by_offset else []
    left = without(old.intervals(), have)
    return [MissingRange(partition, str(start), str(end)) for start, end in left]


def _lacks_borders(partition: str, old: Sequence[str], new: Sequence[str]) -> list[MissingRange]:
    known = set(new)
    left: list[MissingRange] = []
    if len(old) == 1 and old[0] not in known:  # nothing is committed, but a reader may begin there
        left.append(MissingRange(partition, old[0], old[0]))
    for start, end in pairwise(old):
        if start in known and end in known:
            continue
        if left and left[-1].end == start:
            left[-1] = MissingRange(partition, left[-1].start, end)
        else:
            left.append(MissingRange(partition, start, end))
    return left


_KINDS = ("data", "dead")  # of files with events

Offsets = npt.NDArray[np.int64]


class LackingEvents:
    """Compares one generation with another; remembers ranges that need no second comparison."""

    def __init__(
        self,
        context: Context,
        archive: Archive,
        old: int,
        new: int,
        erased: Callable[[str], ErasedRows],
    ) -> None:
        self._context = context
        self._archive = archive
        self._old = old
        self._new = new
        self._erased = erased  # what no range may hold, of a source partition, by now
        self._compared: set[tuple[str, str, str]] = set()  # ranges without a fault, and both ends

    def find(self) -> list[MissingRange]:
        """Returns where the old generation holds events that the new one lacks."""
        context, archive = self._context, self._archive
        found: list[MissingRange] = []
        for partition in read_partitions(context, archive.pipeline(self._old)):
            before = read_covered(context, archive.pipeline(self._old), partition)
            now = read_covered(context, archive.pipeline(self._new), partition)
            if before is None or now is None or not (before.by_offset and now.by_offset):
                continue
            if is_same_sequence(before, now):
                found += self._partition(partition, before)
        return found

    def _partition(self, partition: str, old: Coverage) -> Iterator[MissingRange]:
        doubtful = self._doubtful(partition, old)
        if not doubtful:
            return
        spans = [span for _, span in doubtful]
        before = self._offsets(self._old, partition, spans)
        now = self._offsets(self._new, partition, spans)
        wanted = before
        if len(np.setdiff1d(before, now)):  # an erasure may not have reached the old one yet
            wanted = self._offsets(self._old, partition, spans, self._erased(partition))
        dropped = DroppedEvents(self._context, self._archive, self._old, self._new, partition)
        for manifest, (start, end) in doubtful:
            lacking = np.setdiff1d(_within(wanted, start, end), _within(now, start, end))
            lacking = np.setdiff1d(lacking, np.array(manifest.erased, np.int64))
            held = len(_within(before, start, end))
            if len(lacking) and (
                len(lacking) > manifest.dropped
                or _unread(manifest) > _span(manifest) - held
                or any(len(_within(lacking, *gap)) for gap in _listed_gaps(manifest))
                or not dropped.are_all_of(manifest, lacking)
            ):
                yield MissingRange(partition, str(lacking[0]), str(lacking[-1] + 1))
            elif int(manifest.end) <= int(old.end):
                self._compared.add((partition, manifest.start, manifest.end))

    def _doubtful(self, partition: str, old: Coverage) -> list[tuple[Manifest, Interval]]:
        """Returns ranges of the new generation that report something missing from the old one."""
        pipeline, found = self._archive.pipeline(self._new), []
        for manifest in read_manifests(self._context, pipeline, partition):
            if self._old in (manifest.filled, manifest.completed):
                continue
            start = max(int(manifest.start), int(old.begin))
            end = min(int(manifest.end), int(old.end))
            is_known = (partition, manifest.start, manifest.end) in self._compared
            lacks = _unread(manifest)
            if start < end and lacks and not is_known:
                found.append((manifest, (start, end)))
        return found

    def _offsets(
        self,
        generation: int,
        partition: str,
        spans: list[Interval],
        erased: ErasedRows = NO_ERASED_ROWS,
    ) -> Offsets:
        """Returns the offsets in the files of a generation, in order, around the given spans.

        Leaves out erased events, if given.
        """
        archive = self._archive
        files = ArchiveFiles(store_at(self._context, archive.store), archive.format_of(generation))
        pipeline = archive.pipeline(generation)

        def read() -> Offsets | None:
            found = [np.empty(0, np.int64)]
            for manifest, file in counting_files(self._context, pipeline, partition):
                if file.kind not in _KINDS or not _is_in(file, spans):
                    continue
                try:
                    for batch in files.batches(manifest, file):
                        is_event = files.restorable or file.kind == "dead"
                        rows = erased.remaining(batch) if is_event else batch
                        found.append(files.offsets(rows, file).to_numpy().astype(np.int64))
                except CorruptError:
                    if not is_changing(self._context, archive, generation, partition, file):
                        raise
                    return None
            held = np.sort(np.concatenate(found))
            return held[np.isin(held, erased.offsets, invert=True)]

        busy = UnavailableError(
            f"archive `{archive.name}`: an erasure or a replay changes files of generation "
            f"{generation}: try again when it has ended; `tidelog sweep` finishes one that died"
        )
        return read_stable(self._context, read, busy)


def _unread(manifest: Manifest) -> int:
    """Returns how many offsets of a range its source lacked; the range cannot have them."""
    unknown = (gap for gap in manifest.lost if gap.is_partial or not gap.is_loss)
    return manifest.absent + sum(gap.offsets for gap in unknown)


def _listed_gaps(manifest: Manifest) -> list[Interval]:
    """Returns the offsets that a range says no file had; no erased one is among them."""
    gaps = [gap for gap in manifest.lost if not gap.is_partial and not gap.is_loss]
    return [(int(gap.start), int(gap.end)) for gap in gaps]


def _span(manifest: Manifest) -> int:
    return int(manifest.end) - int(manifest.start)


def _is_in(file: FileEntry, spans: list[Interval]) -> bool:
    return any(file.first_offset < end and file.last_offset >= start for start, end in spans)


def _within(offsets: Offsets, start: int, end: int) -> Offsets:
    low, high = np.searchsorted(offsets, (start, end))
    return offsets[low:high]


def is_by_offset(context: Context, archive: Archive) -> bool:
    """Returns whether another generation can skip a damaged commit of the live one.

    It cannot if the pipeline numbers events itself: later events would get other numbers.
    """
    pipeline = archive.pipeline()
    found = (read_covered(context, pipeline, each) for each in read_partitions(context, pipeline))
    return all(covered is None or covered.by_offset for covered in found)


def damaged_spans(
    context: Context,
    archive: Archive,
    source: ArchiveSource,
    partition: SourcePartition,
    old: Coverage,
) -> tuple[Interval, ...]:
    """Returns the offsets of the live generation's commits that cannot be read.

    Merges neighbors. Reads every file once and compares its checksum. Raises ``CorruptError`` while
    an erasure rewrites a file.
    """
    store = store_at(context, archive.store)
    spans: list[Interval] = []
    for commit in read_commits_to(context, archive.pipeline(), partition.text, old.end):
        start, end = int(commit.start), int(commit.end)
        if start == end or _is_whole(
            source, store, SourceRange(partition, commit.start, commit.end)
        ):
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)


def _is_whole(source: ArchiveSource, store: Store, range: SourceRange) -> bool:
    """Returns whether everything a commit names is there and matches its manifest."""
    before = None
    while True:
        try:
            plan = source.reader(range)
        except CorruptError:
            return False  # its manifest, after a second read
        files = [each for commit in plan.commits for each in commit.files]
        entries = [entry for each in files for entry in (each.data, each.sidecar) if entry]
        try:
            for entry in entries:
                with fetched(store, entry):
                    pass
        except CorruptError:
            if plan.is_changing:
                raise
            if plan == before:
                return False
            before = plan  # an erasure may have replaced its files in between
        else:
            return True


SAMPLE_OFFSETS = 1_000  # of a source partition to compare

_FIELDS = ("timestamp", "id", "key", "value")


def are_other_events(one: RangeReader, other: RangeReader) -> bool:
    """Returns whether two readers of a range have different events at the same offsets.

    Returns False if no offset is in both.
    """
    here, there = _events(one), _events(other)
    both = here.keys() & there.keys()
    return bool(both) and not any(_is_alike(here[each], there[each]) for each in both)


def _is_alike(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return any(a == b for a, b in zip(one, other, strict=True) if a is not None)


def _events(reader: RangeReader) -> dict[int, tuple[object, ...]]:
    """Returns the compared fields, by offset."""
    found: dict[int, tuple[object, ...]] = {}
    for chunk in reader.read():
        for row in plain_rows(chunk.batch.select(["offset", *_FIELDS]), lambda time, _: time):
            found[row["offset"]] = tuple(row[name] for name in _FIELDS)
    return found


class DroppedEvents:
    """Shows of one source partition which ranges of a generation lack only dropped events."""

    def __init__(
        self, context: Context, archive: Archive, old: int, new: int, partition: str
    ) -> None:
        self._context = context
        self._archive = archive
        self._old = old
        self._new = new
        self._partition = partition

    def are_all_of(self, manifest: Manifest, lacking: Offsets) -> bool:
        """Returns whether the transform of a range has dropped all of these events."""
        if (manifest.start, manifest.end) in self._alike:
            return True
        return all(self._has(url, manifest, lacking) for url in self._sources(self._new))

    @cached_property
    def _alike(self) -> set[tuple[str, str]]:
        read_from = [self._sources(each) for each in (self._old, self._new)]
        if read_from[0] != read_from[1] or len(read_from[0]) > 1:
            return set()  # another source may have lost as many other events
        pipelines = [self._archive.pipeline(each) for each in (self._old, self._new)]
        old, new = (read_manifests(self._context, each, self._partition) for each in pipelines)
        return alike_ranges(old, new)

    def _sources(self, generation: int) -> list[str]:
        """Returns what ranges of a generation may have been read from."""
        archive = self._archive
        given = archive.format_of(generation).source
        where = layout.pipeline_partition(archive.pipeline(generation), self._partition)
        was_live = self._context.catalog.get(where, layout.BEFORE) is not None
        is_live = was_live or generation == archive.generation
        return [given] if given and not is_live else sorted({given, archive.source} - {""})

    def _has(self, url: str, manifest: Manifest, offsets: Offsets) -> bool:
        """Returns whether a source has an event at each of these offsets, and had it before."""
        partition = SourcePartition.named(self._partition)
        found = [np.empty(0, np.int64)]
        try:
            span = SourceRange(
                partition, manifest.start, manifest.end, incarnation=manifest.incarnation
            )
            chunks = source_at(self._context, url).read(span)
            found += [each.batch.column("offset").to_numpy().astype(np.int64) for each in chunks]
        except TidelogError:
            return False  # what cannot be read now proves nothing
        there = np.unique(np.concatenate(found))
        return len(there) <= manifest.read and bool(np.isin(offsets, there).all())


def alike_ranges(old: Iterable[Manifest], new: Iterable[Manifest]) -> set[tuple[str, str]]:
    """Returns ranges of both where the new one found no more offsets without events.

    Several ranges were read at different times. So between their outer borders, as many other
    offsets may be missing. Leaves out ranges from files of another generation, and those with gaps
    that are only some of their offsets, as another transform or folder may have as many elsewhere.
    """
    before = {(each.start, each.end): each.absent for each in old if _is_counted(each)}
    return {
        (each.start, each.end)
        for each in new
        if _is_counted(each) and each.absent <= before.get((each.start, each.end), -1)
    }


def _is_counted(manifest: Manifest) -> bool:
    """Returns whether a range counts all offsets that its source lacked as never there."""
    is_partial = any(gap.is_partial or not gap.is_loss for gap in manifest.lost)
    return not (manifest.filled or manifest.completed or is_partial)
