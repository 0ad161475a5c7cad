"""Times in a field of a JSON value: epochs, ISO 8601, or dates by a pattern.

The one to copy from: pick a text out of each event, then let a reader of ``times`` make a time
of it.

A field is named with dots (``meta.at``), or by a JSON pointer where its name has dots itself
(``/meta.at/time``). Of a name that an object has twice the last counts, as in typed columns and in
most JSON libraries; DuckDB returns the first (``repeats``).
"""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import FieldTimes, Found, Spec, TimeParser, shown
from tidelog.codec.parsers.engine import Engine, literal
from tidelog.codec.parsers.repeats import Repeats
from tidelog.codec.parsers.texts import texts_of
from tidelog.codec.parsers.times import epoch_reader, iso_reader, pattern_reader
from tidelog.errors import InvalidError

__all__ = ["JsonField", "is_lenient_json", "open_json"]

_SUSPECT = r"(?i),\s*[\]}]|(^|[\[:,])\s*-?(nan|inf)"
_DOUBTFUL = r"^-?[0-9].*[.eE]|^0$"  # what a number may have been rounded to


def open_json(spec: Spec) -> TimeParser:
    """``json:FIELD``, ``iso8601:FIELD`` or ``date:FIELD|PATTERN``."""
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
    return FieldTimes(field.pick, epoch_reader(field.what))


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

    def pick(self, batch: pa.RecordBatch) -> Found:
        """The field of each event; strings without their quotes, all else as JSON writes it."""
        found = texts_of(batch, repair=False)
        found = found.reject(is_lenient_json(found.values), "value is not JSON")
        found = Found(self._repeats.resolved(found.values), found.errors)
        picked = f"v ->> {self._pointer}"
        try:
            texts = self._engine.column(picked, found.values)
        except InvalidError:  # some row is not JSON; which, is asked only then
            valid = self._engine.column("json_valid(v)", found.values)
            found = found.reject(pc.invert(valid), "value is not JSON")
            texts = self._engine.column(f"try({picked})", found.values)
        missing = pc.is_null(texts)
        return Found(texts, found.errors).reject(missing, f"{self.what} is missing or null")

    def nested(self, batch: pa.RecordBatch) -> pa.Array:
        """Whether the field is an object or an array; null where there is none."""
        return self._engine.column(
            f"try(json_type(v, {self._pointer})) IN ('OBJECT', 'ARRAY')", self._texts(batch)
        )

    def rounded(self, batch: pa.RecordBatch, texts: pa.Array) -> pa.Array:
        """Whether the field, picked as ``texts``, is a number that was not kept digit by digit.

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
    """Whether each text has what DuckDB takes for JSON and the standard does not.

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
    except RecursionError:  # its depth has a limit of its own
        return True
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _pointer(path: tuple[str, ...]) -> str:
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in path)
