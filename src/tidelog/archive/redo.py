"""Writes a part of an archive again, as a new generation; the rest of it is copied.

A redo is for code that was wrong for a while: a parser that named wrong folders, or a transform
that was fixed since. It names dates, topics or source partitions (``RedoPart``). Which events
belong to it follows from the files that hold them now, so no position is guessed. Its generation is
built, compared, promoted, rolled back and dropped like one of a backfill (``generations``).

Each range consists of whole commits of the live generation, and ends where one of them ends:

- Files that do not belong to the part are copied on the server, under names of the new generation.
  They are copied twice, to staging and then to their names, so that a range stays one decision.
- The events of the other files are read and written again. They come from these files, or, if these
  hold a transform's or a parser's output, from the source. Where that no longer holds all of them,
  the output is written again as it is, as in a backfill. So a range ends where the source begins.
- The range accounts for exactly what the live one's commits account for. An event that was erased
  is in no file, so it is left out.
- Dead letters have no date. They are copied, unless all of their source partition is written again.
  Those that a replay has archived are parsed again.

An erasure may rewrite a file while it is copied: ``pipeline.ranges`` plans the range again after
the copies, and they count only if no file has changed. A copy that was made before the erasure is
searched by it, because the intent of the range comes first, as for a fill (``fill``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.archive.coverage import are_offsets, read_covered
from tidelog.archive.derived_archives import LiveOutputs, output_of, refuse_output
from tidelog.archive.fill import FillSource
from tidelog.archive.read import ArchiveFiles, source_partition
from tidelog.codec.formats import open_format, settings_of
from tidelog.codec.parsers import FolderSettings, folder_settings
from tidelog.connectors.archive.reader import CarriedRange, CarriedReader, PlannedCommits
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import source_at, store_at
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    CountedRange,
    ExplainingSource,
    KnownPartition,
    MissingOffsets,
    RangeReader,
    SkippingSource,
    Source,
    SourcePartition,
    SourceRange,
    TrackingSource,
)
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import counting_files, read_partitions
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.model.archive import Archive, ArchiveFormat, RedoPart
from tidelog.model.pipeline import FileEntry, Manifest

__all__ = ["RedoPlan", "RedoSource", "plan_redo", "redo_source"]

_RANGE_FILES = 200  # of a range with several commits
_RANGE_EVENTS = 1_000_000
_COPIES = 2  # of a file: to staging, and to its name
_COPY_REQUESTS = 3  # of one copy on S3: begin, copy, complete

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RedoPlan:
    """What a redo would do."""

    files: int = 0  # to read and write again
    events: int = 0  # in them
    copied_files: int = 0
    copied_bytes: int = 0

    @property
    def requests(self) -> int:
        """Returns how many requests the copies cost on S3, about."""
        return self.copied_files * _COPIES * _COPY_REQUESTS


def plan_redo(
    context: Context, archive: Archive, part: RedoPart, written_as: ArchiveFormat
) -> tuple[RedoPart, RedoPlan]:
    """Returns the part with the full names of its partitions, and what a redo of it would do.

    Raises ``InvalidError`` if the part is empty, or if its files could not be in one generation
    with the copied ones; ``NotFoundError`` for a topic or partition that the archive does not have.
    """
    part = _known_part(context, archive, part)
    _check_settings(archive, written_as)
    chosen = _ChosenFiles(archive, part)
    plan = RedoPlan()
    for partition in read_partitions(context, archive.pipeline()):
        for _, file in counting_files(context, archive.pipeline(), partition):
            if not chosen.has(partition, file):
                size = plan.copied_bytes + file.size
                plan = replace(plan, copied_files=plan.copied_files + 1, copied_bytes=size)
            elif file.kind != "sidecar":
                plan = replace(plan, files=plan.files + 1, events=plan.events + file.events)
    if not plan.files:
        raise InvalidError(
            f"archive `{archive.name}`: none of its files belong to "
            f"{', '.join((*part.dates, *part.topics, *part.partitions))}: look at "
            f"`tidelog archive manifest {archive.name}`"
        )
    return part, plan


def redo_source(context: Context, archive: Archive, generation: int, fill: FillSource) -> Source:
    """Returns the source of a generation that writes a part of the live one again."""
    kind = RedoFilesSource if isinstance(fill, TrackingSource) else RedoSource
    return kind(context, archive, generation, fill)


class RedoSource:
    """The commits of the live generation: some of their files to copy, the others to read."""

    def __init__(
        self, context: Context, archive: Archive, generation: int, fill: FillSource
    ) -> None:
        self._context = context
        self._archive = archive
        self._generation = generation
        self._written_as = archive.format_of(generation)
        self._fill = fill
        self._chosen = _ChosenFiles(archive, self._written_as.redo or RedoPart())
        live = source_at(context, f"archive:{archive.name}?generation={archive.generation}")
        if not isinstance(live, ArchiveSource):  # pragma: no cover - its address says so
            raise InvalidError(f"source `{live.url}`: is not an archive")
        self._live = live
        self._counted: dict[SourcePartition, tuple[str, CountedRange]] = {}  # by start
        self._outputs = LiveOutputs(context, archive)

    @property
    def url(self) -> str:
        return self._live.url

    def partitions(self) -> list[SourcePartition]:
        """Lists the source partitions that the live generation has begun."""
        return self._live.partitions()

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Returns what the live generation covers: this one never goes beyond that."""
        self._fill.look_again()
        found: dict[SourcePartition, Bounds] = {}
        for each in partitions:
            covered = read_covered(self._context, self._archive.pipeline(), each.text)
            if covered is None:
                raise NotFoundError(
                    f"source partition `{each.text}`: archive `{self._archive.name}` has not "
                    "begun it",
                    partition=each.text,
                )
            found[each] = Bounds(
                covered.begin,
                covered.end,
                covered.incarnation,
                begins=covered.begins,
                may_be_behind=True,  # after a rollback to a generation that has less
            )
        return found

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> RangeReader:
        """Returns the next commits: what to read of them, and what to copy."""
        self._counted.pop(range.partition, None)
        if self._chosen.has_all(range.partition.text) and not self._holds_events:
            return self._fill.reader(self._whole_commits(range, inside=True))
        return self._copy_and_read(self._whole_commits(range))

    def _copy_and_read(self, range: SourceRange) -> RangeReader:
        """Returns a reader of whole commits, with the files to copy."""
        plan = self._live.reader(range)
        counted = self._live.counted(range)
        wanted, copied = plan.without(lambda file: not self._chosen.has(range.partition.text, file))
        if copied and plan.is_changing:
            raise UnavailableError(
                f"source partition `{range.partition.text}`: an erasure is changing its files: try "
                "again",
                partition=range.partition.text,
            )
        self._counted[range.partition] = (range.start, counted)
        reader, as_is = self._events(range, wanted)
        files = tuple(self._copies(copied))
        return CarriedReader(
            reader, CarriedRange(self._archive.generation, as_is, counted, files=files)
        )

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Returns what the commits of the live generation say."""
        start, counted = self._counted.get(range.partition, ("", None))
        if counted is not None and start == range.start:
            return counted.missing
        return self._fill.missing(range, read)

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns the end: a reader stops earlier itself, where a commit ends."""
        return end

    def before(self, one: str, other: str) -> bool:
        return self._live.before(one, other)

    def count(self, start: str, end: str) -> int | None:
        return self._live.count(start, end)

    # Internals.

    @cached_property
    def _files(self) -> ArchiveFiles:
        return ArchiveFiles(store_at(self._context, self._archive.store), self._archive.format_of())

    @cached_property
    def _holds_events(self) -> bool:
        """Returns whether the live generation's files hold the events themselves."""
        return self._files.restorable and not output_of(self._archive.format_of())

    def _whole_commits(self, range: SourceRange, inside: bool = False) -> SourceRange:
        """Returns the range up to the end of a commit; ``inside`` one if it begins there."""
        if inside and are_offsets(range.start):
            begin = self._live.bounds([range.partition])[range.partition].first
            every = self._live.commits_from(range.partition, begin)
            return replace(range, limit=next(c.end for c in every if int(c.end) > int(range.start)))
        commits = self._live.commits_from(range.partition, range.start)
        end, files, events = commits[0].end, commits[0].files, commits[0].events
        is_joined = are_offsets(range.start, end) and not isinstance(self, TrackingSource)
        output = self._outputs.of(range.partition.text)
        is_in_source = partial(self._is_in_source, range.partition)
        for commit in commits[1:] if is_joined else ():
            files, events = files + commit.files, events + commit.events
            if files > _RANGE_FILES or events > _RANGE_EVENTS:
                break
            if output.holds(commit.start) != output.holds(range.start):
                break
            if is_in_source(commit.start) != is_in_source(range.start):
                break
            end = commit.end
        return replace(range, limit=end)

    def _is_in_source(self, partition: SourcePartition, start: str) -> bool:
        """Returns whether a commit at an offset is read from the source."""
        return not self._holds_events and self._fill.has(partition, start)

    def _events(self, range: SourceRange, wanted: PlannedCommits) -> tuple[RangeReader, bool]:
        """Returns a reader of the events to write again, and whether the range holds output."""
        is_output = self._outputs.of(range.partition.text).holds(range.start)
        if self._holds_events or not wanted.files:
            return wanted, is_output and self._holds_events
        offsets = self._offsets(wanted)
        if not offsets:
            return replace(wanted, commits=()), False  # all of them were erased
        chosen = range
        if are_offsets(range.start, range.limit):
            held = np.frombuffer(offsets, np.int64)
            chosen = replace(range, start=str(held[0]), limit=str(held[-1] + 1))
        given = self._from_source(chosen)
        if given is not None:
            return PickedReader(range, given, wanted, offsets), False
        if not self._files.restorable:
            raise InvalidError(
                f"source partition `{range.partition.text}`: its source no longer has all of "
                f"{chosen.start} to {chosen.limit}, and the files of archive "
                f"`{self._archive.name}` keep no raw values: leave it out of the redo"
            )
        refuse_output(self._archive, self._written_as)
        return wanted, True

    def _from_source(self, range: SourceRange) -> RangeReader | None:
        """Returns a reader of events as they were; None if the source lacks some of them."""
        try:
            given = self._fill.reader(range)
        except NotFoundError:
            if self._files.restorable:
                raise
            return None
        return None if isinstance(given, CarriedReader) or given.range != range else given

    def _offsets(self, wanted: PlannedCommits) -> bytes:
        """Returns the offsets in the chosen files, in order."""
        found = [np.empty(0, np.int64)]
        for data, sidecar, rows in wanted.files:
            held = self._offsets_in(data, sidecar)
            first, last = rows or (0, data.last_offset + 1)
            found.append(held[(held >= first) & (held < last)])
        return np.sort(np.concatenate(found)).tobytes()

    def _offsets_in(self, data: FileEntry, sidecar: FileEntry | None) -> Offsets:
        beside = (data,) if sidecar is None else (data, sidecar)
        manifest = Manifest("", "", "", "", 0, 0, 0, files=beside)
        found = [np.empty(0, np.int64)]
        held = (self._files.offsets(each, data) for each in self._files.batches(manifest, data))
        found.extend(each.to_numpy().astype(np.int64) for each in held)
        return np.concatenate(found)

    def _copies(self, copied: Sequence[tuple[FileEntry, FileEntry | None]]) -> Iterator[FileEntry]:
        """Yields the files to copy, under their names in the new generation."""
        written_as = self._archive.format_of()
        form = open_format(
            written_as.format, written_as.codec or None, settings_of(written_as.format_settings)
        )
        for data, sidecar in copied:
            if not data.events:
                continue  # all of them were erased
            entry = self._renamed(data)
            if data.erased:  # perhaps the first or the last one
                held = self._offsets_in(data, sidecar)
                entry = self._renamed(data, (int(held[0]), int(held[-1])))
            yield entry
            if sidecar is not None:
                yield msgspec.structs.replace(
                    entry,
                    staged=sidecar.target,
                    target=form.sidecar_name(entry.target) or "",
                    size=sidecar.size,
                    crc=sidecar.crc,
                    kind="sidecar",
                )

    def _renamed(self, file: FileEntry, ends: tuple[int, int] | None = None) -> FileEntry:
        """Returns a file's entry in the new generation."""
        archive = self._archive
        folder, _, name = file.target.rpartition("/")
        if file.kind == "data":
            below = folder.removeprefix(archive.folder())
            folder = f"{archive.folder(self._generation)}{below}"
        name = f"{self._generation}_{name.removeprefix(f'{archive.generation}_')}"
        first, last = ends or (file.first_offset, file.last_offset)
        before, _, after = name.rpartition(f"_{file.first_offset:020}")
        return msgspec.structs.replace(
            file,
            staged=file.target,
            target=f"{folder}/{before}_{first:020}{after}",
            first_offset=first,
            last_offset=last,
            erased=0,
            updated=0,
        )


