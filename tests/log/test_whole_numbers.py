"""A number that is not whole is refused before anything is stored, and never poisons a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tidelog
from tidelog import Event, Home
from tidelog.errors import InvalidError
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.decoding import decode_json, decode_msgpack, pack_json, pack_stored
from tidelog.model.topic import Head

NUMBERS = [True, 1.0, "1", np.float64(1), np.True_]


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 2)
        for partition in (0, 1):
            opened.append("t", [Event(b"%d" % n) for n in range(5)], partition=partition)
        yield opened


def _consume(home: Home, act: Callable[[Consumer], object], start: Any = "earliest") -> None:
    with home.consumer("t", "c", start) as consumer:
        consumer.poll(100, 0.1)
        act(consumer)
        consumer.commit()


def _send(home: Home, sequence: Any) -> None:
    with home.producer("t", name="loader") as producer:
        producer.send(b"x", sequence=sequence).result()


DOORS: dict[str, Callable[[Home, Any], object]] = {
    "partitions of a topic": lambda home, number: home.create_topic("new", number),
    "max_latency_ms": lambda home, number: home.create_topic("new", max_latency_ms=number),
    "change of max_latency_ms": lambda home, number: home.change_topic("t", max_latency_ms=number),
    "partition": lambda home, number: home.append("t", [Event(b"x")], partition=number),
    "expected offset": lambda home, number: home.append(
        "t", [Event(b"x")], partition=0, expected_offset=number
    ),
    "sequence": _send,
    "read": lambda home, number: list(home.read("t", 0, number)),
    "end of a read": lambda home, number: list(home.read("t", 0, end=number)),
    "trim": lambda home, number: home.trim("t", tidelog.ToOffsets({0: number})),
    "trim of a partition": lambda home, number: home.trim("t", tidelog.ToOffsets({number: 1})),
    "bytes to keep": lambda home, number: home.trim("t", tidelog.KeepBytes(number)),
    "seek": lambda home, number: _consume(home, lambda each: each.seek(0, number)),
    "rewind": lambda home, number: _consume(home, lambda each: each.rewind(0, number)),
    "events of a poll": lambda home, number: _consume(home, lambda each: each.poll(number)),
    "partition of one read": lambda home, number: home.consumer("t", "c").read_once(number),
    "events of one read": lambda home, number: home.consumer("t", "c").read_once(0, number),
}


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("door", DOORS)
def test_other_number_is_refused_and_stored_nowhere(home: Home, door: str, number: Any) -> None:
    with pytest.raises(InvalidError):
        DOORS[door](home, number)
    assert not home.verify("t").errors
    assert not home.sweep("0s").refused
    assert [topic.name for topic in home.topics()] == ["t"]
    assert len(list(home.read("t"))) == 10
    with home.consumer("t", "c") as consumer:
        assert consumer.poll(1)


@pytest.mark.parametrize("door", DOORS)
def test_whole_number_of_numpy_is_accepted(home: Home, door: str) -> None:
    number = np.int64(5) if door == "expected offset" else np.int64(1)
    DOORS[door](home, number)
    assert not home.verify("t").errors
    assert home.sweep("0s").refused == ()


@pytest.mark.parametrize("start", [True, 1.0, np.float64(1), None], ids=repr)
def test_consumer_does_not_start_at_other_numbers(home: Home, start: Any) -> None:
    with pytest.raises(InvalidError):
        home.consumer("t", "c", start)
    with home.consumer("t", "c", np.int64(4)) as consumer:  # type: ignore[arg-type]
        assert [event.offset for event in consumer.poll()] == [4, 4]


@pytest.mark.parametrize("slot", [True, 1.0, None], ids=repr)
def test_slot_is_a_whole_number(home: Home, slot: Any) -> None:
    with pytest.raises(InvalidError):
        home.create_topic("new", slot=slot)
    assert [topic.name for topic in home.topics()] == ["t"]


@pytest.mark.parametrize("before", [True, 1.0, float("nan")], ids=repr)
def test_trim_to_another_number_is_refused(home: Home, before: Any) -> None:
    with pytest.raises(InvalidError):
        home.trim("t", before=before)


@pytest.mark.parametrize("sequence", [-1, 1 << 63, 10**30])
def test_sequence_has_bounds(home: Home, sequence: int) -> None:
    with pytest.raises(InvalidError, match="9223372036854775807"):
        _send(home, sequence)


def test_last_sequence_is_followed_by_none(home: Home) -> None:
    with home.producer("t", name="loader") as producer:
        producer.send(b"x", sequence=(1 << 63) - 1).result()
        with pytest.raises(InvalidError, match="9223372036854775807"):
            producer.send(b"x")


def test_cursor_moves_to_what_was_planned(home: Home) -> None:
    _consume(home, lambda consumer: None)
    handle = home.consumers("t").get("c")
    plan = handle.plan_seek("latest", 0)
    assert handle.move(0, "latest", plan.version)  # type: ignore[arg-type]
    assert home.lag("t")[0].cursor == 5


@pytest.mark.parametrize(
    "value",
    [Head(next=True), Head(next=1.0), Head(next=np.int64(1)), Head(next="1")],  # type: ignore[arg-type]
    ids=repr,
)
def test_value_that_no_reader_accepts_is_not_encoded(value: Head) -> None:
    for pack in (pack_stored, pack_json):
        with pytest.raises(InvalidError, match="Head: cannot be stored"):
            pack(value)


def test_stored_value_reads_back() -> None:
    value = Head(next=3, amended=(1, 2))
    assert decode_msgpack(pack_stored(value), Head) == value
    assert decode_json(pack_json(value), Head) == value
