"""A trim or a delete of a topic passes a reader only with `past_readers`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import msgspec
import pytest

import tidelog
from tidelog import Event, Home
from tidelog.catalog.base import Put
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.late_readers import readers_behind
from tidelog.log.maintenance.trim import BeforeTime, KeepBytes, ToOffsets, TrimTo
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import NamedPipeline, Progress, Totals
from tidelog.model.playback import PlaybackPin, PlaybackState, TimeRange
from tidelog.model.topic import encode_row
from tidelog.playback.request import pin_topic
from tidelog.playback.session import start_playback


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 2)
        for number in range(10):
            opened.append("t", [Event(b"%d" % number, timestamp=number * 1_000)], partition=0)
        yield opened


def put(home: Home, where: str, row: str, value: object) -> None:
    home.catalog.write(where, Put(row, encode_row(value)), write_id=home.context.ids.new())


def start(home: Home) -> int:
    return home.partitions("t")[0].start


def reached(home: Home, pipeline: str, position: int, incarnation: str | None = None) -> None:
    now = home.topic("t").incarnation if incarnation is None else incarnation
    progress = Progress(str(position), position, 1, incarnation=now)
    put(home, layout.pipeline_partition(pipeline, "t/0"), "head", progress)


def refusal(home: Home, offset: int) -> str:
    with pytest.raises(InvalidError) as refused:
        home.trim("t", ToOffsets({0: offset}))
    assert start(home) == 0, "nothing was changed"
    return str(refused.value)


@pytest.mark.parametrize("to", [ToOffsets({0: 6}), BeforeTime(6_000), KeepBytes(0)], ids=str)
def test_trim_does_not_pass_a_consumer(home: Home, to: TrimTo) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        consumer.commit()
    with pytest.raises(InvalidError, match=r"consumer `c` at 0:4: let them read on"):
        home.trim("t", to)
    assert start(home) == 0
    home.trim("t", ToOffsets({0: 4}))
    assert start(home) == 4
    home.trim("t", to, past_readers=True)
    assert start(home) > 4


def test_trim_that_moves_nothing_is_not_refused(home: Home) -> None:
    home.trim("t", ToOffsets({0: 8}))
    with home.consumer("t", "c", start="earliest") as consumer:
        consumer.poll(1, timeout_s=0)
    home.trim("t", ToOffsets({0: 5, 1: 0}))
    assert start(home) == 8


def test_trim_does_not_pass_an_archive_or_its_backfill(home: Home) -> None:
    made = {1: ArchiveFormat(), 2: ArchiveFormat()}
    made_of = ("a", "i" * 32, "topic:t", "backup", "memory:", "x", 0, made)
    archive = Archive(*made_of, state="ready", states={2: "building"})
    put(home, layout.REGISTRY, layout.archive_row("a"), archive)
    assert "archive `a` at 0:0" in refusal(home, 3)
    reached(home, archive.pipeline(1), 8)
    assert "archive `a` (generation 2) at 0:0" in refusal(home, 3)
    reached(home, archive.pipeline(2), 8, "an earlier topic of this name")
    assert "archive `a` (generation 2) at 0:0" in refusal(home, 3)
    reached(home, archive.pipeline(2), 5)
    assert "archive `a` (generation 2) at 0:5" in refusal(home, 6)
    home.trim("t", ToOffsets({0: 5}))
    assert start(home) == 5


@pytest.mark.parametrize("ended", ["", "remade"])
@pytest.mark.parametrize("commits", [0, 1])
def test_archive_of_an_earlier_topic_holds_back_only_what_it_may_still_read(
    home: Home, ended: Literal["", "remade"], commits: int
) -> None:
    made_of = ("a", "i" * 32, "topic:t", "backup", "memory:", "x", 0, {1: ArchiveFormat()})
    archive = Archive(*made_of, state="ready")
    put(home, layout.REGISTRY, layout.archive_row("a"), archive)
    totals = Totals(commits=commits)
    head = Progress("8", 8, 1, incarnation="an earlier one", totals=totals, ended=ended)
    put(home, layout.pipeline_partition(archive.pipeline(1), "t/0"), "head", head)
    put(home, layout.pipeline_partition(archive.pipeline(1), "t/1"), "head", head)
    if not ended and not commits:  # it begins again when a person accepts the loss
        assert "archive `a` at 0:0" in refusal(home, 3)
        return
    home.trim("t", ToOffsets({0: 3}))
    assert start(home) == 3
    home.delete_topic("t")


def test_trim_does_not_pass_a_pump(home: Home) -> None:
    for name, source in (("p", "topic:t"), ("q", "topic:other")):
        named = NamedPipeline(name, name * 32, source, "topic:sink", "", 0)
        put(home, layout.REGISTRY, layout.pipeline_row(name), named)
    reached(home, "p" * 32, 2)
    message = refusal(home, 3)
    assert "pump `p` at 0:2" in message
    assert "`q`" not in message


def test_trim_does_not_pass_a_playback_that_has_not_finished(home: Home) -> None:
    topic = home.topic("t")
    pin = pin_topic(home.context, topic, TimeRange(4_000, 8_000))
    wanted = PlaybackPin("t", "file:x", "", ("", "", ""), pin, 0)
    start_playback(home.context, "back", wanted)
    assert "playback `back` at 0:4" in refusal(home, 6)
    home.trim("t", ToOffsets({0: 4}))
    where = layout.playback_partition("back")
    put(home, where, layout.PLAYBACK_STATE, PlaybackState(finished_ms=1))
    home.trim("t", ToOffsets({0: 6}))
    assert start(home) == 6


def test_topic_that_a_reader_has_not_read_is_not_deleted(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        consumer.commit()
        with pytest.raises(InvalidError, match=r"consumer `c` at 0:4: .* with --past-readers"):
            home.delete_topic("t")
        assert len(consumer.poll(10)) == 6, "nothing was changed"
        consumer.commit()
    home.append("t", [Event(b"x")], partition=1)
    with pytest.raises(InvalidError, match="consumer `c` at 1:0"):
        home.delete_topic("t")
    home.delete_topic("t", past_readers=True)
    assert home.topics() == []


def test_refused_delete_leaves_appends_under_way_alone(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert consumer.poll(1)
    producer = home._shared_producer("t")
    with pytest.raises(InvalidError, match="past-readers"):
        home.delete_topic("t")
    producer.append([Event(b"x")])


def test_topic_that_every_reader_has_read_is_deleted(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(100)) == 10
        consumer.commit()
    home.delete_topic("t")
    assert home.topics() == []


def test_delete_that_has_begun_is_finished_whatever_was_read(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(1, timeout_s=0)
    row = home.catalog.get(layout.REGISTRY, layout.topic_row("t"))
    assert row is not None
    deleting = msgspec.structs.replace(home.topic("t"), state="deleting")
    put(home, layout.REGISTRY, layout.topic_row("t"), deleting)
    home.delete_topic("t")
    assert home.topics() == []


def test_error_names_each_reader_once_and_counts_the_rest(home: Home) -> None:
    home.append("t", [Event(b"x")] * 3, partition=1)
    for number in range(8):
        with home.consumer("t", f"c{number}") as consumer:
            consumer.poll(1, timeout_s=0)
    with pytest.raises(InvalidError) as refused:
        home.trim("t", ToOffsets({0: 2, 1: 2}))
    assert str(refused.value).count("consumer `c0`") == 1
    assert "and 3 more" in str(refused.value)
    assert len(refused.value.context["readers"]) == 16
    assert len(readers_behind(home.context, home.topic("t"), {0: 2, 1: 2})) == 16


def behind(home: Home, name: str, count: int) -> None:
    with home.consumer("t", name) as consumer:
        assert len(consumer.poll(count)) == count
        consumer.commit()


def test_trim_passes_exactly_the_readers_that_are_named(home: Home) -> None:
    for name, count in (("one", 2), ("two", 3)):
        behind(home, name, count)
    with pytest.raises(InvalidError) as refused:
        home.trim("t", ToOffsets({0: 6}), past_readers=["one"])
    assert "consumer `two` at 0:3" in str(refused.value)
    assert "`one`" not in str(refused.value)
    assert "--past-reader consumer:two" in str(refused.value)
    assert "tidelog consumer delete t two" in str(refused.value)
    assert refused.value.context["readers"][0]["name"] == "consumer:two"
    assert start(home) == 0
    home.trim("t", ToOffsets({0: 3}), past_readers="consumer:one")
    assert start(home) == 3
    home.trim("t", ToOffsets({0: 6}), past_readers={"consumer:one", "two"})
    assert start(home) == 6
    with pytest.raises(InvalidError, match="consumer `two`"):
        home.delete_topic("t", past_readers=["one"])
    home.delete_topic("t", past_readers=["one", "two"])


def test_name_that_no_reader_or_several_have_is_refused(home: Home) -> None:
    behind(home, "both", 2)
    named = NamedPipeline("both", "p" * 32, "topic:t", "topic:sink", "", 0)
    put(home, layout.REGISTRY, layout.pipeline_row("both"), named)
    for call in (partial(home.trim, "t", ToOffsets({0: 3})), partial(home.delete_topic, "t")):
        with pytest.raises(NotFoundError, match=r"reader `bot` of .*did you mean `both`"):
            call(past_readers=["bot"])
        with pytest.raises(InvalidError, match="give one of consumer:both, pump:both"):
            call(past_readers=["both"])
        with pytest.raises(InvalidError, match=r"pump `both` at 0:0: .*pipeline delete both`"):
            call(past_readers=["consumer:both"])
    home.trim("t", ToOffsets({0: 3}), past_readers=["consumer:both", "pump:both"])
    assert start(home) == 3


def test_no_names_pass_no_reader_and_a_playback_that_has_finished_has_a_name(home: Home) -> None:
    behind(home, "c", 2)
    with pytest.raises(InvalidError, match="consumer `c`"):
        home.trim("t", ToOffsets({0: 3}), past_readers=[])
    pin = pin_topic(home.context, home.topic("t"), TimeRange(4_000, 8_000))
    start_playback(home.context, "back", PlaybackPin("t", "file:x", "", ("", "", ""), pin, 0))
    with pytest.raises(InvalidError, match="consumer `c` at 0:2; playback `back` at 0:4"):
        home.trim("t", ToOffsets({0: 6}))
    with pytest.raises(InvalidError, match="`tidelog playback --forget back`"):
        home.trim("t", ToOffsets({0: 6}), past_readers=["c"])
    where = layout.playback_partition("back")
    put(home, where, layout.PLAYBACK_STATE, PlaybackState(finished_ms=1))
    home.trim("t", ToOffsets({0: 6}), past_readers=["c", "back"])
    assert start(home) == 6
