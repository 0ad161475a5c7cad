"""Schemas of typed columns: DDL and JSON Schema, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog import InvalidError
from tidelog.codec.formats.schema import parse_schema

TIME = pa.timestamp("us", "UTC")


def test_ddl_of_every_type() -> None:
    text = """
        a boolean, b tinyint, c SMALLINT, d int, e BigInt NOT NULL, f float, g double,
        h decimal(12, 3), i decimal, j string, k binary, l date, m timestamp,
        n array<int>, o map<string, array<double>>, `p q``r` struct<x: int NOT NULL,
        y struct<z: long>>
    """
    inner = pa.struct(
        [pa.field("x", pa.int32(), nullable=False), ("y", pa.struct([("z", pa.int64())]))]
    )
    assert parse_schema(text) == pa.schema(
        [
            ("a", pa.bool_()),
            ("b", pa.int8()),
            ("c", pa.int16()),
            ("d", pa.int32()),
            pa.field("e", pa.int64(), nullable=False),
            ("f", pa.float32()),
            ("g", pa.float64()),
            ("h", pa.decimal128(12, 3)),
            ("i", pa.decimal128(10, 0)),
            ("j", pa.string()),
            ("k", pa.binary()),
            ("l", pa.date32()),
            ("m", TIME),
            ("n", pa.list_(pa.int32())),
            ("o", pa.map_(pa.string(), pa.list_(pa.float64()))),
            ("p q`r", inner),
        ]
    )


def test_json_schema_makes_the_same_columns() -> None:
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["id", "maybe"],
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "maybe": {"type": ["string", "null"]},
            "at": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"},
            "mail": {"type": "string", "format": "email"},
            "raw": {"type": "string", "contentEncoding": "base64"},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "user": {"$ref": "#/$defs/a~1b"},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "$defs": {
            "a/b": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "ok": {"type": "boolean"}},
            }
        },
    }
    user = pa.struct([pa.field("name", pa.string(), nullable=False), ("ok", pa.bool_())])
    assert parse_schema(json.dumps(document)) == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("maybe", pa.string()),
            ("at", TIME),
            ("day", pa.date32()),
            ("mail", pa.string()),
            ("raw", pa.binary()),
            ("price", pa.float64()),
            ("tags", pa.list_(pa.field("item", pa.string(), nullable=False))),
            ("user", user),
            ("counts", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema: has no fields"),
        ("  ", "schema: has no fields"),
        ("a", "schema: ends before the type of `a`"),
        ("a int,", "schema: ends before a field's name"),
        ("a int b int", "schema: `b` is unexpected"),
        ("a innt", "the unknown type `innt` (did you mean `int`?)"),
        ("a int, A string", "schema: field `A` is there twice"),
        ("a struct<x int", "schema: has no `>` after `struct` of `a`"),
        ("a array", "schema: has no `<` after `array` of `a`"),
        ("a map<int, int>", "schema: map `a` has keys that are not strings"),
        ("a decimal(39, 0)", "schema: decimal(39, 0) of `a` cannot be"),
        ("a decimal(3, 4)", "schema: decimal(3, 4) of `a` cannot be"),
        ("a decimal(x)", "schema: decimal `a` has `x` digits"),
        ("a int NOT", "schema: field `a` is NOT what?"),
        ("a int COMMENT 'x'", "schema: field `a` has a comment"),
        ("`a int", "schema: ``a int` is not understood"),
        (", a int", "schema: `,` is in the place of a field's name"),
        ("_tidelog_offset int", "schema: field `_tidelog_offset` begins with _tidelog_"),
        ("a " + "array<" * 30 + "int" + ">" * 30, "schema: field `a` is nested too deeply"),
        (", ".join(f"f{n} int" for n in range(2_001)), "schema: has more than 2000 fields"),
        ("x" * (1 << 21), "schema: has 2097152 characters"),
        ("{", "schema: is not valid JSON"),
        ("{}", "schema: $ has the type None"),
        ('{"type": "array", "items": {"type": "string"}}', "schema: describes no object"),
        ('{"type": "object"}', "schema: $ is an object without properties"),
        ('{"type": "object", "properties": {"a": 1}}', "schema: $.a is not an object"),
        (
            '{"type": "object", "properties": {"a": {"type": "int"}}}',
            "$.a has the unknown type `int`",
        ),
        (
            '{"type": "object", "properties": {"a": {"type": ["string", "integer"]}}}',
            "schema: $.a has the type",
        ),
        (
            '{"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {}]}}}',
            "schema: $.a may be of several types",
        ),
        (
            '{"type": "object", "properties": {"a": {"type": "array"}}}',
            "schema: $.a[] is not an object",
        ),
        ('{"type": "object", "properties": {"a": {"$ref": "#"}}}', "schema: $.a refers to #"),
        ('{"type": "object", "properties": {"a": {"$ref": "#/x"}}}', "refers to #/x, which is not"),
        (
            '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}',
            "schema: $.a is nested too deeply",
        ),
        ('{"type": "object", "properties": {"": {"type": "string"}}}', "a field without a name"),
    ],
)
def test_a_malformed_schema_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidError) as error:
        parse_schema(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text() | st.text('ab <>(),:`int{}"'))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        found = parse_schema(text)
    except InvalidError:
        return
    assert len(found) > 0


JSON_PARTS: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(["string", "object", "array", "null", "integer", "#/a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "$ref", "a", "required", "format"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["type", "properties", "$ref", "anyOf"]), JSON_PARTS))
def test_no_document_raises_anything_else(document: dict[str, Any]) -> None:
    document.setdefault("type", "object")
    try:
        parse_schema(json.dumps(document))
    except InvalidError as error:
        assert "\n" not in str(error)  # noqa: PT017
