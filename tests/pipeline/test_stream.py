"""Streams: any source to a handler, at least once, by one process at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.servers.kafka import Kafka
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.home import World, create_home, open_home
from tidelog.settings import Settings

YEAR_9999_MS = 253_370_764_800_000

CHILD = """
import os, signal, sys
import tidelog

config, source, path, last = sys.argv[1:]
with tidelog.open(config) as home, open(path, "ab", buffering=0) as out:
    def handle(event):
        out.write(b"%d %s\\n" % (event.partition, event.value))
        if event.value == last.encode():
            os.kill(os.getpid(), signal.SIGKILL)
    home.stream(source).run(handle, name="billing", until_caught_up=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("from", 2)
        yield made


def fill(home: Home, count: int) -> None:
    home.append("from", [Event(b"%d" % n, timestamp=n) for n in range(count)], partition=0)


def test_every_event_is_handled_once_and_the_next_run_has_the_rest(home: Home) -> None:
    fill(home, 3)
    home.append("from", [Event(b"other", b"k", "id-1", 5, "made", (("h", b"1"),))], partition=1)
    got: list[Event] = []
    stream = home.stream("topic:from")
    assert stream.run(got.append, name="billing", until_caught_up=True) == 4
    assert [each.value for each in got if each.partition == 0] == [b"0", b"1", b"2"]
    other = next(each for each in got if each.partition == 1)
    assert (other.key, other.id, other.timestamp, other.type) == (b"k", "id-1", 5, "made")
    assert (other.headers, other.offset) == ((("h", b"1"),), 0)
    home.append("from", [Event(b"3")], partition=0)
    got.clear()
    assert stream.run(got.append, name="billing", until_caught_up=True) == 1
    assert [each.value for each in got] == [b"3"]
    assert stream.run(got.append, name="other", until_caught_up=True) == 5  # its own position


def test_handler_that_fails_ends_the_run_after_what_it_handled(home: Home) -> None:
    fill(home, 10)
    got: list[Event] = []

    def handle(event: Event) -> None:
        if event.value == b"4":
            raise ZeroDivisionError("no")
        got.append(event)

    with pytest.raises(ZeroDivisionError):
        home.stream("topic:from").run(handle, name="billing", retries=0)
    assert [each.value for each in got] == [b"0", b"1", b"2", b"3"]
    assert home.pumps.get("billing").status().events == 4  # none of these comes again
    rest: list[Event] = []
    home.stream("topic:from").run(rest.append, name="billing", until_caught_up=True)
    assert [each.value for each in rest] == [b"4", b"5", b"6", b"7", b"8", b"9"]


def test_slow_handler_commits_within_a_range(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tidelog.pipeline.stream._RANGE_S", 0.0
    )  # every event takes longer than that
    fill(home, 10)
    behind: list[int] = []

    def handle(event: Event) -> None:
        behind.append(len(behind) - home.pumps.get("billing").status().events)

    done = home.stream("topic:from").run(handle, name="billing", until_caught_up=True)
    assert done == len(behind) == home.pumps.get("billing").status().events == 10
    assert max(behind) <= 1  # of the range before, which is committed while this one is handled


def test_event_that_is_dated_ahead_waits_for_the_lag_and_no_longer(home: Home) -> None:
    home.append("from", [Event(b"%d" % n, timestamp=YEAR_9999_MS) for n in range(3)], partition=0)
    stop = threading.Event()
    timer = threading.Timer(60, stop.set)
    timer.start()
    stream = home.stream("topic:from")
    done = stream.run(len, name="s", batch=True, lag_ms=50, until_caught_up=True, stop=stop)
    timer.cancel()
    assert done == 3


def test_failed_events_become_dead_letters_and_filters_choose(home: Home) -> None:
    home.create_topic("dead")
    events = [Event(b"%d" % n, type="odd" if n % 2 else "even") for n in range(6)]
    home.append("from", events, partition=0)

    def handle(events: list[Event]) -> None:
        if events[0].value == b"3":
            raise ZeroDivisionError("no")

    stream = home.stream("topic:from")
    how = {"batch": True, "max_events": 2, "until_caught_up": True}
    done = stream.run(
        handle,
        name="billing",
        types=["odd"],
        on_error="dead-letter",
        dead_letter="dead",
        retries=0,
        **how,  # type: ignore[arg-type]
    )
    assert done == 2
    (letter,) = home.read("dead")
    assert letter.value == b"3"
    totals = home.pumps.get("billing").status().partitions[0].totals
    assert (totals.dead, totals.dropped) == (1, 3)


def test_second_process_with_the_name_waits_and_takes_over(home: Home) -> None:
    fill(home, 3)
    first: list[Event] = []
    second: list[Event] = []
    stops = threading.Event(), threading.Event()
    with open_home(home.config) as other:
        threads = [
            threading.Thread(
                target=each.stream("topic:from").run,
                args=(got.append,),
                kwargs={"name": "billing", "stop": stop},
                daemon=True,
            )
            for each, got, stop in ((home, first, stops[0]), (other, second, stops[1]))
        ]
        threads[0].start()
        until(lambda: len(first) == 3)
        threads[1].start()
        home.append("from", [Event(b"3")], partition=0)
        until(lambda: len(first) == 4)
        assert not second
        stops[0].set()
        threads[0].join(60)
        home.append("from", [Event(b"4")], partition=0)
        until(lambda: len(second) == 1)
        stops[1].set()
        threads[1].join(60)
    assert [each.value for each in first + second] == [b"0", b"1", b"2", b"3", b"4"]


def test_process_that_lost_the_stream_delivers_nothing_more(home: Home) -> None:
    fill(home, 3)
    first: list[Event] = []
    others: list[Event] = []

    def handle(event: Event) -> None:
        first.append(event)
        if len(first) == 2:  # stalls, and another process takes the stream
            with open_home(home.config) as other:
                stream = other.stream("topic:from")
                stream.run(others.append, name="billing", take_over=True, until_caught_up=True)
            home.context.clock.sleep(1.1)  # as any stall that loses a lease

    with pytest.raises(FencedError):
        home.stream("topic:from").run(handle, name="billing")
    assert [each.value for each in first] == [b"0", b"1"]
    assert [each.value for each in others] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("count", [-1, 0])
def test_list_of_no_events_is_refused_and_nothing_is_skipped(home: Home, count: int) -> None:
    fill(home, 3)
    stream, found = home.stream("topic:from"), list[Event]()
    with pytest.raises(InvalidError, match="max_events must be 1 or more"):
        stream.run(found.extend, name="s", batch=True, max_events=count, until_caught_up=True)
    assert stream.run(found.extend, name="s", batch=True, until_caught_up=True) == len(found) == 3


def test_home_in_memory_is_refused_by_name() -> None:
    with open_home("memory:") as home:
        home.create_topic("from")
        fill(home, 1)
        with pytest.raises(InvalidError, match="use a home in a folder"):
            home.stream("topic:from").run(print, name="s", until_caught_up=True)


def test_names_belong_to_one_source_and_bad_ones_are_refused(home: Home) -> None:
    home.create_topic("to")
    home.stream("topic:from").run(print, name="billing", until_caught_up=True)
    with pytest.raises(InvalidError, match="its name is that of a stream of `topic:from`"):
        home.stream("topic:to").run(print, name="billing")
    home.pumps.create("copy", source="topic:from", topic="to")
    with pytest.raises(InvalidError, match="its name is that of a pump"):
        home.stream("topic:from").run(print, name="copy")
    with pytest.raises(InvalidError, match="is a stream"):
        home.pumps.get("billing").run()
    with pytest.raises(NotFoundError):
        home.stream("topic:nowhere").run(print, name="new")
    with pytest.raises(InvalidError, match="give the time itself"):
        home.stream("kinesis://orders?start=now").run(print, name="new")
    assert [each.name for each in home.pumps.list()] == ["copy"]
    home.pumps.get("billing").delete()
    fill(home, 1)
    assert home.stream("topic:from").run(len, name="billing", batch=True, until_caught_up=True)


@pytest.mark.server
def test_kafka_reaches_a_handler_at_least_once_over_kills(
    home: Home, kafka_server: Kafka, tmp_path: Path
) -> None:
    name = f"streamed-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, 2)
    producer = kafka_server.producer()
    for n in range(3_000):
        producer.produce(name, b"%d" % n, partition=n % 2)
    producer.flush()
    source, out = f"kafka://{kafka_server.bootstrap}/{name}", tmp_path / "handled"
    for last in ("1500", "2500", "none"):  # killed in ranges of 1,000 events, twice
        command = [sys.executable, "-c", CHILD, home.config, source, str(out), last]
        subprocess.run(command, check=False, timeout=120)
    lines = [line.split() for line in out.read_bytes().splitlines()]
    for partition in (0, 1):
        own = [int(value) for each, value in lines if int(each) == partition]
        assert sorted(set(own)) == list(range(partition, 3_000, 2))
        # In order, except where a killed process begins again.
        assert sum(later <= before for before, later in pairwise(own)) <= 2
    assert 3_000 < len(lines) < 3_000 + 2 * 2 * 1_000
    assert home.stream(source).run(len, name="billing", batch=True, until_caught_up=True) == 0
