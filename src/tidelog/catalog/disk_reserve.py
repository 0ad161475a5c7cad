"""Disk space that is reserved beside a catalog, so that a full disk can be freed.

SQLite writes to its log even to delete a row, so on a full disk nothing could be deleted. A file
beside the catalog reserves some space. Opening the catalog, and commands that free space, cut a
slice off its end when the disk is full. These commands restore it when there is space.

Commands that free space write in batches of limited size (``limits.CHANGES_MAX``). When a batch
does not fit, or little space is left after one, SQLite's log is moved into its file and truncated.
Only then a slice of the reserve is released. The file may grow by that, so it happens before the
disk is full. So the space needed does not grow with what is deleted. When such a command ends, the
log is truncated again, and the reserve gets back what was used of it, if there is space.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from tidelog.catalog.base import Catalog
from tidelog.model import limits
from tidelog.process import create_file

__all__ = ["FreeingCatalog", "Reserve", "freeing"]

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
