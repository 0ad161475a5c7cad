"""Speeds with a fake clock, and what is told of slots."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from tests.support.playback_stage import T0, Stage
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.sink import Lot
from tidelog.errors import InvalidError
from tidelog.playback.play import (
    Playback,
    PlaybackOptions,
    SlotCount,
    SlotCounter,
    check_speed,
    paced,
    run_playback,
)
from tidelog.testing.scheduler import FakeClock


def batch(*times: int) -> pa.RecordBatch:
    rows = [
        {"topic": "t", "partition": 0, "offset": n, "timestamp": time}
        for n, time in enumerate(times)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=EVENT_SCHEMA)


def outgoing(batches: Iterator[pa.RecordBatch], clock: FakeClock) -> list[tuple[float, int]]:
    """When each event went out, in seconds, and its time."""
    began = clock.monotonic_s()
    found = []
    for each in batches:
        times = each.column("timestamp").cast(pa.int64()).to_pylist()
        found += [(clock.monotonic_s() - began, time) for time in times]
    return found


@pytest.mark.parametrize("speed", [1.0, 10.0, 0.5])
def test_events_go_out_within_ten_milliseconds_of_when_they_are_due(speed: float) -> None:
    clock = FakeClock()
    times = [T0 + n * 37 for n in range(100)] + [T0 + 60_000, T0 + 3_600_000, T0 + 3_600_000]
    batches = iter([batch(*times[:50]), batch(*times[50:])])
    found = outgoing(paced(batches, speed, clock), clock)
    assert [time for _, time in found] == times
    for at_s, time in found:
        assert abs(at_s - (time - T0) / 1000 / speed) <= 0.010


def test_as_fast_as_it_can_waits_for_nothing() -> None:
    clock = FakeClock()
    given = [batch(T0, T0 + 3_600_000), batch(T0 + 7_200_000)]
    assert list(paced(given, None, clock)) == given
    assert clock.monotonic_s() == 1_000.0


def test_who_takes_them_slowly_gets_more_at_once_and_nothing_less() -> None:
    clock = FakeClock()
    sizes = []
    for each in paced([batch(*(T0 + n for n in range(1_000)))], 1, clock):
        sizes.append(each.num_rows)
        clock.advance(0.2)
    assert sum(sizes) == 1_000
    assert len(sizes) <= 7


def test_a_pause_sees_soon_that_it_should_end() -> None:
    clock = FakeClock()
    stopped: list[bool] = []

    class Watched(FakeClock):
        def sleep(self, seconds: float) -> None:
            assert seconds <= 0.2
            stopped.append(True)
            super().sleep(seconds)

    clock = Watched()
    playing = paced([batch(T0, T0 + 3_600_000)], 1, clock, lambda: len(stopped) > 2)
    assert [each.num_rows for each in playing] == [1]
    assert clock.monotonic_s() < 1_002


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", "", "1x"])
def test_bad_speeds_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="speed"):
        check_speed(text)


def test_good_speeds() -> None:
    assert [check_speed(text) for text in ("max", "1", "0.25", "1e3")] == [None, 1.0, 0.25, 1000.0]


def counted(
    counter: SlotCounter, *batches: pa.RecordBatch, finished: bool = True
) -> list[SlotCount]:
    found = [slot for each in batches for slot in counter.add(each)]
    return found + list(counter.rest(finished))


def test_a_slot_is_told_once_however_its_events_come() -> None:
    start = T0 + 250
    batches = [
        batch(T0 + 300, T0 + 999),
        batch(T0 + 999, T0 + 1_000),
        batch(T0 + 1_500),
        batch(T0 + 4_000),
    ]
    told = [
        SlotCount(T0, T0 + 300, 3),
        SlotCount(T0 + 1_000, T0 + 1_000, 2),
        SlotCount(T0 + 4_000, T0 + 4_000, 1),
    ]
    counter = SlotCounter(1_000, start, T0 + 6_001)
    assert counted(counter, *batches) == told
    assert counter.slots == 3
    every = counted(SlotCounter(1_000, start, T0 + 6_001, empty=True), *batches)
    assert [slot.slot_ms - T0 for slot in every] == [0, 1_000, 2_000, 3_000, 4_000, 5_000, 6_000]
    assert [slot for slot in every if slot.events] == told
    assert all(slot.first_ms is None for slot in every if not slot.events)
    part = counted(SlotCounter(1_000, start, T0 + 6_001, empty=True), *batches, finished=False)
    assert part == every[:5]
    assert counted(SlotCounter(1_000, T0, T0 + 2_000, empty=True)) == [
        SlotCount(T0, None, 0),
        SlotCount(T0 + 1_000, None, 0),
    ]


def test_a_playback_at_its_speed_from_end_to_end() -> None:
    stage = Stage(partitions=2)
    for second in range(0, 60, 7):
        stage.run([T0 + 1_000 * second, T0 + 1_000 * second + 400], second % 2)
    out: list[tuple[float, int]] = []
    slots: list[SlotCount] = []
    clock = stage.clock

    class Watching:
        lot_events = 1_000
        lot_bytes = None

        def put(self, lot: Lot) -> None:
            out.extend(
                (clock.monotonic_s() - 1_000.0, time - T0)
                for time in lot.batch.column("timestamp").cast(pa.int64()).to_pylist()
            )

        def reached(self) -> int:
            return 0

        def close(self, failed: bool = False) -> None:
            pass

    pin = stage.pin(T0, T0 + 60_000)
    how = PlaybackOptions(speed=2, on_slot=slots.append)
    played = run_playback(Playback(stage.context, stage.main, pin, None, how), Watching())
    assert (played.events, played.slots, played.finished) == (18, 9, True)
    assert [slot.events for slot in slots] == [2] * 9
    assert all(abs(at_s * 2_000 - time) <= 20 for at_s, time in out)
