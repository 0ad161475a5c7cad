"""Source partitions of a pipeline: which exist at creation, their ends, and their order.

**At creation.** Creating an archive lists the source partitions with their ends; for any other
pipeline, its first driver does. A partition that appears later begins at its own first event,
whatever start a driver has, so no new event is skipped. A crash half-way leaves partitions
unlisted, which then begin at their first event too. An end is listed with what identifies it for
its source: the incarnation and, for files, a mark of everything before it. A file with the same
name or first line may be another one.

**Ends that drivers saw.** A file or a topic may vanish before its end is read. So a row with the
end is put as soon as rows wait in a source partition, then at most once a minute while it grows,
and when a driver ends. A driver that starts after the file vanished reports the loss until a person
accepts it (``gaps``); a killed driver may have seen more. What the creation listed counts as seen,
unless the pipeline begins at these ends. For topics, only those of a pattern need this: any other
is an error once it is deleted.

**Order.** Where partitions split and merge, events of one key continue in another partition. So a
partition waits until each of its parents is read to its end, by any driver, or is deleted and was
never begun. A parent that was begun and is deleted before its end is a loss, which a person must
accept and which its head records as a gap.

**Sources that recognize partitions by what was read**, such as files (``TrackedPartitions``). Such
a source names a partition when it first sees its file, and finds the file again by what drivers
have read of it. So two drivers with different knowledge could give one file two names, and archive
its rows twice. These rules exclude that:

1. One driver at a time has all partitions of such a source: who has the first one
   (``DriverShare``).
2. A driver begins a new partition only if it has all known ones that the source lists, and no range
   of any is in progress. So no other driver reads the same file at that time.
3. The list of partitions has a version. A driver reads it before it looks at the source, and adds a
   partition only to that version. So a second driver that added one meanwhile is noticed.
4. A driver that claims known partitions from another one changes the version, and then looks again.
   So the other one can begin nothing by what it knew before.
5. A partition is listed together with what identifies it. A driver that finds it there without a
   head knows which file it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from tidelog.catalog.base import ABSENT, Expectation, Put, prefix_end
from tidelog.catalog.update import Decision, Rows, update
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import (
    Bounds,
    BranchingSource,
    KnownPartition,
    Parent,
    Source,
    SourcePartition,
    TrackingSource,
    VanishedError,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    list_partitions,
    read_archive,
    read_listed,
    read_progress,
)
from tidelog.errors import ConflictError, TidelogError
from tidelog.model import layout, limits
from tidelog.model.address import parse_address
from tidelog.model.pipeline import (
    Begin,
    BeginReason,
    Gap,
    ListedPartition,
    Progress,
    SeenEnd,
    offsets_between,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import contain_errors
from tidelog.pipeline.gaps import LostError, vanished_end
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.source_state import claimed_elsewhere_error

__all__ = [
    "Beginnings",
    "Lineage",
    "SeenEnds",
    "TrackedPartitions",
    "TrackingState",
    "copy_seen",
    "list_at_version",
    "list_seen",
    "listing_version",
    "look_at_source",
    "parents_of",
    "read_known",
    "read_seen",
    "renew_listing",
    "track",
    "tracking_pipeline",
]


def look_at_source(context: Context, pipeline: str, source: Source) -> None:
    """Lists all partitions of a source, also those of other drivers.

    Skips one that cannot be reached now, so it begins at its first event.
    """
    version = listing_version(context, pipeline) if isinstance(source, TrackingSource) else None
    bounds = bounds_apart(source, source.partitions(), {})
    if version is None:
        list_seen(context, pipeline, bounds)
        return
    with contextlib.suppress(ConflictError):  # then another driver has listed some
        for partition, held in bounds.items():
            listed = _listed(context, partition, held)
            version = list_at_version(context, pipeline, listed, version)


def listing_version(context: Context, pipeline: str) -> Expectation:
    """Returns the version of a pipeline's list of partitions; ``ABSENT`` if it has none yet."""
    row = context.catalog.get(layout.pipeline_members(pipeline), layout.LISTING_ROW)
    return ABSENT if row is None else row.version


