"""Which source partitions may be begun: one that follows others waits until they are done.

Where a source's partitions are split and merged, events of one key go on in another partition. So
a partition is held back until each of its parents is read to its end, by whichever driver has it,
or is not held any more and was never begun. A parent that was begun and is gone before its end has
taken events with it: that is a loss, which a person must accept, and its head records as a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidelog.catalog.base import Put
from tidelog.log.archives import read_progress
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import Gap, Progress
from tidelog.model.run import decode_row, encode_row
from tidelog.pipeline.base import Pipeline
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.losses import LostError
from tidelog.sources.base import Parent, SourcePartition, parents_of

__all__ = ["Lineage"]


class Lineage:
    """The parents of partitions that are about to be adopted, at one look at the source."""

    def __init__(
        self, log: Log, pipeline: Pipeline, cycle: Cycle, partitions: Sequence[SourcePartition]
    ) -> None:
        self._log = log
        self._pipeline = pipeline
        self._cycle = cycle
        self._parents = parents_of(pipeline.source, partitions)

    def is_ready(self, partition: SourcePartition, accept_loss: bool) -> bool:
        """Whether it may be begun, or is. ``LostError`` where a parent is gone before its end."""
        parents = self._parents.get(partition, [])
        if not parents or self._position(partition) is not None:
            return True
        return all(self._is_done(partition, parent, accept_loss) for parent in parents)

    def _is_done(self, partition: SourcePartition, parent: Parent, accept_loss: bool) -> bool:
        position = self._position(parent.partition)
        if position is None:
            return not parent.held
        if not self._pipeline.source.before(position, parent.end):
            return True
        if parent.held:
            return False
        if accept_loss:
            self._record(parent, position)
            return True
        raise LostError(
            f"source partition `{partition.text}`: follows `{parent.partition.text}`, which is "
            f"gone from the source, and was read up to {position} only: what came behind it is "
            "lost; run with --accept-loss to go on",
            partition=partition.text,
            parent=parent.partition.text,
            start=position,
        )

    def _record(self, parent: Parent, position: str) -> None:
        """Put the gap behind a parent that vanished into its head, once.

        The source no longer has it, so no driver reads it: no other process writes that head.
        """
        where = layout.pipeline_partition(self._pipeline.id, parent.partition.text)
        row = self._log.catalog.get(where, "head")
        if row is None:
            return
        head = decode_row(row.value, Progress, f"head of `{parent.partition.text}`")
        gap = Gap(position, parent.end, "parent")
        if gap in head.gaps:
            return
        now_ms = self._log.clock.now_ms()
        totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
        after = msgspec.structs.replace(head, gaps=(*head.gaps, gap), totals=totals)
        put = Put("head", encode_row(after), expect=row.version)
        self._log.catalog.write(where, put, write_id=self._log.ids.new())

    def _position(self, partition: SourcePartition) -> str | None:
        """How far it is committed, by this driver or by another one."""
        if self._cycle.adopted(partition):
            return self._cycle.position(partition)
        head = read_progress(self._log, self._pipeline.id, partition.text)
        return None if head is None else head.position
