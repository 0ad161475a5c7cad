"""Commands that find, correct, delete and replay events, and that tell of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidelog as library
from tests.support.all_times import ALL_TIMES_OPTIONS
from tests.support.cli_run import Run
from tidelog import Event, ToOffsets
from tidelog.codec.event_json import id_line, ids_of_lines
from tidelog.coordination.audit import id_hash


@pytest.fixture
def filled(tidelog: Run, tmp_path: Path) -> Run:
    tidelog("topic", "create", "t", "--partitions", "2")
    lines = "".join(
        json.dumps({"value": f"v{n}", "key": f"k{n % 2}", "id": f"id-{n}", "timestamp": 1000 + n})
        + "\n"
        for n in range(6)
    )
    assert tidelog("produce", "t", "--format", "events", stdin=lines.encode()).code == 0
    return tidelog


def test_get_prints_the_value_or_all_of_it(filled: Run) -> None:
    assert filled("get", "t", "id-3").out == b"v3\n"
    (row,) = filled("get", "t", "id-3", "--json").rows()
    assert (row["value"], row["key"], row["timestamp"]) == ("v3", "k1", "1970-01-01T00:00:01.003Z")
    missing = filled("get", "t", "nowhere", "--json")
    assert missing.code == 1
    assert json.loads(missing.err)["error"]["kind"] == "not_found"
    assert filled("get", "nowhere", "x").code == 1


def test_update_takes_a_file_or_a_pipe(filled: Run, tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"\xff\nnew")
    done = filled("update", "t", "id-1", str(tmp_path / "new"), "--why", "typo", "--json")
    assert done.rows() == [{"topic": "t", "id": "id-1", "bytes": 5}]
    assert filled("get", "t", "id-1").out == b"\xff\nnew\n"
    assert filled("update", "t", "id-2", "-", stdin=b"piped").code == 0
    assert filled("get", "t", "id-2").out == b"piped\n"
    assert filled("update", "t", "nowhere", "-", stdin=b"x").code == 1
    gone = filled("update", "t", "id-1", str(tmp_path / "gone"))
    assert gone.code == 2
    assert "No such file" in gone.err


def test_delete_by_ids_by_a_file_and_by_a_key(filled: Run, tmp_path: Path) -> None:
    assert filled("delete", "t", "id-0", "--json").rows() == [
        {"topic": "t", "deleted": 1, "archived": 0, "missing": []}
    ]
    some = filled("delete", "t", "id-0", "id-1", "--json")
    told = {"topic": "t", "deleted": 1, "archived": 0, "missing": ["id-0"]}
    assert (some.code, some.rows()) == (1, [told])
    (tmp_path / "ids").write_bytes(b"id-2\n\n")
    assert filled("delete", "t", "--ids-file", str(tmp_path / "ids"), "--yes").code == 0
    assert filled("delete", "t", "--key", "k1", "--yes", "--json").rows()[0]["deleted"] == 2
    assert filled("playback", "t", *ALL_TIMES_OPTIONS).out == b"v4\n"
    (tmp_path / "bad").write_bytes(b"\xff")
    assert filled("delete", "t", "--ids-file", str(tmp_path / "bad")).code == 2
    assert "give one of ids" in filled("delete", "t").err
    for wrong in (["id-4", "--key", "k0"], ["--key", "k", "--ids-file", "-"]):
        refused = filled("delete", "t", *wrong, "--yes")
        assert (refused.code, "give only one of" in refused.err) == (2, True)


def test_without_a_terminal_a_key_or_a_file_of_ids_needs_a_yes(filled: Run, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"id-2\n")
    for which in (["--key", "k1"], ["--ids-file", "ids"], ["--ids-file", "-"]):
        refused = filled("delete", "t", *which, stdin=b"id-3\n")
        assert (refused.code, refused.out) == (2, b"")
        assert "needs --yes without a terminal" in refused.err
        unknown = filled("delete", "tt", *which, stdin=b"id-3\n")
        assert (unknown.code, "did you mean `t`" in unknown.err) == (1, True), "told before it asks"
    assert len(filled("playback", "t", *ALL_TIMES_OPTIONS).out.splitlines()) == 6


def test_a_list_without_ids_deletes_nothing(filled: Run) -> None:
    for which, said in (("/dev/null", "/dev/null"), ("-", "`-`")):
        refused = filled("delete", "t", "--ids-file", which, "--yes", "--prove", stdin=b"\n\n")
        assert (refused.code, refused.out) == (2, b"")
        assert f"{said}" in refused.err
        assert "holds no id" in refused.err


def test_a_file_of_ids_deletes_exactly_these_ids(filled: Run, tmp_path: Path) -> None:
    """Of events whose ids differ only by line ends, blanks or quotes, each is deleted alone."""
    ids = ["a", "a\r", "a\n", "a\nb", "b", "a ", " a", '"a"', "\ufeffa", "a\u2028b", " "]
    lines = "".join(json.dumps({"id": each, "value": each}) + "\n" for each in ids)
    assert filled("produce", "t", "--format", "events", stdin=lines.encode()).code == 0
    file = tmp_path / "ids"

    def left() -> list[str]:
        replayed = filled("playback", "t", *ALL_TIMES_OPTIONS, "--json").rows()
        return [row["id"] for row in replayed if row["id"] in ids]

    assert sorted(left()) == sorted(ids)
    for refused in (
        b"a\nb\r\n",
        b"a\r",
        b"\xef\xbb\xbfa\n",
        b'"a\n',
        b'"a" \n',
        b'"\\ud800"\n',
        b'"a"b\n',
    ):
        file.write_bytes(refused)
        said = filled("delete", "t", "--ids-file", str(file), "--yes")
        assert (said.code, said.err.count("\n")) == (2, 1), refused
    assert sorted(left()) == sorted(ids)
    for each in list(ids):
        file.write_text(id_line(each) + "\n")
        assert filled("delete", "t", "--ids-file", str(file), "--yes").code == 0
        ids.remove(each)
        assert sorted(left()) == sorted(ids)


def test_a_file_of_ids_may_have_line_ends_of_windows() -> None:
    assert ids_of_lines("a\r\nb\r\n\r\nc", "list") == ["a", "b", "c"]
    assert ids_of_lines('"a\\r"\r\nb\r\n', "list") == ["a\r", "b"]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1)))
def test_lines_of_ids_are_read_back_as_they_were(ids: list[str]) -> None:
    assert ids_of_lines("\n".join(map(id_line, ids)), "list") == ids


def test_an_empty_value_must_be_meant(filled: Run) -> None:
    refused = filled("update", "t", "id-1", "-")
    assert (refused.code, "--empty" in refused.err) == (2, True)
    assert filled("get", "t", "id-1").out == b"v1\n"
    assert filled("update", "t", "id-1", "-", "--empty").code == 0
    assert filled("get", "t", "id-1").out == b"\n"


def test_on_a_terminal_it_asks_first(filled: Run) -> None:
    kept = filled("delete", "t", "id-0", stdin=b"n\n", terminal=True)
    assert (kept.code, kept.out) == (1, b"")
    assert "Found 1 event (t/0: 1).\n" in kept.err
    assert "Delete 1 id from `t`, for good?" in kept.err
    assert "nothing was deleted" in kept.err
    assert filled("get", "t", "id-0").out == b"v0\n"
    assert filled("delete", "t", "id-0", "--yes", stdin=b"", terminal=True).code == 0
    assert filled("get", "t", "id-0").code == 1


def test_audit_tells_who_what_when_and_why(filled: Run) -> None:
    filled("update", "t", "id-0", "-", "--who", "ada", "--why", "typo", stdin=b"secret")
    filled("delete", "t", "id-1", "id-2", "--who", "bob")
    update, delete = filled("audit", "t", "--json").rows()
    assert (update["op"], update["who"], update["why"], update["state"]) == (
        "update",
        "ada",
        "typo",
        "done",
    )
    assert [each["id"] for each in delete["events"]] == [id_hash("id-1"), id_hash("id-2")]
    table = filled("audit", "t")
    assert b"bob" in table.out
    assert b"secret" not in table.out
    assert filled("audit", "t", "--since", "9000-01-01", "--json").out == b""


def test_replay_gives_a_range_by_time(filled: Run) -> None:
    start, end = "1970-01-01T00:00:01.002Z", "1970-01-01T00:00:01.004Z"
    assert filled("playback", "t", "--start", start, "--end", end).out == b"v2\nv3\n"
    rows = filled("playback", "t", *ALL_TIMES_OPTIONS, "--json").rows()
    assert [row["id"] for row in rows] == [f"id-{n}" for n in range(6)]
    assert filled("playback", "t", "--from", start, "--end", end).out == b"v2\nv3\n"
    backwards = filled("playback", "t", "--start", end, "--end", start)
    assert backwards.code == 2
    assert f"range from `{end}` to `{start}`: runs backwards" in backwards.err


def test_journals_are_listed_with_urls_on_request(filled: Run) -> None:
    plain = filled("journals", "t", "--json").rows()
    assert sum(row["events"] for row in plain) == 6
    assert {row["url"] for row in plain} == {None}
    signed = filled("journals", "t", "--presign", "1h", "--json").rows()
    assert all(row["url"].startswith("file://") for row in signed)
    assert filled("journals", "t", "--presign", "1y").code == 2
    assert b"arrow" in filled("journals", "t").out


def test_produce_if_absent_refuses_ids_that_are_there(filled: Run) -> None:
    lines = b'{"id":"new","n":1}\n{"id":"id-3","n":2}\n'
    given = ("produce", "t", "--format", "json", "--id-field", "id", "--if-absent")
    refused = filled(*given, stdin=lines)
    assert refused.code == 1
    assert "id-3" in refused.err
    assert filled("get", "t", "new").code == 1
    assert filled(*given, stdin=lines.splitlines()[0]).code == 0
    assert filled("get", "t", "new").code == 0
    assert filled("produce", "t", "--if-absent", stdin=b"x").code == 2
    assert filled(*given, "--name", "n", stdin=b"x").code == 2


def test_archive_of_a_deleted_topic_is_erased_by_id_and_by_key(filled: Run) -> None:
    assert filled("archive", "create", "daily", "--source", "topic:t").code == 0
    assert filled("archive", "run", "daily", "--no-spark").code == 0
    early = filled("archive", "erase", "daily", "--id", "id-0", "--yes")
    assert (early.code, "tidelog delete t ID" in early.err) == (2, True)
    early = filled("archive", "erase", "daily", "--key", "k1", "--yes")
    assert (early.code, "tidelog delete t --key KEY" in early.err) == (2, True)
    assert filled("topic", "delete", "t", "--yes").code == 0
    assert "run `tidelog archive erase daily`" in filled("delete", "daily", "id-0").err
    assert "give --id or --key" in filled("archive", "erase", "daily").err
    some = filled("archive", "erase", "daily", "--id", "id-0", "--id", "no", "--yes", "--json")
    (row,) = some.rows()
    assert (some.code, row["erased"], row["missing"]) == (1, 1, ["no"])
    (row,) = filled("archive", "erase", "daily", "--key", "k1", "--yes", "--json").rows()
    assert (row["erased"], row["waiting"]) == (3, 0)
    left = filled("archive", "cat", "daily").out
    assert (b"v2" in left, b"v4" in left) == (True, True)
    assert not any(value in left for value in (b"v0", b"v1", b"v3", b"v5"))
    records = filled("archive", "audit", "daily", "--json").rows()
    assert [record["state"] for record in records] == ["done", "done"]
    by_key = filled("archive", "audit", "daily", "--key", "k1", "--json").rows()
    assert by_key == records[1:]
    by_other_key = filled("archive", "erase", "daily", "--key", "k9", "--yes")
    assert b"not found: no event of the archive has the key `k9`" in by_other_key.out


def test_erase_by_a_key_that_no_archived_event_has_fails(filled: Run) -> None:
    assert filled("archive", "create", "daily", "--source", "topic:t").code == 0
    assert filled("archive", "run", "daily", "--no-spark").code == 0
    assert filled("topic", "delete", "t", "--yes").code == 0
    misspelt = filled("archive", "erase", "daily", "--key", "k-1", "--yes", "--json")
    (row,) = misspelt.rows()
    assert (misspelt.code, row["erased"], row["left"]) == (1, 0, [])


def test_topic_and_archive_commands_leave_records_in_the_home_audit(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("archive", "create", "daily", "--source", "topic:orders")
    tidelog("archive", "delete", "daily", "--yes")
    tidelog("topic", "delete", "orders", "--yes")
    rows = tidelog("audit", "--json").rows()
    assert sorted((each["op"], each["what"]) for each in rows) == [
        ("archive create", "archive daily"),
        ("archive delete", "archive daily"),
        ("topic create", "topic orders"),
        ("topic delete", "topic orders"),
    ]
    assert all("@" in str(each["who"]) for each in rows)


def test_audit_says_which_events_only_archives_had(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t")
        home.append("t", [Event(b"%d" % n, key=b"k") for n in range(4)])
        home.archives.create("raw", source="topic:t").run()
        home.trim("t", ToOffsets({0: 3}))
    assert tidelog("delete", "t", "--key", "k", "--yes").code == 0
    said = tidelog("audit", "t").out.decode()
    assert "  3 only in archives  " in said


def test_audit_of_keys_and_ids_is_a_table_on_a_terminal_of_120_columns(
    filled: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled("delete", "t", "id-0", "id-1", "--who", "bob@laptop", "--why", "entered twice")
    how = ("--prove", "--yes", "--who", "bob@laptop", "--why", "request 2026-118")
    assert filled("delete", "t", "--key", "k1", *how).code == 0
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = filled("audit", "t").out.decode().splitlines()
    assert len(lines) == 7, "a line of names, and two for each of three records"
    assert max(map(len, lines)) <= 130, "with the escapes of a bold line"
    assert f"  {id_hash('id-0')[:19]} and 1 more  " in lines[1]
    assert f"  key {id_hash('k1')[:19]}  " in lines[3]
    assert lines[4] == "  request 2026-118"
    assert "  done   erased, sha256:" in lines[5]
