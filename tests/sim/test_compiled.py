"""P1 to P3 and P5 in a bad world with compilers and amendments: seeds, and planted bugs."""

from __future__ import annotations

import pytest

from tests.sim.compiled import CompiledWorld
from tests.support.rounds import rounds
from tidelog.context import Context
from tidelog.errors import TidelogError
from tidelog.log.maintenance import object_references, sweep
from tidelog.model import layout
from tidelog.model.topic import HeldRow, Topic, decode_row

BUG_SEEDS = 200


@pytest.mark.parametrize("block", rounds(10, every=4))
def test_nothing_is_lost_doubled_out_of_order_or_undone(block: int) -> None:
    for seed in range(block * 5, block * 5 + 5):
        CompiledWorld(seed).run()


def test_one_seed_runs_the_same_twice() -> None:
    first, second = CompiledWorld(4711), CompiledWorld(4711)
    assert first.run() == second.run()
    assert first.scheduler.trace == second.scheduler.trace


def test_something_is_compiled_amended_and_swept() -> None:
    worlds = [CompiledWorld(seed) for seed in range(100, 110)]
    for world in worlds:
        world.run()
    assert sum(world.compiled for world in worlds) > 40
    assert sum(len(world.sure) for world in worlds) > 20
    assert sum(world.objects.deletes for world in worlds) > 10


def _caught() -> bool:
    for seed in range(BUG_SEEDS):
        try:
            CompiledWorld(seed).run()
        except (AssertionError, TidelogError):
            return True
    return False


def test_a_sweep_that_does_not_raise_epochs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_only(context: Context, topic: Topic, partition: int) -> int:
        where = layout.topic_partition(topic.incarnation, partition)
        row = context.catalog.get(where, layout.COMPILE_ROW)
        return 0 if row is None else decode_row(row.value, HeldRow, "").epoch + 1

    monkeypatch.setattr(sweep, "raise_epoch", look_only)
    assert _caught()


def test_amendments_that_go_before_they_are_compiled_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_references, "_applied", lambda pending, _: iter(pending))
    assert _caught()
