"""What a pipeline is made of: a source, a sink, and workers that run tasks between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelog.errors import TidelogError
from tidelog.sinks.base import Sink, Written
from tidelog.sources.base import Range, Source, SourcePartition

__all__ = ["Outcome", "Pipeline", "Produced", "Task", "Workers"]


@dataclass(frozen=True, slots=True)
class Produced:
    """What a task made of its range, in staging."""

    end: str  # the end that was reached
    read: int
    staged: Written


@dataclass(frozen=True)
class Task:
    """A range to do, with all that is needed to do it anywhere; picklable."""

    source: Source
    sink: Sink
    range: Range
    staging: str

    def run(self) -> Produced:
        """Read the range, and stage what comes of it. Nothing of it is visible yet."""
        writer = self.sink.writer(self.range.partition.text, self.staging)
        end, read = self.range.start, 0
        for chunk in self.source.read(self.range):
            if chunk.batch.num_rows:
                writer.write(chunk.batch)
                read += chunk.batch.num_rows
            end = chunk.position
        return Produced(end, read, writer.close())


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
    incarnation: str
    source: Source
    sink: Sink
    workers: Workers