def list_at_version(
    context: Context, pipeline: str, listed: ListedPartition, version: Expectation
) -> Expectation:
    """Adds a partition to a pipeline's list; returns the version that the list has then.

    Raises ``ConflictError`` if the list has another version, or has this partition.
    """
    write_id = context.ids.new()
    changes = (
        Put(layout.LISTING_ROW, b"", version),
        Put(layout.partition_row(listed.partition), encode_row(listed), ABSENT),
    )
    context.catalog.write(layout.pipeline_members(pipeline), *changes, write_id=write_id)
    return write_id


def renew_listing(context: Context, pipeline: str) -> None:
    """Gives a pipeline's list another version."""
    where, row = layout.pipeline_members(pipeline), layout.LISTING_ROW
    what = f"list of partitions of pipeline `{pipeline}`"
    update(context, where, [row], lambda rows: Decision(None, [rows.put(row, b"")]), what)


class TrackingState(NamedTuple):
    """What a source that tracks its partitions was passed."""

    heads: dict[SourcePartition, Progress]
    known: set[SourcePartition]  # also those without a head
    version: Expectation  # of the list of partitions, no newer than what is known


def track(
    context: Context,
    pipeline: str,
    source: Source,
    heads: Mapping[SourcePartition, Progress] | None = None,
    *,
    is_from_first: bool = False,
) -> TrackingState:
    """Passes what the pipeline has read to a source that tracks its partitions.

    Returns what it passed; ``heads`` need not be read. Without any, it also passes the ends that
    drivers have seen, which a source remembers. If the pipeline begins at the first rows
    (``is_from_first``), those that its creation saw count as seen.
    """
    if not isinstance(source, TrackingSource):
        return TrackingState({}, set(), None)
    version = listing_version(context, pipeline)
    found = dict(heads or {})
    known = read_known(context, pipeline, found, is_from_first=is_from_first)
    seen = read_seen(context, pipeline) if heads is None else {}
    source.track({each: replace(one, seen=seen.get(each, one.seen)) for each, one in known.items()})
    return TrackingState(found, set(known), version)


def read_known(
    context: Context,
    pipeline: str,
    heads: dict[SourcePartition, Progress],
    *,
    is_from_first: bool = False,
) -> dict[SourcePartition, KnownPartition]:
    """Returns what a pipeline knows about its source partitions, also those it only listed.

    Reads heads that are not in ``heads``, and adds them.
    """
    known: dict[SourcePartition, KnownPartition] = {}
    for name, listed in read_listed(context, pipeline).items():
        partition = SourcePartition.named(name)
        head = heads.get(partition) or read_progress(context, pipeline, name)
        if head is not None:
            heads[partition] = head
        elif listed.end or listed.incarnation:  # nothing of it was read
            has_events = offsets_between(listed.first, listed.end) != 0
            seen = listed.end if is_from_first and has_events else ""
            known[partition] = KnownPartition("0", listed.incarnation, listed.note, seen)
    for partition, head in heads.items():
        lost = vanished_end(head)
        known[partition] = KnownPartition(head.position, head.incarnation, head.note, lost=lost)
    return known


