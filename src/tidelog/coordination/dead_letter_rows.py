"""Dead letters after replays: which files still count, by the rows of the catalog.

A replay is a pipeline of its own beside a generation. It goes through the dead letters of a source
partition in passes, and its positions are ``<pass>:<offset>``. Each of its commits covers a range
of offsets. The dead-letter files that begin in that range no longer count: the commit's manifest
says what became of their events. It lists data files, and a dead-letter file for those that failed
again. A later pass may cover that one again.
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
    """How far a replay has come: the pass and the offset."""

    number: int = 0
    offset: int = 0

    @property
    def text(self) -> str:
        """Returns it as a position in the replay's rows."""
        return f"{self.number}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> ReplayPosition:
        number, colon, offset = text.partition(":")
        if not (colon and number.isascii() and number.isdecimal() and offset.isdecimal()):
            raise InvalidError(f"position `{text}`: is none of a replay: give <pass>:<offset>")
        return cls(int(number), int(offset))


class ReplayedRange(NamedTuple):
    """Offsets ``[start, end)`` that one commit tried again."""

    start: int
    end: int

    @classmethod
    def between(cls, start: str, end: str) -> ReplayedRange:
        """Returns the offsets between two positions. A pass that was abandoned is not resumed."""
        one, other = ReplayPosition.parse(start), ReplayPosition.parse(end)
        return cls(one.offset if one.number == other.number else 0, other.offset)

    def holds(self, file: FileEntry) -> bool:
        """Returns whether a file of dead letters begins in it."""
        return self.start <= file.first_offset < self.end


class Effect(NamedTuple):
    """What replays have done in a source partition."""

    replayed: int = 0  # events that are no longer dead letters
    files: int = 0  # that they wrote, including replaced ones
    bytes: int = 0


def replay_pipeline(pipeline: str) -> str:
    """Returns the name of the rows and manifests of a generation's replays."""
    return f"{pipeline}{_REPLAYS}"


def generation_pipeline(pipeline: str) -> str:
    """Returns the generation's pipeline for a replay's; any other name unchanged."""
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
        """Returns whether a replay after number ``after`` has replaced a file of dead letters."""
        if file.kind != "dead":
            return False
        return any(stretch.holds(file) for stretch in self._stretches[after + 1 :])

    def counting(self, offset: int | None = None) -> Iterator[tuple[Manifest, FileEntry]]:
        """Yields the files that replays wrote and that count; optionally for one offset."""
        for number, committed in enumerate(self.commits):
            stretch = self._stretches[number]
            if offset is None or stretch.start <= offset < stretch.end:
                manifest = self._manifests.of(committed)
                for file in manifest.files:
                    if not self.replaces(file, number):
                        yield manifest, file

    def dead(self) -> Iterator[tuple[FileEntry, bool]]:
        """Yields every file of dead letters that ever existed, and whether it counts; unordered."""
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
    """Yields the files that count in a source partition: each archived event is in one of them.

    Range by range, without dead letters that were replaced; then what replays have written.
    """
    replays = Replays(context, pipeline, partition)
    for manifest in read_manifests(context, pipeline, partition):
        for file in manifest.files:
            if not replays.replaces(file):
                yield manifest, file
    yield from replays.counting()


def dead_files(context: Context, pipeline: str, partition: str) -> list[list[FileEntry]]:
    """Returns the files of dead letters that count, by offset; overlapping ones are together."""
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
    """Returns what to add to the totals of a generation's head, from one row."""
    head = read_progress(context, replay_pipeline(pipeline), partition)
    if head is None:
        return Effect()
    return Effect(head.ordinal - head.totals.dead, head.totals.files, head.totals.bytes)
