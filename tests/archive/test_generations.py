"""Generations: built beside the live one, promoted at once, and removed without a trace."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.archive.test_archive import an_archive, fill
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.share import DriverMembers
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

BY_HOUR = ArchiveFormat(parser="json:at", layout={"granularity": "hour"})


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 3)
        yield made


def drive(home: Home, archive: Archive, generation: int | None = None, **how: object) -> int:
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2), generation)
    return Driver(home.context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]


def listed(home: Home, archive: Archive, generation: int) -> Counter[int]:
    folder = f"{home.store.url.removeprefix('file://')}/{archive.folder(generation)}"
    rows = duckdb.sql(f"SELECT value FROM read_parquet('{folder}/**/*.parquet')").fetchall()
    return Counter(json.loads(value)["n"] for (value,) in rows)


def keys(home: Home, prefix: str) -> list[str]:
    return [info.key for info in home.store.list(prefix)]


def test_a_backfill_is_promoted_and_the_live_pipeline_goes_on_from_it(home: Home) -> None:
    fill(home, 900)
    home.append("t", [Event(b"rubbish")], partition=0)
    live = an_archive(home, "daily", parser="json:at")
    drive(home, live)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    assert generation == 2
    assert begin_backfill(home.context, "daily", BY_HOUR) == (built, 2), "the same one goes on"
    drive(home, built, 2)
    fill(home, 100, first=900)
    drive(home, built)
    assert listed(home, built, 1) == Counter(range(1_000))
    assert listed(home, built, 2) == Counter(range(900))
    promoted = promote(home.context, "daily")
    assert promoted.generation == 2
    assert listed(home, promoted, 2) == Counter(range(1_000)), "it was brought up to the live one"
    assert promoted.in_state("kept") == [1]
    assert listed(home, promoted, 1) == Counter(range(1_000))
    promoted = drop_generation(home.context, "daily", 1)
    assert list(promoted.formats) == [2]
    assert keys(home, "archives/daily/g1/") == []
    assert [key for key in keys(home, "dead/") if "/1_" in key] == []
    assert [key for key in keys(home, "dead/") if "/2_" in key] != []
    assert keys(home, f"pipelines/{live.pipeline()}/") == []
    kinds = Counter(file.kind for _, file in committed_files(home.context, promoted))
    assert kinds["dead"] == 1
    fill(home, 50, first=1_000)
    assert drive(home, home.archives.get("daily").info) == 50
    assert listed(home, promoted, 2) == Counter(range(1_050))
    with pytest.raises(NotFoundError, match="no generation 1"):
        promoted.format_of(1)


def test_a_backfill_from_a_backup_goes_on_from_the_source(home: Home) -> None:
    fill(home, 600)
    backup, live = an_archive(home, "raw"), an_archive(home, "daily", parser="json:at")
    drive(home, backup)
    drive(home, live)
    home.trim("t", _before(home, 100), past_readers=True)  # what only the backup holds
    written_as = ArchiveFormat(
        parser="json:at", layout={"granularity": "hour"}, source="archive:raw"
    )
    built, generation = begin_backfill(home.context, "daily", written_as)
    drive(home, built, generation)
    fill(home, 60, first=600)
    promoted = promote(home.context, "daily")
    assert drive(home, promoted) == 60
    assert listed(home, promoted, 2) == Counter(range(660))


def test_driver_of_a_backup_that_was_opened_before_the_promote_decides_nothing(home: Home) -> None:
    fill(home, 600)
    backup, live = an_archive(home, "raw"), an_archive(home, "daily", parser="json:at")
    drive(home, backup)
    drive(home, live)
    written_as = ArchiveFormat(
        parser="json:at", layout={"granularity": "hour"}, source="archive:raw"
    )
    built, generation = begin_backfill(home.context, "daily", written_as)
    drive(home, built, generation)
    promoted = promote(home.context, "daily")
    fill(home, 60, first=600)
    drive(home, promoted)
    with pytest.raises(FencedError, match="generation 2 is live"):  # the backup ends before it
        drive(home, built, generation, accept_loss=True)
    fill(home, 40, first=660)
    assert drive(home, promoted) == 40
    assert listed(home, promoted, 2) == Counter(range(700))


def _before(home: Home, offset: int) -> object:
    from tidelog.log.maintenance.trim import ToOffsets

    return ToOffsets({0: offset, 1: offset, 2: offset})


def test_a_driver_of_the_old_generation_is_fenced(home: Home) -> None:
    fill(home, 300)
    live = an_archive(home, "daily", parser="json:at")
    stop = threading.Event()
    failures: list[Exception] = []

    def follow() -> None:
        try:
            drive(home, live, follow=True, stop=stop, policy=FilePolicy(max_age_ms=50))
        except FencedError as exc:
            failures.append(exc)

    thread = threading.Thread(target=follow)
    thread.start()
    end = time.monotonic() + 60
    while sum(1 for _ in committed_files(home.context, live)) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    drive(home, built, generation)
    promote(home.context, "daily", force=True)
    fill(home, 30, first=300)
    thread.join(60)
    stop.set()
    assert failures, "it must not go on where nobody reads"
    promoted = home.archives.get("daily").info
    assert sum(listed(home, promoted, 1).values()) == 300
    drive(home, promoted)
    assert listed(home, promoted, 2) == Counter(range(330))


def test_a_generation_that_is_being_built_can_be_given_up(home: Home) -> None:
    fill(home, 30)
    live = an_archive(home, "daily", parser="json:at")
    drive(home, live)
    with pytest.raises(InvalidError, match="no generation to promote"):
        promote(home.context, "daily")
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    drive(home, built, generation)
    with pytest.raises(InvalidError, match="other settings"):
        begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp"))
    with pytest.raises(InvalidError, match="is the live one"):
        drop_generation(home.context, "daily", 1)
    drop_generation(home.context, "daily", generation)
    assert keys(home, "archives/daily/g2/") == []
    assert listed(home, live, 1) == Counter(range(30))
    assert begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp"))[1] == 3, (
        "never used again"
    )


@pytest.mark.parametrize(
    "written_as",
    [
        ArchiveFormat(parser="nope:x"),
        ArchiveFormat(),
        ArchiveFormat(parser="json:at", source="archive:nope"),
        ArchiveFormat(parser="json:at", format="parket"),
    ],
)
def test_a_backfill_with_bad_settings_begins_nothing(home: Home, written_as: ArchiveFormat) -> None:
    archive = an_archive(home, "daily", parser="json:at")
    with pytest.raises((InvalidError, NotFoundError)):
        begin_backfill(home.context, "daily", written_as)
    assert home.archives.get("daily").info == archive


def test_a_partition_that_ended_by_a_decision_has_ended_in_the_new_generation(home: Home) -> None:
    fill(home, 30)
    live = an_archive(home, "daily", parser="json:at")
    drive(home, live)
    home.delete_topic("t")
    home.create_topic("t", 3)
    drive(home, live, accept_loss=True)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    drive(home, built, generation)
    promoted = promote(home.context, "daily")
    assert listed(home, promoted, 2) == Counter(range(30))
    assert drive(home, promoted) == 0, "no decision is needed again"
    assert verify_archive(home.context, promoted, ArchiveVerifyOptions(deep=True)).problems == []


def test_a_late_copy_into_a_dropped_generation_is_removed_by_a_sweep(home: Home) -> None:
    fill(home, 30)
    live = an_archive(home, "daily", parser="json:at")
    drive(home, live)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    drive(home, built, generation)
    drop_generation(home.context, "daily", generation)
    late = ["archives/daily/g2/t/dt=2026-11-15/2_0_0.parquet", f"{live.dead}/t/2_0_0.parquet"]
    for key in late:
        home.store.put(key, b"late")
    sweep_archives(home.context, grace_ms=-1)
    assert not {*late} & {*keys(home, "archives/"), *keys(home, "dead/")}


def test_a_sweep_removes_what_nobody_will_finish_and_nothing_else(home: Home) -> None:
    fill(home, 30)
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    before = keys(home, "pipelines/")
    pipeline = archive.pipeline()
    old = f"staging/{pipeline}/t%2F0/0000000000/attempt/0"
    orphan = f"pipelines/{pipeline}/manifests/t%2F0/0000000000/orphan.json"
    DriverMembers(home.context, pipeline).join()
    present = f"staging/{pipeline}/t%2F0/0000000002/attempt/0"
    for key in (old, orphan, present):
        home.store.put(key, b"x")
    assert sweep_archives(home.context, grace_ms=3_600_000).objects_young == 2
    report = sweep_archives(home.context, grace_ms=-1)
    assert report.objects_deleted == 2
    assert keys(home, "staging/") == [present]
    assert keys(home, "pipelines/") == before
    assert listed(home, archive, 1) == Counter(range(30))
