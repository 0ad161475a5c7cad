"""How the drivers of a pipeline share its source partitions, and requests to flush.

A driver is a member (``coordination.ownership``) of its pipeline. Each source partition has one
owner at a time, in its ``head``, with an epoch that grows with each owner; every write of the cycle
expects the head. So a driver that was considered dead fails at its next write.

A driver that follows has a fair share of the partitions that the source lists. It claims what is
free, or whose owner is dead, until it has its share. It releases what is beyond its share, but
only partitions without a range in progress, so no work is done twice. Nothing is taken from a
living driver. A run that drains has no share: it claims all that is free, and the others keep
theirs (``Member.once``). A source that tracks its partitions has one driver
(``TrackedPartitions``).

A driver that must be alone changes the fence first (``take_over``): all others stop at their next
heartbeat, and their partitions are free.

A flush request is a new version of one row, which a following driver reads in every cycle: it then
writes waiting events, whatever its policy. Requests that arrive together count as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from tidelog.catalog.base import ABSENT, Put
from tidelog.clock import looks
from tidelog.connectors.source import (
    SourcePartition,
    SourceRange,
    TrackingSource,
    bounds_apart,
    waits,
)
from tidelog.context import Context
from tidelog.coordination.ownership import Membership, fair_share, raise_fence
from tidelog.coordination.pipeline_rows import read_intent, read_progress
from tidelog.errors import (
    ConflictError,
    FencedError,
    TidelogError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.model import layout
from tidelog.model.pipeline import Progress
from tidelog.model.topic import decode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import PipelineFailures
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.source_partitions import Lineage

__all__ = [
    "DriverMembers",
    "DriverShare",
    "flush_version",
    "request_flush",
    "stop_drivers",
    "wait_until_done",
]

_MEMBERS_S = 0.4  # between looks at the members, however short the cycles are


class DriverMembers(Membership):
    """One driver's view of the drivers of its pipeline."""

    def __init__(self, context: Context, pipeline: str, *, once: bool = False) -> None:
        super().__init__(context, layout.pipeline_members(pipeline), f"pipeline `{pipeline}`")
        self.once = once
        self.living: list[str] = [self.id]  # as last seen
        self._pipeline = pipeline
        self._looked_s: float | None = None

    def take_over(self) -> None:
        """Stops all other drivers at their next heartbeat, and joins."""
        raise_fence(self._context, self._members, self._what)
        self.join()

    def beat(self) -> None:
        """Sends a heartbeat. Raises ``FencedError`` if all drivers must stop."""
        if not self._beat():
            raise FencedError(f"{self._what}: its drivers were stopped: stop this one")

    def look(self) -> bool:
        """Reads which drivers are alive, unless that was a moment ago; returns if that changed."""
        now_s = self._context.clock.monotonic_s()
        if self._looked_s is not None and now_s - self._looked_s < _MEMBERS_S:
            return False
        before, self.living, self._looked_s = self.living, self.alive(), now_s
        return before != self.living

    def is_alone(self) -> bool:
        """Returns whether no other driver is alive."""
        return self.living == [self.id]

    def is_heard(self, owner: str) -> bool:
        """Returns whether another driver was certainly alive since this one began."""
        return owner in self._heard

    def share(self, count: int) -> int:
        """Returns how many of ``count`` source partitions this driver should have."""
        if self.once:
            return count
        return fair_share(self.id, [each for each in self.living if each not in self._once], count)

    def in_turn(self, partitions: Sequence[SourcePartition]) -> list[SourcePartition]:
        """Returns partitions in the order in which to claim them; other drivers begin elsewhere."""
        living = self.living
        first = living.index(self.id) * len(partitions) // len(living) if self.id in living else 0
        return [*partitions[first:], *partitions[:first]]

    def may_claim(self, owner: str) -> bool:
        """Returns whether a source partition of this owner may be claimed: it is free or dead."""
        if owner in ("", self.id):
            return True
        # Before the row is read: a slow read must not count as silence.
        began_s = self._context.clock.monotonic_s()
        return owner not in self.living and self._is_member_dead(owner, began_s)

    def owner_of(self, partition: SourcePartition) -> str:
        """Returns the owner of a source partition; empty if it is free or not begun."""
        where = layout.pipeline_partition(self._pipeline, partition.text)
        row = self._context.catalog.get(where, "head")
        return decode_row(row.value, Progress, f"head `{where}`").owner if row else ""