class RedoFilesSource(RedoSource):
    """The same for an archive of files, whose source recognizes each of them by a note."""

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        if isinstance(self._fill, TrackingSource):
            self._fill.track(known)

    def seen(self) -> dict[SourcePartition, str]:
        return {}

    def renewed(self) -> dict[SourcePartition, bytes]:
        return {}

    def left_out(self) -> dict[str, str]:
        return self._fill.left_out() if isinstance(self._fill, SkippingSource) else {}


_source: type[Source] = RedoSource
_explaining: type[ExplainingSource] = RedoSource
_tracking: type[TrackingSource] = RedoFilesSource
_leaving: type[SkippingSource] = RedoFilesSource


@dataclass(frozen=True, slots=True)
class PickedReader:
    """Some events of a range, by their offsets; pickles."""

    range: SourceRange
    reader: RangeReader  # of the part of it that has all of them
    files: PlannedCommits  # that hold them in the live generation
    offsets: bytes

    @property
    def is_changing(self) -> bool:
        return self.files.is_changing

    def read(self) -> Iterator[Chunk]:
        """Yields these events. Raises ``InvalidError`` if the source no longer has one of them."""
        wanted = np.frombuffer(self.offsets, np.int64)
        found, last = 0, None
        for chunk in self.reader.read():
            if last is not None:
                yield last
            mask = np.isin(chunk.batch.column("offset").to_numpy(), wanted)
            found += int(mask.sum())
            last = replace(chunk, batch=chunk.batch.filter(pa.array(mask)))
        if last is None or found != len(wanted):
            read, partition = self.reader.range, self.range.partition.text
            raise InvalidError(
                f"source partition `{partition}`: its source has {found} of {len(wanted)} events "
                f"between {read.start} and {read.limit} that are to be written again: "
                "leave it out of the redo, or backfill the whole archive",
                partition=partition,
            )
        yield replace(last, position=self.range.limit)


