"""Events by time: order, borders, late ones, gaps, wide runs, bounds; pinned ends, as-of, trims."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidelog
from tests.support.playback_stage import T0, CountingCatalog, Stage, places
from tidelog import Event
from tidelog.catalog.base import Delete
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import BeforeTime, ToOffsets, trim_topic
from tidelog.log.topics import delete_topic
from tidelog.model import layout, limits
from tidelog.model.playback import Cursor, TimeRange, time_range
from tidelog.playback.merge import BufferBounds, play, play_arrow, play_events
from tidelog.playback.request import PartitionSlots, pin_topic

TINY = BufferBounds(window_bytes=400, ahead_bytes=800, held_bytes=600, batch_events=7)
DAY = 24 * 3600 * 1000


# The model.

SPANS = st.sampled_from([1, 3, 400, 1_000, 5_000, 60_000, 3_600_000, 40 * DAY])
RUNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # partition
        st.integers(0, 4 * DAY),  # when it begins
        SPANS,
        st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(
    runs=RUNS,
    slot_ms=st.sampled_from([1, 1_000, 7_777, DAY]),
    start=st.integers(0, 5 * DAY),
    length=st.sampled_from([0, 1, 999, 30_000, DAY, 50 * DAY]),
    bounds=st.sampled_from([None, TINY, replace(TINY, window_bytes=1, held_bytes=0)]),
    cut=st.floats(0, 1),
)
def test_it_is_the_sorted_list(runs, slot_ms, start, length, bounds, cut) -> None:  # type: ignore[no-untyped-def]
    stage = Stage(partitions=3, slot_ms=slot_ms)
    for partition, begin, span, times in runs:
        stage.run([T0 + begin + time % span for time in times], partition)
    times = T0 + start, T0 + start + length
    expected = stage.there(*times)
    assert stage.play(*times, bounds=bounds) == expected
    if expected:
        at = int(cut * (len(expected) - 1))
        after = Cursor(*expected[at])
        assert stage.play(*times, bounds=bounds, after=after) == expected[at + 1 :]


def test_ties_go_by_partition_and_offset() -> None:
    stage = Stage(partitions=3)
    for partition in (2, 0, 1, 0, 2):
        stage.run([T0 + 5, T0 + 5, T0], partition)
    assert stage.play(T0, T0 + 6) == stage.there(T0, T0 + 6)
    assert [place[1] for place in stage.play(T0 + 5, T0 + 6)] == [0] * 4 + [1] * 2 + [2] * 4


def test_the_start_is_part_of_it_and_the_end_is_not_aligned_or_not() -> None:
    stage = Stage()
    stage.run([T0 + n for n in range(0, 5_000, 250)])
    for start, end in [(0, 1_000), (250, 251), (249, 250), (1_001, 2_999), (4_750, 9_999), (9, 9)]:
        expected = stage.there(T0 + start, T0 + end)
        assert stage.play(T0 + start, T0 + end) == expected
    assert len(stage.play(T0 + 250, T0 + 251)) == 1
    assert stage.play(T0 + 249, T0 + 250) == []


def test_nothing_there_is_nothing_to_play() -> None:
    stage = Stage(partitions=2)
    assert stage.play(0, 253_402_300_799_999) == []
    stage.run([T0])
    assert stage.play(T0 + 1, T0 + DAY) == []
    assert stage.play(0, T0) == []


def test_late_events_come_in_their_own_time() -> None:
    stage = Stage()
    for minute in range(60):
        stage.run([T0 + 60_000 * minute + n for n in range(3)])
    stage.run([T0 + 90_500])  # an hour late
    stage.run([T0 + 90_400, T0 + 3_600_000])  # and with one that is in time
    assert stage.play(T0 + 90_000, T0 + 91_000) == [(T0 + 90_400, 0, 181), (T0 + 90_500, 0, 180)]
    assert stage.play(T0, T0 + DAY) == stage.there(T0, T0 + DAY)


def test_an_event_keeps_all_it_has() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t", 2)
        wanted = [
            Event(None, b"k", "id-1", T0, "gone", (("a", b"\xff"), ("a", b""))),
            Event(b"\x00\xff", None, None, T0 + 1),
            Event(b"", b"", "id-2", T0 + 2, "t"),
        ]
        home.append("t", wanted)
        played = list(play_events(home.context, "t", T0, T0 + 3))
        positions = {e.timestamp: e for p in (0, 1) for e in home.read("t", p)}
        assert played == [positions[T0], positions[T0 + 1], positions[T0 + 2]]
        assert [msgspec.structs.astuple(e)[:6] for e in played] == [
            msgspec.structs.astuple(e)[:6] for e in wanted
        ]


def test_by_default_it_is_the_last_quarter_of_an_hour() -> None:
    now = T0 + DAY
    assert time_range(None, None, now) == TimeRange(now - 900_000, now)
    assert time_range("earliest", "latest", now) == TimeRange(0, limits.TIMESTAMP_MS_END)
    assert time_range("-1h", None, now) == TimeRange(now - 3_600_000, now)
    assert time_range(None, "-1h", now) == TimeRange(now - 4_500_000, now - 3_600_000)
    assert time_range("2023-11-14T22:13:20Z", T0 + 5, now) == TimeRange(T0, T0 + 5)
    for wrong in [("x", None), ("-", None), (None, ""), (5, 4), (-1, None), (True, None)]:
        with pytest.raises(InvalidError):
            time_range(*wrong, now)  # type: ignore[arg-type]


# What it costs.


def test_gaps_cost_nothing_and_calls_follow_what_is_there() -> None:
    stage = Stage()
    for day in range(300):
        stage.run([T0 + day * DAY, T0 + day * DAY + 10])
    counting = CountingCatalog(stage.catalog)
    stage.context = replace(stage.context, catalog=counting)
    assert len(stage.play(T0, T0 + 300 * DAY)) == 600
    assert counting.calls < 30, "one scan for each level, and a few for runs"
    counting.calls = counting.rows = 0
    assert len(stage.play(T0 + 100 * DAY, T0 + 101 * DAY)) == 2
    assert (counting.calls < 15, counting.rows < 15) == (True, True)
    counting.calls = counting.rows = 0
    assert stage.play(T0 + 400 * DAY, T0 + 900 * DAY) == []
    assert (counting.calls < 10, counting.rows < 10) == (True, True)


def test_thousands_of_slots_in_every_level_cost_few_calls() -> None:
    stage = Stage()
    for number in range(600):
        begin = T0 + number * 7_000
        stage.run([begin, begin + (number % 15) ** 4])
    counting = CountingCatalog(stage.catalog)
    stage.context = replace(stage.context, catalog=counting)
    end = T0 + 600 * 7_000 + DAY
    assert stage.play(T0, end) == stage.there(T0, end)
    assert counting.calls < 200, "levels, and runs by the hundred"


def test_a_wide_run_is_read_once_however_many_windows_it_spans() -> None:
    stage = Stage(partitions=2)
    stage.run([T0 + 1_000 * n for n in range(500)], 1)
    for second in range(500):
        stage.run([T0 + 1_000 * second + 500] * 3)
    read: list[str] = []
    store = stage.context.store

    class Reading:
        url = store.url

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            read.append(key)
            return store.get(key, start, end)

    stage.context = replace(stage.context, store=Reading())  # type: ignore[arg-type]
    tiny = replace(TINY, window_bytes=2_000, held_bytes=0)
    assert len(stage.play(T0, T0 + DAY, tiny)) == 2_000
    assert len(read) == 501


def test_memory_follows_the_bounds_where_all_events_have_one_time() -> None:
    stage = Stage(partitions=3)
    for number in range(90):
        stage.run([T0] * 20 + [T0 + number], number % 3)
    pin = stage.pin(T0, T0 + DAY)
    bounds = replace(TINY, batch_events=1_000)
    sizes = [batch.num_rows for batch in play(stage.context, stage.main, pin, bounds=bounds)]
    assert sum(sizes) == 90 * 21
    assert max(sizes) < 100, "no window held all of that millisecond"
    assert stage.play(T0, T0 + DAY, TINY) == stage.there(T0, T0 + DAY)


def test_runs_are_fetched_ahead_by_several_threads() -> None:
    stage = Stage()
    for second in range(50):
        stage.run([T0 + 1_000 * second])
    threads: set[str] = set()
    store = stage.context.store
    together = threading.Barrier(4, timeout=20)

    class Meeting:
        url = store.url

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if len(threads) < 4:
                threads.add(threading.current_thread().name)
                together.wait()
            return store.get(key, start, end)

    context = replace(stage.context, store=Meeting())  # type: ignore[arg-type]
    pin = stage.pin(T0, T0 + DAY)
    with ThreadPoolExecutor(4) as pool:
        found = list(places(play(context, stage.main, pin, pool=pool)))
    assert found == stage.there(T0, T0 + DAY)
    assert len(threads) == 4


def test_who_stops_early_leaves_no_thread_behind() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t")
        for second in range(40):
            home.append("t", [Event(b"x" * 1_000, timestamp=T0 + 1_000 * second)])
        before = threading.active_count()
        playing = play_arrow(home.context, "t", T0, T0 + DAY)
        next(playing)
        playing.close()  # type: ignore[attr-defined]
        assert threading.active_count() <= before


# What is pinned.


def test_what_is_appended_meanwhile_is_not_part_of_it() -> None:
    stage = Stage(partitions=2)
    for second in range(20):
        stage.run([T0 + 1_000 * second], second % 2)
    expected = stage.there(T0, T0 + DAY)
    pin = stage.pin(T0, T0 + DAY)
    playing = places(play(stage.context, stage.main, pin, bounds=TINY))
    found = [next(playing)]
    for second in range(20):
        stage.run([T0 + 1_000 * second + 1, T0 + 30_000], second % 2)
    found += playing
    assert found == expected
    assert len(stage.play(T0, T0 + DAY)) == 60


def test_the_library_pins_when_it_is_called() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t")
        home.append("t", [Event(b"1", timestamp=T0)])
        playing = play_events(home.context, "t", T0, T0 + 10)
        home.append("t", [Event(b"2", timestamp=T0 + 1)])
        assert [event.value for event in playing] == [b"1"]
        with pytest.raises(NotFoundError):
            play_arrow(home.context, "no", T0)
        with pytest.raises(InvalidError):
            play_arrow(home.context, "t", "yesterday")


def test_as_of_offsets_and_commit_times() -> None:
    stage = Stage(partitions=2)
    committed = []
    for number in range(9):
        stage.run([T0 + number, T0 + number], number % 2)
        committed.append(stage.clock.now_ms())
        stage.clock.advance(10)
    times = TimeRange(T0, T0 + DAY)

    def ends(as_of: int | dict[int, int] | None) -> tuple[int, ...]:
        pin = pin_topic(stage.context, stage.main, times, as_of)
        found = list(places(play(stage.context, stage.main, pin)))
        assert len(found) == sum(pin.ends)
        return pin.ends

    assert ends(None) == (10, 8)
    assert ends({0: 3}) == (3, 8)
    assert ends({0: 0, 1: 8}) == (0, 8)
    assert ends(committed[0] - 1) == (0, 0)
    assert ends(committed[0]) == (2, 0)
    assert ends(committed[4] + 1) == (6, 4)
    assert ends(committed[8]) == (10, 8)
    for wrong in ({0: 11}, {0: -1}, {2: 0}):
        with pytest.raises(InvalidError):
            ends(wrong)
    trim_topic(stage.context, stage.main, ToOffsets({0: 4}))
    with pytest.raises(NotFoundError, match="as of offset 3"):
        ends({0: 3})
    assert pin_topic(stage.context, stage.main, times, committed[0]).ends == (4, 0)


def test_a_trim_of_what_is_left_raises_and_of_what_is_out_does_not() -> None:
    stage = Stage()
    for second in range(700):
        stage.run([T0 + 1_000 * second])
    pin = stage.pin(T0 + 100_000, T0 + DAY)
    playing = play(stage.context, stage.main, pin, bounds=TINY)
    for _ in range(20):
        next(playing)
    trim_topic(stage.context, stage.main, ToOffsets({0: 100}))  # before the range
    for _ in range(3):
        next(playing)
    trim_topic(stage.context, stage.main, ToOffsets({0: 600}))
    sweep_home(stage.context, 0)
    with pytest.raises(NotFoundError, match="were trimmed while it ran"):
        list(playing)


def test_a_trim_behind_a_long_playback_does_not_stop_it() -> None:
    stage = Stage()
    for second in range(700):
        stage.run([T0 + 1_000 * second])
    pin = stage.pin(T0, T0 + DAY)
    playing = places(play(stage.context, stage.main, pin, bounds=TINY))
    found = []
    for place in playing:
        found.append(place)
        if len(found) in (400, 500):
            trim_topic(stage.context, stage.main, BeforeTime(place[0] - 200_000))
            sweep_home(stage.context, 0)
    assert len(found) == 700


def test_what_a_trim_left_half_done_is_passed_over() -> None:
    stage = Stage()
    for second in range(5):
        stage.run([T0 + 1_000 * second] * 2)
    head = stage.head(stage.main)
    stage.put(stage.main, "head", msgspec.structs.replace(head, start=5))
    expected = [(T0 + 2_000, 0, 5), *((T0 + 3_000, 0, n) for n in (6, 7))]
    assert stage.play(T0, T0 + 4_000) == expected
    where = layout.topic_partition(stage.main.incarnation, 0)
    stage.catalog.write(where, Delete(layout.run_row(0)), write_id="by hand")
    assert stage.play(T0, T0 + 4_000) == expected


def test_a_run_that_is_gone_without_a_trim_is_damage() -> None:
    stage = Stage()
    stage.run([T0])
    stage.run([T0 + 1])
    where = layout.topic_partition(stage.main.incarnation, 0)
    stage.catalog.write(where, Delete(layout.run_row(0)), write_id="by hand")
    with pytest.raises(CorruptError, match="no run begins there"):
        stage.play(T0, T0 + DAY)


def test_an_object_that_is_gone_without_a_trim_is_damage() -> None:
    stage = Stage()
    stage.run([T0])
    stage.store.delete(list(stage.objects()))
    with pytest.raises(CorruptError, match="is gone"):
        stage.play(T0, T0 + DAY)


def test_a_topic_that_is_deleted_meanwhile_raises() -> None:
    stage = Stage()
    for second in range(700):
        stage.run([T0 + 1_000 * second])
    playing = play(stage.context, stage.main, stage.pin(T0, T0 + DAY), bounds=TINY)
    next(playing)
    pin = stage.pin(T0, T0 + DAY)
    delete_topic(stage.context, "main")
    with pytest.raises(NotFoundError):
        list(playing)
    again = stage.made("main")
    with pytest.raises(InvalidError, match="deleted and made again"):
        next(play(stage.context, again, pin))


def test_a_slot_row_that_is_none_is_damage() -> None:
    stage = Stage()
    stage.run([T0])
    stage.put(stage.main, layout.slot_row(0, T0, 7, "x"), b"not a number")
    with pytest.raises(CorruptError, match="is not a valid slot row"):
        stage.play(T0, T0 + DAY)


def test_the_index_of_a_partition_can_be_asked_alone() -> None:
    stage = Stage()
    for second in range(5):
        stage.run([T0 + 1_000 * second, T0 + 1_000 * second + 1_500])
    slots = PartitionSlots(stage.context, stage.main, 0, TimeRange(T0 + 1_000, T0 + 2_000))
    listed = list(slots.by_start())
    assert sorted(slots.runs(listed)) == [0, 2], "two of them reach into that second"
