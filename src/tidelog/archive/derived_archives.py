"""Finds archives that hold events of a topic or another archive, or what a transform made of them.

A position is an incarnation, a source partition and an offset. An earlier topic with the same name
is another sequence, with other events at the same offsets. If the pipeline numbers events itself
(Kinesis, Scylla), a number means the same only in the generations of one archive, and in archives
that read this archive as their source. ``held_offsets`` and ``partitions_of`` are the only ways
from an offset to a file that an erasure changes.

**Output** is what a transform or a parser made of events, in place of the events themselves. Such
output is never processed again, and no value of a topic replaces it. It is in all files of a
generation with a transform, or with a parser that changes values. A later generation may have some
of it too: ranges that a backfill carried over (``Manifest.as_is``). So does an archive that reads
such an archive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.archive.coverage import Interval, are_offsets
from tidelog.codec.parsers import FolderSettings, changes_values, open_parser
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import (
    is_detached,
    list_archives,
    read_partitions,
    read_progress,
)
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.topic import Topic

__all__ = [
    "UNKNOWN_ORIGIN",
    "Copy",
    "LiveOutputs",
    "Origin",
    "OutputSpans",
    "archives_above",
    "archives_of",
    "copies_of",
    "held_offsets",
    "is_of_topic",
    "is_same_event",
    "may_hold_output",
    "origin_of",
    "output_above",
    "output_of",
    "output_spans",
    "partitions_of",
    "reachable_archives_of",
    "refuse_circle",
    "refuse_output",
    "sources_of",
    "with_later_ones",
]


class Origin(NamedTuple):
    """Where events come from: a source partition, in one incarnation."""

    partition: str
    incarnation: str  # empty: the source has none, so it may be any

    def may_be(self, other: Origin) -> bool:
        """Returns whether an offset may mean the same event in both."""
        known = self.incarnation and other.incarnation
        same = not known or self.incarnation == other.incarnation
        return same and self.partition == other.partition

    def is_surely(self, other: Origin) -> bool:
        """Returns whether an offset certainly means the same event in both."""
        return self == other and bool(self.incarnation)


UNKNOWN_ORIGIN = Origin("", "")
"""Of a file that no row names: it may be any."""


class Copy(NamedTuple):
    """An archive that may hold events of another one, or that archive itself."""

    archive: Archive
    made: frozenset[int]  # generations whose events may come from that archive
    same_numbers: bool  # whether events numbered by pipelines have the same numbers in both


def archives_of(context: Context, topic: Topic) -> list[tuple[Archive, int]]:
    """Returns the generations of archives whose events come from a topic, also indirectly.

    An archive comes before those made of it, and its live generation before one that is filled from
    it: what was removed from the first is not in what the second reads later.
    """
    archives = [archive for archive in list_archives(context) if archive.state == "ready"]
    named = {archive.name: archive for archive in archives}

    def steps(url: str, above: frozenset[str]) -> int | None:
        """Returns how many archives are between a source and the topic; None if unrelated."""
        address = parse_address(url)
        if address.scheme == "topic":
            return 0 if address.path == topic.name else None
        found = named.get(address.path)
        if address.scheme != "archive" or address.path in above or found is None:
            return None
        before = [steps(each, above | {address.path}) for each in _sources(found, found.newest)]
        return max((each + 1 for each in before if each is not None), default=None)

    found = [
        (max(ways), generation != archive.generation, archive, generation)
        for archive in archives
        for generation in sorted(archive.formats)
        if (
            ways := [
                way
                for url in _sources(archive, generation)
                if (way := steps(url, frozenset())) is not None
            ]
        )
    ]
    ordered = sorted(found, key=lambda each: each[:2])
    return [(archive, generation) for _, _, archive, generation in ordered]


def reachable_archives_of(context: Context, topic: Topic) -> list[tuple[Archive, int]]:
    """Returns those of ``archives_of`` that this home may erase from."""
    found = archives_of(context, topic)
    return [each for each in found if not is_detached(context, each[0])]


def refuse_circle(context: Context, name: str, source: str) -> None:
    """Raises if the source of an archive is made of the archive itself, also indirectly.

    Neither of two such archives could be deleted before the other.
    """
    named = {each.name: each for each in list_archives(context)}
    first = _archive_in(source) if source else None
    left, known = {first} - {None, name}, {name}
    while left:
        above = named.get(left.pop() or "")
        if above is None or above.name in known:
            continue
        known.add(above.name)
        sources = {_archive_in(url) for url in _sources(above, above.newest)} - {None}
        if name in sources:
            raise InvalidError(
                f"archive `{name}`: source `{source}` was itself made from it, by archive "
                f"`{above.name}`: give the source of that one, or create another archive from "
                f"`{source}`"
            )
        left |= sources


def copies_of(context: Context, archive: Archive) -> list[Copy]:
    """Returns an archive, then those made of it, also indirectly.

    Each comes after all those that it was made of.
    """
    every = [each for each in list_archives(context) if each.state == "ready"]
    left = [each for each in every if each.incarnation != archive.incarnation]
    own = next((each for each in every if each.incarnation == archive.incarnation), archive)
    found = [Copy(own, frozenset(own.formats), same_numbers=True)]
    while True:
        made = [copy for each in left if (copy := _copy(each, found)) is not None]
        # One that is made of another waits for it, unless they are made of each other.
        ready = [copy for copy in made if not any(_reads(copy.archive, o) for o in made)] or made
        if not ready:
            return found
        found += ready
        left = [each for each in left if each.name not in {copy.archive.name for copy in ready}]


def archives_above(
    context: Context, archive: Archive, generation: int
) -> Iterator[tuple[Archive, Copy]]:
    """Yields the archives that a generation was made of, also indirectly, with their relation.

    The first one is the archive itself: its generations are filled from each other.
    """
    yield archive, Copy(archive, frozenset(archive.formats), same_numbers=True)
    left = {_archive_in(url) for url in _sources(archive, generation)} - {None}
    if not left:
        return
    named = {each.name: each for each in list_archives(context) if each.state == "ready"}
    known = {archive.name}
    while left:
        above = named.get(left.pop() or "")
        if above is not None and above.name not in known:
            known.add(above.name)
            left |= {_archive_in(url) for url in _sources(above, above.newest)} - {None}
            for copy in copies_of(context, above):
                if copy.archive.incarnation == archive.incarnation:
                    yield above, copy


def _copy(archive: Archive, above: Iterable[Copy]) -> Copy | None:
    """Returns an archive's relation to the known ones, if it was made of one of them."""
    names = {each.archive.name for each in above}
    made = frozenset(
        number
        for number in archive.formats
        if any(_archive_in(url) in names for url in _sources(archive, number))
    )
    if not made:
        return None
    source = _archive_in(archive.source)
    same = any(each.same_numbers for each in above if each.archive.name == source)
    return Copy(archive, made, same_numbers=same)


