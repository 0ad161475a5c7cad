"""Reading a range when the client misbehaves: silence, errors that pass, and errors that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from tidelog.connectors.kafka.client import ClientWatch
from tidelog.connectors.kafka.reader import PartitionRead
from tidelog.connectors.kafka.records import RecordConsumer
from tidelog.connectors.source import Chunk, SourcePartition
from tidelog.errors import (
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.testing.scheduler import FakeClock

TIMEOUT_S = 15.0
PARTITION = SourcePartition("clicks", "3")


class ScriptedConsumer:
    """A client that gives what a script says, a turn at a time, and then nothing for ever.

    Every turn takes as long as it was asked to wait. A number in a turn is how far it has fetched.
    """

    def __init__(self, *turns: list[Message] | int, held: tuple[int, int] = (0, 10)) -> None:
        self.clock = FakeClock()
        self.watch = ClientWatch()
        self.held = held
        self.asked: list[int] = []
        self._turns = iter(turns)

    def assign(self, places: list[Any]) -> None:
        (place,) = places
        assert (place.topic, place.partition) == (PARTITION.topic, int(PARTITION.name))

    def get_watermark_offsets(self, _place: Any, timeout: float) -> tuple[int, int]:
        assert timeout == TIMEOUT_S
        return self.held

    def poll(self, _timeout: float) -> None:
        return None

    def consume(self, count: int, timeout: float) -> list[Message]:
        self.asked.append(count)
        self.clock.advance(timeout)
        turn = next(self._turns, [])
        if isinstance(turn, int):
            self.watch.fetched = turn
            return []
        return turn

    def chunks(self, start: int, limit: int) -> Iterator[Chunk]:
        consumer: Any = self
        reading = PartitionRead(consumer, PARTITION, self.watch, TIMEOUT_S, self.clock, no_records)
        return reading.chunks(start, limit)

    def read(self, start: int = 0, limit: int = 10) -> list[int]:
        chunks = list(self.chunks(start, limit))
        assert chunks[-1].position == str(limit)
        return [offset for chunk in chunks for offset in chunk.batch.column("offset").to_pylist()]


def no_records(offset: int) -> RecordConsumer:
    raise AssertionError(f"offset {offset}: no record has headers")


def events(*offsets: int, size: int = 1) -> list[Message]:
    return [Message("clicks", 3, n, value=b"x" * size, timestamp=(1, 7)) for n in offsets]


def error(code: int, offset: int = -1) -> Message:
    return Message("clicks", 3, offset, value=b"what librdkafka says", error=KafkaError(code))


def end(offset: int) -> Message:
    return error(KafkaError._PARTITION_EOF, offset)


def test_a_range_is_over_when_a_later_offset_was_seen() -> None:
    assert ScriptedConsumer(events(*range(10))).read() == list(range(10))
    assert ScriptedConsumer(events(2, 5), [end(10)]).read() == [2, 5]
    assert ScriptedConsumer([*events(2, 5), end(12)], held=(0, 12)).read() == [2, 5]
    assert ScriptedConsumer(events(2, 5, 11), held=(0, 12)).read() == [2, 5]
    assert ScriptedConsumer(events(11, 12), held=(0, 13)).read() == []


def test_the_end_of_a_partition_that_grew_meanwhile_is_not_the_limit() -> None:
    assert ScriptedConsumer([end(4)], events(4, 9)).read() == [4, 9]


def test_no_more_is_asked_for_than_is_left_and_less_when_messages_are_large() -> None:
    consumer = ScriptedConsumer(events(0, 1, size=1 << 20), events(*range(2, 10)))
    consumer.read()
    assert consumer.asked == [1, 4]  # one alone, to see how large they are
    consumer = ScriptedConsumer(*([n] for n in events(*range(700))), held=(0, 700))
    consumer.read(0, 700)
    assert consumer.asked == [1, *[500] * 200, *range(499, 0, -1)]


def test_silence_ends_in_time_and_progress_does_not() -> None:
    consumer = ScriptedConsumer(events(0))
    began = consumer.clock.monotonic_s()
    with pytest.raises(UnavailableError, match="from offset 1 on in 15 s, 10 is the end"):
        consumer.read()
    assert TIMEOUT_S <= consumer.clock.monotonic_s() - began <= TIMEOUT_S + 1
    fetching = [n for n in range(10) for _ in range(200)]  # each offset takes 10 s
    assert ScriptedConsumer(*fetching, [end(10)]).read() == []


def test_a_slow_caller_is_not_a_silent_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.connectors.kafka.reader._CHUNK_MESSAGES", 1)
    consumer = ScriptedConsumer(*([each] for each in events(*range(9))), [], events(9))
    for _ in consumer.chunks(0, 10):
        consumer.clock.advance(1_000)


def test_the_reason_of_silence_is_what_the_client_told() -> None:
    troubled = [error(KafkaError._TRANSPORT), error(KafkaError.GROUP_AUTHORIZATION_FAILED)]
    with pytest.raises(UnavailableError, match="Broker transport failure"):
        ScriptedConsumer(troubled, [error(KafkaError._ALL_BROKERS_DOWN)]).read()
    refused = ScriptedConsumer()
    refused.watch.note(KafkaError(KafkaError._AUTHENTICATION))
    with pytest.raises(InvalidError, match="Authentication failure"):
        refused.read()
    with pytest.raises(UnavailableError, match="nothing came from offset 1 on"):  # it had passed
        ScriptedConsumer(troubled, events(0)).read()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, NotFoundError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, InvalidError),
        (KafkaError._BAD_MSG, CorruptError),
        (KafkaError.INVALID_MSG, CorruptError),
    ],
)
def test_errors_that_last_are_raised_at_once(code: int, kind: type[Exception]) -> None:
    consumer = ScriptedConsumer([*events(0), error(code)])
    with pytest.raises(kind, match="kafka partition `clicks/3`"):
        consumer.read()
    assert len(consumer.asked) == 1


def test_a_position_that_the_broker_refuses() -> None:
    class Trimmed(ScriptedConsumer):
        def consume(self, count: int, timeout: float) -> list[Message]:
            self.held = (8, 10)
            return super().consume(count, timeout)

    turns = events(0, 1), [error(KafkaError._AUTO_OFFSET_RESET, 2)]
    with pytest.raises(UnavailableError):  # it is there, so the refusal may pass
        ScriptedConsumer(*turns).read()
    with pytest.raises(NotFoundError) as caught:
        Trimmed(*turns).read()
    assert caught.value.context == {"lost_from": 2, "first": 8}


def test_a_message_without_a_time_has_time_zero() -> None:
    absent = Message("clicks", 3, 0, value=b"x", timestamp=(0, -1))
    (chunk,) = ScriptedConsumer([absent]).chunks(0, 1)
    (row,) = chunk.batch.to_pylist()
    assert row["timestamp"].timestamp() == 0


def test_offsets_that_do_not_rise_are_a_bug() -> None:
    with pytest.raises(InternalError, match="offset 0 came after 1"):
        ScriptedConsumer(events(0, 1), events(0)).read()
    with pytest.raises(InternalError, match="do not rise"):
        ScriptedConsumer(events(0, 2, 2, 9)).read()


def test_an_error_of_the_client_itself_is_translated() -> None:
    class Broken(ScriptedConsumer):
        def consume(self, count: int, timeout: float) -> list[Message]:
            raise KafkaException(KafkaError(KafkaError._FATAL, "it is\nbroken"))

    with pytest.raises(UnavailableError, match="it is broken"):
        Broken().read()


@pytest.mark.parametrize("some", [[None], [b""], [b"x"], [None, b"", b"x", b"longer"]])
def test_null_and_empty_stay_apart_however_messages_come(some: list[bytes | None]) -> None:
    expected = [(some[n * n % len(some)], some[n % len(some)]) for n in range(40)]
    messages = [
        Message("clicks", 3, n, key=key, value=value, timestamp=(1, n))
        for n, (key, value) in enumerate(expected)
    ]
    turns = [messages[:1], messages[1:3], messages[3:20], messages[20:]]
    (chunk,) = ScriptedConsumer(*turns, held=(0, 40)).chunks(0, 40)
    chunk.batch.validate(full=True)
    rows = chunk.batch.select(["key", "value"]).to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == expected
