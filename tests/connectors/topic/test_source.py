"""A topic as a source: ranges are exact, what was trimmed is told, and plans need no catalog."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.compiled_logs import Bench
from tests.support.homes import a_store
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import Bounds, SourcePartition, SourceRange
from tidelog.connectors.topic.source import TopicSource
from tidelog.context import Context
from tidelog.errors import (
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.home import Home, create_home, open_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.partition_reader import Reader
from tidelog.model.event import Event
from tidelog.settings import Settings

ORDERS = SourcePartition("orders", "0")


@contextmanager
def context_of(config: str) -> Iterator[Context]:
    with open_home(config) as home:
        yield home.context


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "objects"), str(tmp_path / "catalog.sqlite"))
    with create_home(settings)[0] as opened:
        yield opened


@pytest.fixture
def source(home: Home) -> TopicSource:
    home.create_topic("orders")
    return TopicSource(functools.partial(context_of, home.config), "orders")


def fill(home: Home, count: int, first: int = 0) -> None:
    home.append("orders", [Event(b"%d" % n, timestamp=n) for n in range(first, first + count)])


def read(source: Any, start: int, limit: int) -> list[tuple[int, bytes]]:
    """Offsets and values of a range, after a look at what every read must keep."""
    chunks = list(source.read(SourceRange(ORDERS, str(start), str(limit))))
    return rows_of(chunks, limit)


def rows_of(chunks: list[Any], limit: int) -> list[tuple[int, bytes]]:
    assert chunks[-1].position == str(limit)
    assert all(chunk.batch.schema.equals(EVENT_SCHEMA) for chunk in chunks)
    table = pa.Table.from_batches([chunk.batch for chunk in chunks])
    return list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


def expected(start: int, limit: int) -> list[tuple[int, bytes]]:
    return [(n, b"%d" % n) for n in range(start, limit)]


def test_ranges_are_exact_over_many_runs(home: Home, source: TopicSource) -> None:
    for first in range(0, 50, 10):
        fill(home, 10, first)
    made = home.topic("orders").incarnation
    assert source.bounds([ORDERS]) == {ORDERS: Bounds("0", "50", made, is_dense=True)}
    for start, limit in ((0, 50), (0, 1), (9, 11), (10, 20), (13, 37), (49, 50), (50, 50), (0, 0)):
        assert read(source, start, limit) == expected(start, limit)


def test_columns_are_those_of_the_event(home: Home, source: TopicSource) -> None:
    event = Event(None, b"key", "an id", 1_700_000_000_000, "kind", (("h", b"v"),))
    home.append("orders", [event])
    (chunk,) = source.read(SourceRange(ORDERS, "0", "1"))
    (row,) = chunk.batch.to_pylist()
    assert (row["topic"], row["partition"], row["offset"]) == ("orders", 0, 0)
    assert (row["value"], row["key"], row["id"], row["type"]) == (None, b"key", "an id", "kind")
    assert row["headers"] == [{"name": "h", "value": b"v"}]
    assert row["timestamp"].timestamp() == 1_700_000_000


def test_small_runs_are_joined_and_large_reads_cut(
    home: Home, source: TopicSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 40, 4):
        fill(home, 4, first)
    assert len(list(source.read(SourceRange(ORDERS, "0", "40")))) == 1
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_ROWS", 10)
    chunks = list(source.read(SourceRange(ORDERS, "2", "38")))
    assert [chunk.position for chunk in chunks] == ["12", "24", "36", "38"]
    assert rows_of(chunks, 38) == expected(2, 38)


def test_partitions_come_in_the_order_of_their_numbers(home: Home) -> None:
    home.create_topic("wide", 12)
    source = TopicSource(functools.partial(context_of, home.config), "wide")
    found = source.partitions()
    assert [each.name for each in found] == [str(n) for n in range(12)]
    home.append("wide", [Event(b"x")], partition=11)
    bounds = source.bounds(found)
    assert [bound.end for bound in bounds.values()] == ["0"] * 11 + ["1"]


def test_a_trimmed_start_is_told(home: Home, source: TopicSource) -> None:
    fill(home, 20)
    fill(home, 20, 20)
    home.trim("orders", ToOffsets({0: 20}))
    made = home.topic("orders").incarnation
    assert source.bounds([ORDERS]) == {
        ORDERS: Bounds("20", "40", made, is_dense=True, begins="retention")
    }
    for call in (source.reader, lambda wanted: list(source.read(wanted))):
        with pytest.raises(NotFoundError, match="continue from 20") as caught:
            call(SourceRange(ORDERS, "5", "40"))
        assert caught.value.context == {"lost_from": 5, "first": 20}
    assert read(source, 20, 40) == expected(20, 40)


def test_a_trim_while_reading_is_told_from_where_it_hits(
    home: Home, source: TopicSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_ROWS", 1)
    monkeypatch.setattr("tidelog.log.partition_reader._RUNS_AT_ONCE", 1)
    for first in range(0, 40, 10):
        fill(home, 10, first)
    chunks = source.read(SourceRange(ORDERS, "0", "40"))
    assert next(chunks).position == "10"
    home.trim("orders", ToOffsets({0: 30}))
    with pytest.raises(NotFoundError) as caught:
        list(chunks)
    assert caught.value.context == {"lost_from": 10, "first": 30}


def test_a_limit_that_was_never_reached_is_told(home: Home, source: TopicSource) -> None:
    fill(home, 5)
    old = SourceRange(ORDERS, "3", "5")
    before = source.bounds([ORDERS])[ORDERS].incarnation
    home.delete_topic("orders")
    home.create_topic("orders")
    assert source.bounds([ORDERS])[ORDERS].incarnation not in ("", before)
    fill(home, 4)
    for call in (source.reader, lambda wanted: list(source.read(wanted))):
        with pytest.raises(NotFoundError, match="ends at offset 4") as caught:
            call(old)
        assert caught.value.context == {"lost_from": 3, "first": 0, "end": 4}


def test_what_is_gone_is_not_found(home: Home, source: TopicSource) -> None:
    for gone in (SourcePartition("orders", "1"), SourcePartition("other", "0")):
        with pytest.raises(NotFoundError, match="is not there"):
            source.bounds([gone])
        with pytest.raises(NotFoundError, match="is not there"):
            list(source.read(SourceRange(gone, "0", "0")))
    home.delete_topic("orders")
    with pytest.raises(NotFoundError):
        source.partitions()


def test_reading_that_stops_short_is_never_taken_for_done(
    home: Home, source: TopicSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 5)
    monkeypatch.setattr(Reader, "read", lambda *_: iter(()))
    with pytest.raises(InternalError, match="ended at offset 0, not at 5"):
        list(source.read(SourceRange(ORDERS, "0", "5")))


def test_a_source_pickles_and_opens_its_home_where_it_is(home: Home, source: TopicSource) -> None:
    fill(home, 5)
    there = pickle.loads(pickle.dumps(source))
    assert there.url == "topic:orders"
    assert there.partitions() == [ORDERS]
    assert read(there, 1, 4) == expected(1, 4)


def test_a_plan_pickles_and_reads_from_the_store_alone(home: Home, source: TopicSource) -> None:
    for first in range(0, 50, 10):
        fill(home, 10, first)
    for start, limit in ((0, 50), (13, 37), (20, 30), (7, 7)):
        plan = pickle.loads(
            pickle.dumps(source.reader(SourceRange(ORDERS, str(start), str(limit))))
        )
        assert rows_of(list(plan.read()), limit) == expected(start, limit)
    assert [run.base for run in source.reader(SourceRange(ORDERS, "13", "37")).runs] == [10, 20, 30]


def test_a_plan_checks_what_it_reads(home: Home, source: TopicSource) -> None:
    fill(home, 5)
    plan = source.reader(SourceRange(ORDERS, "2", "5"))
    store = a_store(home.store.url)
    key = plan.runs[0].object
    data = bytearray(store.get(key))
    data[plan.runs[0].byte_start + 8] ^= 1
    store.delete([key])
    with pytest.raises(UnavailableError, match="plan the range again") as caught:
        list(plan.read())
    assert caught.value.context == {"lost_from": 2}
    store.put(key, bytes(data))
    with pytest.raises(CorruptError):
        list(plan.read())


def amended(home: Home) -> tuple[Bench, list[tuple[int, bytes]]]:
    """Five runs of ten, two in a journal, with amendments in both; and what is to be read."""
    for first in range(0, 50, 10):
        fill(home, 10, first)
    bench = Bench(home.context, home.topic("orders"))
    bench.delete(3, *range(12, 18))
    bench.compile(0, 20)
    bench.delete(5, *range(30, 40))
    bench.update(6, b"six")
    bench.update(45, b"large" * 1_000, is_large=True)
    gone = {3, 5, *range(12, 18), *range(30, 40)}
    changed = {6: b"six", 45: b"large" * 1_000}
    return bench, [(n, changed.get(n, b"%d" % n)) for n in range(50) if n not in gone]


def test_what_was_amended_and_compiled_is_read_as_it_is_now(
    home: Home, source: TopicSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.codec.journal_file._GROUP_ROWS", 4)
    bench, wanted = amended(home)
    for start, limit in ((0, 50), (3, 4), (5, 14), (12, 18), (30, 40), (35, 46), (18, 22)):
        part = [row for row in wanted if start <= row[0] < limit]
        assert read(source, start, limit) == part
        plan = pickle.loads(
            pickle.dumps(source.reader(SourceRange(ORDERS, str(start), str(limit))))
        )
        assert rows_of(list(plan.read()), limit) == part
    assert not source.bounds([ORDERS])[ORDERS].is_dense
    bench.compile(0, 50)
    bench.sweep()
    assert read(source, 0, 50) == wanted


def test_plan_beside_a_compile_reads_every_event_once(
    home: Home, source: TopicSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 50, 10):
        fill(home, 10, first)
    look, looks = Reader._look, iter(range(9))
    monkeypatch.setattr("tidelog.log.partition_reader._RUNS_AT_ONCE", 1)

    def compiled_after_two(reader: Reader, *given: Any) -> Any:
        if next(looks) == 2:
            monkeypatch.setattr(Reader, "_look", look)
            Bench(home.context, home.topic("orders")).compile(0, 50)
        return look(reader, *given)

    monkeypatch.setattr(Reader, "_look", compiled_after_two)
    plan = source.reader(SourceRange(ORDERS, "5", "45"))
    assert rows_of(list(plan.read()), 45) == expected(5, 45)


def test_a_plan_is_of_its_time_and_stale_when_that_was_swept(
    home: Home, source: TopicSource
) -> None:
    bench, wanted = amended(home)
    plan = source.reader(SourceRange(ORDERS, "0", "50"))
    bench.delete(0, 41)
    bench.compile(0, 30)
    assert rows_of(list(plan.read()), 50) == wanted
    bench.sweep()
    with pytest.raises(UnavailableError, match="plan the range again") as caught:
        list(plan.read())
    assert caught.value.context == {"lost_from": 0}
    bench.update(45, b"other")
    bench.sweep()
    plan = source.reader(SourceRange(ORDERS, "40", "50"))
    assert (45, b"other") in rows_of(list(plan.read()), 50)


def test_a_new_value_that_is_gone_makes_a_plan_stale(home: Home, source: TopicSource) -> None:
    bench, _ = amended(home)
    plan = source.reader(SourceRange(ORDERS, "40", "50"))
    bench.update(45, b"other")
    bench.sweep()
    with pytest.raises(UnavailableError, match="plan the range again"):
        list(plan.read())


def test_addresses(home: Home) -> None:
    def open_context() -> Any:
        return context_of(home.config)

    assert open_source("topic:orders", environ={}, open_context=open_context).url == "topic:orders"
    for wrong in ("topic://orders", "topic:a/b", "topic:", "topic:orders?x=1"):
        with pytest.raises(InvalidError):
            open_source(wrong, environ={}, open_context=open_context)


def test_positions_are_offsets(source: TopicSource) -> None:
    assert source.before("9", "10")
    assert source.count("9", "12") == 3
    with pytest.raises(InvalidError, match="is not an offset"):
        source.before("x", "1")
    with pytest.raises(InvalidError, match="runs backwards"):
        list(source.read(SourceRange(ORDERS, "2", "1")))
