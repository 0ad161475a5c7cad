"""Picks a field of a JSON value, and reads the time in it: an epoch, ISO 8601, or a date.

The one to copy from: pick a text out of each event, then let a reader of ``times`` make a time of
it.

A field is named with dots (``meta.at``), or by a JSON pointer if its name has dots itself
(``/meta.at/time``). If an object has a name twice, the last one counts, as in typed columns and in
most JSON libraries. DuckDB returns the first. So :class:`Repeats` replaces texts that may have a
name of a path twice, which are few, by texts with nothing but that path, before DuckDB picks the
field.
"""

from __future__ import annotations

import json
import re

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import FieldTimes, ParsedValues, Spec, TimeParser, shown
from tidelog.codec.parsers.times import (
    Engine,
    epoch_reader,
    iso_reader,
    literal,
    pattern_reader,
    texts_of,
)
from tidelog.errors import InvalidError
from tidelog.model.decoding import is_deep_json

__all__ = [
    "JsonField",
    "Repeats",
    "is_lenient_json",
    "open_json",
]

_SUSPECT = r"(?i),\s*[\]}]|(^|[\[:,])\s*-?(nan|inf)"
_DOUBTFUL = r"^-?[0-9].*[.eE]|^0$"  # what a number may have been rounded to
_LONG = r"\.[0-9]{7}|[0-9]{16}[eE]"  # a number that a double may round


def open_json(spec: Spec) -> TimeParser:
    """Opens ``json:FIELD``, ``iso8601:FIELD`` or ``date:FIELD|PATTERN``."""
    engine = Engine()
    if spec.kind == "date":
        name, bar, pattern = spec.argument.partition("|")
        if not (bar and pattern):
            raise spec.refused("has no pattern: give date:field|%Y-%m-%d")
        field = JsonField(spec, name, engine)
        try:
            return FieldTimes(field.pick, pattern_reader(field.what, pattern, engine))
        except InvalidError as exc:
            raise spec.refused(str(exc)) from exc
    field = JsonField(spec, spec.argument, engine)
    if spec.kind == "iso8601":
        return FieldTimes(field.pick, iso_reader(field.what, engine))
    return FieldTimes(field.pick_exact, epoch_reader(field.what))


