"""Erases events from files that were set aside after a restore (``pipeline.forgotten_ranges``).

No commit names these files, and their offsets may belong to other events by now. So events are
recognized by ids and keys, and by the times up to which these were erased, like in copies. A row
has the source partition and incarnation of a file (``aside_origins``): an erasure changes no file
of another topic, even if it had the same name. A file whose row was lost may be of any.

A file keeps its name, since a dead driver may have copied it there again, create-only. A single
file is replaced by its etag, in one step. One with a sidecar takes four:

1. put ``<file>.erasing-<checksum>`` with both contents        → crash: the next erasure does 2
2. replace the file by its etag                                → crash: the next one resumes at 3
3. replace the sidecar by its etag                             → crash: the next one resumes at 4
4. delete the object of step 1

Of two erasures at once, one wins step 2. The other's object of step 1, whose checksums no longer
match, is deleted without effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import crc32c
import pyarrow as pa

from tidelog.archive.derived_archives import Origin
from tidelog.archive.read import ArchiveFiles
from tidelog.catalog.update import rounds
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import replay_pipeline
from tidelog.erasure.matcher import own_column
from tidelog.erasure.rewrite_range import FILE_ATTEMPTS, FileRewriter, file_busy, replace_object
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
)
from tidelog.log.ledger import ErasedIds
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import AsideErasure, FileEntry, Manifest, ReplacedFile
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.store.base import Store

__all__ = ["AsideFile", "AsideFiles", "aside_origins"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _File:
    manifest: Manifest  # of the file and its sidecar, as they are now
    entry: FileEntry
    generation: int


@dataclass(frozen=True, slots=True)
class AsideFile:
    """A file that was set aside: its objects, and what they hold."""

    parts: tuple[FileEntry, ...]
    batches: list[pa.RecordBatch]


class AsideFiles:
    """The files of an archive that were set aside, in their store."""

    def __init__(
        self, store: Store, archive: Archive, holds: Callable[[str], bool] = lambda _: True
    ) -> None:
        """``holds`` returns by key whether a file may hold the events."""
        self._store = store
        self._archive = archive
        self._holds = holds

    def batches(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yields the events of all files, except of dropped generations."""
        for key in self.names():
            read = self._retry_on_change(key, self._with_events)
            yield from ((key, batch) for batch in (() if read is None else read.batches))

    def read(self, key: str) -> AsideFile | None:
        """Returns a file with its events; None for one of a dropped generation.

        Raises ``CorruptError`` also while the file is being erased. Changes nothing.
        """
        file = self._read(key)
        return None if file is None else self._with_events(file)

    def _with_events(self, file: _File) -> AsideFile:
        written_as = self._archive.format_of(file.generation)
        batches = ArchiveFiles(self._store, written_as).batches(file.manifest, file.entry)
        return AsideFile(file.manifest.files, list(batches))

    def _retry_on_change(self, key: str, call: Callable[[_File], T]) -> T | None:
        """Returns what a call makes of a file; retries if an erasure changes it in between."""
        for _ in rounds(FILE_ATTEMPTS, file_busy(key)):
            file = self._read(key)
            if file is None:
                return None
            try:
                return call(file)
            except CorruptError:
                if self._finish() == 0 and self._read(key) == file:
                    raise
        raise file_busy(key)

    def erase(self, erased: ErasedIds) -> tuple[int, int]:
        """Removes what was erased. Returns how many files changed, and how many events."""
        self._finish()
        files = events = 0
        for key in self.names():
            gone = self._erase(key, erased)
            files, events = files + bool(gone), events + gone
        return files, events

    def names(self) -> list[str]:
        """Returns the files of events and dead letters that may hold the events: no sidecars."""
        keys = [info.key for info in self._store.list(layout.aside_folder(self._archive.root))]
        beside: set[str | None] = set()
        for generation in self._archive.formats:
            rewriter = FileRewriter(self._store, self._archive.format_of(generation))
            beside |= {rewriter.sidecar_name(key) for key in keys}
        files = [key for key in keys if key not in beside and layout.ERASING not in key]
        return [key for key in files if self._holds(key)]

    def _generation(self, key: str) -> int | None:
        """Returns the generation whose settings made a file; None if it is dropped."""
        folder = layout.aside_folder(self._archive.root)
        path = key.removeprefix(folder).partition("/")[2]
        if path.startswith(f"{self._archive.dead}/"):
            return self._archive.generation  # dead letters are the same in all generations
        number = path.partition("/")[0].removeprefix("g")
        found = int(number) if number.isdecimal() else 0
        return found if found in self._archive.formats else None

    def _read(self, key: str) -> _File | None:
        """Reads a file; None if it is missing or unreadable."""
        generation = self._generation(key)
        if generation is None:
            return None
        is_dead = f"/{self._archive.dead}/" in key
        rewriter = FileRewriter(self._store, self._archive.format_of(generation))
        beside = None if is_dead else rewriter.sidecar_name(key)
        entries = []
        for name, kind in ((key, "dead" if is_dead else "data"), (beside, "sidecar")):
            if name is not None:
                try:
                    entries.append(_entry(name, self._store.get(name), kind))
                except NotFoundError:
                    return None
        manifest = Manifest("", "", "", "", 0, 0, 0, files=tuple(entries))
        return _File(manifest, entries[0], generation)

    def _erase(self, key: str, erased: ErasedIds) -> int:
        for _ in rounds(FILE_ATTEMPTS, file_busy(key)):
            found = self._retry_on_change(key, lambda file: self._without(file, erased))
            if found is None:
                return 0
            count, wanted = found
            if self._replace(key, wanted):
                return count
        raise file_busy(key)

    def _without(self, file: _File, erased: ErasedIds) -> tuple[int, AsideErasure] | None:
        """Returns how many events of a file were erased, and the file without them."""
        rewriter = FileRewriter(self._store, self._archive.format_of(file.generation))
        rewritten = rewriter.without_rows(
            file.manifest, file.entry, lambda batch: _is_erased(batch, erased)
        )
        if rewritten is None:
            return None
        contents = [rewritten.data] + ([] if rewritten.sidecar is None else [rewritten.sidecar])
        parts = zip(file.manifest.files, contents, strict=True)
        return rewritten.erased, AsideErasure(
            tuple(ReplacedFile(each.target, each.size, each.crc, data) for each, data in parts)
        )

    def _replace(self, key: str, wanted: AsideErasure) -> bool:
        """Returns whether all parts are replaced; otherwise another erasure was faster."""
        if len(wanted.parts) == 1:
            return self._carry_out(wanted)
        data = encode_row(wanted)
        decision = f"{key}{layout.ERASING}{crc32c.crc32c(data):08x}"
        with contextlib.suppress(AlreadyExistsError):  # an earlier attempt put the same
            self._store.put(decision, data)
        done = self._carry_out(wanted)
        self._store.delete([decision])
        return done

    def _finish(self) -> int:
        """Steps 2 to 4 of what is after step 1, for example after a crash. Returns how many."""
        count = 0
        for info in list(self._store.list(layout.aside_folder(self._archive.root))):
            if layout.ERASING in info.key:
                count += 1
                with contextlib.suppress(NotFoundError):
                    data = self._store.get(info.key)
                    self._carry_out(decode_row(data, AsideErasure, f"object `{info.key}`"))
                    self._store.delete([info.key])
        return count

    def _carry_out(self, wanted: AsideErasure) -> bool:
        """Steps 2 and 3. Returns False if a part is neither the old nor the new one."""
        try:
            for part in wanted.parts:
                replace_object(self._store, part.key, partial(_is_erased_part, part), part.data)
        except _OtherBytesError:
            return False
        return True


