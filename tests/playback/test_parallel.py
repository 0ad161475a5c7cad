"""Playback by Spark: windows of whole slots, each event once, into what tasks can write to."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.playback.test_playback_sinks import serving
from tests.support.playback_stage import T0, Stage
from tidelog import Event, Home
from tidelog.errors import AlreadyExistsError, InvalidError, NotFoundError, UnavailableError
from tidelog.home import create_home
from tidelog.model.event import from_iso
from tidelog.model.playback import Pin, TimeRange
from tidelog.playback.play import PlaybackOptions, PlaybackResult, SlotCount
from tidelog.playback.request import pin_topic
from tidelog.settings import load_settings
from tidelog.spark import playback as parallel
from tidelog.spark.playback import (
    PlayedWindow,
    WindowTask,
    plan_windows,
    play_parallel,
    run_window,
)

SLOTS, EACH = 60, 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_TASK_BYTES_MIN", 1_000)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as made:
        made.create_topic("t", 3)
        made.create_topic("u", 2)
        for slot in range(SLOTS):
            events = [
                Event(b"%d-%d" % (slot, n), b"%d" % n if n % 2 else None, timestamp=_time(slot, n))
                for n in range(EACH)
            ]
            made.append("t", events)
        yield made


def _time(slot: int, number: int) -> int:
    return T0 + slot * 1_000 + number * 113  # some are in the next slot


def pinned(home: Home) -> Pin:
    return pin_topic(home.context, home.topic("t"), TimeRange(T0 + 500, T0 + 50_000))


def wanted() -> Counter[str]:
    times = {f"{s}-{n}": _time(s, n) for s in range(SLOTS) for n in range(EACH)}
    return Counter(name for name, time in times.items() if T0 + 500 <= time < T0 + 50_000)


def test_windows_are_whole_slots_and_hold_all_runs_they_need() -> None:
    stage = Stage(partitions=2)
    for second in range(40):
        stage.run([T0 + second * 1_000, T0 + second * 1_000 + (second % 5) ** 6], second % 2)
    pin = stage.pin(T0 + 300, T0 + 39_999)
    windows = plan_windows(stage.context, stage.main, pin, cores=2)
    assert len(windows) > 2
    bounds = [(times.start_ms - T0, times.end_ms - T0) for times, _ in windows]
    assert (bounds[0][0], bounds[-1][1]) == (300, 39_999)
    assert all(start % 1_000 == 0 for start, _ in bounds[1:])
    for times, runs in windows:
        held = {(each.partition, each.base) for each in runs}
        needed = [
            (partition, run.base)
            for partition in range(2)
            for run in stage.runs(stage.main, partition)
            if run.first_ms < times.end_ms and run.last_ms >= times.start_ms
        ]
        assert held == set(needed)
        assert [each.first_ms for each in runs] == sorted(each.first_ms for each in runs)


def test_a_task_needs_nothing_but_the_store(home: Home, tmp_path: Path) -> None:
    pin = pinned(home)
    windows = plan_windows(home.context, home.topic("t"), pin, cores=2)
    total: Counter[str] = Counter()
    slots: list[SlotCount] = []
    for number, (times, runs) in enumerate(windows):
        part = tmp_path / f"part-{number}.jsonl"
        bounds = {p: (pin.starts[p], pin.ends[p]) for p in range(3)}
        task = WindowTask(
            "t", 1_000, times, runs, bounds, home.store.url, str(part), "id", is_file=True
        )
        for _ in range(2):  # as Spark does, when it heard no answer
            done = pickle.loads(pickle.dumps(run_window(pickle.loads(pickle.dumps(task)))))
            assert done.error is None
        lines = [json.loads(line) for line in part.read_bytes().splitlines()]
        assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
        assert done.events == len(lines)
        total += Counter(line["value"] for line in lines)
        slots += done.slots
    assert total == wanted()
    assert len({slot.slot_ms for slot in slots}) == len(slots)
    home.store.delete([windows[0][1][0].run.object])
    times, runs = windows[0]
    gone = WindowTask("t", 1_000, times, runs, bounds, home.store.url, "null:", "id")
    assert isinstance(run_window(gone).error, NotFoundError)


def test_error_says_what_is_played_already(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def run(_: object, tasks: list[WindowTask]) -> list[PlayedWindow]:
        runs.append(len(tasks))
        if len(runs) == 3:
            raise UnavailableError("Spark: the job failed: play again", job="failed")
        return [run_window(task) for task in tasks]

    monkeypatch.setattr(parallel, "_run", run)
    monkeypatch.setattr(parallel, "_TASK_BYTES", 1_000)
    monkeypatch.setattr(parallel, "_TASKS_EACH", 1)
    monkeypatch.setattr(parallel, "cores_of", lambda _: 2)
    pin, how = pinned(home), PlaybackOptions()

    def play(pin: Pin) -> PlaybackResult:
        return play_parallel(home.context, None, home.topic("t"), pin, "topic:u", how)  # type: ignore[arg-type]

    with pytest.raises(UnavailableError, match="play the rest by starting at ") as caught:
        play(pin)
    rest = from_iso(str(caught.value).rpartition(" ")[2])
    play(pin_topic(home.context, home.topic("t"), TimeRange(rest, pin.range.end_ms)))
    events = [event for p in range(2) for event in home.read("u", p)]
    assert Counter((event.value or b"").decode() for event in events) == wanted()


@pytest.mark.spark
def test_into_a_topic_in_order_and_once_each(home: Home, local_spark: SparkSession) -> None:
    slots: list[SlotCount] = []
    how = PlaybackOptions(on_slot=slots.append)
    played = play_parallel(home.context, local_spark, home.topic("t"), pinned(home), "topic:u", how)
    events = [event for p in range(2) for event in home.read("u", p)]
    assert Counter((event.value or b"").decode() for event in events) == wanted()
    assert (played.events, played.finished) == (sum(wanted().values()), True)
    assert [slot.slot_ms for slot in slots] == [T0 + 1_000 * n for n in range(50)]
    assert sum(slot.events for slot in slots) == played.events
    for partition in range(2):
        times = [event.timestamp for event in home.read("u", partition)]
        assert times == sorted(times)  # type: ignore[type-var]
    assert list(home.store.list("staging/")) == []


@pytest.mark.spark
def test_into_files_and_by_http(home: Home, local_spark: SparkSession, tmp_path: Path) -> None:
    topic, pin = home.topic("t"), pinned(home)
    folder = tmp_path / "out.parquet"
    play_parallel(home.context, local_spark, topic, pin, f"file:{folder}", PlaybackOptions())
    parts = sorted(folder.iterdir())
    assert len(parts) > 3
    assert all(part.name.startswith("part-00") and part.suffix == ".parquet" for part in parts)
    values = [v.decode() for p in parts for v in pq.read_table(p).column("value").to_pylist()]
    assert Counter(values) == wanted()
    with pytest.raises(AlreadyExistsError, match="not empty"):
        play_parallel(home.context, local_spark, topic, pin, f"file:{folder}", PlaybackOptions())
    with serving() as server:
        play_parallel(home.context, local_spark, topic, pin, server.url, PlaybackOptions())
        lines = [line for body in server.bodies.values() for line in body.splitlines()]
    assert Counter(json.loads(line)["value"] for line in lines) == wanted()


@pytest.mark.spark
def test_what_tasks_cannot_do_is_told(home: Home, local_spark: SparkSession) -> None:
    topic, pin = home.topic("t"), pinned(home)
    with pytest.raises(InvalidError, match="no standard output"):
        play_parallel(home.context, local_spark, topic, pin, "stdout:", PlaybackOptions())
    with serving() as server:
        server.statuses = [404] * 100
        with pytest.raises(InvalidError, match="answered 404"):
            play_parallel(home.context, local_spark, topic, pin, server.url, PlaybackOptions())
    stopped = play_parallel(
        home.context, local_spark, topic, pin, "null:", PlaybackOptions(stopped=lambda: True)
    )
    assert (stopped.events, stopped.finished) == (0, False)
