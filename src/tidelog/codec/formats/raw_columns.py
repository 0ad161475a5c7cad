"""Reads a file's own columns as they are: for people who inspect it, and if no event can be
restored.

Files with typed columns and without the raw value have no events that could be restored, but they
have rows; so do sidecars. Only formats with columns have them: Parquet, ORC and Avro.

:func:`count_rows` reads only a file's footer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from tidelog.codec.formats.avro import AvroContainer, check_installed
from tidelog.codec.formats.base import Data, file_name
from tidelog.codec.formats.batches import decoding, open_data
from tidelog.codec.formats.orc import read_all_columns
from tidelog.errors import InvalidError

__all__ = [
    "FOOTED",
    "ROW_FORMATS",
    "count_rows",
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
    with decoding(what):
        yield from read_all_columns(source, _ROWS)


def _avro(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        for rows in AvroContainer(source).records():
            yield pa.RecordBatch.from_pylist(rows)


FOOTED = ("orc", "parquet")  # formats whose footer has the count


def count_rows(form: str, data: BinaryIO, what: str) -> int:
    """Returns how many rows a file of such a format has. Raises ``CorruptError``."""
    with decoding(what):
        if form == "orc":
            return int(orc.ORCFile(data).nrows)
        return int(pq.ParquetFile(data).metadata.num_rows)
