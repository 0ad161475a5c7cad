"""Searches files and objects for events by id or key: step 1 of an erasure, and a proof's tasks.

With a task runner, tasks that need only the store search everything first, and the caller reads
only what holds something. A task reports whether an object is clean: it was decoded completely, and
nothing in it has one of the ids or keys, or is at an erased offset. What is not clean is searched
again by the caller, who knows what the rows say about it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.archive.derived_archives import (
    UNKNOWN_ORIGIN,
    Origin,
    archives_of,
    copies_of,
    origin_of,
)
from tidelog.archive.erased_events import Deletions
from tidelog.archive.read import ArchiveFiles, is_changing, is_removed
from tidelog.catalog.update import attempts
from tidelog.connectors.by_url import store_at
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import counting_files, read_intent, read_partitions
from tidelog.erasure.aside_files import AsideFiles, aside_origins
from tidelog.erasure.matcher import EventMatcher, own_column, rows_of, time_ms_of
from tidelog.erasure.rewrite import finish_rewrites
from tidelog.erasure.unfinished_ranges import UnfinishedRange, finish_remedy, still_under_way
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.journal.stray_events import StrayEvents
from tidelog.log.run_reader import read_run
from tidelog.log.topics import list_topics
from tidelog.model.archive import Archive, ArchiveFormat, GenerationState
from tidelog.model.event import check_utf8
from tidelog.model.pipeline import FileEntry, Manifest, offsets_between
from tidelog.model.times import Backoff
from tidelog.model.topic import Run, Topic
from tidelog.store import shared_store
from tidelog.store.base import ObjectInfo, Store

__all__ = [
    "SEARCHED_STATES",
    "ArchiveSearch",
    "FileSearch",
    "FoundEvent",
    "SourceOffset",
    "check_trimmed",
    "files_to_search",
    "files_without",
    "matcher_of",
    "objects_without",
    "search_aside",
    "search_generation",
    "search_strays",
]


SEARCHED_STATES: tuple[GenerationState, ...] = ("live", "building", "kept")
_SEARCHES = Backoff(20, base_ms=25, max_ms=50)  # of a partition whose files change in between

SourceOffset = tuple[Origin, int]
"""A source partition, with its incarnation, and an offset."""


@dataclass(frozen=True, slots=True)
class FoundEvent:
    id: str | None
    time_ms: int


@dataclass(slots=True)
class FileSearch:
    """What to find, and which files were searched for it: a later search skips these."""

    sought: EventMatcher
    unseen: list[str] = field(default_factory=list)  # files without ids or keys to search for
    searched: set[FileEntry] = field(default_factory=set)
    searched_aside: set[str] = field(default_factory=set)  # keys


def matcher_of(ids: Collection[str], key: bytes | None) -> EventMatcher:
    if bool(ids) == (key is not None):
        raise InvalidError("erase: give ids, or one key")
    for each in ids:
        check_utf8("id", each)  # dead letters have ids that no topic accepts, such as an empty one
    return EventMatcher(Deletions.anywhere(ids, () if key is None else (key,)))


def check_trimmed(
    context: Context, archive: Archive, generation: int, starts: Mapping[str, int]
) -> None:
    """Raises ``UnavailableError`` if a range under way may hold what the topic has trimmed.

    No file of it can be searched yet. Only a trim past the archive makes such a range. What a chain
    or another generation is reading is in the files that it reads, unless they are outside of the
    home: the caller searches such a generation again.
    """
    if generation != archive.generation or not archive.source.startswith("topic:"):
        return
    for partition, start in starts.items():
        intent = read_intent(context, archive.pipeline(generation), partition)
        if intent is None:
            continue
        first = intent.lost[-1].end if intent.lost else intent.start
        if (offsets_between(first, str(start)) or 0) > 0:
            raise UnavailableError(
                f"archive `{archive.name}`: {partition} from {first} to {intent.reach} is being "
                f"archived, and the topic has trimmed it up to {start}: try again after that, or "
                f"run `tidelog archive run {archive.name}` if no driver runs"
            )


def search_generation(
    context: Context,
    archive: Archive,
    generation: int,
    ends: Mapping[str, int | None],
    search: FileSearch,
) -> dict[SourceOffset, FoundEvent]:
    """Step 1 in one generation: finds what is below the end of each source partition.

    Skips the files that this search has searched before. A file that was rewritten since is another
    one. Finds nothing in a generation that is dropped meanwhile: all of it is deleted.
    """
    try:
        return _search_partitions(context, archive, generation, ends, search)
    except (CorruptError, NotFoundError):
        if not is_removed(context, archive, generation):
            raise
        return {}


def _search_partitions(
    context: Context,
    archive: Archive,
    generation: int,
    ends: Mapping[str, int | None],
    search: FileSearch,
) -> dict[SourceOffset, FoundEvent]:
    found: dict[SourceOffset, FoundEvent] = {}
    begun = {partition: () for partition, end in ends.items() if end != 0}
    files = files_to_search(context, archive, generation, begun)
    new = (each for each in files if each.file not in search.searched)
    search.searched |= files_without(context, archive.name, new, search.sought)
    for partition, end in ends.items():
        own = origin_of(context, archive.pipeline(generation), partition)
        if own is not None and end != 0:
            reader = _Searched(archive, generation, partition)
            places = _search_again(context, reader, end, search)
            found |= {(own[0], offset): each for offset, each in places.items()}
    return found


@dataclass(frozen=True, slots=True)
class _Searched:
    """A source partition of a generation."""

    archive: Archive
    generation: int
    partition: str


def _search_again(
    context: Context,
    searched: _Searched,
    end: int | None,
    search: FileSearch,
) -> dict[int, FoundEvent]:
    """Returns what was found in one source partition, by offset; retries if files change."""
    archive, generation, partition = searched.archive, searched.generation, searched.partition
    reader = ArchiveFiles(store_at(context, archive.store), archive.format_of(generation))
    pipeline = archive.pipeline(generation)
    busy = UnavailableError(
        f"archive `{archive.name}`, `{partition}`: its files keep changing: search again"
    )
    found: dict[int, FoundEvent] = {}
    for number in attempts(context, busy, _SEARCHES):
        for manifest, file in counting_files(context, pipeline, partition):
            is_above = end is not None and file.first_offset >= end
            if file.kind == "sidecar" or is_above or file in search.searched:
                continue
            try:
                found |= _search_file(reader, manifest, file, search)
                search.searched.add(file)
            except CorruptError:
                is_last = number == _SEARCHES.attempts - 1
                is_last |= is_removed(context, archive, generation)
                if is_last or not is_changing(context, archive, generation, partition, file):
                    raise
                finish_rewrites(context, archive, generation)  # of one that crashed half-way
                break
        else:
            break
    return {offset: each for offset, each in found.items() if end is None or offset < end}


def _search_file(
    reader: ArchiveFiles,
    manifest: Manifest,
    file: FileEntry,
    search: FileSearch,
) -> dict[int, FoundEvent]:
    sought, unseen = search.sought, search.unseen
    found: dict[int, FoundEvent] = {}
    for batch in reader.batches(manifest, file):
        if sought.hidden(batch) and file.target not in unseen:
            unseen.append(file.target)
        offsets = reader.offsets(batch, file).cast(pa.int64())
        for row in sought.rows(batch):
            found[offsets[row].as_py()] = FoundEvent(_id(batch, row), time_ms_of(batch, row))
    return found


def search_aside(
    context: Context,
    archive: Archive,
    search: FileSearch,
    number: int,
    is_wanted: Callable[[Origin], bool] = lambda _: True,
) -> dict[SourceOffset, FoundEvent]:
    """Searches files that were set aside; uses negative offsets, as theirs are other events'.

    ``number`` is how many of these offsets are used already. Skips files that were searched before.
    """
    found: dict[SourceOffset, FoundEvent] = {}
    origins = aside_origins(context, archive)
    before = frozenset(search.searched_aside)

    def holds(key: str) -> bool:
        return key not in before and is_wanted(origins.get(key, UNKNOWN_ORIGIN))

    for key, batch in AsideFiles(store_at(context, archive.store), archive, holds).batches():
        search.searched_aside.add(key)
        for row in search.sought.rows(batch):
            place = (origins.get(key, UNKNOWN_ORIGIN), -1 - number - len(found))
            found[place] = FoundEvent(_id(batch, row), time_ms_of(batch, row))
    return found


@dataclass(slots=True)
class ArchiveSearch:
    """Step 1 in an archive, and in files of its copies that were set aside."""

    context: Context
    archive: Archive
    files: FileSearch
    found: dict[SourceOffset, FoundEvent] = field(default_factory=dict)
    unfinished: set[UnfinishedRange] = field(default_factory=set)  # that took too long

    def look(self) -> dict[SourceOffset, FoundEvent]:
        """Searches what no earlier look has searched.

        Raises ``InvalidError`` if such an event comes from an existing topic.
        """
        copies = copies_of(self.context, self.archive)
        archive, new = copies[0].archive, dict[SourceOffset, FoundEvent]()
        found_in: dict[int, dict[SourceOffset, FoundEvent]] = {}
        for generation in archive.in_state(*SEARCHED_STATES):
            known = read_partitions(self.context, archive.pipeline(generation))
            found_in[generation] = search_generation(
                self.context, archive, generation, dict.fromkeys(known), self.files
            )
            new |= found_in[generation]
        aside: dict[SourceOffset, FoundEvent] = {}
        for copy in copies:
            number = len(self.found) + len(new) + len(aside)
            aside |= search_aside(self.context, copy.archive, self.files, number)
        for topic in list_topics(self.context):
            if _are_of(self.context, archive, topic, found_in, aside):
                given = "ID" if self.files.sought.deletions.by_id else "--key KEY"
                raise InvalidError(
                    f"archive `{archive.name}`: its topic `{topic.name}` exists: run `tidelog "
                    f"delete {topic.name} {given}`, which erases from its archives too"
                )
        new = {place: each for place, each in (new | aside).items() if place not in self.found}
        self.found |= new
        return new

    def wait_and_look(self) -> dict[SourceOffset, FoundEvent]:
        """Waits for ranges under way, then searches again."""
        archive = copies_of(self.context, self.archive)[0].archive
        pipelines = [archive.pipeline(number) for number in archive.in_state(*SEARCHED_STATES)]
        self.unfinished = still_under_way(self.context, pipelines, self.unfinished)
        return self.look()

    def unfinished_ranges(self) -> Iterator[str]:
        """Yields messages about ranges that took too long."""
        archive = copies_of(self.context, self.archive)[0].archive
        for pipeline, partition in sorted({each[:2] for each in self.unfinished}):
            yield (
                f"archive `{archive.name}`: a range of `{partition}` is under way that may hold "
                f"such events: {finish_remedy(archive, pipeline)}, then erase again"
            )


def _are_of(
    context: Context,
    archive: Archive,
    topic: Topic,
    found: Mapping[int, Iterable[SourceOffset]],
    aside: Iterable[SourceOffset],
) -> bool:
    """Returns whether a delete from an existing topic reaches some events of an archive.

    ``found`` has them by generation; a generation may have been made from something else.
    """
    every = archives_of(context, topic)
    made = [number for each, number in every if each.incarnation == archive.incarnation]
    places = [place for number in made for place in found.get(number, ())]
    return any(
        origin.partition.rpartition("/")[0] == topic.name
        and origin.may_be(Origin(origin.partition, topic.incarnation))
        for origin, _ in (*places, *(aside if made else ()))
    )


def search_strays(
    context: Context, topic: Topic, sought: EventMatcher
) -> dict[int, dict[int, FoundEvent]]:
    """Searches what a recovery of a topic would append: events of objects that no row names.

    Returns them by partition; uses negative offsets, as theirs may be other events'.
    """
    found: dict[int, dict[int, FoundEvent]] = {}
    strays = StrayEvents(context, topic, None, include_trimmed=True, in_progress=True)
    for unit in strays.units:
        events = strays.read(unit)
        for batch in () if events is None else events.table.to_batches():
            here = found.setdefault(unit.partition, {})
            for row in sought.rows(batch):
                here[-1 - len(here)] = FoundEvent(_id(batch, row), time_ms_of(batch, row))
    return found


def _id(batch: pa.RecordBatch, row: int) -> str | None:
    column = own_column(batch, "id")
    value = None if column is None else column[row].as_py()
    return None if value is None else str(value)


Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _ArchivedFile:
    """A file of an archive, to search anywhere; pickles."""

    store: str  # URL
    written_as: ArchiveFormat
    manifest: Manifest  # with sidecars only
    file: FileEntry
    erased: tuple[int, ...]  # offsets between its first and last


@dataclass(frozen=True, slots=True)
class _TopicObject:
    """A segment or journal, to search anywhere; pickles."""

    store: str  # URL
    key: str
    size: int
    runs: tuple[Run, ...]  # that count; those of a journal are all of it

    @property
    def is_segment(self) -> bool:
        """Returns whether it may have pieces besides the runs that count."""
        return all(run.journal is None for run in self.runs)


def files_without(
    context: Context,
    archive: str,
    files: Iterable[_ArchivedFile],
    sought: EventMatcher,
    progress: Progress = lambda _: None,
) -> set[FileEntry]:
    """Returns those of an archive's files that hold none of the events; none without a runner."""
    runner = context.tasks
    if runner is None:
        return set()
    function = functools.partial(_is_clean_file, _without_places(sought))
    title = f"search archive {archive}"
    found: set[FileEntry] = set()
    for each, is_clean in runner.run(title, function, files, lambda item: item.file.size):
        if is_clean:
            found.add(each.file)
            progress(each.file.size)
    return found


