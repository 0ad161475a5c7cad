"""``archive backfill``, ``promote``, ``rollback`` and ``drop`` as a person runs them."""

from __future__ import annotations

import json

import pytest

import tidelog as library
from tests.support.cli_run import Run
from tidelog import Event
from tidelog.archive import generations
from tidelog.archive.coverage import MissingRange
from tidelog.cli import terminal
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import limits

NO_VALUE = ("--schema", "n INT", "--drop-value")


def send(numbers: range) -> None:
    with library.open() as home:
        home.append("t", [Event(json.dumps({"n": n}).encode()) for n in numbers])


def made(tidelog: Run, *more: str) -> None:
    with library.open() as home:
        home.create_topic("t")
    send(range(10))
    create = tidelog("archive", "create", "a", "--source", "topic:t", *more, "--json")
    assert create.code == 0, create.err
    (row,) = create.rows()
    assert row["folder"].endswith("/archives/a/g1"), "a listing of it has each event once"
    assert tidelog("archive", "run", "a", "--no-spark").code == 0


def trim(offset: int) -> None:
    with library.open() as home:
        home.trim("t", ToOffsets({0: offset}), past_readers=True)


def test_status_shows_the_live_folder_and_all_generations(tidelog: Run) -> None:
    made(tidelog)
    trim(5)
    assert tidelog("archive", "backfill", "a", "--no-spark", "--codec", "gzip").code == 0
    (row,) = tidelog("archive", "status", "a", "--json").rows()
    assert row["folder"].endswith("/archives/a/g1")
    assert row["generations"] == {"1": "live", "2": "building"}
    (row,) = tidelog("archive", "promote", "a", "--json").rows()
    assert (row["generation"], row["kept"]) == (2, [1])
    assert row["folder"].endswith("/archives/a/g2")
    (row,) = tidelog("archive", "status", "a", "--json").rows()
    assert row["generations"] == {"1": "kept", "2": "live"}
    assert row["account"]["archived"] == 10
    send(range(10, 15))
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    assert b"kept        2\n" in tidelog("archive", "rollback", "a").out
    refused = tidelog("archive", "promote", "a")
    assert "`tidelog archive rollback a` goes back to a kept one" in refused.err
    assert b"[default: parquet]" in tidelog("archive", "create", "--help").out
    assert b"[default: parquet]" not in tidelog("archive", "backfill", "--help").out
    assert tidelog("archive", "drop", "a", "2").code == 0
    done = tidelog("archive", "verify", "a", "--deep", "--json").rows()[-1]
    assert (done["events"], done["problems"]) == (15, [])
    refused = tidelog("archive", "rollback", "a")
    assert refused.code != 0
    assert "keeps no other generation" in refused.err


def test_files_with_a_schema_can_be_restored(tidelog: Run) -> None:
    made(tidelog, "--schema", "other INT")
    with library.open() as home:
        home.create_topic("again")
    assert tidelog("archive", "restore", "a", "--to", "topic:again", "--no-spark").code == 0
    with library.open() as home:
        values = [json.loads(event.value or b"")["n"] for event in home.read("again", 0)]
    assert values == list(range(10)), "also fields that the schema does not name"
    (row,) = tidelog("archive", "list", "--json").rows()
    assert row["restorable"] is True


