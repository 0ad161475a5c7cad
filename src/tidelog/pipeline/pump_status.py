"""The status of a pump: progress, lag and failures, by source partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.connectors.source import Bounds, Source, SourcePartition
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import TidelogError
from tidelog.model import layout
from tidelog.model.partition_rows import decode_row
from tidelog.model.pipeline import Intent, NamedPipeline, Totals
from tidelog.pipeline.endpoints import source_at
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.source_partitions import track

__all__ = ["PumpPartition", "PumpStatus", "read_pump_status"]


@dataclass(frozen=True, slots=True)
class PumpPartition:
    """The progress of a pump in one source partition."""

    partition: str
    position: str
    end: str | None  # None: the source does not say, or was not read
    lag: int | None  # waiting events, if the source can count them
    events: int  # read so far
    totals: Totals
    intent_ms: int | None  # since when a range is in progress
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class PumpStatus:
    """The status of a pump, or of another named pipeline."""

    named: NamedPipeline
    partitions: tuple[PumpPartition, ...]
    error: str  # why its source or its driver fails; empty: no known failure
    read_ms: int

    @property
    def lag(self) -> int | None:
        """Returns how many events wait in total, if the source can count them."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def events(self) -> int:
        """Returns how many events were read."""
        return sum(each.events for each in self.partitions)

    @property
    def left_out(self) -> int:
        """Returns how many events were skipped because they were erased from the target."""
        return sum(each.totals.left_out for each in self.partitions)

    @property
    def last_commit_ms(self) -> int | None:
        """When something was last committed; None: never."""
        return max((each.totals.committed_ms for each in self.partitions), default=0) or None


def read_pump_status(context: Context, named: NamedPipeline, *, source: bool = True) -> PumpStatus:
    """Returns how a pump does now; without ``source`` what its rows say, and no source is asked.

    A source that cannot be reached leaves what the rows say too, and is the ``error``.
    """
    error = ""
    opened: Source | None = None
    bounds: Mapping[SourcePartition, Bounds] = {}
    if source:
        try:
            opened = source_at(context, named.source)
            track(context, named.incarnation, opened)
            bounds = opened.bounds(opened.partitions())
        except TidelogError as exc:
            error = f"its source cannot be reached: {exc}"
    failures = read_failures(context, named.incarnation)
    if not error and failures:
        name, failure = next(iter(failures.items()))
        error = f"{name or 'its source'}: {failure.message}"
    known = {each.text for each in bounds} | set(read_partitions(context, named.incarnation))
    found = tuple(_partition(context, named, each, opened, bounds) for each in sorted(known))
    return PumpStatus(named, found, error, context.clock.now_ms())


def _partition(
    context: Context,
    named: NamedPipeline,
    name: str,
    source: Source | None,
    bounds: Mapping[SourcePartition, Bounds],
) -> PumpPartition:
    progress = read_progress(context, named.incarnation, name)
    held = bounds.get(SourcePartition.named(name))
    position = progress.position if progress else (held.first if held else "")
    row = context.catalog.get(layout.pipeline_partition(named.incarnation, name), "intent")
    intent = decode_row(row.value, Intent, f"intent of `{name}`") if row else None
    return PumpPartition(
        name,
        position,
        held.end if held else None,
        source.count(position, held.end) if source and held else None,
        progress.ordinal if progress else 0,
        progress.totals if progress else Totals(),
        intent.began_ms if intent else None,
        progress is not None,
    )
