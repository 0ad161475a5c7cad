"""Tables: the archive's files as Delta and Iceberg tables, each event once, whatever dies."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow.dataset import field
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table as IcebergRead

from tests.servers.s3 import S3
from tests.support.archive_look import AT, AT_OR_WHEN, FIRST_S, a_home, an_archive, drive
from tests.support.archive_look import value as mixed_value
from tests.support.iceberg_rest import IcebergRest, serving
from tidelog import Event, Home
from tidelog.archive.archive import committed_files
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.delta import DeltaLog
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.tables import change_tables, check_table, register, register_table
from tidelog.catalog.base import Delete, Put
from tidelog.coordination.pipeline_rows import change_archive
from tidelog.errors import InvalidError, UnavailableError
from tidelog.home import World, create_home
from tidelog.identity import HomeIdentity
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

DAY_S = 86_400

REGISTER = """
import sys
from tidelog.home import open_home
from tidelog.archive.archive import find_archive
from tidelog.archive import tables
tables._FILES_AT_ONCE = 2
with open_home(sys.argv[1]) as home:
    print(tables.register_table(home, find_archive(home, sys.argv[2]), sys.argv[3]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        yield made


@pytest.fixture(scope="module")
def catalog() -> Iterator[IcebergRest]:
    with serving() as server:
        yield server


@pytest.fixture(params=["delta", "iceberg"])
def table(request: pytest.FixtureRequest, catalog: IcebergRest) -> str:
    """The name of a table that no other test has."""
    if request.param == "delta":
        return "delta"
    return f"iceberg:{catalog.url}#lake.t{random.getrandbits(60)}"


def value(number: int) -> bytes:
    return json.dumps({"at": FIRST_S + (number % 3) * DAY_S, "n": number}).encode()


def fill(home: Home, numbers: range) -> None:
    for number in (0, 1):
        mine = [n for n in numbers if n % 2 == number]
        home.append("t", [Event(value(n), timestamp=1_000 * n) for n in mine], partition=number)


def read_delta(archive: Archive, **options: object) -> DeltaTable:
    folder = archive.store.removeprefix("file://")
    return DeltaTable(f"{folder}/{archive.folder()}", **options)  # type: ignore[arg-type]


def read_iceberg(name: str) -> IcebergRead:
    uri, _, table = name.removeprefix("iceberg:").partition("#")
    return load_catalog("reader", uri=uri).load_table(table)


def contents(archive: Archive, name: str) -> pa.Table:
    if name == "delta":
        return read_delta(archive).to_pyarrow_table()
    return read_iceberg(name).scan().to_arrow()


def numbers(rows: pa.Table) -> Counter[int]:
    return Counter(json.loads(each)["n"] for each in rows.column("value").to_pylist())


def test_each_event_is_in_the_table_once_and_the_files_are_the_archives_own(
    home: Home, table: str
) -> None:
    fill(home, range(600))
    archive = an_archive(home, parser="json:at")
    nothing = register_table(home.context, archive, table, count=True)
    assert (nothing.files_added, nothing.files_now) == (0, 0), "and there is no table"
    drive(home, archive)
    before = {info.key: info.etag for info in home.store.list(f"{archive.folder()}/")}
    done = register_table(home.context, archive, table, count=True)
    assert (done.files_added, done.events_added, done.files_now) == (6, 600, 6)
    rows = contents(archive, table)
    assert numbers(rows) == Counter(range(600))
    assert Counter(str(day) for day in rows.column("dt").to_pylist()) == {
        "2026-11-15": 200,
        "2026-11-16": 200,
        "2026-11-17": 200,
    }
    again = register_table(home.context, archive, table)
    assert (again.files_added, again.events_added) == (0, 0)
    fill(home, range(600, 700))
    drive(home, archive)
    assert register_table(home.context, archive, table).events_added == 100
    assert numbers(contents(archive, table)) == Counter(range(700))
    after = {info.key: info.etag for info in home.store.list(f"{archive.folder()}/")}
    assert before.items() <= after.items()
    data = [file for _, file in committed_files(home.context, archive) if file.kind == "data"]
    assert sum(file.events for file in data) == contents(archive, table).num_rows


def test_readers_skip_by_partition_by_offset_and_by_time_without_losing_anything(
    home: Home, catalog: IcebergRest
) -> None:
    fill(home, range(600))
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    name = f"iceberg:{catalog.url}#lake.skips"
    for each in ("delta", name):
        register_table(home.context, archive, each)
    delta, iceberg = read_delta(archive), read_iceberg(name)
    moment = "1970-01-01T00:05:00+00:00"
    for text, filters, expected in [
        ("dt = '2026-11-16'", [("dt", "=", date(2026, 11, 16))], 200),
        ("offset < 100", [("offset", "<", 100)], 200),
        (f"timestamp >= '{moment}'", None, 300),
        (f"timestamp < '{moment}'", None, 300),
    ]:
        assert iceberg.scan(row_filter=text).to_arrow().num_rows == expected, text
        if filters:
            assert delta.to_pyarrow_table(filters=filters).num_rows == expected, text
    assert len(list(iceberg.scan(row_filter="dt = '2026-11-16'").plan_files())) == 2
    assert len(list(iceberg.scan(row_filter="offset >= 300").plan_files())) == 0
    dataset, moment_us = (
        delta.to_pyarrow_dataset(),
        pa.scalar(300_000_000, pa.timestamp("us", "UTC")),
    )
    assert dataset.filter(field("timestamp") >= moment_us).count_rows() == 300
    assert len(list(dataset.get_fragments(field("dt") == date(2026, 11, 16)))) == 2
    assert list(dataset.get_fragments(field("offset") >= 300)) == []


def test_readers_filter_by_columns_without_statistics(home: Home, catalog: IcebergRest) -> None:
    home.append("t", [Event(value(n), id=f"e{n}", key=b"k%d" % n) for n in range(20)], partition=0)
    written_as = {"format_settings": {"schema": "n int", "keep_value": True}}
    archive = an_archive(home, parser="json:at", **written_as)
    drive(home, archive)
    name = f"iceberg:{catalog.url}#lake.filters"
    with pytest.MonkeyPatch.context() as patch:  # a table of before
        patch.setattr(DeltaLog, "_configuration", lambda self: {})
        register_table(home.context, archive, "delta")
    for table in ("delta", name, "delta"):
        register_table(home.context, archive, table)
    delta, iceberg = read_delta(archive), read_iceberg(name)
    for column, wanted in (("id", "e7"), ("n", 7), ("topic", "t"), ("partition", 0)):
        expected = 1 if column in ("id", "n") else 20
        text = repr(wanted)
        assert iceberg.scan(row_filter=f"{column} = {text}").to_arrow().num_rows == expected
        assert delta.to_pyarrow_table(filters=[(column, "=", wanted)]).num_rows == expected, column
    dataset = delta.to_pyarrow_dataset()
    assert dataset.filter(field("key") == b"k7").count_rows() == 1
    assert dataset.filter(field("type").is_null()).count_rows() == 20
    assert list(dataset.get_fragments(field("offset") >= 300)) == []


def test_a_backup_and_folders_of_hours_and_of_odd_names(home: Home, table: str) -> None:
    fill(home, range(60))
    odd = [Event(json.dumps({"at": FIRST_S, "n": 60, "who": 'a/b c%=":ü'}).encode())]
    home.append("t", odd, partition=0)
    made = {
        "raw": {},
        "hourly": {"parser": "json:at", "layout": {"granularity": "hour"}},
        "split": {"parser": "split:n|json:at"},
        "who": {"parser": "split:who|json:at"},
    }
    columns = {"raw": set(), "hourly": {"dt", "hr"}, "split": {"dt"}, "who": {"dt"}}
    for name, written_as in made.items():
        archive = an_archive(home, name, **written_as)
        drive(home, archive)
        own = table if table == "delta" else f"{table}_{name}"
        register_table(home.context, archive, own)
        rows = contents(archive, own)
        expected = Counter([60] if name == "who" else range(61))
        assert numbers(rows) == expected, name
        event = {"topic", "partition", "offset", "timestamp", "id", "key", "value", "type"}
        assert set(rows.column_names) - event - {"headers"} == columns[name], name


def test_typed_columns_are_the_tables_own(home: Home, table: str) -> None:
    whole = {
        "at": FIRST_S,
        "n": 1,
        "small": 7,
        "price": "12.50",
        "since": "2026-11-15T10:00:00.250Z",
        "user": {"name": "ü", "tags": ["a", "b"]},
        "counts": {"x": 1},
        "dt": "mine",
    }
    values = [whole, {"at": FIRST_S, "n": 2}]
    home.append("t", [Event(json.dumps(each).encode()) for each in values], partition=0)
    schema = (
        "n bigint NOT NULL, small smallint, price decimal(10,2), since timestamp, "
        "user struct<name: string, tags: array<string>>, counts map<string, int>, dt string"
    )
    archive = an_archive(home, parser="json:at", format_settings={"schema": schema})
    drive(home, archive)
    register_table(home.context, archive, table)
    names = ["n", "small", "price", "since", "user", "counts", "dt"]
    rows = {each["n"]: each for each in contents(archive, table).select(names).to_pylist()}
    assert rows[1] == {
        "n": 1,
        "small": 7,
        "price": Decimal("12.50"),
        "since": datetime(2026, 11, 15, 10, 0, 0, 250_000, UTC),
        "user": {"name": "ü", "tags": ["a", "b"]},
        "counts": [("x", 1)],
        "dt": "mine",  # what is in the file goes before the folder's name
    }
    assert rows[2] == {**dict.fromkeys(names), "n": 2}


def test_only_parquet_can_be_a_table_and_names_must_say_what(home: Home) -> None:
    fill(home, range(3))
    other = an_archive(home, "other", format="avro")
    with pytest.raises(InvalidError, match="files are avro, and tables are made of parquet"):
        register_table(home.context, other, "delta")
    archive = an_archive(home)
    for wrong in ("", "delta2", "iceberg", "iceberg:", "iceberg:x", "iceberg:x#t", "glue:x"):
        with pytest.raises(InvalidError, match="give delta, iceberg"):
            check_table(archive, wrong)
    with pytest.raises(InvalidError, match="names a user or password"):
        register_table(home.context, archive, "iceberg:postgresql://me:pw@host/db#a.b")
    drive(home, archive)
    with pytest.raises(UnavailableError, match=r"check the catalog `http://127.0.0.1:9`"):
        register_table(home.context, archive, "iceberg:http://127.0.0.1:9#a.b")
    with pytest.raises(InvalidError, match="memory"):
        register_table(home.context, msgspec.structs.replace(archive, store="memory:"), "delta")


def test_a_table_of_somebody_else_is_left_alone(home: Home, catalog: IcebergRest) -> None:
    fill(home, range(10))
    one, two = an_archive(home, "one"), an_archive(home, "two")
    for archive in (one, two):
        drive(home, archive)
    name = f"iceberg:{catalog.url}#lake.shared"
    register_table(home.context, one, name)
    with pytest.raises(InvalidError, match="belongs to another archive"):
        register_table(home.context, two, name)
    theirs = load_catalog("reader", uri=catalog.url).create_table(
        "lake.theirs", pa.schema([("a", pa.int64())]), location=f"file://{home.store.url[7:]}/x"
    )
    theirs.append(pa.table({"a": [1]}))
    with pytest.raises(InvalidError, match="was not made by"):
        register_table(home.context, one, f"iceberg:{catalog.url}#lake.theirs")


def test_a_table_that_is_ahead_of_a_restored_catalog_is_refused(home: Home, table: str) -> None:
    """It has files of a range that the catalog has forgotten, and that will be made again."""
    archive = an_archive(home)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    fill(home, range(10))
    drive(home, archive)
    register_table(home.context, archive, table)
    before = list(home.catalog.scan(where))
    fill(home, range(10, 20))
    drive(home, archive)
    assert register_table(home.context, archive, table).events_added == 10
    for row in list(home.catalog.scan(where)):  # as it was when the copy was made
        home.catalog.write(where, Delete(row.row), write_id=home.context.ids.new())
    for row in before:
        home.catalog.write(where, Put(row.row, row.value), write_id=home.context.ids.new())
    held = contents(archive, table).num_rows
    with pytest.raises(InvalidError, match=r"has come to event 10 of `t/0`, the archive to 5: .*"):
        register_table(home.context, archive, table)
    assert contents(archive, table).num_rows == held
    for row in list(home.catalog.scan(where)):  # of a copy from before the archive began
        home.catalog.write(where, Delete(row.row), write_id=home.context.ids.new())
    with pytest.raises(InvalidError, match="the archive to 0: the catalog was restored from an"):
        register_table(home.context, archive, table)


def test_an_iceberg_table_of_the_home_that_this_was_copied_from_is_refused(
    home: Home, catalog: IcebergRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the archive's own id too: only the home's tells the two apart."""
    fill(home, range(10))
    archive = an_archive(home)
    drive(home, archive)
    name = f"iceberg:{catalog.url}#lake.t{random.getrandbits(60)}"
    register_table(home.context, archive, name)
    original = home.id
    other = replace(home.context, identity=HomeIdentity("another"))
    monkeypatch.setattr(home, "context", other)
    fill(home, range(10, 20))
    drive(home, archive)
    with pytest.raises(InvalidError, match=f"of home `{original}`, of which this home was a copy"):
        register_table(home.context, archive, name)
    assert contents(archive, name).num_rows == 10
    monkeypatch.undo()
    assert register_table(home.context, archive, name).events_added == 10


def test_dead_letters_that_a_replay_has_placed_come_into_the_table(home: Home, table: str) -> None:
    events = [Event(mixed_value(n), timestamp=n) for n in range(100)]
    home.append("t", events, partition=0)
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    first = register_table(home.context, archive, table)
    assert 0 < first.events_added < 100
    done = replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
    assert done.replayed > 0
    assert register_table(home.context, archive, table).events_added == done.replayed
    assert register_table(home.context, archive, table).events_added == 0
    expected = Counter(n for n in range(100) if n % 7)
    assert numbers(contents(archive, table)) == expected


def test_a_new_generation_replaces_the_old_one(home: Home, table: str) -> None:
    fill(home, range(100))
    archive = change_tables(home.context, an_archive(home, parser="json:at"), table, keep=True)
    drive(home, archive)
    register(home.context, archive)
    hourly = ArchiveFormat(parser="json:at", layout={"granularity": "hour"})
    built, generation = begin_backfill(home.context, archive.name, hourly)
    from tidelog.archive.archive import open_pipeline
    from tidelog.pipeline.driver import Driver, DriverOptions

    pipeline = open_pipeline(home.context, built, LocalWorkers(2), generation)
    Driver(home.context, pipeline, DriverOptions()).run()
    promoted = promote(home.context, archive.name)
    assert promoted.tables == (table,)
    (done,) = register(home.context, promoted)
    assert done.events_added == 0, "promoting has brought the table over"
    assert numbers(contents(promoted, table)) == Counter(range(100))
    paths = (
        [file.file.file_path for file in read_iceberg(table).scan().plan_files()]
        if table != "delta"
        else read_delta(promoted).file_uris()
    )
    assert all("/g2/" in path for path in paths)
    if table != "delta":  # which has a folder for each generation
        assert (
            register_table(home.context, archive, table).events_added == 0
        )  # it looks which one is promoted
        assert numbers(contents(promoted, table)) == Counter(range(100))


def test_which_tables_an_archive_keeps(home: Home) -> None:
    fill(home, range(10))
    archive = an_archive(home)
    drive(home, archive)
    assert register(home.context, archive) == []
    kept = change_tables(home.context, archive, "delta", keep=True)
    assert change_tables(home.context, archive, "delta", keep=True).kept == kept.kept == ("delta",)
    (done,) = register(home.context, home.archives.get("daily").info)
    assert done.events_added == 10
    found = change_tables(home.context, archive, "delta", keep=False)
    assert (found.kept, found.tables) == ((), ("delta",))
    assert numbers(contents(archive, "delta")) == Counter(range(10))  # the table stays


def test_a_commit_whose_reply_was_lost_is_not_made_twice(home: Home, catalog: IcebergRest) -> None:
    fill(home, range(100))
    archive = an_archive(home)
    drive(home, archive)
    name = f"iceberg:{catalog.url}#lake.lost"
    register_table(home.context, archive, name)
    fill(home, range(100, 200))
    drive(home, archive)
    catalog.lost_replies = 1
    register_table(home.context, archive, name)
    assert catalog.lost_replies == 0
    assert numbers(contents(archive, name)) == Counter(range(200))


def many_ranges(home: Home, archive: Archive, ranges: int) -> int:
    for step in range(ranges):
        fill(home, range(step * 20, step * 20 + 20))
        drive(home, archive)
    return ranges * 20


def test_many_at_once_add_each_range_once(
    home: Home, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidelog.archive import tables

    monkeypatch.setattr(tables, "_FILES_AT_ONCE", 2)
    archive = an_archive(home, parser="json:at")
    count = many_ranges(home, archive, 6)
    added: list[int] = []

    def work() -> None:
        added.append(register_table(home.context, archive, table).events_added)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 4
    assert numbers(contents(archive, table)) == Counter(range(count))


@pytest.mark.long
def test_registers_that_are_killed_add_each_range_once(home: Home, table: str) -> None:
    archive = an_archive(home, parser="json:at")
    count = many_ranges(home, archive, 8)
    chance = random.Random(20261115)
    command = [sys.executable, "-c", REGISTER, home.config, archive.name, table]
    for _ in range(2):
        running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
        time.sleep(1.6 + chance.random() * 1.5)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
    register_table(home.context, archive, table)
    assert numbers(contents(archive, table)) == Counter(range(count))


@pytest.mark.server
def test_tables_of_an_archive_on_s3(
    s3_server: S3, tmp_path: Path, catalog: IcebergRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    for name, text in keys.items():
        monkeypatch.setenv(name, text)
    bucket = s3_server.fresh_bucket()
    store = f"s3://{bucket}/deep?endpoint={s3_server.endpoint}&region={s3_server.region}"
    settings = Settings(store, str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ=keys))[0] as home:
        home.create_topic("t", 2)
        fill(home, range(200))
        archive = an_archive(home, parser="json:at")
        drive(home, archive)
        iceberg = f"iceberg:{catalog.url}#lake.s3"
        for _ in range(2):
            for name in ("delta", iceberg):
                register_table(home.context, archive, name)
        files = [each for each in home.store.list() if "_iceberg" in each.key]
        ours = [each for each in files if each.key.endswith(".avro")]
        assert ours
        assert not [each for each in ours if "-" in each.etag], "one request each, and no parts"
        place = f"s3://{bucket}/deep/{archive.folder()}"
        options = {
            **keys,
            "AWS_ENDPOINT_URL": s3_server.endpoint,
            "AWS_REGION": s3_server.region,
            "AWS_ALLOW_HTTP": "true",
        }
        delta = DeltaTable(place, storage_options=options).to_pyarrow_table()
        assert numbers(delta) == Counter(range(200))
        properties = {
            "s3.endpoint": s3_server.endpoint,
            "s3.access-key-id": s3_server.access_key,
            "s3.secret-access-key": s3_server.secret_key,
            "s3.region": s3_server.region,
        }
        found = load_catalog("reader", uri=catalog.url, **properties).load_table("lake.s3")
        assert numbers(found.scan().to_arrow()) == Counter(range(200))


def test_a_table_is_not_in_the_way_of_who_lists_the_folder(home: Home, table: str) -> None:
    import duckdb

    fill(home, range(60))
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    folder = f"{home.store.url.removeprefix('file://')}/{archive.folder()}"
    ((count,),) = duckdb.sql(
        f"SELECT count(*) FROM read_parquet('{folder}/**/*.parquet')"
    ).fetchall()
    assert count == 60
    others = [info.key for info in home.store.list(f"{archive.root}/")]
    strange = [key for key in others if not key.endswith(".parquet")]
    assert all(any(part.startswith("_") for part in key.split("/")) for key in strange)
    assert change_archive(home.context, "daily", lambda found: found).name == "daily"


def test_replayed_dead_letters_are_in_a_table_that_is_kept(home: Home, table: str) -> None:
    fill(home, range(40))
    late = [Event(json.dumps({"late": FIRST_S, "n": n}).encode()) for n in range(40, 45)]
    home.append("t", late, partition=0)
    archive = home.archives.create("late", source="topic:t", parser="json:at", granularity="hour")
    archive.run()
    archive.tables.register(table, keep=True)
    archive.replay(parser="json:late", granularity="day")
    assert numbers(contents(archive.info, table)) == Counter(range(45))