def _reads(archive: Archive, other: Copy) -> bool:
    """Returns whether an archive was made of another one."""
    names = {_archive_in(url) for url in _sources(archive, archive.newest)}
    return archive.name != other.archive.name and other.archive.name in names


def held_offsets(
    context: Context,
    copy: Copy,
    generation: int,
    wanted: Mapping[Origin, Collection[int]],
) -> dict[str, list[int]]:
    """Returns the offsets of the wanted events in a generation, by its source partitions.

    A source without incarnations is the same one if a generation was made of it.
    """
    found: dict[str, set[int]] = {}
    pipeline = copy.archive.pipeline(generation)
    for partition in read_partitions(context, pipeline):
        own = origin_of(context, pipeline, partition)
        if own is not None:
            for origin, offsets in wanted.items():
                if is_same_event(copy, generation, origin, own):
                    found.setdefault(partition, set()).update(offsets)
    return {partition: sorted(offsets) for partition, offsets in found.items()}


def is_same_event(copy: Copy, generation: int, origin: Origin, own: tuple[Origin, bool]) -> bool:
    """Returns whether an offset of an origin is the same event here; ``own`` is ``origin_of``."""
    if not copy.same_numbers and not own[1]:
        return False
    return origin.may_be(own[0]) and (generation in copy.made or origin.is_surely(own[0]))


def is_of_topic(origin: Origin, topic: Topic) -> bool:
    """Returns whether events of an origin may be of a topic; an unknown origin may be any."""
    if not origin.partition:
        return True
    name = origin.partition.rpartition("/")[0]
    return name == topic.name and origin.may_be(Origin(origin.partition, topic.incarnation))


def origin_of(context: Context, pipeline: str, partition: str) -> tuple[Origin, bool] | None:
    """Returns what a generation holds under a source partition; None if it has not begun.

    Also returns whether its offsets are the source's own, not numbers of the pipeline.
    """
    head = read_progress(context, pipeline, partition)
    if head is None:
        return None
    begin = head.position if head.begin is None else head.begin.position
    return Origin(partition, head.incarnation), are_offsets(begin, head.position)


def with_later_ones(
    look: Callable[[], Iterable[tuple[Archive, int]]],
) -> Iterator[tuple[Archive, int]]:
    """Yields generations, and those that began while the first ones were processed.

    One that begins in between may have been filled from a file before an erasure rewrote it.
    """
    known: set[tuple[str, int]] = set()
    while True:
        new = [each for each in look() if (each[0].incarnation, each[1]) not in known]
        if not new:
            return
        for archive, generation in new:
            known.add((archive.incarnation, generation))
            yield archive, generation


