"""The source of a generation that is being built: its own source and the live one's files.

A backfill reads the archive's source, or a backup. What that no longer holds (trimmed, expired, or
its topic was deleted) comes from the live generation's data files and dead letters. So a new
generation begins where the live one began, and has its events.

- Each range is read from one of the two. A range of the live generation ends where the source
  begins to hold events. Its intent is put before any file is read: an erasure that removes an
  event from the live generation at that time waits for the intent.
- Files of a generation with a transform hold its output, so they are copied without another
  transform. What it dropped is lost: a gap with the reason ``transform``.
- If the pipeline numbers events itself (Kinesis, Scylla), everything comes from the live
  generation, commit by commit, with the same numbers. So cursors of readers, which are borders of
  commits, and offsets in records of erasures mean the same in both.
- Source partitions of topics that are not the archive's own are skipped, even if a backup has them.
- A backup is read no further than the live generation is, where the archive's own source
  holds the rest: the backup may lack some of it, and the driver reads it after the promote.
- A folder, or an archive made of one, may be older than updates that were carried into archives:
  where both have an event, the live generation's counts.
- It begins where the live generation begins, or would begin by the archive's start and the ends
  listed at its creation. Earlier events are read only on request (``ArchiveFormat.start``).
- If a person accepted that (``pass_damage``), it skips damaged commits of the live generation whose
  events the source no longer holds: each is a gap.

Files of rows have names of their own in each archive: see ``fill_files``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tidelog.archive.coverage import (
    SAMPLE_OFFSETS,
    Coverage,
    Interval,
    are_offsets,
    are_other_events,
    damaged_spans,
    held_spans,
    is_by_offset,
    is_same_sequence,
    read_covered,
    unknown_topics,
    without,
)
from tidelog.archive.derived_archives import LiveOutputs, refuse_output
from tidelog.archive.read import ArchiveFiles
from tidelog.connectors.archive.reader import CarriedRange, CarriedReader, CompletedReader
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import source_at, store_at
from tidelog.connectors.source import (
    Bounds,
    BranchingSource,
    Chunk,
    CompletingSource,
    DividingSource,
    ExplainingSource,
    KnowsEnds,
    MissingOffsets,
    ProbingSource,
    RangeReader,
    ResumingSource,
    Source,
    SourcePartition,
    SourceRange,
    SparseSource,
    TimedSource,
    VanishedError,
    VanishingSource,
    bounds_apart,
    check_wrapping,
    even_cuts,
    missing_in,
)
from tidelog.connectors.topic.source import TopicSource
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_listed, read_partitions
from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.archive import Archive
from tidelog.model.pipeline import ListedPartition
from tidelog.pipeline.gaps import without_remade
from tidelog.pipeline.ranges import check_plan

__all__ = [
    "FillSource",
    "is_own_damage",
]


@dataclass(frozen=True, slots=True)
class _FillPartition:
    """What is known about one source partition."""

    old: Coverage | None  # by the live generation
    bounds: Bounds
    spans: tuple[Interval, ...] = ()  # offsets that the source holds
    note: bytes = b""  # identifies it for a source that tracks, after a range of the generation
    damaged: tuple[Interval, ...] = ()  # by the live generation, with an accepted loss

    def end_of_span(self, position: int) -> int | None:
        """Returns where the source's events from an offset end; None if it does not hold it."""
        return next((end for start, end in self.spans if start <= position < end), None)

    def next_span(self, position: int) -> int | None:
        """Returns where the source next holds events after an offset."""
        return next((start for start, _ in self.spans if start > position), None)

    def end_of_damage(self, position: int) -> int | None:
        """Returns where to resume after a damaged commit; None if it is not damaged."""
        ends = [end for start, end in self.damaged if start <= position < end]
        if not ends or self.end_of_span(position) is not None:
            return None
        following = self.next_span(position)
        return min([*ends, *([] if following is None else [following])])

    def until_damage(self, position: int, end: int) -> tuple[int, bool]:
        """Returns up to where all commits from an offset are damaged, or none; and which."""
        inside = [last for first, last in self.damaged if first <= position < last]
        borders = [end, *inside, *([] if (at := self.next_damage(position)) is None else [at])]
        return min(borders), bool(inside)

    def next_damage(self, position: int) -> int | None:
        """Returns where the next damaged commit after an offset begins."""
        return next((start for start, _ in self.damaged if start > position), None)


