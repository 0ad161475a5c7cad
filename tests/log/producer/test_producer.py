"""Producers: durable futures, order, idempotence over restarts, bounds, and bad events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidelog
from tidelog import Event, Home, Position
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    PartialAppendError,
    UnavailableError,
)
from tidelog.home import World, create_home
from tidelog.log.producer.flush_queue import FlushQueue
from tidelog.settings import LogSettings, Settings
from tidelog.store.base import Store


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 4)
        yield opened


def all_events(home: Home, topic: str = "t") -> list[Event]:
    partitions = home.topic(topic).partitions
    return [event for p in range(partitions) for event in home.read(topic, p)]


def test_what_was_sent_is_read_with_all_its_fields(home: Home) -> None:
    moment = datetime(2026, 11, 15, 12, tzinfo=UTC)
    with home.producer("t") as producer:
        future = producer.send(
            b"\x00value",
            key=b"k",
            id="id-1",
            timestamp=moment,
            type="created",
            headers=(("a", b"1"), ("a", b"")),
        )
        position = future.result(60)
        assert future.done()
    partition = home.partition_for("t", b"k")
    assert position == Position("t", partition, 0)
    (event,) = home.read("t", partition)
    assert event == Event(
        b"\x00value",
        b"k",
        "id-1",
        int(moment.timestamp() * 1000),
        "created",
        (("a", b"1"), ("a", b"")),
        "t",
        partition,
        0,
    )
    assert event.position == position


def test_null_and_empty_values_are_kept_apart(home: Home) -> None:
    home.append(
        "t", [Event(None, key=b"k"), Event(b"", key=b"k"), Event(b"x", key=b"")], partition=1
    )
    values = [(event.value, event.key) for event in home.read("t", 1)]
    assert values == [(None, b"k"), (b"", b"k"), (b"x", b"")]


def test_order_and_dense_offsets_over_many_flushes(home: Home) -> None:
    with home.producer("t") as producer:
        futures = [producer.send(b"%d" % n, key=b"k%d" % (n % 10)) for n in range(5_000)]
        producer.flush()
        positions = [future.result(0) for future in futures]
    for partition in range(4):
        events = list(home.read("t", partition))
        assert [event.offset for event in events] == list(range(len(events)))
        numbers = [int(event.value or b"") for event in events]
        assert numbers == sorted(numbers)
    by_place = {(event.partition, event.offset): event.value for event in all_events(home)}
    for number, position in enumerate(positions):
        assert by_place[position.partition, position.offset] == b"%d" % number


def test_tables_and_event_lists_go_the_same_way(home: Home) -> None:
    table = pa.table(
        {
            "value": pa.array([b"%d" % n for n in range(1_000)]),
            "key": pa.array([b"k%d" % (n % 7) if n % 3 else None for n in range(1_000)]),
            "timestamp": pa.array(range(1_000), pa.int64()),
        }
    )
    positions = home.append("t", table)
    assert len(positions) == 1_000
    found = {event.position: event for event in all_events(home)}
    for number, position in enumerate(positions):
        assert found[position].value == b"%d" % number
        assert found[position].timestamp == number
        if number % 3:
            key = b"k%d" % (number % 7)
            assert position.partition == home.partition_for("t", key)
    assert positions[5:7][0] == positions[5]
    assert len(home.append("t", [])) == 0
    assert len(home.append("t", table.slice(0, 0))) == 0


def test_an_expected_offset_is_met_or_nothing_is_stored(home: Home) -> None:
    first = home.append("t", [Event(b"a"), Event(b"b")], partition=2, expected_offset=0)
    assert [position.offset for position in first] == [0, 1]
    with pytest.raises(ConflictError, match="append at offset 0 conflicts, next is 2"):
        home.append("t", [Event(b"c")], partition=2, expected_offset=0)
    home.append("t", [Event(b"c")], partition=2, expected_offset=2)
    assert [event.value for event in home.read("t", 2)] == [b"a", b"b", b"c"]
    with pytest.raises(InvalidError, match="needs a partition"):
        home.append("t", [Event(b"c")], expected_offset=3)


BAD_EVENTS = {
    "too large": Event(b"x" * (1 << 20) + b"x"),
    "text value": Event("text"),  # type: ignore[arg-type]
    "text key": Event(b"x", key="k"),  # type: ignore[arg-type]
    "bytes id": Event(b"x", id=b"id"),  # type: ignore[arg-type]
    "empty id": Event(b"x", id=""),
    "negative time": Event(b"x", timestamp=-1),
    "far time": Event(b"x", timestamp=10**15),
    "float time": Event(b"x", timestamp=1.5),  # type: ignore[arg-type]
    "naive time": Event(b"x", timestamp=datetime(2026, 1, 1)),  # noqa: DTZ001
    "bad header": Event(b"x", headers=(("a", "text"),)),  # type: ignore[arg-type]
    "half a surrogate": Event(b"x", id="\ud800"),
    "half a surrogate in a type": Event(b"x", type="\ud800"),
    "half a surrogate in a header": Event(b"x", headers=(("\ud800", b""),)),
    "too large in bytes": Event(b"x", type="\u00e9" * (1 << 19)),
    "huge header": Event(b"x", headers=(("a", b"x" * (1 << 21)),)),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_bad_events_are_refused_before_anything_is_written(home: Home, case: str) -> None:
    bad = BAD_EVENTS[case]
    with pytest.raises(InvalidError):
        home.append("t", [Event(b"good"), bad])
    with home.producer("t") as producer, pytest.raises(InvalidError):
        producer.send(
            bad.value,
            bad.key,
            id=bad.id,
            timestamp=bad.timestamp,
            type=bad.type,
            headers=bad.headers,
        )
    assert all_events(home) == []
    assert list(home.store.list("topics/")) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"payload": [b"x"]}), "unknown column `payload`"),
        (pa.table({"key": [b"x"]}), "no column `value`"),
        (pa.table({"value": [1]}), "column `value` is int64"),
        (pa.table({"value": [b"x"], "timestamp": [-5]}), "outside of the years"),
        (
            pa.table({"value": [b"x"], "timestamp": pa.array([0], pa.timestamp("ms"))}),
            "no time zone",
        ),
    ],
)
def test_bad_tables_are_refused(home: Home, table: pa.Table, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        home.append("t", table)


# Named producers.


def test_a_sequence_is_stored_once_and_answers_with_its_first_position(home: Home) -> None:
    with home.producer("t", name="importer") as first:
        positions = [first.send(b"%d" % n, sequence=n).result(60) for n in range(10)]
    assert [position.partition for position in positions] == [n % 4 for n in range(10)]
    with home.producer("t", name="importer") as again:
        assert again.last_sequence == 9
        repeated = [again.send(b"%d" % n, sequence=n).result(60) for n in range(12)]
        assert repeated[:10] == positions
        again.send(b"auto").result(60)
        with pytest.raises(InvalidError, match="must grow"):
            again.send(b"x", sequence=11)
    assert len(all_events(home)) == 13


def test_another_event_under_the_last_sequence_is_refused(home: Home) -> None:
    """Else another input under the same name would pass for the one that was stored."""
    with home.producer("t", name="importer") as first:
        for n in range(10):
            first.send(b"%d" % n, sequence=n).result(60)
    for n in range(6, 10):  # the last one of each partition
        with home.producer("t", name="importer") as again:
            for other in (b"other", None):
                with pytest.raises(AlreadyExistsError, match="with another event: open a producer"):
                    again.send(other, sequence=n)
            again.send(b"%d" % n, timestamp=7, headers=[("try", b"2")], sequence=n).result(60)
    assert len(all_events(home)) == 10


def test_a_mark_given_with_a_sequence_is_stored_with_it(home: Home) -> None:
    with home.producer("t", name="n") as producer:
        assert producer.marks() == {}
        for n in range(6):
            producer.send(b"%d" % n, sequence=n, mark=b"m%d" % n)
    for _ in range(2):  # opening keeps them
        with home.producer("t", name="n") as producer:
            assert producer.marks() == {n: b"m%d" % n for n in range(2, 6)}
            with pytest.raises(AlreadyExistsError, match="sequence 5 was stored before"):
                producer.send(b"5", sequence=5, mark=b"m6")
            producer.send(b"other", sequence=5, mark=b"m5").result(60)
            for mark in (b"", b"x" * 65):
                with pytest.raises(InvalidError, match="give 1 to 64 bytes"):
                    producer.send(b"x", mark=mark)
    with home.producer("t") as producer, pytest.raises(InvalidError, match="only a named producer"):
        producer.send(b"x", mark=b"m")


def test_a_named_producer_fences_the_older_process(home: Home) -> None:
    old = home.producer("t", name="n")
    old.send(b"1", sequence=0).result(60)
    new = home.producer("t", name="n")
    future = old.send(b"2", sequence=4)
    with pytest.raises(FencedError, match="opened elsewhere"):
        future.result(60)
    with pytest.raises((FencedError, UnavailableError)):
        old.send(b"3", sequence=8).result(60)
    new.send(b"2", sequence=4).result(60)
    new.close()
    old.close()  # its failures were told by the futures
    assert sorted(event.value or b"" for event in all_events(home)) == [b"1", b"2"]


def test_a_sequence_too_old_to_know_is_told(home: Home) -> None:
    with home.producer("t", name="n") as producer:
        for number in range(20):
            producer.send(b"x", key=b"one", sequence=number).result(60)
    with home.producer("t", name="n") as producer:
        with pytest.raises(AlreadyExistsError, match="was stored before"):
            producer.send(b"x", key=b"one", sequence=0).result(60)
        assert producer.send(b"x", key=b"one", sequence=19).result(60).offset == 19


def test_names_and_sequences_that_make_no_sense(home: Home) -> None:
    for name in ("", "~x", "x" * 201):
        with pytest.raises(InvalidError):
            home.producer("t", name=name)
    with home.producer("t") as producer, pytest.raises(InvalidError, match="only a named producer"):
        producer.send(b"x", sequence=1)
    with home.producer("t", name="n") as producer:
        with pytest.raises(InvalidError):
            producer.send(b"x", sequence=-1)
        with pytest.raises(InvalidError, match="use send"):
            producer.append([Event(b"x")])


# Trouble.


class FailingStore:
    """Passes everything on, but can refuse or hold up puts."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.refuse = False
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: str, data: bytes) -> str:
        self.gate.wait(60)
        if self.refuse:
            raise UnavailableError("the store is down")
        return self._inner.put(key, data)


