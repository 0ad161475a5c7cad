"""Trimming: by time, by offset and by bytes; half done, it is finished by the next."""

from __future__ import annotations

import pytest

from tests.support.topic_upkeep import House
from tidelog.catalog.base import Catalog, Change
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.trim import (
    BeforeTime,
    KeepBytes,
    ToOffsets,
    TrimResult,
    TrimTo,
    trim_topic,
)
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import delete_topic
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.testing.faults import Fault, Faults
from tidelog.testing.scheduler import Crash

T0 = 1_700_000_000_000


@pytest.fixture
def house() -> House:
    return House()


def sizes(house: House, topic: Topic, partition: int = 0) -> list[int]:
    return [run.byte_end - run.byte_start for run in house.runs(topic, partition)]


def check_clean(house: House, topic: Topic) -> None:
    report = verify_topic(house.context, topic)
    assert report.errors == 0, report.findings
    assert not [finding for finding in report.findings if "trimmed" in finding.what]


def three_runs(house: House, topic: Topic, partition: int = 0) -> None:
    """Offsets 0 to 2, 2 to 4 and 4 to 6, ten seconds apart."""
    for number in range(3):
        at_ms = T0 + 10_000 * number
        house.append(topic, [f"{number}a", f"{number}b"], partition, at_ms)
        house.clock.advance(1)


