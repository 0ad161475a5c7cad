"""Ownership of a pipeline's shards: one driver at a time, the others wait as standbys.

The epoch fences: it goes into the heads of all source partitions, and every write there expects
them. So it must be higher than that of every earlier driver of a source partition, also under
another number of shards: a driver uses an epoch above those of all shards the pipeline ever had. A
row contains the number of shards too. While a driver with another number lives, a new one waits as
a standby, unless its caller asks it to take over; then the other one is fenced at its next write.
If both begin at once and see each other, both release and try again later. No safety depends on
that.

The shard of a source partition follows from its own name, so it does not move when others appear.
Numbered partitions of a topic take turns.

A flush request is a new version of one row, which a following driver reads in every cycle: it then
writes waiting events, whatever its policy. Requests that arrive together count as one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping

from tidelog.catalog.base import ABSENT, Put
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.ownership import Ownership, Silence
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.partition_rows import HeldRow, decode_row

__all__ = [
    "PipelineShard",
    "flush_version",
    "request_flush",
    "share_of",
    "wait_until_done",
]

_APART_S = 1.0  # longest wait of two drivers that have seen each other


class PipelineShard(Ownership):
    """One driver's view of one shard. ``beside`` allows it while other shards are driven."""

    retakes = False  # its cycle keeps the epoch it began with

    def __init__(
        self,
        context: Context,
        incarnation: str,
        number: int,
        shards: int = 1,
        *,
        beside: bool = False,
    ) -> None:
        row = layout.shard_row(number, shards)
        super().__init__(context, layout.pipeline_shards(incarnation), row, f"shard `{row}`")
        self._folder = row.rpartition("/")[0]
        self._beside = beside
        self._highest = 0  # epoch of all shards, as last seen
        self._others: dict[str, Silence] = {}

    def try_take(self, force: bool = False) -> bool:
        """Like ``Ownership.try_take``, if no driver with another number of shards lives."""
        alone = force or self._beside
        if not self._look() and not alone:
            return False
        if not super().try_take(force):
            return False
        if self._look() or alone:
            return True
        self.release()
        self._context.clock.sleep(self._context.random.random() * _APART_S)
        return False

    def _next_epoch(self, epoch: int) -> int:
        return max(epoch, self._highest) + 1

    def _look(self) -> bool:
        """Reads all shard rows: the highest epoch.

        Returns whether other numbers of shards are free.
        """
        free = True
        for row in self._context.catalog.scan(self._where, "shard/", "shard0"):
            lease = decode_row(row.value, HeldRow, f"shard `{row.row}`")
            self._highest = max(self._highest, lease.epoch)
            if lease.owner and row.row.rpartition("/")[0] != self._folder:
                silence = self._others.setdefault(row.row, Silence(self._context))
                free = free and silence.is_over(lease.mark, row.version)
        return free


def share_of(partition: SourcePartition, shards: int) -> int:
    """Returns the shard of a source partition."""
    number = partition.number_in(partition.topic)
    text = partition.text if number is None else partition.topic
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8]) + (number or 0)) % shards


_LOOK_S = 0.5

Waits = Callable[[SourceRange], bool]  # whether a range has anything left to do


def request_flush(context: Context, pipeline: str) -> None:
    """Asks the following driver of a pipeline to flush at its next look."""
    where = layout.pipeline_shards(pipeline)
    row = context.catalog.get(where, layout.FLUSH_ROW)
    change = Put(layout.FLUSH_ROW, b"", expect=row.version if row else ABSENT)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # then another process has asked
        context.catalog.write(where, change, write_id=context.ids.new())


def flush_version(context: Context, pipeline: str) -> str:
    """Returns a version that changes with each request."""
    row = context.catalog.get(layout.pipeline_shards(pipeline), layout.FLUSH_ROW)
    return row.version if row else ""


def wait_until_done(
    context: Context, pipeline: str, ends: Mapping[str, str], waits: Waits, timeout_s: float
) -> list[str]:
    """Waits until every source partition is committed up to its end. Returns those that are not."""
    deadline_s = context.clock.monotonic_s() + timeout_s
    while True:
        behind = []
        for partition, end in ends.items():
            head, source = (
                read_progress(context, pipeline, partition),
                SourcePartition.named(partition),
            )
            if head is None or waits(SourceRange(source, head.position, end)):
                behind.append(partition)
        if not behind or context.clock.monotonic_s() > deadline_s:
            return behind
        context.clock.sleep(_LOOK_S)
