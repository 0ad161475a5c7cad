"""Topics of a pattern that are deleted: what a driver saw there, and did not read, is reported."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.kafka import Kafka
from tests.sim.archive_many import ManyTopics
from tests.support.archive_look import a_home, an_archive, drive, fill
from tests.support.waiting import until
from tidelog import Home, ToOffsets
from tidelog.archive.archive import open_pipeline
from tidelog.archive.freeze import _with_decisions
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors import by_url as places
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import VanishedError
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import TidelogError
from tidelog.model.archive import Archive, ArchiveFormat, Start
from tidelog.model.pipeline import Gap, Progress
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash


class Pattern(ManyTopics):
    """All topics whose names begin so; a deleted one is simply not listed."""

    def may_vanish(self) -> bool:
        return True


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    def opened(url: str, **how: Any) -> Any:
        kind, _, name = url.partition(":")
        return Pattern(how["open_context"], name) if kind == "many" else open_source(url, **how)

    monkeypatch.setattr(places, "open_source", opened)
    with a_home(tmp_path) as made:
        for name in ("m1", "m2"):
            made.create_topic(name, 1)
            fill(made, range(10), name)
        yield made


def saw(home: Home, archive: Archive) -> None:
    """Let a driver see what there is, and die before it reads that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "run", _die)
        with pytest.raises(Crash):
            drive(home, archive, take_over=True)


def _die(*_: object) -> None:
    raise Crash


def gaps(home: Home, archive: Archive, topic: str = "m2") -> tuple[Gap, ...]:
    head = read_progress(home.context, archive.pipeline(), f"{topic}/0")
    assert head is not None
    return head.gaps


@pytest.fixture
def vanished(home: Home) -> Archive:
    """An archive whose driver saw 20 events more in a topic that is deleted."""
    archive = an_archive(home, source="many:m")
    assert drive(home, archive) == 20
    fill(home, range(10, 30), "m2")
    saw(home, archive)
    home.delete_topic("m2", past_readers=True)
    fill(home, range(10, 15), "m1")
    return archive


def test_events_that_were_seen_and_not_read_are_reported_until_accepted(
    home: Home, vanished: Archive
) -> None:
    for _ in range(2):
        with pytest.raises(VanishedError, match="its last 20 offsets were read, from 10 to 30"):
            drive(home, vanished, take_over=True)
    head = read_progress(home.context, vanished.pipeline(), "m1/0")
    assert head is not None
    assert head.position == "15", "other topics are read"
    assert list(read_failures(home.context, vanished.pipeline())) == ["m2/0"]
    drive(home, vanished, accept_loss=True)
    assert gaps(home, vanished) == (Gap("10", "30", "vanished"),)
    assert drive(home, vanished) == 0
    assert list(read_failures(home.context, vanished.pipeline())) == []
    assert verify_archive(home.context, vanished, ArchiveVerifyOptions(deep=True)).problems == []


def test_promoted_generation_remembers_what_was_seen(home: Home, vanished: Archive) -> None:
    with pytest.raises(VanishedError):
        drive(home, vanished, take_over=True)
    _, number = begin_backfill(home.context, "daily", ArchiveFormat())
    pipeline = open_pipeline(home.context, home.archives.get("daily").info, LocalWorkers(1), number)
    Driver(home.context, pipeline, DriverOptions()).run()
    promoted = promote(home.context, "daily")
    with pytest.raises(VanishedError, match="from 10 to 30"):
        drive(home, promoted)
    drive(home, promoted, accept_loss=True)
    assert gaps(home, promoted) == (Gap("10", "30", "vanished"),)


def test_promote_carries_over_only_the_gap_that_ends_a_partition() -> None:
    ends = Gap("50", "60", "remade")
    before = Progress("50", 46, 1, gaps=(Gap("5", "9", "retention", 4), ends), ended="remade")
    carried = _with_decisions(Progress("50", 50, 1), before)
    assert (carried.gaps, carried.ended, carried.totals.lost) == ((ends,), "remade", 1)


def test_deleted_topic_that_was_read_to_its_end_is_no_loss(home: Home) -> None:
    archive = an_archive(home, source="many:m")
    drive(home, archive)
    fill(home, range(10, 30), "m2")
    saw(home, archive)
    assert drive(home, archive, take_over=True) == 20
    home.delete_topic("m2")
    assert drive(home, archive) == 0
    assert gaps(home, archive) == ()


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_topic_that_vanished_before_the_first_run_is_reported(home: Home, start: Start) -> None:
    """The creation of the archive has seen its events, but not when it begins after them."""
    home.create_topic("m3", 1)
    home.create_topic("m4", 1)
    fill(home, range(10), "m4")
    home.trim("m4", ToOffsets({0: 10}))  # nothing waits in either of these
    archive = an_archive(home, source="many:m", start=start)
    for name in ("m2", "m3", "m4"):
        home.delete_topic(name)
    if start == "latest":
        assert drive(home, archive) == 0
        return
    for _ in range(2):
        with pytest.raises(VanishedError, match="its last 10 offsets were read, from 0 to 10"):
            drive(home, archive)
    assert list(read_failures(home.context, archive.pipeline())) == ["m2/0"]
    drive(home, archive, accept_loss=True)
    assert gaps(home, archive) == (Gap("0", "10", "vanished"),)
    assert drive(home, archive) == 0
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []


def test_topic_that_a_driver_saw_and_did_not_claim_is_reported(home: Home) -> None:
    archive = an_archive(home, source="many:m")
    home.create_topic("m5", 1)
    fill(home, range(10), "m5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "claim", _die)
        with pytest.raises(Crash):
            drive(home, archive)
    home.delete_topic("m5")
    with pytest.raises(VanishedError, match=r"`m5/0`: .* its last 10 offsets were read"):
        drive(home, archive, take_over=True)
    drive(home, archive, accept_loss=True)
    assert gaps(home, archive, "m5") == (Gap("0", "10", "vanished"),)


@pytest.mark.server
def test_deleted_kafka_topic_of_a_pattern_is_reported(home: Home, kafka_server: Kafka) -> None:
    mark = uuid.uuid4().hex
    topics = [f"{mark}-one", f"{mark}-two"]
    producer = kafka_server.producer()
    for topic in topics:
        kafka_server.create_topic(topic, 1)
        for number in range(10):
            producer.produce(topic, b"%d" % number)
    assert producer.flush(60) == 0
    archive = an_archive(home, source=f"kafka://{kafka_server.bootstrap}/^{mark}-")
    assert drive(home, archive) == 20
    for number in range(20):
        producer.produce(topics[1], b"%d" % number)
    assert producer.flush(60) == 0
    saw(home, archive)
    admin = kafka_server.admin()
    admin.delete_topics([topics[1]])[topics[1]].result()
    until(lambda: not kafka_server.partitions(topics[1]))
    errors: list[TidelogError] = []
    for _ in range(10):  # brokers may list it for a moment
        try:
            drive(home, archive, take_over=True)
        except TidelogError as exc:
            errors.append(exc)
        if errors and isinstance(errors[-1], VanishedError):
            break
        time.sleep(0.5)
    assert isinstance(errors[-1], VanishedError)
    drive(home, archive, accept_loss=True)
    assert gaps(home, archive, topics[1]) == (Gap("10", "30", "vanished"),)
