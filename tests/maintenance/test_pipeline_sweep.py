"""A sweep removes what an archive that fails has staged, and nothing that a driver may need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.archive.test_fill import drive, home
from tests.support.archive_look import an_archive
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.delete import end_archive
from tidelog.archive.generations import begin_backfill, promote
from tidelog.connectors.archive.sink import ArchiveSink
from tidelog.connectors.source import SourcePartition
from tidelog.connectors.topic.sink import TopicSink
from tidelog.connectors.topic.source import TopicSource
from tidelog.coordination.audit import Why
from tidelog.coordination.pipeline_rows import read_intent, read_progress
from tidelog.erasure.delete import delete_events
from tidelog.errors import InvalidError, UnavailableError
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.share import DriverShare
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome, run_task

__all__ = ["home"]


class Refusing:
    """Stages the files of each range, and then refuses it, as a transform that moves rows is."""

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        for task in tasks:
            done = run_task(task)
            yield TaskOutcome(done.partition, error=InvalidError("transform: moves rows"))


def staged(home: Home) -> list[str]:
    return [info.key for info in home.store.list("staging/")]


def failing(home: Home) -> Archive:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(6)])
    archive = an_archive(home)
    with pytest.raises(InvalidError, match="moves rows"):
        drive(home, archive, workers=Refusing())
    assert staged(home)
    return archive


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_failing_archive_has_staged_is_swept_and_the_proof_is_clean(
    home: Home, ends: bool
) -> None:
    archive = failing(home)
    delete_events(home.context, home.amender("t", Why("asked", "me")), ["e3"])
    topic = home.topic("t")
    (trace,) = [
        each
        for each in home.prove_erased(topic.name, ids=["e3"]).traces
        if "staging/" in each.object
    ]
    assert "tidelog sweep" in trace.do
    sweep_archives(home.context, grace_ms=0)  # as it says
    assert staged(home) == []
    purge(home.context, topic, grace_ms=0, wait_ms=0)
    left, failure = home.prove_erased(topic.name, ids=["e3"]).traces
    assert "is under way" in left.what
    assert "may quote one of them" in failure.what  # the error names no event
    assert "`tidelog archive delete daily` ends the archive" in left.do
    if ends:
        end_archive(home.context, "daily")
    else:
        assert drive(home, archive) == 5
    assert home.prove_erased(topic.name, ids=["e3"]).traces == []


def test_what_a_driver_has_staged_stays_while_it_works(home: Home) -> None:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(6)])
    seen: list[list[str]] = []

    class Sweeping:
        def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
            for task in tasks:
                done = run_task(task)
                sweep_archives(home.context, grace_ms=-1)
                seen.append(staged(home))
                yield done

    assert drive(home, an_archive(home), workers=Sweeping()) == 6
    assert [bool(each) for each in seen] == [True]


def test_what_a_killed_driver_has_staged_stays_until_the_archive_has_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriverShare, "leave", lambda self, cycle: None)
    archive = failing(home)
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home), "it may only be slow"
    monkeypatch.undo()
    pipeline = open_pipeline(home.context, archive, LocalWorkers())
    Driver(home.context, pipeline, DriverOptions(take_over=True)).run()
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home) == []


def test_what_is_staged_of_a_kept_generation_goes_whatever_epochs_its_heads_have(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last driver was killed after it had begun one of two source partitions."""
    home.create_topic("two", 2)
    for number in range(2):
        home.append("two", [Event(b"x")], partition=number)
    archive = an_archive(home, source="topic:two")
    drive(home, archive)
    home.append("two", [Event(b"y")], partition=1)
    with monkeypatch.context() as patch:
        patch.setattr(DriverShare, "leave", lambda self, cycle: None)
        patch.setattr(TopicSource, "partitions", lambda _: [SourcePartition("two", "1")])
        with pytest.raises(InvalidError, match="moves rows"):
            drive(home, archive, workers=Refusing())
    first, second = (read_progress(home.context, archive.pipeline(), f"two/{n}") for n in (0, 1))
    assert first is not None
    assert second is not None
    assert first.epoch < second.epoch
    begin_backfill(home.context, "daily", archive.format_of())
    drive(home, home.archives.get("daily").info, 2)
    promote(home.context, "daily")
    assert staged(home)
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home) == []


def test_what_is_staged_goes_though_a_source_partition_was_never_seen_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head keeps the epoch of the last driver that had it."""
    home.create_topic("two", 2)
    archive = an_archive(home, source="topic:two")
    for number in range(2):
        home.append("two", [Event(b"x")], partition=number)
    drive(home, archive)
    monkeypatch.setattr(TopicSource, "partitions", lambda _: [SourcePartition("two", "1")])
    home.append("two", [Event(b"y")], partition=1)
    with monkeypatch.context() as patch:
        patch.setattr(DriverShare, "leave", lambda self, cycle: None)
        with pytest.raises(InvalidError, match="moves rows"):
            drive(home, archive, workers=Refusing())
    assert drive(home, archive, take_over=True) == 1
    assert staged(home)
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home) == []


def test_what_a_driver_left_that_was_killed_after_its_commit_goes_at_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(b"x")])
    archive = an_archive(home)
    with monkeypatch.context() as patch:
        patch.setattr(DriverShare, "leave", lambda self, cycle: None)
        patch.setattr(ArchiveSink, "discard", lambda *_: None)
        assert drive(home, archive) == 1
    assert staged(home)
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home) == []


def test_what_a_topic_sink_stages_again_stays_with_what_it_was_made_of(home: Home) -> None:
    """A driver of a later epoch makes it beside the decided file, under the earlier epoch."""
    home.append("t", [Event(b"x", id="e1"), Event(b"y", id="e2")])
    home.create_topic("copy", 1)
    pump = open_pump(home.context, PumpOptions("topic:t", "copy"), LocalWorkers())

    def stop(*_: object) -> int:
        raise UnavailableError("store: away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopicSink, "publish", stop)
        with pytest.raises(UnavailableError):
            Driver(home.context, pump, DriverOptions()).run()
    (decided,) = staged(home)
    home.store.put(f"{decided}.mark", home.store.get(decided))
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home) == [decided, f"{decided}.mark"]


def test_staged_files_of_a_decided_range_stay_for_the_next_driver(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(6)])
    archive = an_archive(home)

    def fail(*_: object) -> int:
        raise UnavailableError("store: away")

    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "_publish", fail)
        with pytest.raises(UnavailableError):
            drive(home, archive)
    intent = read_intent(home.context, archive.pipeline(), "t/0")
    assert intent is not None
    assert intent.manifest
    sweep_archives(home.context, grace_ms=-1)
    assert staged(home)
    assert drive(home, home.archives.get("daily").info) == 6
    head = read_progress(home.context, archive.pipeline(), "t/0")
    assert head is not None
    assert head.position == "6"
