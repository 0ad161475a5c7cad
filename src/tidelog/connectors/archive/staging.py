"""Sorts batches by folder, stages files, and publishes them.

**Portions.** Rows of a batch are sorted by folder once, so the rows of each folder are one slice
without a copy. A slice keeps the whole portion in memory, so a portion counts until its last share
is written.

**Uploads.** An upload waits for the network or the disk while encoding needs the processor, so they
run in parallel. The number of waiting files and their bytes in memory are bounded. A spool keeps a
file in memory, or on the local disk.

**Publishing.** Files are copied, never moved, and created only once. A target that already has the
same bytes is done: another driver, or this one before a crash, published it. A missing staged file
is fine if its target is right. If both are missing, a file was deleted that must not be.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, Self

import crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.clock import RandomIds
from tidelog.codec.parsers import FolderPaths
from tidelog.concurrency import Pool
from tidelog.errors import AlreadyExistsError, CorruptError, NotFoundError, TidelogError
from tidelog.model.pipeline import FileEntry
from tidelog.store.base import Store, copy_fresh, put_fresh

__all__ = [
    "FolderRows",
    "MakeEntry",
    "Portion",
    "Spool",
    "StagedFiles",
    "copy_files",
    "discard_files",
    "is_published",
    "portion_of",
    "publish_files",
    "shares_of",
]

_SHARE_BYTES = 400  # approximate cost of a share in Python objects


class Portion:
    """Rows of one batch, and what files hold instead of their values, if a parser says so."""

    def __init__(self, batch: pa.RecordBatch, values: pa.Array | None = None) -> None:
        self.batch = batch
        self.values = values
        self.offsets = batch.column("offset").to_numpy()
        self.times = batch.column("timestamp").cast(pa.int64()).to_numpy()
        self.bytes = int(batch.nbytes)
        self.left = 0  # shares that are not written yet


@dataclass(frozen=True, slots=True)
class FolderRows:
    """The rows of a portion that belong to one folder, in offset order."""

    portion: Portion
    start: int
    end: int
    path_ms: int  # the parser's time of the last row; -1: its path has none

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def bytes(self) -> int:
        """Returns about how many bytes, as if all rows had the same size."""
        return self.portion.bytes * self.rows // len(self.portion.offsets)

    @property
    def batch(self) -> pa.RecordBatch:
        """Returns the rows as files hold them."""
        own, values = self.own, self.portion.values
        if values is None:
            return own
        at = own.schema.get_field_index("value")
        changed = values.slice(self.start, self.rows).cast(own.schema.field(at).type)
        return own.set_column(at, own.schema.field(at), changed)

    @property
    def own(self) -> pa.RecordBatch:
        """Returns the rows with the events' own values."""
        return self.portion.batch.slice(self.start, self.rows)


def portion_of(batch: pa.RecordBatch) -> FolderRows:
    """Returns a whole batch for one folder."""
    portion = Portion(batch)
    portion.left = 1
    return FolderRows(portion, 0, batch.num_rows, -1)


def shares_of(batch: pa.RecordBatch, folders: FolderPaths) -> Iterator[tuple[str, FolderRows]]:
    """Yields the rows of a batch that have a path, folder by folder."""
    paths, times, values = folders.paths, folders.times, folders.values
    if folders.errors.null_count < batch.num_rows:
        good = pc.is_null(folders.errors)
        batch, paths, times = batch.filter(good), paths.filter(good), times.filter(good)
        values = None if values is None else values.filter(good)
    if batch.num_rows == 0:
        return
    names = paths.dictionary.to_pylist()
    codes = paths.indices.to_numpy()
    if len(names) < np.iinfo(np.int16).max:
        codes = codes.astype(np.int16)  # numpy sorts this type in one pass
    path_ms = times.fill_null(-1).to_numpy()
    if (np.diff(codes) < 0).any():
        order = np.argsort(codes, kind="stable")
        batch, codes, path_ms = batch.take(pa.array(order)), codes[order], path_ms[order]
        values = None if values is None else values.take(pa.array(order))
    cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    portion = Portion(batch, values)
    portion.left = len(cuts) - 1
    portion.bytes += _SHARE_BYTES * portion.left
    for start, end in pairwise(cuts):
        yield names[codes[start]], FolderRows(portion, start, end, int(path_ms[end - 1]))


_AT_ONCE = 4
_BYTES_MAX = 64 << 20  # of waiting files; a larger one goes alone

# Makes the entry of a file from its key, size and crc32c.
MakeEntry = Callable[[str, int, int], FileEntry]


