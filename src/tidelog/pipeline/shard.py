"""Who drives a shard of a pipeline: one at a time, the others stand by (``log.holding``).

The epoch is what fences: it goes into the heads of all source partitions, and every write there
expects them. So it must be higher than that of every driver that had a source partition before,
also under another number of shards: a driver takes an epoch above those of all shards that the
pipeline ever had. A row names the number of shards too. While a driver of another number lives, a
new one waits as a standby, unless its caller asks it to take over; the other one is then fenced at
its next write. If both begin at once and see each other, both release, and try again after a while.
No safety rests on that.

A source partition's share follows from its own name alone, so it does not move when others appear.
Numbered partitions of a topic take turns.
"""

from __future__ import annotations

import hashlib

from tidelog.log.base import Log
from tidelog.log.hold import Silence
from tidelog.log.holding import Holding
from tidelog.model import layout
from tidelog.model.run import HeldRow, decode_row
from tidelog.sources.base import SourcePartition

__all__ = ["Shard", "share_of"]

_APART_S = 1.0  # at most this long two drivers wait that have seen each other


class Shard(Holding):
    """One driver's view of one shard; ``beside`` lets it be taken while others are driven."""

    retakes = False  # its cycle goes on under the epoch that it began with

    def __init__(
        self, log: Log, incarnation: str, number: int, shards: int = 1, *, beside: bool = False
    ) -> None:
        row = layout.shard_row(number, shards)
        super().__init__(log, layout.pipeline_shards(incarnation), row, f"shard `{row}`")
        self._folder = row.rpartition("/")[0]
        self._beside = beside
        self._highest = 0  # epoch of all shards, as last seen
        self._others: dict[str, Silence] = {}

    def try_take(self, force: bool = False) -> bool:
        """As ``Holding`` does, if no driver of another number of shards lives."""
        alone = force or self._beside
        if not self._look() and not alone:
            return False
        if not super().try_take(force):
            return False
        if self._look() or alone:
            return True
        self.release()
        self._log.clock.sleep(self._log.random.random() * _APART_S)
        return False

    def _next_epoch(self, epoch: int) -> int:
        return max(epoch, self._highest) + 1

    def _look(self) -> bool:
        """Read all shards' rows: the highest epoch; whether those of another number are free."""
        free = True
        for row in self._log.catalog.scan(self._where, "shard/", "shard0"):
            lease = decode_row(row.value, HeldRow, f"shard `{row.row}`")
            self._highest = max(self._highest, lease.epoch)
            if lease.owner and row.row.rpartition("/")[0] != self._folder:
                silence = self._others.setdefault(row.row, Silence(self._log))
                free = free and silence.is_over(lease.mark, row.version)
        return free


def share_of(partition: SourcePartition, shards: int) -> int:
    """The shard that a source partition belongs to."""
    number = partition.number_in(partition.topic)
    text = partition.text if number is None else partition.topic
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8]) + (number or 0)) % shards
