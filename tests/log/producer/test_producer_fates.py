"""Stored, not stored, or unknown: what a producer says of each event when an append fails.

Also that threads share a named producer, and that keyless events are spread evenly.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import tidelog
from tidelog import Event, Home
from tidelog.api.append_lines import LineCounts, line_appender
from tidelog.api.input_lines import InputLines
from tidelog.errors import FailedError, PartialAppendError, UnavailableError, UnknownOutcomeError
from tidelog.log.producer.idempotent_append import append_once
from tidelog.settings import LogSettings


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        object.__setattr__(opened.context, "log_settings", LogSettings(linger_ms=1))
        opened.create_topic("t", 4)
        yield opened


class LostReplies:
    """A catalog that stores commits to some partitions and loses their replies, for good."""

    def __init__(self, home: Home) -> None:
        self._inner: Any = home.catalog
        self.unknown: set[int] = set()
        self.refused: set[int] = set()
        self._blind: set[str] = set()
        object.__setattr__(home.context, "catalog", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, partition: str, row: str) -> Any:
        if partition in self._blind:
            raise UnavailableError("catalog: no answer (injected): try again")
        return self._inner.get(partition, row)

    def write(self, partition: str, *changes: Any, write_id: str) -> None:
        number = int(partition.rpartition("/")[2]) if partition.startswith("topic/") else -1
        if number in self.refused:
            raise UnavailableError("catalog: refused (injected): try again")
        self._inner.write(partition, *changes, write_id=write_id)
        if number in self.unknown:
            self._blind.add(partition)
            raise UnknownOutcomeError("catalog: the reply was lost (injected): read back")

    def heal(self) -> None:
        self.unknown, self.refused, self._blind = set(), set(), set()


def keyed(home: Home) -> dict[int, bytes]:
    """A key for each partition."""
    return {home.partition_for("t", b"%d" % n): b"%d" % n for n in range(50)}


@pytest.fixture
def catalog(home: Home) -> LostReplies:
    home.append("t", [Event(b"before", key=key) for key in keyed(home).values()])
    return LostReplies(home)


def events(home: Home) -> list[Event]:
    keys = keyed(home)
    return [Event(b"%d" % number, key=keys[number % 4], id=f"e{number}") for number in range(8)]


def stored(home: Home) -> set[bytes | None]:
    return {e.value for p in range(4) for e in home.read("t", p)} - {b"before"}


@pytest.mark.parametrize("at_once", [1, 4])
def test_partial_append_tells_stored_and_unknown_and_not_stored_apart(
    home: Home, catalog: LostReplies, at_once: int
) -> None:
    object.__setattr__(home.context, "commits_at_once", at_once)
    catalog.unknown, catalog.refused = {1}, {2}
    with pytest.raises(PartialAppendError, match="unknown") as told:
        home.append("t", events(home))
    catalog.heal()
    known = [n for n, position in enumerate(told.value.positions) if position is not None]
    assert told.value.unknown == [1, 5]
    assert set(known) | set(told.value.remainder) == {0, 2, 3, 4, 6, 7}
    there = stored(home)
    assert {b"%d" % number for number in known} <= there
    assert not {b"%d" % number for number in told.value.remainder} & there
    assert isinstance(told.value.__cause__, UnknownOutcomeError)


def test_append_of_which_nothing_is_known_to_be_stored_is_unknown(
    home: Home, catalog: LostReplies
) -> None:
    """Though the first partition's part was refused and is certainly not stored."""
    object.__setattr__(home.context, "commits_at_once", 4)
    catalog.refused, catalog.unknown = {0, 2, 3}, {1}
    with pytest.raises(UnknownOutcomeError):
        home.append("t", events(home))


def test_futures_say_of_their_own_event_whether_it_may_be_stored(
    home: Home, catalog: LostReplies
) -> None:
    object.__setattr__(home.context, "commits_at_once", 4)
    catalog.refused, catalog.unknown = {0}, {1}
    with home.producer("t") as producer:
        with producer._queue.lock:  # so that they travel together
            futures = [producer.send(e.value or b"", e.key) for e in events(home)]
        for number, future in enumerate(futures):
            if number % 4 == 0:
                with pytest.raises(UnavailableError):
                    future.result()
            elif number % 4 == 1:
                with pytest.raises(UnknownOutcomeError):
                    future.result()
            else:
                assert future.result().partition == number % 4


