"""What a pump has committed long ago is forgotten by a sweep, and the pump goes on all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import local_store
from tidelog import Event, Home
from tidelog.catalog.base import Put
from tidelog.coordination.commits import read_commits
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import ConflictError
from tidelog.home import World, create_home
from tidelog.maintenance.pipeline_sweep import forget_history, sweep_archives
from tidelog.model import layout, limits
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.registry import find_pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock

DAY_MS = 24 * 3600 * 1000
HOUR_MS = 3600 * 1000
NAME = "mine"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("from", 2)
        made.create_topic("to", 2)
        yield made


def pump(home: Home, events: int, ranges: int = 1) -> None:
    for _ in range(ranges):
        home.append("from", [Event(b"%d" % n, b"%d" % n) for n in range(events)])
        pipeline = open_pump(home.context, PumpOptions("topic:from", "to", NAME), LocalWorkers())
        assert Driver(home.context, pipeline, DriverOptions()).run() == events


def advance(home: Home, by_ms: int) -> None:
    """Move this machine's time and the store's, of which a sweep takes the earlier."""
    clock = FakeClock(home.context.clock.now_ms() + by_ms)
    home.context = replace(home.context, clock=clock)
    local_store(home)._clock = clock


def commits(home: Home, named: NamedPipeline) -> int:
    partitions = read_partitions(home.context, named.incarnation)
    return sum(1 for p in partitions for _ in read_commits(home.context, named.incarnation, p))


def manifests(home: Home, named: NamedPipeline) -> int:
    return len(list(home.store.list(layout.manifests(named.incarnation))))


def test_old_commits_go_with_their_manifests_and_the_pump_goes_on(home: Home) -> None:
    pump(home, 40, ranges=3)
    named = find_pipeline(home.context, NAME)
    assert (commits(home, named), manifests(home, named)) == (6, 6)
    advance(home, 6 * DAY_MS)
    assert sweep_archives(home.context, HOUR_MS).objects_deleted == 0
    pump(home, 40)
    advance(home, 2 * DAY_MS)
    swept = sweep_archives(home.context, HOUR_MS)
    assert swept.objects_deleted == 6
    assert swept.bytes_deleted
    assert (commits(home, named), manifests(home, named)) == (2, 2)
    heads = [read_progress(home.context, named.incarnation, p) for p in ("from/0", "from/1")]
    assert sum(head.ordinal for head in heads if head) == 160
    pump(home, 40)
    assert sum(1 for p in range(2) for _ in home.read("to", p)) == 200
    advance(home, 8 * DAY_MS)
    sweep_archives(home.context, HOUR_MS)
    assert (commits(home, named), manifests(home, named)) == (0, 0)
    pump(home, 40)
    assert sum(1 for p in range(2) for _ in home.read("to", p)) == 240


def test_more_than_one_write_holds(home: Home) -> None:
    pump(home, 1, ranges=60)
    named = find_pipeline(home.context, NAME)
    assert commits(home, named) == 60
    advance(home, 8 * DAY_MS)
    assert len(forget_history(home.context, named)) == 60
    assert commits(home, named) == 0
    assert manifests(home, named) == 60, "those who died here leave them to a later epoch"
    sweep_archives(home.context, HOUR_MS)
    pump(home, 1)
    advance(home, DAY_MS)
    sweep_archives(home.context, HOUR_MS)
    assert manifests(home, named) == 1


def test_number_of_young_commits_is_bounded(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PIPELINE_COMMITS_MAX", 5)
    counts = []
    for _ in range(4):
        pump(home, 1, ranges=8)
        advance(home, 2 * HOUR_MS)
        sweep_archives(home.context, HOUR_MS)
        counts.append(commits(home, find_pipeline(home.context, NAME)))
    assert max(counts) <= 2 * 5, "5 for each of two source partitions"
    assert manifests(home, find_pipeline(home.context, NAME)) <= 2 * 5
    assert sum(1 for p in range(2) for _ in home.read("to", p)) == 32


def test_repeated_packet_of_a_sweep_deletes_no_later_commit(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range in a gap that the pump goes back for may get the name of a row that was deleted."""
    pump(home, 40)
    named = find_pipeline(home.context, NAME)
    where = layout.pipeline_partition(named.incarnation, "from/0")
    (row,) = home.catalog.scan(where, "commit/", "commit0")
    advance(home, 8 * DAY_MS)
    write, sent = home.catalog.write, []

    def recording(*given: Any, **how: Any) -> None:
        sent.append((given, how))
        write(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(home.catalog, "write", recording)
        forget_history(home.context, named)
    write(where, Put(row.row, row.value), write_id="0" * 32)
    for given, how in sent:
        with suppress(ConflictError):
            write(*given, **how)
    assert home.catalog.get(where, row.row) is not None
