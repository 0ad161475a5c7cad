"""Arrow columns as Avro records, column by column, and the Avro schema that describes them.

Every column becomes an array of its encoded cells, and a record is its cells joined. So the cost
is a few passes over each column and no Python object for each event.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.formats.batches import binary_array, binary_data
from tidelog.errors import InvalidError

__all__ = ["avro_schema", "encode_records", "zigzag"]

NAMESPACE = "tidelog"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLAIN: dict[pa.DataType, Any] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.timestamp("ms", "UTC"): {"type": "long", "logicalType": "timestamp-millis"},
    pa.timestamp("us", "UTC"): {"type": "long", "logicalType": "timestamp-micros"},
}


def avro_schema(schema: pa.Schema) -> dict[str, Any]:
    """The record ``tidelog.Event``. ``InvalidError`` for names that Avro does not take."""
    return _record("Event", schema)


def encode_records(batch: pa.RecordBatch) -> pa.Array:
    """Each row's record, without nulls."""
    return _joined(batch.columns, batch.schema)


def zigzag(number: int) -> bytes:
    """A whole number as Avro has it: digits of seven bits, the lowest first."""
    rest = (number << 1) ^ (number >> 63)
    digits = bytearray()
    while rest > 0x7F:
        digits.append(rest & 0x7F | 0x80)
        rest >>= 7
    digits.append(rest)
    return bytes(digits)


def _record(name: str, fields: Iterable[pa.Field]) -> dict[str, Any]:
    described = []
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise InvalidError(
                f"format `avro`: field `{field.name}` is no name that Avro takes: use letters, "
                "digits and underscores"
            )
        kind = _type(f"{name}_{field.name}", field)
        default = {"default": None} if field.nullable else {}
        described.append({"name": field.name, "type": kind, **default})
    return {"type": "record", "name": name, "namespace": NAMESPACE, "fields": described}


def _type(path: str, field: pa.Field) -> Any:
    kind = field.type
    described: Any
    if kind in _PLAIN:
        described = _PLAIN[kind]
    elif pa.types.is_decimal(kind):
        described = {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": kind.precision,
            "scale": kind.scale,
        }
    elif pa.types.is_struct(kind):
        described = _record(path, kind)
    elif pa.types.is_map(kind):
        described = {"type": "map", "values": _type(f"{path}_value", kind.item_field)}
    elif pa.types.is_list(kind):
        described = {"type": "array", "items": _type(f"{path}_item", kind.value_field)}
    else:
        raise InvalidError(f"format `avro`: has no type for {kind}: choose another")
    return ["null", described] if field.nullable else described


def _cells(array: pa.Array, nullable: bool) -> pa.Array:
    """The encoded cells of a column: a union with null where it may be null."""
    if len(array) == 0 or (nullable and array.null_count == len(array)):
        return _constant(b"\x00", len(array))
    cells = _values(array)
    if not nullable:
        return cells
    cells = pc.binary_join_element_wise(b"\x02", cells, b"")
    if array.null_count:
        cells = pc.if_else(array.is_valid(), cells, pa.scalar(b"\x00", pa.binary()))
    return cells


def _values(array: pa.Array) -> pa.Array:
    """The encoded cells where they are not null, and anything at all where they are."""
    kind = array.type
    if pa.types.is_struct(kind):
        return _joined([array.field(index) for index in range(kind.num_fields)], kind)
    if pa.types.is_map(kind):
        pairs = [pa.field("key", pa.string(), nullable=False), kind.item_field]
        return _repeated(array, _joined(_inside(array, array.keys, array.items), pairs))
    if pa.types.is_list(kind):
        (items,) = _inside(array, array.values)
        return _repeated(array, _cells(items, kind.value_field.nullable))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _sized(pc.fill_null(array.cast(pa.binary()), b""))
    return _numbers(array)


def _numbers(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_decimal(kind):
        return _sized(pa.array(map(_decimal, array.to_pylist()), pa.binary()))
    if pa.types.is_floating(kind):
        size = kind.bit_width // 8
        numbers = pc.fill_null(array, 0.0).to_numpy().astype(f"<f{size}")
        return binary_array(np.arange(len(array) + 1) * size, numbers.tobytes())
    if pa.types.is_boolean(kind):
        flags = pc.fill_null(array, False).cast(pa.uint8()).to_numpy()
        return binary_array(np.arange(len(array) + 1), flags.tobytes())
    whole = array.cast(pa.int32()) if pa.types.is_date32(kind) else array
    return _zigzags(pc.fill_null(whole.cast(pa.int64()), 0).to_numpy())


def _joined(columns: Iterable[pa.Array], fields: Iterable[pa.Field]) -> pa.Array:
    cells = [_cells(column, field.nullable) for column, field in zip(columns, fields, strict=True)]
    return pc.binary_join_element_wise(*cells, b"") if len(cells) > 1 else cells[0]


def _inside(array: pa.Array, *columns: pa.Array) -> list[pa.Array]:
    """The items of a list array that lie between its first and last offset."""
    start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return [column.slice(start, end - start) for column in columns]


def _repeated(array: pa.Array, items: pa.Array) -> pa.Array:
    """Lists: the count and the items, if there are any, and a zero."""
    offsets = array.offsets.to_numpy()
    offsets = offsets - offsets[0]
    ends = np.concatenate([[0], np.cumsum(pc.binary_length(items).to_numpy(), dtype=np.int64)])
    bodies = binary_array(ends[offsets], binary_data(items))
    counts = np.diff(offsets)
    full = pc.binary_join_element_wise(_zigzags(counts), bodies, b"\x00", b"")
    return pc.if_else(pa.array(counts > 0), full, pa.scalar(b"\x00", pa.binary()))


def _sized(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(_zigzags(pc.binary_length(values).to_numpy()), values, b"")


def _zigzags(numbers: Any) -> pa.Array:
    """Many numbers at once: ten digits for each, and then only those that count."""
    wide = numbers.astype(np.int64)
    rest = ((wide << 1) ^ (wide >> 63)).view(np.uint64)
    digits = np.zeros((len(wide), 10), np.uint8)
    counts = np.ones(len(wide), np.int64)
    for index in range(10):
        digits[:, index] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        more = rest > 0
        if not more.any():
            break
        digits[:, index] |= more.astype(np.uint8) << 7
        counts += more
    used = np.arange(10) < counts[:, None]
    return binary_array(np.concatenate([[0], np.cumsum(counts)]), digits[used].tobytes())


def _constant(cell: bytes, count: int) -> pa.Array:
    return binary_array(np.arange(count + 1) * len(cell), cell * count)


def _decimal(value: Any) -> bytes:
    """The digits of a decimal as a whole number, in two's complement, the highest byte first."""
    if value is None:
        return b""
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits)) or "0") * (-1 if sign else 1)
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)
