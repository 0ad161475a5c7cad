"""Playback by Spark into Kafka and Kinesis, by real servers: what a task puts, and puts again.

Kafka tells how far a window came, so a task that dies and is run again repeats nothing. Kinesis
does not, and gets again what was in flight. Order holds within a window, for each key.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.connectors.kafka.test_sink import Target
from tests.connectors.kinesis.test_source import Stream
from tests.playback.test_streams import records
from tests.servers.kafka import Kafka
from tests.servers.moto import KEYS, Moto
from tests.support.playback_stage import T0
from tidelog import Event, Home
from tidelog.errors import NotFoundError
from tidelog.home import create_home
from tidelog.model.playback import Pin, TimeRange
from tidelog.playback.play import PlaybackOptions
from tidelog.playback.request import pin_topic
from tidelog.settings import load_settings
from tidelog.spark import playback as parallel
from tidelog.spark.playback import WindowTask, plan_windows, play_parallel, run_window

pytestmark = [pytest.mark.server, pytest.mark.spark]

ROOT = Path(__file__).parents[2]
EVENTS = 1_200
APART_MS = 50
DYING = """
import os, pickle, signal, sys
from tidelog.spark import playback
from tidelog.connectors.{kind}.sink import {sink} as Sink

real, puts = Sink.put, 0

def put(self, lot):
    global puts
    puts += 1
    real(self, lot)
    if puts == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Sink.put, Sink.lot_events = put, 50
playback.run_window(pickle.loads(sys.stdin.buffer.read()))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_TASK_BYTES_MIN", 1_000)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as made:
        made.create_topic("t", 3)
        for first in range(0, EVENTS, 100):
            numbers = range(first, first + 100)
            made.append("t", [_event(number) for number in numbers])
        yield made


def _event(number: int) -> Event:
    key = b"key-%d" % (number % 17)
    return Event(b"%d" % number, key, f"id-{number}", T0 + number * APART_MS)


def pinned(home: Home) -> Pin:
    return pin_topic(home.context, home.topic("t"), TimeRange(T0, T0 + EVENTS * APART_MS))


def tasks(home: Home, sink: str) -> list[WindowTask]:
    """What Spark would be given."""
    pin = pinned(home)
    windows = plan_windows(home.context, home.topic("t"), pin, cores=2)
    bounds = {p: (pin.starts[p], pin.ends[p]) for p in range(3)}
    return [
        WindowTask("t", 1_000, times, runs, bounds, home.store.url, sink, f"p-{times.start_ms}")
        for times, runs in windows
    ]


def in_order_within(found: Sequence[int], windows: Sequence[TimeRange]) -> None:
    """That the numbers of one key come in order, window by window."""
    by_window = defaultdict(list)
    for number in found:
        time_ms = T0 + number * APART_MS
        (window,) = [n for n, w in enumerate(windows) if w.start_ms <= time_ms < w.end_ms]
        by_window[window].append(number)
    assert all(each == sorted(each) for each in by_window.values())


def die(task: WindowTask, kind: str, sink: str) -> None:
    """Run a task in a process that is killed after its second lot."""
    script = DYING.format(kind=kind, sink=sink)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=pickle.dumps(task), cwd=ROOT, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL


def test_into_kafka_each_event_once(
    home: Home, local_spark: SparkSession, kafka_server: Kafka
) -> None:
    target = Target(kafka_server)
    pin = pinned(home)
    played = play_parallel(
        home.context, local_spark, home.topic("t"), pin, target.url(), PlaybackOptions()
    )
    assert (played.events, played.finished) == (EVENTS, True)
    windows = [times for times, _ in plan_windows(home.context, home.topic("t"), pin, cores=2)]
    assert len(windows) > 3
    by_key = defaultdict(list)
    for partition in range(target.partitions):
        for message in target.messages(partition):
            by_key[message.key()].append(int(message.value() or b""))
    assert Counter(n for each in by_key.values() for n in each) == Counter(range(EVENTS))
    for numbers in by_key.values():
        in_order_within(numbers, windows)


def test_into_kafka_a_task_that_dies_and_is_run_again_repeats_nothing(
    home: Home, kafka_server: Kafka
) -> None:
    target = Target(kafka_server)
    first, *rest = tasks(home, target.url())
    for _ in range(2):
        die(first, "kafka", "KafkaPlaybackSink")
    for task in (first, *rest, rest[0]):
        assert run_window(task).error is None
    assert Counter(target.values()) == Counter(b"%d" % n for n in range(EVENTS))


def test_into_kinesis_in_order_within_windows(
    home: Home, local_spark: SparkSession, moto_server: Moto
) -> None:
    stream = Stream(moto_server.endpoint, shards=2)
    pin = pinned(home)
    play_parallel(home.context, local_spark, home.topic("t"), pin, stream.url(), PlaybackOptions())
    windows = [times for times, _ in plan_windows(home.context, home.topic("t"), pin, cores=2)]
    by_key = defaultdict(list)
    for key, value in records(stream):
        by_key[key].append(int(value))
    assert Counter(n for each in by_key.values() for n in each) == Counter(range(EVENTS))
    for numbers in by_key.values():
        in_order_within(numbers, windows)


def test_into_kinesis_a_task_that_dies_gets_there_whole_and_repeats_its_own(
    home: Home, moto_server: Moto
) -> None:
    stream = Stream(moto_server.endpoint)
    first, *rest = tasks(home, stream.url())
    die(first, "kinesis", "KinesisPlaybackSink")
    for task in (first, *rest):
        assert run_window(task).error is None
    found = Counter(int(value) for _, value in records(stream))
    assert found.keys() == set(range(EVENTS))
    again = {number for number, count in found.items() if count > 1}
    assert again
    end_ms = first.times.end_ms
    assert all(T0 + number * APART_MS < end_ms for number in again)


def test_a_target_that_is_not_there_is_told(
    home: Home, local_spark: SparkSession, kafka_server: Kafka, moto_server: Moto
) -> None:
    for sink in (
        f"kafka://{kafka_server.bootstrap}/no-such-topic",
        f"kinesis://no-such?region=us-east-1&endpoint_url={moto_server.endpoint}",
    ):
        with pytest.raises(NotFoundError):
            play_parallel(
                home.context, local_spark, home.topic("t"), pinned(home), sink, PlaybackOptions()
            )
