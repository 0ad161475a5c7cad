# ruff: noqa: PLC0415 - importing datasets brings pandas, which takes a second
"""A file's own columns, as they stand: for people who look into it, and where no event comes back.

Files with typed columns and without the raw value hold no events that could be restored, but rows
all the same; so do sidecars. Only formats with columns have them: Parquet, ORC and Avro.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.codec.formats.avro_container import AvroContainer, check_installed
from tidelog.codec.formats.base import Data, file_name
from tidelog.codec.formats.streams import decoding, open_data
from tidelog.errors import InvalidError

__all__ = ["ROW_FORMATS", "read_rows"]

ROW_FORMATS = ("parquet", "orc", "avro")
_ROWS = 10_000  # decoded at a time


def read_rows(format: str, data: Data) -> Iterator[pa.RecordBatch]:
    """The rows of a file, in its own columns. Errors as for ``Format.read``."""
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
    from tidelog.codec.formats.orc import read_all_columns

    with decoding(what):
        yield from read_all_columns(source, _ROWS)


def _avro(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        for rows in AvroContainer(source).records():
            yield pa.RecordBatch.from_pylist(rows)
