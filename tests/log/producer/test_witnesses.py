"""Staged segments: a commit of theirs that the catalog has lost proves itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.compiled_journals import Death, Press
from tests.support.topic_upkeep import DAY_S, HOUR_MS
from tidelog.catalog.base import Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment, encode_staged
from tidelog.context import Context
from tidelog.errors import InternalError, TidelogError
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.log.maintenance.lost_commits import find_losses
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import VerifyReport, verify_topic
from tidelog.log.producer import copier as copying
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import delete_topic, find_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import AppenderView
from tidelog.testing.scheduler import Crash

PUMP = ":pipeline:pp:orders/0"
WRITERS = pytest.mark.parametrize("producer", [PUMP, ":sink:s", "~write"])


class Staging(Press):
    """A house whose topic gets staged segments, and whose catalog may go back to a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = self.topic(partitions=2)
        self._copy: dict[str, dict[str, Row]] = {}

    def stage(self, values: Mapping[int, Sequence[str]], producer: str = PUMP) -> StagedSegment:
        key = f"staging/p/0000000001/a/{self.ids.new()}/0"
        parts = [
            (partition, table_of([Event(each.encode()) for each in some], 0))
            for partition, some in values.items()
        ]
        segment = encode_staged(parts, "" if producer.startswith("~") else producer)
        self.store.put(key, segment.data)
        return StagedSegment(key, segment.pieces)

    def driver(self, producer: str = PUMP, context: Context | None = None) -> Copier:
        return Copier(context or self.context, find_topic(self.context, "orders"), producer)

    def copy_staged(self, values: Mapping[int, Sequence[str]], producer: str = PUMP) -> None:
        append_staged(self.driver(producer), [self.stage(values, producer)], 10)

    def keep_copy(self) -> None:
        assert isinstance(self.catalog, MemoryCatalog)
        self._copy = {name: dict(rows) for name, rows in self.catalog._partitions.items()}

    def go_back(self) -> None:
        assert isinstance(self.catalog, MemoryCatalog)
        self.catalog._partitions = {name: dict(rows) for name, rows in self._copy.items()}

    def sweep(self) -> SweepReport:
        return sweep_home(self.context, HOUR_MS)

    def verified(self) -> VerifyReport:
        return verify_topic(self.context, find_topic(self.context, "orders"))

    def recover(self) -> RecoverReport:
        topic = find_topic(self.context, "orders")
        return recover_topic(self.context, Lookup(self.context, topic), writers_resumed=True)

    def witnesses(self) -> list[str]:
        folder = layout.witnesses(self.orders.incarnation)
        return [info.key for info in self.store.list(folder)]

    def swept_for_a_month(self) -> list[SweepReport]:
        reports = []
        for _ in range(31):
            self.clock.advance(DAY_S)
            reports.append(self.sweep())
        return reports


@pytest.fixture
def house() -> Staging:
    return Staging()


@WRITERS
def test_one_lost_batch_is_kept_and_recovered_once(house: Staging, producer: str) -> None:
    house.append(house.orders, ["before"])
    house.keep_copy()
    house.copy_staged({0: ["lost 0"], 1: ["lost 1"]}, producer)
    house.go_back()
    house.append(house.orders, ["after 0", "after 1"])  # above all offsets that were lost
    house.append(house.orders, ["after 2"], 1)
    house.compile(find_topic(house.context, "orders"))
    for report in house.swept_for_a_month():
        assert [each.topic for each in report.refused] == ["orders"]
        assert "was committed to partition 0, and the catalog does not know of it" in str(
            report.refused[0].error
        )
    found = house.verified()
    assert (found.errors, found.proven_losses) == (1, 1), found.findings
    assert house.recover().appended == 2
    assert house.recover().appended == 0
    assert sorted(house.values(house.orders)) == ["after 0", "after 1", "before", "lost 0"]
    assert sorted(house.values(house.orders, 1)) == ["after 2", "lost 1"]
    for report in house.swept_for_a_month():
        assert not report.refused
    assert house.verified().errors == 0


