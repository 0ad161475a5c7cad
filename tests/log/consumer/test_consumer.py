"""Consumers: shared fairly, fenced, handed over, and never silent about a loss."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import tidelog
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log import partition_reader as pace_module
from tidelog.log.consumer import consumer as consumer_module
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Leases
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.settings import LogSettings
from tidelog.testing.scheduler import FakeClock

TTL_MS = 600
FOR_EVER_MS = 600_000  # longer than any test lasts


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        set_ttl(opened, TTL_MS)
        opened.create_topic("t", 4)
        yield opened


def set_ttl(home: Home, ttl_ms: int) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(lease_ttl_ms=ttl_ms))


def fill(home: Home, count: int, partition: int | None = None) -> None:
    events = [Event(b"%d" % n, key=b"k%d" % n, timestamp=n * 1000) for n in range(count)]
    home.append("t", events, partition=partition)


def drain(consumer: Consumer, at_least: int, seconds: float = 60) -> list[Event]:
    found: list[Event] = []
    end = time.monotonic() + seconds
    while len(found) < at_least and time.monotonic() < end:
        found += consumer.poll(timeout_s=0.2)
        consumer.commit()
    return found


def test_a_loss_in_one_partition_is_told_beside_others_that_are_busy(home: Home) -> None:
    fill(home, 10, 0)
    with home.consumer("t", "c") as consumer:
        consumer.poll(1)
        consumer.commit()
    trim_topic(home.context, home.topic("t"), ToOffsets({0: 10}))
    with home.consumer("t", "c") as consumer:
        found = 0
        for _ in range(3):
            fill(home, 5, 1)
            found += len(drain(consumer, 5))
            fill(home, 1, 1)
            with pytest.raises(NotFoundError, match="seek to 10"):
                consumer.poll(timeout_s=0.2)
        fill(home, 1, 1)
        found += len(drain(consumer, 1))
        consumer.seek(0, 10)
        assert consumer.poll(timeout_s=0.2) == [], "nothing more is wrong"


def test_it_reads_everything_once_in_order_and_remembers(home: Home) -> None:
    fill(home, 1_000)
    with home.consumer("t", "c") as consumer:
        events = drain(consumer, 1_000)
    for partition in range(4):
        offsets = [event.offset for event in events if event.partition == partition]
        assert offsets == list(range(len(offsets)))
    assert len(events) == 1_000
    with home.consumer("t", "c") as again:
        assert again.poll(timeout_s=0.1) == []
        assert sum(lag.events for lag in again.lag()) == 0
    with home.consumer("t", "other") as other:
        assert len(drain(other, 1_000)) == 1_000


def test_what_was_not_committed_comes_again(home: Home) -> None:
    fill(home, 10, partition=0)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        consumer.commit()
        assert len(consumer.poll(4)) == 4
        assert consumer.uncommitted()
    with home.consumer("t", "c") as again:
        assert [event.offset for event in again.poll()] == [4, 5, 6, 7, 8, 9]


def test_arrow_comes_with_positions(home: Home) -> None:
    fill(home, 500)
    with home.consumer("t", "c") as consumer:
        table = consumer.poll_arrow(10_000)
        assert table.num_rows == 500
        assert table.column_names[:3] == ["topic", "partition", "offset"]
        consumer.commit()
        assert consumer.poll_arrow(timeout_s=0.05).num_rows == 0


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 0),
        ("latest", None),
        (7, 7),
        (99, None),
        (datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC), 5),
        ("1970-01-01T00:00:08Z", 8),
        ("2030-01-01T00:00:00Z", None),
    ],
    ids=str,
)
def test_where_it_begins(home: Home, start: object, first: int | None) -> None:
    fill(home, 10, partition=2)
    with home.consumer("t", "c", start=start) as consumer:  # type: ignore[arg-type]
        events = consumer.poll(timeout_s=0.1)
        assert [event.offset for event in events[:1]] == ([] if first is None else [first])
        consumer.commit()
    with home.consumer("t", "c", start="earliest") as again:  # the first start is kept
        assert again.poll(timeout_s=0.1) == []


def test_rest_of_a_batch_comes_again_after_a_break(home: Home) -> None:
    fill(home, 40, 1)
    fill(home, 40, 2)
    with home.consumer("t", "c") as consumer:
        found = [consumer.poll(1)[0].position]
        for stop in (3, 30, 79):
            for event in consumer:
                found.append(event.position)
                if len(found) == stop:
                    break
            consumer.commit()
            assert sum(lag.cursor or 0 for lag in consumer.lag()) == stop
            assert not consumer.caught_up()
        found += [event.position for event in consumer.poll()]
        assert len(found) == len(set(found)) == 80
        assert consumer.caught_up()


def test_loop_goes_on_from_a_seek_and_after_a_poll_inside_of_it(home: Home) -> None:
    fill(home, 20, 1)
    found: list[int | None] = []
    with home.consumer("t", "c") as consumer:
        for event in consumer:
            found.append(event.offset)
            if found == [0, 1]:
                consumer.seek(1, 10)
            elif event.offset == 12:
                found += [each.offset for each in consumer.poll(3)]
            elif event.offset == 19:
                break
    assert found == [0, 1, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_seek_skip_and_lag(home: Home) -> None:
    fill(home, 10, partition=1)
    with home.consumer("t", "c") as consumer:
        drain(consumer, 10)
        consumer.seek(1, 3)
        assert [event.offset for event in consumer.poll(2)] == [3, 4]
        consumer.commit()
        assert [lag.cursor for lag in consumer.lag()] == [0, 5, 0, 0]
        consumer.seek(1, datetime(1970, 1, 1, 0, 0, 8, tzinfo=UTC))
        assert [event.offset for event in consumer.poll()] == [8, 9]
        consumer.seek(1, 0)
        consumer.commit()
        assert consumer.lag()[1].events == 10
        consumer.skip_to_end()
        assert consumer.lag()[1].events == 0
        assert consumer.poll(timeout_s=0.05) == []
        for partition, offset in ((1, 11), (1, -1), (4, 0)):
            with pytest.raises(InvalidError):
                consumer.seek(partition, offset)


def test_members_share_fairly_and_hand_over_on_close(home: Home) -> None:
    set_ttl(home, FOR_EVER_MS)
    members = [home.consumer("t", "c") for _ in range(3)]
    end = time.monotonic() + 60
    while sorted(len(member.partitions()) for member in members) != [1, 1, 2]:
        assert time.monotonic() < end
        for member in members:
            member.poll(timeout_s=0.02)
    held = [set(member.partitions()) for member in members]
    assert set.union(*held) == {0, 1, 2, 3}
    members[0].close()
    began = time.monotonic()
    while sum(len(member.partitions()) for member in members[1:]) < 4:
        assert time.monotonic() - began < 60  # without waiting for the time to live
        for member in members[1:]:
            member.poll(timeout_s=0.02)
    for member in members[1:]:
        member.close()


def test_a_silent_member_is_taken_over_and_cannot_commit(home: Home) -> None:
    fill(home, 100)
    slow = home.consumer("t", "c")
    assert slow.poll(10)
    slow._stop.set()  # its heartbeats end, as when its machine is cut off
    assert slow._keeper is not None
    slow._keeper.join()
    with home.consumer("t", "c") as fresh:
        events = drain(fresh, 100)
        assert len(events) == 100
        with pytest.raises(FencedError, match=r"lost: held by .* ours was epoch 1"):
            slow.commit()


def test_heartbeats_keep_a_lease_and_silence_loses_it(home: Home) -> None:
    clock = FakeClock()
    object.__setattr__(home.context, "clock", clock)
    slow, other = (Leases(home.context, home.topic("t"), "c", "earliest") for _ in range(2))
    slow.join()
    other.join()
    assert slow.take(0, slow.alive())
    for _ in range(12):
        clock.advance(0.9 * TTL_MS / 1000)
        assert slow.id in other.alive()
        slow.beat()
        assert slow.id in other.alive()
        assert not other.take(0, other.alive())
    slow.commit(0, 1)
    clock.advance(1.1 * TTL_MS / 1000)
    assert other.take(0, other.alive())
    with pytest.raises(FencedError):
        slow.commit(0, 2)


def test_a_slow_handler_sends_heartbeats(home: Home) -> None:
    fill(home, 1, partition=0)
    with home.consumer("t", "c") as slow:
        assert len(slow.poll()) == 1
        beats = slow._leases._beats
        until(lambda: slow._leases._beats > beats + 5)  # without a poll
        slow.commit()


def test_a_handler_that_hangs_loses_its_lease(home: Home) -> None:
    settings = LogSettings(lease_ttl_ms=200, max_poll_interval_ms=300)
    object.__setattr__(home.context, "log_settings", settings)
    fill(home, 1, partition=0)
    with home.consumer("t", "c") as hanging, home.consumer("t", "c") as other:
        assert len(hanging.poll()) == 1
        assert len(drain(other, 1)) == 1
        with pytest.raises(FencedError):
            hanging.commit()


def test_a_trimmed_cursor_is_reported_not_hidden(home: Home) -> None:
    fill(home, 100, partition=0)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(10)) == 10
        consumer.commit()
    trim_topic(home.context, home.topic("t"), ToOffsets({0: 50}))
    with home.consumer("t", "c") as consumer:
        with pytest.raises(NotFoundError, match="its cursor is at 10, but what is below 50"):
            consumer.poll()
        consumer.seek(0, 50)
        assert consumer.poll()[0].offset == 50


def test_a_waiting_poll_wakes_at_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "FIRST_S", 120)  # so that no look by itself helps
    monkeypatch.setattr(pace_module, "LAST_S", 120)
    monkeypatch.setattr(consumer_module, "LAST_S", 120)
    with home.consumer("t", "c") as consumer:
        consumer.poll(timeout_s=0.01)
        threading.Timer(0.2, fill, (home, 1)).start()
        began = time.monotonic()
        assert len(consumer.poll(timeout_s=120)) == 1
        assert time.monotonic() - began < 60


def test_an_idle_consumer_does_not_spin(home: Home) -> None:
    reads: Counter[int] = Counter()  # by thread: the keeper has its own pace
    real_get = home.catalog.get

    def get(partition: str, row: str) -> object:
        reads[threading.get_ident()] += 1
        return real_get(partition, row)

    home.catalog.get = get  # type: ignore[method-assign,assignment]
    with home.consumer("t", "c") as consumer:
        consumer.poll(timeout_s=0.05)
        reads.clear()
        consumer.poll(timeout_s=2)
        assert 0 < reads[threading.get_ident()] < 60


# Running a handler.


def test_run_handles_and_commits(home: Home) -> None:
    fill(home, 200)
    seen: list[Event] = []
    with home.consumer("t", "c") as consumer:
        assert consumer.run(seen.append, until_caught_up=True) == 200
        assert sum(lag.events for lag in consumer.lag()) == 0
    batches: list[list[Event]] = []
    with home.consumer("t", "batches") as consumer:
        consumer.run(batches.append, until_caught_up=True, batch=True, max_events=30, workers=3)
    assert sum(map(len, batches)) == 200
    assert max(map(len, batches)) <= 30
    assert all(len({event.partition for event in batch}) == 1 for batch in batches)


def failing(bad: bytes, times: int = 1_000_000) -> tuple[list[bytes], object]:
    handled: list[bytes] = []
    left = [times]

    def handle(event: Event) -> None:
        if event.value == bad and left[0] > 0:
            left[0] -= 1
            raise RuntimeError("cannot take it")
        handled.append(event.value or b"")

    return handled, handle


def test_run_retries_and_then_stops_before_the_event(home: Home) -> None:
    fill(home, 10, partition=0)
    handled, handle = failing(b"4", times=2)
    with home.consumer("t", "c") as consumer:
        consumer.run(handle, until_caught_up=True, retry_base_ms=1)  # type: ignore[arg-type]
    assert len(handled) == 10
    handled, handle = failing(b"4")
    with home.consumer("t", "stops") as consumer:
        with pytest.raises(RuntimeError, match="cannot take it"):
            consumer.run(handle, until_caught_up=True, retries=1, retry_base_ms=1)  # type: ignore[arg-type]
        assert consumer.lag()[0].cursor == 4
    assert handled == [b"0", b"1", b"2", b"3"]


def test_run_skips_or_buries_what_it_cannot_take(home: Home) -> None:
    fill(home, 10, partition=0)
    handled, handle = failing(b"4")
    with home.consumer("t", "skips") as consumer:
        consumer.run(handle, until_caught_up=True, retries=0, on_error="skip")  # type: ignore[arg-type]
        assert consumer.lag()[0].events == 0
    assert len(handled) == 9
    home.create_topic("dead", 1)
    handled, handle = failing(b"4")
    with home.consumer("t", "buries") as consumer:
        consumer.run(
            handle,  # type: ignore[arg-type]
            until_caught_up=True,
            retries=0,
            on_error="dead-letter",
            dead_letter="dead",
        )
    (letter,) = home.read("dead")
    assert (letter.value, letter.key, letter.timestamp) == (b"4", b"k4", 4_000)
    assert dict(letter.headers) == {
        "tidelog-position": b"t/0/4",
        "tidelog-consumer": b"buries",
        "tidelog-error": b"RuntimeError: cannot take it",
    }


def test_dead_letters_of_a_batch_do_not_quote_one_another(home: Home) -> None:
    fill(home, 3, partition=0)
    home.create_topic("dead", 1)

    def handle(events: list[Event]) -> None:
        raise RuntimeError(f"cannot take {events[0].key!r} {events[0].value!r}")

    with home.consumer("t", "c") as consumer:
        consumer.run(
            handle,
            until_caught_up=True,
            batch=True,
            retries=0,
            on_error="dead-letter",
            dead_letter="dead",
        )
    letters = list(home.read("dead"))
    assert [each.value for each in letters] == [b"0", b"1", b"2"]
    said = {dict(each.headers)["tidelog-error"] for each in letters}
    assert said == {b"RuntimeError: in a batch of 3 events"}


def test_a_dead_letter_that_cannot_be_stored_stops_the_cursor(home: Home) -> None:
    fill(home, 3, partition=0)
    _, handle = failing(b"1")
    with home.consumer("t", "c") as consumer:
        with pytest.raises(NotFoundError):
            consumer.run(
                handle,  # type: ignore[arg-type]
                until_caught_up=True,
                retries=0,
                on_error="dead-letter",
                dead_letter="no-such-topic",
            )
        assert (consumer.lag()[0].cursor or 0) <= 1


@pytest.mark.parametrize(
    "how",
    [{"on_error": "explode"}, {"on_error": "dead-letter"}, {"workers": 0}, {"retries": -1}],
    ids=str,
)
def test_contradictory_ways_to_run_are_refused(home: Home, how: dict[str, object]) -> None:
    with home.consumer("t", "c") as consumer, pytest.raises(InvalidError):
        consumer.run(print, **how)


# One-shot reading.


def test_reading_once_is_bounded_and_tells_whether_it_is_done(home: Home) -> None:
    fill(home, 25, partition=2)
    seen: list[int | None] = []
    consumer = home.consumer("t", "fn")
    results = [
        consumer.read_once(2, max_events=10, handler=lambda event: seen.append(event.offset))
        for _ in range(4)
    ]
    assert [(result["events_read"], result["done"]) for result in results] == [
        (10, False),
        (10, False),
        (5, True),
        (0, True),
    ]
    assert seen == list(range(25))


def test_a_one_shot_handler_that_fails_keeps_its_place(home: Home) -> None:
    fill(home, 5, partition=0)
    handled, handle = failing(b"3", times=1)
    consumer = home.consumer("t", "fn")
    with pytest.raises(RuntimeError):
        consumer.read_once(0, handler=handle)  # type: ignore[arg-type]
    result = consumer.read_once(0, handler=handle)  # type: ignore[arg-type]
    assert result["events_read"] == 2
    assert handled == [b"0", b"1", b"2", b"3", b"4"]


def test_two_one_shot_readers_at_once_handle_each_event_once(home: Home) -> None:
    set_ttl(home, FOR_EVER_MS)
    fill(home, 5, partition=0)
    handled: list[bytes] = []
    busy = threading.Event()

    def slowly(event: Event) -> None:
        assert busy.wait(60)  # until the other has found the partition taken
        handled.append(event.value or b"")

    def read() -> None:
        consumer = home.consumer("t", "fn")
        while not (result := consumer.read_once(0, handler=slowly))["done"]:
            if result["busy"]:
                busy.set()
            time.sleep(0.01)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert busy.is_set()
    assert handled == [b"0", b"1", b"2", b"3", b"4"]


def test_bad_names_starts_and_counts_are_refused(home: Home) -> None:
    for name in ("", "a/b", "x" * 201):
        with pytest.raises(InvalidError):
            home.consumer("t", name)
    for start in ("sometime", -1, datetime(2026, 1, 1)):  # noqa: DTZ001
        with pytest.raises(InvalidError):
            home.consumer("t", "c", start=start)
    with home.consumer("t", "c") as consumer, pytest.raises(InvalidError):
        consumer.poll(0)
    with pytest.raises(InvalidError, match="is closed"):
        consumer.poll()
    with pytest.raises(NotFoundError):
        home.consumer("nothing", "c")


def test_an_error_in_one_partition_does_not_swallow_what_others_gave(home: Home) -> None:
    """Else a caller who catches it, polls on and commits would skip what was taken before it."""
    fill(home, 20, partition=0)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        consumer.commit()
    fill(home, 20, partition=1)
    trim_topic(home.context, home.topic("t"), ToOffsets({1: 10}))
    seen: list[int | None] = []
    with home.consumer("t", "c") as consumer:
        for _ in range(20):
            try:
                seen += [e.offset for e in consumer.poll(50, timeout_s=0.05) if e.partition == 0]
                consumer.commit()
            except NotFoundError:
                continue
    assert seen == list(range(4, 20))