def objects_without(
    context: Context,
    store: Store,
    objects: Iterable[tuple[ObjectInfo, Sequence[Run]]],
    sought: EventMatcher,
    progress: Progress,
) -> set[str]:
    """Returns the segments and journals that hold none of the events; none without a runner.

    ``objects`` come with the runs that count in each of them.
    """
    runner = context.tasks
    if runner is None:
        return set()
    function = functools.partial(_is_clean_object, _without_places(sought))
    work = (_TopicObject(store.url, info.key, info.size, tuple(runs)) for info, runs in objects)
    found: set[str] = set()
    for each, is_clean in runner.run("search topic", function, work, lambda item: item.size):
        if is_clean:
            found.add(each.key)
            progress(each.size)
    return found


def files_to_search(
    context: Context, archive: Archive, generation: int, wanted: Mapping[str, Collection[int]]
) -> Iterator[_ArchivedFile]:
    """Yields the files of a generation's source partitions; ``wanted`` has offsets erased there."""
    written_as = archive.format_of(generation)
    for partition, erased in wanted.items():
        offsets = sorted(erased)
        for manifest, file in counting_files(context, archive.pipeline(generation), partition):
            sidecars = tuple(each for each in manifest.files if each.kind == "sidecar")
            beside = msgspec.structs.replace(manifest, files=sidecars, erased=())
            first = bisect.bisect_left(offsets, file.first_offset)
            after = bisect.bisect_right(offsets, file.last_offset)
            inside = tuple(offsets[first:after])
            yield _ArchivedFile(archive.store, written_as, beside, file, inside)


