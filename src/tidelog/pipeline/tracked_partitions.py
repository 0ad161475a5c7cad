"""Begins the partitions of a source that recognizes them by what was read, such as files.

Such a source names a partition when it first sees its file, and finds the file again by what
drivers have read of it. So two drivers with different knowledge could give one file two names, and
archive its rows twice. These rules exclude that:

1. One driver at a time has all partitions of such a source: who has the first one
   (``DriverShare``).
2. A driver begins a new partition only if it has all known ones that the source lists, and no range
   of any is in progress. So no other driver reads the same file at that time.
3. The list of partitions has a version. A driver reads it before it looks at the source, and adds a
   partition only to that version. So a second driver that added one meanwhile is noticed.
4. A driver that takes known partitions from another one changes the version, and then looks again.
   So the other one can begin nothing by what it knew before.
5. A partition is listed together with what identifies it. A driver that finds it there without a
   head knows which file it is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from tidelog.catalog.base import Expectation
from tidelog.connectors.source import Bounds, SourcePartition, TrackingSource
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_listed
from tidelog.errors import ConflictError, TidelogError
from tidelog.model.pipeline import Begin, ListedPartition, Progress
from tidelog.pipeline.base import Pipeline, claimed_error
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import contain_errors
from tidelog.pipeline.source_partitions import list_at_version, renew_listing, track

__all__ = ["TrackedPartitions"]


class TrackedPartitions:
    """What one driver knows about such a source; of any other source, nothing."""

    def __init__(self, context: Context, pipeline: Pipeline, cycle: Cycle) -> None:
        self.heads: dict[SourcePartition, Progress] | None = None  # as last read
        self._context = context
        self._pipeline = pipeline
        self._cycle = cycle
        self._known: set[SourcePartition] = set()
        self._listed: set[SourcePartition] = set()  # by the source
        self._held: Mapping[SourcePartition, Bounds] = {}
        self._version: Expectation = None
        if isinstance(pipeline.source, TrackingSource):
            cycle.list_partition = self._add

    def pass_on(self, is_alone: bool) -> None:
        """Passes to the source what was read; other drivers change their heads at any time."""
        cycle, others = self._cycle, self.heads if is_alone else {}
        known = {each: head for each, head in (others or {}).items() if not cycle.has_claimed(each)}
        heads = None if self.heads is None else {**known, **cycle.heads()}
        tracked = track(self._context, self._pipeline.id, self._pipeline.source, heads)
        self.heads, self._known, self._version = tracked.heads, tracked.known, tracked.version

    def take(self, own: list[SourcePartition], errors: dict[SourcePartition, TidelogError]) -> bool:
        """Takes known partitions before anything new begins; returns whether to look again."""
        heads, cycle = self.heads or {}, self._cycle
        known = [each for each in own if each in heads and not cycle.is_ready(each)]
        for partition in known:
            with contain_errors(partition, {}, errors):
                cycle.claim(partition, Begin("", "earliest"))  # its head exists
        if known:
            renew_listing(self._context, self._pipeline.id)
        return bool(known)

    def renew(self, held: Container[SourcePartition]) -> None:
        """Stores what now identifies partitions, before their ends are stored as seen."""
        source = self._pipeline.source
        if isinstance(source, TrackingSource):
            for partition, note in source.renewed().items():
                if partition in held and self._cycle.is_ready(partition):
                    self._cycle.renew(partition, note)

    def note(self, listed: list[SourcePartition], held: Mapping[SourcePartition, Bounds]) -> None:
        """Remembers what the source lists, and what its partitions hold."""
        self._listed, self._held = set(listed), held

    def _add(self, partition: SourcePartition) -> None:
        """Lists a new partition (rules 2, 3 and 5). Raises ``ClaimedError`` if it must wait."""
        if partition in self._known:
            return
        cycle, name = self._cycle, self._pipeline.name
        wait = any(not cycle.is_ready(each) for each in self._known & self._listed)
        if wait or any(map(cycle.has_range, cycle.partitions())):
            raise claimed_error(name, partition.text)
        held = self._held[partition]
        listed = ListedPartition(
            partition.text,
            incarnation=held.incarnation,
            seen_ms=self._context.clock.now_ms(),
            note=held.identity,
        )
        try:
            pipeline = self._pipeline.id
            self._version = list_at_version(self._context, pipeline, listed, self._version)
        except ConflictError:
            found = read_listed(self._context, self._pipeline.id).get(partition.text)
            if found is None or found.incarnation != listed.incarnation:
                raise claimed_error(name, partition.text) from None
            # This driver has listed it itself: in its first look, or a reply was lost.
        self._known.add(partition)
