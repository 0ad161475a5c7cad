"""Room that is kept back on the disk of a catalog, so that a full disk can be emptied.

SQLite writes to its log even to delete a row, so on a full disk nothing could be deleted. A file
beside the catalog holds some room. Opening the catalog, and commands that free space, cut a slice
off its end when the disk is full. These commands make it whole again when there is room.

Commands that free space write in lots of a bounded size (``limits.CHANGES_MAX``). When a lot does
not fit, or little room is left after one, SQLite's log is moved into its file and cut to nothing;
only then a slice of the reserve is given. The file may grow by that, so it happens before the disk
is full. So the room that is needed does not grow with what is deleted. When such a command ends,
the log is cut again, and the reserve gets back what was used of it, while there is room for it.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from tidelog.catalog.base import Catalog
from tidelog.model import limits

__all__ = ["FreeingCatalog", "Reserve", "freeing"]

_FREE_TIMES = 4  # the room that must be free, in reserves, before one is made


@runtime_checkable
class FreeingCatalog(Protocol):
    """A catalog with a reserve."""

    def freeing(self) -> AbstractContextManager[None]:
        """While the block frees space, writes may use the reserve."""
        ...


def freeing(catalog: Catalog) -> AbstractContextManager[None]:
    """Let writes of a block that frees space use a catalog's reserve, if it has one."""
    return catalog.freeing() if isinstance(catalog, FreeingCatalog) else contextlib.nullcontext()


class Reserve:
    """The file ``<catalog>-reserve``."""

    def __init__(self, catalog: Path) -> None:
        self._path = catalog.with_name(f"{catalog.name}-reserve")

    def give(self, size: int) -> bool:
        """Give some bytes back to the file system; whether there were any left."""
        try:
            left = self._path.stat().st_size
            if left:
                os.truncate(self._path, max(0, left - size))
        except OSError:
            return False
        return left > 0

    def size(self) -> int:
        """How many bytes are left of it."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def take_back(self, size: int) -> None:
        """Make it as large as it was before some of it was given, as far as there is room."""
        with contextlib.suppress(OSError):
            wanted = min(size, self.size() + self._free_bytes())
            if wanted > self.size():
                self._allocate(wanted)

    def give_if_full(self, size: int) -> None:
        """The same, if less than that is free."""
        if self.is_disk_full(size):
            self.give(size)

    def is_disk_full(self, size: int) -> bool:
        """Whether less than this is free; not where the disk cannot be asked."""
        try:
            return self._free_bytes() < size
        except OSError:
            return False

    def fill(self) -> None:
        """Make it whole, if there is plenty of room; a disk that is nearly full is left alone."""
        wanted = limits.RESERVE_BYTES
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size >= wanted:
                return
            if self._free_bytes() < _FREE_TIMES * wanted:
                return
            self._allocate(wanted)

    def _allocate(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize
