"""Watches the heads of pipelines: who owns a source partition, and under which epoch.

At every write: an epoch never goes back; a head changes from one owner to another only with a
higher epoch; a range is committed by the owner of its head, under its epoch; and no partition is
taken from a driver whose row has changed within the time to live, by the time of the world. A
driver that comes back after a longer silence may still lose what another one has just decided to
take. A driver of a generation that sets forgotten replays aside takes the partition from a replay,
and loses it to one, at any moment: it is not a member there (``pipeline/forgotten_ranges.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.bare import fields

__all__ = ["Heads"]

_Values = dict[str, bytes]

_DECIDED_S = 15.0  # between a look at the drivers and the write that takes: longer than a stall


@dataclass
class Heads:
    """The heads and the drivers of all pipelines, as they were last written."""

    now_s: Callable[[], float]
    ttl_s: float
    is_dead: Callable[[str], bool]  # the process with a mark
    taken: int = 0  # from a dead driver, for tests that the world is not idle
    _beats: dict[str, tuple[str, float]] = field(default_factory=dict)  # of members with a row
    _silent: set[str] = field(default_factory=set)  # members whose row others have removed
    _back_s: dict[str, float] = field(default_factory=dict)  # after a long silence
    _pipelines: dict[str, str] = field(default_factory=dict)  # that members are members of

    def written(self, partition: str, before: _Values, after: _Values) -> None:
        """After a write of a catalog partition, with its rows before it."""
        parts = partition.split("/")
        if parts[0] != "pipeline":
            return
        if len(parts) == 2:
            self._look_at_members(parts[1], before, after)
        else:
            self._look_at_head(partition, before, after)

    def _look_at_members(self, pipeline: str, before: _Values, after: _Values) -> None:
        for row in before.keys() | after.keys():
            kind, _, member = row.partition("/")
            if kind == "member" and row not in after:
                self._beats.pop(member, None)
                self._silent.add(member)
            elif kind == "member" and before.get(row) != after[row]:
                now_s = self.now_s()
                self._pipelines[member] = pipeline
                _, beat_s = self._beats.get(member, ("", now_s))
                if member in self._silent or now_s - beat_s >= self.ttl_s:
                    self._silent.discard(member)
                    self._back_s[member] = now_s
                self._beats[member] = (fields(after[row])["mark"], now_s)

    def _look_at_head(self, where: str, before: _Values, after: _Values) -> None:
        if "head" not in before or "head" not in after:
            return
        old, new = (_head(each["head"]) for each in (before, after))
        assert new["epoch"] >= old["epoch"], f"{where}: epoch {old['epoch']} is {new['epoch']} now"
        moved = new["owner"] != old["owner"] and new["owner"]
        if moved:
            assert new["epoch"] > old["epoch"], f"{where}: taken under epoch {new['epoch']} again"
        if moved and old["owner"] and not self._is_beside(where, old["owner"], new["owner"]):
            self.taken += 1
            mark, beat_s = self._beats.get(old["owner"], ("", float("-inf")))
            silent_s = self.now_s() - beat_s
            is_over = silent_s >= self.ttl_s or self.is_dead(mark)
            is_back = self.now_s() - self._back_s.get(old["owner"], float("-inf")) < _DECIDED_S
            assert is_over or is_back, f"{where}: taken from one that beat {silent_s} s ago"
        if any(row.startswith("commit/") for row in after.keys() - before.keys()):
            owners = [(each["owner"], each["epoch"]) for each in (old, new)]
            assert owners[0] == owners[1], f"{where}: {owners[0]} has it, {owners[1]} commits"

    def _is_beside(self, where: str, *owners: str) -> bool:
        """Whether one of two owners drives the generation whose replays these are."""
        pipeline = where.split("/")[1]
        others = {self._pipelines.get(owner, pipeline) for owner in owners} - {pipeline}
        return others == {pipeline.removesuffix(".dead")}


def _head(value: bytes) -> dict[str, Any]:
    return {"owner": "", **fields(value)}