def failing_home(home: Home, **settings: int) -> tuple[Home, FailingStore]:
    store = FailingStore(home.store)
    object.__setattr__(home.context, "store", store)
    object.__setattr__(home.context, "log_settings", LogSettings(**settings))
    return home, store


def test_a_failed_flush_fails_those_behind_it_and_then_goes_on(home: Home) -> None:
    home, store = failing_home(home, linger_ms=1)
    producer = home.producer("t")
    store.refuse = True
    future = producer.send(b"lost")
    with pytest.raises(UnavailableError):
        future.result(60)
    producer.flush()  # what was told is not raised again
    store.refuse = False
    assert producer.send(b"kept").result(60).offset == 0
    producer.close()
    assert [event.value for event in all_events(home)] == [b"kept"]


def test_a_flush_ends_whatever_fails_after_its_commit_failed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no commit")

    def fail(*_: object) -> None:
        raise MemoryError

    producer = home.producer("t")
    with monkeypatch.context() as patch:
        patch.setattr(FlushQueue, "_commit", refuse)
        patch.setattr(FlushQueue, "_abandon", fail)
        with pytest.raises(OSError, match="no commit"):
            producer.send(b"lost").result(60)
    assert producer.send(b"stored").result(60).offset == 0
    producer.close()


def test_close_tells_of_a_failure_that_nobody_saw(home: Home) -> None:
    home, store = failing_home(home, linger_ms=1)
    producer = home.producer("t")
    store.refuse = True
    producer.send(b"lost")
    with pytest.raises(UnavailableError):
        producer.close()
    with pytest.raises(InvalidError, match="is closed"):
        producer.send(b"x")