def test_loss_of_one_of_two_commits_proves_itself(
    house: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Copier.commit

    def watched(self: Copier, *given: Any, **more: Any) -> Any:
        done = commit(self, *given, **more)
        if not house._copy:
            house.keep_copy()  # between the commits of partitions 0 and 1
        return done

    monkeypatch.setattr(Copier, "commit", watched)
    house.copy_staged({0: ["kept"], 1: ["lost"]})
    house.go_back()
    house.clock.advance(DAY_S)
    assert "partition 1" in str(house.sweep().refused[0].error)
    assert house.recover().appended == 1
    assert (house.values(house.orders), house.values(house.orders, 1)) == (["kept"], ["lost"])


def test_witness_goes_with_the_last_copy_of_its_segment(house: Staging) -> None:
    house.copy_staged({0: ["a"], 1: ["b"]})
    assert len(house.witnesses()) == 1
    house.clock.advance(DAY_S)
    assert not house.sweep().refused
    assert len(house.witnesses()) == 1
    house.append(house.orders, ["c"])
    trim_topic(house.context, house.orders, ToOffsets({0: 1}))
    house.clock.advance(DAY_S)
    house.sweep()
    assert len(house.witnesses()) == 1  # partition 1 needs the segment
    trim_topic(house.context, house.orders, ToOffsets({1: 1}))
    house.clock.advance(DAY_S)
    house.sweep()
    assert house.witnesses() == []
    assert house.verified().warnings == house.verified().errors == 0


def test_deleted_topic_leaves_no_witness(house: Staging) -> None:
    house.copy_staged({0: ["a"]})
    delete_topic(house.context, "orders")
    assert house.witnesses() == []


def test_every_batch_has_its_witness_whenever_its_driver_dies(house: Staging) -> None:
    for after in range(40):
        house = Staging()
        house.append(house.orders, ["before"])
        house.keep_copy()
        staged = house.stage({0: ["lost 0"], 1: ["lost 1"]})
        died = False
        try:
            append_staged(house.driver(context=house.faulty(Death(after))), [staged], 10)
        except (Crash, TidelogError):
            died = True
            append_staged(house.driver(), [staged], 10)
        house.go_back()
        house.clock.advance(DAY_S)
        assert [each.topic for each in house.sweep().refused] == ["orders"], after
        assert house.recover().appended == 2
        if not died:
            assert after > 8
            return
    raise AssertionError("the driver never ended")


def test_witness_that_comes_before_its_commit_is_seen_proves_nothing(house: Staging) -> None:
    """A sweep or ``verify`` that lists the copy, and looks at the rows before its commit."""
    staged = house.stage({0: ["a"], 1: ["b"]})
    driver = house.driver()
    append_staged(driver, [staged], 10)
    copy = next(info for info in house.store.list() if info.key.endswith(".arrow"))
    losses = find_losses(house.context, house.orders, [copy])
    assert losses.proofs == []


def test_copy_that_was_replaced_is_no_proof_though_no_row_lists_it(
    house: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 0 has the whole segment, partition 1 the one without what was erased."""
    monkeypatch.setattr(Copier, "list_abandoned", lambda _: None)
    moved: list[int] = []
    check = Copier.check_head

    def once(self: Copier, partition: int, head: Any) -> None:
        check(self, partition, head)
        if partition == 1 and not moved:
            moved.append(1)
            raise copying.LedgerMovedError("partition `orders/1`: moved")

    replaced = house.stage({0: ["a"], 1: ["b"]})
    other = house.stage({0: ["a"], 1: ["b"]})
    monkeypatch.setattr(Copier, "check_head", once)
    monkeypatch.setattr(copying, "without_erased", lambda *_: other if moved else replaced)
    append_staged(house.driver(), [replaced], 10)
    assert (house.values(house.orders), house.values(house.orders, 1)) == (["a"], ["b"])
    for _ in range(3):
        house.clock.advance(DAY_S)
        assert not house.sweep().refused
    assert house.verified().errors == 0


def test_segment_without_what_its_appender_knows_is_not_made() -> None:
    parts = [(0, table_of([Event(b"x")], 0)), (1, table_of([Event(b"x")], 0))]
    with pytest.raises(InternalError, match="knows nothing"):
        encode_segment(parts, {0: AppenderView()})
