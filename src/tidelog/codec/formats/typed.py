"""Typed columns: JSON values split into columns by a schema, and the rows that do not fit it.

The event columns come first, then the schema's. If the schema also uses an event column's name, the
event column gets the prefix ``_tidelog_``. A missing field is null, a field that the schema does
not name is left out (``strict``: a misfit), and of a repeated name the last counts.

A value that a type cannot hold is a misfit. Each type has its rule:

- Integers are exact: ``"5"``, 1.5 and 1.0 are misfits.
- ``float`` and ``double`` hold the nearest number of the type (IEEE 754), also of whole numbers:
  16777217 in a ``float`` becomes 16777216. A number beyond the largest one is a misfit.
- ``decimal`` accepts a number, or text of a sign, ASCII digits, a point and an exponent. It is
  exact: one with more digits than the type has is a misfit.
- ``timestamp`` accepts ISO 8601 text (UTC by default), or a number whose size determines its unit,
  as in Secor. It is in the years 0001 to 9999 of UTC, which Python and Spark can hold too. Digits
  after the microseconds are cut off, toward the past, so no time moves to the next day.
- ``binary`` accepts base64 text.

Whatever a format's writer accepts, its readers accept. If a format's readers hold fewer times, the
format has its own range, and a time outside is a misfit.

The raw value is kept beside the columns, unless ``keep_value`` is False. Without it, fields that
the schema does not name are lost, and the events of such a file cannot be restored.

Each value is decoded by itself (msgspec). DuckDB's and Arrow's bulk readers are up to twice as
fast, but they coerce types, and do not say what is wrong with a misfit.

:class:`ColumnarFormat` is what formats share that keep everything in columns.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self, cast

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import (
    MISFIT_SCHEMA,
    ByteSink,
    Data,
    FileWriter,
    FormatSettings,
    check_no_sidecar,
    check_settings,
    choose_codec,
)
from tidelog.codec.formats.batches import (
    ColumnWriter,
    Encoder,
    FileColumns,
    PlainColumns,
    check_restorable,
)
from tidelog.codec.formats.schema import PREFIX, parse_schema
from tidelog.errors import InvalidError
from tidelog.model.decoding import check_json_depth
from tidelog.model.limits import TIMESTAMP_MS_END

__all__ = [
    "YEARS",
    "ColumnarFormat",
    "TypedColumns",
    "open_columns",
]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
YEARS = range(
    (dt.datetime(1, 1, 1, tzinfo=dt.UTC) - _EPOCH) // _MICROSECOND, TIMESTAMP_MS_END * 1000
)
"""Microseconds since 1970 of the years 0001 to 9999, which Python can hold."""

_NUMBERS_END = 10**21  # nanoseconds beyond the year 9999
_FINER = re.compile(r"(.{19}\.\d{6})\d+", re.ASCII)  # a time with more digits than microseconds
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_EARLIER = decimal.Context(prec=30, rounding=decimal.ROUND_FLOOR)
_FLOAT_MAX = float(np.finfo(np.float32).max)
_REASON_MAX = 500  # characters; a field's name may be any
_NOT_DECODED = (msgspec.DecodeError, ValueError)  # also InvalidError, and text that is not UTF-8
_NOT_BUILT = (pa.ArrowException, ValueError, ArithmeticError, TypeError)
_moment = msgspec.json.Decoder(dt.datetime).decode
_quoted = msgspec.json.Encoder().encode
_PYTHON: dict[pa.DataType, Any] = {
    pa.bool_(): bool,
    pa.float32(): Annotated[float, msgspec.Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)],
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): dt.date,
}


class _Micros(int):
    """The type of a timestamp's field: microseconds since 1970."""

    __slots__ = ()


class _Exact(decimal.Decimal):
    """The type of a decimal's field."""

    __slots__ = ()


_GIVEN = {str, int, decimal.Decimal}
_EXPECTED = {_Micros: "an ISO 8601 time or a number", _Exact: "a number or one as text"}