def _without_places(sought: EventMatcher) -> EventMatcher:
    """Returns what finds the same ids and keys, and is small: it goes out with every task."""
    return EventMatcher(Deletions.anywhere(sought.deletions.by_id, sought.deletions.by_key))


def _is_clean_file(sought: EventMatcher, work: _ArchivedFile) -> bool:
    gone = pa.array(work.erased, pa.int64())
    reader = ArchiveFiles(shared_store(work.store), work.written_as)
    return not any(
        _has_some(sought, batch, gone) for batch in reader.batches(work.manifest, work.file)
    )


def _has_some(sought: EventMatcher, batch: pa.RecordBatch, gone: pa.Array) -> bool:
    if sought.hidden(batch) or sought.rows(batch):
        return True
    column = own_column(batch, "offset") if len(gone) else None
    return column is not None and bool(pc.any(pc.is_in(column.cast(pa.int64()), gone)).as_py())


def _is_clean_object(sought: EventMatcher, work: _TopicObject) -> bool:
    store = shared_store(work.store)
    data = store.get(work.key)
    if work.is_segment and any(sought.rows(batch) for batch in rows_of(data)):
        return False
    for run in work.runs:  # also compares checksums
        piece = data[run.byte_start : run.byte_end]
        if any(sought.rows(r.batch) for r in read_run(store, run, work.key, data=piece)):
            return False
    return True
