"""Iceberg's metadata: what only settings fill is not searched, and what an event may fill is."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyiceberg.table.update.snapshot import ExpireSnapshots

from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home
from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.archive.erased_events import Deletions
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.tables import register_table
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.metadata_objects import event_values
from tidelog.maintenance.erase import purge
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash

WORDS = [
    "main",
    "append",
    "overwrite",
    "branch",
    "PARQUET",
    "lake",
    "daily",
    "metadata",
    "timestamp",
]
WORDS += ["1", "2", "9", "2026-11-15", "dt"]
FOLDER = "archives/a/_iceberg/lake.a/metadata"
ROOT = "s3://bucket/prefix/archives/a/g1/t"


def test_ids_and_keys_that_are_words_of_iceberg_metadata_are_proved_erased(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        value = b'{"at": %d}' % FIRST_S
        for each in (*WORDS, "stays"):
            home.append(
                "t", [Event(value, id=each, key=b"stays" if each == "stays" else each.encode())]
            )
        archive = an_archive(home, parser="json:at")
        drive(home, archive)
        register_table(home.context, archive, f"iceberg:sqlite:///{tmp_path}/lake.db#lake.daily")
        home.delete("t", WORDS)
        for each in WORDS:
            home.delete_key("t", each.encode())
        purge(home.context, home.topic("t"), 0)
        purge(home.context, home.topic("t"), 0)
        for each in WORDS:
            traces = home.prove_erased("t", ids=[each], keys=[each.encode()]).traces
            assert traces == [], each


def avro(record: dict[str, Any]) -> bytes:
    """A file of one record, with fields as they come."""
    schema = {"type": "record", "name": "r", "fields": _fields(record, "r")}
    out = io.BytesIO()
    fastavro.writer(out, schema, [record])
    return out.getvalue()


def _fields(record: dict[str, Any], path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": _type(value, f"{path}_{name}")} for name, value in record.items()
    ]


def _type(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {"type": "record", "name": path, "fields": _fields(value, path)}
    if isinstance(value, list):
        return {"type": "array", "items": _type(value[0], path)}
    return {str: "string", bytes: "bytes", int: "long"}[type(value)]


def entry(**file: Any) -> bytes:
    plain = {"file_path": f"{ROOT}/ann/a.parquet", "file_format": "PARQUET", "record_count": 1}
    return avro({"status": 1, "data_file": {**plain, **file}})


OBJECTS = {
    "a folder": ("1-m0.avro", entry(file_path=f"{ROOT}/gone/dt=1/a.parquet")),
    "an escaped folder": ("1-m0.avro", entry(file_path=f"{ROOT}/user=%67one/a.parquet")),
    "a partition": (
        "1-m0.avro",
        entry(file_path=f"{ROOT}/x/a.parquet", partition={"user": "gone"}),
    ),
    "a bound": ("1-m0.avro", entry(lower_bounds=[{"key": 5, "value": b"gone"}])),
    "an unknown field": ("1-m0.avro", entry(new="gone")),
    "an unknown record": ("1.avro", avro({"who": "gone"})),
    "bounds of partitions": (
        "snap-1.avro",
        avro({"manifest_path": "x", "partitions": [{"lower_bound": b"gone"}]}),
    ),
    "a property": ("1.metadata.json", json.dumps({"properties": {"owner": "gone"}}).encode()),
    "a summary": (
        "1.metadata.json",
        json.dumps({"snapshots": [{"summary": {"partitions.user=gone": "1"}}]}).encode(),
    ),
    "a new field": ("1.metadata.json", json.dumps({"statistics": [{"path": "x/gone/y"}]}).encode()),
}


@pytest.mark.parametrize("what", list(OBJECTS))
def test_values_of_iceberg_metadata_are_searched(what: str) -> None:
    name, data = OBJECTS[what]
    values = event_values(f"{FOLDER}/{name}", data, (), {"archives/a/g1/t/ann"})
    assert values is not None
    assert any(map(EventMatcher(Deletions(by_id={"gone": {}})).is_value_in, values))
    assert not any(map(EventMatcher(Deletions(by_id={"PARQUET": {}})).is_value_in, values))


def test_folder_that_has_events_is_not_a_trace_in_iceberg_metadata() -> None:
    sought = EventMatcher(Deletions(by_id={"ann": {}}))
    for living, is_found in (({"archives/a/g1/t/ann"}, False), ({"archives/a/g2/t/ann"}, True)):
        values = event_values(f"{FOLDER}/1-m0.avro", entry(), (), living)
        assert values is not None
        assert any(map(sought.is_value_in, values)) == is_found


USERS = ["ann", "bob", "eve"]


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Home]:
    """An archive whose folders are named by users, with an Iceberg table."""
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        for user in USERS:
            value = json.dumps({"at": FIRST_S, "user": user}).encode()
            home.append("t", [Event(value, key=user.encode())])
        archive = an_archive(home, parser="split:user|json:at")
        drive(home, archive)
        register_table(home.context, archive, table_name(tmp_path))
        yield home


def table_name(folder: Path) -> str:
    return f"iceberg:sqlite:///{folder}/lake.db#lake.daily"


def rebuild(home: Home) -> None:
    """Do what a proof advises for names that are made of erased events."""
    written_as = home.archives.get("daily").info.format_of()
    built, generation = begin_backfill(home.context, "daily", written_as)
    Driver(
        home.context,
        open_pipeline(home.context, built, LocalWorkers(2), generation),
        DriverOptions(),
    ).run()
    promote(home.context, "daily")


def prove(home: Home, user: str) -> list[str]:
    purge(home.context, home.topic("t"), 0)
    return [each.object for each in home.prove_erased("t", keys=[user.encode()]).traces]


def rows(folder: Path) -> list[str]:
    table = open_sql_catalog(f"sqlite:///{folder}/lake.db").load_table("lake.daily")
    return sorted(key.decode() for key in table.scan().to_arrow().column("key").to_pylist())


def test_drop_removes_snapshots_that_name_folders_of_erased_events(
    split: Home, tmp_path: Path
) -> None:
    split.delete_key("t", b"bob")
    assert any("/_iceberg/" in each for each in prove(split, "bob"))
    rebuild(split)
    assert any("/_iceberg/" in each for each in prove(split, "bob"))
    drop_generation(split.context, "daily", 1)
    assert prove(split, "bob") == []
    assert rows(tmp_path) == ["ann", "eve"]
    split.append("t", [Event(json.dumps({"at": FIRST_S, "user": "joe"}).encode(), key=b"joe")])
    drive(split, find_archive(split.context, "daily"))
    register_table(split.context, find_archive(split.context, "daily"), table_name(tmp_path))
    assert rows(tmp_path) == ["ann", "eve", "joe"]


def test_drop_that_died_before_it_expired_snapshots_is_finished_by_a_sweep(
    split: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split.delete_key("t", b"bob")
    purge(split.context, split.topic("t"), 0)
    rebuild(split)
    with monkeypatch.context() as patch:

        def dies(_: ExpireSnapshots) -> None:
            raise Crash("after the manifests were deleted")

        patch.setattr(ExpireSnapshots, "commit", dies)
        with pytest.raises(Crash):
            drop_generation(split.context, "daily", 1)
    assert find_archive(split.context, "daily").state_of(1) == "removing"
    assert rows(tmp_path) == ["ann", "eve"]
    assert prove(split, "bob") == []
    assert rows(tmp_path) == ["ann", "eve"]


def test_table_of_a_generation_without_files_names_none_of_the_dropped_ones(
    split: Home, tmp_path: Path
) -> None:
    for user in USERS:
        split.delete_key("t", user.encode())
    purge(split.context, split.topic("t"), 0)
    rebuild(split)
    drop_generation(split.context, "daily", 1)
    assert rows(tmp_path) == []
    for user in USERS:
        assert prove(split, user) == []


def test_snapshot_that_another_engine_made_is_found_by_its_manifests(
    split: Home, tmp_path: Path
) -> None:
    table = open_sql_catalog(f"sqlite:///{tmp_path}/lake.db").load_table("lake.daily")
    (file, *_) = [task.file for task in table.scan().plan_files() if "/bob/" in task.file.file_path]
    with table.transaction() as change, change.update_snapshot().overwrite() as swap:
        swap.delete_data_file(file)
        swap.append_data_file(file)
    split.delete_key("t", b"bob")
    purge(split.context, split.topic("t"), 0)
    rebuild(split)
    drop_generation(split.context, "daily", 1)
    assert prove(split, "bob") == []
    assert rows(tmp_path) == ["ann", "eve"]
