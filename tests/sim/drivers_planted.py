"""Bugs planted into how drivers share the partitions of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import greenlet
import msgspec
import pytest

from tidelog.archive.freeze import HeadGate
from tidelog.model.pipeline import Progress
from tidelog.pipeline import cycle
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.share import DriverMembers
from tidelog.pipeline.source_state import ClaimedError

__all__ = [
    "commit_under_an_old_epoch",
    "driver_keeps_its_source",
    "living_drivers_lose_partitions",
    "take_keeps_the_epoch",
]

Patch = pytest.MonkeyPatch


def commit_under_an_old_epoch(patch: Patch) -> None:
    """A driver that finds another version of its head writes its rows all the same."""
    write = Cycle._write

    def anyhow(self: Cycle, state: Any, *changes: Any) -> str:
        try:
            return write(self, state, *changes)
        except ClaimedError:
            rows = {each.row: self._context.catalog.get(state.where, each.row) for each in changes}
            now = [
                replace(each, expect=rows[each.row].version) if rows[each.row] else each
                for each in changes
            ]
            return write(self, state, *now)

    patch.setattr(Cycle, "_write", anyhow)


def living_drivers_lose_partitions(patch: Patch) -> None:
    """A head gets a second owner while the first one is alive."""
    patch.setattr(DriverMembers, "may_claim", lambda self, owner: True)


def take_keeps_the_epoch(patch: Patch) -> None:
    """A driver that takes over a head does not raise its epoch."""
    taken = cycle.claimed_head

    def same(found: Any, new: Any, owner: str, state: Any = None) -> Any:
        head = taken(found, new, owner, state)
        return msgspec.structs.replace(head, epoch=found.epoch if found else head.epoch)

    patch.setattr(cycle, "claimed_head", same)


def driver_keeps_its_source(patch: Patch) -> None:
    """A driver that was opened for a backfill takes heads after the promote."""
    decode, check = cycle.decode_row, HeadGate.__call__
    found: dict[greenlet.greenlet, Any] = {}

    def noting(value: bytes, kind: type, what: str) -> Any:
        row = decode(value, kind, what)
        if kind is Progress:
            found[greenlet.getcurrent()] = row
        return row

    def ignoring(self: HeadGate) -> None:
        head = found.pop(greenlet.getcurrent(), None)
        if head is None or head.frozen:
            check(self)

    patch.setattr(cycle, "decode_row", noting)
    patch.setattr(HeadGate, "__call__", ignoring)
