"""Verifying: a clean topic has no findings, and each kind of damage has exactly its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import crc32c
import msgspec
import pytest

from tests.support.topic_upkeep import DAY_S, DamagedHouse, House
from tidelog.catalog.base import Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.log.maintenance import verify_bytes as findings_module
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.maintenance.verify_bytes import Finding
from tidelog.log.topics import delete_topic
from tidelog.model import layout
from tidelog.model.topic import Head, Run, slots_of
from tidelog.testing.faults import Fault, Faults


class Damaged(DamagedHouse):
    """Partition 0 has offsets 0 to 5 and 5 to 10, partition 1 has 0 to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = self.topic("orders", 2)
        for partition in (0, 0, 1):
            self.append(self.orders, list("abcde"), partition)
            self.clock.advance(1.5)

    def change_run(self, base: int = 0, **fields: object) -> None:
        run = next(run for run in self.runs(self.orders) if run.base == base)
        self.put(self.orders, layout.run_row(base), msgspec.structs.replace(run, **fields))

    def change_object(self, data: bytes) -> None:
        self.replace_object(self.runs(self.orders)[0], data)

    def add_run(self, run: Run) -> None:
        """With its slot rows."""
        self.put(self.orders, layout.run_row(run.base), run)
        level, starts = slots_of(run.first_ms, run.last_ms, self.orders.slot_ms)
        for start in starts:
            row = layout.slot_row(level, start, run.base, self.ids.new())
            self.put(self.orders, row, str(run.end).encode())


@pytest.fixture
def house() -> Damaged:
    return Damaged()


def test_a_clean_topic_has_no_findings(house: Damaged) -> None:
    progress: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        report = verify_topic(house.context, house.orders, pool, progress.append)
    assert report == house.verify()
    assert report.findings == ()
    assert (report.partitions, report.runs, report.events, report.objects) == (2, 3, 15, 3)
    assert (report.errors, report.notes, report.orphans) == (0, 0, 0)
    assert report.bytes == sum(progress) > 0
    empty = house.topic("empty", 3)
    assert verify_topic(house.context, empty).findings == ()


def test_a_clean_topic_after_trims_and_sweeps_has_none(house: Damaged) -> None:
    trim_topic(house.context, house.orders, ToOffsets({0: 7}))
    house.clock.advance(DAY_S)
    sweep_home(house.context, 0)
    report = house.verify()
    assert report.findings == ()
    assert (report.runs, report.events, report.objects) == (2, 10, 2)


def test_a_deleted_object(house: Damaged) -> None:
    house.store.delete([house.runs(house.orders)[0].object])
    finding = house.only_error()
    assert finding.where == "partition `orders/0`, offsets 0 to 5"
    assert "is missing: restore it from a copy; if there is none" in finding.what
    assert "`tidelog trim orders --offset P:5`" in finding.what
    assert "`tidelog topic recover orders --include-trimmed`" in finding.what


