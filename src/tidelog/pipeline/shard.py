"""Who drives a shard of a pipeline: one at a time, the others stand by.

1. take: owner and epoch + 1, by the version that was read  → dead: a standby takes it over
2. beat: write it again, by our own version                 → dead: seen to be silent
3. release: no owner                                        → free at once

An owner is taken for dead when its row has not changed for the time to live by the watcher's own
monotonic clock, or when its process is known to have ended. The epoch is what fences: it goes into
the heads of all source partitions, and every write there expects them.
"""

from __future__ import annotations

import contextlib

import msgspec

from tidelog.catalog.base import Put
from tidelog.errors import ConflictError, FencedError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.log.hold import put_held
from tidelog.model import layout
from tidelog.model.run import decode_row, encode_row

__all__ = ["Shard", "ShardLease"]


class ShardLease(msgspec.Struct, frozen=True):
    """The row of a shard."""

    owner: str
    epoch: int
    beat: int
    mark: str  # of the owner's process
    beat_ms: int = 0  # when it was written, for people; no takeover rests on it


class Shard:
    """One driver's view of one shard."""

    def __init__(self, log: Log, incarnation: str, number: int) -> None:
        self.epoch = 0
        self._log = log
        self._id = log.ids.new()
        self._where = layout.pipeline_shards(incarnation)
        self._row = layout.shard_row(number)
        self._version = ""
        self._beat = 0
        self._seen: tuple[str, float] = ("", 0.0)

    def try_take(self, force: bool = False) -> bool:
        """Step 1, if nobody living has it, or by ``force``. Call it again to stand by."""
        row = self._log.catalog.get(self._where, self._row)
        if row is None:
            return self._put(self._lease(1), None)
        lease = decode_row(row.value, ShardLease, f"shard `{self._row}`")
        if lease.owner and not force and not self._is_over(lease, row.version):
            return False
        return self._put(self._lease(lease.epoch + 1), row.version)

    def beat(self) -> None:
        """Step 2. ``FencedError`` when another driver has taken the shard."""
        self._beat += 1
        if not self._put(self._lease(self.epoch, self._beat), self._version):
            raise FencedError(
                f"shard `{self._row}`: another driver has taken it, ours was epoch {self.epoch}: "
                "stop this one"
            )

    def release(self) -> None:
        """Step 3; one that was lost needs none."""
        free = ShardLease("", self.epoch, self._beat, "")
        change = Put(self._row, encode_row(free), expect=self._version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            self._log.catalog.write(self._where, change, write_id=self._log.ids.new())

    def _lease(self, epoch: int, beat: int = 0) -> ShardLease:
        mark, now_ms = self._log.processes.mark(), self._log.clock.now_ms()
        return ShardLease(self._id, epoch, beat, mark, now_ms)

    def _put(self, lease: ShardLease, version: str | None) -> bool:
        """Write our lease by the version that we know; False when somebody else was first."""
        what = f"shard `{self._row}`"
        mine = put_held(self._log, self._where, self._row, encode_row(lease), version, what)
        if mine is not None:
            self.epoch, self._version = lease.epoch, mine
        return mine is not None

    def _is_over(self, lease: ShardLease, version: str) -> bool:
        if lease.owner == self._id or self._log.processes.is_dead(lease.mark):
            return True
        now_s = self._log.clock.monotonic_s()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > self._log.settings.lease_ttl_ms / 1000
