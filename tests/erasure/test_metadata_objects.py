"""A proof searches objects of which every field is known by their values, not by their text."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.support.archive_look import AT, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.erased_events import Deletions
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.tables import change_tables, register
from tidelog.coordination.pipeline_rows import counting_files
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.metadata_objects import event_values
from tidelog.log.producer.append import Appender
from tidelog.maintenance.erase import purge
from tidelog.model.archive import Archive
from tidelog.testing.scheduler import Crash

DAY = "2020-01-01"
WORDS = ["WRITE", "parquet", "Append", "id", "offset", "struct", "version", "events", "Y=2020"]


@pytest.fixture
def registered(tmp_path: Path) -> Iterator[tuple[Home, Archive]]:
    """A topic whose ids are words that a table's log holds, in an archive with a Delta table."""
    with a_home(tmp_path) as home:
        home.create_topic("t")
        first_s = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp())
        values = [b'{"at": %d}' % (first_s + n) for n in range(len(WORDS) + 2)]
        ids = [*WORDS, DAY, "stays"]
        home.append("t", [Event(value, id=each) for value, each in zip(values, ids, strict=True)])
        archive = an_archive(home, parser=AT)
        drive(home, archive)
        archive = change_tables(home.context, archive, "delta", keep=True)
        register(home.context, archive)
        finalize(home.context, archive, FinalizeOptions(delay_ms=0))
        yield home, archive


def test_ids_that_are_words_of_a_table_log_are_proved_erased(
    registered: tuple[Home, Archive],
) -> None:
    home, archive = registered
    context = f"{archive.folder()}/_delta_log/"
    assert len(list(home.store.list(context))) >= 2
    assert any(each.key.endswith("_SUCCESS") for each in home.store.list(archive.folder()))
    DeltaTable(str(local_path(home, archive))).create_checkpoint()
    home.delete("t", [*WORDS, DAY])
    purge(home.context, home.topic("t"), 0)
    purge(home.context, home.topic("t"), 0)
    for each in (*WORDS, DAY):
        assert home.prove_erased("t", ids=[each]).traces == []


def local_path(home: Home, archive: Archive) -> Path:
    return Path(home.store.url.removeprefix("file://")) / archive.folder()


@pytest.mark.parametrize(
    "action",
    [
        {"add": {"path": "t/a.parquet", "stats": '{"minValues": {"id": "gone"}}'}},
        {"add": {"path": "t/who=gone/a.parquet", "partitionValues": {}}},
        {"remove": {"path": "t/a.parquet", "partitionValues": {"who": "gone"}}},
        {"add": {"path": "t/a.parquet", "tags": {"first": "gone"}}},
        {"commitInfo": {"operation": "DELETE", "operationParameters": {"ids": '["gone"]'}}},
        {"metaData": {"configuration": {"who": "gone"}}},
        {"txn": {"appId": "a", "unknown": "gone"}},
        {"new": {"field": "gone"}},
        {"add": {"stats": 'broken "gone"'}},
    ],
    ids=str,
)
def test_values_of_a_table_log_are_searched(action: dict[str, Any]) -> None:
    sought = EventMatcher(Deletions(by_id={"gone": {}}))
    key = "archives/a/g1/_delta_log/00000000000000000001.json"
    data = json.dumps(action).encode()
    values = event_values(key, data, {"t"} if "who=gone" not in str(action) else ())
    if "partitionValues" in str(action):
        values = event_values(key, data, ())
    assert values is not None
    assert any(map(sought.is_value_in, values))


def test_objects_that_are_not_known_are_searched_as_a_whole() -> None:
    for key, data in (
        ("archives/a/g1/_delta_log/1.json", b"not JSON"),
        ("archives/a/g1/_delta_log/1.json", b'["gone"]'),
        ("archives/a/g1/_delta_log/_last_checkpoint", b'{"version": 1, "new": "gone"}'),
        ("archives/a/g1/t/_SUCCESS", b'{"archive": "gone"}'),
        ("archives/a/g1/t/other.json", b'{"add": {}}'),
    ):
        assert event_values(key, data, ()) is None


def test_folder_that_only_the_erased_event_had_is_a_trace(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [Event(b'{"at": 86400}', id="gone"), Event(b'{"at": 1}', id="stays")])
        archive = an_archive(home, parser=AT)
        drive(home, archive)
        home.delete("t", ["gone"])
        purge(home.context, home.topic("t"), 0)
        (file,) = [
            each
            for _, each in counting_files(home.context, archive.pipeline(), "t/0")
            if not each.events
        ]
        name = file.target.split("/")[-2]
        home.append("t", [Event(b'{"at": 2}', id=name)])
        home.delete("t", [name])
        traces = home.prove_erased("t", ids=[name]).traces
        assert "has one of them in the name of its folder" in [each.what for each in traces]


def test_names_of_fields_in_lines_of_events_do_not_count() -> None:
    line = {"topic": "t", "partition": 0, "offset": 1, "id": "x", "key": None, "value": {"a": "b"}}
    data = json.dumps(line).encode()
    for each, is_found in (("offset", False), ("x", True), ("b", True), ("a", True)):
        assert EventMatcher(Deletions(by_id={each: {}})).is_json_string_in(data) == is_found
    assert EventMatcher(Deletions(by_id={"offset": {}})).is_json_string_in(b'{"offset": 1}')


def test_no_catalog_row_keeps_an_erased_id(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [Event(b"1", id="erased-person", key=b"k"), Event(b"2", id="stays")])
        archive = an_archive(home)
        drive(home, archive)
        home.update("t", "erased-person", b"3", why="typo")
        home.delete("t", ["erased-person"], why="asked for")
        purge(home.context, home.topic("t"), 0)
        purge(home.context, home.topic("t"), 0)
        proof = home.prove_erased("t", ids=["erased-person"])
        assert (proof.traces, proof.known) == ([], True)
    with sqlite3.connect(tmp_path / "c.sqlite") as connection:
        rows = connection.execute("SELECT * FROM rows").fetchall()
    connection.close()
    assert len(rows) > 10
    assert not [row for row in rows if "erased-person" in str(row)]


def test_orphan_that_a_sweep_keeps_as_a_possible_loss_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [Event(b"1", id="gone"), Event(b"2", id="stays")])
        topic = home.topic("t")
        home.delete("t", ["gone"])
        for _ in range(2):
            purge(home.context, topic, 0)
        assert home.prove_erased(topic.name, ids=["gone"]).traces == []
    with a_home(tmp_path) as home, monkeypatch.context() as patch:

        def refuses(*_: object, **__: object) -> None:
            raise Crash("as if its process had died")

        patch.setattr(Appender, "commit", refuses)
        with pytest.raises(Crash):
            home.append("t", [Event(b"1", id="gone")])
    with a_home(tmp_path) as home:
        assert home.sweep(0).objects_doubted == 1
        (trace,) = home.prove_erased(topic.name, ids=["gone"]).traces
        assert "`tidelog sweep --accept-loss t`" in trace.do
        home.sweep(0, accept_loss=["t"])
        assert home.prove_erased(topic.name, ids=["gone"]).traces == []
