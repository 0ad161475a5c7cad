"""Repeated names in JSON: the last one counts, whatever kind of value it has."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.codec.parsers.layouts import batch
from tidelog.codec.parsers.base import Spec
from tidelog.codec.parsers.json import JsonField
from tidelog.codec.parsers.times import Engine
from tidelog.model.limits import NESTING_MAX

KINDS = ["null", "true", "7", "1e2", '"s"', "[]", '["x"]', "{}", '{"other":1}', ' "a" ']


def nested(*levels: tuple[str, str]) -> list[str]:
    """Objects with each name twice; each level has every kind of value first or last."""
    found = ['"inner"', *KINDS]
    for name, spelled in reversed(levels):
        values = [*found, *KINDS]
        pairs = [*product(values, KINDS), *product(KINDS, values), (found[0], found[-1])]
        found = [f'{{"{name}":{one},"{spelled}" : {other}}}' for one, other in pairs]
    return found


def expected(value: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


@pytest.mark.parametrize("spelled", ["b", "\\u0062"])
def test_field_is_the_one_that_python_reads(spelled: str) -> None:
    texts = list(dict.fromkeys([*nested(("a", "a"), ("b", spelled)), *KINDS]))
    field = JsonField(Spec("json:a.b", "json", "a.b"), "a.b", Engine())
    found = field.pick(batch([text.encode() for text in texts]))
    for text, value, error in zip(texts, *map(rows, (found.values, found.errors)), strict=True):
        wanted = expected(json.loads(text), ["a", "b"])
        if wanted is None:
            assert (value, error) == (None, "field `a.b` is missing or null"), text
        else:
            got = value if isinstance(wanted, str) else json.loads(value)
            assert (got, error) == (wanted, None), text


@pytest.mark.parametrize("text", ['{"a":{"b":1},"a":5', '{"a":{"b":1},"a":nul}', '5 "a" "a"'])
def test_text_that_is_not_json_stays_an_error(text: str) -> None:
    field = JsonField(Spec("json:a.b", "json", "a.b"), "a.b", Engine())
    found = field.pick(batch([text.encode()]))
    assert rows(found.errors) == ["value is not JSON"]


def test_first_name_never_counts_in_deep_json() -> None:
    deep = "[" * NESTING_MAX + "]" * NESTING_MAX
    field = JsonField(Spec("json:a.b", "json", "a.b"), "a.b", Engine())
    found = field.pick(batch([f'{{"a":{{"b":1}},"a":{deep}}}'.encode()]))
    assert rows(found.errors) == ["field `a.b` is missing or null"]


def rows(column: Any) -> list[Any]:
    return list(column.to_pylist())
