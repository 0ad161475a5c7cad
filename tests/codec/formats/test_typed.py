"""Typed columns: which values fit, what becomes of them, and the reasons of those that do not."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import orc

from tests.codec.formats.files import batch, opened, write
from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.formats.base import MISFIT_SCHEMA, FormatSettings
from tidelog.codec.formats.typed import TypedColumns, open_columns

EVERYTHING = """
    a boolean, b tinyint, c smallint, d int, e bigint, f float, g double, h decimal(6, 2), i string,
    j binary, k date, l timestamp, m array<int>, n map<string, double>,
    o struct<x: int, y: array<struct<z: string>>>
"""


def columns(schema: str, **settings: Any) -> TypedColumns:
    found = open_columns("parquet", FormatSettings(schema=schema, **settings))
    assert isinstance(found, TypedColumns)
    return found


def fit(schema: str, values: list[Any], **settings: Any) -> tuple[list[Any], list[str]]:
    """The typed cells of those that fit, and the errors of those that do not."""
    given = columns(schema, **settings)
    fitted, misfits = given.fit(batch([{"value": value} for value in values]))
    fitted.validate(full=True)
    assert fitted.schema.equals(given.schema)
    rows = [{name: row[name] for name in given.fields.names} for row in fitted.to_pylist()]
    if misfits is None:
        return rows, []
    misfits.validate(full=True)
    assert misfits.schema.equals(MISFIT_SCHEMA)
    good, bad = fitted.column(given.names["offset"]), misfits.column("offset")
    assert sorted([*good.to_pylist(), *bad.to_pylist()]) == list(range(len(values)))
    assert misfits.column("value").to_pylist() == [values[offset] for offset in bad.to_pylist()]
    return rows, misfits.column("error").to_pylist()


def test_every_type_takes_its_values() -> None:
    value = {
        "a": True,
        "b": -128,
        "c": 32767,
        "d": -(2**31),
        "e": 2**63 - 1,
        "f": 0.5,
        "g": 1,
        "h": 1234.5,
        "i": "ü",
        "j": "AAE=",
        "k": "2026-11-15",
        "l": "2026-11-15T10:00:00.000001+02:00",
        "m": [1, None],
        "n": {"x": 1.5, "y": None},
        "o": {"x": None, "y": [{"z": "q"}, None, {}], "unknown": 1},
        "unknown": {"a": [1]},
    }
    rows, errors = fit(EVERYTHING, [json.dumps(value).encode(), b"{}", b'{"o": {}, "m": []}'])
    assert errors == []
    nothing = dict.fromkeys("abcdefghijklmno")
    assert rows == [
        {
            "a": True,
            "b": -128,
            "c": 32767,
            "d": -(2**31),
            "e": 2**63 - 1,
            "f": 0.5,
            "g": 1.0,
            "h": Decimal("1234.50"),
            "i": "ü",
            "j": b"\x00\x01",
            "k": dt.date(2026, 11, 15),
            "l": dt.datetime(2026, 11, 15, 8, 0, 0, 1, dt.UTC),
            "m": [1, None],
            "n": [("x", 1.5), ("y", None)],
            "o": {"x": None, "y": [{"z": "q"}, None, {"z": None}]},
        },
        nothing,
        {**nothing, "o": {"x": None, "y": None}, "m": []},
    ]


@pytest.mark.parametrize(
    ("schema", "value", "error"),
    [
        ("a int", None, "it has no value"),
        ("a int", b"", "Input data was truncated"),
        ("a int", b"text", "JSON is malformed: invalid character (byte"),
        ("a int", b'{"a": 1', "Input data was truncated"),
        ("a int", b"[1]", "Expected `object`, got `array`"),
        ("a int", b"null", "Expected `object`, got `null`"),
        ("a int", b'{"a": "1"}', "Expected `int | null`, got `str` - at `$.a`"),
        ("a int", b'{"a": 1.5}', "Expected `int | null`, got `float` - at `$.a`"),
        ("a int", b'{"a": true}', "Expected `int | null`, got `bool` - at `$.a`"),
        ("a int", b'{"a": 2147483648}', "Expected `int` <= 2147483647 - at `$.a`"),
        ("a bigint", b'{"a": 9223372036854775808}', "Expected `int` <= 9223372036854775807"),
        ("a tinyint", b'{"a": -129}', "Expected `int` >= -128 - at `$.a`"),
        ("a float", b'{"a": 1e39}', "Expected `float` <= 3.402"),
        ("a double", b'{"a": 1e999}', "Number out of range - at `$.a`"),
        ("a boolean", b'{"a": 0}', "Expected `bool | null`, got `int` - at `$.a`"),
        ("a string", b'{"a": {}}', "Expected `str | null`, got `object` - at `$.a`"),
        ("a string", b'{"a": "\xff"}', "'utf-8' codec can't decode"),
        ("a binary", b'{"a": "?"}', "Invalid base64 encoded string - at `$.a`"),
        ("a date", b'{"a": "2026-02-30"}', "Invalid RFC3339 encoded date - at `$.a`"),
        ("a timestamp", b'{"a": "yesterday"}', "Invalid RFC3339 encoded datetime - at `$.a`"),
        ("a timestamp", b'{"a": true}', "Expected `int | float | datetime | null`, got `bool`"),
        ("a timestamp", b'{"a": 1e30}', "1e+30 is no time before the year 10000"),
        ("a decimal(4, 2)", b'{"a": 1.234}', "1.234 does not fit into decimal(4, 2) - in `a`"),
        ("a decimal(4, 2)", b'{"a": 100}', "100 does not fit into"),
        ("a decimal(4, 2)", b'{"a": "NaN"}', "'NaN' is not a valid decimal128 number"),
        ("a int NOT NULL", b"{}", "Object missing required field `a`"),
        ("a int NOT NULL", b'{"a": null}', "Expected `int`, got `null` - at `$.a`"),
        ("a array<int>", b'{"a": [1, "2"]}', "Expected `int | null`, got `str` - at `$.a[1]`"),
        ("a map<string, int>", b'{"a": {"k": []}}', "got `array` - at `$.a[...]`"),
        ("a struct<`b c`: int>", b'{"a": {"b c": "x"}}', "got `str` - at `$.a.b c`"),
        ("a struct<b: timestamp>", b'{"a": {"b": 1e30}}', "1e+30 is no time"),
        ("a string", b'{"b": ' + b"[" * 100_000, "is nested too deeply: the limit is 200 levels"),
    ],
)
def test_a_misfit_says_why(schema: str, value: bytes | None, error: str) -> None:
    rows, errors = fit(schema, [b'{"a": null}' if "NOT" not in schema else b'{"a": 1}', value])
    assert len(rows) == 1
    (found,) = errors
    assert error in found
    assert "\n" not in found


def test_misfits_that_only_arrow_notices_are_found_among_many() -> None:
    values = [b'{"a": %d.25}' % n for n in range(1_000)]
    for index in (0, 500, 999):
        values[index] = b'{"a": 1.001}'
    rows, errors = fit("a decimal(5, 2)", values)
    assert len(rows) == 997
    assert len(errors) == 3
    assert rows[0] == {"a": Decimal("1.25")}


def test_numbers_are_times_by_their_size() -> None:
    second = 1_700_000_000
    values = [
        second,
        second + 0.5,
        second * 10**3 + 1,
        second * 10**6 + 1,
        second * 10**9 + 999,
        0,
        -1,
    ]
    rows, errors = fit("at timestamp", [json.dumps({"at": each}).encode() for each in values])
    assert errors == []
    start = dt.datetime.fromtimestamp(second, dt.UTC)
    assert [row["at"] - start for row in rows[:5]] == [
        dt.timedelta(0),
        dt.timedelta(milliseconds=500),
        dt.timedelta(milliseconds=1),
        dt.timedelta(microseconds=1),
        dt.timedelta(0),
    ]
    assert rows[6]["at"] == dt.datetime(1969, 12, 31, 23, 59, 59, tzinfo=dt.UTC)


def test_a_strict_schema_takes_no_other_fields() -> None:
    values = [b'{"a": {"b": 1}}', b'{"a": {"b": 1, "c": 2}}', b'{"d": 1}']
    assert fit("a struct<b: int>", values) == (
        [{"a": {"b": 1}}, {"a": {"b": 1}}, {"a": None}],
        [],
    )
    rows, errors = fit("a struct<b: int>", values, strict=True)
    assert rows == [{"a": {"b": 1}}]
    assert errors == [
        "Object contains unknown field `c` - at `$.a`",
        "Object contains unknown field `d`",
    ]


def test_names_that_collide_are_told_apart() -> None:
    given = columns("id bigint, Timestamp timestamp, value string", keep_value=True)
    assert given.schema.names == [
        "topic",
        "partition",
        "offset",
        "_tidelog_timestamp",
        "_tidelog_id",
        "key",
        "_tidelog_value",
        "type",
        "headers",
        "id",
        "Timestamp",
        "value",
    ]
    assert "value" in columns("a int").names
    assert "value" not in columns("a int", keep_value=False).names
    for name in ("parquet", "orc", "avro"):
        form = opened(
            (name, "none", {"schema": "id int, timestamp_ms int, value int", "keep_value": True})
        )
        events = batch([{"value": b'{"id": 7, "timestamp_ms": 8, "value": 9}', "id": "x"}])
        file = write(form, [events])
        assert next(form.read(file.data)).equals(events)


def test_all_rows_may_be_misfits() -> None:
    form = opened(("parquet", "zstd", {"schema": "a int"}))
    file = write(form, [batch([{"value": b"x"}, {"value": None}])])
    assert pq.read_table(pa.BufferReader(file.data)).num_rows == 0
    assert file.misfits is not None
    assert file.misfits.column("error").to_pylist()[1] == "it has no value"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2**31, "x", "ü"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


def plainly(value: Any, kind: pa.DataType) -> Any:
    """What a value is as a type, told by Python alone; ``TypeError`` where it is none."""
    if value is None:
        return None
    if pa.types.is_int32(kind) and type(value) is int and -(2**31) <= value < 2**31:
        return value
    if pa.types.is_string(kind) and type(value) is str:
        return value
    if pa.types.is_map(kind) and type(value) is dict:
        return [(name, plainly(each, kind.item_type)) for name, each in value.items()]
    if pa.types.is_struct(kind) and type(value) is dict:
        return {field.name: plainly(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind) and not pa.types.is_map(kind) and type(value) is list:
        return [plainly(each, kind.value_type) for each in value]
    raise TypeError(value)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from("abcd"), JSON_VALUES, max_size=4), max_size=6))
def test_the_same_values_fit_as_by_a_plain_reading(values: list[dict[str, Any]]) -> None:
    schema = (
        "a int, b string, c struct<a: array<int>, b: map<string, string>>, d array<struct<a: int>>"
    )
    kind = pa.struct(list(columns(schema).fields))
    expected = []
    for value in values:
        try:
            expected.append(plainly(value, kind))
        except TypeError:
            continue
    rows, errors = fit(schema, [json.dumps(value).encode() for value in values])
    assert rows == expected
    assert len(errors) == len(values) - len(expected)


def test_every_format_holds_every_type() -> None:
    value = (
        b'{"a": true, "b": 1, "c": 2, "d": 3, "e": 4, "f": 0.5, "g": 0.25, "h": -1.5, "i": "s",'
        b' "j": "AAE=", "k": "2026-11-15", "l": "2026-11-15T10:00:00Z", "m": [1, null],'
        b' "n": {"x": 1.5}, "o": {"x": 1, "y": [{"z": "q"}]}}'
    )
    events = batch(
        [{"value": value, "key": b"k"}, {"value": b"{}"}, {"value": b'{"m": [], "n": {}}'}]
    )
    expected, _ = columns(EVERYTHING).fit(events)
    names = columns(EVERYTHING).fields.names
    files = {
        name: write(opened((name, "none", {"schema": EVERYTHING})), [events]).data
        for name in ("parquet", "orc", "avro")
    }
    assert pq.read_table(pa.BufferReader(files["parquet"])).to_pylist() == expected.to_pylist()
    found = orc.ORCFile(pa.BufferReader(files["orc"])).read()
    assert found.select(names).cast(expected.select(names).schema).to_pylist() == (
        expected.select(names).to_pylist()
    )
    records: list[Any] = list(fastavro.reader(io.BytesIO(files["avro"])))
    for record in records:
        record["n"] = None if record["n"] is None else list(record["n"].items())
    assert [{name: record[name] for name in names} for record in records] == (
        expected.select(names).to_pylist()
    )
    assert [record["offset"] for record in records] == [0, 1, 2]
    assert set(records[0]) == {*EVENT_SCHEMA.names, *names}
