"""Members that are stopped, and those that join meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tidelog.catalog.base import Change, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.coordination.ownership import read_members
from tidelog.errors import FencedError
from tidelog.model import layout
from tidelog.pipeline.share import DriverMembers
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock, seeded_ids


class InterruptedCatalog(MemoryCatalog):
    """Calls something after the next change of a fence."""

    after_fence: Callable[[], None] | None = None

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        super().write(partition, *changes, write_id=write_id)
        if any(isinstance(each, Put) and each.row == layout.FENCE_ROW for each in changes):
            then, self.after_fence = self.after_fence, None
            if then is not None:
                then()


def a_log() -> tuple[Context, InterruptedCatalog]:
    clock, catalog = FakeClock(), InterruptedCatalog()
    store = MemoryStore(clock)
    return Context(store, catalog, clock, seeded_ids(1), random.Random(1)), catalog


def test_driver_that_joins_beside_a_take_over_stays_a_member() -> None:
    context, catalog = a_log()
    before, taker, later = (DriverMembers(context, "p") for _ in range(3))
    before.join()
    catalog.after_fence = later.join
    taker.take_over()
    assert sorted(taker.alive()) == sorted([taker.id, later.id])
    assert not taker.may_claim(later.id)
    later.beat()
    assert taker.may_claim(before.id), "it was stopped, so its partitions are free at once"
    with pytest.raises(FencedError):
        before.beat()
    assert before.id not in read_members(context, layout.pipeline_members("p"))


def test_two_take_overs_leave_the_later_driver_its_row() -> None:
    context, catalog = a_log()
    first, second = DriverMembers(context, "p"), DriverMembers(context, "p")
    catalog.after_fence = second.take_over
    first.take_over()
    assert sorted(first.alive()) == sorted([first.id, second.id])
    assert not first.may_claim(second.id)