def test_create_and_backfill_say_when_no_restore_will_be_possible(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t")
    args = ("archive", "create", "a", "--source", "topic:t", "--schema", "n INT")
    said = tidelog(*args, "--drop-value").out.decode()
    assert "no restore is possible" in " ".join(said.split())
    (row,) = tidelog("archive", "list", "--json").rows()
    assert row["restorable"] is False
    assert b"no restore" not in tidelog(*args[:2], "b", *args[3:]).out
    assert b"Note" not in tidelog("archive", "backfill", "a", "--no-spark", "--keep-value").out
    said = tidelog("archive", "backfill", "b", "--no-spark", "--drop-value").out.decode()
    assert "no restore is possible" in " ".join(said.split())
    wrong = tidelog("archive", "create", "c", "--source", "topic:t", "--drop-value")
    assert wrong.code == 2, "it has no effect without a schema"


def test_promote_that_would_lose_events_names_them(tidelog: Run) -> None:
    made(tidelog, *NO_VALUE)
    trim(5)
    backfill = tidelog("archive", "backfill", "a", "--no-spark", "--keep-value")
    assert backfill.code == 0, backfill.err
    refused = tidelog("archive", "promote", "a")
    assert refused.code != 0
    assert "`t/0` from 0 to 5" in refused.err
    assert tidelog("archive", "promote", "a", "--force").code == 0
    status = tidelog("archive", "status", "a", terminal=True)
    assert "promoted with --force" in status.err + status.out.decode()
    dropped = tidelog("archive", "drop", "a", "1")
    assert dropped.code != 0
    assert "`t/0` from 0 to 5" in dropped.err
    assert tidelog("archive", "drop", "a", "1", "--force").code == 0


def test_start_is_recorded_at_create_and_refused_once_begun(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    send(range(3))
    create = tidelog("archive", "create", "a", "--source", "topic:t", "--start", "latest", "--json")
    assert create.rows()[0]["start"] == "latest"
    send(range(3, 4))
    ran = tidelog("archive", "run", "a", "--no-spark", "--json")
    assert ran.rows()[-1]["events"] == 1
    refused = tidelog("archive", "run", "a", "--no-spark", "--start", "earliest")
    assert refused.code != 0
    assert "began at latest, and --start earliest no longer counts" in refused.err


def test_backfill_begins_earlier_than_the_archive_on_request(tidelog: Run) -> None:
    made(tidelog, "--start", "latest")
    send(range(10, 15))
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    (row,) = tidelog("archive", "backfill", "a", "--no-spark", "--json").rows()[-1:]
    assert row["events"] == 5
    refused = tidelog("archive", "backfill", "a", "--no-spark", "--start", "earliest")
    assert "is being built with other settings" in refused.err
    assert tidelog("archive", "drop", "a", "2").code == 0
    (row,) = tidelog(
        "archive", "backfill", "a", "--no-spark", "--start", "earliest", "--json"
    ).rows()[-1:]
    assert row["events"] == 15
    assert tidelog("archive", "promote", "a").code == 0
    (row,) = tidelog("archive", "status", "a", "--json").rows()
    assert row["account"]["archived"] == 15


def test_status_says_how_many_lost_ranges_it_does_not_show(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tidelog)
    assert tidelog("archive", "backfill", "a", "--no-spark").code == 0
    lost = [MissingRange("t/0", str(n), str(n + 1)) for n in range(14)]
    with monkeypatch.context() as patch:
        patch.setattr(generations, "missing_ranges", lambda *_: lost)
        patch.setattr(limits, "FORCED_RANGES_MAX", 12)
        assert tidelog("archive", "promote", "a", "--force").code == 0
    shown = tidelog("archive", "status", "a").out
    assert b"t/0 9 to 10 and 4 more" in shown


def test_redo_says_what_it_copies_and_asks(tidelog: Run) -> None:
    made(tidelog, "--parser", "timestamp")
    with library.open() as home:
        home.append("t", [Event(b'{"n": 10}', timestamp=0)])
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    refused = tidelog("archive", "redo", "a", "--date", "1970-01-01", "--no-spark")
    assert "Writes 1 event of 1 file again. Copies 1 file (" in refused.out.decode()
    assert "needs --yes without a terminal" in refused.err
    done = tidelog("archive", "redo", "a", "--date", "1970-01-01", "--no-spark", "--yes", "--json")
    row = done.rows()[-1]
    assert (row["generation"], row["events"], row["copied"], row["dead"]) == (2, 1, 1, 0)
    assert tidelog("archive", "promote", "a").code == 0
    told = tidelog("archive", "verify", "a", "--deep", "--json").rows()[-1]
    assert (told["events"], told["problems"]) == (11, [])


def test_backfill_and_redo_say_what_became_dead_letters(tidelog: Run) -> None:
    made(tidelog, "--parser", "timestamp")
    parser = ("--parser", "json:no.such.field", "--no-spark")
    redone = tidelog("archive", "redo", "a", "--partition", "t/0", *parser, "--yes")
    line = "10 dead letters: run `tidelog archive dead a --generation 2` to see why before you"
    assert line in redone.out.decode(), redone.err
    reasons = tidelog("archive", "dead", "a", "--generation", "2").out.decode()
    assert "no.such.field" in reasons
    assert tidelog("archive", "drop", "a", "2").code == 0
    assert "10 dead letters: run" in tidelog("archive", "backfill", "a", *parser).out.decode()


def test_drop_asks_on_a_terminal(tidelog: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b"x\n")
    tidelog("archive", "create", "a", "--source", "topic:t")
    tidelog("archive", "run", "a", "--no-spark")
    tidelog("archive", "backfill", "a", "--no-spark")
    asked: list[str] = []
    monkeypatch.setattr(terminal, "confirm", lambda question, **_: asked.append(question))
    refused = tidelog("archive", "drop", "a", "2", terminal=True)
    assert (refused.code, "archive `a`: nothing was deleted" in refused.err) == (1, True)
    assert asked == ["Delete generation 2 of `a` with its files, for good?"]
    live = tidelog("archive", "drop", "a", "1", terminal=True)
    assert (live.code, "is the live one" in live.err, len(asked)) == (2, True, 1)
    assert b"drop" not in tidelog("audit").out, "a refused drop is no drop"
    assert tidelog("archive", "drop", "a", "2", "--yes", terminal=True).code == 0


def test_backfill_with_too_many_dead_letters_says_how_to_begin_again(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b'{"at": 1794657600000}\n' * 200)
    tidelog("archive", "create", "a", "--source", "topic:t", "--parser", "json:at")
    tidelog("archive", "run", "a", "--no-spark")
    refused = tidelog("archive", "backfill", "a", "--parser", "iso8601:at", "--no-spark")
    assert (
        "run `tidelog archive drop a 2`, then `tidelog archive backfill a --parser" in refused.err
    )
    shown = tidelog("archive", "status", "a").out.decode()
    assert "See `tidelog archive status a --generation 2` for the progress and the errors" in shown
    assert b"1 attempt: " in tidelog("archive", "status", "a", "--generation", "2").out
    assert tidelog("archive", "drop", "a", "2").code == 0
    again = ("archive", "backfill", "a", "--parser", "timestamp", "--no-spark")
    assert tidelog(*again).code == 0

    tidelog("archive", "create", "b", "--source", "topic:t", "--parser", "iso8601:at")
    refused = tidelog("archive", "run", "b", "--no-spark")
    assert "`tidelog archive backfill b --parser PARSER`, then `tidelog archive promote b`" in (
        refused.err
    )


def test_backfill_says_which_replayed_dead_letters_are_dead_again(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t")
        times = [1_794_744_000, "2026-11-15", "2026-11-16", "soon"]
        home.append("t", [Event(json.dumps({"at": at}).encode()) for at in times])
        archive = home.archives.create("a", source="topic:t", parser="json:at")
        assert archive.run().dead == 3
        done = archive.backfill(granularity="hour")
        assert (done.dead, done.dead_again) == (3, 0), "nothing was replayed"
        archive.drop(2)
    replayed = tidelog("archive", "dead", "a", "--replay", "--parser", "iso8601:at")
    assert "backfill a --parser 'first:json:at||iso8601:at'`" in replayed.out.decode()
    built = tidelog("archive", "backfill", "a", "--no-spark", "--granularity", "hour")
    assert (
        "Replays have archived 2 of its dead letters in the live generation." in built.out.decode()
    )
    assert "`tidelog archive dead a --generation 3 --replay --parser PARSER`" in built.out.decode()
    again = ("archive", "dead", "a", "--generation", "3", "--replay", "--parser", "iso8601:at")
    assert tidelog(*again).code == 0
    assert b"Replays have" not in tidelog("archive", "backfill", "a", "--no-spark").out
    assert tidelog("archive", "promote", "a").code == 0
    (row,) = tidelog("archive", "status", "a", "--json").rows()
    assert (row["account"]["archived"], row["account"]["dead"]) == (3, 1)
    with library.open() as home:
        done = home.archives.get("a").backfill(parser="first:json:at||iso8601:at")
        assert (done.dead, done.dead_again) == (1, 0), "one parser reads both"
    several = tidelog("archive", "promote", "a")
    assert "`tidelog archive rollback a --to 1`" in several.out.decode()
    assert "`tidelog archive rollback a --to 3`" in several.out.decode()
