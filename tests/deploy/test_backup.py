"""What docs/operating.md says of back-ups: the catalog first, then the store, while all runs."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.archive.archive import create_archive, open_pipeline, sink_settings
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.status import read_status
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.archive.sink import ArchiveSink
from tidelog.home import create_home, open_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Begin, Manifest
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import load_settings
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash


def test_a_copy_made_while_events_come_in_is_whole(tmp_path: Path) -> None:
    place, copy = tmp_path / "home", tmp_path / "copy"
    acknowledged = [b"before %d" % n for n in range(200)]
    stop = threading.Event()

    def produce(home: Home) -> None:
        number = 0
        while not stop.is_set():
            value = b"meanwhile %d" % number
            home.append("orders", [Event(value, b"%d" % number)])
            acknowledged.append(value)
            number += 1

    def more_come() -> list[bytes]:
        """What is acknowledged, once both partitions have several commits more than before."""
        enough = len(acknowledged) + 12
        until(lambda: len(acknowledged) >= enough or not producing.is_alive())
        assert producing.is_alive()
        return list(acknowledged)

    with create_home(load_settings(str(place), {}, tmp_path))[0] as home:
        home.create_topic("orders", 2)
        home.append("orders", [Event(value, value[7:]) for value in acknowledged])
        producing = threading.Thread(target=produce, args=[home])
        producing.start()
        try:
            in_catalog = more_come()
            backup = Backup(place, copy)
            backup.catalog()
            in_store = more_come()
            backup.store()
            more_come()
        finally:
            stop.set()
            producing.join()
    with open_home(copy) as home:
        report = home.verify("orders")  # the store's copy has events that the catalog's does not
        assert report.errors == report.proven_losses > 0, report.findings
        assert set(in_catalog) <= set(_held(home))
        home.append("orders", [Event(b"after")])
        home.recover_topic("orders")
        assert home.verify("orders").errors == 0
        held = Counter(_held(home))
        assert held.keys() >= {*in_store, b"after"}
        assert held.keys() <= {*acknowledged, b"after"}
        assert set(held.values()) == {1}


def _held(home: Home) -> list[bytes]:
    return [event.value for partition in range(2) for event in home.read("orders", partition)]


class Backup:
    """The documented back-up, step by step: the catalog first, then the store."""

    def __init__(self, place: Path, copy: Path) -> None:
        self.place, self.copy = place, copy
        copy.mkdir()

    def catalog(self) -> None:
        with (
            sqlite3.connect(self.place / "catalog.sqlite") as live,
            sqlite3.connect(self.copy / "catalog.sqlite") as saved,
        ):
            live.backup(saved)
        live.close()
        saved.close()

    def store(self) -> None:
        private = shutil.ignore_patterns(".tidelog")  # temporary files vanish while they are copied
        shutil.copytree(self.place / "objects", self.copy / "objects", ignore=private)

    def restore(self, place: Path) -> None:
        if place.exists():
            shutil.rmtree(place)
        shutil.copytree(self.copy, place)


def _archive(home: Home, name: str, **written_as: object) -> Archive:
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source="topic:t",
        kind="partition" if "parser" in written_as else "backup",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(**written_as)},  # type: ignore[arg-type]
    )
    return create_archive(home.context, wanted)


def _append(home: Home, first: int, count: int, word: str = "before") -> None:
    values = [
        b'{"at": 1794744000, "n": "%s %d"}' % (word.encode(), first + n) for n in range(count)
    ]
    home.append("t", [Event(value) for value in values])


def _drive(home: Home, name: str) -> CycleReport:
    all_of_it = CycleReport()

    def note(report: CycleReport) -> None:
        all_of_it.aside.extend(report.aside)

    pipeline = open_pipeline(home.context, home.archives.get(name).info, LocalWorkers(1))
    Driver(home.context, pipeline, DriverOptions(on_cycle=note)).run()
    return all_of_it


def _listed(home: Home, name: str) -> Counter[bytes]:
    folder = f"{home.store.url.removeprefix('file://')}/archives/{name}/g1"
    found = duckdb.sql(f"SELECT value FROM read_parquet('{folder}/**/*.parquet')").fetchall()
    return Counter(bytes(value) for (value,) in found)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranges_committed_during_the_backup_are_set_aside_after_the_restore(
    tmp_path: Path, elsewhere: bool
) -> None:
    place = tmp_path / "home"
    backup = Backup(place, tmp_path / "backup")
    with create_home(load_settings(str(place), {}, tmp_path))[0] as home:
        home.create_topic("t")
        _append(home, 0, 50)
        for name, written_as in (("raw", {}), ("daily", {"parser": "json:at"})):
            _archive(home, name, **written_as)
            _drive(home, name)
        backup.catalog()
        for first in (50, 60):  # two ranges that the catalog's copy does not know
            _append(home, first, 10)
            for name in ("raw", "daily"):
                _drive(home, name)
        finalize(home.context, home.archives.get("daily").info, FinalizeOptions(delay_ms=0))
        backup.store()
        _append(home, 70, 10)
        _drive(home, "raw")
    restored = tmp_path / "other" if elsewhere else place
    backup.restore(restored)
    with open_home(restored) as home:
        _append(home, 0, 15, "after")  # their offsets are those of events that are gone
        for name in ("raw", "daily"):
            aside = sorted(_drive(home, name).aside, key=lambda each: each.start)
            assert [(each.start, each.end, each.events) for each in aside] == [
                ("50", "60", 10),
                ("60", "70", 10),
            ]
            recorded = read_aside(home.context, home.archives.get(name).info.pipeline())
            assert sorted(recorded, key=lambda each: each.start) == aside
            status = read_status(home.context, home.archives.get(name).info)
            assert sorted(status.aside, key=lambda each: each.start) == aside
            for file in (file for each in aside for file in each.files):
                assert f"archives/{name}/_aside/" in file
                assert home.store.head(file).size
            expected = Counter(event.value for event in home.read("t"))
            assert _listed(home, name) == expected
            assert sum(expected.values()) == 65
            found = verify_archive(
                home.context, home.archives.get(name).info, ArchiveVerifyOptions(deep=True)
            )
            assert (found.problem_count, found.events) == (0, 65), found.problems
        _append(home, 15, 5, "after")
        for name in ("raw", "daily"):
            assert _drive(home, name).aside == []
            assert sum(_listed(home, name).values()) == 70
        finalize(home.context, home.archives.get("daily").info, FinalizeOptions(delay_ms=0))
        sweep_archives(home.context, 0)
        report = home.verify("t")  # the store's copy has events that the catalog's does not know
        assert report.errors == report.proven_losses > 0
        assert home.sweep(0).objects_deleted == 0
        home.sweep(0, accept_loss=["t"])
        assert home.verify("t").findings == ()


def test_range_that_was_under_way_at_the_backup_is_not_doubled(tmp_path: Path) -> None:
    place = tmp_path / "home"
    backup = Backup(place, tmp_path / "backup")
    with create_home(load_settings(str(place), {}, tmp_path))[0] as home:
        home.create_topic("t")
        _append(home, 0, 20)
        archive = _archive(home, "raw")
        pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
        real = pipeline.sink.publish

        def publish(manifest: Manifest) -> int:
            backup.catalog()  # between deciding and publishing
            return real(manifest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline.sink, "publish", publish)
            Driver(home.context, pipeline, DriverOptions()).run()
        _append(home, 20, 10)
        _drive(home, "raw")
        backup.store()
    backup.restore(place)
    # The driver of the backup has its partitions: for half a second, as seen by the next one.
    hasty = replace(load_settings(str(place), {}, tmp_path), lease_ttl_ms=500)
    with create_home(hasty)[0] as home:
        _append(home, 0, 7, "after")
        aside = _drive(home, "raw").aside
        assert [(each.start, each.end) for each in aside] in ([("20", "30")], [])
        assert _listed(home, "raw") == Counter(event.value for event in home.read("t"))
        found = verify_archive(
            home.context, home.archives.get("raw").info, ArchiveVerifyOptions(deep=True)
        )
        assert found.problem_count == 0, found.problems


@pytest.mark.parametrize("call", range(1, 40, 2))
def test_setting_aside_that_dies_after_any_call_is_finished_by_the_next(
    tmp_path: Path, call: int
) -> None:
    place = tmp_path / "home"
    backup = Backup(place, tmp_path / "backup")
    with create_home(load_settings(str(place), {}, tmp_path))[0] as home:
        home.create_topic("t")
        _append(home, 0, 5)
        _archive(home, "raw")
        _drive(home, "raw")
        backup.catalog()
        _append(home, 5, 5)
        _drive(home, "raw")
        backup.store()
    backup.restore(place)
    with open_home(place) as home:
        _append(home, 0, 3, "after")
        pipeline = open_pipeline(home.context, home.archives.get("raw").info, LocalWorkers(1))
        faults = Faults(crash_after_call=call)
        context = replace(
            home.context,
            store=FaultyStore(home.store, faults),
            catalog=FaultyCatalog(home.catalog, faults),
        )
        sink = ArchiveSink(sink_settings(home.archives.get("raw").info))
        store = FaultyStore(sink._store(), faults)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sink, "_store", lambda: store)
            cycle = Cycle(context, replace(pipeline, sink=sink), "one")
            with contextlib.suppress(Crash):
                for partition in pipeline.source.partitions():
                    cycle.claim(partition, Begin("0", "earliest"))
                bounds = pipeline.source.bounds(pipeline.source.partitions())
                cycle.run({each: held.end for each, held in bounds.items()}, bounds)
        next_one = Cycle(home.context, pipeline, "other")
        for partition in pipeline.source.partitions():
            next_one.claim(partition, Begin("0", "earliest"))
        for _ in range(3):
            bounds = pipeline.source.bounds(pipeline.source.partitions())
            report = next_one.run({each: held.end for each, held in bounds.items()}, bounds)
            assert report.errors == {}
        assert _listed(home, "raw") == Counter(event.value for event in home.read("t"))
        assert len(read_aside(home.context, home.archives.get("raw").info.pipeline())) == 1