class _ChosenFiles:
    """Decides which files of the live generation belong to a part."""

    def __init__(self, archive: Archive, part: RedoPart) -> None:
        self._part = part
        self._root = f"{archive.folder()}/"
        written_as = archive.format_of()
        settings = (
            folder_settings(written_as.parser, written_as.layout) if written_as.parser else None
        )
        form = (settings or FolderSettings()).date_format
        days = (date.fromisoformat(each) for each in part.dates)
        self._names = [f"/{each.strftime(form)}/" for each in days]

    def has_all(self, partition: str) -> bool:
        """Returns whether all of a source partition belongs to it."""
        return self._part.has_partition(partition) and not self._names

    def has(self, partition: str, file: FileEntry) -> bool:
        """Returns whether a file belongs to it."""
        if not self._part.has_partition(partition):
            return False
        if not self._names:
            return True
        _, slash, below = file.target.removeprefix(self._root).partition("/")
        return file.kind != "dead" and any(name in f"{slash}{below}" for name in self._names)


def _known_part(context: Context, archive: Archive, part: RedoPart) -> RedoPart:
    """Returns the part with full names. Raises ``InvalidError`` or ``NotFoundError``."""
    name = archive.name
    if not (part.dates or part.topics or part.partitions):
        raise InvalidError(
            f"archive `{name}`: give dates, topics or partitions to write again, or write all of "
            f"it with `tidelog archive backfill {name}`"
        )
    for each in part.dates:
        _check_date(name, each)
    if part.dates and not archive.format_of().parser:
        raise InvalidError(f"archive `{name}`: a backup has no date folders: give partitions")
    known = {each.rpartition("/")[0] for each in read_partitions(context, archive.pipeline())}
    for each in part.topics:
        if each not in known:
            raise NotFoundError(
                f"archive `{name}`: has nothing of a topic `{each}`: it has "
                f"{', '.join(sorted(known)) or 'none yet'}"
            )
    return msgspec.structs.replace(
        part,
        dates=tuple(sorted(set(part.dates))),
        topics=tuple(sorted(set(part.topics))),
        partitions=tuple(
            sorted({source_partition(context, archive, each, None) for each in part.partitions})
        ),
    )


def _check_date(name: str, text: str) -> None:
    try:
        if date.fromisoformat(text).isoformat() == text:
            return
    except ValueError:
        pass
    raise InvalidError(f"archive `{name}`: date `{text}`: give year, month and day: 2026-11-15")


def _check_settings(archive: Archive, written_as: ArchiveFormat) -> None:
    """Raises ``InvalidError`` if one generation cannot have files of both settings."""
    live = archive.format_of()
    same = msgspec.structs.replace(
        written_as, parser=live.parser, transform=live.transform, redo=None
    )
    live = msgspec.structs.replace(live, source="", start="")
    do = f"write all of it with `tidelog archive backfill {archive.name}`"
    if same != live:
        raise InvalidError(
            f"archive `{archive.name}`: copied files keep their format and their folders, so a "
            f"redo can only change the parser and the transform: {do}"
        )
    one, other = output_of(live), output_of(written_as)
    if one != other:
        kinds = (one or "events as they are", other or "events as they are")
        raise InvalidError(
            f"archive `{archive.name}`: its files hold {_what(kinds[0])}, the new ones would hold "
            f"{_what(kinds[1])}: {do}"
        )


def _what(output: str) -> str:
    return f"the output of a {output}" if output in ("transform", "parser") else output
