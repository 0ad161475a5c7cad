"""Copies of events into a topic beside deletes: what was deleted does not come back.

Three ways that copy: the topic sink of pumps and restores, playbacks, and the Spark sink.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.faults.test_amend_faults import amender
from tests.support.compiled_journals import Death, Press
from tests.support.ranges import batch_of, stage
from tidelog import Event
from tidelog.codec.event_batch import Contents, table_of
from tidelog.codec.partitioner import partitions_for, split
from tidelog.codec.segment import encode_staged
from tidelog.connectors.sink import Lot
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import TopicPlaybackSink, TopicSettings, TopicSink
from tidelog.context import Context
from tidelog.home import Home, World, create_home
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.copier import Copier
from tidelog.log.producer.staged import StagedSegment
from tidelog.model import layout
from tidelog.model.event import Event as Stored
from tidelog.model.topic import Topic
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.spark.write import Batch, SparkSink
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash

T = TypeVar("T")
IDS = "axbyc"
EVENTS = [Event(each.encode(), each.encode(), each, 5) for each in IDS]
Run = Callable[[Context], None]
WAYS = ["sink", "playback", "spark"]


class At(Faults):
    """Something else happens before the n-th call."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._number = number
        self._act = act

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        if self.calls == self._number:
            self.calls += 1
            self._act()
        return super().call(verb, effect, lost)


def copying(press: Press, topic: Topic, way: str) -> Run:
    """Bring the events into the topic; the same again goes on after a death."""
    if way == "sink":
        manifest = stage(_sink(press.context, topic), [batch_of(EVENTS)])
        return lambda context: _publish(context, topic, manifest)
    if way == "playback":
        return lambda context: _play(context, topic)
    staged = _staged(press, topic)
    return lambda context: SparkSink(context, topic, "s").commit(Batch("q", 1, staged, Contents()))


def _publish(context: Context, topic: Topic, manifest: object) -> None:
    _sink(context, topic).publish(manifest)  # type: ignore[arg-type]


def _sink(context: Context, topic: Topic) -> TopicSink:
    @contextlib.contextmanager
    def open_context() -> Iterator[Context]:
        yield context

    settings = TopicSettings(topic, "memory:", False, EventLimit(1 << 20))
    return TopicSink(open_context, settings, lambda _: context.store)


def _play(context: Context, topic: Topic) -> None:
    sink = TopicPlaybackSink(context, topic, "again", False)
    sink.put(Lot(0, batch_of(EVENTS)))


def _staged(press: Press, topic: Topic) -> tuple[StagedSegment, ...]:
    table = table_of(EVENTS, 0)
    places = partitions_for(table.column("key").combine_chunks(), topic.partitions, 0)
    segment = encode_staged([(p, part) for p, part, _ in split(table, places)])
    key = layout.sink_staged(topic.incarnation, "s", 1, 0, press.ids.new())
    press.store.put(key, segment.data)
    return (StagedSegment(key, segment.pieces),)


def ids(context: Context, topic: Topic) -> list[str]:
    return sorted(
        str(event.id)
        for partition in range(topic.partitions)
        for stretch in Reader(context, topic, partition).read(0)
        for event in stretch.events()
    )


def world() -> tuple[Press, Topic]:
    """A topic that has one of the events already, so that it can be deleted."""
    press = Press()
    topic = press.topic("t", 2)
    segment = encode_staged([(0, table_of([Stored(b"old", id="x", timestamp=5)], 5))])
    appender = press.appender(topic)
    appender.commit(appender.upload(segment), segment.pieces[0])
    appender.close()
    return press, topic


def calls_of(way: str) -> int:
    press, topic = world()
    run, faults = copying(press, topic, way), Faults()
    run(press.faulty(faults))
    return faults.calls


@pytest.mark.parametrize("way", WAYS)
def test_delete_at_any_moment_of_a_copy_is_not_undone(way: str) -> None:
    for number in range(calls_of(way)):
        press, topic = world()
        run = copying(press, topic, way)
        run(press.faulty(At(number, lambda p=press, t=topic: delete(p.context, t))))  # type: ignore[misc]
        assert ids(press.context, topic) == sorted("abyc"), number


@pytest.mark.parametrize("way", WAYS)
def test_copy_at_any_moment_of_a_delete_does_not_stay(way: str) -> None:
    """The copy is whole, and comes between any two calls of the delete."""
    for number in range(80):
        press, topic = world()
        run = copying(press, topic, way)
        faults = At(number, lambda p=press, r=run: r(p.context))  # type: ignore[misc]
        delete(press.faulty(faults), topic)
        assert "x" not in ids(press.context, topic), number
        if faults.calls <= number:
            return
    pytest.fail("a delete takes more calls than that")


@pytest.mark.parametrize("way", WAYS)
def test_copy_that_dies_anywhere_goes_on_without_what_was_deleted_since(way: str) -> None:
    for number in range(1, calls_of(way) + 1):
        press, topic = world()
        run = copying(press, topic, way)
        with contextlib.suppress(Crash):
            run(press.faulty(Death(number)))
        delete(press.context, topic)
        run(press.context)
        run(press.context)
        assert ids(press.context, topic) == sorted("abyc"), number


def test_delete_that_dies_anywhere_is_finished_by_the_next() -> None:
    for number in range(1, 40):
        press, topic = world()
        run = copying(press, topic, "sink")
        with contextlib.suppress(Crash):
            delete(press.faulty(Death(number)), topic)
        run(press.context)
        delete(press.context, topic)
        assert ids(press.context, topic) == sorted("abyc"), number


