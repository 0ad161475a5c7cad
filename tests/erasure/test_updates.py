"""Updates reach archived files exactly once, over crashes, with tables and dead letters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.archive_look import FIRST_S, a_home
from tests.support.cli_run import run_here
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home, ToOffsets
from tidelog.api.archives import ArchiveHandle
from tidelog.archive.tables import stale_entries
from tidelog.erasure import rewrite, updates
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.pipeline.cycle import Cycle
from tidelog.testing.scheduler import Crash

EVENTS = 20
FORMATS = [
    {"format": "parquet"},
    {"format": "jsonlines"},
    {"format": "delimited"},
    {"format": "avro"},
    {"format": "orc"},
    {"format": "sequence", "key": "offset"},
]


def value(number: int, note: str = "") -> bytes:
    return json.dumps({"at": FIRST_S + number % 3 * 86_400, "n": number, "note": note}).encode()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(value(n), id=f"id-{n}") for n in range(EVENTS)])
        yield made


def daily(home: Home, **options: str) -> ArchiveHandle:
    archive = home.archives.create("daily", source="topic:t", parser="json:at", **options)  # type: ignore[arg-type]
    archive.run()
    return archive


def archived(archive: ArchiveHandle) -> Counter[bytes]:
    batches = archive.read()
    return Counter(each for batch in batches for each in batch.column("value").to_pylist())


def expected(new: dict[int, bytes]) -> Counter[bytes]:
    return Counter(new.get(number, value(number)) for number in range(EVENTS))


def check(archive: ArchiveHandle) -> None:
    assert archive.verify(deep=True, source=True).problem_count == 0
    assert all(each.account and each.account.adds_up for each in archive.status().partitions)


@pytest.mark.parametrize("options", FORMATS, ids=lambda each: each["format"])
def test_update_reaches_files_of_every_format_and_generation(
    home: Home, options: dict[str, str]
) -> None:
    archive = daily(home, **options)
    archive.backfill(granularity="hour")
    new = value(7, "corrected")
    home.update("t", "id-7", new, archives=True, why="wrong")
    assert archived(archive) == expected({7: new})
    check(archive)
    archive.promote()
    assert archived(archive) == expected({7: new})
    again = home.update_archives("t", ["id-7"])
    assert [each.events for each in again] == [0, 0]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tables_list_the_rewritten_files(home: Home, kind: str, tmp_path: Path) -> None:
    archive = daily(home)
    table = "delta"
    if kind == "iceberg":
        table = f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"
    archive.tables.register(table)
    new = value(7, "corrected " * 20)
    home.update("t", "id-7", new, archives=True)
    assert list(stale_entries(home.context, archive.reload(), 1)) == []
    if kind == "delta":
        info = archive.info
        delta = DeltaTable(f"{info.store.removeprefix('file://')}/{info.folder()}")
        rows = delta.to_pyarrow_table()
    else:
        rows = open_sql_catalog(f"sqlite:///{tmp_path}/ice.db").load_table("ns.t").scan().to_arrow()
    assert Counter(rows.column("value").to_pylist()) == expected({7: new})


STEPS = ("_intend", "_decide", "_replace", "_carry_out", "_correct_tables")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
def test_update_that_dies_is_finished_by_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    archive = daily(home)
    real = getattr(rewrite.PartitionRewriter, step)

    def crash(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise Crash

    new = value(7, "corrected")
    with monkeypatch.context() as patch:
        patch.setattr(rewrite.PartitionRewriter, step, crash)
        with pytest.raises(Crash):
            home.update("t", "id-7", new, archives=True)
    home.update_archives("t", ["id-7"])
    assert archived(archive) == expected({7: new})
    check(archive)
    assert home.update_archives("t", ["id-7"])[0].events == 0


def test_later_update_wins_whichever_process_writes_last(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = daily(home)
    real, new = rewrite.PartitionRewriter._intend, value(7, "second")
    updates = [new]

    def late(*arguments: object) -> None:
        if updates:  # another process is faster, with a later value
            home.update("t", "id-7", updates.pop(), archives=True)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rewrite.PartitionRewriter, "_intend", late)
    home.update("t", "id-7", value(7, "first"), archives=True)
    assert archived(archive) == expected({7: new})
    check(archive)


def with_a_range_under_way(home: Home, monkeypatch: pytest.MonkeyPatch) -> ArchiveHandle:
    """An archive whose driver died after all was read and decided."""
    archive = home.archives.create("daily", source="topic:t", parser="json:at")

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "_publish", crash)
        with pytest.raises(Crash):
            archive.run()
    return archive


def test_update_waits_for_a_range_that_may_hold_the_old_value(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = with_a_range_under_way(home, monkeypatch)
    monkeypatch.setattr(updates, "_WAIT_MS", 0)
    lookup, new = home._lookups.of(home.topic("t")), value(7, "corrected")
    home.update("t", "id-7", new)
    with pytest.raises(UnavailableError, match="a range of archive `daily` is under way"):
        updates.update_archives(home.context, lookup, ["id-7"], 0)
    archive.run()  # with the old value, as it was decided
    updates.update_archives(home.context, lookup, ["id-7"], 0)
    assert archived(archive) == expected({7: new})


def test_dead_letters_get_the_value_and_an_erasure_still_finds_the_event(home: Home) -> None:
    home.append("t", [Event(b"nonsense", id="dead")])
    archive = daily(home)
    fixed = value(30)
    home.update("t", "dead", fixed, archives=True)
    assert archive.replay().replayed == 1
    assert archived(archive)[fixed] == 1
    assert home.erase("t", ids=["dead"]).is_erased
    assert archived(archive) == expected({})


def test_files_without_values_are_named_and_the_command_fails(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    archive = home.archives.create("raw", source="topic:t")
    archive.run()
    run = run_here(monkeypatch, capsysbinary, tmp_path)
    (tmp_path / "new").write_bytes(b"new")
    at = ("--home", home.config, "update", "t", "id-7", str(tmp_path / "new"), "--archives")
    done = run(*at, "--json")
    assert (done.code, done.rows()[0]["archived"]) == (0, 1)
    assert archived(archive)[b"new"] == 1
    typed = home.archives.create("typed", source="topic:t", schema="n BIGINT", keep_value=False)
    typed.run()
    told = run(*at)
    assert told.code == 1
    assert b"archive `typed`, generation 1: its files have columns and no values" in told.out


def test_replay_that_read_a_file_just_before_it_was_rewritten_gets_the_value_too(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(b"nonsense", id="dead")])
    archive = daily(home)
    assert archive.replay().replayed == 0  # so a replay's own file has the dead letter now
    real, replays = rewrite.PartitionRewriter._carry_out, [archive.replay]

    def late(*arguments: object) -> None:
        if replays:
            assert replays.pop()().replayed == 0
        real(*arguments)  # type: ignore[arg-type]

    fixed = value(30)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite.PartitionRewriter, "_carry_out", late)
        home.update("t", "dead", fixed, archives=True)
    assert archive.replay().replayed == 1
    assert archived(archive)[fixed] == 1


def test_event_that_is_trimmed_meanwhile_gets_the_value_that_it_had_last(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = with_a_range_under_way(home, monkeypatch)
    real, new = updates._update_generations, value(7, "corrected")

    def then_trim(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        archive.run()  # with the old value, as it was decided
        home.trim("t", ToOffsets({0: EVENTS}), past_readers=True)
        return found

    monkeypatch.setattr(updates, "_update_generations", then_trim)
    home.update("t", "id-7", new, archives=True)
    assert archived(archive) == expected({7: new})
    with pytest.raises(NotFoundError, match="archived files keep the values that they have"):
        home.update_archives("t", ["id-7"])