class DriverShare:
    """The source partitions of one driver: which it has, should claim, and leaves to others."""

    def __init__(
        self,
        context: Context,
        pipeline: Pipeline,
        members: DriverMembers,
        failures: PipelineFailures,
    ) -> None:
        self.listed: set[SourcePartition] = set()  # by the source, as last seen
        self.theirs: dict[SourcePartition, str] = {}  # others' partitions, with their owners
        self._ends: dict[SourcePartition, str] = {}  # of such partitions, when first seen
        self._context = context
        self._pipeline = pipeline
        self._members = members
        self._failures = failures

    def look(
        self,
        cycle: Cycle,
        partitions: Sequence[SourcePartition],
        accept_loss: bool,
        errors: dict[SourcePartition, TidelogError],
    ) -> list[SourcePartition]:
        """Releases what is beyond the share. Returns what this driver has, or should claim now.

        A partition whose parents are not read to their end is not claimed. Adds one that cannot be
        looked at to ``errors``.
        """
        self.listed, self.theirs = set(partitions), {}
        share = self._share(cycle, partitions)
        self._release(cycle, share)
        held = [each for each in partitions if cycle.has_claimed(each)]
        if len(held) >= share:
            return held
        others = [each for each in self._members.in_turn(partitions) if not cycle.has_claimed(each)]
        lineage = Lineage(self._context, self._pipeline, cycle, others)
        free: list[SourcePartition] = []
        # Those that fail come last, so that no other one waits for them.
        for partition in sorted(others, key=self._failures.is_failing):
            if len(held) + len(free) >= share:
                break
            try:
                if self._is_free(partition) and lineage.is_ready(partition, accept_loss):
                    free.append(partition)
            except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
                errors[partition] = unexpected(f"source partition `{partition.text}`", exc)
        return [*held, *free]

    def _share(self, cycle: Cycle, partitions: Sequence[SourcePartition]) -> int:
        """Returns how many this driver should have: a fair share, or all or none of tracked ones.

        Who has the first one has all. A driver that does not see the files has none, and keeps no
        other one from them.
        """
        if not isinstance(self._pipeline.source, TrackingSource):
            return self._members.share(len(partitions))
        first = min(partitions, default=None)
        if first is None or cycle.has_claimed(first) or self._is_free(first):
            return len(partitions)
        others = (each for each in partitions if not cycle.has_claimed(each))
        self.theirs = dict.fromkeys(others, self.theirs[first])
        return 0

    def leave(self, cycle: Cycle) -> None:
        """Releases all partitions, and leaves the drivers. What fails ends with the lease."""
        for partition in (*cycle.partitions(), *cycle.maybe_claimed()):
            with contextlib.suppress(TidelogError):
                cycle.release(partition)
        with contextlib.suppress(TidelogError):
            self._members.leave()

    def lost(self, partition: SourcePartition) -> None:
        """Notes that another driver was faster; the next look shows which one."""
        self.theirs[partition] = ""

    def is_theirs(self, partition: SourcePartition) -> bool:
        """Returns whether another living driver has a source partition."""
        return not (self._members.is_alone() or self._is_free(partition))

    def is_rest_alive(self) -> bool:
        """Returns whether the drivers of all other partitions are certainly alive."""
        return all(self._members.is_heard(owner) for owner in self.theirs.values())

    def is_rest_done(self) -> bool:
        """Returns whether other drivers have read their partitions to the ends first seen here.

        Two runs that wait for each other both end then.
        """
        new = [each for each in self.theirs if each not in self._ends]
        self._ends |= {
            each: held.end for each, held in bounds_apart(self._pipeline.source, new, {}).items()
        }
        return all(map(self._is_read, self.theirs))

    def _is_read(self, partition: SourcePartition) -> bool:
        pipeline, end = self._pipeline, self._ends.get(partition)
        head = read_progress(self._context, pipeline.id, partition.text)
        if head is None or end is None:
            return False
        if read_intent(self._context, pipeline.id, partition.text) is not None:
            return False
        return bool(head.ended) or not waits(
            pipeline.source, SourceRange(partition, head.position, end)
        )

    def _is_free(self, partition: SourcePartition) -> bool:
        """Returns whether it may be claimed; a claim decides that again."""
        if self._members.is_alone():
            return True
        owner = self._members.owner_of(partition)
        if self._members.may_claim(owner):
            return True
        self.theirs[partition] = owner
        return False

    def _release(self, cycle: Cycle, share: int) -> None:
        """Releases partitions that the source does not list, then those beyond the share.

        One with a range in progress stays, so that no work is done twice.
        """
        held = sorted(cycle.partitions())
        idle = [each for each in held if not cycle.has_range(each)]
        away = [each for each in idle if each not in self.listed]
        excess = sum(each in self.listed for each in held) - share
        beyond = [each for each in reversed(idle) if each in self.listed][: max(0, excess)]
        for partition in (*away, *beyond, *cycle.maybe_claimed()):
            with contextlib.suppress(TidelogError):  # it stays, and the next look tries again
                cycle.release(partition)
                self._failures.released(partition)


def stop_drivers(context: Context, pipeline: str) -> None:
    """Stops all drivers of a pipeline at their next heartbeat, idle ones too."""
    raise_fence(context, layout.pipeline_members(pipeline), f"pipeline `{pipeline}`")


_LOOK_S = 0.5

Waits = Callable[[SourceRange], bool]  # whether a range has anything left to do


def request_flush(context: Context, pipeline: str) -> None:
    """Asks the following driver of a pipeline to flush at its next look."""
    where = layout.pipeline_members(pipeline)
    row = context.catalog.get(where, layout.FLUSH_ROW)
    change = Put(layout.FLUSH_ROW, b"", expect=row.version if row else ABSENT)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # then another process has asked
        context.catalog.write(where, change, write_id=context.ids.new())


def flush_version(context: Context, pipeline: str) -> str:
    """Returns a version that changes with each request."""
    row = context.catalog.get(layout.pipeline_members(pipeline), layout.FLUSH_ROW)
    return row.version if row else ""


def wait_until_done(
    context: Context, pipeline: str, ends: Mapping[str, str], waits: Waits, timeout_s: float
) -> list[str]:
    """Waits until every source partition is committed up to its end. Returns those that are not."""
    behind: list[str] = []
    for _ in looks(context.clock, timeout_s, _LOOK_S):
        behind = []
        for partition, end in ends.items():
            head, source = (
                read_progress(context, pipeline, partition),
                SourcePartition.named(partition),
            )
            if head is not None and head.ended:
                continue  # a person decided that no more of it is read
            if head is None or waits(SourceRange(source, head.position, end)):
                behind.append(partition)
        if not behind:
            break
    return behind
