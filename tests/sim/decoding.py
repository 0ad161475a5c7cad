"""Decodes each piece of data once for a whole world.

Readers in a world decode the same few objects again and again: drivers, compilers, proofs and
verify read whole topics and archives. What bytes decode to depends on the bytes alone, so a world
keeps it. All requests to the store and the catalog stay as they are, and so does every step.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tidelog.archive import dead_letters
from tidelog.archive import read as archive_read
from tidelog.codec import journal_file, segment
from tidelog.codec.formats import parquet, text_lines
from tidelog.codec.formats.batches import open_data

__all__ = ["decoding_once"]

_Memo = dict[Hashable, Any]


@contextlib.contextmanager
def decoding_once() -> Iterator[None]:
    """Keep what the product's decoders return until the end, by the bytes that they decode."""
    memo: _Memo = {}
    with pytest.MonkeyPatch.context() as patch:
        _keep_segments(patch, memo)
        _keep_journals(patch, memo)
        _keep_files(patch, memo)
        yield


def _keep_segments(patch: pytest.MonkeyPatch, memo: _Memo) -> None:
    real = segment._batches

    def batches(data: bytes, count: int, what: str, columns: Any) -> Iterator[pa.RecordBatch]:
        key = "segment", data, count, None if columns is None else tuple(columns)
        yield from _kept(memo, key, lambda: list(real(data, count, what, columns)))

    patch.setattr(segment, "_batches", batches)


def _keep_journals(patch: pytest.MonkeyPatch, memo: _Memo) -> None:
    real_footer = journal_file.JournalFile._read_footer
    real_group = journal_file.JournalFile._group
    real_decoded = journal_file.JournalFile._decoded

    def read_footer(self: Any, footer: bytes) -> Any:
        self.footer = footer
        return _kept(memo, ("footer", footer), lambda: real_footer(self, footer))

    def group(self: Any, number: int) -> Any:
        return _kept(memo, ("group", self.footer, number), lambda: real_group(self, number))

    def decoded(self: Any, number: int, names: Any, parts: Any) -> Any:
        key = "rows", self.footer, number, tuple(names), tuple(parts)
        return _kept(memo, key, lambda: real_decoded(self, number, names, parts))

    patch.setattr(journal_file.JournalFile, "_read_footer", read_footer)
    patch.setattr(journal_file.JournalFile, "_group", group)
    patch.setattr(journal_file.JournalFile, "_decoded", decoded)


def _keep_files(patch: pytest.MonkeyPatch, memo: _Memo) -> None:
    real_read, real_rows = parquet.ParquetFormat._read, archive_read._parquet
    real_lines, real_dead = text_lines.read_event_lines, dead_letters._read_table

    def read(self: Any, data: Any) -> Iterator[pa.RecordBatch]:
        found = _whole(data)
        key = "parquet", found, tuple(self.columns.names.items())
        yield from _kept(memo, found and key, lambda: list(real_read(self, data)))

    def rows(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
        found = source.getvalue() if isinstance(source, _Buffer) else None
        yield from _kept(memo, found and ("rows", found), lambda: list(real_rows(source, what)))

    def lines(form: str, data: Any, codec: str) -> Iterator[pa.RecordBatch]:
        found = _whole(data)
        key = "lines", found, codec
        yield from _kept(memo, found and key, lambda: list(real_lines(form, data, codec)))

    def dead(data: bytes) -> pa.Table:
        return _kept(memo, ("dead", data), lambda: real_dead(data))

    patch.setattr(parquet.ParquetFormat, "_read", read)
    patch.setattr(archive_read, "_parquet", rows)
    patch.setattr(archive_read, "open_data", _open_whole)
    patch.setattr(text_lines, "read_event_lines", lines)
    patch.setattr(dead_letters, "_read_table", dead)


class _Buffer(pa.BufferReader):
    """A file in memory that can return all of its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def getvalue(self) -> bytes:
        return self._data


def _open_whole(data: Any) -> pa.NativeFile:
    found = _whole(data)
    return open_data(data) if found is None else _Buffer(found)


def _whole(data: Any) -> bytes | None:
    """All bytes of a file that is in memory; None if a read would be a request."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    if isinstance(data, tempfile.SpooledTemporaryFile):
        data.seek(0)
        found = data.read()
        data.seek(0)
        return bytes(found)
    return None


def _kept(memo: _Memo, key: Hashable, decode: Callable[[], Any]) -> Any:
    """What was decoded before; without a key, or after an error, it is decoded again."""
    if not key:
        return decode()
    if key not in memo:
        memo[key] = decode()
    return memo[key]
