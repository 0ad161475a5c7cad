"""What a pipeline is made of: a source, a sink, and workers that run tasks between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidelog.clock import Clock, SystemClock
from tidelog.errors import TidelogError, UnavailableError
from tidelog.model.pipeline import Aside, Intent, Manifest, Progress
from tidelog.sinks.base import RefusedError, Sink, Written
from tidelog.sources.base import (
    Changing,
    Chunk,
    Counted,
    Range,
    RangeReader,
    Source,
    SourcePartition,
)

__all__ = [
    "Carried",
    "CarriedReader",
    "CycleReport",
    "FrozenError",
    "Outcome",
    "Pipeline",
    "Produced",
    "Task",
    "Track",
    "Workers",
    "frozen",
]


@dataclass(frozen=True, slots=True)
class Produced:
    """What a task made of its range, in staging."""

    end: str  # the end that was reached
    read: int
    staged: Written
    note: bytes = b""  # what the source wants to find again


@dataclass(frozen=True, slots=True)
class Carried:
    """What a pipeline must know of a range that is read from another generation's files."""

    generation: int
    as_is: bool  # they hold what a transform returned: no other one gets it
    counted: Counted | None = None  # of ranges whose events the pipeline numbers itself
    note: bytes = b""  # what a source that tracks knows the source partition by


@dataclass(frozen=True, slots=True)
class CarriedReader:
    """A range of another generation's files; pickles."""

    reader: RangeReader
    carried: Carried

    @property
    def range(self) -> Range:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return isinstance(self.reader, Changing) and self.reader.is_changing

    def read(self) -> Iterator[Chunk]:
        return self.reader.read()


@dataclass
class CycleReport:
    """What one cycle did."""

    committed: dict[SourcePartition, Manifest] = field(default_factory=dict)
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)
    withdrawn: set[SourcePartition] = field(default_factory=set)  # by errors; to plan again
    decided: set[SourcePartition] = field(default_factory=set)  # ended or begun again by a person
    aside: list[Aside] = field(default_factory=list)  # ranges that the catalog had forgotten

    @property
    def events(self) -> int:
        return sum(manifest.read for manifest in self.committed.values())


@dataclass
class Track:
    """A source partition as its rows were last seen or written."""

    partition: SourcePartition
    where: str
    head: Progress
    head_version: str
    intent: Intent | None = None
    intent_version: str = ""
    late: Sequence[str] = ()  # manifests that a restored catalog may have forgotten
    carried: Carried | None = None  # of the range under way, where it is from another generation


@dataclass(frozen=True)
class Task:
    """A range to do, with all that is needed to do it anywhere; picklable."""

    reader: RangeReader
    sink: Sink
    staging: str
    transform: str = ""  # module:function, from DataFrame to DataFrame; only Spark can do it
    rate: float | None = None  # events a second that it may read

    @property
    def range(self) -> Range:
        return self.reader.range

    def run(self) -> Produced:
        """Read the range, and stage what comes of it. Nothing of it is visible yet."""
        writer = self.sink.writer(self.range.partition.text, self.staging)
        end, read, notes = self.range.start, 0, []
        for chunk in self.chunks():
            notes.append(chunk.note)
            if chunk.batch.num_rows:
                try:
                    writer.write(chunk.batch)
                except RefusedError as exc:
                    exc.context["read"] = read
                    raise
                read += chunk.batch.num_rows
            end = chunk.position
        return Produced(end, read, writer.close(), b"".join(notes))

    def chunks(self, clock: Clock | None = None) -> Iterator[Chunk]:
        """The range, not faster than it may be read."""
        clock = clock or SystemClock()
        began_s, read = clock.monotonic_s(), 0
        for chunk in self.reader.read():
            yield chunk
            read += chunk.batch.num_rows
            if self.rate is not None:
                clock.sleep(read / self.rate - (clock.monotonic_s() - began_s))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended: with what it produced, or with an error of its partition."""

    partition: SourcePartition
    produced: Produced | None = None
    error: TidelogError | None = None


class Workers(Protocol):
    """Run tasks, here or on a cluster."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Each task's outcome, as they come. An error of one does not stop the others."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """One pipeline, ready to run."""

    name: str
    id: str  # names its rows and manifests; no other pipeline ever has it
    source: Source
    sink: Sink
    workers: Workers
    transform: str = ""
    rate: float | None = None  # events a second over all tasks
    gate: Callable[[], None] = lambda: None  # raises where no head may be created or thawed now
    start: str = "earliest"  # or latest: where partitions begin that its creation saw


class FrozenError(UnavailableError):
    """The partition's head is frozen while another generation is promoted; it may resume after."""


def frozen(pipeline: str, partition: str) -> FrozenError:
    """The error for a partition whose generation another one is about to replace."""
    return FrozenError(
        f"source partition `{partition}` of pipeline `{pipeline}`: is frozen while another "
        "generation is promoted: wait, it resumes after that",
        partition=partition,
    )
