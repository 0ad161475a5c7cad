"""Fetches objects: the next ones while the caller works on one, or one of them as a file.

**Ahead.** Results come in order, and an error in its turn. Only a few are in memory at a time, even
for a slow caller.

**As files.** Objects are fetched whole and checked, or read by ranges. Both keep a bounded amount
in memory. A fetched file beyond that is on the local disk, because its checksum covers all of it
and it should be read only once.
"""

from __future__ import annotations

import io
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import BinaryIO, TypeVar, cast

import crc32c

from tidelog.concurrency import Pool
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.model.pipeline import FileEntry
from tidelog.store.base import Store

__all__ = [
    "fetch_ahead",
    "fetch_ahead_in_threads",
    "fetched",
    "naming",
    "opened",
]

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3  # objects; each is a round trip on a remote store


def fetch_ahead(
    pool: Executor | None, fetch: Callable[[T], R], wanted: Iterable[T], ahead: int
) -> Iterator[tuple[T, R]]:
    """Yields each thing with the result of ``fetch``; a pool fetches up to ``ahead`` in advance."""
    if pool is None:
        yield from ((each, fetch(each)) for each in wanted)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for each in wanted:
            waiting.append((each, pool.submit(fetch, each)))
            if len(waiting) > ahead:
                first, coming = waiting.popleft()
                yield first, coming.result()
        while waiting:
            first, coming = waiting.popleft()
            yield first, coming.result()
    finally:
        for _, coming in waiting:
            coming.cancel()


def fetch_ahead_in_threads(fetch: Callable[[T], R], wanted: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Does the same with threads of its own, which end with the iteration."""
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        yield from fetch_ahead(pool, fetch, wanted, _AHEAD)


_FETCH_BYTES = 8 << 20  # in one request
_SPOOL_BYTES = 4 << 20  # of a fetched file in memory; a commit may have many open


@contextmanager
def fetched(store: Store, file: FileEntry) -> Iterator[BinaryIO]:
    """Fetches a whole file of an archive. Raises ``CorruptError`` if its manifest differs."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        size = crc = 0
        for start in range(0, max(file.size, 1), _FETCH_BYTES):
            # Ask for one byte more than expected, to notice a file that has grown.
            end = min(start + _FETCH_BYTES, file.size)
            part = _part(store, file, start, end + 1 if end == file.size else end)
            size += len(part)
            crc = crc32c.crc32c(part, crc)
            spool.write(part)
        if (size, crc) != (file.size, file.crc):
            raise CorruptError(
                f"archive file `{file.target}`: expected {file.size} bytes with crc32c "
                f"{file.crc:08x}, found {size} with {crc:08x}: keep it, and restore it from a copy",
                file=file.target,
            )
        spool.seek(0)
        yield cast(BinaryIO, spool)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds the name of the file to errors of a decoder, which does not know it."""
    try:
        yield
    except (CorruptError, InvalidError) as exc:
        raise type(exc)(f"{what}: {exc}", **exc.context) from exc


@contextmanager
def opened(store: Store, key: str, size: int) -> Iterator[BinaryIO]:
    """Opens an object of this size, and reads only the ranges that are used.

    Raises ``NotFoundError`` if it was deleted or became shorter.
    """
    with io.BufferedReader(_Ranges(store, key, size), _FETCH_BYTES) as file:
        yield cast(BinaryIO, file)


def _part(store: Store, file: FileEntry, start: int, end: int) -> bytes:
    try:
        return store.get(file.target, start, end)
    except NotFoundError as exc:
        raise CorruptError(
            f"archive file `{file.target}`: is not there: find out who deleted it, and restore it "
            "from a copy",
            file=file.target,
        ) from exc


class _Ranges(io.RawIOBase):
    """An object read by ranges."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        end = min(self._at + len(view), self._size)
        if end <= self._at:
            return 0
        data = self._get(end)
        view[: len(data)] = data
        self._at = end
        return len(data)

    def _get(self, end: int) -> bytes:
        try:
            data = self._store.get(self._key, self._at, end)
        except NotFoundError as exc:
            raise NotFoundError(
                f"file `{self._key}`: has vanished: put it back, or continue without it",
                file=self._key,
            ) from exc
        if len(data) < end - self._at:
            raise NotFoundError(
                f"file `{self._key}`: has shrunk: it ends at byte {self._at + len(data)}, and had "
                f"{self._size}: put back what it was",
                file=self._key,
            )
        return data
