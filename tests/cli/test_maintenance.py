"""``lag``, ``trim``, ``sweep`` and ``verify`` as a person runs them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

import tidelog as library
from tests.support.cli_run import Run
from tidelog import Event
from tidelog.cli import terminal
from tidelog.errors import InvalidError
from tidelog.store.local import LocalStore


def fill(events: int = 10, partitions: int = 1) -> None:
    """A topic ``t`` with so many events in each partition, one run for each two."""
    with library.open() as home:
        home.create_topic("t", partitions=partitions)
        for partition in range(partitions):
            for first in range(0, events, 2):
                pair = [Event(b"%d" % n, timestamp=1_000 * n) for n in (first, first + 1)]
                home.append("t", pair, partition=partition)


def starts(tidelog: Run) -> list[int]:
    shown = tidelog("topic", "show", "t", "--json").rows()[0]
    return [each["start"] for each in shown["per_partition"]]


def test_lag_of_every_consumer(tidelog: Run) -> None:
    assert tidelog("lag", "--json").rows() == []
    fill(4, partitions=2)
    tidelog("consume", "t", "--name", "slow", "--max", "3")
    tidelog("consume", "t", "--name", "done")
    rows = tidelog("lag", "--json").rows()
    assert rows == tidelog("lag", "t", "--json").rows()
    assert [(r["topic"], r["consumer"], r["partition"], r["end"], r["owner"]) for r in rows] == [
        ("t", "done", 0, 4, None),
        ("t", "done", 1, 4, None),
        ("t", "slow", 0, 4, None),
        ("t", "slow", 1, 4, None),
    ]
    assert [r["lag"] for r in rows[:2]] == [0, 0]
    assert sum(r["lag"] for r in rows[2:]) == 5
    assert all(r["end"] - r["cursor"] == r["lag"] for r in rows)
    with library.open() as home, home.consumer("t", "slow") as member:
        member.poll()
        owners = {r["owner"] for r in tidelog("lag", "--json").rows() if r["consumer"] == "slow"}
        assert None not in owners
    assert b"slow" in tidelog("lag").out


def test_trim_by_offset_by_time_and_by_bytes(tidelog: Run) -> None:
    fill(10, partitions=2)
    done = tidelog("trim", "t", "--offset", "1:3", "--json").rows()
    assert [(r["partition"], r["old_start"], r["new_start"], r["runs"]) for r in done] == [
        (1, 0, 3, 1)
    ]
    assert starts(tidelog) == [0, 3]
    tidelog("trim", "t", "--before", "1970-01-01T00:00:06Z")
    assert starts(tidelog) == [6, 6]
    assert b"new_start" in tidelog("trim", "t", "--keep-bytes", "1000000").out
    assert starts(tidelog) == [6, 6]
    tidelog("trim", "t", "--before", "-1s")
    assert starts(tidelog) == [10, 10]
    tidelog("trim", "t", "--keep-bytes", "0")
    assert starts(tidelog) == [10, 10]


def test_trim_shows_what_it_would_delete(tidelog: Run) -> None:
    fill(10, partitions=2)
    args = ("trim", "t", "--before", "1970-01-01T00:00:06Z")
    plan = tidelog(*args, "--dry-run", "--json").rows()
    assert starts(tidelog) == [0, 0]
    assert tidelog(*args, "--json").rows() == plan
    assert [each["events"] for each in plan] == [6, 6]
    assert starts(tidelog) == [6, 6]
    assert b"Nothing was deleted." in tidelog("trim", "t", "--keep-bytes", "0", "--dry-run").out


def test_trim_asks_on_a_terminal_and_deletes_what_it_showed(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(10)
    asked: list[str] = []

    def answer(question: str, **_: object) -> bool:
        asked.append(question)
        with library.open() as home:
            home.append("t", [library.Event(b"later")])
        return len(asked) > 1

    monkeypatch.setattr(terminal, "confirm", answer)
    refused = tidelog("trim", "t", "--keep-bytes", "0", terminal=True)
    assert "topic `t`: nothing was deleted" in refused.err
    assert starts(tidelog) == [0]
    assert tidelog("trim", "t", "--keep-bytes", "0", terminal=True).code == 0
    assert starts(tidelog) == [11], "the event that came during the question stays"
    assert asked == [
        "Delete the oldest 10 events of `t`, for good?",
        "Delete the oldest 11 events of `t`, for good?",
    ]
    assert tidelog("trim", "t", "--keep-bytes", "0", "--yes", terminal=True).code == 0
    assert tidelog("trim", "t", "--keep-bytes", "0", terminal=True).code == 0, "nothing to ask"
    assert (len(asked), starts(tidelog)) == (2, [12])


def test_lag_names_the_process_of_an_owner(tidelog: Run) -> None:
    fill(2)
    with library.open() as home, home.consumer("t", "slow") as member:
        member.poll()
        (known,) = home.consumers("t").get("slow").members()
        assert known.process.endswith(f", process {os.getpid()}")
        assert known.process in tidelog("lag").out.decode()
        assert known.process in tidelog("consumer", "show", "t", "slow").out.decode()
        assert tidelog("lag", "--json").rows()[0]["owner"] == known.id


def test_seek_says_what_it_skips_and_repeats(tidelog: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(10)
    tidelog("consume", "t", "--name", "c", "--max", "4")
    asked: list[str] = []
    monkeypatch.setattr(terminal, "confirm", lambda question, **_: asked.append(question))
    tidelog("consumer", "seek", "t", "c", "latest", terminal=True)
    tidelog("consumer", "seek", "t", "c", "1", terminal=True)
    assert [each.partition("? ")[2] for each in asked] == [
        "It skips 6 events.",
        "It delivers 3 events again.",
    ]
    (moved,) = tidelog("consumer", "seek", "t", "c", "latest", "--yes", "--json").rows()
    assert (moved["skipped"], moved["again"]) == (6, 0)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--before", "-1d", "--keep-bytes", "0"],
        ["--before", "-1d", "--offset", "0:1"],
        ["--offset", "0:1", "--keep-bytes", "5"],
        ["--offset", "1"],
        ["--offset", "0:-1"],
        ["--offset", "0:1", "--offset", "0:2"],
        ["--offset", "0:99"],
        ["--offset", "7:0"],
        ["--before", "yesterday"],
        ["--keep-bytes", "-1"],
        ["--keep-bytes", "many"],
    ],
    ids=" ".join,
)
def test_a_trim_that_is_not_clear_changes_nothing(tidelog: Run, args: list[str]) -> None:
    fill(2)
    refused = tidelog("trim", "t", *args)
    assert (refused.code, refused.out) == (2, b"")
    assert starts(tidelog) == [0]


def test_sweep_takes_what_a_trim_gave_up(tidelog: Run) -> None:
    fill(10)
    tidelog("trim", "t", "--offset", "0:6")
    young = tidelog("sweep", "--json").rows()[0]
    assert (young["objects_deleted"], young["objects_young"]) == (0, 3)
    swept = tidelog("sweep", "--grace", "0s", "--json").rows()[0]
    assert (swept["objects_deleted"], swept["refused"]) == (3, [])
    assert b"objects_deleted" in tidelog("sweep").out
    assert tidelog("sweep", "--grace", "soon").code == 2
    assert tidelog("consume", "t", "--name", "c").out == b"6\n7\n8\n9\n"


def test_verify_is_quiet_when_all_is_well_and_fails_when_not(tidelog: Run, tmp_path: Path) -> None:
    assert tidelog("verify").code == 0
    fill(4)
    tidelog("topic", "create", "empty")
    well = tidelog("verify", "--json")
    assert (well.code, len(well.rows())) == (0, 2)
    report = tidelog("verify", "t", "--json").rows()[0]
    assert (report["topic"], report["events"], report["errors"]) == ("t", 4, 0)

    objects = sorted((tmp_path / "tidelog-data" / "objects" / "topics").rglob("*.arrow"))
    data = bytearray(objects[0].read_bytes())
    data[len(data) // 2] ^= 0xFF
    objects[0].chmod(0o600)
    objects[0].write_bytes(data)
    objects[1].unlink()
    broken = tidelog("verify", "--json")
    assert broken.code == 1
    found = {row["topic"]: row for row in broken.rows()}
    assert (found["t"]["errors"], found["empty"]["errors"]) == (2, 0)
    text = tidelog("verify", "t")
    assert text.code == 1
    assert text.out.count(b"error: partition") == 2
    assert b"is missing" in text.out


def test_a_home_that_reads_a_lot_still_verifies_the_store_itself(
    tidelog: Run, tmp_path: Path
) -> None:
    fill(2)
    with library.open() as home:
        assert len(list(home.read("t"))) == 2  # now in the cache
        next((tmp_path / "tidelog-data" / "objects" / "topics").rglob("*.arrow")).unlink()
        assert home.verify("t").errors == 1
        told: list[int] = []
        home.verify("t", told.append)
        assert sum(told) > 0


def test_verify_shows_errors_before_notes_and_only_some_notes(tidelog: Run, tmp_path: Path) -> None:
    fill(20)
    tidelog("trim", "t", "--offset", "0:18")
    objects = (tmp_path / "tidelog-data" / "objects" / "topics").rglob("*.arrow")
    max(objects, key=lambda path: path.stat().st_mtime_ns).unlink()
    done = tidelog("verify")
    said = [line.split(":")[0] for line in done.out.decode().splitlines()[2:]]
    assert said == ["error", "note", "note", "note", "note"]
    assert b"note: topic `t`: 6 more such notes: see --json" in done.out
    findings = tidelog("verify", "--json").rows()[0]["findings"]
    assert [each["severity"] for each in findings].count("note") == 9


def change_catalog(folder: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(folder / "tidelog-data" / "catalog.sqlite")
    with connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def test_verify_fails_for_a_damaged_row_of_no_topic(tidelog: Run, tmp_path: Path) -> None:
    fill(2)
    change_catalog(
        tmp_path, "UPDATE rows SET value = CAST(value || x'00' AS BLOB) WHERE row = 'changes'"
    )
    told = tidelog("verify")
    assert told.code == 1
    assert b"error: " in told.out
    assert b"changes" in told.out
    rows = tidelog("verify", "--json").rows()
    assert [(row["topic"], row["errors"]) for row in rows] == [("t", 0), (None, 1)]


def test_verify_fails_for_a_topic_that_the_registry_has_lost(tidelog: Run, tmp_path: Path) -> None:
    fill(2)
    change_catalog(tmp_path, "DELETE FROM rows WHERE row = 'topic/t'")
    told = tidelog("verify")
    assert told.code == 1
    assert b"has objects or rows, but no registry row" in told.out
    swept = tidelog("sweep", "--grace", "0s")
    assert swept.code == 1
    assert b"no registry row" in swept.out


def test_sweep_refuses_a_catalog_that_went_back_until_the_loss_is_accepted(
    tidelog: Run, tmp_path: Path
) -> None:
    fill(4)
    catalog = tmp_path / "tidelog-data" / "catalog.sqlite"
    copy = catalog.read_bytes()
    with library.open() as home:
        for value in (b"x", b"y", b"z"):
            home.append("t", [Event(value)])
    for path in catalog.parent.glob("catalog.sqlite*"):
        path.unlink()
    catalog.write_bytes(copy)
    told = tidelog("verify", "t")
    assert told.code == 1
    assert b"the catalog has lost commits" in told.out
    refused = tidelog("sweep", "--grace", "0s", "--json")
    assert refused.code == 1
    assert "--accept-loss t" in refused.rows()[0]["refused"][0]["error"]
    assert refused.rows()[0]["objects_deleted"] == 0
    assert tidelog("sweep", "--accept-loss", "nothing").code != 0
    accepted = tidelog("sweep", "--grace", "0s", "--accept-loss", "t", "--json")
    assert (accepted.code, accepted.rows()[0]["objects_deleted"]) == (0, 3)
    assert tidelog("verify", "t").code == 0


def test_sweep_says_that_it_may_not_list_unfinished_uploads(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(2)
    outside = tmp_path / "outside"
    create = ("archive", "create", "a", "--source", "topic:t", "--kind", "backup")
    assert tidelog(*create, "--to", f"file://{outside}/a").code == 0
    swept = tidelog("sweep", "--json")
    assert (swept.code, swept.rows()[0]["unlisted"]) == (0, [])

    def refuse(self: LocalStore, before_ms: int) -> int:
        raise InvalidError("access denied")

    monkeypatch.setattr(LocalStore, "abort_uploads", refuse)
    swept = tidelog("sweep", "--json")
    first, second = swept.rows()[0]["unlisted"]
    assert swept.code == 1
    assert "were not removed (access denied): give these credentials" in first
    assert f"store `file://{outside}" in second
    shown = tidelog("sweep")
    assert (shown.code, b"were not removed (access denied)" in shown.out) == (1, True)
    turned = tidelog("scribe", "--once", "--grace", "0s", "--metrics-file", "m.prom", "--json")
    assert turned.code == 1
    assert len([each for each in turned.rows()[0]["errors"] if "access denied" in str(each)]) == 2
    assert "tidelog_scribe_stores_unlisted 2" in Path("m.prom").read_text()


def test_trim_that_keeps_older_events_says_why(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("bulk")
        home.append("bulk", [Event(b"%d" % n, timestamp=n * 3_600_000) for n in range(9)])
    before = ("trim", "bulk", "--before", "1970-01-01T04:00:00Z")
    for more in ((), ("--dry-run",)):
        said = tidelog(*before, *more).out.decode()
        assert "partition 0 keeps all: the first run has 9 events, from 1970-01-01T00:00" in said
        assert "only whole runs before the time are deleted" in said
    assert tidelog(*before, "--json").rows()[0]["kept"].startswith("the first run has 9 events")
    assert "keeps all" not in tidelog("trim", "bulk", "--before", "1970-01-01").out.decode()
