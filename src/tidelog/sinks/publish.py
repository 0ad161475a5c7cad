"""From staging to final names: copied, never moved, and created only once.

A file that is there already with the same bytes is done: another driver, or this one before it
died, has published it. One whose staged copy is gone is done too, if its target is as it should
be; if neither is there, something was deleted that must not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import crc32c
import pyarrow as pa

from tidelog.codec.segment import read_piece
from tidelog.errors import AlreadyExistsError, CorruptError, NotFoundError
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store.base import Store

__all__ = ["discard_files", "is_published", "publish_files", "staged_events"]


def publish_files(store: Store, files: Sequence[FileEntry], at_once: int = 1) -> None:
    """Make staged files visible; idempotent. ``CorruptError`` when that cannot be.

    With ``at_once`` above 1 so many copies go side by side: each is some round trips.
    """
    if at_once == 1 or len(files) < 2:
        for file in files:
            _publish(store, file)
        return
    with ThreadPoolExecutor(at_once, "tidelog-publish") as pool:
        for done in [pool.submit(_publish, store, file) for file in files]:
            done.result()


def is_published(store: Store, file: FileEntry) -> bool:
    """Whether a file is at its final name, with the bytes that its manifest says."""
    try:
        if store.head(file.target).size != file.size:
            return False
        return crc32c.crc32c(store.get(file.target)) == file.crc
    except NotFoundError:
        return False


def discard_files(store: Store, files: Sequence[FileEntry]) -> None:
    """Remove staged files. Idempotent."""
    if files:
        store.delete([file.staged for file in files])


def staged_events(
    store: Store, manifest: Manifest, skip: int = 0
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The events that were staged as segments, after the first ``skip``; each with its partition.

    ``NotFoundError`` when a segment is gone.
    """
    for file in manifest.files:
        for piece in file.pieces:
            if skip >= piece.count:
                skip -= piece.count
                continue
            what = f"object `{file.staged}`, bytes {piece.byte_start} to {piece.byte_end}"
            data = store.get(file.staged, piece.byte_start, piece.byte_end)
            for batch in read_piece(data, piece.crc, piece.count, what):
                part = batch.slice(min(skip, batch.num_rows))
                skip -= batch.num_rows - part.num_rows
                if part.num_rows:
                    yield part, piece.partition


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
