"""Listing the source partitions that a pipeline's creation sees, with the ends that they have.

An archive's creation does it, and the first driver of any other pipeline. One that appears after
that begins at its own first event, with any start of a driver: nothing that came since is skipped.
Killed half-way, it leaves partitions unlisted, which then begin at their first event too.

An end is listed together with what its source knows it by: the incarnation, and in files a mark of
all that is before it. A file of the same name, or with the same first line, may be another one.

Ends that a driver saw, kept in the catalog: a file or a topic may vanish before they are read.

A row is put as soon as rows wait in a source partition, then at most once a minute while it grows,
and when a driver ends. So a driver that starts after the file vanished reports the loss as the one
that saw it would, until a person accepts it (``losses``); one that was killed may have seen more.
Of topics only those of a pattern are kept: all others are an error as soon as they are gone.

Which source partitions may be begun: one that follows others waits until they are done.

Where a source's partitions are split and merged, events of one key go on in another partition. So
a partition is held back until each of its parents is read to its end, by whichever driver has it,
or is not held any more and was never begun. A parent that was begun and is gone before its end has
taken events with it: that is a loss, which a person must accept, and its head records as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tidelog.catalog.base import ABSENT, Put
from tidelog.connectors.source import (
    Bounds,
    KnownPartition,
    Parent,
    Source,
    SourcePartition,
    TrackingSource,
    VanishedError,
    bounds_apart,
    parents_of,
)
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_partitions, read_listed, read_progress
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.heads import RACE
from tidelog.model import layout, limits
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.pipeline import Gap, ListedPartition, Progress, SeenEnd
from tidelog.pipeline.base import Pipeline
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import LostError, vanished_end

__all__ = [
    "Lineage",
    "SeenEnds",
    "copy_seen",
    "list_seen",
    "look_at_source",
    "read_known",
    "read_seen",
    "track",
    "vanished_error",
]


def look_at_source(context: Context, pipeline: str, source: Source) -> None:
    """List all partitions of a source, also those of other shards.

    One that cannot be reached now is left out, so it begins at its first event.
    """
    list_seen(context, pipeline, bounds_apart(source, source.partitions(), {}))


def track(
    context: Context,
    pipeline: str,
    source: Source,
    heads: Mapping[SourcePartition, Progress] | None = None,
) -> dict[SourcePartition, Progress]:
    """Pass what the pipeline has read of its partitions to a source that tracks it.

    Returns the heads that it passed; ``heads`` are those that need not be read. Without any, it
    also passes the ends that drivers have seen, which a source remembers.
    """
    if not isinstance(source, TrackingSource):
        return {}
    found = dict(heads or {})
    known = read_known(context, pipeline, found)
    seen = read_seen(context, pipeline) if heads is None else {}
    source.track({each: replace(one, seen=seen.get(each, "")) for each, one in known.items()})
    return found


def read_known(
    context: Context, pipeline: str, heads: dict[SourcePartition, Progress]
) -> dict[SourcePartition, KnownPartition]:
    """Return what a pipeline knows of its source partitions, also of those that it only listed.

    Heads that are not in ``heads`` are read and put there.
    """
    known: dict[SourcePartition, KnownPartition] = {}
    for name, listed in read_listed(context, pipeline).items():
        partition = SourcePartition.named(name)
        head = heads.get(partition) or read_progress(context, pipeline, name)
        if head is not None:
            heads[partition] = head
        elif listed.end:  # nothing of it was read
            known[partition] = KnownPartition("0", listed.incarnation, listed.note)
    for partition, head in heads.items():
        lost = vanished_end(head)
        known[partition] = KnownPartition(head.position, head.incarnation, head.note, lost=lost)
    return known


def list_seen(context: Context, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
    """List partitions with their ends; one that is listed already keeps what it says."""
    now_ms = context.clock.now_ms()
    list_partitions(
        context,
        pipeline,
        (
            ListedPartition(each.text, held.end, held.incarnation, now_ms, held.note)
            for each, held in bounds.items()
        ),
    )


_EVERY_S = 60.0


def read_seen(context: Context, pipeline: str) -> dict[SourcePartition, str]:
    """Returns the ends that drivers of a pipeline have seen, by source partition."""
    where, rows = layout.pipeline_shards(pipeline), layout.SEEN_ROWS
    found = context.catalog.scan(where, rows, f"{rows}\uffff")
    seen = [decode_row(row.value, SeenEnd, f"row `{row.row}`") for row in found]
    return {SourcePartition.named(each.partition): each.end for each in seen}


def copy_seen(context: Context, old: str, new: str) -> None:
    """Let another pipeline know the ends that drivers of a pipeline have seen."""
    _put(context, new, read_seen(context, old))


def _put(context: Context, pipeline: str, ends: Mapping[SourcePartition, str]) -> None:
    parts = list(ends.items())
    for first in range(0, len(parts), limits.CHANGES_MAX):
        _raise(context, pipeline, parts[first : first + limits.CHANGES_MAX])


def _raise(context: Context, pipeline: str, ends: Sequence[tuple[SourcePartition, str]]) -> None:
    """Put ends that are further than the stored ones; a repeated packet lowers none."""
    where = layout.pipeline_shards(pipeline)
    for delay_s in RACE.delays_s(context.random):
        rows = []
        for partition, end in ends:
            row = context.catalog.get(where, layout.seen_row(partition.text))
            known = None if row is None else decode_row(row.value, SeenEnd, f"row `{row.row}`")
            if known is None or int(known.end) < int(end):
                seen = encode_row(SeenEnd(partition.text, end))
                expect = ABSENT if row is None else row.version
                rows.append(Put(layout.seen_row(partition.text), seen, expect=expect))
        if not rows:
            return
        try:
            context.catalog.write(where, *rows, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            context.clock.sleep(delay_s)
        else:
            return
    raise UnavailableError("ends of files: too many drivers at once: run the archive again")


@dataclass
class SeenEnds:
    """The ends that one driver keeps."""

    context: Context
    pipeline: str
    _stored: dict[SourcePartition, int] | None = None
    _due_s: dict[SourcePartition, float] = field(default_factory=dict)

    def keep(
        self,
        ends: Mapping[SourcePartition, str],
        positions: Mapping[SourcePartition, str],
        is_last: bool = False,
    ) -> None:
        """Put the ends of partitions in which rows wait, where that is due."""
        if self._stored is None and not ends:
            return
        self._stored = stored = self.stored()
        now_s = self.context.clock.monotonic_s()
        rows: dict[SourcePartition, str] = {}
        for partition, text in ends.items():
            end, read = int(text), int(positions.get(partition) or 0)
            known = stored.get(partition, 0)
            due = is_last or known <= read or now_s >= self._due_s.get(partition, now_s)
            if end > max(read, known) and due:
                rows[partition] = text
                stored[partition], self._due_s[partition] = end, now_s + _EVERY_S
        _put(self.context, self.pipeline, rows)

    def stored(self) -> dict[SourcePartition, int]:
        """Returns the ends that are kept, of all drivers up to now and of this one."""
        if self._stored is None:
            found = read_seen(self.context, self.pipeline)
            self._stored = {each: int(end) for each, end in found.items()}
        return self._stored


def vanished_error(
    context: Context, pipeline: str, partition: SourcePartition, end: int
) -> VanishedError | None:
    """Returns the error of a partition that is gone, where it was seen to hold more than was read.

    None if all was read, or if a person has decided what becomes of it.
    """
    head = read_progress(context, pipeline, partition.text)
    if head is None or head.ended or int(head.position) >= end:
        return None
    if int(vanished_end(head) or 0) >= end:
        return None
    left = end - int(head.position)
    return VanishedError(
        f"source partition `{partition.text}`: its topic was deleted before its last {left} "
        f"offsets were read, from {head.position} to {end}: run with --accept-loss to record that "
        "they are lost",
        end=str(end),
    )


class Lineage:
    """The parents of partitions that are about to be adopted, at one look at the source."""

    def __init__(
        self,
        context: Context,
        pipeline: Pipeline,
        cycle: Cycle,
        partitions: Sequence[SourcePartition],
    ) -> None:
        self._context = context
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
        row = self._context.catalog.get(where, "head")
        if row is None:
            return
        head = decode_row(row.value, Progress, f"head of `{parent.partition.text}`")
        gap = Gap(position, parent.end, "parent")
        if gap in head.gaps:
            return
        now_ms = self._context.clock.now_ms()
        totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
        after = msgspec.structs.replace(head, gaps=(*head.gaps, gap), totals=totals)
        put = Put("head", encode_row(after), expect=row.version)
        self._context.catalog.write(where, put, write_id=self._context.ids.new())

    def _position(self, partition: SourcePartition) -> str | None:
        """How far it is committed, by this driver or by another one."""
        if self._cycle.adopted(partition):
            return self._cycle.position(partition)
        head = read_progress(self._context, self._pipeline.id, partition.text)
        return None if head is None else head.position
