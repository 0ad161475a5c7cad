"""Dead letters that were tried again: what counts after that, as the catalog tells it.

A replay is a pipeline of its own beside a generation. It goes through the dead letters of a source
partition in passes, and its positions are ``<pass>:<offset>``. Each of its commits covers a
*stretch* of offsets: the dead-letter files that begin in it no longer count, since the commit's
manifest says what became of their events: data files, and a dead-letter file for those that still
nobody takes. A later pass may cover that one again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    Manifests,
    read_commits,
    read_manifests,
    read_progress,
)
from tidelog.errors import InvalidError
from tidelog.model.pipeline import FileEntry, Manifest

__all__ = [
    "Effect",
    "ReplayPosition",
    "ReplayedRange",
    "Replays",
    "counting_files",
    "dead_files",
    "generation_pipeline",
    "replay_effect",
    "replay_pipeline",
]

_REPLAYS = ".dead"


class ReplayPosition(NamedTuple):
    """How far a replay has come: in which pass, and up to which offset."""

    number: int = 0
    offset: int = 0

    @property
    def text(self) -> str:
        """As a position of the replay's rows."""
        return f"{self.number}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> ReplayPosition:
        number, colon, offset = text.partition(":")
        if not (colon and number.isascii() and number.isdecimal() and offset.isdecimal()):
            raise InvalidError(f"position `{text}`: is none of a replay: give <pass>:<offset>")
        return cls(int(number), int(offset))


class ReplayedRange(NamedTuple):
    """Offsets ``[start, end)`` that were tried again at once."""

    start: int
    end: int

    @classmethod
    def between(cls, start: str, end: str) -> ReplayedRange:
        """What lies between two positions: a pass that was given up is not gone on with."""
        one, other = ReplayPosition.parse(start), ReplayPosition.parse(end)
        return cls(one.offset if one.number == other.number else 0, other.offset)

    def holds(self, file: FileEntry) -> bool:
        """Whether a file of dead letters begins in it."""
        return self.start <= file.first_offset < self.end


class Effect(NamedTuple):
    """What replays have done in a source partition."""

    replayed: int = 0  # events that are no dead letters any more
    files: int = 0  # that they made, replaced ones too
    bytes: int = 0


def replay_pipeline(pipeline: str) -> str:
    """What names the rows and manifests of the replays of a generation."""
    return f"{pipeline}{_REPLAYS}"


def generation_pipeline(pipeline: str) -> str:
    """The pipeline of the generation whose dead letters this one replays; else itself."""
    return pipeline.removesuffix(_REPLAYS)


class Replays:
    """The replays of one source partition, as its rows were when they were read."""

    def __init__(self, context: Context, pipeline: str, partition: str) -> None:
        self._context = context
        self._pipeline = pipeline
        self._partition = partition
        self._manifests = Manifests(context, replay_pipeline(pipeline), partition)
        self.commits = list(read_commits(context, replay_pipeline(pipeline), partition))
        self._stretches = [ReplayedRange.between(each.start, each.end) for each in self.commits]

    def replaces(self, file: FileEntry, after: int = -1) -> bool:
        """Whether a replay later than number ``after`` has replaced a file of dead letters."""
        if file.kind != "dead":
            return False
        return any(stretch.holds(file) for stretch in self._stretches[after + 1 :])

    def counting(self, offset: int | None = None) -> Iterator[tuple[Manifest, FileEntry]]:
        """The files that they made and that count; of replays of one offset, if one is given."""
        for number, committed in enumerate(self.commits):
            stretch = self._stretches[number]
            if offset is None or stretch.start <= offset < stretch.end:
                manifest = self._manifests.of(committed)
                for file in manifest.files:
                    if not self.replaces(file, number):
                        yield manifest, file

    def dead(self) -> Iterator[tuple[FileEntry, bool]]:
        """Every file of dead letters that ever was, and whether it counts; in no order."""
        manifests = Manifests(self._context, self._pipeline, self._partition)
        for committed in read_commits(self._context, self._pipeline, self._partition):
            if committed.dead:
                for file in manifests.of(committed).files:
                    if file.kind == "dead":
                        yield file, not self.replaces(file)
        for number, committed in enumerate(self.commits):
            if committed.dead:
                for file in self._manifests.of(committed).files:
                    if file.kind == "dead":
                        yield file, not self.replaces(file, number)


def counting_files(
    context: Context, pipeline: str, partition: str
) -> Iterator[tuple[Manifest, FileEntry]]:
    """The files that count in a source partition: each archived event stands in one of them.

    Range by range, without dead letters that were replaced; then what replays have made.
    """
    replays = Replays(context, pipeline, partition)
    for manifest in read_manifests(context, pipeline, partition):
        for file in manifest.files:
            if not replays.replaces(file):
                yield manifest, file
    yield from replays.counting()


def dead_files(context: Context, pipeline: str, partition: str) -> list[list[FileEntry]]:
    """The files of dead letters that count, by their offsets; those that overlap are together."""
    found = [file for file, counts in Replays(context, pipeline, partition).dead() if counts]
    groups: list[list[FileEntry]] = []
    end = 0
    for file in sorted(found, key=lambda file: file.first_offset):
        if groups and file.first_offset < end:
            groups[-1].append(file)
        else:
            groups.append([file])
        end = max(end, file.last_offset + 1)
    return groups


def replay_effect(context: Context, pipeline: str, partition: str) -> Effect:
    """What to add to the totals of a generation's head, from one row."""
    head = read_progress(context, replay_pipeline(pipeline), partition)
    if head is None:
        return Effect()
    return Effect(head.ordinal - head.totals.dead, head.totals.files, head.totals.bytes)
