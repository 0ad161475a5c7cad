"""How many rows a file has, by its footer alone: without reading the rest."""

from __future__ import annotations

from typing import BinaryIO

import pyarrow.parquet as pq
from pyarrow import orc

from tidelog.codec.formats.streams import decoding

__all__ = ["FOOTED", "count_rows"]

FOOTED = ("orc", "parquet")  # formats whose footer has the count


def count_rows(form: str, data: BinaryIO, what: str) -> int:
    """Returns how many rows a file of such a format has. ``CorruptError`` for bad bytes."""
    with decoding(what):
        if form == "orc":
            return int(orc.ORCFile(data).nrows)
        return int(pq.ParquetFile(data).metadata.num_rows)
