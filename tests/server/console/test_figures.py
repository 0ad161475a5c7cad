"""The console's figures: samples in turns, and timelines made of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until
from tidelog import Event, Home, InternalError, NotFoundError
from tidelog.home import create_home
from tidelog.log import timeline
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.partition_reader import Reader
from tidelog.log.timeline import Timelines
from tidelog.model.topic import Head, Topic
from tidelog.server.console import sampler as sampling
from tidelog.server.console.sampler import Sampler
from tidelog.settings import Settings

START_MS = 1_763_200_000_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite")))[0] as found:
        yield found


@pytest.fixture
def sampler(home: Home) -> Iterator[Sampler]:
    found = Sampler(home)  # not started: each look takes a sample
    yield found
    found.stop()


def test_who_has_changed_something_sees_it_though_a_sample_takes_long(
    home: Home, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_QUICK_S", -1.0)  # no sample is taken again for who looks
    assert sampler.look().topics == {}
    home.create_topic("t")
    assert sampler.look().topics == {}
    sampler.expire()
    assert list(sampler.look().topics) == ["t"]


def test_samples_are_taken_on_after_any_error(
    home: Home, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_IDLE_S", 0.01)
    real, failed = sampler._read_heads, 0

    def read(topics: list[Topic]) -> Iterable[tuple[Topic, tuple[Head, ...]]]:
        nonlocal failed
        if failed < 2:
            failed += 1
            raise RuntimeError("can't start new thread")
        return real(topics)

    monkeypatch.setattr(sampler, "_read_heads", read)
    with pytest.raises(InternalError, match="can't start new thread"):
        sampler.look()
    sampler.start()
    until(lambda: sampler._snapshot is not None)
    assert failed == 2
    assert sampler.trouble is None


def test_samples_tell_of_topics_consumers_and_runs(home: Home, sampler: Sampler) -> None:
    home.create_topic("t", 2)
    for _ in range(3):
        home.append("t", [Event(b"x" * 100) for _ in range(10)], partition=0)
    with home.consumer("t", "c") as consumer:
        consumer.poll(5)
        consumer.commit()
        sample = sampler.look().topics["t"]
        assert (sample.events, sample.runs, sample.lag) == (30, 3, 25)
        (seen,) = sample.consumers
        assert (seen.alive, seen.held[0].lag.cursor) == (1, 5)
    assert sample.bytes is not None
    home.trim("t", ToOffsets({0: 20}), past_readers=True)
    sampler._sampled_s = float("-inf")
    sample = sampler.look().topics["t"]
    assert (sample.events, sample.runs) == (10, 1)
    home.delete_topic("t", past_readers=True)
    sampler._sampled_s = float("-inf")
    assert sampler.look().topics == {}


def test_in_a_large_home_topics_take_turns(
    home: Home, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_READS_MAX", 6)
    monkeypatch.setattr(sampling, "_ROWS_MAX", 2)
    for number in range(10):
        home.create_topic(f"t{number}", 2)
        for _ in range(2):
            home.append(f"t{number}", [Event(b"x")], partition=0)
    read: set[str] = set()
    for _ in range(40):
        sampler._sampled_s = float("-inf")
        snapshot = sampler.look()
        assert not snapshot.is_whole
        now = {name for name, topic in snapshot.topics.items() if topic.heads}
        assert len(now) - len(read) <= 3
        read = now
    assert len(read) == 10
    assert snapshot.events == 20
    assert snapshot.bytes_are_whole


def test_a_sample_that_fails_leaves_the_one_before(
    home: Home, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.create_topic("t")
    before = sampler.look()

    def fail(*given: object) -> Iterator[object]:
        raise NotFoundError("catalog: is gone")

    monkeypatch.setattr(home, "topics", fail)
    sampler._sampled_s = float("-inf")
    assert sampler.look() is before
    assert sampler.trouble is not None
    monkeypatch.undo()
    sampler._sampled_s = float("-inf")
    assert sampler.look() is not before
    assert sampler.trouble is None


def spread(home: Home, runs: int, events: int, step_ms: int) -> None:
    """Runs that follow one another in time."""
    home.create_topic("t", 2)
    for number in range(runs):
        first = number * events
        batch = [Event(b"x", timestamp=START_MS + (first + n) * step_ms) for n in range(events)]
        home.append("t", batch, partition=number % 2)


def test_a_timeline_spreads_runs_where_there_are_too_many_events(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(home, 8, 250, 100)
    exact = Timelines(home.context).histogram(home.topic("t"), None, None)
    assert exact.is_exact
    monkeypatch.setattr(timeline, "_EXACT_EVENTS", 10)
    about = Timelines(home.context).histogram(home.topic("t"), None, None)
    assert not about.is_exact
    assert abs(sum(about.counts) - sum(exact.counts)) <= len(about.counts)
    assert sum(exact.counts) == 2_000
    for found in (exact, about):
        assert sum(found.sizes) == pytest.approx(raw_bytes(home), abs=len(found.sizes))
        assert [size > 0 for size in found.sizes] == [count > 0 for count in found.counts]
    pairs = zip(exact.counts, about.counts, strict=True)
    assert max(abs(one - other) for one, other in pairs) <= 2
    inside = Timelines(home.context).histogram(
        home.topic("t"), START_MS + 30_000, START_MS + 60_000
    )
    assert 295 <= sum(inside.counts) <= 305


def test_a_compiled_topic_keeps_the_shape_of_its_timeline(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.create_topic("t", 2)
    busy = [Event(b"x" * 100, timestamp=START_MS + number) for number in range(2_000)]
    quiet = [Event(b"x" * 100, timestamp=START_MS + number * 1_000) for number in range(2, 100)]
    for events in (busy, quiet):
        home.append("t", events, partition=0)
    before = Timelines(home.context).histogram(home.topic("t"), None, None)
    monkeypatch.setattr("tidelog.codec.journal_file._GROUP_ROWS", 100)
    home.compile("t")
    monkeypatch.setattr(timeline, "_EXACT_BYTES", 8 * 2_098)  # the times, but not the values
    exact = Timelines(home.context).histogram(home.topic("t"), None, None)
    assert (exact.is_exact, exact.counts) == (True, before.counts)
    monkeypatch.setattr(timeline, "_EXACT_EVENTS", 10)
    about = Timelines(home.context).histogram(home.topic("t"), None, None)
    assert not about.is_exact
    pairs = zip(before.counts, about.counts, strict=True)
    assert max(abs(one - other) for one, other in pairs) <= 100  # a row group


def raw_bytes(home: Home) -> int:
    topic = home.topic("t")
    readers = [Reader(home.context, topic, partition) for partition in range(topic.partitions)]
    return sum(run.raw_bytes for reader in readers for run in reader.runs(0))


def test_a_timeline_of_many_runs_is_read_in_portions(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(home, 12, 5, 1000)
    monkeypatch.setattr(timeline, "_ROWS_MAX", 1)
    monkeypatch.setattr("tidelog.log.partition_reader._RUNS_AT_ONCE", 2)
    timelines, looks = Timelines(home.context), 0
    while not (found := timelines.histogram(home.topic("t"), None, None)).is_whole:
        looks += 1
        assert looks < 20
    assert looks > 3
    assert sum(found.counts) == 60


def test_a_timeline_follows_appends_and_trims(home: Home) -> None:
    spread(home, 2, 10, 1000)
    timelines, topic = Timelines(home.context), home.topic("t")
    assert sum(timelines.histogram(topic, None, None).counts) == 20
    home.append("t", [Event(b"late", timestamp=START_MS - 5_000)], partition=0)
    found = timelines.histogram(topic, None, None)
    assert (sum(found.counts), found.first_ms) == (21, START_MS - 5_000)
    home.trim("t", ToOffsets({0: 10}))
    found = timelines.histogram(topic, None, None)
    assert sum(found.counts) == 11
    wide = timelines.histogram(topic, 0, 253_402_300_799_999)
    assert len(wide.counts) <= timeline.BARS_MAX
    assert sum(wide.counts) == 11


@given(st.integers(0, 10**13), st.integers(1, 10**13))
def test_bars_cover_their_range(start: int, length: int) -> None:
    begin, width, bars = timeline._grid(start, start + length)
    assert begin <= start < begin + width
    assert begin + width * bars >= start + length
    assert bars <= timeline.BARS_MAX
