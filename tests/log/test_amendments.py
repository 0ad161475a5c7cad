"""Amendments: which ones a reader needs, and what they make of a batch of events."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compiled_logs import Bench
from tests.support.topic_upkeep import House
from tidelog.codec.event_batch import batch_of
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log import run_reader as amended
from tidelog.log.run_reader import (
    NO_AMENDMENTS,
    Amendments,
    EventRows,
    apply,
    joined,
    pending,
)
from tidelog.model import layout
from tidelog.model.topic import Amendment, Head, Journal, Run
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock

DELETE = Amendment(1, "delete", 0)


def update(value: bytes | None, sequence: int = 1) -> Amendment:
    return Amendment(sequence, "update", 0, value)


def amendments(rows: Mapping[int, Amendment]) -> Amendments:
    offsets = sorted(rows)
    return Amendments(np.array(offsets, np.int64), tuple(rows[offset] for offset in offsets))


def some_rows(offsets: list[int], base: int, end: int, is_dense: bool = False) -> EventRows:
    values = [b"%d" % offset for offset in offsets]
    ids = [f"id{offset}" for offset in offsets]
    batch = batch_of([offsets, ids, None, values, None, None])
    return EventRows(base, end, batch, None if is_dense else np.array(offsets, np.int64))


def held(parts: list[EventRows]) -> dict[int, tuple[str, bytes | None]]:
    found = {}
    for part in parts:
        columns = part.batch.column("id").to_pylist(), part.batch.column("value").to_pylist()
        found |= dict(zip(part.offsets.tolist(), zip(*columns, strict=True), strict=True))
    return found


def check_tiles(parts: list[EventRows], base: int, end: int) -> None:
    at = base
    for part in parts:
        assert part.base == at
        assert all(part.base <= offset < part.end for offset in part.offsets.tolist())
        at = part.end
    assert at == end


@pytest.fixture
def store() -> Store:
    return MemoryStore(FakeClock())


@given(
    there=st.sets(st.integers(10, 40)),
    rows=st.dictionaries(
        st.integers(5, 45),
        st.one_of(st.just(DELETE), st.builds(update, st.none() | st.binary(max_size=3))),
    ),
    is_cut=st.booleans(),
)
def test_it_does_what_a_dict_would(
    there: set[int], rows: dict[int, Amendment], is_cut: bool
) -> None:
    store = MemoryStore(FakeClock())
    given_rows = some_rows(sorted(there), 10, 41)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amended, "_NEW_BYTES_MAX", 4 if is_cut else 1 << 20)
        parts = list(apply(given_rows, amendments(rows), store))
    wanted = {}
    for offset in there:
        row = rows.get(offset)
        if row is None:
            wanted[offset] = (f"id{offset}", b"%d" % offset)
        elif row.kind == "update":
            wanted[offset] = (f"id{offset}", row.value)
    assert held(parts) == wanted
    check_tiles(parts, 10, 41)


def test_untouched_rows_pass_as_they_are(store: Store) -> None:
    rows = some_rows([3, 4, 5], 3, 6, is_dense=True)
    assert list(apply(rows, amendments({2: DELETE, 6: DELETE}), store)) == [rows]
    assert rows.sparse is None


def test_dense_rows_lose_and_change_some(store: Store) -> None:
    rows = some_rows([3, 4, 5, 6], 3, 7, is_dense=True)
    parts = list(apply(rows, amendments({4: DELETE, 6: update(None)}), store))
    assert held(parts) == {3: ("id3", b"3"), 5: ("id5", b"5"), 6: ("id6", None)}


def test_a_batch_without_values_needs_none(store: Store) -> None:
    rows = some_rows([3, 4], 3, 5, is_dense=True)
    only = EventRows(3, 5, rows.batch.select(["timestamp"]))
    gone = Amendment(1, "update", 0, None, "nowhere")
    (part,) = apply(only, amendments({3: gone, 4: DELETE}), store)
    assert part.offsets.tolist() == [3]


def test_large_values_are_fetched_and_given_out_piece_by_piece(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amended, "_NEW_BYTES_MAX", 1_500)
    rows: dict[int, Amendment] = {}
    for offset in range(0, 20, 2):
        value = b"%d" % offset * 1_000
        store.put(f"values/{offset}", value)
        rows[offset] = Amendment(
            1, "update", 0, object=f"values/{offset}", crc=crc32c.crc32c(value)
        )
    rows[5] = DELETE
    parts = list(apply(some_rows(list(range(20)), 0, 20, is_dense=True), amendments(rows), store))
    assert len(parts) > 4
    check_tiles(parts, 0, 20)
    found = held(parts)
    assert 5 not in found
    assert len(found) == 19
    assert found[18] == ("id18", b"18" * 1_000)
    assert found[17] == ("id17", b"17")


def test_a_value_that_is_gone_is_told(store: Store) -> None:
    gone = Amendment(1, "update", 0, None, "nowhere")
    with pytest.raises(NotFoundError) as caught:
        list(apply(some_rows([1], 1, 2), amendments({1: gone}), store))
    assert caught.value.context["key"] == "nowhere"


def test_a_journal_gets_what_it_does_not_have_yet() -> None:
    rows = amendments({n: update(b"x", sequence=n) for n in range(1, 10)})
    run = Run(3, 5, "o", 0, 9, 0, 0, 0, 9, 0)
    journal = Run(3, 5, "o", 0, 9, 0, 0, 0, 9, 0, journal=Journal(0, 0, 5, applied=5))
    assert rows.of_run(run).offsets.tolist() == [3, 4, 5, 6, 7]
    assert rows.of_run(journal).offsets.tolist() == [6, 7]
    assert rows.get(4) == update(b"x", 4)
    assert rows.get(10) is None
    assert NO_AMENDMENTS.get(0) is None


def test_they_pickle_and_join() -> None:
    one, other = amendments({1: DELETE}), amendments({5: update(b"v")})
    both = pickle.loads(pickle.dumps(joined([one, other])))
    assert both.offsets.tolist() == [1, 5]
    assert both.rows == (DELETE, update(b"v"))


def test_only_what_the_head_tells_of_is_read() -> None:
    house = House()
    topic = house.topic()
    bench = Bench(house.context, topic)
    house.append(topic, [str(n) for n in range(100)])

    class Counting:
        scans = 0

        def scan(self, *args: object, **more: object) -> object:
            Counting.scans += 1
            return house.catalog.scan(*args, **more)  # type: ignore[arg-type]

    object.__setattr__(house.context, "catalog", Counting())
    assert pending(house.context, topic, 0, Head(next=100), 0) is NO_AMENDMENTS
    head = Head(next=100, amended=(40, 60))
    assert pending(house.context, topic, 0, head, 61) is NO_AMENDMENTS
    assert pending(house.context, topic, 0, head, 0, 40) is NO_AMENDMENTS
    assert Counting.scans == 0
    object.__setattr__(house.context, "catalog", house.catalog)
    bench.delete(40, 50, 60)
    head = bench.head
    assert pending(house.context, topic, 0, head, 0, 41).offsets.tolist() == [40]
    assert pending(house.context, topic, 0, head, 60).offsets.tolist() == [60]
    assert pending(house.context, topic, 0, head, 41, 60).offsets.tolist() == [50]


def test_they_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    topic = house.topic()
    bench = Bench(house.context, topic)
    house.append(topic, [str(n) for n in range(10)])
    bench.delete(1, 3, 5, 7)
    monkeypatch.setattr(amended, "_ROWS_MAX", 2)
    first = pending(house.context, topic, 0, bench.head, 0)
    assert first.offsets.tolist() == [1, 3]
    assert first.end == 4
    second = pending(house.context, topic, 0, bench.head, 4)
    assert second.offsets.tolist() == [5, 7]
    assert second.end is None
    monkeypatch.setattr(amended, "_BYTES_MAX", 1)
    assert pending(house.context, topic, 0, bench.head, 0).end == 2


def test_a_row_that_is_damaged_is_named() -> None:
    house = House()
    topic = house.topic()
    bench = Bench(house.context, topic)
    house.append(topic, ["a"])
    bench.delete(0)
    house.put(topic, layout.amend_row(0), b"\xff")
    with pytest.raises(CorruptError, match="amend/00000000000000000000"):
        pending(house.context, topic, 0, bench.head, 0)


def test_rows_are_cut_by_offset_and_by_count() -> None:
    rows = some_rows([12, 15, 16], 10, 20)
    assert rows.slice(0, 99) is rows
    part = rows.slice(13, 16)
    assert (part.base, part.end, part.offsets.tolist()) == (13, 16, [15])
    part = rows.slice(17, 18)
    assert (part.base, part.end, part.batch.num_rows) == (17, 18, 0)
    assert rows.slice(30, 40).base == rows.slice(30, 40).end == 20
    assert rows.take(3).offsets.tolist() == [12, 15, 16]
    assert rows.take(3).end == 20
    later = rows.take(1, 13)
    assert (later.base, later.end, later.offsets.tolist()) == (13, 16, [15])
    first = rows.take(2)
    assert (first.base, first.end, first.offsets.tolist()) == (10, 16, [12, 15])
    tail_gone = EventRows(5, 9, pa.RecordBatch.from_pydict({"id": ["a", "b"]}))
    part = tail_gone.slice(8, 9)
    assert (part.base, part.end, part.batch.num_rows) == (8, 9, 0)
    assert tail_gone.slice(6, 9).offsets.tolist() == [6]