class FillSource:
    """The source of a generation that is being built."""

    def __init__(
        self,
        context: Context,
        archive: Archive,
        generation: int,
        source: Source,
        *,
        follows: bool = False,
    ) -> None:
        # A source whose events the pipeline numbers is never read: the live generation has all of
        # it, and its driver reports what vanishes.
        answered = (
            BranchingSource,
            ProbingSource,
            CompletingSource,
            TimedSource,
            SparseSource,
            KnowsEnds,
            ResumingSource,
            VanishingSource,
        )
        check_wrapping(self, source, answered)
        self._context = context
        self._archive = archive
        self._pipeline = archive.pipeline(generation)
        self._written_as = archive.format_of(generation)
        self._given = self._written_as.source
        self._source = source
        self._follows = follows  # never ahead of the live generation
        self._errors: dict[SourcePartition, TidelogError] = {}  # of the source
        old = source_at(context, f"archive:{archive.name}?generation={archive.generation}")
        if not isinstance(old, ArchiveSource):  # pragma: no cover - its address says so
            raise InvalidError(f"source `{old.url}`: is not an archive")
        self._old = old
        self._known: dict[SourcePartition, _FillPartition] = {}
        self._filled: dict[SourcePartition, str] = {}  # starts of ranges read from the generation
        self._completed: dict[SourcePartition, str] = {}  # the same, read from both
        self._unknown: set[SourcePartition] = set()  # whether events are the same; not compared yet
        self._copies: set[SourcePartition] = set()  # of a source that no update reaches
        self._is_from_first = self._written_as.start == "earliest"
        self._passes_damage = False
        self._damaged: dict[SourcePartition, tuple[Interval, ...]] = {}
        self._outputs = LiveOutputs(context, archive)

    def pass_damage(self) -> None:
        """Skips commits of the live generation that cannot be read, as a person accepted."""
        self._passes_damage = True

    @property
    def url(self) -> str:
        return self._source.url

    def partitions(self) -> list[SourcePartition]:
        """Lists the archive's own partitions of the source, and those of the live generation."""
        held, began = self._held(), self._live_partitions()
        return began if self._follows else sorted({*held, *self._errors, *began})

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        held = self._held()
        self._known = {each: self._look(each, held.get(each)) for each in partitions}
        return {each: known.bounds for each, known in self._known.items()}

    def has(self, partition: SourcePartition, offset: str) -> bool:
        """Returns whether the source holds what the live generation has from an offset on."""
        with contextlib.suppress(NotFoundError):
            return self._known_of(partition).end_of_span(int(offset)) is not None
        return False

    def look_again(self) -> None:
        self._known = {}  # of source and live generation, until the next range

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> RangeReader:
        """Returns a reader of the one that has the start, up to where the other one begins."""
        self._filled.pop(range.partition, None)
        self._completed.pop(range.partition, None)
        held = self._known_of(range.partition)
        if held.old is not None and not held.old.by_offset:
            return self._read_from_live(range, self._next_border(range, held.old), b"")
        if (end := held.end_of_span(int(range.start))) is not None:
            if held.old is not None and int(range.start) < int(held.old.end):
                end = min(end, int(held.old.end))  # a range is completed as a whole, or not at all
            end, is_damaged = held.until_damage(int(range.start), end)
            borders = [each for pair in self._completing(range, held.old) for each in pair]
            end = min([end, *(border for border in borders if border > int(range.start))])
            self._check_same(_limit_range(range, str(end)), None if is_damaged else held.old)
            reader = self._source.reader(_limit_range(range, str(end)))
            return reader if is_damaged else self._complete_from_files(reader, held.old)
        following = held.next_span(int(range.start))
        if held.old is None:
            return self._source.reader(range)
        if held.end_of_damage(int(range.start)) is not None:
            raise NotFoundError(
                f"source partition `{range.partition.text}`: what generation "
                f"{self._archive.generation} has from {range.start} on is damaged: plan it again"
            )
        ends = [int(held.old.end), following, held.next_damage(int(range.start))]
        return self._read_from_live(
            range, str(min(end for end in ends if end is not None)), held.note
        )

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Returns what the one that the range was read from reports.

        What neither the source nor the generation's files have is what the generation says: an
        erased event is not one that never was there, though a backup may lack both.
        """
        if range.start in (self._filled.get(range.partition), self._completed.get(range.partition)):
            return self._old.missing(range, read, reason=None)
        return missing_in(self._source, range, read)

    def cut(self, start: str, end: str, events: int) -> str:
        """Cuts by offset. A reader stops earlier itself, where the other one begins."""
        if are_offsets(start, end):
            return str(min(int(end), int(start) + events))
        return end

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        """Cuts by offset. Files of the live generation can be read in parts by offset too."""
        divides = isinstance(self._source, DividingSource)
        return even_cuts(range, parts) if divides and are_offsets(range.start, range.limit) else ()

    def before(self, one: str, other: str) -> bool:
        if are_offsets(one, other):
            return int(one) < int(other)
        return self._old.before(one, other)

    def count(self, start: str, end: str) -> int | None:
        if are_offsets(start, end):
            return max(0, int(end) - int(start))
        return self._old.count(start, end)

    def _known_of(self, partition: SourcePartition) -> _FillPartition:
        if partition not in self._known:
            self._known[partition] = self._look(partition, self._held().get(partition))
        return self._known[partition]

    def _check_same(self, range: SourceRange, old: Coverage | None) -> None:
        """Raises ``InvalidError`` if a backup has events of another topic, unless both name theirs.

        Compares once per source partition, with the live generation or, if that has not begun, with
        the archive's own source.
        """
        if range.partition not in self._unknown:
            return
        own: Source = self._old
        if old is None or self._outputs.of(range.partition.text).holds(range.start):
            own = source_at(self._context, self._archive.source)
        compared: list[tuple[Source, RangeReader]] = []
        try:
            with contextlib.suppress(NotFoundError, UnavailableError):  # nothing to compare with
                bounds = own.bounds([range.partition])[range.partition]
                if not are_offsets(bounds.first, bounds.end):
                    return
                start = max(int(range.start), int(bounds.first))
                limit = min(int(range.limit), int(bounds.end), start + SAMPLE_OFFSETS)
                if start >= limit:
                    return
                both = SourceRange(range.partition, str(start), str(limit))
                compared = [(each, each.reader(both)) for each in (self._source, own)]
                if are_other_events(*(reader for _, reader in compared)):
                    where = f"at offsets from {start} on, as of a topic that had this name before"
                    raise _other_events(range.partition, self._source, own, where)
                self._unknown.discard(range.partition)
        except CorruptError:
            for source, reader in compared:  # an erasure that replaces files is no damage
                check_plan(source, reader)
            raise

    def _complete_from_files(self, reader: RangeReader, old: Coverage | None) -> RangeReader:
        """Returns the range, with events from the generation's files that the source lacks.

        A topic lacks none: every offset had an event, and a missing one was deleted. Files of a
        transform hold its output, which no other transform may process.
        """
        partition, start = reader.range.partition, int(reader.range.start)
        if not any(at <= start < end for at, end in self._completing(reader.range, old)):
            return reader
        self._completed[partition] = reader.range.start
        files, is_copy = self._old.reader(reader.range), partition in self._copies
        return CompletedReader(reader, files, self._archive.generation, is_copy)

    def _completing(self, range: SourceRange, old: Coverage | None) -> list[Interval]:
        """Returns the offsets whose files may complete what the source holds."""
        output = self._outputs.of(range.partition.text)
        is_alone = output.all or self._follows or isinstance(self._source, TopicSource)
        return [] if old is None or is_alone else without(old.intervals(), output.offsets)

    def _held(self) -> dict[SourcePartition, Bounds]:
        """Returns what the source holds of the archive's own topics, if positions are offsets."""
        try:
            there = self._source.partitions()
        except NotFoundError:
            if self._given:
                raise
            return {}  # the topic was deleted: the archive's files are all there is
        own = [each for each in there if not self._given or each.topic in self._topics]
        self._errors = {}
        there_now = bounds_apart(self._source, own, self._errors)
        bounds = without_remade(self._context, self._archive.pipeline(), there_now)
        self._copies = {each for each, b in bounds.items() if self._given and not b.incarnation}
        if self._given and not self._known:
            self._unknown = unknown_topics(self._context, self._archive, bounds)
        return {each: b for each, b in bounds.items() if are_offsets(b.first, b.end)}

    def _live_partitions(self) -> list[SourcePartition]:
        """Returns the source partitions that the live generation has begun."""
        context, own = self._context, self._archive.pipeline()
        names = read_partitions(context, own)
        return [SourcePartition.named(each) for each in names if read_covered(context, own, each)]

    @cached_property
    def _topics(self) -> frozenset[str]:
        """Returns the archive's own topics: those it has, and those its source has now."""
        known = {each.topic for each in self._live_partitions()}
        own = source_at(self._context, self._archive.source)
        with contextlib.suppress(NotFoundError):  # its name is among those that were begun
            known |= {each.topic for each in own.partitions()}
        return frozenset(known)

    @cached_property
    def _is_restorable(self) -> bool:
        """Returns whether the live generation's files hold events, not only typed columns."""
        store = store_at(self._context, self._archive.store)
        return ArchiveFiles(store, self._archive.format_of()).restorable

    def _look(self, partition: SourcePartition, source: Bounds | None) -> _FillPartition:
        context = self._context
        old = read_covered(context, self._archive.pipeline(), partition.text)
        error = self._errors.get(partition)
        if old is not None and isinstance(error, VanishedError):
            error = None  # the generation's files have what was there
        if error is not None and not self._follows and (old is None or old.by_offset):
            raise error
        if source is not None and old is not None:
            source = self._usable(partition, old, source)
        if source is not None:
            source = self._begun(partition, old, source)
            source = self._until_own(partition, old, source)
        if old is None or (old.by_offset and not self._is_restorable):
            if source is None:
                what = f"neither the source nor a file of archive `{self._archive.name}` has it"
                raise NotFoundError(f"source partition `{partition.text}`: {what} any more")
            return _FillPartition(None, source, ((int(source.first), int(source.end)),))
        if old.by_offset and old.begin == old.end and source is not None:
            return _FillPartition(None, source, ((int(source.first), int(source.end)),))
        if not old.by_offset:
            self._check_restorable(partition)
            begins = self._old.bounds([partition])[partition]
            return _FillPartition(old, begins)
        return self._join(partition, old, source)

    def _join(
        self, partition: SourcePartition, old: Coverage, source: Bounds | None
    ) -> _FillPartition:
        """Combines what both hold; the source comes first."""
        damaged = self._damage(partition, old)
        position = self._position(partition)
        bounds = Bounds(old.begin, old.end, old.incarnation, begins=old.begins, may_be_behind=True)
        if source is None:
            held = _FillPartition(old, bounds, note=old.note, damaged=damaged)
            return replace(held, bounds=_past_damage(held, bounds, position))
        spans = held_spans(self._source, partition, source, old)
        first, begins = bounds.first, bounds.begins
        if int(source.first) < int(first):
            first, begins = source.first, source.begins
        held = _FillPartition(old, source, tuple(spans), damaged=damaged)
        if position is not None and position >= int(old.end):
            # Nothing holds what is between the end of the files and the source's first event.
            following = held.next_span(position)
            if held.end_of_span(position) is None and following is not None:
                first = str(following)
        end = str(max(int(source.end), int(old.end)))
        known, behind = source.incarnation or old.incarnation, source.may_be_behind
        joined = Bounds(first, end, known, False, begins, source.note, may_be_behind=behind)
        joined = _past_damage(held, joined, position)
        return replace(held, bounds=joined, note=source.note or old.note)

    def _damage(self, partition: SourcePartition, old: Coverage) -> tuple[Interval, ...]:
        """Returns what is damaged in the live generation, if a person accepts that; reads once."""
        if not self._passes_damage:
            return ()
        if partition not in self._damaged:
            found = damaged_spans(self._context, self._archive, self._old, partition, old)
            self._damaged[partition] = found
        return self._damaged[partition]

    def _begun(self, partition: SourcePartition, old: Coverage | None, source: Bounds) -> Bounds:
        """Returns what the source holds from where the live generation begins, or would begin."""
        if self._is_from_first or (old is not None and not old.by_offset):
            return source
        listed = self._partitions_at_creation.get(partition.text)
        begin, begins, note = "", source.begins, source.note
        if old is not None:
            begin, begins = old.begin, old.begins
        elif self._archive.start == "latest" and listed is not None and are_offsets(listed.end):
            unknown = not listed.incarnation or not source.incarnation
            if unknown or listed.incarnation == source.incarnation:
                begin, begins = listed.end, "latest"
        if not begin or int(begin) <= int(source.first):
            return source
        if listed is not None and listed.end == begin:
            note = listed.note  # of what is before it
        return replace(source, first=begin, begins=begins, note=note)

    def _until_own(self, partition: SourcePartition, old: Coverage | None, held: Bounds) -> Bounds:
        """Returns what to read of a backup: nothing that the archive's own source holds as well.

        The backup may lack some of that, and a driver reads it from the source after the promote.
        What this generation or the live one has stays: the own source may have been behind.
        """
        if not self._given or self._follows or self._given == self._archive.source:
            return held
        own, source = None, source_at(self._context, self._archive.source)
        with contextlib.suppress(NotFoundError):  # it was deleted: the backup is all there is
            own = source.bounds([partition])[partition]
        if own is None or not are_offsets(own.first, own.end):
            return held
        if not is_same_sequence(own, held if old is None else old):
            if old is None:  # the archive could never read on from there
                where = "now, those of a topic that had this name before"
                raise _other_events(partition, self._source, source, where)
            return held
        if int(own.end) < int(held.end):
            return held
        so_far = int(old.end) if old else 0, self._position(partition) or 0
        reached = max(int(held.first), int(own.first), *so_far)
        if reached >= int(held.end):
            return held
        if old is None:  # nothing of it may be read at all: compare the events all the same
            self._check_same(SourceRange(partition, held.first, held.end), None)
        return replace(held, end=str(reached))

    @cached_property
    def _partitions_at_creation(self) -> dict[str, ListedPartition]:
        """Returns what the creation of the archive saw."""
        return read_listed(self._context, self._archive.pipeline())

    def _usable(self, partition: SourcePartition, old: Coverage, held: Bounds) -> Bounds | None:
        """Returns what may be read from the source besides the live generation; None: nothing."""
        if not is_same_sequence(held, old):
            return None
        if not self._follows:
            return held
        if int(held.first) > int(old.end):
            return None
        return replace(held, end=str(min(int(held.end), int(old.end))))

    def _position(self, partition: SourcePartition) -> int | None:
        """Returns how far the generation that is being built has read."""
        now = read_covered(self._context, self._pipeline, partition.text)
        return None if now is None else int(now.end)

    def _check_restorable(self, partition: SourcePartition) -> None:
        if not self._is_restorable:
            raise InvalidError(
                f"source partition `{partition.text}`: generation {self._archive.generation} of "
                f"archive `{self._archive.name}` keeps no raw values, so no other one can be made "
                "of its files: create a new archive"
            )

    def _next_border(self, range: SourceRange, old: Coverage) -> str:
        """Returns the end of the commit that a range begins with."""
        for start, end in pairwise(old.borders):
            if start == range.start:
                return end
        raise NotFoundError(
            f"source partition `{range.partition.text}`: generation {self._archive.generation} of "
            f"archive `{self._archive.name}` has no commit that begins at {range.start}: drop the "
            "generation that is being built, and backfill again"
        )

    def _read_from_live(self, range: SourceRange, end: str, note: bytes) -> RangeReader:
        """Returns a reader of a range from the files of the live generation."""
        self._filled[range.partition] = range.start
        output = self._outputs.of(range.partition.text)
        as_is, end = output.holds(range.start), output.until_border(range.start, end)
        reader = self._old.reader(_limit_range(range, end))
        numbers = None if are_offsets(range.start, end) else self._old.counted(reader.range)
        if as_is:
            refuse_output(self._archive, self._written_as)
        carried = CarriedRange(self._archive.generation, as_is, numbers, note)
        return CarriedReader(reader, carried)


