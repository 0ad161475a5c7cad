"""Lines as people and other programs see them, without the sidecar."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.formats.files import BYTES, batch, opened, read, table, write
from tidelog import Event
from tidelog.codec.event_json import event_lines
from tidelog.codec.formats import open_format
from tidelog.codec.formats.text_lines import json_records

AS_THEY_ARE = [
    b'{"a": 1}',
    b' [1, 2.5e3, "x\\n"] ',
    b"null",
    b"-0.0",
    '"ü\u2028"'.encode(),
    b'{"a": 1, "a": 2}',
    b"123456789012345678901234567890",
]
REWRITTEN = [
    (b'{\n  "a":\r\n1}', b'{   "a":  1}'),
    (b"plain text", b'"plain text"'),
    (b"", b'""'),
    (b'say "hi"\n', b'"say \\"hi\\"\\n"'),
    (b'{"a": 1', b'"{\\"a\\": 1"'),
    (b"NaN", b'"NaN"'),
    (b"1 2", b'"1 2"'),
    (b"01", b'"01"'),
    (b'"a\nb"', b'"\\"a\\nb\\""'),
    (b'"\xff"', b'{"base64":"Iv8i"}'),
    (b"[" * 5_000 + b"]" * 5_000, b'"' + b"[" * 5_000 + b"]" * 5_000 + b'"'),
    (None, b"null"),
]


def lines_of(values: list[Any]) -> tuple[list[bytes], pa.Table]:
    form = open_format("jsonlines", "none")
    events = batch([{"value": value} for value in values])
    file = write(form, [events])
    assert read(form, file).equals(table([events]))
    lines = file.data.split(b"\n")
    assert lines.pop() == b""
    return lines, pq.read_table(pa.BufferReader(file.sidecar))


def test_json_on_one_line_stands_as_it_is() -> None:
    lines, sidecar = lines_of(AS_THEY_ARE)
    assert lines == AS_THEY_ARE
    assert sidecar.column("value").null_count == len(AS_THEY_ARE)
    assert sidecar.column("length").to_pylist() == [len(line) for line in lines]


def test_other_values_become_json_and_are_kept_beside() -> None:
    lines, sidecar = lines_of([value for value, _ in REWRITTEN])
    assert lines == [line for _, line in REWRITTEN]
    assert sidecar.column("value").to_pylist() == [value for value, _ in REWRITTEN]
    assert sidecar.column("is_null").to_pylist() == [value is None for value, _ in REWRITTEN]


def strictly(text: str) -> Any:
    """Python's own reader, without the words that JSON does not have."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.none() | BYTES, min_size=1, max_size=5))
def test_every_line_is_json_to_python_too(values: list[bytes | None]) -> None:
    shaped = json_records(pa.array(values, pa.binary()))
    for value, record in zip(values, shaped.records.to_pylist(), strict=True):
        assert b"\n" not in record
        assert b"\r" not in record
        meant = json.loads(record)
        try:
            expected = None if value is None else strictly(value.decode())
        except ValueError:
            continue  # no JSON: a text or base64
        assert meant == expected


def test_duckdb_reads_lines_of_values(tmp_path: Path) -> None:
    events = batch([{"value": b'{"n": %d}' % n} for n in range(50)])
    for codec in ("gzip", "zstd", "none"):
        form = open_format("jsonlines", codec)
        (tmp_path / f"data{form.extension}").write_bytes(write(form, [events]).data)
    with duckdb.connect() as connection:
        for end in (".jsonl.gz", ".jsonl.zst", ".jsonl"):
            query = "SELECT count(*), sum(n) FROM read_json(?)"
            assert connection.execute(query, [str(tmp_path / f"data{end}")]).fetchall() == [
                (50, 1225)
            ]


def test_lines_of_events_are_what_consume_prints() -> None:
    rows = [
        {"value": b"text", "key": b"\xff", "id": "one", "type": "t", "timestamp": 41},
        {"value": None, "headers": [{"name": "a", "value": b"1"}, {"name": "a", "value": b"\xfe"}]},
    ]
    printed = event_lines(
        [
            Event(b"text", b"\xff", "one", 41, "t", (), "orders", 3, 0),
            Event(
                None,
                timestamp=1_700_000_000_000,
                headers=(("a", b"1"), ("a", b"\xfe")),
                topic="orders",
                partition=3,
                offset=1,
            ),
        ]
    )
    file = write(opened(("jsonlines", "none", {"mode": "events"})), [batch(rows)])
    assert file.data == printed


def test_delimited_text_is_the_values_and_the_delimiter() -> None:
    events = batch([{"value": b"a"}, {"value": None}, {"value": b"b\nc"}, {"value": b""}])
    lines = write(open_format("delimited"), [events])
    assert gzip.decompress(lines.data) == b"a\n\nb\nc\n\n"
    commas = write(opened(("delimited", "none", {"delimiter": ", "})), [events])
    assert commas.data == b"a, , b\nc, , "
    nothing = write(opened(("delimited", "none", {"delimiter": ""})), [events])
    assert nothing.data == b"ab\nc"


@pytest.mark.parametrize("name", ["jsonlines", "delimited", "sequence"])
def test_a_sidecar_is_a_table_that_people_can_read(name: str, tmp_path: Path) -> None:
    form = open_format(name)
    events = batch([{"value": b"{}", "key": b"k", "type": "t"}, {"value": None}])
    path = tmp_path / "_x.meta.parquet"
    path.write_bytes(write(form, [events]).sidecar or b"")
    with duckdb.connect() as connection:
        rows = connection.execute(
            'SELECT topic, partition, "offset", key, type, is_null FROM read_parquet(?)',
            [str(path)],
        ).fetchall()
    assert rows == [("orders", 3, 0, b"k", "t", False), ("orders", 3, 1, None, None, True)]