def test_a_flipped_byte(house: Damaged) -> None:
    run = house.runs(house.orders)[0]
    data = bytearray(house.store.get(run.object))
    data[(run.byte_start + run.byte_end) // 2] ^= 1
    house.change_object(bytes(data))
    assert "expected crc32c" in house.only_error().what


def test_a_flipped_byte_that_no_run_covers_is_nobodys_damage(house: Damaged) -> None:
    data = bytearray(house.store.get(house.runs(house.orders)[0].object))
    data[-1] ^= 1
    house.change_object(bytes(data))
    assert house.verify().findings == ()


def test_an_object_that_was_cut_off(house: Damaged) -> None:
    run = house.runs(house.orders)[0]
    house.change_object(house.store.get(run.object)[: run.byte_end - 1])
    assert f"has {run.byte_end - 1} bytes" in house.only_error().what


def test_bytes_that_fit_their_checksum_and_do_not_decode(house: Damaged) -> None:
    run = house.runs(house.orders)[0]
    garbage = b"\1" * run.byte_end
    house.change_object(garbage)
    house.change_run(crc=crc32c.crc32c(garbage[run.byte_start :]))
    assert "does not decode" in house.only_error().what


@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_wrong_count(house: Damaged, count: int) -> None:
    piece = (segment := house.segment(["x"] * count, at_ms=1_700_000_000_000)).pieces[0]
    house.change_object(segment.data)
    house.change_run(byte_start=piece.byte_start, byte_end=piece.byte_end, crc=piece.crc)
    assert f"holds {count} events, its row says 5" in house.only_error().what


def test_wrong_times(house: Damaged) -> None:
    house.change_run(last_ms=1_700_000_000_001)
    assert "holds times 1700000000000 to 1700000000000" in house.only_error().what


def test_impossible_times_and_counts(house: Damaged) -> None:
    house.change_run(first_ms=2, last_ms=1)
    house.change_run(5, count=0)
    wrong = [finding.what for finding in house.verify().findings if "row `run/" in finding.where]
    assert wrong == ["holds times 2 to 1", "holds 0 events"]


@pytest.mark.parametrize("key", ["topics/other/x", "../x", ""])
def test_an_object_of_another_topic(house: Damaged, key: str) -> None:
    house.change_run(object=key)
    assert "is not of this topic" in house.only_error().what


def test_a_missing_run_row(house: Damaged) -> None:
    house.delete(layout.run_row(0))
    finding = house.only_error()
    assert finding == Finding("error", "partition `orders/0`", "no run holds offsets 0 to 5")
    assert house.verify().orphans == 1


def test_a_missing_last_run_row(house: Damaged) -> None:
    house.delete(layout.run_row(5))
    assert house.only_error().what == "no run holds offsets 5 to 10"


def test_an_overlapping_row(house: Damaged) -> None:
    appender = house.appender(house.orders)
    stored = appender.upload(house.segment(["x", "y", "z"], at_ms=1_700_000_000_000))
    piece = stored.segment.pieces[0]
    run = msgspec.structs.replace(
        house.runs(house.orders)[0],
        base=2,
        count=3,
        object=stored.key,
        crc=piece.crc,
        byte_end=piece.byte_end,
        byte_start=piece.byte_start,
    )
    house.add_run(run)
    finding = house.only_error()
    assert finding.where == "partition `orders/0`, offsets 2 to 5"
    assert finding.what == "offsets 2 to 5 are in an earlier run too"


def test_a_row_under_another_runs_key(house: Damaged) -> None:
    house.put(house.orders, layout.run_row(5), house.runs(house.orders)[0])
    findings = [finding.what for finding in house.verify().findings]
    assert findings[:2] == ["holds the run of offset 0", "no run holds offsets 5 to 10"]


def test_a_row_beyond_the_end(house: Damaged) -> None:
    house.put(house.orders, "head", Head(next=5))
    finding = house.only_error()
    assert "row `head`" in finding.where
    assert finding.what == "next is 5, but runs reach to 10"


def test_a_missing_slot_row(house: Damaged) -> None:
    house.delete(house.rows(house.orders, "slot/")[0].row)
    assert "is missing: the run at 0 needs it" in house.only_error().what


@pytest.mark.parametrize("base", [3, 5, 50])
def test_a_dangling_slot_row(house: Damaged, base: int) -> None:
    row = layout.slot_row(3, 8_000, base, "x")
    house.put(house.orders, row, b"9")
    finding = house.only_error()
    assert row in finding.where
    assert "names no run" in finding.what


def test_slot_rows_that_are_doubled_wrong_or_strange(house: Damaged) -> None:
    first = house.rows(house.orders, "slot/")[0]
    house.put(house.orders, first.row + "again", first.value)
    assert "is the second one" in house.only_error().what
    house.put(house.orders, first.row, b"6")
    house.delete(first.row + "again")
    assert "the run ends at 5" in house.only_error().what
    house.put(house.orders, first.row, first.value)
    house.put(house.orders, "slot/x", b"")
    assert "names no run" in house.only_error().what


def test_heads_that_are_gone_broken_or_absurd(house: Damaged) -> None:
    house.put(house.orders, "head", Head(start=11, next=10))
    assert house.only_error().what == "starts at 11, but its next is 10"
    house.put(house.orders, "head", b"\xc1")
    assert "row `head`" in house.only_error().where
    house.delete("head")
    assert "is missing" in house.only_error().what


def test_a_floor_that_no_producer_could_reach(house: Damaged) -> None:
    house.put(house.orders, "head", Head(next=10, floor=3))
    assert house.only_error().what.startswith("generation 0, but a head has floor 3")


@pytest.mark.parametrize("row", ["run/00000000000000000005", "producer/p"])
def test_rows_that_do_not_decode(house: Damaged, row: str) -> None:
    house.put(house.orders, row, b"\xc1")
    findings = [finding for finding in house.verify().findings if row in finding.where]
    assert [finding.severity for finding in findings] == ["error"]


def test_strays_are_warnings_and_unknown_rows_and_leftovers_of_trims_notes(house: Damaged) -> None:
    orphan = house.orphan(house.orders)
    house.store.put(layout.sink_staged(house.orders.incarnation, "s", 0, 0, "x"), b"staged")
    house.put(house.orders, "tide/1", b"?")
    house.put(house.orders, "head", Head(next=10, start=5))
    report = house.verify()
    assert (report.errors, report.notes, report.runs) == (0, 2, 2)
    assert (report.orphans, report.orphan_bytes) == (1, len(orphan.segment.data))
    notes = [(finding.where, finding.what.split(":")[0]) for finding in report.findings]
    assert report.warnings == report.possible_losses == 1
    assert notes == [
        ("partition `orders/0`, row `tide/1`", "is of an unknown kind"),
        ("partition `orders/0`", "1 trimmed runs still have rows"),
        (
            f"object `{orphan.key}`",
            f"{report.orphan_bytes} bytes, no row names it or says that it is not needed",
        ),
    ]


def test_report_says_how_many_findings_it_leaves_out(
    house: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings_module, "FINDINGS_MAX", {"error": 2, "warning": 2, "note": 2})
    house.store.delete(house.objects())
    for _ in range(3):
        house.orphan(house.orders)
    report = house.verify()
    assert (report.errors, report.notes, report.warnings) == (3, 0, 3)
    assert len(report.findings) == 4
    assert report.findings_cut == {"error": 1, "warning": 1}


def test_every_possible_loss_is_named(house: Damaged) -> None:
    for _ in range(1_001):
        house.orphan(house.orders)
    report = house.verify()
    assert report.possible_losses == 1_001
    assert len([each for each in report.findings if each.severity == "warning"]) == 1_001
    assert report.findings_cut == {}


def test_a_deleted_topic_and_a_silent_server_raise_as_usual(house: Damaged) -> None:
    with pytest.raises(UnavailableError):
        verify_topic(house.faulty(Faults(rates={Fault.LOSE_REQUEST: 1.0})), house.orders)
    delete_topic(house.context, "orders")
    with pytest.raises(NotFoundError):
        house.verify()
    house.topic("orders", 2)
    with pytest.raises(NotFoundError, match="made again"):
        house.verify()


class Moving(MemoryCatalog):
    """While it is scanned, somebody appends, trims and sweeps."""

    def __init__(self, house: Damaged, scans: int) -> None:
        super().__init__()
        self.house = house
        self.scans = scans

    def get(self, partition: str, row: str) -> Row | None:
        return self.house.catalog.get(partition, row)

    def scan(self, partition: str, *args: object, **kwargs: object) -> Iterator[Row]:
        rows = list(self.house.catalog.scan(partition, *args, **kwargs))  # type: ignore[arg-type]
        for number, row in enumerate(rows):
            if number == self.scans:
                self.move()
            yield row
        for late in self.house.catalog.scan(partition, "slot/", "slot0"):
            if late not in rows:
                yield late  # as a scan may see what is written behind its back

    def move(self) -> None:
        house = self.house
        house.append(house.orders, ["while", "it is read"])
        trim_topic(house.context, house.orders, ToOffsets({0: 6, 1: 5}))
        house.clock.advance(DAY_S)
        sweep_home(house.context, 0)


@pytest.mark.parametrize("scans", range(5))
def test_what_moves_while_it_is_read_is_no_damage(house: Damaged, scans: int) -> None:
    context = Context(
        house.store, Moving(house, scans), house.clock, house.ids, house.context.random
    )
    report = verify_topic(context, house.orders)
    assert report.errors == 0, report.findings
    assert house.head(house.orders).start == 6


def test_a_topic_with_wide_runs_and_shared_segments_is_clean() -> None:
    house = House()
    topic = house.topic("wide", 3)
    appender = house.appender(topic)
    for number in range(4):
        values = {p: [str(number)] * (p + 1) for p in range(3)}
        segment = house.shared_segment(values, apart_ms=10 ** (2 * number))
        stored = appender.upload(segment)
        for piece in segment.pieces:
            appender.commit(stored, piece)
        house.clock.advance(10**number)
    report = verify_topic(house.context, topic)
    assert report.findings == ()
    assert (report.runs, report.events, report.objects) == (12, 24, 4)
