"""Reads a file's own columns as they are: for people who inspect it, and if no event can be
restored.

Files with typed columns and without the raw value have no events that could be restored, but they
have rows; so do sidecars. Only formats with columns have them: Parquet, ORC and Avro.

:func:`plain_rows` returns rows as Python values, with times as numbers until the caller converts
them. ``to_pylist`` makes ``datetime`` objects, which end with the year 9999, and pandas objects for
nanoseconds. So it fails on times that a column can hold, and one such time must not stop the
reading of the rest. Columns that a schema made, or that others wrote, must be read with
:func:`plain_rows`.

:func:`count_rows` reads only a file's footer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from tidelog.codec.formats.avro import AvroContainer, check_installed
from tidelog.codec.formats.base import Data, file_name
from tidelog.codec.formats.batches import decoding, open_data
from tidelog.errors import InvalidError

__all__ = [
    "FOOTED",
    "ROW_FORMATS",
    "count_rows",
    "plain_rows",
    "read_rows",
]

ROW_FORMATS = ("parquet", "orc", "avro")
_ROWS = 10_000  # decoded at a time


def read_rows(format: str, data: Data) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, in its own columns. Raises as ``Format.read``."""
    if format not in ROW_FORMATS:
        raise InvalidError(
            f"format `{format}`: its files have no columns: those of {', '.join(ROW_FORMATS)} have"
        )
    if format == "avro":
        check_installed()
    source, what = open_data(data), file_name(format, data)
    return {"parquet": _parquet, "orc": _orc, "avro": _avro}[format](source, what)


def _parquet(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        file = pq.ParquetFile(source, page_checksum_verification=True)
        yield from file.iter_batches(batch_size=_ROWS, use_threads=False)


def _orc(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    from tidelog.codec.formats.orc import read_all_columns  # noqa: PLC0415 - orc reads these

    with decoding(what):
        yield from read_all_columns(source, _ROWS)


def _avro(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        for rows in AvroContainer(source).records():
            yield pa.RecordBatch.from_pylist(rows)


TimeOf = Callable[[int, pa.DataType], Any]
"""Returns the value for a time, which is a count of its type's units since 1970."""


def plain_rows(batch: pa.RecordBatch, time_of: TimeOf) -> list[dict[str, Any]]:
    """Returns the rows of a batch; ``time_of`` converts dates and timestamps at any depth."""
    columns = [_values(column, time_of) for column in batch.columns]
    return [
        dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)
    ]


def _values(array: pa.Array, time_of: TimeOf) -> list[Any]:
    kind = _numeric(array.type)
    if kind == array.type:
        values: list[Any] = array.to_pylist()
        return values
    return [_convert_times(value, array.type, time_of) for value in array.cast(kind).to_pylist()]


def _numeric(kind: pa.DataType) -> pa.DataType:
    """Returns the same type with numbers for times, and without dictionaries."""
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


def _convert_times(value: Any, kind: pa.DataType, time_of: TimeOf) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return time_of(value, kind)
    if pa.types.is_struct(kind):
        return {
            field.name: _convert_times(value[field.name], field.type, time_of) for field in kind
        }
    if pa.types.is_map(kind):
        return [
            (
                _convert_times(key, kind.key_type, time_of),
                _convert_times(item, kind.item_type, time_of),
            )
            for key, item in value
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_convert_times(item, kind.value_type, time_of) for item in value]
    return value


FOOTED = ("orc", "parquet")  # formats whose footer has the count


def count_rows(form: str, data: BinaryIO, what: str) -> int:
    """Returns how many rows a file of such a format has. Raises ``CorruptError``."""
    with decoding(what):
        if form == "orc":
            return int(orc.ORCFile(data).nrows)
        return int(pq.ParquetFile(data).metadata.num_rows)
