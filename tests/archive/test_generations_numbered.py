"""Generations of archives whose source has no offsets: readers go on after a promote.

Cursors of chains and restores are borders of the archive's commits there, and offsets are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.connectors.kinesis.test_archive import HOUR_MS, an_archive, put, split
from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS
from tests.support.kinesis_server import FakeKinesis, running_kinesis
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, promote, rollback
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.audit import Why
from tidelog.coordination.commits import read_commits
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.erasure.delete_archived import erase_archived
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

AVRO = ArchiveFormat(format="avro")


@pytest.fixture
def fake() -> Iterator[FakeKinesis]:
    with running_kinesis() as service:
        yield service


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        made.create_topic("again", 4)
        yield made


def drive(home: Home, name: str, generation: int | None = None, **how: Any) -> int:
    archive = home.archives.get(name).info
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2), generation)
    return Driver(home.context, pipeline, DriverOptions(**how)).run()


def rows(home: Home, name: str) -> list[tuple[int, int, int]]:
    """Shard, offset and number of every event that the live generation's folder has."""
    archive = home.archives.get(name).info
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
    folder = f"{home.store.url.removeprefix('file://')}/{archive.folder()}"
    found = duckdb.sql(
        f"SELECT partition, \"offset\", value FROM read_parquet('{folder}/**/*.parquet') "
        'ORDER BY partition, "offset"'
    ).fetchall()
    return [(shard, offset, int(value)) for shard, offset, value in found]


def numbers(home: Home, name: str) -> Counter[int]:
    return Counter(number for *_, number in rows(home, name))


def built(home: Home, written_as: ArchiveFormat) -> Archive:
    archive, generation = begin_backfill(home.context, "a", written_as)
    drive(home, "a", generation)
    return archive


def test_chains_and_restores_go_on_after_a_promote_and_a_rollback(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint, shards=2)
    an_archive(home, stream.url())
    an_archive(home, "archive:a", "copy")
    wanted = RestoreOptions("a", "topic:again", partition="key")
    done = 0
    for first in range(0, 300, 100):
        put(stream, range(first, first + 100))
        drive(home, "a")
        if first == 100:  # in the middle of what the new generation will have
            assert drive(home, "copy") == 200
            done += restore(home.context, wanted, LocalWorkers())
    built(home, ArchiveFormat(codec="gzip"))
    put(stream, range(300, 400))
    drive(home, "a")
    promote(home.context, "a")
    assert numbers(home, "a") == Counter(range(400))
    put(stream, range(400, 500))
    assert drive(home, "a") == 100
    assert drive(home, "copy") == 300
    done += restore(home.context, wanted, LocalWorkers())
    rollback(home.context, "a")
    put(stream, range(500, 600))
    assert drive(home, "a") == 100
    assert drive(home, "copy") == 100
    done += restore(home.context, wanted, LocalWorkers())
    assert numbers(home, "a") == numbers(home, "copy") == Counter(range(600))
    assert done == 600


def test_proof_finds_events_that_other_archives_have_under_other_numbers(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    put(stream, range(10))
    an_archive(home, stream.url())
    an_archive(home, "archive:a", "copy")
    an_archive(home, stream.url("&start=newest"), "b")
    drive(home, "b")
    put(stream, range(10, 90))
    for name in ("a", "copy", "b"):
        drive(home, name)
    pump = open_pump(home.context, PumpOptions(stream.url(), "again"), LocalWorkers())
    assert Driver(home.context, pump, DriverOptions()).run() == 90
    proof = home.archives.get("a").erase(key=b"key-3", prove=True)
    of_b, *others = proof.traces
    assert of_b.object.startswith("archives/b/")
    assert "tidelog archive erase b --key KEY --prove" in of_b.do
    assert "offsets 2, 6, 10, 14, 18 and 1 more of partition 0" in others[0].what
    assert {each.do for each in others} == {"run `tidelog delete again --key KEY --prove`"}
    assert home.erase("again", key=b"key-3").is_erased
    assert any("kinesis://" in each for each in proof.out_of_reach)
    home.archives.get("b").erase(key=b"key-3", prove=False)
    for name in ("a", "copy", "b"):
        assert home.archives.get(name).prove_erased(keys=[b"key-3"]).verdict == "erased"
        found = home.archives.get(name).prove_erased(keys=[b"key-4"])
        assert {each.object.split("/")[1] for each in found.traces} > {"a", "copy", "b"}
    fake.ahead_ms += HOUR_MS
    put(stream, range(90, 140))
    drive(home, "a")
    assert numbers(home, "a")[105] == 1
    assert home.archives.get("a").prove_erased(keys=[b"key-3"]).verdict == "erased", "it is later"


def test_events_keep_their_numbers_also_after_an_erasure_and_a_loss(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    an_archive(home, stream.url())
    put(stream, range(50))
    drive(home, "a")
    erased = erase_archived(
        home.context, home.archives.get("a").info, Why("asked", "me"), key=b"key-3"
    )
    assert erased.events == 3
    put(stream, range(50, 60))
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(60, 80))
    drive(home, "a", accept_loss=True)
    before = rows(home, "a")
    archive = built(home, ArchiveFormat(codec="gzip"))
    partition = f"{stream.name}/0"
    old = read_progress(home.context, archive.pipeline(1), partition)
    promote(home.context, "a")
    new = read_progress(home.context, archive.pipeline(2), partition)
    assert old is not None
    assert new is not None
    assert (new.position, new.ordinal, new.gaps) == (old.position, old.ordinal, old.gaps)
    assert rows(home, "a") == before
    put(stream, range(80, 90))
    drive(home, "a")
    assert rows(home, "a") == before + [(0, n - 10, n) for n in range(80, 90)]


def test_every_border_of_the_live_generation_is_one_of_the_new(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    for first in range(0, 60, 20):
        put(stream, range(first, first + 20))
        drive(home, "a")
    split(stream, 0, 2**127)
    put(stream, range(60, 80))
    drive(home, "a")
    built(home, ArchiveFormat(codec="gzip"))
    for shard in range(3):
        old, new = (
            [each.start for each in read_commits(home.context, f"{archive.incarnation}.{n}", name)]
            for n in (1, 2)
            for name in [f"{stream.name}/{shard}"]
        )
        assert set(old) <= set(new)
    promote(home.context, "a")
    assert numbers(home, "a") == Counter(range(80))


def test_a_generation_without_raw_values_is_not_built_again(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    columns = {"schema": "n INT", "keep_value": False}
    an_archive(home, stream.url(), format_settings=columns)
    stream.put([("k", b'{"n": 1}')])
    drive(home, "a")
    with pytest.raises(InvalidError, match="keeps no raw values"):
        built(home, ArchiveFormat(codec="gzip"))
