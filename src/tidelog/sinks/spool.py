"""A file on its way to the store: in memory, or on this machine's disk when told so."""

from __future__ import annotations

import io
import tempfile
from typing import IO, Any

__all__ = ["Spool"]


class Spool:
    """Takes bytes from start to end, and gives them back once."""

    def __init__(self) -> None:
        self._file: IO[bytes] = io.BytesIO()
        self._size = 0
        self._on_disk = False

    @property
    def bytes_held(self) -> int:
        """How many bytes are in memory."""
        return 0 if self._on_disk else self._size

    def write(self, data: Any, /) -> int:
        """Add bytes."""
        written = self._file.write(data)
        self._size += written
        return written

    def to_disk(self) -> None:
        """Free the memory; what follows goes to disk too."""
        if not self._on_disk:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the spool
            file.write(self.take())
            self._file, self._on_disk = file, True

    def take(self) -> bytes:
        """All of it, in memory once. The spool is over."""
        with self._file as file:
            if isinstance(file, io.BytesIO):
                return file.getvalue()  # shares its buffer
            file.seek(0)
            return file.read()
