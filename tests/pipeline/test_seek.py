"""Seeks of archives, pumps and streams: recorded as gaps, undone, and never an event twice."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest

from tests.servers.kafka import Kafka
from tests.support.cli_run import Run, run_here
from tidelog import Event, Home
from tidelog.api.archives import ArchiveHandle
from tidelog.archive.archive import open_pipeline
from tidelog.catalog.base import Change
from tidelog.coordination.audit import read_actions
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.home import World, create_home
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.seek import _Seek
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Run:
    return run_here(monkeypatch, capsysbinary, tmp_path)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("from", 2)
        yield made


def fill(home: Home, count: int, partition: int = 0) -> None:
    home.append("from", [Event(b"%d" % n) for n in range(count)], partition=partition)


def gaps(archive: ArchiveHandle) -> list[tuple[str, str, str, int]]:
    found = archive.status().partitions
    accounts = [each.account for each in found if each.account is not None]
    assert all(each.adds_up for each in accounts)
    return [(g.start, g.end, g.reason, g.offsets) for each in accounts for g in each.gaps]


def archived(archive: ArchiveHandle) -> list[bytes | None]:
    return [value for batch in archive.read() for value in batch.column("value").to_pylist()]


def check(archive: ArchiveHandle) -> None:
    assert archive.verify(deep=True, source=True).problem_count == 0


def test_what_an_archive_skips_is_a_gap_of_its_account(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    fill(home, 20)
    (plan,) = archive.plan_seek(25, "0")
    assert (plan.partition, plan.position, plan.to, plan.skipped) == ("from/0", "10", "25", 15)
    assert archive.seek(25, "from/0", why="a load test") == [plan]
    assert archive.run().events == 5
    assert gaps(archive) == [("10", "25", "seek", 15)]
    assert len(archived(archive)) == 15
    check(archive)
    last = list(read_actions(home.context))[-1]
    assert (last.op, last.what) == ("archive seek", "raw: from/0")
    assert last.note == "from 10 to 25: a load test"


def test_moving_back_undoes_a_skip_and_never_archives_twice(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    fill(home, 20)
    archive.seek(20, "0")
    archive.seek("latest", "0")  # two skips, one gap
    assert gaps(archive) == [("10", "30", "seek", 20)]
    archive.seek(15, "0")  # over the second one, into the first
    assert gaps(archive) == [("10", "15", "seek", 5)]
    check(archive)
    with pytest.raises(InvalidError, match="holds each event once"):
        archive.seek(9, "0")
    archive.seek(10, "0")
    assert gaps(archive) == []
    assert archive.run().events == 20
    with pytest.raises(InvalidError, match="from 0 on it has 30 offsets already"):
        archive.seek("earliest")
    assert len(archived(archive)) == 30
    check(archive)


def test_generation_that_is_live_again_can_be_moved(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    archive.backfill(format="avro")
    archive.promote()
    archive.rollback()
    fill(home, 5)
    archive.seek("latest", "0")  # its heads are frozen until a driver claims them
    assert gaps(archive) == [("10", "15", "seek", 5)]
    assert archive.run().events == 0


def test_partition_that_was_not_begun_begins_where_the_seek_says(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    assert archive.plan_seek(7, "0")[0].position is None
    archive.seek(7, "0")
    assert archive.run().events == 3
    (account, _) = (each.account for each in archive.status().partitions)
    assert account is not None
    assert account.begin is not None
    assert (account.begin.position, account.begin.reason) == ("7", "explicit")
    check(archive)


def test_seek_before_the_first_run_can_be_undone(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.seek("latest", "0")
    fill(home, 5)
    archive.seek("latest", "0")
    assert gaps(archive) == [("10", "15", "seek", 5)]
    (plan,) = archive.plan_seek("earliest", "0")
    assert (plan.again, plan.skipped) == (0, 0)
    assert archive.seek("earliest", "0") == [plan]
    (account, _) = (each.account for each in archive.status().partitions)
    assert account is not None
    assert account.begin is not None
    assert (account.begin.position, account.begin.reason) == ("0", "explicit")
    assert gaps(archive) == []
    assert archive.run().events == 15
    check(archive)


def test_what_comes_before_the_begin_was_not_read(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("new", source="topic:from", start="latest")
    fill(home, 4)
    archive.run()
    remedy = "tidelog archive backfill new --start earliest"
    with pytest.raises(InvalidError, match=f"begins at 10, has 4 offsets .*{remedy}"):
        archive.seek("earliest", "0")
    with pytest.raises(InvalidError, match="from 12 on it has 2 offsets already"):
        archive.seek(12, "0")
    archive.backfill(start="earliest")
    archive.promote()
    assert len(archived(archive)) == 14
    check(archive)


def test_archive_does_not_begin_earlier_than_its_readers(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("new", source="topic:from", start="latest")
    chain = home.archives.create("chain", source="archive:new")
    fill(home, 4)
    archive.seek("latest", "0")
    archive.run()
    chain.run()
    with pytest.raises(InvalidError, match=r"`chain` has read it .* new --start earliest"):
        archive.seek("earliest", "0")
    archive.backfill(start="earliest")
    archive.promote()
    chain.backfill(start="earliest")
    chain.promote()
    assert len(archived(archive)) == len(archived(chain)) == 14
    check(chain)


def test_pump_needs_no_consent_for_what_it_never_read(home: Home) -> None:
    home.create_topic("to")
    fill(home, 10)
    pump = home.pumps.create("copy", source="topic:from", topic="to")
    assert pump.run(start="latest").events == 0
    assert [move.again for move in pump.seek(5, "0")] == [0]
    assert pump.run().events == 5
    with pytest.raises(InvalidError, match="would bring 5 events from 5 on a second time"):
        pump.seek("earliest", "0")
    pump.seek("earliest", "0", again=True)
    assert pump.run().events == 10


def test_seek_settles_the_range_in_progress(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")

    def dies(step: str) -> None:
        def crash(*_: object) -> None:
            raise Crash(step)

        with monkeypatch.context() as patch:
            patch.setattr(Cycle, step, crash)
            with pytest.raises(Crash):
                archive.run(take_over=True)

    dies("_record")  # an intent without a manifest: withdrawn
    archive.seek(4, "0")
    assert gaps(archive) == [("0", "4", "seek", 4)]
    dies("_publish")  # an intent with a manifest: committed first
    with pytest.raises(InvalidError, match="holds each event once"):
        archive.seek(5, "0")
    archive.seek("latest", "0")
    assert len(archived(archive)) == 6
    assert gaps(archive) == [("0", "4", "seek", 4)]
    check(archive)


def test_crash_between_the_steps_leaves_all_or_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    fill(home, 5)
    catalog = type(home.catalog)
    write: Callable[..., object] = catalog.write

    def crash(self: object, after: bool, where: str, *changes: Change, write_id: str) -> None:
        is_commit = any(each.row.startswith("commit/") for each in changes)
        if not is_commit or after:
            write(self, where, *changes, write_id=write_id)
        if is_commit:
            raise Crash("seek")

    for after in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "write", partialmethod(crash, after))
            with pytest.raises(Crash):
                archive.seek(12, "0")
        assert gaps(archive) == ([("10", "12", "seek", 2)] if after else [])
    assert archive.run().events == 3
    check(archive)


def test_driver_that_runs_cannot_commit_after_a_seek(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    pipeline = open_pipeline(home.context, archive.info, LocalWorkers())

    class Moved(LocalWorkers):
        def run(self, tasks):  # type: ignore[no-untyped-def]
            archive.seek(6, "0")
            return super().run(tasks)

    with pytest.raises(TidelogError):
        Driver(home.context, replace(pipeline, workers=Moved()), DriverOptions()).run()
    archive.run(take_over=True)
    assert gaps(archive) == [("0", "6", "seek", 6)]
    assert archived(archive) == [b"6", b"7", b"8", b"9"]
    check(archive)


def chain(home: Home) -> tuple[ArchiveHandle, ArchiveHandle]:
    """Returns an archive that skipped offsets 10 to 20, and one that reads it, at 20 too."""
    fill(home, 10)
    first = home.archives.create("raw", source="topic:from")
    second = home.archives.create("copy", source="archive:raw")
    first.run()
    second.run()
    fill(home, 10)
    first.seek("latest", "0")
    second.run()
    assert gaps(second) == [("10", "20", "upstream", 10)]
    return first, second


@pytest.mark.parametrize("is_built", [False, True])
def test_archive_does_not_move_back_below_what_another_has_read(home: Home, is_built: bool) -> None:
    first, second = chain(home)
    if is_built:  # from another source; it reads on from the first archive
        second.seek(10, "from/0")
        second.backfill(source="topic:from", format="avro")
        second.promote()
        second.run()
        assert gaps(second) == [("10", "20", "upstream", 10)]
    with pytest.raises(InvalidError, match="archive `copy` has read it up to 20, and would miss"):
        first.seek(10, "0")
    assert gaps(first) == [("10", "20", "seek", 10)]
    second.seek(10, "from/0")  # as the error says: an empty range of a chain can be undone
    assert gaps(second) == []
    first.seek(10, "0")
    assert (first.run().events, second.run().events) == (10, 10)
    assert archived(first) == archived(second) == [b"%d" % n for n in range(10)] * 2
    check(first)
    check(second)
    assert gaps(second) == []


def test_chain_does_not_move_back_into_a_range_with_events(home: Home) -> None:
    fill(home, 10)
    first = home.archives.create("raw", source="topic:from")
    first.run()
    fill(home, 10)
    first.seek("latest", "0")
    second = home.archives.create("copy", source="archive:raw")
    second.run()  # one range: ten events and the gap
    for to in (10, 15):
        with pytest.raises(InvalidError, match="holds each event once"):
            second.seek(to, "0")
    check(second)
    first.backfill()  # as the error of the first one says
    first.promote()
    assert len(archived(first)) == 20
    assert second.run().events == 0
    check(second)


def test_archive_does_not_move_back_below_pumps_and_restores(home: Home) -> None:
    first, second = chain(home)
    second.delete()  # ended: its files stay
    home.create_topic("to", 2)
    pump = home.pumps.create("pump", source="archive:raw", topic="to")
    pump.run()
    with pytest.raises(InvalidError, match="tidelog pipeline seek pump 10 --partition from/0"):
        first.seek(10, "0")
    pump.seek(10, "0", again=True)
    assert pump.status().partitions[0].totals.skipped == 0
    home.create_topic("restored", 2)
    first.restore("topic:restored")
    with pytest.raises(InvalidError, match=r"forget that restore with .* restore\.raw\."):
        first.seek(10, "0")
    names = [each.name for each in list_pipelines(home.context)]
    home.pumps.get(next(name for name in names if name != "pump")).delete()
    first.seek(10, "0")
    assert (first.run().events, pump.run().events) == (10, 10)
    assert [event.value for event in home.read("to")] == [b"%d" % n for n in range(10)] * 2


def test_reader_that_overtakes_a_move_back_undoes_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain(home)
    second.seek(10, "0")
    move = _Seek._move

    def late(self: _Seek, *args: object) -> None:
        if not gaps(second):
            second.run()  # after the first check
        move(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(_Seek, "_move", late)
        with pytest.raises(InvalidError, match="archive `copy` has read it up to 20"):
            first.seek(12, "0")
    assert sum(offsets for *_, offsets in gaps(first)) == 10
    check(first)
    assert second.run().events == 0
    check(second)


def test_pump_and_stream_read_again_only_if_told(home: Home) -> None:
    home.create_topic("to")
    fill(home, 10)
    pump = home.pumps.create("copy", source="topic:from", topic="to")
    pump.run()
    with pytest.raises(InvalidError, match="would bring 4 events from 6 on a second time"):
        pump.seek(6, "0")
    assert [move.again for move in pump.seek(6, "0", again=True)] == [4]
    assert pump.run().events == 4
    assert [event.value for event in home.read("to")][-4:] == [b"6", b"7", b"8", b"9"]
    fill(home, 5)
    pump.seek("latest")
    assert pump.run().events == 0
    stream = home.stream("topic:from")
    how = {"name": "printer", "batch": True, "until_caught_up": True}
    assert stream.run(len, **how) == 15  # type: ignore[arg-type]
    home.pumps.get("printer").seek("earliest", again=True)
    assert stream.run(len, **how) == 15  # type: ignore[arg-type]


def test_positions_that_do_not_exist_are_refused(home: Home, tmp_path: Path) -> None:
    fill(home, 3)
    archive = home.archives.create("raw", source="topic:from")
    with pytest.raises(InvalidError, match=r"4 is outside of \[0, 3\]"):
        archive.seek(4, "0")
    with pytest.raises(InvalidError, match="give earliest, latest, or an offset"):
        archive.seek("yesterday", "0")
    with pytest.raises(NotFoundError, match="has no partition `7`"):
        archive.seek("latest", "7")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.txt").write_text("one\n")
    files = home.archives.create("files", source=f"file:{tmp_path / 'lines'}")
    with pytest.raises(InvalidError, match="no positions that can be chosen"):
        files.seek("latest")


def test_partition_that_was_made_again_has_other_positions(home: Home) -> None:
    fill(home, 10)
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    home.delete_topic("from", past_readers=True)
    home.create_topic("from", 2)
    fill(home, 30)
    for call in (archive.plan_seek, archive.seek):
        with pytest.raises(InvalidError, match="was deleted and made again since it was read"):
            call(20, "0")
    assert gaps(archive) == []


def test_commands_show_what_they_would_skip_and_need_a_yes(home: Home, run: Run) -> None:
    fill(home, 10)
    home.create_topic("to")
    archive = home.archives.create("raw", source="topic:from")
    archive.run()
    home.pumps.create("copy", source="topic:from", topic="to").run()
    fill(home, 5)
    at = ("--home", home.config)
    refused = run(*at, "archive", "seek", "raw", "12", "--partition", "0")
    assert refused.code == 2
    assert "moving needs --yes without a terminal" in refused.err
    assert b"from/0" in refused.out
    assert gaps(archive) == []
    done = run(*at, "archive", "seek", "raw", "12", "--partition", "0", "--yes", "--json")
    assert done.rows()[0]["skipped"] == 2
    assert run(*at, "archive", "status", "raw").out.count(b": seek") == 1
    back = run(*at, "pipeline", "seek", "copy", "earliest", "--yes")
    assert back.code == 2
    assert "say so with --again" in back.err
    assert run(*at, "pipeline", "seek", "copy", "earliest", "--again", "--yes").code == 0
    assert home.pumps.get("copy").run().events == 15


@pytest.mark.server
def test_kafka_archive_skips_and_goes_back(home: Home, kafka_server: Kafka) -> None:
    name = f"sought-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, 1)
    producer = kafka_server.producer()
    for n in range(100):
        producer.produce(name, b"%d" % n)
    producer.flush()
    archive = home.archives.create("raw", source=f"kafka://{kafka_server.bootstrap}/{name}")
    archive.seek(40)
    archive.run()
    for n in range(100, 120):
        producer.produce(name, b"%d" % n)
    producer.flush()
    archive.seek(110)
    archive.seek(105)
    assert archive.run().events == 15
    assert gaps(archive) == [("100", "105", "seek", 5)]
    check(archive)


def test_partition_that_was_made_again_says_what_helps(home: Home) -> None:
    fill(home, 3)
    read = home.archives.create("read", source="topic:from")
    read.run()
    begun = home.archives.create("begun", source="topic:from")
    begun.seek(2, "0")
    home.delete_topic("from", past_readers=True)
    home.create_topic("from", 2)
    fill(home, 5)
    with pytest.raises(InvalidError, match="run this one with --accept-loss to record that it end"):
        read.seek("latest", "0")
    read.run(accept_loss=True)
    with pytest.raises(InvalidError, match=r"`from/0` has ended, .*: create a new archive or pump"):
        read.seek("latest", "0")
    with pytest.raises(InvalidError, match="run it once with --accept-loss, then seek"):
        begun.seek(4, "0")
    begun.run(accept_loss=True)
    assert begun.seek("latest", "0")[0].position == "5"
    assert len(archived(begun)) == 5
    check(begun)
