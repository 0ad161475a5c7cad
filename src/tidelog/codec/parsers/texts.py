"""The values of events as text: UTF-8 or not, null or not."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import Found

__all__ = ["NULL_VALUE", "texts_of"]

NULL_VALUE = "null value"  # the error text of a tombstone
_PIECE_ROWS = 1_024  # rows that are looked at one by one around a bad one


def texts_of(batch: pa.RecordBatch, *, repair: bool) -> Found:
    """Every event's value as text.

    Bytes that are not UTF-8 are an error, or with ``repair`` become U+FFFD: a log line is still
    read when one of its names is not.
    """
    values = batch.column("value")
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = _piecewise(values, repair)
    found = Found(texts, pa.nulls(len(values), pa.string()))
    found = found.reject(pc.is_null(values), NULL_VALUE)
    return found.reject(pc.is_null(texts), "value is not UTF-8 text")


def _piecewise(values: pa.Array, repair: bool) -> pa.Array:
    """As a cast, which says no to all rows when one is bad; null where a row is bad."""
    pieces = []
    for start in range(0, len(values), _PIECE_ROWS):
        piece = values.slice(start, _PIECE_ROWS)
        try:
            pieces.append(piece.cast(pa.string()))
        except pa.ArrowInvalid:
            decoded = [_decoded(value, repair) for value in piece.to_pylist()]
            pieces.append(pa.array(decoded, pa.string()))
    return pa.concat_arrays(pieces)


def _decoded(value: bytes | None, repair: bool) -> str | None:
    if value is None:
        return None
    try:
        return value.decode(errors="replace" if repair else "strict")
    except UnicodeDecodeError:
        return None
