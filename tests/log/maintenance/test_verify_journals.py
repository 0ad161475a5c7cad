"""Verifying journals and amendments: clean ones have no findings, and each damage has its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import crc32c
import msgspec
import pyarrow as pa
import pytest

from tests.support.compiled_journals import Press
from tests.support.topic_upkeep import DamagedHouse
from tidelog.catalog.base import Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec import journal_file as journal_module
from tidelog.codec.event_batch import table_of
from tidelog.codec.journal_file import JOURNAL_SCHEMA, encode_journal
from tidelog.codec.segment import encode_index, encode_staged
from tidelog.context import Context
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Amendment, HeldRow, Run, encode_row, journal_slots

T0 = 1_700_000_000_000
SIX = CompilePolicy(min_events=1, min_amendments=1, max_events=6)


class Damaged(Press, DamagedHouse):
    """Journals of offsets 0 to 6 and 6 to 12, a run from 12 to 15; amendments at 1, 7 and 13."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = self.topic()
        for number in range(4):
            self.with_ids([f"{number}-{n}" for n in range(3)], T0 + 500 * number)
        self.compile(self.orders, SIX)
        self.with_ids(["4-0", "4-1", "4-2"], T0 + 9_000)
        for offset in (1, 7, 13):
            self.amend(self.orders, offset, b"new")
        sweep_home(self.context, 0)

    def with_ids(self, ids: list[str], at_ms: int) -> None:
        events = [Event(b"v", id=each, timestamp=at_ms + n) for n, each in enumerate(ids)]
        appender = self.appender(self.orders)
        segment = encode_staged([(0, table_of(events, at_ms))])
        appender.commit(appender.upload(segment), segment.pieces[0])
        appender.close()

    def change(self, number: int = 0, **fields: object) -> None:
        run = self.journals(self.orders)[number]
        self.put(self.orders, layout.journal_row(run.base), msgspec.structs.replace(run, **fields))

    def change_head(self, **fields: object) -> None:
        head = msgspec.structs.replace(self.head(self.orders), **fields)
        self.put(self.orders, "head", head)

    def change_object(self, data: bytes) -> None:
        self.replace_object(self.journals(self.orders)[0], data)

    def replaced(self, offsets: list[int], ids: list[str | None]) -> Run:
        """The first journal with other contents, whose row fits them."""
        events = [Event(b"v", id=each, timestamp=T0 + n) for n, each in enumerate(ids)]
        table = table_of(events, T0).add_column(0, "offset", pa.array(offsets, pa.int64()))
        made = encode_journal([table.cast(JOURNAL_SCHEMA)], 0)
        self.change_object(made.data)
        old = self.journals(self.orders)[0]
        run = made.run(old.base, old.count, old.object, old.committed_ms)
        self._move_slots(old, run)
        self.put(self.orders, layout.journal_row(0), run)
        return run

    def _move_slots(self, old: Run, new: Run) -> None:
        for row in journal_slots(old, self.orders.slot_ms):
            self.delete(row)
        for row, value in journal_slots(new, self.orders.slot_ms).items():
            self.put(self.orders, row, value)


@pytest.fixture
def house() -> Damaged:
    return Damaged()


def test_clean_ones_have_no_findings(house: Damaged) -> None:
    progress: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        report = verify_topic(house.context, house.orders, pool, progress.append)
    assert report == house.verify()
    assert report.findings == ()
    assert (report.runs, report.journals, report.events, report.amendments) == (3, 2, 15, 3)
    assert report.bytes == sum(progress) > 0
    house.amend(house.orders, 2, delete=True)
    house.compile(house.orders)
    sweep_home(house.context, 0)
    report = house.verify()
    assert report.findings == ()
    assert (report.runs, report.journals, report.events, report.amendments) == (3, 3, 14, 0)


def test_leftovers_of_compiles_and_trims_are_notes(house: Damaged) -> None:
    left = [*house.rows(house.orders, "run/"), *house.rows(house.orders, "slot/")]
    house.compile(house.orders)
    for row in left:
        if not row.value.endswith(b"j"):
            house.put(house.orders, row.row, row.value)
    house.change_head(start=8)
    report = house.verify()
    assert report.errors == 0, report.findings
    notes = {finding.what.split(":")[0] for finding in report.findings if ":" in finding.what}
    assert "1 compiled runs still have rows" in notes
    assert "1 amendments of trimmed events" in notes, "the journal at the start keeps its own"
    assert "1 trimmed runs still have rows" in notes
    sweep_home(house.context, 0)
    assert house.verify().findings == ()


