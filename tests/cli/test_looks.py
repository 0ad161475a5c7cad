"""``consumer``, ``peek`` and ``doctor``: looks at consumers, newest events and the home."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_run import Run


def test_consumer_is_listed_shown_moved_and_deleted(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("produce", "orders", stdin=b"a\nb\nc\n")
    tidelog("consume", "orders", "--name", "billing")
    assert tidelog("consumer", "list", "--json").rows() == [
        {"topic": "orders", "consumer": "billing", "lag": 0}
    ]
    moved = tidelog("consumer", "seek", "orders", "billing", "1", "--yes", "--json").rows()
    assert moved == [{"partition": 0, "from": 3, "to": 1, "skipped": 0, "again": 2}]
    (shown,) = tidelog("consumer", "show", "orders", "billing", "--json").rows()
    assert (shown["cursor"], shown["end"], shown["lag"]) == (1, 3, 2)
    assert tidelog("consume", "orders", "--name", "billing").out == b"b\nc\n"
    assert tidelog("consumer", "delete", "orders", "billing", "--yes").code == 0
    assert tidelog("consumer", "list", "orders", "--json").rows() == []
    assert tidelog("consumer", "show", "orders", "billing").code == 1


def test_seek_asks_first_and_refuses_what_is_not_a_position(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("produce", "orders", stdin=b"a\n")
    tidelog("consume", "orders", "--name", "billing")
    assert "--yes" in tidelog("consumer", "seek", "orders", "billing", "earliest").err
    wrong = tidelog("consumer", "seek", "orders", "billing", "soon", "--yes")
    assert (wrong.code, wrong.out) == (2, b"")


def test_peek_prints_the_newest_events(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    assert tidelog("peek", "orders").out == b""
    tidelog("produce", "orders", stdin=b"a\nb\nc\n")
    assert tidelog("peek", "orders", "--max", "2").out == b"b\nc\n"
    rows = tidelog("peek", "orders", "--json").rows()
    assert [row["value"] for row in rows] == ["a", "b", "c"]
    assert tidelog("lag", "--json").rows() == []


def test_doctor_prints_its_checks(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    done = tidelog("doctor", "--json")
    assert done.code == 0, done.err
    assert {"home", "store", "catalog"} <= {row["name"] for row in done.rows()}
    assert tidelog("--home", "nowhere", "doctor").code == 1


@pytest.mark.parametrize(
    "words",
    [["topic", "list"], ["lag"], ["archive", "list"], ["consumer", "list"], ["sql", "show tables"]],
    ids=" ".join,
)
def test_a_command_that_only_looks_creates_no_home(
    tidelog: Run, tmp_path: Path, words: list[str]
) -> None:
    looked = tidelog(*words)
    assert looked.code == 0
    assert ("There are no" in looked.err) == (words[0] != "sql")
    assert "topic `orders`: not found" in tidelog("peek", "orders").err
    assert not (tmp_path / "tidelog-data").exists()
    assert tidelog("topic", "create", "orders").code == 0
    assert (tmp_path / "tidelog-data").exists()


def test_list_and_show_count_the_same_events(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    lines = b'{"id": "a"}\n{"id": "b"}\n'
    tidelog("produce", "orders", "--format", "json", "--id-field", "id", stdin=lines)
    assert tidelog("delete", "orders", "a", "--prove").code == 0
    (listed,) = tidelog("topic", "list", "--json").rows()
    (shown,) = tidelog("topic", "show", "orders", "--json").rows()
    assert (listed["events"], shown["events"]) == (1, 1)


def test_mistyped_consumer_and_option_are_answered_with_a_hint(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("consume", "orders", "--name", "billing")
    shown = tidelog("consumer", "show", "orders", "biling")
    assert "not found (did you mean `billing`?): see" in shown.err
    sought = tidelog("consumer", "seek", "orders", "billing", "--to", "10")
    assert sought.err.startswith("error: --to: TO is an argument: give it without `--to`")
    deleted = tidelog("consumer", "delete", "orders", "biling", "--yes")
    assert deleted.err == shown.err


def test_consumer_seeks_to_a_relative_time(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("produce", "orders", stdin=b"a\nb\n")
    tidelog("consume", "orders", "--name", "billing")
    wanted = {"partition": 0, "from": 2, "to": 0, "skipped": 0, "again": 2}
    moved = tidelog("consumer", "seek", "orders", "billing", "-15m", "--yes", "--json")
    assert moved.rows() == [wanted]
    again = tidelog("consumer", "seek", "--yes", "--json", "orders", "billing", "--", "-15m")
    assert again.rows() == [{**wanted, "from": 0, "again": 0}]


def test_trim_reads_sizes_as_people_write_them(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    tidelog("produce", "orders", stdin=b"a\nb\n")
    (kept,) = tidelog("trim", "orders", "--keep-bytes", "1.5 MB", "--json").rows()
    assert kept["events"] == 0
    wrong = tidelog("trim", "orders", "--keep-bytes", "much")
    assert "size `much`: give bytes, or a number and a unit: 200MB, 64MiB" in wrong.err
    (gone,) = tidelog("trim", "orders", "--keep-bytes", "1", "--json").rows()
    assert gone["events"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["audit", "orders"], "The audit has no such records."),
        (["journals", "orders"], "There are no journals yet"),
        (["pipeline", "list"], "There are no pumps, streams or restores yet."),
        (["playback", "--list"], "There are no named playbacks yet"),
    ],
)
def test_empty_list_says_so(tidelog: Run, words: list[str], says: str) -> None:
    tidelog("topic", "create", "orders")
    assert says in tidelog(*words).err
    assert tidelog(*words, "--json").err == ""
