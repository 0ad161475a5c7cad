"""A proof reads what files of others hold beside rows and text: metadata, names, dictionaries."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from tests.support.archive_look import a_home
from tidelog import Event, Home
from tidelog.erasure.file_metadata import gzip_names

ID, KEY = "order-17", b"customer-7"
WORDS = ["offset", "string", "key", "long", "record", "struct", "null", "zstandard", "pandas"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"v", KEY, each, n) for n, each in enumerate([ID, *WORDS])])
        yield made


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def arrow(table: pa.Table, metadata: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema, metadata=metadata) as writer:
        writer.write_table(table)
    return file.getvalue()


def in_orc(table: pa.Table) -> bytes:
    file = io.BytesIO()
    orc.write_table(table, file)
    return file.getvalue()


def avro(*, doc: str = "", metadata: dict[str, str] | None = None) -> bytes:
    file, fields = io.BytesIO(), [{"name": "a", "type": "string", "doc": doc}]
    schema = {"type": "record", "name": "r", "fields": fields}
    fastavro.writer(file, schema, [{"a": "x"}], metadata=metadata)
    return file.getvalue()


def gzipped(name: str) -> bytes:
    file = io.BytesIO()
    with gzip.GzipFile(name, "wb", fileobj=file) as lines:
        lines.write(b"hello\n")
    return file.getvalue()


def filtered(*values: Any) -> pa.DictionaryArray:
    """Returns a column of categories, of which a filter has left the first."""
    return pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(values))


PLAIN = pa.table({"a": ["x", "y"]})
OF_FIELD = pa.schema([pa.field("a", pa.string(), metadata={"of": ID})])
NESTED = pa.StructArray.from_arrays([filtered("x", f"of {ID}")], ["b"])
OURS = {"id": ["i", "j"], "key": [b"x", b"y"]}
CASES: dict[str, Callable[[], bytes]] = {
    "metadata": lambda: parquet(PLAIN.replace_schema_metadata({"of": json.dumps({"n": [ID]})})),
    "field": lambda: parquet(pa.Table.from_arrays([PLAIN["a"]], schema=OF_FIELD)),
    "column": lambda: parquet(pa.table({f"of {ID}": pa.array([], pa.string())})),
    "categories": lambda: parquet(pa.table({"a": filtered("x", f"of {ID}")})),
    "keys": lambda: parquet(pa.table({"a": filtered(b"x", b"of " + KEY)})),
    "ours": lambda: parquet(pa.table({**OURS, "id": filtered("x", ID)})),
    "ours, metadata": lambda: parquet(pa.table(OURS).replace_schema_metadata({"of": ID})),
    "arrow": lambda: arrow(PLAIN.replace_schema_metadata({"of": ID})),
    "arrow's footer": lambda: arrow(PLAIN, {"of": ID}),
    "arrow's categories": lambda: arrow(pa.table({"a": NESTED})),
    "orc": lambda: in_orc(pa.Table.from_arrays([PLAIN["a"]], schema=OF_FIELD)),
    "avro": lambda: avro(metadata={"of": ID}),
    "avro's schema": lambda: avro(doc=f"of {ID}"),
    "gzip": lambda: gzipped(f"{ID}.txt"),
    "two of gzip": lambda: gzipped("x") + gzipped(f"{ID}.txt"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_holds_beside_its_rows_is_searched(
    home: Home, tmp_path: Path, case: str
) -> None:
    home.delete_key("t", KEY)
    file = tmp_path / "o" / "export" / "file"
    file.parent.mkdir()
    file.write_bytes(CASES[case]())
    proof = home.purge_and_prove("t", ids=[ID], keys=[KEY])
    assert [each.object for each in proof.traces] == ["export/file"]
    file.unlink()
    assert home.prove_erased("t", ids=[ID], keys=[KEY]).is_clean


@pytest.mark.parametrize("format", ["parquet", "orc", "avro"])
def test_words_of_schemas_are_no_traces(home: Home, tmp_path: Path, format: str) -> None:
    home.append("t", [Event(b"stays", b"other", "other", 1)])
    home.archives.create("day", source="topic:t", format=format).run()
    home.delete("t", [*WORDS, ID])
    home.purge("t")
    (tmp_path / "o" / "export").mkdir()
    for info in [*home.store.list("archives/day/g1/"), *home.store.list("topics/")]:
        home.store.copy(info.key, f"export/{info.key.rpartition('/')[2]}")
    frame = pa.table({"a": ["x"], "b": [[1]]}).to_pandas()
    (tmp_path / "o" / "export" / "frame").write_bytes(parquet(pa.Table.from_pandas(frame)))
    (tmp_path / "o" / "export" / "avro").write_bytes(avro())
    assert len(list(home.store.list("export/"))) >= 4
    assert home.prove_erased("t", ids=[*WORDS, ID]).traces == []


def test_name_behind_the_extra_field_of_a_gzip_header_is_read() -> None:
    head = b"\x1f\x8b\x08\x1c" + bytes(6)
    assert list(gzip_names(head + b"\x02\0ab" + b"a name\0a comment\0rest")) == [
        "a name",
        "a comment",
    ]
    assert list(gzip_names(head + b"\x02\0ab" + b"no end")) == []
    assert list(gzip_names(b"text " + head)) == []