def partitions_of(context: Context, pipeline: str, topic: Topic) -> dict[str, int]:
    """Returns the source partitions of a generation with events of a topic, and their numbers.

    An earlier topic with this name is another one, with other events at the same offsets.
    """
    found: dict[str, int] = {}
    for partition in read_partitions(context, pipeline):
        name, _, number = partition.rpartition("/")
        if name == topic.name and number.isascii() and number.isdecimal():
            own = origin_of(context, pipeline, partition)
            if own is None or own[0].may_be(Origin(partition, topic.incarnation)):
                found[partition] = int(number)
    return found


def sources_of(archive: Archive) -> set[str]:
    """Returns what the events of all generations of an archive may come from."""
    return _sources(archive, archive.newest)


def _archive_in(url: str) -> str | None:
    """Returns the name of the archive that a source is, if it is one."""
    address = parse_address(url)
    return address.path if address.scheme == "archive" else None


def _sources(archive: Archive, generation: int) -> set[str]:
    """Returns what the events of a generation may come from.

    It reads its own source, the archive's source, and the files of the generation that was live
    when it was built: an earlier one, which may be dropped since. All that were promoted hold the
    same events, whatever each was read from (``coverage``).
    """
    building = [number for number, state in archive.states.items() if state == "building"]
    last = max([generation, *(number for number in archive.formats if number not in building)])
    given = {
        number: written_as.source for number, written_as in archive.formats.items()
    } | archive.former
    before = {url for number, url in given.items() if url and number <= last}
    return {archive.source, *before}


def output_of(written_as: ArchiveFormat) -> str:
    """Returns what made the values in files: transform, parser, or nothing: the events' own."""
    if written_as.transform:
        return "transform"
    if not written_as.parser:
        return ""
    parser = open_parser(written_as.parser, FolderSettings(**written_as.layout))
    return "parser" if changes_values(parser) else ""


def may_hold_output(written_as: ArchiveFormat) -> bool:
    """Returns whether files may hold output: so may those of a parser that cannot be opened."""
    try:
        return bool(output_of(written_as))
    except TidelogError:
        return True


def refuse_output(archive: Archive, building: ArchiveFormat) -> None:
    """Raises ``InvalidError`` if the parser of a generation would change output again."""
    if output_of(building) == "parser":
        made = output_of(archive.format_of()) or "transform or parser of an earlier generation"
        raise InvalidError(
            f"archive `{archive.name}`: its source no longer has these events, and its files hold "
            f"what the {made} made of them: a parser that changes values cannot read that; "
            "backfill from a backup with --from archive:NAME, or with another parser"
        )


@dataclass(frozen=True, slots=True)
class OutputSpans:
    """The ranges of one source partition whose files hold output."""

    all: bool = False
    starts: frozenset[str] = frozenset()  # of its commits
    offsets: tuple[Interval, ...] = ()  # the same, if positions are offsets

    def holds(self, start: str) -> bool:
        """Returns whether the range at a position holds output."""
        if self.all or start in self.starts:
            return True
        return are_offsets(start) and any(a <= int(start) < b for a, b in self.offsets)

    def until_border(self, start: str, end: str) -> str:
        """Returns up to where all offsets from one on hold output, or none do."""
        if self.all or not are_offsets(start, end):
            return end
        borders = [each for span in self.offsets for each in span if each > int(start)]
        return str(min([int(end), *borders]))


class LiveOutputs:
    """Which ranges of an archive's live generation hold output, as when each partition was met."""

    def __init__(self, context: Context, archive: Archive) -> None:
        self._context = context
        self._archive = archive
        self._spans: dict[str, OutputSpans] = {}

    def of(self, partition: str) -> OutputSpans:
        """Returns those of a source partition."""
        if partition not in self._spans:
            self._spans[partition] = output_spans(self._context, self._archive, partition)
        return self._spans[partition]


def output_spans(context: Context, archive: Archive, partition: str) -> OutputSpans:
    """Returns which ranges of the live generation hold output.

    Reads manifests only if some events were carried over from another generation.
    """
    if output_of(archive.format_of()):
        return OutputSpans(all=True)
    head = read_progress(context, archive.pipeline(), partition)
    if head is None or not head.totals.filled:
        return OutputSpans()
    manifests = read_manifests(context, archive.pipeline(), partition)
    ranges = [(each.start, each.end) for each in manifests if each.as_is]
    offsets = [(int(a), int(b)) for a, b in ranges if are_offsets(a, b)]
    return OutputSpans(starts=frozenset(start for start, _ in ranges), offsets=tuple(offsets))


def output_above(context: Context, archive: Archive, generation: int) -> str:
    """Returns an archive that a generation is made of and that holds output, or held some.

    Returns an empty text if there is none.
    """
    for above, _ in archives_above(context, archive, generation):
        is_own = above.incarnation == archive.incarnation  # whose ranges say it themselves
        if not is_own and (above.had_output or any(map(may_hold_output, above.formats.values()))):
            return above.name
    return ""
