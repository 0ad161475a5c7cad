"""Numbers and bytes between numpy and Arrow, through buffers.

``pa.array`` and ``Array.to_numpy`` do the same, but first import pandas where it is installed,
which takes longer than everything else that a short command does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["bytes_array", "mask_array", "number_array", "numbers_of", "repeated_text", "text_array"]


def numbers_of(column: pa.Array) -> npt.NDArray[Any]:
    """Returns the values of a column of whole numbers without nulls; a view, not to be changed."""
    kind = np.dtype(f"{'' if pa.types.is_signed_integer(column.type) else 'u'}{_width(column)}")
    data = column.buffers()[1]
    if column.null_count:
        raise ValueError(f"{column.null_count} nulls: only a column without nulls has a view")
    if data is None or not len(column):
        return np.zeros(0, kind)
    return np.frombuffer(data, kind, len(column), column.offset * kind.itemsize)


def number_array(values: npt.NDArray[Any]) -> pa.Array:
    """Returns whole numbers as an Arrow array that shares their memory."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def mask_array(values: npt.NDArray[np.bool_]) -> pa.Array:
    """Returns a mask, as ``filter`` takes it."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def bytes_array(values: Sequence[bytes], kind: pa.DataType | None = None) -> pa.Array:
    """Returns values, joined at once: Arrow would go value by value. ``kind`` may be a string.

    For values of 2 GiB and more, Arrow raises what it raises.
    """
    kind = kind or pa.binary()
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        return pa.array(values, kind)
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def text_array(values: Sequence[str]) -> pa.Array:
    """Returns texts as an Arrow array."""
    return bytes_array([each.encode() for each in values], pa.string())


def repeated_text(text: str, rows: int) -> pa.Array:
    """Returns a column that has one text in every row."""
    data = text.encode()
    if rows * len(data) > np.iinfo(np.int32).max:
        return pa.repeat(pa.scalar(text), rows)  # raises what Arrow raises
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(data))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data * rows)]
    return pa.Array.from_buffers(pa.string(), rows, buffers)


def _width(column: pa.Array) -> str:
    return f"int{column.type.bit_width}"
