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
from tidelog.codec.event_batch import EVENT_SCHEMA
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
        ("a timestamp", b'{"a": true}', "Expected an ISO 8601 time or a number, got `bool`"),
        ("a timestamp", b'{"a": 1e30}', "1E+30 is not a time in the years 0001 to 9999"),
        ("a decimal(4, 2)", b'{"a": 1.234}', "1.234 does not fit into decimal(4, 2) - in `a`"),
        ("a decimal(4, 2)", b'{"a": 100}', "100 does not fit into"),
        ("a decimal(4, 2)", b'{"a": "NaN"}', "`NaN` is not a valid decimal number - at `$.a`"),
        ("a int NOT NULL", b"{}", "Object missing required field `a`"),
        ("a int NOT NULL", b'{"a": null}', "Expected `int`, got `null` - at `$.a`"),
        ("a array<int>", b'{"a": [1, "2"]}', "Expected `int | null`, got `str` - at `$.a[1]`"),
        ("a map<string, int>", b'{"a": {"k": []}}', "got `array` - at `$.a[...]`"),
        ("a struct<`b c`: int>", b'{"a": {"b c": "x"}}', "got `str` - at `$.a.b c`"),
        ("a struct<b: timestamp>", b'{"a": {"b": 1e30}}', "1E+30 is not a time"),
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


@pytest.mark.parametrize(
    "value",
    [
        '"9999-12-31T23:59:59-14:00"',  # in the year 10000 of UTC
        '"0001-01-01T00:00:00+14:00"',  # in the year 0
        "253402300800",
        "253402300800000",
        "-62135596800.000001",
        "-62135596801",
        "-99999999999",
        "1e999999999",
    ],
)
@pytest.mark.parametrize("shape", ["%s", "[%s]", '{"k": %s}', '{"b": %s}'])
def test_time_outside_of_the_calendar_is_a_misfit(value: str, shape: str) -> None:
    kind = {"%": "timestamp", "[": "array<timestamp>"}.get(shape[0], "map<string, timestamp>")
    kind = "struct<b: timestamp>" if "b" in shape else kind
    rows, errors = fit(f"a {kind}", [b'{"a": %s}' % (shape % value).encode()])
    assert rows == []
    assert "is not a time in the years 0001 to 9999 of UTC - at `$.a" in errors[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"9999-12-31T23:59:59.999999999Z"', "9999-12-31T23:59:59.999999+00:00"),
        ('"9999-12-31T23:59:59.999999+00:00"', "9999-12-31T23:59:59.999999+00:00"),
        ('"0001-01-01T00:00:00Z"', "0001-01-01T00:00:00+00:00"),
        ("253402300799.999999", "9999-12-31T23:59:59.999999+00:00"),
        ("-62135596800", "0001-01-01T00:00:00+00:00"),
        ('"2024-01-31T23:59:59.9999999"', "2024-01-31T23:59:59.999999+00:00"),
        ('"2024-01-31T23:59:59.123456789+05:30"', "2024-01-31T18:29:59.123456+00:00"),
        ('"1969-12-31T23:59:59.1234567Z"', "1969-12-31T23:59:59.123456+00:00"),
        ("1700000000.9999999", "2023-11-14T22:13:20.999999+00:00"),
        ("1700000000123.5678", "2023-11-14T22:13:20.123567+00:00"),
        ("1700000000123456789", "2023-11-14T22:13:20.123456+00:00"),
        ("-0.0000001", "1969-12-31T23:59:59.999999+00:00"),
    ],
)
def test_digits_after_the_microseconds_are_cut_toward_the_past(value: str, expected: str) -> None:
    rows, errors = fit("a timestamp", [b'{"a": %s}' % value.encode()])
    assert errors == []
    assert rows == [{"a": dt.datetime.fromisoformat(expected)}]


@pytest.mark.parametrize("text", ["1_0", " 1 ", "\u0661", "0x1", "1e", ".", "Infinity", ""])
def test_decimal_text_has_digits_a_point_and_an_exponent_alone(text: str) -> None:
    rows, errors = fit("a decimal(8, 2)", [json.dumps({"a": text}).encode()])
    assert rows == []
    assert "is not a valid decimal number - at `$.a`" in errors[0]


def test_decimal_is_exact() -> None:
    texts = [
        "123456.78",
        '"123456.78"',
        "1e2",
        '"-1E+2"',
        "12",
        "0.100",
        '"+01."',
        "1e-99999999999999999999",
    ]
    rows, errors = fit("a decimal(8, 2)", [b'{"a": %s}' % text.encode() for text in texts])
    found = [Decimal(text) for text in ("123456.78", "123456.78", "100", "-100", "12", "0.1", "1")]
    assert [row["a"] for row in rows] == found
    assert errors == ["1e-99999999999999999999 has too large an exponent - at `$.a`"]


def test_float_and_double_hold_the_nearest_number() -> None:
    rows, errors = fit("a float, b double", [b'{"a": 16777217, "b": 9007199254740993}'])
    assert errors == []
    assert rows == [{"a": 16777216.0, "b": 9007199254740992.0}]


def test_integers_are_exact() -> None:
    values = [b'{"a": 9007199254740993}', b'{"a": 1.0}', b'{"a": 9007199254740993.0}']
    rows, errors = fit("a bigint", values)
    assert rows == [{"a": 9007199254740993}]
    assert errors == ["Expected `int | null`, got `float` - at `$.a`"] * 2


def test_null_and_other_json_are_misfits_of_times_and_decimals() -> None:
    for kind in ("timestamp", "decimal(4, 2)"):
        rows, errors = fit(
            f"a {kind} NOT NULL", [b'{"a": %s}' % x for x in (b"null", b"[]", b"{}")]
        )
        assert rows == []
        assert [each.partition("got ")[2] for each in errors] == [
            "`null` - at `$.a`",
            "`array` - at `$.a`",
            "`object` - at `$.a`",
        ]


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
