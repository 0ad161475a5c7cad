"""Files on their way into staging: some at once, while the next ones are encoded.

An upload waits for the network or the disk, and encoding needs the processor, so they go side by
side. How many files wait, and their bytes in memory, are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import crc32c

from tidelog.clock import RandomIds
from tidelog.model.pipeline import FileEntry
from tidelog.store.base import Store
from tidelog.store.fresh import put_fresh

__all__ = ["Put", "Uploads"]

_AT_ONCE = 4
_BYTES_MAX = 64 << 20  # of files that wait; a larger one goes alone

Put = Callable[[str, int, int], FileEntry]  # what is known of a file, with its key, size and crc32c


class Uploads:
    """The files of one writer, in the order in which they were added."""

    def __init__(self, store: Store, staging: str) -> None:
        self._store = store
        self._staging = f"{staging}/{RandomIds().new()}"  # a repeated task has names of its own
        self._pool = ThreadPoolExecutor(_AT_ONCE, "tidelog-upload")
        self._waiting: deque[tuple[Future[FileEntry], int]] = deque()
        self._files: list[FileEntry] = []

    def add(self, content: bytes, put: Put) -> None:
        """Begin to store a file; errors of earlier ones may be raised here."""
        size = len(content)
        while self._waiting and (
            len(self._waiting) >= _AT_ONCE or sum(s for _, s in self._waiting) + size > _BYTES_MAX
        ):
            self._settle()
        key = f"{self._staging}/{len(self._files) + len(self._waiting)}"
        self._waiting.append((self._pool.submit(self._store_file, key, content, put), size))

    def close(self) -> tuple[FileEntry, ...]:
        """All files, once they are durable."""
        try:
            while self._waiting:
                self._settle()
        finally:
            self._pool.shutdown()
        return tuple(self._files)

    def _settle(self) -> None:
        future, _ = self._waiting.popleft()
        self._files.append(future.result())

    def _store_file(self, key: str, content: bytes, put: Put) -> FileEntry:
        put_fresh(self._store, key, content)
        return put(key, len(content), crc32c.crc32c(content))
