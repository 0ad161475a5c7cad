"""Checksums of rows, the same for every backend: a damaged row is an error, never a wrong answer.

A stored value ends with four bytes: the crc32c of the row's partition, name, version and value. So
a flipped bit in any of them is noticed when the row is read, and so is a value under another row's
name. A home wraps its backend once, when it opens it; nothing below knows about it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import crc32c

from tidelog.catalog.base import (
    Catalog,
    Change,
    Put,
    Row,
    check_write,
    clear_deleted_rows,
    freeing,
)
from tidelog.errors import ConflictError, CorruptError

__all__ = ["CheckedCatalog", "Inspectable"]

_BYTES = 4


@runtime_checkable
class Inspectable(Protocol):
    """A catalog that can be read as a whole, without knowing its partitions."""

    def inspect(self) -> Iterator[str]:
        """Yields what is wrong with the whole catalog, in words; nothing if it is sound."""
        ...

    def every_row(self) -> Iterator[tuple[str, Row]]:
        """Yields all rows with their partitions, in any order."""
        ...


@runtime_checkable
class BilledCatalog(Protocol):
    """A catalog whose server says what each request costs."""

    units: dict[str, float]  # by what was asked for


class CheckedCatalog:
    """Adds a checksum to each row that is written, and checks and removes it from each read.

    It also counts calls, for metrics.
    """

    def __init__(self, inner: Catalog) -> None:
        self.inner = inner
        self.calls = dict.fromkeys(("get", "scan", "write", "conflict"), 0)
        self._lock = threading.Lock()

    @property
    def units(self) -> dict[str, float]:
        """Returns the capacity units that the server has counted; none if it counts none."""
        return dict(self.inner.units) if isinstance(self.inner, BilledCatalog) else {}

    def _count(self, call: str) -> None:
        with self._lock:
            self.calls[call] += 1

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, partition: str, row: str) -> Row | None:
        self._count("get")
        found = self.inner.get(partition, row)
        return None if found is None else open_row(partition, found)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        self._count("scan")
        for row in self.inner.scan(partition, start, end, limit, reverse):
            yield open_row(partition, row)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        check_write(partition, changes, write_id)
        self._count("write")
        sealed = [_seal(partition, change, write_id) for change in changes]
        try:
            self.inner.write(partition, *sealed, write_id=write_id)
        except ConflictError as exc:
            self._count("conflict")
            exc.rows = _open_rows(partition, exc.rows)
            raise

    def close(self) -> None:
        self.inner.close()

    def freeing(self) -> AbstractContextManager[None]:
        """Lets the block use the reserve, if the backend has one."""
        return freeing(self.inner)

    def clear_deleted_rows(self) -> bool:
        """Removes what the backend's own files hold of deleted rows, if it has any."""
        return clear_deleted_rows(self.inner)

    def every_row(self) -> Iterator[tuple[str, str]]:
        """Yields partition and name of all readable rows; nothing if they cannot be listed."""
        if isinstance(self.inner, Inspectable):
            with contextlib.suppress(CorruptError):
                for partition, row in self.inner.every_row():
                    if isinstance(partition, str) and isinstance(row.row, str):  # else damaged
                        yield partition, row.row

    def inspect(self) -> Iterator[str]:
        """Yields what is wrong with the whole catalog: its file, and rows that no name leads to."""
        if not isinstance(self.inner, Inspectable):
            return
        try:
            yield from self.inner.inspect()
            for partition, row in self.inner.every_row():
                try:
                    open_row(partition, row)
                except CorruptError as exc:
                    yield exc.message
        except CorruptError as exc:
            yield exc.message


def open_row(partition: str, stored: Row) -> Row:
    """Returns the row without its checksum. Raises ``CorruptError`` if that is wrong."""
    # SQLite stores a type with each value, so damage may turn it into a number or a text.
    value, found = b"", b""
    names = isinstance(stored.row, str) and isinstance(stored.version, str)
    if names and isinstance(stored.value, bytes):
        value, found = stored.value[:-_BYTES], stored.value[-_BYTES:]
    if not found or found != _checksum(partition, stored.row, stored.version, value):
        raise CorruptError(
            f"row `{stored.row}` of `{partition}`: its checksum does not match: keep the "
            "catalog, and restore it from a copy",
            partition=partition,
            row=stored.row,
        )
    return Row(stored.row, value, stored.version)


def seal(partition: str, row: str, version: str, value: bytes) -> bytes:
    """Returns a value with its checksum, as a backend stores it."""
    return value + _checksum(partition, row, version, value)


def _seal(partition: str, change: Change, write_id: str) -> Change:
    if not isinstance(change, Put):
        return change
    value = seal(partition, change.row, write_id, bytes(change.value))
    return Put(change.row, value, change.expect)


def _checksum(partition: str, row: str, version: str, value: bytes) -> bytes:
    # No name contains a NUL, so the parts are unambiguous.
    key = f"{partition}\0{row}\0{version}\0".encode()
    return crc32c.crc32c(value, crc32c.crc32c(key)).to_bytes(_BYTES, "big")


def _open_rows(partition: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if row is None else open_row(partition, row) for name, row in rows.items()}


_: type[Catalog] = CheckedCatalog
