"""Proofs and tables that other programs have written to: what they wrote is found, or listed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import FIRST_S, a_home
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home
from tidelog.api.archives import ArchiveHandle


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"v%d" % n, b"k%d" % (n % 3), f"e{n}", n) for n in range(9)])
        yield made


def an_archive(home: Home, name: str = "day") -> ArchiveHandle:
    archive = home.archives.create(name, source="topic:t", parser="timestamp")
    archive.run()
    return archive


def test_file_that_others_wrote_to_an_iceberg_table_is_deleted_as_the_proof_says(
    home: Home, tmp_path: Path
) -> None:
    archive, uri = an_archive(home), f"sqlite:///{tmp_path}/lake.db"
    archive.tables.register(f"iceberg:{uri}#lake.day")
    open_sql_catalog(uri).load_table("lake.day").delete("offset = 3")
    proof = home.erase("t", key=b"k1")
    (trace,) = proof.traces
    assert "another program has written it to the Iceberg table" in trace.what
    assert trace.do.endswith("what that program has added to the table is lost with it")
    archive.backfill()
    archive.promote()
    archive.drop(1)
    (left,) = home.prove_erased("t", keys=[b"k1"]).traces
    assert left.object == trace.object
    (tmp_path / "o" / trace.object).unlink()
    assert home.prove_erased("t", keys=[b"k1"]).is_clean
    table = open_sql_catalog(uri).load_table("lake.day")
    for snapshot in table.snapshots():
        assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows == 6


@pytest.mark.parametrize("user", ["user/7", "user-7 " * 40])
def test_metadata_of_a_table_that_the_archive_forgot_is_deleted_as_the_proof_says(
    home: Home, tmp_path: Path, user: str
) -> None:
    values = [json.dumps({"at": FIRST_S, "user": each}).encode() for each in (user, "other")]
    home.append("t", [Event(each, json.loads(each)["user"].encode()) for each in values])
    archive = home.archives.create("split", source="topic:t", parser="split:user|json:at")
    archive.run()
    table = f"iceberg:sqlite:///{tmp_path}/lake.db#lake.split"
    archive.tables.register(table)
    archive.tables.forget(table)
    home.delete_key("t", user.encode())
    archive.backfill()
    archive.promote()
    archive.drop(1)
    traces = home.purge_and_prove("t", keys=[user.encode()]).traces
    folder = "archives/split/_iceberg/lake.split"
    assert {each.object.partition("/metadata/")[0] for each in traces} == {folder}
    assert all(each.do.endswith(f"delete the folder `{folder}`") for each in traces)
    shutil.rmtree(tmp_path / "o" / folder)
    assert home.purge_and_prove("t", keys=[user.encode()]).is_clean


def test_part_of_a_name_with_a_slash_is_no_name_in_a_table(home: Home, tmp_path: Path) -> None:
    values = [json.dumps({"at": FIRST_S, "user": each}).encode() for each in ("user/7788", "b")]
    home.append("t", [Event(values[0], b"user/7788"), Event(values[1], b"7788")])
    archive = home.archives.create("split", source="topic:t", parser="split:user|json:at")
    archive.run()
    archive.tables.register(f"iceberg:sqlite:///{tmp_path}/lake.db#lake.split")
    home.append("t", [Event(values[1], b"b")])
    archive.run()
    assert home.erase("t", key=b"7788").is_clean
    traces = home.erase("t", key=b"user/7788").traces
    assert any("/_iceberg/" in each.object for each in traces)


def test_folder_of_a_table_outside_of_its_archive_is_listed(home: Home, tmp_path: Path) -> None:
    archive, uri = an_archive(home), f"sqlite:///{tmp_path}/lake.db"
    an_archive(home, "other").tables.register(f"iceberg:{uri}#lake.other")
    place = f"file://{tmp_path}/warehouse/day"
    catalog = open_sql_catalog(uri)
    other = catalog.load_table("lake.other")
    catalog.create_table("lake.day", other.schema(), place, other.spec())
    archive.tables.register(f"iceberg:{uri}#lake.day")
    table = catalog.load_table("lake.day")
    table.append(table.scan().to_arrow())
    proof = home.erase("t", key=b"k1")
    (listed,) = proof.out_of_reach
    assert listed == (
        f"table `iceberg:{uri}#lake.day` of archive `day`: its folder `{place}` was not "
        "searched: other programs may have written these events there"
    )
    (tmp_path / "lake.db").write_bytes(b"damaged")
    found = home.prove_erased("t", keys=[b"k1"]).out_of_reach
    assert len(found) == 2
    assert all(": was not looked at: " in each for each in found)