def test_append_that_takes_too_long_is_not_called_unavailable(home: Home) -> None:
    """What is under way may be stored yet."""
    producer = home.producer("t")
    real, gate = home.store.put, threading.Event()

    def put(key: str, data: bytes) -> str:
        gate.wait()
        return real(key, data)

    home.store.put = put  # type: ignore[method-assign]
    future = producer.send(b"x")
    try:
        with pytest.raises(UnknownOutcomeError, match="wait longer"):
            future.result(0.01)
        with pytest.raises(UnknownOutcomeError, match="wait longer"):
            producer.flush(0.01)
    finally:
        gate.set()
    assert future.result()
    producer.close()


def test_append_if_absent_tells_unknown_events(home: Home, catalog: LostReplies) -> None:
    ids = {home.partition_for("t", b"id%d" % n): f"id{n}" for n in range(50)}
    catalog.unknown = {2}
    with pytest.raises(PartialAppendError) as told:
        home.append("t", [Event(b"x", id=ids[p]) for p in range(4)], if_absent=True)
    assert told.value.unknown == [2]
    assert told.value.remainder == [3]


def test_append_with_a_key_tells_what_is_stored_and_a_repeat_completes_it(
    home: Home, catalog: LostReplies
) -> None:
    catalog.refused = {2}
    with pytest.raises(PartialAppendError, match="same key") as told:
        append_once(home.context, home.topic("t"), "d", events(home))
    assert told.value.remainder == [2, 3, 6, 7]
    catalog.heal()
    done = append_once(home.context, home.topic("t"), "d", events(home))
    assert [at for at in told.value.positions if at is not None] == [done[n] for n in (0, 1, 4, 5)]
    assert len(stored(home)) == 8


def test_command_names_lines_that_may_be_stored(home: Home, catalog: LostReplies) -> None:
    given = events(home)
    lines = InputLines(10, [b"%d" % number for number in range(8)])
    catalog.unknown = {1}
    told = pytest.raises(FailedError, match="2 lines from line 11 on may be stored")
    with line_appender(home, "t", None, lambda lines: given[: len(lines)]) as into, told as failed:
        into.store(lines, LineCounts("t"))
    assert failed.value.context["unknown"] == 2
    assert failed.value.context["line"] == 12


# Threads.


def test_threads_share_a_named_producer_whose_buffer_is_full(home: Home) -> None:
    settings = LogSettings(
        linger_ms=0, segment_bytes=2_000, buffer_bytes=4_000, event_bytes_max=500
    )
    object.__setattr__(home.context, "log_settings", settings)
    failures: list[BaseException] = []
    with home.producer("t", "shared") as producer:

        def send(thread: int) -> None:
            try:
                for number in range(150):
                    producer.send(b"%d:%d" % (thread, number) + b"." * 200)
            except BaseException as exc:  # noqa: BLE001 - compared below
                failures.append(exc)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(stored(home)) == 900


# Balance.


def _lists(home: Home, count: int) -> None:
    home.append("t", [Event(b"x")] * count)


def _tables(home: Home, count: int) -> None:
    home.append("t", pa.table({"value": pa.array([b"x"] * count, pa.binary())}))


def _sends(home: Home, count: int, producers: list[Any] = []) -> None:  # noqa: B006 - one for all
    if not producers or producers[0]._context is not home.context:
        producers[:] = [home.producer("t")]
    for _ in range(count):
        producers[0].send(b"x")
    producers[0].flush()


@pytest.mark.parametrize("append", [_lists, _tables, _sends])
@pytest.mark.parametrize("sizes", [[12], [1, 50], [1, 1, 30, 2]])
def test_keyless_events_are_spread_evenly(
    home: Home, append: Callable[[Home, int], None], sizes: list[int]
) -> None:
    for number in range(40):
        append(home, sizes[number % len(sizes)])
        if number % 2:  # a call without keyless events uses up no turn
            home.append("t", [Event(b"keyed", key=b"k")])
    keyless = Counter(e.partition for p in range(4) for e in home.read("t", p) if e.value == b"x")
    assert max(keyless.values()) - min(keyless.get(p, 0) for p in range(4)) <= max(sizes)
