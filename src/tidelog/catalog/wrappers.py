"""Wrappers around a catalog: checksums of rows, and disk space in reserve for a full disk.

**Checksums** are the same for every backend: a damaged row is an error, never a wrong answer. A
stored value ends with four bytes: the crc32c of the row's partition, name, version and value. So a
flipped bit in any of them is noticed when the row is read, and so is a value under another row's
name. A home wraps its backend once, when it opens it; nothing below knows about it.

**The reserve** is disk space beside a catalog, so that a full disk can be freed. SQLite writes to
its log even to delete a row, so on a full disk nothing could be deleted. A file beside the catalog
reserves some space. Opening the catalog, and commands that free space, cut a slice off its end when
the disk is full. These commands restore it when there is space.

Commands that free space write in batches of limited size (``limits.CHANGES_MAX``). When a batch
does not fit, or little space is left after one, SQLite's log is moved into its file and truncated.
Only then a slice of the reserve is released. The file may grow by that, so it happens before the
disk is full. So the space needed does not grow with what is deleted. When such a command ends, the
log is truncated again, and the reserve gets back what was used of it, if there is space.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import crc32c

from tidelog.catalog.base import Catalog, Change, Put, Row, check_write, clear_deleted_rows
from tidelog.concurrency import create_file
from tidelog.errors import ConflictError, CorruptError
from tidelog.model import limits

__all__ = [
    "CheckedCatalog",
    "FreeingCatalog",
    "Inspectable",
    "Reserve",
    "freeing",
]

_FREE_TIMES = 4  # free space, in reserves, that is required to create one


@runtime_checkable
class FreeingCatalog(Protocol):
    """A catalog with a reserve."""

    def freeing(self) -> AbstractContextManager[None]:
        """While the block frees space, writes may use the reserve."""
        ...


def freeing(catalog: Catalog) -> AbstractContextManager[None]:
    """Lets writes of a block that frees space use a catalog's reserve, if it has one."""
    return catalog.freeing() if isinstance(catalog, FreeingCatalog) else contextlib.nullcontext()


class Reserve:
    """The file ``<catalog>-reserve``."""

    def __init__(self, catalog: Path) -> None:
        self._catalog = catalog
        self._path = catalog.with_name(f"{catalog.name}-reserve")

    def give(self, size: int) -> bool:
        """Releases some bytes to the file system; returns whether there were any left."""
        try:
            left = self._path.stat().st_size
            if left:
                os.truncate(self._path, max(0, left - size))
        except OSError:
            return False
        return left > 0

    def size(self) -> int:
        """Returns how many bytes are left of it."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def take_back(self, size: int) -> None:
        """Restores the size that it had before some was released, as far as there is space."""
        with contextlib.suppress(OSError):
            wanted = min(size, self.size() + self._free_bytes())
            if wanted > self.size():
                self._allocate(wanted)

    def give_if_full(self, size: int) -> None:
        """Releases the same, if less than that is free."""
        if self.is_disk_full(size):
            self.give(size)

    def is_disk_full(self, size: int) -> bool:
        """Returns whether less than this is free; False if the disk does not say."""
        try:
            return self._free_bytes() < size
        except OSError:
            return False

    def fill(self) -> None:
        """Restores its full size if there is plenty of space; leaves a nearly full disk alone."""
        wanted = limits.RESERVE_BYTES
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size >= wanted:
                return
            if self._free_bytes() < _FREE_TIMES * wanted:
                return
            self._allocate(wanted)

    def _allocate(self, size: int) -> None:
        descriptor = create_file(self._path, os.O_WRONLY, self._catalog)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize


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
