"""What a run holds, be it a piece of a segment or a journal: checked, and only what is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compiled_logs import Bench
from tests.support.topic_upkeep import House
from tidelog.codec import journal_file as journal_codec
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log import run_reader as contents
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import EventRows, RunSelection, describe_run, fetch_run, read_run
from tidelog.model.topic import Run
from tidelog.store.base import Store

COUNT = 100
GROUP = 7


class Watched:
    """A store that notes which bytes were fetched."""

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.fetched: list[tuple[str, int, int | None]] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.fetched.append((key, start, end))
        return self.inner.get(key, start, end)

    @property
    def bytes(self) -> int:
        return sum((end or 0) - start for _, start, end in self.fetched)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_codec, "_GROUP_ROWS", GROUP)


@pytest.fixture
def house() -> House:
    return House()


def a_journal(house: House, *gone: int) -> Run:
    """Offsets 0 to 100, without some."""
    topic = house.topic()
    bench = Bench(house.context, topic)
    house.append(topic, [f"{n:03}" * 50 for n in range(COUNT)])
    bench.delete(*gone)
    return bench.compile(0, COUNT)


def checked(found: Iterator[EventRows], start: int, end: int) -> list[int]:
    at, offsets = start, []
    for rows in found:
        assert rows.base == at < rows.end
        at = rows.end
        for offset, value in zip(
            rows.offsets.tolist(), rows.batch.column("value").to_pylist(), strict=True
        ):
            assert rows.base <= offset < rows.end
            assert value == b"%03d" % offset * 50
            offsets.append(offset)
    assert at == end
    return offsets


@settings(max_examples=40, deadline=None)
@given(
    gone=st.sets(st.integers(0, COUNT - 1)),
    start=st.integers(0, COUNT),
    end=st.integers(0, COUNT),
    ahead=st.booleans(),
    at_once=st.booleans(),
)
def test_any_part_of_a_journal(
    gone: set[int], start: int, end: int, ahead: bool, at_once: bool
) -> None:
    house = House()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(journal_codec, "_GROUP_ROWS", GROUP)
        run = a_journal(house, *gone)
        data = fetch_run(house.store, run) if at_once else None
        selection = RunSelection(start, end, pool=pool if ahead else None)
        found = read_run(house.store, run, "w", selection, data=data)
        wanted = [n for n in range(start, end) if n not in gone]
        assert checked(found, start, max(start, end)) == wanted


def test_an_emptied_journal_still_stands_for_its_offsets(house: House) -> None:
    run = a_journal(house, *range(COUNT))
    assert run.events == 0
    watched = Watched(house.store)
    (rows,) = read_run(watched, run, "w", RunSelection(3, 50))  # type: ignore[arg-type]
    assert (rows.base, rows.end, rows.batch.num_rows) == (3, 50, 0)
    assert watched.fetched == []


def test_only_the_row_groups_of_the_range_are_fetched(house: House) -> None:
    run = a_journal(house)
    watched = Watched(house.store)
    assert checked(read_run(watched, run, "w", RunSelection(20, 22)), 20, 22) == [20, 21]  # type: ignore[arg-type]
    assert len(watched.fetched) == 3, "the footer, and two row groups"
    assert run.journal is not None
    events = run.journal.footer  # that many bytes lie before it
    assert watched.bytes - (run.byte_end - events) < events // 4


def test_only_the_wanted_columns_are_fetched(house: House) -> None:
    run = a_journal(house, 5)
    all_of_it, few = Watched(house.store), Watched(house.store)
    list(read_run(all_of_it, run, "w"))  # type: ignore[arg-type]
    offsets: list[int] = []
    for rows in read_run(few, run, "w", RunSelection(columns=["timestamp"])):  # type: ignore[arg-type]
        assert rows.batch.schema.names == ["timestamp"]
        offsets += rows.offsets.tolist()
    assert offsets == [n for n in range(COUNT) if n != 5]
    assert few.bytes < all_of_it.bytes * 0.8


def test_row_groups_that_nobody_wants_are_passed_over(house: House) -> None:
    run = a_journal(house, 5)
    watched = Watched(house.store)
    selection = RunSelection(0, 50, skip=lambda group: not group.first <= 20 <= group.last)
    found = list(read_run(watched, run, "w", selection))  # type: ignore[arg-type]
    assert len(watched.fetched) == 2, "the footer, and one row group"
    offsets = checked(iter(found), 0, 50)
    assert 20 in offsets
    assert len(offsets) == GROUP


def test_a_small_journal_is_fetched_at_once_and_a_large_one_is_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_journal(house)
    watched = Watched(house.store)
    data = fetch_run(watched, run)  # type: ignore[arg-type]
    assert data is not None
    assert len(checked(read_run(watched, run, "w", data=data), 0, COUNT)) == COUNT  # type: ignore[arg-type]
    assert len(watched.fetched) == 1
    monkeypatch.setattr(contents, "_WHOLE_BYTES", 100)
    assert fetch_run(watched, run) is None  # type: ignore[arg-type]


def test_damage_within_a_row_group_is_found(house: House) -> None:
    run = a_journal(house)
    data = bytearray(house.store.get(run.object))
    data[run.byte_end // 3] ^= 1
    house.store.delete([run.object])
    house.store.put(run.object, bytes(data))
    with pytest.raises(CorruptError, match="journals"):
        list(read_run(house.store, run, describe_run("orders", 0, run)))


def test_a_gone_object_comes_through(house: House) -> None:
    run = a_journal(house)
    house.store.delete([run.object])
    with ThreadPoolExecutor(2) as pool, pytest.raises(NotFoundError) as caught:
        list(read_run(house.store, run, "w", RunSelection(pool=pool)))
    assert caught.value.context["key"] == run.object


def test_a_piece_of_a_segment_in_parts(house: House) -> None:
    topic = house.topic()
    house.append(topic, [f"{n:03}" * 50 for n in range(10)])
    house.append(topic, [f"{n:03}" * 50 for n in range(10, 30)])
    (first, second) = Reader(house.context, topic, 0).runs(0)
    assert checked(read_run(house.store, second, "w", RunSelection(5, 15)), 10, 15) == [
        10,
        11,
        12,
        13,
        14,
    ]
    assert list(read_run(house.store, first, "w", RunSelection(10, 20))) == []
    (rows,) = read_run(house.store, first, "w", RunSelection(columns=["value"]))
    assert rows.batch.schema == pa.schema([("value", pa.binary())])
    assert rows.sparse is None
    # Bytes that were damaged on their way are fetched again; damage in the store is reported.
    assert checked(read_run(house.store, first, "w", data=b"nonsense"), 0, 10) == list(range(10))
    house.store.delete([first.object])
    house.store.put(first.object, b"nonsense" * 1_000)
    with pytest.raises(CorruptError, match="crc32c"):
        list(read_run(house.store, first, "w", data=b"nonsense"))


def test_a_run_is_described_by_where_it_is(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a", "b"])
    (run,) = Reader(house.context, topic, 0).runs(0)
    said = describe_run("orders", 0, run)
    assert run.object in said
    assert "`orders/0`" in said
    assert "offsets 0 to 2" in said
