"""A pipeline: a source, a sink, and workers; and what one cycle of it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.connectors.sink import Sink
from tidelog.connectors.source import (
    Source,
    SourcePartition,
)
from tidelog.errors import (
    TidelogError,
)
from tidelog.model.pipeline import (
    Aside,
    Manifest,
)
from tidelog.pipeline.tasks import NO_ERASED_ROWS, ErasedRows, Workers

__all__ = [
    "CycleReport",
    "Pipeline",
]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, ready to run."""

    name: str
    id: str  # part of its rows and manifests; never reused
    source: Source
    sink: Sink
    workers: Workers
    transform: str = ""
    rate: float | None = None  # events per second over all tasks
    gate: Callable[[], None] = lambda: None  # raises if no head may be created or thawed now
    start: str = "earliest"  # or latest: where partitions begin that existed at creation
    lists: bool = True  # its first driver stores the list of partitions with their ends
    erased: Callable[[str], ErasedRows] = lambda _: NO_ERASED_ROWS  # of a source partition, now
    title: str = ""  # for people who look at Spark's UI
    # Also reads what its source archive got later, in gaps that this pipeline has passed.
    goes_back: bool = False

    @property
    def heading(self) -> str:
        """Returns its title, or its name if it has none."""
        return self.title or self.name


@dataclass
class CycleReport:
    """What one cycle did."""

    committed: dict[SourcePartition, Manifest] = field(default_factory=dict)
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)
    withdrawn: set[SourcePartition] = field(default_factory=set)  # by errors; to be planned again
    # Ended, or begun again, by a person's decision.
    ended: set[SourcePartition] = field(default_factory=set)
    aside: list[Aside] = field(default_factory=list)  # ranges that the catalog lost
    claimed_elsewhere: set[SourcePartition] = field(default_factory=set)  # by another driver
    earlier: int = 0  # events of ranges before those in ``committed``

    @property
    def events(self) -> int:
        """Returns how many events of the source its ranges cover."""
        return self.earlier + sum(manifest.read for manifest in self.committed.values())

    def add(self, later: CycleReport) -> None:
        """Adds what the same cycle did after that."""
        again = self.committed.keys() & later.committed.keys()
        self.earlier += later.earlier + sum(self.committed[each].read for each in again)
        self.committed.update(later.committed)
        self.errors.update(later.errors)
        self.aside += later.aside
        self.withdrawn |= later.withdrawn
        self.ended |= later.ended
        self.claimed_elsewhere |= later.claimed_elsewhere
