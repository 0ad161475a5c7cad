"""Sweeping: orphans go, and nothing that anybody refers to, whoever stalls, races or dies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.homes import a_catalog, a_store
from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S, House
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import SystemClock
from tidelog.context import Context
from tidelog.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.log.maintenance import sweep as sweep_module
from tidelog.log.maintenance.object_references import KNOWN
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash


@pytest.fixture
def house() -> House:
    return House()


def test_orphans_go_after_a_week(house: House) -> None:
    topic = house.topic(partitions=2)
    house.append(topic, ["a"])
    house.append(topic, ["b"], 1)
    orphan = house.orphan(topic)
    young = sweep_home(house.context, HOUR_MS)
    assert young == SweepReport(topics=1, objects_seen=3, objects_young=1)
    house.clock.advance(3600)
    kept = sweep_home(house.context, HOUR_MS)
    assert kept == SweepReport(topics=1, objects_seen=3, objects_doubted=1)  # may be a loss
    house.append(topic, ["c"])
    house.clock.advance(WEEK_S - 3601)
    house.append(topic, ["d"])
    assert sweep_home(house.context, 0).objects_doubted == 1, "newer commits change nothing"
    house.clock.advance(1)
    size = house.store.head(orphan.key).size
    swept = sweep_home(house.context, HOUR_MS)
    assert swept == SweepReport(topics=1, objects_seen=5, objects_deleted=1, bytes_deleted=size)
    assert orphan.key not in house.objects()
    assert house.values(topic) + house.values(topic, 1) == ["a", "c", "d", "b"]
    assert sweep_home(house.context, 0).objects_deleted == 0
    with pytest.raises(InvalidError):
        sweep_home(house.context, -1)


def test_each_sweep_raises_the_generation_and_every_floor(house: House) -> None:
    topic = house.topic(partitions=3)
    sweep_home(house.context, 0)
    sweep_home(house.context, 0)
    assert find_topic(house.context, "orders").generation == 2
    assert [house.head(topic, partition).floor for partition in range(3)] == [2, 2, 2]
    house.append(topic, ["a"])
    assert layout.segment_generation(house.runs(topic)[0].object) == 2


def test_what_this_sweeps_own_generation_holds_is_left_to_the_next(house: House) -> None:
    topic = house.topic()

    class Uploading(MemoryStore):
        """Somebody uploads while the sweep lists."""

        def list(self, prefix: str = "", start_after: str = "") -> Iterable[ObjectInfo]:
            if prefix == layout.segments(topic.incarnation) and not start_after:
                key = layout.segment(topic.incarnation, 1, house.ids.new())
                house.store.put(key, b"under way")
            return house.store.list(prefix, start_after)

    context = Context(
        Uploading(house.clock), house.catalog, house.clock, house.ids, house.context.random
    )
    report = sweep_home(context, 0)
    assert (report.objects_seen, report.objects_deleted) == (1, 0)


def test_a_producer_that_stalls_for_days_before_its_commit_loses_nothing(house: House) -> None:
    topic = house.topic(partitions=2)
    appender = house.appender(topic)
    segment = house.segment(["stalled"])
    stored = appender.upload(segment)
    sweep_home(house.context, HOUR_MS)
    house.clock.advance(WEEK_S)
    house.append(topic, ["by another"], 1)
    assert sweep_home(house.context, HOUR_MS).objects_deleted == 1
    assert stored.key not in house.objects()
    base, moved = appender.commit(stored, segment.pieces[0])
    assert (base, moved.generation) == (0, 2)
    assert moved.key != stored.key
    house.clock.advance(3 * DAY_S)
    assert sweep_home(house.context, HOUR_MS).objects_deleted == 0
    assert house.values(topic) == ["stalled"]


def test_a_commit_with_a_head_that_it_read_before_the_sweep_uploads_anew(house: House) -> None:
    topic = house.topic()
    appender = house.appender(topic)
    first, second = house.segment(["one"]), house.segment(["two"])
    appender.commit(appender.upload(first), first.pieces[0])  # it remembers the head
    stored = appender.upload(second)
    sweep_home(house.context, HOUR_MS)
    house.clock.advance(WEEK_S)
    house.append(topic, ["by another"])
    assert sweep_home(house.context, HOUR_MS).objects_deleted == 1
    appender.commit(stored, second.pieces[0])
    assert house.values(topic) == ["one", "by another", "two"]


def test_objects_of_trimmed_runs_go_and_half_done_trims_are_finished(house: House) -> None:
    topic = house.topic()
    for number in range(5):
        house.append(topic, [f"{number}a", f"{number}b"])
    house.put(topic, "head", msgspec.structs.replace(house.head(topic), start=5))
    house.clock.advance(DAY_S)
    report = sweep_home(house.context, HOUR_MS)
    assert (report.runs_removed, report.objects_deleted) == (2, 2)
    assert [run.base for run in house.runs(topic)] == [4, 6, 8]
    assert len(house.rows(topic, "slot/")) == 3
    assert house.values(topic) == ["2b", "3a", "3b", "4a", "4b"]
    assert verify_topic(house.context, topic).findings == ()


def test_an_object_that_one_partition_still_needs_stays(house: House) -> None:
    topic = house.topic(partitions=2)
    appender = house.appender(topic)
    segment = house.shared_segment({0: ["p0"], 1: ["p1"]})
    stored = appender.upload(segment)
    for piece in segment.pieces:
        appender.commit(stored, piece)
    trim_topic(house.context, topic, ToOffsets({0: 1}))
    assert sweep_home(house.context, 0).objects_deleted == 0
    assert house.values(topic, 1) == ["p1"]
    trim_topic(house.context, topic, ToOffsets({1: 1}))
    assert sweep_home(house.context, 0).objects_deleted == 1


def test_deletes_come_in_batches(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = house.topic()
    house.append(topic, ["kept"])
    for _ in range(7):
        house.orphan(topic)
    sweep_home(house.context, HOUR_MS)
    house.clock.advance(WEEK_S)
    monkeypatch.setattr(sweep_module, "_DELETES_AT_ONCE", 3)
    faults = Faults()
    batches = []
    context = house.faulty(faults)
    monkeypatch.setattr(
        context.store, "delete", lambda keys: (batches.append(len(keys)), house.store.delete(keys))
    )
    assert sweep_home(context, 0).objects_deleted == 7
    assert batches == [1, 3, 3, 1]  # the first is the object that shows the store's time


def test_an_unknown_kind_of_row_makes_it_leave_that_topic_alone(house: House) -> None:
    newer, plain = house.topic("newer", 2), house.topic("plain")
    orphans = [house.orphan(topic) for topic in (newer, plain)]
    kept = [house.append(topic, ["kept"]) for topic in (newer, plain)]
    sweep_home(house.context, HOUR_MS)
    house.put(newer, "tide/00000000000000000000", b"?", partition=1)
    house.clock.advance(WEEK_S)
    report = sweep_home(house.context, 0)
    assert [refused.topic for refused in report.refused] == ["newer"]
    assert isinstance(report.refused[0].error, InvalidError)
    assert "tide/" in str(report.refused[0].error)
    assert report.topics == 1
    assert orphans[0].key in house.objects()
    assert len(house.objects()) == 1 + len(kept)


@pytest.mark.parametrize("error", [UnavailableError("store: is down"), ValueError("a bug")])
def test_topic_that_cannot_be_swept_is_reported_and_the_others_are_swept(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    house.topic("first")
    house.topic("second")
    real = sweep_module.read_whole

    def read(context: Context, topic: Topic, *rest: Any) -> Any:
        if topic.name == "first":
            raise error
        return real(context, topic, *rest)

    monkeypatch.setattr(sweep_module, "read_whole", read)
    report = sweep_home(house.context, 0)
    assert [(each.topic, each.error.kind) for each in report.refused] == [
        ("first", "unavailable" if isinstance(error, UnavailableError) else "internal")
    ]
    assert report.topics == 1


@pytest.mark.parametrize("row", ["a", "heads", "run", "slots/1", "zebra/1"])
def test_unknown_rows_are_met_wherever_they_stand(house: House, row: str) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    house.put(topic, row, b"?")
    assert len(sweep_home(house.context, 0).refused) == 1


def test_the_sweep_knows_every_kind_of_row_in_the_layout() -> None:
    assert set(layout.TOPIC_ROW_KINDS) == KNOWN


def test_a_run_that_does_not_decode_makes_it_leave_that_topic_alone(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    house.put(topic, layout.run_row(0), b"\xc1")
    report = sweep_home(house.context, 0)
    assert isinstance(report.refused[0].error, CorruptError)
    assert len(house.objects()) == 1


def test_a_deleted_topics_late_upload_is_swept(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    appender = house.appender(topic)
    delete_topic(house.context, "orders")
    again = house.topic()
    house.append(again, ["b"])
    segment = house.segment(["late"])
    late = appender.upload(segment)
    house.store.put(f"topics/{topic.incarnation}/journals/0/x", b"of another kind")
    with pytest.raises(NotFoundError):
        appender.commit(late, segment.pieces[0])
    assert sweep_home(house.context, HOUR_MS).objects_young == 2
    house.clock.advance(3600)
    assert sweep_home(house.context, HOUR_MS).objects_deleted == 2
    assert house.values(again) == ["b"]
    assert len(house.objects()) == 1


def test_a_topic_that_is_made_during_the_sweep_keeps_its_objects(house: House) -> None:
    made: list[Topic] = []

    class Making(MemoryStore):
        """A topic is made, and used, just before the incarnations are listed."""

        def list(self, prefix: str = "", start_after: str = "") -> Iterable[ObjectInfo]:
            if not made:
                made.append(house.topic("new"))
                house.append(made[0], ["a"])
            return house.store.list(prefix, start_after)

    context = Context(
        Making(house.clock), house.catalog, house.clock, house.ids, house.context.random
    )
    assert sweep_home(context, 0).objects_deleted == 0
    assert house.values(made[0]) == ["a"]


def test_what_is_not_ours_is_left_alone(house: House) -> None:
    topic = house.topic()
    strange = {"topics/readme", "topics/x/y", f"{layout.segments(topic.incarnation)}note"}
    for key in strange:
        house.store.put(key, b"?")
    house.clock.advance(DAY_S)
    assert sweep_home(house.context, 0).objects_deleted == 0
    assert house.objects() == strange


def test_topics_that_are_not_ready_are_left_to_who_makes_or_deletes_them(house: House) -> None:
    faults = Faults(crash_after_call=4)
    wanted = Topic("new", house.ids.new(), 2, 0)
    with pytest.raises(Crash):
        create_topic(house.faulty(faults), wanted)
    old = house.topic("old")
    house.append(old, ["a"])
    with pytest.raises(Crash):
        delete_topic(house.faulty(Faults(crash_after_call=5)), "old")
    assert sweep_home(house.context, 0) == SweepReport()
    delete_topic(house.context, "old")
    house.append(create_topic(house.context, wanted), ["b"])


def test_a_topic_deleted_in_the_middle_of_a_sweep_is_passed_over(house: House) -> None:
    house.topic("orders", 2)
    other = house.topic("other")
    orphan = house.orphan(other)
    house.append(other, ["kept"])
    sweep_home(house.context, HOUR_MS)
    house.clock.advance(WEEK_S)

    class Deleting(MemoryCatalog):
        """The topic goes as soon as its generation was raised."""

        gone = False

        def write(self, *args: object, **kwargs: object) -> None:
            house.catalog.write(*args, **kwargs)  # type: ignore[arg-type]
            if not self.gone:
                self.gone = True
                delete_topic(house.context, "orders")

    deleting = Deleting()
    deleting.get, deleting.scan = house.catalog.get, house.catalog.scan  # type: ignore[method-assign]
    context = Context(house.store, deleting, house.clock, house.ids, house.context.random)
    report = sweep_home(context, 0)
    assert (report.topics, report.refused, report.objects_deleted) == (1, (), 1)
    assert orphan.key not in house.objects()


def test_producer_that_was_marked_as_silent_goes_on(house: House) -> None:
    topic = house.topic()
    silent, named, segment = house.appender(topic), house.appender(topic, "n"), house.segment(["x"])
    for _ in range(3):
        silent.commit(silent.upload(segment), segment.pieces[0])
        house.clock.advance(7 * DAY_S + 1)
        named.open_named()
        assert sweep_home(house.context, 0).producers_removed < 2  # that of an older copy
        assert house.rows(topic, layout.producer_row(silent._producer))
    assert house.values(topic) == ["x"] * 3


def test_rows_of_unnamed_producers_expire_and_living_ones_go_on(house: House) -> None:
    topic = house.topic()
    silent, named = house.appender(topic), house.appender(topic, "named")
    named.open_named()
    for appender in (silent, named):
        segment = house.segment(["x"])
        appender.commit(appender.upload(segment), segment.pieces[0])
    house.clock.advance(7 * DAY_S)
    named.open_named()
    assert sweep_home(house.context, 0).producers_removed == 0
    house.clock.advance(1)
    assert sweep_home(house.context, 0).producers_removed == 0, "the topic shows no later time"
    named.open_named()
    assert sweep_home(house.context, 0).producers_removed == 0, "it is marked as silent now"
    house.clock.advance(7 * DAY_S + 1)
    named.open_named()
    assert sweep_home(house.context, 0).producers_removed == 1
    assert [row.row for row in house.rows(topic, "producer/")] == ["producer/named"]
    segment = house.segment(["after all"])
    assert silent.commit(silent.upload(segment), segment.pieces[0])[0] == 2
    assert house.values(topic) == ["x", "x", "after all"]


def test_on_files(house: House, tmp_path: Path) -> None:
    catalog = a_catalog(f"sqlite:{tmp_path}/catalog.sqlite", create=True)
    house.store, house.catalog = a_store(str(tmp_path / "objects")), catalog
    house.context = Context(house.store, catalog, SystemClock(), house.ids, house.context.random)
    topic, gone = house.topic("orders", 2), house.topic("gone")
    late = house.appender(gone)
    house.orphan(topic)
    for number in range(30):
        house.append(topic, [str(number)], number % 2)
    trim_topic(house.context, topic, ToOffsets({0: 10, 1: 15}))
    delete_topic(house.context, "gone")
    late.upload(house.segment(["late"]))
    report = sweep_home(house.context, 0)
    assert (report.topics, report.objects_seen, report.objects_deleted) == (1, 32, 26)
    assert house.values(topic) == ["20", "22", "24", "26", "28"]
    report = verify_topic(house.context, topic)
    assert (report.errors, report.possible_losses, len(report.findings)) == (0, 1, 1)
    catalog.close()


@pytest.mark.parametrize("call", range(1, 50))
def test_it_dies_after_every_call_and_the_next_one_cleans_all(call: int) -> None:
    house = House()
    topic = house.topic(partitions=2)
    gone = house.topic("gone")
    late = house.appender(gone)
    delete_topic(house.context, "gone")
    late.upload(house.segment(["late"]))
    for number in range(3):
        house.append(topic, [f"old {number}"], number % 2)
    trim_topic(house.context, topic, ToOffsets({1: 1}))
    house.put(topic, "head", msgspec.structs.replace(house.head(topic), start=1))
    appender = house.appender(topic)
    segment = house.segment(["stalled"])
    stored = appender.upload(segment)
    house.orphan(topic)
    house.clock.advance(8 * DAY_S)
    faults = Faults(crash_after_call=call)
    died = False
    try:
        sweep_home(house.faulty(faults), HOUR_MS)
    except Crash:
        died = True
    assert died or faults.calls < call
    assert verify_topic(house.context, topic).errors == 0
    assert house.values(topic) == ["old 2"]
    assert house.append(topic, ["after"], 1) == 1
    appender.commit(stored, segment.pieces[0])
    for _ in range(2):  # a sweep marks silent producers, and one a week later deletes their rows
        house.clock.advance(8 * DAY_S)
        house.appender(topic, "later").open_named()  # so that the topic itself shows a later time
        sweep_home(house.context, HOUR_MS)
    assert house.values(topic) == ["old 2", "stalled"]
    assert house.values(topic, 1) == ["after"]
    report = verify_topic(house.context, topic)
    assert report.findings == ()
    assert report.objects == len(house.objects()) == 3
    assert house.rows(topic, "producer/~") == house.rows(topic, "producer/~", 1) == []
