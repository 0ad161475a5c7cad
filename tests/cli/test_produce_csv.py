"""``tidelog produce`` with CSV, and with lines as Windows ends them."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_log import consumed
from tests.support.cli_run import Run


def test_rows_of_csv_become_json_objects_with_the_names_of_the_header(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BATCH_BYTES", "_READ_BYTES"):
        monkeypatch.setattr(f"tidelog.api.input_lines.{name}", 7)
    tidelog("topic", "create", "t")
    text = (
        "\ufeffid,name,at\r\n"
        '1,"Ann, ""A""\r\nfrom here",2026-11-01T00:00:00Z\r\n'
        "\r\n"
        "2,Bob,1794657600\r\n"
    )
    fields = ("--key-field", "id", "--id-field", "id", "--time-field", "at")
    done = tidelog("produce", "t", "--format", "csv", *fields, "--json", stdin=text.encode())
    assert done.rows()[0]["events"] == 2, done.err
    events = [json.loads(line) for line in consumed(tidelog, "t", "c", "--json").splitlines()]
    assert [json.loads(each["value"]) for each in events] == [
        {"id": "1", "name": 'Ann, "A"\nfrom here', "at": "2026-11-01T00:00:00Z"},
        {"id": "2", "name": "Bob", "at": "1794657600"},
    ]
    assert [(each["id"], each["key"], each["timestamp"]) for each in events] == [
        ("1", "1", "2026-11-01T00:00:00.000Z"),
        ("2", "2", "2026-11-14T12:00:00.000Z"),
    ]


@pytest.mark.parametrize(
    ("text", "said", "stored"),
    [
        (b"id,n\n1,2\n3\n4,5\n", "line 3: has 1 field, and the header has 2", 1),
        (b'id,n\n1,2\n3,"x\n4,5\n', "line 3: a quoted field does not end", 1),
        (b'id,n\n1,2\n3,"x"y\n', "line 3: ", 1),
        (b"id,n\n1,2\n3,\xff\n", "line 3: is not UTF-8", 0),
        (b"id,id\n1,2\n", "line 1: the header needs a name of its own for each field", 0),
    ],
)
def test_invalid_csv_is_refused_by_its_line(
    tidelog: Run, text: bytes, said: str, stored: int
) -> None:
    tidelog("topic", "create", "t")
    done = tidelog("produce", "t", "--format", "csv", stdin=text)
    assert (done.code, said in done.err) == (1, True), done.err
    assert len(consumed(tidelog, "t", "c").splitlines()) == stored
    if stored:
        assert "produce the header, and the input from line 3 on" in done.err


def test_csv_under_a_name_waits_for_the_end_of_a_row(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    begun = b'id,note\n1,one\n2,"two\n'
    produce = ("produce", "t", "--format", "csv", "--name", "n")
    first = tidelog(*produce, "--json", stdin=begun)
    assert (first.code, first.rows()[0]["events"]) == (0, 1), first.err
    assert "line 3: has no newline yet" in first.err
    again = tidelog(*produce, "--json", stdin=begun + b'lines"\n3,three\n')
    assert (again.rows()[0]["events"], again.rows()[0]["repeated"]) == (2, 1)
    values = [json.loads(line)["note"] for line in consumed(tidelog, "t", "c").splitlines()]
    assert values == ["one", "two\nlines", "three"]


def test_lines_that_end_with_cr_and_lf_lose_both(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b"one\r\ntwo\r\n\r\nthree")
    tidelog("produce", "t", stdin=b"plain\nkept\r\n")
    assert consumed(tidelog, "t", "c") == b"one\ntwo\n\nthree\nplain\nkept\r\n"


def test_carriage_return_without_a_newline_stays(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    for text in (b"a\r", b"\r", b"b\r\nc"):
        assert tidelog("produce", "t", stdin=text).code == 0
    events = [json.loads(line) for line in consumed(tidelog, "t", "c", "--json").splitlines()]
    assert [each["value"] for each in events] == ["a\r", "\r", "b", "c"]