def delete(context: Context, topic: Topic) -> None:
    amender(context, topic).delete(["x"])


def test_topic_without_copies_is_not_written_to_by_deletes_of_other_partitions() -> None:
    press, topic = world()
    delete(press.context, topic)
    assert [press.head(topic, each).erasures for each in (0, 1)] == [0, 0]
    Copier(press.context, topic, "c").look()
    amender(press.context, topic).update({})
    before = press.head(topic, 1)
    assert before.copied
    segment = encode_staged([(0, table_of([Stored(b"new", id="z", timestamp=5)], 5))])
    appender = press.appender(topic)
    appender.commit(appender.upload(segment), segment.pieces[0])
    amender(press.context, topic).delete(["z"])
    assert [press.head(topic, each).erasures for each in (0, 1)] == [1, 1]


def copied(press: Press, topic: Topic, *events: Stored) -> tuple[int, list[str]]:
    """What a playback of some events leaves out, and what the topic has then."""
    sink = TopicPlaybackSink(press.context, topic, None, False)
    left_out = sink.put(Lot(0, batch_of(events)))
    sink.close()
    return left_out, ids(press.context, topic)


def test_event_of_a_later_time_is_a_new_one_and_others_are_counted() -> None:
    press, topic = world()
    delete(press.context, topic)
    now_ms = press.clock.now_ms()
    old, new = Stored(b"", id="x", timestamp=now_ms), Stored(b"", id="x", timestamp=now_ms + 1)
    assert copied(press, topic, old, replace_time(old, 5)) == (2, [])
    assert copied(press, topic, old, new) == (1, ["x"])


def test_erased_event_from_the_future_does_not_come_back() -> None:
    press, topic = world()
    future = press.clock.now_ms() + 1_000_000
    assert copied(press, topic, Stored(b"", id="x", timestamp=future)) == (0, ["x", "x"])
    delete(press.context, topic)
    assert copied(press, topic, Stored(b"", id="x", timestamp=future)) == (1, [])
    assert copied(press, topic, Stored(b"", id="x", timestamp=future + 1)) == (0, ["x"])


def test_later_delete_keeps_the_latest_time_of_an_id() -> None:
    press, topic = world()
    future = press.clock.now_ms() + 1_000_000
    copied(press, topic, Stored(b"", id="x", timestamp=future))
    delete(press.context, topic)
    copied(press, topic, Stored(b"", id="x", timestamp=future + 1))
    press.clock.advance(1)
    delete(press.context, topic)
    assert copied(press, topic, Stored(b"", id="x", timestamp=future + 1)) == (1, [])


def replace_time(event: Stored, time_ms: int) -> Stored:
    return Stored(event.value, event.key, event.id, time_ms)


def test_events_without_ids_that_were_deleted_by_key_do_not_come_back() -> None:
    press, topic = world()
    old = Stored(b"", b"ada", None, 7)
    assert copied(press, topic, old, Stored(b"", b"bob", None, 7)) == (0, ["None", "None", "x"])
    amender(press.context, topic).delete_key(b"ada", lambda _: None)
    assert copied(press, topic, old) == (1, ["None", "x"])
    later = replace_time(old, press.clock.now_ms() + 1)
    assert copied(press, topic, later) == (0, ["None", "None", "x"])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as found:
        found.create_topic("from", 1)
        found.create_topic("t", 2)
        yield found


def test_pump_counts_what_it_leaves_out_and_brings_a_new_event_of_an_erased_id(
    home: Home,
) -> None:
    home.append("from", [Event(b"v", id=each) for each in "abc"])
    counts: list[tuple[int, int]] = []

    def pump(name: str) -> None:
        def count(report: object) -> None:
            counts.extend((m.left_out, m.dropped) for m in report.committed.values())  # type: ignore[attr-defined]

        pipeline = open_pump(home.context, PumpOptions("topic:from", "t", name), LocalWorkers(1))
        Driver(home.context, pipeline, DriverOptions(on_cycle=count)).run()

    pump("one")
    home.delete("t", "b")
    pump("two")
    now_ms = home.context.clock.now_ms() + 10_000
    home.append("from", [Event(b"new", id="b", timestamp=now_ms)])
    pump("two")
    assert counts == [(0, 0), (1, 0), (0, 0)]
    assert home.get("t", "b").value == b"new"


def test_driver_whose_segment_another_has_appended_and_deleted_reports_no_damage() -> None:
    """Both make a segment without what was erased; the other driver has not noted its batch yet."""
    press, topic = world()
    delete(press.context, topic)
    staged = _staged(press, topic)
    batch = Batch("q", 1, staged, Contents())
    copier = Copier.copy_staged

    class Dies(BaseException):
        """Between the last commit and the row."""

    def finish_first(self: Copier, *given: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Copier, "copy_staged", copier)
            write = SparkSink._write

            def dies(sink: SparkSink, state: object, *others: object) -> None:
                if getattr(state, "done", False):
                    raise Dies
                write(sink, state, *others)  # type: ignore[arg-type]

            patch.setattr(SparkSink, "_write", dies)
            with pytest.raises(Dies):
                SparkSink(press.context, topic, "s").commit(batch)
        return copier(self, *given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copier, "copy_staged", finish_first)
        SparkSink(press.context, topic, "s").commit(batch)
    assert ids(press.context, topic) == sorted(set(IDS) - {"x"})