def list_seen(context: Context, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
    """Lists partitions with their ends. One that is already listed does not change."""
    listed = (_listed(context, each, held) for each, held in bounds.items())
    list_partitions(context, pipeline, listed)


def _listed(context: Context, partition: SourcePartition, held: Bounds) -> ListedPartition:
    now_ms = context.clock.now_ms()
    listed = ListedPartition(partition.text, held.end, held.incarnation, now_ms, held.note)
    return msgspec.structs.replace(listed, first=held.first)


_EVERY_S = 60.0


def read_seen(context: Context, pipeline: str) -> dict[SourcePartition, str]:
    """Returns the ends that drivers of a pipeline have seen, by source partition."""
    where, rows = layout.pipeline_members(pipeline), layout.SEEN_ROWS
    found = context.catalog.scan(where, rows, prefix_end(rows))
    seen = [decode_row(row.value, SeenEnd, f"row `{row.row}`") for row in found]
    return {SourcePartition.named(each.partition): each.end for each in seen}


def copy_seen(context: Context, old: str, new: str) -> None:
    """Copies the ends that drivers of a pipeline have seen to another pipeline."""
    _put(context, new, read_seen(context, old))


def _put(context: Context, pipeline: str, ends: Mapping[SourcePartition, str]) -> None:
    parts = list(ends.items())
    for first in range(0, len(parts), limits.CHANGES_MAX):
        _raise(context, pipeline, parts[first : first + limits.CHANGES_MAX])


def _raise(context: Context, pipeline: str, ends: Sequence[tuple[SourcePartition, str]]) -> None:
    """Puts ends that are beyond the stored ones. A repeated packet never lowers one."""
    where = layout.pipeline_members(pipeline)
    names = {partition: layout.seen_row(partition.text) for partition, _ in ends}

    def decide(rows: Rows) -> Decision[None]:
        changes = []
        for partition, end in ends:
            row = rows[names[partition]]
            known = None if row is None else decode_row(row.value, SeenEnd, f"row `{row.row}`")
            if known is None or int(known.end) < int(end):
                seen = encode_row(SeenEnd(partition.text, end))
                changes.append(rows.put(names[partition], seen))
        return Decision(None, changes)

    update(context, where, list(names.values()), decide, f"ends of files of pipeline `{pipeline}`")


@dataclass
class SeenEnds:
    """The ends that one driver stores."""

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
        """Puts the ends of partitions with waiting rows, if they are due."""
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
        """Returns the stored ends, of all earlier drivers and of this one."""
        if self._stored is None:
            found = read_seen(self.context, self.pipeline)
            self._stored = {each: int(end) for each, end in found.items()}
        return self._stored


@dataclass
class Beginnings:
    """Where partitions without a head begin."""

    context: Context
    pipeline: Pipeline
    start: str  # earliest or latest
    _listed: dict[str, ListedPartition] | None = None  # partitions, once known

    def find(self, partition: SourcePartition, held: Bounds) -> tuple[Begin, str, bytes]:
        """Returns where a partition begins, its incarnation and what identifies it for its source.

        That is its own first event, unless the same partition existed when the pipeline was
        created: only then does ``latest`` mean the end it had. If it was created again since, and
        events of the one before are lost, it begins as that one. So the loss is noticed.
        """
        now_ms = self.context.clock.now_ms()
        seen = self._at_creation().get(partition.text)
        if seen is not None and seen.end:
            is_same = seen.incarnation == held.incarnation
            if self.start == "latest" and is_same:
                position = self.pipeline.source.cut(seen.end, seen.end, 0)
                return Begin(position, "latest", now_ms), held.incarnation, seen.note
            is_other = not is_same and seen.incarnation and held.incarnation
            if self.start != "latest" and is_other and offsets_between(seen.first, seen.end):
                return Begin(seen.first, held.begins, now_ms), seen.incarnation, seen.note
        # Everything there is still to be read.
        note = held.identity if held.begins == "earliest" else held.note
        return Begin(held.first, held.begins, now_ms), held.incarnation, note

    def find_vanished(self, partition: SourcePartition) -> tuple[Begin, str, bytes]:
        """Returns where a partition began that is gone, its incarnation and what identifies it."""
        now_ms = self.context.clock.now_ms()
        seen = self._at_creation().get(partition.text) or ListedPartition(partition.text)
        if self.start == "latest" and seen.end:
            return Begin(seen.end, "latest", now_ms), seen.incarnation, seen.note
        first = seen.first or "0"
        reason: BeginReason = "retention" if int(first) else "earliest"
        return Begin(first, reason, now_ms), seen.incarnation, seen.note

    def with_listed(self, seen: Mapping[SourcePartition, int]) -> dict[SourcePartition, int]:
        """Returns the ends that drivers have seen, and those that the pipeline's creation saw."""
        ends = dict(seen)
        for each in self._at_creation().values():
            partition = SourcePartition.named(each.partition)
            ends[partition] = max(int(each.end or 0), ends.get(partition, 0))
        return ends

    def vanished_error(self, partition: SourcePartition, end: int) -> VanishedError | None:
        """Returns the error of a vanished partition that held more than was read.

        Returns None if everything was read, or if a person has decided.
        """
        head = read_progress(self.context, self.pipeline.id, partition.text)
        if head is not None and (head.ended or int(vanished_end(head) or 0) >= end):
            return None
        position = self.find_vanished(partition)[0].position if head is None else head.position
        left = end - int(position)
        if left <= 0:
            return None
        return VanishedError(
            f"source partition `{partition.text}`: its topic was deleted before its last {left} "
            f"offsets were read, from {position} to {end}: run with --accept-loss to record that "
            "they are lost",
            end=str(end),
        )

    def _at_creation(self) -> dict[str, ListedPartition]:
        """Returns the partitions that existed at the pipeline's creation, or at this first look."""
        if self._listed is None:
            found = read_listed(self.context, self.pipeline.id)
            if not found and self.pipeline.lists:
                look_at_source(self.context, self.pipeline.id, self.pipeline.source)
                found = read_listed(self.context, self.pipeline.id)
            self._listed = found
        return self._listed


class Lineage:
    """The parents of partitions that are about to be claimed, from one look at the source."""

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
        """Returns whether it may begin.

        Raises ``LostError`` if a parent vanished before its end.
        """
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
            f"gone from the source, and was read up to {position} only: what came after it is "
            "lost; run with --accept-loss to continue",
            partition=partition.text,
            parent=parent.partition.text,
            start=position,
        )

    def _record(self, parent: Parent, position: str) -> None:
        """Puts the gap after a vanished parent into its head, once.

        The source no longer has it, so no driver reads it and no other process writes that head.
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
        """Returns how far it is committed, by this or another driver."""
        if self._cycle.is_ready(partition):
            return self._cycle.position(partition)
        head = read_progress(self._context, self._pipeline.id, partition.text)
        return None if head is None else head.position


def tracking_pipeline(context: Context, pipeline: str, source: str) -> str:
    """Returns the pipeline that reads the files which a source was made of; empty: none.

    That is ``pipeline``, which reads the source, or that of the archive at the top of its chain.
    """
    known: set[str] = set()
    while not isinstance(source_at(context, source), TrackingSource):
        address = parse_address(source)
        if address.scheme != "archive" or address.path in known:
            return ""
        known.add(address.path)
        above = read_archive(context, address.path)
        pipeline, source = above.pipeline(), above.source
    return pipeline


class TrackedPartitions:
    """What one driver knows about such a source; of any other source, nothing."""

    def __init__(self, context: Context, pipeline: Pipeline, cycle: Cycle, start: str) -> None:
        self._is_from_first = start != "latest"
        self.heads: dict[SourcePartition, Progress] | None = None  # as last read
        self._context = context
        self._pipeline = pipeline
        self._cycle = cycle
        self._known: set[SourcePartition] = set()
        self._listed: set[SourcePartition] = set()  # by the source
        self._held: Mapping[SourcePartition, Bounds] = {}
        self._version: Expectation = None
        is_tracking = isinstance(pipeline.source, TrackingSource)
        self.list_new = self._add if is_tracking else None  # for ``Cycle.claim``

    def pass_on(self, is_alone: bool) -> None:
        """Passes to the source what was read; other drivers change their heads at any time."""
        cycle, others = self._cycle, self.heads if is_alone else {}
        known = {each: head for each, head in (others or {}).items() if not cycle.has_claimed(each)}
        heads = None if self.heads is None else {**known, **cycle.heads()}
        tracked = track(
            self._context,
            self._pipeline.id,
            self._pipeline.source,
            heads,
            is_from_first=self._is_from_first,
        )
        self.heads, self._known, self._version = tracked.heads, tracked.known, tracked.version

    def claim_known(
        self, own: list[SourcePartition], errors: dict[SourcePartition, TidelogError]
    ) -> bool:
        """Claims known partitions before anything new begins; returns whether to look again."""
        heads, cycle = self.heads or {}, self._cycle
        known = [each for each in own if each in heads and not cycle.is_ready(each)]
        for partition in known:
            with contain_errors(partition, {}, errors):
                cycle.claim_known(partition)
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
            raise claimed_elsewhere_error(name, partition.text)
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
                raise claimed_elsewhere_error(name, partition.text) from None
            # This driver has listed it itself: in its first look, or a reply was lost.
        self._known.add(partition)


def parents_of(
    source: Source, partitions: Sequence[SourcePartition]
) -> dict[SourcePartition, list[Parent]]:
    """Returns the partitions that each one follows; in most sources none."""
    return source.parents(partitions) if partitions and isinstance(source, BranchingSource) else {}
