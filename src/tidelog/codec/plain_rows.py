"""Rows of any columns as Python values, with times as numbers until the caller says otherwise.

``to_pylist`` makes ``datetime`` objects, which end with the year 9999, and for nanoseconds objects
of pandas. So it fails on times that a column can hold. Files of others have such times, and one
must not stop the reading of the rest. Columns that a schema made, or that others wrote, are read
with :func:`plain_rows` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

__all__ = ["plain_rows"]

TimeOf = Callable[[int, pa.DataType], Any]
"""What to put for a time, which is a count of its type's units since 1970."""


def plain_rows(batch: pa.RecordBatch, time_of: TimeOf) -> list[dict[str, Any]]:
    """The rows of a batch; dates and timestamps at any depth are what ``time_of`` returns."""
    columns = [_values(column, time_of) for column in batch.columns]
    return [
        dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)
    ]


def _values(array: pa.Array, time_of: TimeOf) -> list[Any]:
    kind = _numeric(array.type)
    if kind == array.type:
        values: list[Any] = array.to_pylist()
        return values
    return [_told(value, array.type, time_of) for value in array.cast(kind).to_pylist()]


def _numeric(kind: pa.DataType) -> pa.DataType:
    """The same type with numbers for times, and without dictionaries."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_numeric(field.type)) for field in kind])
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_numeric(kind.item_type))
        return pa.map_(kind.key_field.with_type(_numeric(kind.key_type)), item)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return made(kind.value_field.with_type(_numeric(kind.value_type)))
    return kind


def _told(value: Any, kind: pa.DataType, time_of: TimeOf) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return time_of(value, kind)
    if pa.types.is_struct(kind):
        return {field.name: _told(value[field.name], field.type, time_of) for field in kind}
    if pa.types.is_map(kind):
        return [
            (_told(key, kind.key_type, time_of), _told(item, kind.item_type, time_of))
            for key, item in value
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_told(item, kind.value_type, time_of) for item in value]
    return value