class JsonField:
    """Picks one field out of JSON values, as text."""

    def __init__(self, spec: Spec, name: str, engine: Engine) -> None:
        if not name:
            raise spec.refused(f"names no field: give {spec.kind}:field or {spec.kind}:outer.inner")
        self.what = f"field `{shown(name)}`"
        pointer = name if name.startswith("/") else _pointer(spec.path(name))
        self._pointer = literal(pointer)
        self._repeats = Repeats(pointer)
        self._engine = engine

    def pick(self, batch: pa.RecordBatch) -> ParsedValues:
        """Returns the field of each event; strings without quotes, anything else as JSON."""
        return self._pick(batch)[0]

    def pick_exact(self, batch: pa.RecordBatch) -> ParsedValues:
        """Returns the same, with every number as it is written."""
        found, values = self._pick(batch)
        doubtful = pc.match_substring_regex(found.values, _DOUBTFUL)
        doubtful = pc.fill_null(pc.and_(doubtful, pc.match_substring_regex(values, _LONG)), False)
        if not pc.any(doubtful).as_py():
            return found
        rows = zip(values.filter(doubtful), found.values.filter(doubtful), strict=True)
        exact = [self._repeats.number(value.as_py()) or text.as_py() for value, text in rows]
        texts = pc.replace_with_mask(found.values, doubtful, pa.array(exact, found.values.type))
        return ParsedValues(texts, found.errors)

    def _pick(self, batch: pa.RecordBatch) -> tuple[ParsedValues, pa.Array]:
        """Returns the field of each event, and the JSON that it is in."""
        found = texts_of(batch, repair=False)
        found = found.reject(is_lenient_json(found.values), "value is not JSON")
        found = ParsedValues(self._repeats.resolved(found.values), found.errors)
        picked = f"v ->> {self._pointer}"
        try:
            texts = self._engine.column(picked, found.values)
        except InvalidError:  # some row is not JSON; finds out which only now
            valid = self._engine.column("json_valid(v)", found.values)
            found = found.reject(pc.invert(valid), "value is not JSON")
            texts = self._engine.column(f"try({picked})", found.values)
        missing = f"{self.what} is missing or null"
        picked_texts = ParsedValues(texts, found.errors).reject(pc.is_null(texts), missing)
        return picked_texts, found.values

    def nested(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns whether the field is an object or an array; null if there is none."""
        return self._engine.column(
            f"try(json_type(v, {self._pointer})) IN ('OBJECT', 'ARRAY')", self._texts(batch)
        )

    def rounded(self, batch: pa.RecordBatch, texts: pa.Array) -> pa.Array:
        """Returns whether the field, picked as ``texts``, is a number that lost digits.

        DuckDB keeps whole numbers as they are, and rounds fractions and exponents.
        """
        doubtful = pc.fill_null(pc.match_substring_regex(texts, _DOUBTFUL), False)
        if not pc.any(doubtful).as_py():
            return doubtful
        kind = f"coalesce(try(json_type(v, {self._pointer})), '')"
        kinds = self._engine.column(kind, self._texts(batch))
        minus_zero = pc.and_(pc.equal(kinds, "BIGINT"), pc.equal(texts, "0"))
        return pc.and_(doubtful, pc.or_(pc.equal(kinds, "DOUBLE"), minus_zero))

    def _texts(self, batch: pa.RecordBatch) -> pa.Array:
        return self._repeats.resolved(texts_of(batch, repair=False).values)


def is_lenient_json(values: pa.Array) -> pa.Array:
    """Returns whether each text has what DuckDB accepts as JSON and the standard does not.

    These are a comma before an end, NaN and infinities. Few texts look so; those are parsed.
    """
    suspects = pc.fill_null(pc.match_substring_regex(values, _SUSPECT), False)
    if not pc.any(suspects).as_py():
        return suspects
    found = [
        suspect and not _is_json(text)
        for suspect, text in zip(suspects.to_pylist(), values.to_pylist(), strict=True)
    ]
    return pa.array(found, pa.bool_())


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    except RecursionError:  # its depth has its own limit
        return True
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _pointer(path: tuple[str, ...]) -> str:
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in path)


_ESCAPED = r'\\u[0-9a-fA-F]{4}[^"]*"\s*:'  # in a name of plain letters
_ESCAPED_ANY = r'\\.[^"]*"\s*:'
_SPECIAL = re.compile(r'["\\/\x00-\x1f]')  # may have other escapes
_NO_FIELD = "{}"
_NUMBER_BEGINS = frozenset("-0123456789")
_any = msgspec.json.Decoder(msgspec.Raw)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class Repeats:
    """Resolves repeated names on one path, given as a JSON pointer."""

    def __init__(self, pointer: str) -> None:
        parts = pointer.split("/")[1:]
        self._path = [part.replace("~1", "/").replace("~0", "~") for part in parts]
        special = any(map(_SPECIAL.search, self._path))
        self._escaped = _ESCAPED_ANY if special else _ESCAPED

    def resolved(self, texts: pa.Array) -> pa.Array:
        """Returns the texts; those that may repeat a name of the path have only the last one."""
        suspects = self._suspects(texts)
        if not pc.any(suspects).as_py():
            return texts
        found = [_picked(text, self._path) for text in texts.filter(suspects).to_pylist()]
        return pc.replace_with_mask(texts, suspects, pa.array(found, texts.type))

    def number(self, text: str) -> str:
        """Returns the number at the end of the path as it is written; empty if there is none."""
        if is_deep_json(text):
            return ""
        try:
            found = bytes(_any.decode(text)).decode()
            for name in self._path:
                held = _array.decode(found) if found[0] == "[" else _object.decode(found)
                inner = held[int(name)] if isinstance(held, list) else held[name]
                found = bytes(inner).decode().strip()
        except (msgspec.MsgspecError, LookupError, ValueError):
            return ""
        return found if found[:1] in _NUMBER_BEGINS else ""

    def _suspects(self, texts: pa.Array) -> pa.Array:
        found = pc.match_substring_regex(texts, self._escaped)
        for name in dict.fromkeys(self._path):
            twice = pc.greater(pc.count_substring(texts, f'"{name}"'), 1)
            found = pc.or_(found, twice)
        return pc.fill_null(found, False)


def _picked(text: str, path: list[str]) -> str:
    """Returns the text with only the last of each name on the path; invalid JSON unchanged.

    JSON always comes back reduced, so that DuckDB never sees an earlier name: to ``{}`` if the path
    ends early, or if the text nests too deeply to be parsed.
    """
    if is_deep_json(text):
        return _NO_FIELD
    try:
        return _last(bytes(_any.decode(text)).decode(), path)
    except msgspec.DecodeError:
        return text  # DuckDB reports it


def _last(text: str, path: list[str]) -> str:
    """Reduces valid JSON without space around it."""
    if not path:
        return text
    name, *rest = path
    if text[0] == "[":
        items = [bytes(item).decode() for item in _array.decode(text)]
        if name.isascii() and name.isdecimal() and len(name) < 20 and int(name) < len(items):
            items[int(name)] = _last(items[int(name)], rest)
        return f"[{','.join(items)}]"
    if text[0] != "{":
        return _NO_FIELD
    found = _object.decode(text).get(name)
    if found is None:
        return _NO_FIELD
    return f"{{{msgspec.json.encode(name).decode()}:{_last(bytes(found).decode(), rest)}}}"
