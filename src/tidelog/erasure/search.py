"""Searches the files of archives for events by id or key: step 1 of an erasure.

With a task runner, tasks search all files first (``search_ahead``), and only those that hold
something are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa

from tidelog.archive.derived_archives import UNKNOWN_LINE, Line, line_of
from tidelog.archive.erased_events import Deletions
from tidelog.archive.read import ArchiveFiles, is_changing
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import counting_files, read_intent
from tidelog.erasure.matcher import EventMatcher, own_column, time_ms_of
from tidelog.erasure.rewrite import finish_rewrites
from tidelog.erasure.rewrite_file import AsideFiles, aside_lines
from tidelog.erasure.search_ahead import clean_files
from tidelog.errors import CorruptError, InvalidError, UnavailableError
from tidelog.model.archive import Archive
from tidelog.model.event import check_utf8
from tidelog.model.pipeline import FileEntry, Manifest, offsets_between
from tidelog.pipeline.endpoints import store_at

__all__ = [
    "FoundEvent",
    "Place",
    "check_trimmed",
    "matcher_of",
    "search_aside",
    "search_generation",
]

_SEARCHES = 20  # of a source partition whose files change in between

Place = tuple[Line, int]
"""A source partition, with its incarnation, and an offset."""


@dataclass(frozen=True, slots=True)
class FoundEvent:
    id: str | None
    time_ms: int


def matcher_of(ids: Collection[str], key: bytes | None) -> EventMatcher:
    if bool(ids) == (key is not None):
        raise InvalidError("erase: give ids, or one key")
    for each in ids:
        check_utf8("id", each)  # dead letters have ids that no topic accepts, such as an empty one
    keys: dict[bytes, dict[int, set[int]]] = {} if key is None else {key: {}}
    return EventMatcher(Deletions(by_id={each: {} for each in ids}, by_key=keys))


def check_trimmed(
    context: Context, archive: Archive, generation: int, starts: Mapping[str, int]
) -> None:
    """Raises ``UnavailableError`` if a range under way may hold what the topic has trimmed.

    No file of it can be searched yet. Only a trim past the archive makes such a range. What a chain
    or another generation is reading is in the files that it reads.
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
    search: tuple[EventMatcher, list[str]],
) -> dict[Place, FoundEvent]:
    """Step 1 in one generation: finds what is below the end of each source partition.

    ``search`` is what to find, and a list that gets files which cannot be searched.
    """
    found: dict[Place, FoundEvent] = {}
    begun = {partition: () for partition, end in ends.items() if end != 0}
    clean = clean_files(context, archive, generation, begun, search[0])
    for partition, end in ends.items():
        own = line_of(context, archive.pipeline(generation), partition)
        if own is not None and end != 0:
            reader = _Searched(archive, generation, partition, clean)
            places = _search_again(context, reader, end, search)
            found |= {(own[0], offset): each for offset, each in places.items()}
    return found


@dataclass(frozen=True, slots=True)
class _Searched:
    """A source partition of a generation, with the files in which tasks have found nothing."""

    archive: Archive
    generation: int
    partition: str
    clean: Collection[FileEntry]


def _search_again(
    context: Context,
    searched: _Searched,
    end: int | None,
    search: tuple[EventMatcher, list[str]],
) -> dict[int, FoundEvent]:
    """Returns what was found in one source partition, by offset; retries if files change."""
    archive, generation, partition = searched.archive, searched.generation, searched.partition
    reader = ArchiveFiles(store_at(context, archive.store), archive.making(generation))
    pipeline = archive.pipeline(generation)
    for attempt in range(_SEARCHES):
        found: dict[int, FoundEvent] = {}
        for manifest, file in counting_files(context, pipeline, partition):
            is_above = end is not None and file.first_offset >= end
            if file.kind == "sidecar" or is_above or file in searched.clean:
                continue
            try:
                found |= _search_file(reader, manifest, file, search)
            except CorruptError:
                is_last = attempt == _SEARCHES - 1
                if is_last or not is_changing(context, archive, generation, partition, file):
                    raise
                finish_rewrites(context, archive, generation)  # of one that crashed half-way
                context.clock.sleep(context.random.random() * 0.05)
                break
        else:
            break
    return {offset: each for offset, each in found.items() if end is None or offset < end}


def _search_file(
    reader: ArchiveFiles,
    manifest: Manifest,
    file: FileEntry,
    search: tuple[EventMatcher, list[str]],
) -> dict[int, FoundEvent]:
    sought, unseen = search
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
    sought: EventMatcher,
    number: int,
    is_wanted: Callable[[Line], bool] = lambda _: True,
) -> dict[Place, FoundEvent]:
    """Searches files that were set aside; uses negative offsets, as theirs are other events'."""
    found: dict[Place, FoundEvent] = {}
    lines = aside_lines(context, archive)

    def holds(key: str) -> bool:
        return is_wanted(lines.get(key, UNKNOWN_LINE))

    for key, batch in AsideFiles(store_at(context, archive.store), archive, holds).batches():
        for row in sought.rows(batch):
            place = (lines.get(key, UNKNOWN_LINE), -1 - number - len(found))
            found[place] = FoundEvent(_id(batch, row), time_ms_of(batch, row))
    return found


def _id(batch: pa.RecordBatch, row: int) -> str | None:
    column = own_column(batch, "id")
    value = None if column is None else column[row].as_py()
    return None if value is None else str(value)
