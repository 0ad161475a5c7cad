"""Filters events by fields of their JSON values: ``amount > 10 and user.id = u-7``.

A field is named as in parsers and pumps (``codec.fields``). A number without quotes is compared as
a number, exactly; anything else as text. ``contains`` ignores case. ``null`` stands for a field
that is missing or null. Values that are not JSON have no fields, so that they fit ``= null`` only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from tidelog.codec.parsers.base import Spec
from tidelog.codec.parsers.json import JsonField
from tidelog.codec.parsers.times import Engine
from tidelog.errors import InvalidError

__all__ = ["FieldFilter", "parse_field_filter"]

_CONDITIONS_MAX = 8
_TEXT_MAX = 1_000  # characters
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(?:\.[0-9]{1,300})?(?:[eE][-+]?[0-9]{1,3})?")
_CONDITION = re.compile(
    r"""\s*(?P<path>/\S+|[^\s=<>!"'/]+)
        \s*(?P<op>!=|>=|<=|=|>|<|\bcontains\b)
        \s*(?P<value>"[^"]*"|'[^']*'|[^\s"'=<>!](?:(?!\s+and\s)[^"'=<>!])*?)
        \s*(?P<more>\sand\s|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True)
class _FieldCondition:
    path: str
    op: str
    text: str | None  # None: null
    number: Decimal | None

    def fits(self, found: str | None) -> bool:
        """Returns whether a field fits; None is one that is missing or null."""
        if self.text is None:
            return (found is None) == (self.op == "=")
        if found is None:
            return self.op == "!="
        if self.op == "contains":
            return self.text.lower() in found.lower()
        if self.number is None:
            return _COMPARED[self.op](found, self.text)
        number = _number(found)
        if number is None:
            return self.op == "!="
        return _COMPARED[self.op](number, self.number)


@dataclass(frozen=True, slots=True)
class FieldFilter:
    """Conditions that all must hold; :func:`parse_field_filter` makes one of a text."""

    text: str
    conditions: tuple[_FieldCondition, ...]

    def fits(self, values: pa.Array) -> pa.Array:
        """Returns for each value, as bytes, whether it fits."""
        batch = pa.record_batch({"value": values.cast(pa.binary())})
        engine = Engine()
        fitting = [True] * len(values)
        for each in self.conditions:
            spec = Spec(f"json:{each.path}", "json", each.path)
            texts = JsonField(spec, each.path, engine).pick(batch).values.to_pylist()
            fitting = [fits and each.fits(text) for fits, text in zip(fitting, texts, strict=True)]
        return pa.array(fitting, pa.bool_())


def parse_field_filter(text: str) -> FieldFilter:
    """Returns the filter of a text. Raises ``InvalidError``."""
    if len(text) > _TEXT_MAX:
        raise InvalidError(f"filter: has more than {_TEXT_MAX} characters: use SQL for it")
    conditions: list[_FieldCondition] = []
    at, more = 0, "and"
    while more:
        found = _CONDITION.match(text, at)
        if found is None:
            raise InvalidError(
                f"filter `{text[at:][:80].strip()}`: is not a condition: write one such as "
                '`amount > 10`, `user.id = u-7` or `city contains "San"`, joined by `and`'
            )
        conditions.append(_condition(found["path"], found["op"].lower(), found["value"]))
        at, more = found.end(), found["more"]
    if len(conditions) > _CONDITIONS_MAX:
        raise InvalidError(f"filter: has more than {_CONDITIONS_MAX} conditions: use SQL for it")
    return FieldFilter(text.strip(), tuple(conditions))


def _condition(path: str, op: str, given: str) -> _FieldCondition:
    JsonField(Spec(f"json:{path}", "json", path), path, Engine())  # refuses an invalid path
    if given[:1] in ("'", '"'):
        return _FieldCondition(path, op, given[1:-1], None)
    if given.lower() == "null":
        if op not in ("=", "!="):
            raise InvalidError(f"filter `{path} {op} null`: compare null with = or != only")
        return _FieldCondition(path, op, None, None)
    return _FieldCondition(path, op, given, None if op == "contains" else _number(given))


def _number(text: str) -> Decimal | None:
    """Returns a number exactly; None for a text that is not one in JSON."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None
