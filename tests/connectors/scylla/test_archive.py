"""A change log in an archive, by the clock of the present: each change once, and no gaps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from tests.archive.test_archive import an_archive, drive, folder
from tests.archive.test_fill import backfill
from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play, Row
from tidelog import Home
from tidelog.archive.generations import promote
from tidelog.archive.status import read_status
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.scylla.session import close_sessions
from tidelog.connectors.scylla.streams import ChangePosition
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.model.archive import ArchiveFormat
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        yield made
    close_sessions()


@pytest.mark.server
def test_an_archive_of_a_change_log_holds_each_change_once(
    home: Home, cassandra_server: Cassandra
) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 3_600_000)
    play.begin_generation(now_ms - 600_000)
    for number in range(100):
        row = Row("insert", f"r{number % 9}", number, {"state": "new"})
        play.write(now_ms - 1_800_000 + number * 15_000, row)
    archive = an_archive(home, "orders", play.url(lag="2s"))
    assert drive(home, archive) == 100
    play.write(int(time.time() * 1000), Row("row_delete", "r1", 1))
    time.sleep(2.6)
    assert drive(home, archive) == 1
    assert drive(home, archive) == 0
    files = f"{folder(home, archive)}/**/*.parquet"
    found = duckdb.sql(
        f'SELECT topic, "partition", "offset", id, type FROM read_parquet(\'{files}\')'
    ).fetchall()
    assert len({row[3] for row in found}) == len(found) == 101
    assert {row[0] for row in found} == {f"{play.keyspace}.orders"}
    for group in range(4):
        offsets = sorted(row[2] for row in found if row[1] == group)
        assert offsets == list(range(len(offsets)))
    status = read_status(home.context, archive)
    assert sum(each.events for each in status.partitions) == 101
    accounts = verify_archive(home.context, archive, ArchiveVerifyOptions()).accounts
    assert accounts == [each.account for each in status.partitions], "numbered by the archive"
    assert all(each.is_numbered and each.adds_up for each in accounts)
    assert sum(each.archived for each in accounts) == 101
    play.close()


@pytest.mark.server
def test_chain_resumes_after_a_promote(home: Home, cassandra_server: Cassandra) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 3_600_000)
    archive = an_archive(home, "orders", play.url(lag="2s"))
    copy = an_archive(home, "copy", "archive:orders")
    for number in range(40):
        row = Row("insert", f"r{number % 9}", number, {"state": "new"})
        play.write(now_ms - 1_800_000 + number * 15_000, row)
    assert drive(home, archive) == 40
    assert drive(home, copy) == 40
    play.write(int(time.time() * 1000), Row("insert", "r1", 40, {"state": "new"}))
    time.sleep(2.6)
    assert drive(home, archive) == 1
    backfill(home, "orders", ArchiveFormat(codec="gzip"))
    promote(home.context, "orders")
    assert drive(home, copy) == 1
    play.write(int(time.time() * 1000), Row("insert", "r1", 41, {"state": "new"}))
    time.sleep(2.6)
    assert drive(home, home.archives.get("orders").info) == 1
    assert drive(home, copy) == 1
    play.close()


@pytest.mark.server
def test_finalize_goes_no_further_than_the_lag_of_its_source(
    home: Home, cassandra_server: Cassandra
) -> None:
    play = Play(cassandra_server)
    hour_ms = 3_600_000
    this_ms = int(time.time() * 1000) // hour_ms * hour_ms
    play.begin_generation(this_ms - 8 * hour_ms)
    for number in range(40):  # four hours of changes, every six minutes
        row = Row("insert", f"r{number % 9}", number, {"state": "new"})
        play.write(this_ms - 7 * hour_ms + number * 360_000, row)
    archive = home.archives.create(
        "orders", source=play.url(lag="5h"), parser="timestamp", granularity="hour"
    )
    began_ms = this_ms - 7 * hour_ms

    def whole_hours() -> int:  # a lag of hours ends at a minute
        return (int(time.time() * 1000) // 60_000 * 60_000 - 5 * hour_ms - began_ms) // hour_ms

    least = whole_hours()
    assert 10 < archive.run().events < 40
    notices = archive.finalize("0s").notices
    hours = [each for each in notices if "/hr=" in each.folder]  # the day before may be over, too
    assert [each.events for each in hours] == [10] * len(hours), "none of a part of an hour"
    assert least <= len(hours) <= whole_hours()
    watermark_ms = home.archives.get("orders").info.watermark_ms
    assert watermark_ms is not None
    assert watermark_ms <= int(time.time() * 1000) - 5 * hour_ms
    play.close()


@pytest.mark.server
def test_range_of_a_generation_that_was_announced_late_is_verified(
    home: Home, cassandra_server: Cassandra
) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 600_000)
    play.write(now_ms - 500_000, Row("insert", "r1", 0, {"state": "new"}))
    source = play.url(lag="2s", window="1s", groups=1)
    archive = home.archives.create("orders", source=source, max_bytes=1)
    assert archive.run().events == 1
    play.begin_generation(now_ms - 100_000)
    for number in range(1, 1_201):  # more than a range takes, so one ends before it began
        play.write(now_ms - 99_000 + number * 60, Row("insert", "r1", number, {"state": "new"}))
    assert archive.run().events == 1_200
    assert archive.verify(deep=True, source=True).problems == []
    play.close()


@pytest.mark.server
def test_seek_to_the_latest_can_be_undone_and_moved_on_from(
    home: Home, cassandra_server: Cassandra
) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 600_000)
    archive = home.archives.create("orders", source=play.url(lag="2s", groups=1))
    play.write(now_ms - 500_000, Row("insert", "r1", 0, {"state": "new"}))
    assert archive.run().events == 1
    play.write(int(time.time() * 1000), Row("insert", "r1", 1, {"state": "new"}))
    time.sleep(2.6)
    (move,) = archive.seek("latest")
    assert move.position is not None
    assert move.to == ChangePosition.parse(move.to).plain.text, "a place, not a limit"
    further = replace(ChangePosition.parse(move.to), time_ms=now_ms + 1_000_000).text
    assert archive.plan_seek(move.position)[0].to == move.position
    with pytest.raises(InvalidError, match="outside"):
        archive.seek(further)
    archive.seek(move.position)
    assert archive.run().events == 1
    assert archive.verify(deep=True, source=True).problems == []
    play.close()