def test_room_counts_a_flush_once_while_it_starts(home: Home) -> None:
    """Else a server refuses events that fit."""
    found: list[int] = []
    with home.producer("t") as producer:
        before, pool = producer.room, producer._queue._pool
        submit = pool.submit
        look = threading.Thread(target=lambda: found.append(producer.room))

        def slow(*work: Any) -> Any:
            look.start()
            look.join(0.2)
            return submit(*work)

        pool.submit = slow  # type: ignore[method-assign]
        producer.send(b"x" * 1_000)
        producer.flush()
        look.join()
    assert before - 2_000 < found[0] <= before


def test_a_full_buffer_blocks_until_there_is_room(home: Home) -> None:
    home, store = failing_home(
        home, linger_ms=0, segment_bytes=10_000, buffer_bytes=50_000, event_bytes_max=10_000
    )
    producer = home.producer("t")
    store.gate.clear()
    sent: list[int] = []

    def send() -> None:
        for number in range(20):
            producer.send(b"x" * 5_000)
            sent.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.3)
    blocked_at = len(sent)
    assert blocked_at < 12
    store.gate.set()
    sender.join(60)
    producer.close()
    assert len(sent) == 20
    assert len(all_events(home)) == 20


def test_a_partial_append_tells_positions_and_remainder(home: Home) -> None:
    home, store = failing_home(home, segment_bytes=1_000, event_bytes_max=1_000)
    calls = 0
    real_put = store._inner.put

    def put(key: str, data: bytes) -> str:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise UnavailableError("the store is down")
        return real_put(key, data)

    store.put = put  # type: ignore[method-assign]
    events = [Event(b"%03d" % n + b"x" * 100) for n in range(50)]
    with pytest.raises(PartialAppendError) as told:
        home.append("t", events)
    stored = {event.position: event.value for event in all_events(home)}
    for event, position in zip(events, told.value.positions, strict=True):
        if position is not None:
            assert stored[position] == event.value
    assert len(stored) + len(told.value.remainder) == 50
    assert 0 < len(stored) < 50


def test_damage_is_told_with_object_partition_and_offsets(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), cache_bytes=0)
    with create_home(settings, world=World(environ={}))[0] as home:
        home.create_topic("t", 1)
        home.append("t", [Event(b"%d" % n) for n in range(100)])
        (segment,) = (tmp_path / "o" / "topics").rglob("*.arrow")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        with pytest.raises(CorruptError, match=r"segments/.*partition `t/0`, offsets 0 to 100"):
            list(home.read("t"))
        segment.unlink()
        with pytest.raises(CorruptError, match="is gone"):
            list(home.read("t"))