def aside_origins(context: Context, archive: Archive) -> dict[str, Origin]:
    """Returns what the files that were set aside were read from, by key."""
    own = [archive.pipeline(generation) for generation in archive.formats]
    return {
        key: Origin(record.partition, record.incarnation)
        for pipeline in (*own, *map(replay_pipeline, own))
        for record in read_aside(context, pipeline)
        for key in record.files
    }


class _OtherBytesError(Exception):
    """A part is neither the old nor the new one."""


def _is_erased_part(part: ReplacedFile, found: bytes) -> bool:
    if found == part.data:
        return True
    if (len(found), crc32c.crc32c(found)) != (part.size, part.crc):
        raise _OtherBytesError
    return False


def _entry(key: str, data: bytes, kind: str) -> FileEntry:
    return FileEntry("", key, len(data), crc32c.crc32c(data), 0, 0, 0, 0, 0, kind)


def _is_erased(batch: pa.RecordBatch, erased: ErasedIds) -> pa.Array:
    """Returns which rows were erased, by id and key; a row without a time precedes any delete."""
    columns: dict[str, pa.Array] = {}
    for name, kind in (("id", pa.string()), ("key", pa.binary()), ("timestamp", pa.int64())):
        column = own_column(batch, name)
        if column is not None and name == "timestamp":
            is_time = pa.types.is_timestamp(column.type)
            column = column.cast(pa.timestamp("ms"), safe=False) if is_time else None
        if column is None:
            zeros = name == "timestamp"
            column = pa.array([0] * batch.num_rows) if zeros else pa.nulls(batch.num_rows, kind)
        try:
            columns[name] = (
                column.cast(kind).fill_null(0) if name == "timestamp" else column.cast(kind)
            )
        except pa.ArrowException as exc:
            raise CorruptError(f"column `{name}`: {column.type} is not {kind}") from exc
    kept = erased.kept(pa.RecordBatch.from_pydict(columns))
    if kept is None:
        return pa.array([False] * batch.num_rows, pa.bool_())
    return pa.array(~kept)