def is_own_damage(context: Context, archive: Archive, error: CorruptError) -> bool:
    """Returns whether the damage is in the live generation, and a backfill can leave it out."""
    file, manifest = error.context.get("file", ""), error.context.get("manifest", "")
    if not is_by_offset(context, archive):
        return False
    return archive.pipeline() in str(manifest) or any(
        str(file).startswith(f"{folder}/")
        for folder in (archive.folder(archive.generation), archive.dead)
    )


def _other_events(
    partition: SourcePartition, given: Source, own: Source, where: str
) -> InvalidError:
    return InvalidError(
        f"source partition `{partition.text}`: `{given.url}` holds other events than `{own.url}` "
        f"{where}: create another archive for it",
        partition=partition.text,
    )


def _past_damage(held: _FillPartition, bounds: Bounds, position: int | None) -> Bounds:
    """Returns bounds that begin after a damaged commit, for a generation that reached it."""
    after = None if position is None else held.end_of_damage(position)
    return bounds if after is None else replace(bounds, first=str(after))


def _limit_range(range: SourceRange, end: str) -> SourceRange:
    """Returns the range, up to at most ``end``."""
    if are_offsets(range.limit, end) and int(range.limit) <= int(end):
        return range
    return replace(range, limit=end)


_source: type[Source] = FillSource
_explaining: type[ExplainingSource] = FillSource