def test_a_journal_that_is_gone_cut_or_flipped(house: Damaged) -> None:
    run = house.journals(house.orders)[0]
    data = house.store.get(run.object)
    for at in (0, len(data) // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[at] ^= 1
        house.change_object(bytes(flipped))
        assert "expected crc32c" in house.only_error().what
    house.change_object(data[:-1])
    assert f"has {len(data) - 1} bytes" in house.only_error().what
    house.change_object(data + b"x")
    assert f"has {len(data) + 1} bytes" in house.only_error().what
    house.store.delete([run.object])
    finding = house.only_error()
    assert finding.where == "partition `orders/0`, offsets 0 to 6"
    assert "is missing" in finding.what


def test_bytes_that_fit_their_checksum_and_are_no_journal(house: Damaged) -> None:
    garbage = b"\1" * 4_000
    house.change_object(garbage)
    house.change(byte_end=len(garbage), crc=crc32c.crc32c(garbage))
    assert "does not fit its checksum" in house.only_error().what


@pytest.mark.parametrize("offsets", [[0, 2, 2], [0, 3, 2], [4, 5, 6], [0, 1, 99]])
def test_offsets_that_do_not_rise_or_lie_outside(house: Damaged, offsets: list[int]) -> None:
    house.replaced(offsets, ["0-0", "0-1", "0-2"])
    assert "its offsets do not rise from 0 to 6" in house.only_error().what


def test_offsets_may_have_gaps(house: Damaged) -> None:
    house.replaced([1, 3, 5], ["a", None, "c"])
    assert house.verify().errors == 0


def test_counts_times_and_the_index_of_ids(house: Damaged) -> None:
    run = house.replaced([0, 1, 2], ["a", "b", None])
    assert run.journal is not None
    house.change(journal=msgspec.structs.replace(run.journal, events=2))
    assert "holds 3 events, its row says 2" in house.only_error().what
    house.change(journal=msgspec.structs.replace(run.journal, events=7))
    assert house.verify().findings[0].what == "holds 7 events of 6"
    house.change(journal=run.journal, last_ms=run.last_ms + 1)
    assert "the row says" in house.only_error().what
    house.change(last_ms=run.last_ms, ids_start=0, ids_end=0)
    assert "a lookup by id misses some" in house.only_error().what
    house.change(ids_start=run.ids_start, ids_end=run.ids_end - 4)
    assert "id index" in house.only_error().what
    house.change(ids_end=run.ids_end)
    assert house.verify().errors == 0


def test_an_index_of_other_ids(house: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        journal_module, "encode_index", lambda _: encode_index([pa.array(["x", "y", "z"])])
    )
    house.replaced([0, 1, 2], ["a", "b", "c"])
    assert "a lookup by id misses some" in house.only_error().what


def test_the_index_of_a_run(house: Damaged) -> None:
    [run] = house.runs(house.orders)
    for fields in ({"ids_start": 0, "ids_end": 0}, {"ids_end": run.ids_end - 8}, {"ids_end": 9}):
        wrong = msgspec.structs.replace(run, **fields)
        house.put(house.orders, layout.run_row(run.base), wrong)
        assert "id" in house.only_error().what


def test_rows_that_do_not_tile(house: Damaged) -> None:
    first = house.rows(house.orders, "journal/")[0]
    house.delete(first.row)
    assert house.only_error().what == "no run holds offsets 0 to 6"
    house.put(house.orders, first.row, first.value)
    house.change_head(journaled=6)
    assert house.only_error().what == "journals end at 6, but their rows at 12"
    house.change_head(journaled=14)
    report = house.verify()
    assert any("no run holds offsets 12 to 15" in each.what for each in report.findings)
    house.change_head(journaled=16)
    assert house.only_error().what == "journals end at 16, but its next is 15"


def test_rows_of_journals_that_are_none(house: Damaged) -> None:
    [run] = house.runs(house.orders)
    journal = house.journals(house.orders)[1]
    house.put(house.orders, layout.journal_row(6), msgspec.structs.replace(run, base=6))
    wrong = [finding.what for finding in house.verify().findings]
    assert wrong[0] == "is not the row of a journal"
    house.put(house.orders, layout.journal_row(6), msgspec.structs.replace(journal, base=5))
    assert house.verify().findings[0].what == "holds the run of offset 5"
    house.put(house.orders, layout.journal_row(6), journal)
    house.put(house.orders, layout.run_row(12), msgspec.structs.replace(journal, base=12))
    assert house.verify().findings[0].what == "is the row of a journal"


def test_slot_rows_of_journals(house: Damaged) -> None:
    first = next(row for row in house.rows(house.orders, "slot/") if row.value == b"6j")
    house.delete(first.row)
    assert "is missing: the run at 0 needs it" in house.only_error().what
    house.put(house.orders, first.row, b"5j")
    assert "says b'5j', the run ends at 6" in house.only_error().what
    house.put(house.orders, first.row, first.value)
    house.put(house.orders, first.row + "x", b"6j")
    assert "names no run" in house.only_error().what
    house.delete(first.row + "x")
    assert house.verify().errors == 0


def test_amendments_that_no_reader_sees_or_that_have_no_value(house: Damaged) -> None:
    row = layout.amend_row(9)
    house.put(house.orders, row, encode_row(Amendment(2, "update", 0, b"x")))
    assert house.verify().errors == 0
    house.put(house.orders, row, encode_row(Amendment(9, "update", 0, b"x")))
    assert "has sequence 9, the head counts 3" in house.only_error().what
    key = layout.amendment(house.orders.incarnation, 0, 0, 0, "xyz")
    house.put(house.orders, row, encode_row(Amendment(2, "update", 0, object=key, crc=1)))
    assert f"object `{key}`: is missing" in house.only_error().what
    house.store.put(key, b"large")
    assert "by its checksum" in house.only_error().what
    stored = Amendment(2, "update", 0, object=key, crc=crc32c.crc32c(b"large"))
    house.put(house.orders, row, encode_row(stored))
    assert house.verify().findings == ()
    house.put(house.orders, row, encode_row(Amendment(2, "update", 0, object="../x")))
    assert "is not of this topic" in house.only_error().what
    house.delete(row)
    house.put(house.orders, layout.amend_row(14), encode_row(Amendment(2, "delete", 0)))
    assert "is not where the head says" in house.only_error().what
    house.delete(layout.amend_row(14))
    house.change_head(amended=(3, 1))
    assert "has amendments at 3 to 1" in house.only_error().what


@pytest.mark.parametrize("row", ["amend/x", "amend/1", layout.amend_row(1), "compile"])
def test_rows_that_do_not_decode(house: Damaged, row: str) -> None:
    value = encode_row(Amendment(1, "delete", 0)) if len(row) < 8 else b"\xc1"
    house.put(house.orders, row, b"\xc1" if row == "compile" else value)
    findings = [finding for finding in house.verify().findings if row in finding.where]
    assert [finding.severity for finding in findings] == ["error"]


def test_a_journal_that_has_amendments_nobody_made(house: Damaged) -> None:
    journal = house.journals(house.orders)[0].journal
    assert journal is not None
    house.change(journal=msgspec.structs.replace(journal, applied=4))
    assert house.only_error().what == "counts 3 amendments, but a journal has 4"


def test_a_compile_row_is_known(house: Damaged) -> None:
    house.put(house.orders, "compile", encode_row(HeldRow("me", 3)))
    assert house.verify().findings == ()


class Moving(MemoryCatalog):
    """While it is scanned, somebody appends, amends, compiles, trims and sweeps."""

    def __init__(self, house: Damaged, scans: int, policy: CompilePolicy, trims: bool) -> None:
        super().__init__()
        self.house, self.scans, self.policy, self.trims = house, scans, policy, trims
        self.moved = False

    def get(self, partition: str, row: str) -> Row | None:
        return self.house.catalog.get(partition, row)

    def scan(self, partition: str, *args: object, **kwargs: object) -> Iterator[Row]:
        rows = self.house.catalog.scan(partition, *args, **kwargs)  # type: ignore[arg-type]
        if self.moved:
            yield from rows
            return
        seen = ""
        for number, row in enumerate(list(rows)):
            if number == self.scans:
                self.moved = True
                self.move()
                later = f"{seen}\0" if seen else ""
                yield from self.house.catalog.scan(partition, later)
                return
            seen = row.row
            yield row

    def move(self) -> None:
        house = self.house
        house.with_ids(["5-0", "5-1"], T0 + 20_000)
        house.amend(house.orders, 4, b"late")
        house.compile(house.orders, self.policy)
        if self.trims:
            trim_topic(house.context, house.orders, ToOffsets({0: 8}))
        sweep_home(house.context, 0)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    "policy", [SIX, CompilePolicy.everything(), CompilePolicy(1, 1, max_events=3)]
)
def test_what_moves_while_it_is_read_is_no_damage(policy: CompilePolicy, trims: bool) -> None:
    for scans in range(18):
        house = Damaged()
        moving = Moving(house, scans, policy, trims)
        context = Context(house.store, moving, house.clock, house.ids, house.context.random)
        report = verify_topic(context, house.orders)
        assert report.errors == 0, (scans, report.findings)
        assert house.verify().errors == 0


def test_a_journal_without_any_event(house: Damaged) -> None:
    for offset in range(6):
        house.amend(house.orders, offset, delete=True)
    house.compile(house.orders)
    sweep_home(house.context, 0)
    assert house.journals(house.orders)[0].events == 0
    assert house.verify().findings == ()