def open_columns(format: str, settings: FormatSettings, times: range = YEARS) -> FileColumns:
    """Returns the event columns, or with a schema typed ones, whose times are in ``times``."""
    if settings.schema is not None:
        fields = parse_schema(settings.schema)
        return TypedColumns(fields, settings.keep_value is not False, bool(settings.strict), times)
    for name in ("keep_value", "strict"):
        if getattr(settings, name) is not None:
            raise InvalidError(
                f"format `{format}`: setting `{name}` is for typed columns: give a schema, "
                "or leave it out"
            )
    return PlainColumns()


@dataclass(frozen=True, slots=True)
class TypedColumns:
    """The columns of a schema beside those of the event."""

    fields: pa.Schema
    keep_value: bool = True
    strict: bool = False
    times: range = YEARS  # microseconds since 1970; a time outside is a misfit

    @property
    def names(self) -> Mapping[str, str]:
        """Returns the names of the event columns, which differ from the schema's."""
        taken = {name.lower() for name in self.fields.names}
        return {
            name: f"{PREFIX}{name}" if name in taken else name
            for name in EVENT_SCHEMA.names
            if name != "value" or self.keep_value
        }

    @property
    def schema(self) -> pa.Schema:
        """Returns event columns, then the schema's."""
        own = [EVENT_SCHEMA.field(name).with_name(shown) for name, shown in self.names.items()]
        return pa.schema([*own, *self.fields])

    def fit(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Returns the rows whose values fit the schema, and the others with the reason."""
        reasons: dict[int, str] = {}
        decode = _decoder(self.fields, self.strict, self.times)
        rows = _decode(batch.column("value").to_pylist(), decode, reasons)
        columns = _build(rows, self.fields, reasons)
        if not reasons:
            return self._in_columns(batch, columns), None
        good = [index for index in range(batch.num_rows) if index not in reasons]
        bad = sorted(reasons)
        errors = pa.array([reasons[index] for index in bad], pa.string())
        misfits = batch.take(pa.array(bad, pa.int64()))
        return (
            self._in_columns(batch.take(pa.array(good, pa.int64())), columns),
            pa.record_batch([*misfits.columns, errors], schema=MISFIT_SCHEMA),
        )

    def _in_columns(self, batch: pa.RecordBatch, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        own = [batch.column(name) for name in self.names]
        return pa.record_batch([*own, *columns], schema=self.schema)


def _decode(
    values: Sequence[bytes | None], decode: Callable[[bytes], Any], reasons: dict[int, str]
) -> dict[int, Any]:
    """Returns each value as a struct, by row number; adds the reasons for the others."""
    rows: dict[int, Any] = {}
    for index, value in enumerate(values):
        if value is None:
            reasons[index] = "it has no value"
            continue
        try:
            check_json_depth(value)
            rows[index] = decode(value)
        except _NOT_DECODED as exc:
            reasons[index] = str(exc)[:_REASON_MAX]
    return rows


def _build(rows: dict[int, Any], fields: pa.Schema, reasons: dict[int, str]) -> list[pa.Array]:
    """Returns the columns; finds and leaves out rows that do not fit into them."""
    try:
        return _columns(list(rows.values()), fields)
    except _NOT_BUILT:
        reasons.update(_unfit(list(rows.items()), fields))
        return _columns([row for index, row in rows.items() if index not in reasons], fields)


def _unfit(rows: list[tuple[int, Any]], fields: pa.Schema) -> Iterator[tuple[int, str]]:
    """Yields the rows that cannot be built, by bisection: few are, so most go in large steps."""
    try:
        _columns([row for _, row in rows], fields)
    except _NOT_BUILT as exc:
        if len(rows) == 1:
            yield rows[0][0], " ".join(str(exc).split())[:_REASON_MAX]
            return
        half = len(rows) // 2
        yield from _unfit(rows[:half], fields)
        yield from _unfit(rows[half:], fields)


@lru_cache(maxsize=64)
def _decoder(fields: pa.Schema, strict: bool, times: range) -> Callable[[bytes], Any]:
    kind, hook = _struct("Value", fields, strict), partial(_converted, times)
    return msgspec.json.Decoder(kind, dec_hook=hook, float_hook=_fraction).decode


def _struct(name: str, fields: Sequence[pa.Field], strict: bool) -> type[msgspec.Struct]:
    """Returns a class for objects with these fields, which it calls f0, f1 and so on."""
    members: list[Any] = []
    for index, field in enumerate(fields):
        kind = _python_type(field.type, strict)
        if field.nullable:
            members.append((f"f{index}", kind | None, None))
        else:
            members.append((f"f{index}", kind))
    return msgspec.defstruct(
        name,
        members,
        rename={f"f{index}": field.name for index, field in enumerate(fields)},
        forbid_unknown_fields=strict,
        kw_only=True,
        gc=False,
    )


def _python_type(kind: pa.DataType, strict: bool) -> Any:
    if kind in _PYTHON:
        return _PYTHON[kind]
    if pa.types.is_integer(kind):
        bound = 1 << (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
    if pa.types.is_decimal(kind):
        return _Exact
    if pa.types.is_timestamp(kind):
        return _Micros
    if pa.types.is_struct(kind):
        return _struct("Object", list(kind), strict)
    field = kind.item_field if pa.types.is_map(kind) else kind.value_field
    inner = _python_type(field.type, strict)
    if field.nullable:
        inner = inner | None
    mapping, sequence = cast(Any, dict), cast(Any, list)  # types that are created dynamically
    return mapping[str, inner] if pa.types.is_map(kind) else sequence[inner]


def _columns(rows: Sequence[Any], fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Returns arrays of the fields of structs, of which some may be null."""
    count = len(fields)
    names = [f"f{index}" for index in range(count)]
    if not rows:
        return [_column([], field.type) for field in fields]
    if None in rows:
        nothing = (None,) * count
        get = attrgetter(*names) if count > 1 else lambda row: (row.f0,)
        cells = [nothing if row is None else get(row) for row in rows]
        return [
            _column(each, field.type)
            for each, field in zip(zip(*cells, strict=True), fields, strict=True)
        ]
    columns = []
    for name, field in zip(names, fields, strict=True):
        try:
            columns.append(_column(list(map(attrgetter(name), rows)), field.type))
        except _NOT_BUILT as exc:
            raise ValueError(f"{exc} - in `{field.name}`") from exc
    return columns


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_decimal(kind):
        return pa.array([_decimal(value, kind) for value in values], kind)
    if pa.types.is_struct(kind):
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(_columns(values, list(kind)), type=kind, mask=mask)
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    if pa.types.is_map(kind):
        pairs = list(chain.from_iterable(value.items() for value in values if value))
        keys = pa.array([key for key, _ in pairs], pa.string())
        items = _column([item for _, item in pairs], kind.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=kind)
    flat = list(chain.from_iterable(value for value in values if value))
    return pa.ListArray.from_arrays(_offsets(values), _column(flat, kind.value_type), type=kind)


def _offsets(values: Sequence[Any]) -> pa.Array:
    """Returns where each list begins, and the last ends; null for a list that is null."""
    lengths = [len(value) if value else 0 for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    nothing = np.array([*(value is None for value in values), False])
    return pa.array(offsets, pa.int32(), mask=nothing)


def _decimal(value: decimal.Decimal | None, kind: pa.DataType) -> decimal.Decimal | None:
    """Returns the same number with as many digits as the type has."""
    if value is None:
        return None
    traps = [decimal.Inexact, decimal.InvalidOperation]
    context = decimal.Context(prec=kind.precision, traps=traps)
    try:
        return value.quantize(decimal.Decimal(1).scaleb(-kind.scale), context=context)
    except decimal.DecimalException as exc:
        shape = f"decimal({kind.precision}, {kind.scale})"
        raise ValueError(f"{value} does not fit into {shape}") from exc


def _fraction(text: str) -> decimal.Decimal:
    """Returns a number with a fraction or an exponent, exactly."""
    try:
        return decimal.Decimal(text)
    except decimal.DecimalException as exc:
        raise ValueError(f"{text[:40]} has too large an exponent") from exc


def _converted(times: range, kind: type, value: Any) -> Any:
    """Converts JSON to a type of our own: from text, or from a number as it is written."""
    if type(value) not in _GIVEN:
        raise ValueError(f"Expected {_EXPECTED[kind]}, got `{_json_name(value)}`")
    return _Micros(_micros(value, times)) if kind is _Micros else _Exact(_exact(value))


def _json_name(value: Any) -> str:
    names = {bool: "bool", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _exact(value: str | int | decimal.Decimal) -> int | decimal.Decimal:
    if not isinstance(value, str):
        return value
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"`{value[:40]}` is not a valid decimal number")
    return _fraction(value)


def _micros(value: str | int | decimal.Decimal, times: range) -> int:
    """Returns microseconds since 1970, in the range of the file; cuts off finer digits."""
    if isinstance(value, str):
        micros = _micros_of_text(value)
    elif -_NUMBERS_END < value < _NUMBERS_END:
        micros = _micros_of_number(value)
    else:
        micros = times.stop
    if micros not in times:
        first, last = _year(times.start), _year(times.stop - 1)
        raise ValueError(f"{str(value)[:40]} is not a time in the years {first} to {last} of UTC")
    return micros


def _micros_of_text(text: str) -> int:
    try:
        if text[26:27].isdigit():  # the seventh digit of a fraction, or part of a zone
            text = _FINER.sub(r"\1", text, count=1)
        moment = _moment(_quoted(text))
    except msgspec.MsgspecError as exc:
        raise ValueError(str(exc)) from exc
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    return (aware - _EPOCH) // _MICROSECOND


def _micros_of_number(value: int | decimal.Decimal) -> int:
    size = value.copy_abs() if isinstance(value, decimal.Decimal) else abs(value)
    if size >= 10**18:
        times, over = 1, 1_000
    elif size >= 10**15:
        times, over = 1, 1
    elif size >= 10**12:
        times, over = 1_000, 1
    else:
        times, over = 1_000_000, 1
    if isinstance(value, decimal.Decimal):
        value = _EARLIER.multiply(value, decimal.Decimal(times))
        times, value = 1, int(value.to_integral_value(decimal.ROUND_FLOOR))
    return value * times // over


def _year(micros: int) -> str:
    return f"{(_EPOCH + micros * _MICROSECOND).year:04}"


@dataclass(frozen=True, slots=True)
class ColumnarFormat(ABC):
    """Files with everything in columns; subclasses convert batches to bytes and back."""

    codec: str
    columns: FileColumns
    name: ClassVar[str]
    extension: ClassVar[str]
    codecs: ClassVar[tuple[str, ...]]  # the first is the default
    times: ClassVar[range] = YEARS  # of typed columns, in microseconds since 1970, as it is read

    @classmethod
    def opened(cls, codec: str | None, settings: FormatSettings) -> Self:
        """Returns the format; checks its settings."""
        check_settings(cls.name, settings, "schema", "keep_value", "strict")
        chosen = choose_codec(cls.name, codec, *cls.codecs)
        return cls(chosen, open_columns(cls.name, settings, cls.times))

    def sidecar_name(self, name: str) -> str | None:
        """Returns None: everything is in the file."""
        return None

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Starts a file."""
        check_no_sidecar(self.name, sidecar)
        return ColumnWriter(self.columns, self._encoder(sink))

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of a file, one part after another."""
        check_no_sidecar(self.name, sidecar)
        check_restorable(self.name, self.columns)
        return self._read(data)

    @abstractmethod
    def _encoder(self, sink: ByteSink) -> Encoder:
        """Returns what turns batches in the file's columns into bytes."""

    @abstractmethod
    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        """Yields the events of a file."""