class StagedFiles:
    """The files that one writer stages, in the order they were added.

    As a context manager, it deletes them if an error prevents that they are returned.
    """

    def __init__(self, store: Store, staging: str) -> None:
        self._store = store
        self._staging = f"{staging}/{RandomIds().new()}"  # a repeated task gets its own names
        self._pool = Pool(_AT_ONCE, "tidelog-upload")
        self._waiting: deque[tuple[Future[FileEntry], int]] = deque()
        self._files: list[FileEntry] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            while self._waiting:
                with contextlib.suppress(Exception):  # the first error counts
                    self._settle()
            with contextlib.suppress(TidelogError):  # a sweep deletes them later
                discard_files(self._store, self._files)
        self._pool.shutdown()

    def add(self, content: bytes, make_entry: MakeEntry) -> None:
        """Starts to store a file. May raise errors of earlier files."""
        size = len(content)
        while self._waiting and (
            len(self._waiting) >= _AT_ONCE or sum(s for _, s in self._waiting) + size > _BYTES_MAX
        ):
            self._settle()
        key = f"{self._staging}/{len(self._files) + len(self._waiting)}"
        self._waiting.append((self._pool.submit(self._store_file, key, content, make_entry), size))

    def close(self) -> tuple[FileEntry, ...]:
        """Waits until all files are durable, and returns them."""
        try:
            while self._waiting:
                self._settle()
        finally:
            self._pool.shutdown()
        return tuple(self._files)

    def _settle(self) -> None:
        future, _ = self._waiting.popleft()
        self._files.append(future.result())

    def _store_file(self, key: str, content: bytes, make_entry: MakeEntry) -> FileEntry:
        put_fresh(self._store, key, content)
        return make_entry(key, len(content), crc32c.crc32c(content))


class Spool:
    """Collects bytes, and returns them once."""

    def __init__(self) -> None:
        self._file: IO[bytes] = io.BytesIO()
        self._size = 0
        self._on_disk = False

    @property
    def bytes_held(self) -> int:
        """Returns how many bytes are in memory."""
        return 0 if self._on_disk else self._size

    def write(self, data: Any, /) -> int:
        """Adds bytes."""
        written = self._file.write(data)
        self._size += written
        return written

    def to_disk(self) -> None:
        """Frees the memory; what follows goes to disk too."""
        if not self._on_disk:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the spool
            file.write(self.take())
            self._file, self._on_disk = file, True

    def take(self) -> bytes:
        """Returns all of it, in memory once. Ends the spool."""
        with self._file as file:
            if isinstance(file, io.BytesIO):
                return file.getvalue()  # shares its buffer
            file.seek(0)
            return file.read()


def publish_files(store: Store, files: Sequence[FileEntry], at_once: int = 1) -> None:
    """Makes staged files visible. Idempotent. Raises ``CorruptError`` if that is impossible.

    Copies up to ``at_once`` files in parallel, because each takes several round trips.
    """
    if at_once == 1 or len(files) < 2:
        for file in files:
            _publish(store, file)
        return
    with Pool(at_once, "tidelog-publish") as pool:
        for done in [pool.submit(_publish, store, file) for file in files]:
            done.result()


def copy_files(
    store: Store, files: Sequence[FileEntry], staging: str, at_once: int
) -> tuple[FileEntry, ...]:
    """Implements ``CopyingSink.copy``."""
    place = f"{staging}/{RandomIds().new()}"  # a repeated attempt gets its own names

    def copy(number: int, file: FileEntry) -> FileEntry:
        size = store.head(file.staged).size
        if size != file.size:
            raise CorruptError(
                f"file `{file.staged}`: has {size} bytes, its manifest says {file.size}: restore "
                "it from a copy",
                file=file.staged,
            )
        staged = f"{place}/{number}"
        copy_fresh(store, file.staged, staged)
        return msgspec.structs.replace(file, staged=staged)

    with Pool(at_once, "tidelog-copy") as pool:
        return tuple(pool.map(copy, range(len(files)), files))


def is_published(store: Store, file: FileEntry) -> bool:
    """Returns whether a file has its final name, with the bytes in its manifest."""
    try:
        if store.head(file.target).size != file.size:
            return False
        return crc32c.crc32c(store.get(file.target)) == file.crc
    except NotFoundError:
        return False


def discard_files(store: Store, files: Sequence[FileEntry]) -> None:
    """Deletes staged files. Idempotent."""
    if files:
        store.delete([file.staged for file in files])


def _publish(store: Store, file: FileEntry) -> None:
    try:
        store.copy(file.staged, file.target)
    except (AlreadyExistsError, NotFoundError):
        _check_published(store, file)


def _check_published(store: Store, file: FileEntry) -> None:
    try:
        data = store.get(file.target)
    except NotFoundError as exc:
        raise CorruptError(
            f"file `{file.target}`: neither it nor its staged copy `{file.staged}` is there: "
            "find out who deleted them, and restore one from a copy"
        ) from exc
    if len(data) != file.size or crc32c.crc32c(data) != file.crc:
        raise CorruptError(
            f"file `{file.target}`: expected {file.size} bytes with crc32c {file.crc:08x}, found "
            f"{len(data)} with {crc32c.crc32c(data):08x}: no manifest names what is "
            "there: move it out of the archive's folder, keep it, and run again"
        )
