"""Tables in Glue: partitions are added, moved and dropped with the archive's folders."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.servers.moto import KEYS, Moto
from tests.support.archive_look import FIRST_S
from tests.support.cli_run import run_here
from tidelog import Event, Home
from tidelog.api.archives import ArchiveHandle
from tidelog.archive.glue import GlueTable
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.settings import Settings
from tidelog.testing.scheduler import Crash

pytestmark = pytest.mark.server


@pytest.fixture
def glue(moto_server: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("glue", endpoint_url=moto_server.endpoint, region_name=moto_server.region)
    yield client
    client.close()


@pytest.fixture
def database(glue: Any) -> str:
    name = f"lake_{uuid.uuid4().hex[:8]}"
    glue.create_database(DatabaseInput={"Name": name})
    return name


@pytest.fixture
def home(tmp_path: Path, moto_server: Moto, glue: Any) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    environ = {
        "AWS_ENDPOINT_URL_GLUE": moto_server.endpoint,
        "AWS_REGION": moto_server.region,
    }
    with create_home(settings, world=World(environ=environ))[0] as made:
        made.create_topic("t")
        yield made


LATER_MS = (FIRST_S + 30 * 86_400) * 1000


def add(home: Home, days: range) -> None:
    events = [
        Event(json.dumps({"at": FIRST_S + day * 86_400}).encode(), None, f"t-{day}", LATER_MS)
        for day in days
    ]
    home.append("t", events)


def daily(home: Home) -> ArchiveHandle:
    add(home, range(3))
    archive = home.archives.create("daily", source="topic:t", parser="json:at")
    archive.run()
    return archive


def partitions(glue: Any, database: str) -> dict[str, str]:
    found = glue.get_partitions(DatabaseName=database, TableName="daily")["Partitions"]
    return {"/".join(each["Values"]): each["StorageDescriptor"]["Location"] for each in found}


DAYS = [f"2026-11-{15 + day}" for day in range(10)]


def test_partitions_follow_folders_promotes_and_erasures(
    home: Home, glue: Any, database: str
) -> None:
    archive, name = daily(home), f"glue:{database}.daily"
    archive.tables.register(name, keep=True)
    table = glue.get_table(DatabaseName=database, Name="daily")["Table"]
    assert table["PartitionKeys"] == [{"Name": "dt", "Type": "date"}]
    columns = {each["Name"]: each["Type"] for each in table["StorageDescriptor"]["Columns"]}
    assert (columns["offset"], columns["value"]) == ("bigint", "binary")
    assert columns["timestamp"] == "timestamp"
    assert columns["headers"].startswith("array<struct<name:string")
    assert list(partitions(glue, database)) == DAYS[:3]
    for day, location in partitions(glue, database).items():
        assert list(Path(location).glob("*.parquet")), f"{day}: {location} has files"
    add(home, range(2, 5))
    archive.run()  # kept up to date by the driver
    assert list(partitions(glue, database)) == DAYS[:5]
    assert archive.tables.register(name)[0].files_added == 0
    # An erasure that empties a folder drops its partition, and a new event adds it again.
    assert home.erase("t", ids=["t-1"]).is_erased
    assert list(partitions(glue, database)) == [DAYS[0], *DAYS[2:5]]
    add(home, range(1, 2))
    archive.run()
    assert sorted(partitions(glue, database)) == DAYS[:5]
    # A promote moves all partitions, and drops those that the new generation does not have.
    archive.backfill(parser="timestamp", schema="at BIGINT")
    archive.promote()
    moved = partitions(glue, database)
    table = glue.get_table(DatabaseName=database, Name="daily")["Table"]
    (partition,) = glue.get_partitions(DatabaseName=database, TableName="daily")["Partitions"]
    for each in (table, partition):
        assert {"Name": "at", "Type": "bigint"} in each["StorageDescriptor"]["Columns"]
    assert all("/g2/" in location for location in moved.values())
    assert list(moved) == ["2026-12-15"]
    archive.drop(1)
    assert partitions(glue, database) == moved
    assert archive.verify(deep=True).problem_count == 0


@pytest.mark.parametrize("step", ["_put_partitions", "_update"])
@pytest.mark.parametrize("after", [False, True])
def test_register_that_dies_is_finished_by_the_next(
    home: Home,
    glue: Any,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    after: bool,
) -> None:
    archive, name = daily(home), f"glue:{database}.daily"
    real = getattr(GlueTable, step)

    def crash(*arguments: Any, **more: Any) -> None:
        if after:
            real(*arguments, **more)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(GlueTable, step, crash)
        with pytest.raises(Crash):
            archive.tables.register(name)
    archive.tables.register(name)
    assert list(partitions(glue, database)) == DAYS[:3]
    archive.backfill(granularity="day", time_zone="Asia/Tokyo")
    with monkeypatch.context() as patch:
        patch.setattr(GlueTable, step, crash)
        with pytest.raises(Crash):
            archive.promote()
    archive.tables.register(name)
    assert all("/g2/" in each for each in partitions(glue, database).values())


def test_other_tables_and_missing_databases_are_refused(
    home: Home,
    glue: Any,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    archive = daily(home)
    with pytest.raises(InvalidError, match="no database `nowhere`"):
        archive.tables.register("glue:nowhere.daily")
    glue.create_table(DatabaseName=database, TableInput={"Name": "other"})
    with pytest.raises(InvalidError, match="was not made by `tidelog archive register`"):
        archive.tables.register(f"glue:{database}.other")
    odd = {"Name": "odd", "Parameters": {"tidelog.through": "not ours"}}
    glue.create_table(DatabaseName=database, TableInput=odd)
    with pytest.raises(InvalidError, match="was not made by `tidelog archive register`"):
        archive.tables.register(f"glue:{database}.odd")
    with pytest.raises(InvalidError, match=r"or glue:DATABASE\.TABLE"):
        archive.tables.register("glue:daily")
    with pytest.raises(InvalidError, match="no database `nowhere`"):
        archive.tables.keep("glue:nowhere.daily")
    assert archive.tables.list() == [], "no promote, drop or erasure meets a refused table"
    run = run_here(monkeypatch, capsysbinary, tmp_path)
    told = run("--home", home.config, "archive", "register", "daily", "--as", "glue")
    assert "--as glue needs --table" in told.err
    backup = home.archives.create("raw", source="topic:t")
    backup.run()
    backup.tables.register(f"glue:{database}.raw")  # without partitions: the folder of its topic
    found = glue.get_table(DatabaseName=database, Name="raw")["Table"]
    assert found["PartitionKeys"] == []
    assert list(Path(found["StorageDescriptor"]["Location"]).glob("*.parquet"))


def test_folders_that_one_partition_cannot_show_are_refused(
    home: Home, glue: Any, database: str
) -> None:
    def split(user: str) -> Event:
        return Event(json.dumps({"at": FIRST_S, "user": user}).encode(), id=user)

    home.append("t", [split("ada"), split("bo")])
    archive = home.archives.create("daily", source="topic:t", parser="split:user|json:at")
    archive.run()
    name = f"glue:{database}.daily"
    with pytest.raises(InvalidError, match="a partition is one folder"):
        archive.tables.register(name)
    assert not glue.get_tables(DatabaseName=database)["TableList"]
    assert archive.tables.list() == []
    home.erase("t", ids=["bo"])
    archive.tables.register(name)
    assert list(partitions(glue, database)) == DAYS[:1], "without the folder that was emptied"
    home.append("t", [split("cy")])
    archive.run()
    with pytest.raises(InvalidError, match="a partition is one folder"):
        archive.tables.register(name)
    assert "/ada/" in partitions(glue, database)[DAYS[0]]


def test_promote_to_folders_that_no_partition_shows_is_refused_before_it_begins(
    home: Home, glue: Any, database: str
) -> None:
    archive, name = daily(home), f"glue:{database}.daily"
    archive.tables.register(name)
    home.append("t", [Event(json.dumps({"at": FIRST_S, "user": user}).encode()) for user in "ab"])
    archive.run()
    archive.backfill(parser="split:user|json:at", dead_share=1.0)
    with pytest.raises(InvalidError, match=r"a partition is one folder.*--forget"):
        archive.promote()
    assert archive.reload().generation == 1
    assert all("/g1/" in location for location in partitions(glue, database).values())
    add(home, range(3, 4))
    assert archive.run().events == 1, "the live one goes on"
    archive.drop(2)
    archive.backfill(date_format="dt=%Y-%m")
    with pytest.raises(InvalidError, match="column `dt` has dates, and a folder is named"):
        archive.promote()


def test_capital_letters_in_names_of_dates_are_found(home: Home, glue: Any, database: str) -> None:
    add(home, range(2))
    archive = home.archives.create(
        "daily", source="topic:t", parser="json:at", date_format="Day=%Y-%m-%d"
    )
    archive.run()
    archive.tables.register(f"glue:{database}.daily")
    assert list(partitions(glue, database)) == DAYS[:2]


def test_file_that_arrives_while_its_partition_is_dropped_is_shown(
    home: Home, glue: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = daily(home)
    archive.tables.register(f"glue:{database}.daily", keep=True)
    real, arrivals = GlueTable._delete, [1]

    def delete(table: GlueTable, gone: Any) -> None:
        for day in [arrivals.pop()] if gone and arrivals else []:
            add(home, range(day, day + 1))
            archive.run()  # registers the file, and finds its partition
        real(table, gone)

    monkeypatch.setattr(GlueTable, "_delete", delete)
    assert home.delete("t", ["t-1"])
    home.purge("t")
    assert not arrivals
    assert sorted(partitions(glue, database)) == DAYS[:3]


def test_register_that_stalls_during_a_promote_leaves_no_partition_behind(
    home: Home, glue: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, name = daily(home), f"glue:{database}.daily"
    archive.tables.register(name)
    add(home, range(3, 4))
    archive.run()
    put, update = GlueTable._put_partitions, GlueTable._update
    stalls = [1]

    def stalled(table: GlueTable, *given: Any, **more: Any) -> None:
        for _ in [stalls.pop()] if stalls else []:
            archive.backfill(granularity="day")
            archive.promote()
        put(table, *given, **more)

    def by_version(table: GlueTable, known: Any, *given: Any) -> None:  # moto accepts any version
        now = glue.get_table(DatabaseName=database, Name="daily")["Table"]
        if known.get("VersionId", now["VersionId"]) != now["VersionId"]:
            error = {"Error": {"Code": "ConcurrentModificationException", "Message": "stale"}}
            raise ClientError(error, "UpdateTable")  # type: ignore[arg-type]
        update(table, known, *given)

    monkeypatch.setattr(GlueTable, "_put_partitions", stalled)
    monkeypatch.setattr(GlueTable, "_update", by_version)
    home.archives.get("daily").tables.register(name)
    found = partitions(glue, database)
    assert list(found) == DAYS[:4]
    assert all("/g2/" in location for location in found.values())
    # One that dies instead is corrected with the next files.
    location = found[DAYS[3]].replace("/g2/", "/g1/")
    glue.update_partition(
        DatabaseName=database,
        TableName="daily",
        PartitionValueList=[DAYS[3]],
        PartitionInput={"Values": [DAYS[3]], "StorageDescriptor": {"Location": location}},
    )
    add(home, range(4, 5))
    archive.run()
    archive.tables.register(name)
    assert all("/g2/" in location for location in partitions(glue, database).values())


@pytest.mark.parametrize("parser", ["json:at", None])
def test_topic_that_appears_later_does_not_move_the_folders_of_another(
    home: Home, glue: Any, database: str, tmp_path: Path, parser: str | None
) -> None:
    folder = tmp_path / "copied"
    home.create_topic("u")
    add(home, range(2))
    home.append("u", [Event(json.dumps({"at": FIRST_S}).encode())])
    for topic in "tu":
        home.archives.create(f"raw-{topic}", source=f"topic:{topic}").run()

    def copy(topic: str) -> None:
        (file,) = home.archives.get(f"raw-{topic}").files()
        (folder / topic).mkdir(parents=True)
        shutil.copy(tmp_path / "o" / file.path, folder / topic)

    copy("t")
    archive = home.archives.create("daily", source=f"file:{folder}", parser=parser)
    archive.run()
    archive.tables.register(f"glue:{database}.daily")
    before = partitions(glue, database)
    table = glue.get_table(DatabaseName=database, Name="daily")["Table"]
    copy("u")
    archive.run()
    with pytest.raises(InvalidError, match="files of 2 topics"):
        archive.tables.register(f"glue:{database}.daily")
    assert partitions(glue, database) == before
    after = glue.get_table(DatabaseName=database, Name="daily")["Table"]
    assert after["StorageDescriptor"] == table["StorageDescriptor"]