def test_by_offset_it_is_exact_and_the_run_that_holds_the_start_stays(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    first = sizes(house, topic)[0]
    assert trim_topic(house.context, topic, ToOffsets({0: 3})) == [TrimResult(0, 0, 3, 1, first)]
    assert [run.base for run in house.runs(topic)] == [2, 4]
    assert house.values(topic) == ["1b", "2a", "2b"]
    assert len(house.rows(topic, "slot/")) == 2
    check_clean(house, topic)


def test_it_never_goes_back_and_never_beyond_the_end(house: House) -> None:
    topic = house.topic(partitions=2)
    three_runs(house, topic)
    trim_topic(house.context, topic, ToOffsets({0: 4}))
    assert trim_topic(house.context, topic, ToOffsets({0: 1})) == [TrimResult(0, 4, 4, 0, 0)]
    for wrong in ({0: 7}, {0: -1}, {2: 0}, {1: 0, 0: 99}):
        with pytest.raises(InvalidError):
            trim_topic(house.context, topic, ToOffsets(wrong))
    assert trim_topic(house.context, topic, ToOffsets({0: 6}))[0].new_start == 6
    assert house.runs(topic) == []
    assert house.values(topic) == []
    assert house.append(topic, ["next"]) == 6
    check_clean(house, topic)


def test_by_time_whole_runs_go_and_only_from_the_front(house: House) -> None:
    topic = house.topic(partitions=2)
    three_runs(house, topic)
    house.append(topic, ["late"], at_ms=T0)
    assert trim_topic(house.context, topic, BeforeTime(T0)) == [
        TrimResult(0, 0, 0, 0, 0),
        TrimResult(1, 0, 0, 0, 0),
    ]
    trimmed = trim_topic(house.context, topic, BeforeTime(T0 + 10_001))
    assert [(each.old_start, each.new_start, each.runs) for each in trimmed] == [
        (0, 4, 2),
        (0, 0, 0),
    ]
    assert house.values(topic) == ["2a", "2b", "late"]
    assert trim_topic(house.context, topic, BeforeTime(T0 + 20_001))[0].new_start == 7
    check_clean(house, topic)


def test_a_run_with_one_younger_event_stays(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    assert trim_topic(house.context, topic, BeforeTime(T0 + 10_000))[0].new_start == 2


def test_by_bytes_the_oldest_commits_of_all_partitions_go_first(house: House) -> None:
    topic = house.topic(partitions=3)
    for number in range(4):
        house.append(topic, [f"event {number}"], number % 2)
        house.clock.advance(1)
    size = sizes(house, topic)[0]
    assert sizes(house, topic) + sizes(house, topic, 1) == [size] * 4
    kept = trim_topic(house.context, topic, KeepBytes(4 * size))
    assert [each.new_start for each in kept] == [0, 0, 0]
    assert trim_topic(house.context, topic, KeepBytes(3 * size + 1)) == [
        TrimResult(0, 0, 1, 1, size),
        TrimResult(1, 0, 0, 0, 0),
        TrimResult(2, 0, 0, 0, 0),
    ]
    assert house.values(topic) == ["event 2"]
    assert house.values(topic, 1) == ["event 1", "event 3"]
    trimmed = trim_topic(house.context, topic, KeepBytes(size))
    assert [each.new_start for each in trimmed] == [2, 1, 0]
    assert house.values(topic, 1) == ["event 3"]
    assert [each.new_start for each in trim_topic(house.context, topic, KeepBytes(0))] == [2, 2, 0]
    with pytest.raises(InvalidError):
        trim_topic(house.context, topic, KeepBytes(-1))
    check_clean(house, topic)


def test_by_bytes_a_start_inside_a_run_stays_where_it_is(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    trim_topic(house.context, topic, ToOffsets({0: 3}))
    assert trim_topic(house.context, topic, KeepBytes(1 << 20)) == [TrimResult(0, 3, 3, 0, 0)]
    assert trim_topic(house.context, topic, KeepBytes(sum(sizes(house, topic))))[0].new_start == 3


def test_many_runs_with_times_far_apart_go_with_all_their_slots(house: House) -> None:
    topic = house.topic()
    for number in range(120):
        at_ms = T0 + (number * 7_919 % 120) * 3_600_000
        house.append(topic, ["x"], at_ms=at_ms)
        house.append(topic, ["y", "z"], at_ms=at_ms + 500, apart_ms=number * 1_000)
    assert len(house.rows(topic, "slot/")) > 350
    assert trim_topic(house.context, topic, ToOffsets({0: 358}))[0].runs == 239
    assert len(house.runs(topic)) == 1
    assert len(house.rows(topic, "slot/")) == 2
    check_clean(house, topic)


def test_readers_are_told(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    reader = Reader(house.context, topic, 0)
    slow = Reader(house.context, topic, 0).read(0)
    assert next(slow).base == 0
    trim_topic(house.context, topic, ToOffsets({0: 5}))
    with pytest.raises(NotFoundError, match="the first is 5") as told:
        reader.check_start(4)
    assert told.value.context["start"] == 5
    with pytest.raises(NotFoundError, match="was trimmed"):
        reader.runs(3)
    house.store.delete(house.objects())  # as a sweep does later
    with pytest.raises(NotFoundError, match="was trimmed"):
        next(slow)


def test_a_deleted_topic_is_not_trimmed(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    delete_topic(house.context, "orders")
    for to in (BeforeTime(T0), KeepBytes(0), ToOffsets({0: 1})):
        with pytest.raises(NotFoundError):
            trim_topic(house.context, topic, to)


def test_a_row_that_says_something_else_is_not_deleted(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)
    house.put(topic, layout.run_row(2), house.runs(topic)[0])
    with pytest.raises(CorruptError, match="holds the run of offset 0"):
        trim_topic(house.context, topic, ToOffsets({0: 5}))
    assert len(house.rows(topic, "run/")) == 3


@pytest.mark.parametrize(
    "to", [ToOffsets({0: 31}), BeforeTime(T0 + 1), KeepBytes(0)], ids=["offset", "time", "bytes"]
)
@pytest.mark.parametrize("call", range(1, 14))
def test_it_dies_after_every_call_and_the_next_one_finishes(to: TrimTo, call: int) -> None:
    house = House()
    topic = house.topic()
    for number in range(30):
        house.append(topic, [str(number)], at_ms=T0)
    house.append(topic, ["30", "31", "32"], at_ms=T0)
    faults = Faults(crash_after_call=call)
    died = False
    try:
        trim_topic(house.faulty(faults), topic, to)
    except Crash:
        died = True
    assert died or faults.calls < call
    start = house.head(topic).start
    assert start in (0, 31, 33)
    assert verify_topic(house.context, topic).errors == 0
    assert house.values(topic) == [str(number) for number in range(start, 33)]
    trim_topic(house.context, topic, to)
    assert len(house.rows(topic, "run/")) == len(house.rows(topic, "slot/"))
    check_clean(house, topic)
    assert house.values(topic) == (["31", "32"] if isinstance(to, ToOffsets) else [])


@pytest.mark.parametrize("seed", range(50))
def test_lost_replies_and_doubled_requests_do_not_matter(seed: int) -> None:
    house = House(seed)
    topic = house.topic()
    for number in range(30):
        house.append(topic, [str(number), "and"])
    rates = {Fault.LOSE_REPLY: 0.25, Fault.LOSE_REQUEST: 0.05, Fault.DUPLICATE: 0.1}
    faults = Faults(house.context.random, rates)
    context = house.faulty(faults)
    for _ in range(20):
        try:
            trimmed = trim_topic(context, topic, ToOffsets({0: 41}))
            break
        except (UnavailableError, UnknownOutcomeError):
            house.clock.advance(1)
    assert trimmed[0].new_start == 41
    for late in faults.late:
        late()
    assert house.head(topic).start == 41
    assert house.values(topic)[:2] == ["and", "21"]
    check_clean(house, topic)


def test_an_append_in_between_does_not_stop_it(house: House) -> None:
    topic = house.topic()
    three_runs(house, topic)

    class Busy(MemoryCatalog):
        """Somebody commits before each of the first writes."""

        appends = 3

        def write(self, partition: str, *changes: Change, write_id: str) -> None:
            if self.appends:
                self.appends -= 1
                house.append(topic, ["between"])
            house.catalog.write(partition, *changes, write_id=write_id)

    busy: Catalog = Busy()
    busy.get, busy.scan = house.catalog.get, house.catalog.scan  # type: ignore[method-assign]
    context = Context(house.store, busy, house.clock, house.ids, house.context.random)
    assert trim_topic(context, topic, ToOffsets({0: 4}))[0].new_start == 4
    assert house.values(topic) == ["2a", "2b", "between", "between", "between"]
    check_clean(house, topic)
