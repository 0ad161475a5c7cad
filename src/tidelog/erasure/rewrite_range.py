"""Rewrites the files of one range without some events, or with other values; also in tasks.

``FileRewriter`` makes the new bytes of a file: same format, columns and settings.

It needs only the store of the files. ``rewrite`` decides with it, range after range. With a task
runner, tasks do the heavy parts for many ranges at once:

- find out which ranges hold some of the events: changes nothing
- stage files, after the caller has put the intent: each attempt under its own names
- replace files, after the caller has put the manifest: settled by the file's etag and content

Everything that a task could not do is done by the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.archive.read import ArchiveFiles
from tidelog.catalog.update import rounds
from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.codec.formats.base import MISFIT_SCHEMA, OwnColumns
from tidelog.connectors.archive.dead_letters import encode_dead_letters
from tidelog.connectors.archive.staging import Spool, StagedFiles
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store import shared_store
from tidelog.store.base import Store, object_exists

__all__ = [
    "FILE_ATTEMPTS",
    "FileReplace",
    "FileRewriter",
    "Offsets",
    "RangeRewrite",
    "RangeRewriter",
    "Values",
    "changed_files",
    "file_busy",
    "files_of",
    "holds_here",
    "manifest_without",
    "matches_entry",
    "replace_file",
    "replace_here",
    "replace_object",
    "stage_here",
]

Offsets = npt.NDArray[np.int64]
Values = Mapping[int, bytes | None]
"""Values by offset, for an update."""


class RangeRewriter:
    """Rewrites files of one generation: without events, or with other values of theirs."""

    def __init__(
        self,
        store: Store,
        written_as: ArchiveFormat,
        values: Values | None = None,
        output: set[str] | None = None,
    ) -> None:
        """``values`` replaces those of events; without it, the events are removed.

        ``output`` gets the files that hold output as it is, which keeps its values.
        """
        self._store = store
        self._rewriter = FileRewriter(store, written_as)
        self._values = values
        self._output = set() if output is None else output

    def holds_some(self, ranges: Sequence[Manifest], wanted: Offsets) -> bool:
        """Returns whether a file of these ranges has to be rewritten."""
        return any(
            self._rewritten(manifest, file, left) is not None
            for manifest, left in _left_in(ranges, wanted)
            for file in self._files_with(manifest, left)
        )

    def stage(
        self, ranges: Sequence[Manifest], wanted: Offsets, staging: str
    ) -> dict[str, FileEntry]:
        """Stages the rewritten files; returns their entries by target."""
        with StagedFiles(self._store, staging) as uploads:
            for manifest, left in _left_in(ranges, wanted):
                for file in self._files_with(manifest, left):
                    rewritten = self._rewritten(manifest, file, left)
                    if rewritten is not None:
                        self._stage(uploads, list(manifest.files), file, rewritten)
            return {entry.target: entry for entry in uploads.close()}

    def has_lost_copies(
        self, old: Manifest, new: Manifest, changed: Sequence[tuple[FileEntry, FileEntry]]
    ) -> bool:
        """Returns whether a staged copy that is still needed is gone, so all must begin again.

        If some files were replaced, it cannot: then this stages such a copy again. That happens
        after a restore of the catalog and of some files. Raises ``CorruptError`` if the copy comes
        out different.
        """
        gone = [each for each in changed if not self.exists(each[1].staged)]
        needed = [(before, after) for before, after in gone if self._holds(before)]
        replaced = [after.target for _, after in changed if needed and self._holds(after)]
        for before, after in needed if replaced else ():
            ranges = zip(old.each_range, new.each_range, strict=True)
            manifest, then = next(each for each in ranges if before in each[0].files)
            if not self._stage_again(manifest, before, after, then.erased):
                raise CorruptError(
                    f"archive file `{after.target}`: the copy without erased events "
                    f"`{after.staged}` is gone, and other files of its range were replaced: "
                    "restore that copy, or these files as they were before: "
                    + ", ".join(f"`{each}`" for each in replaced),
                    file=after.target,
                )
        return bool(needed) and not replaced

    def _stage_again(
        self, manifest: Manifest, before: FileEntry, after: FileEntry, erased: Sequence[int]
    ) -> bool:
        """Stages a copy of a file without erased events. Returns False if it is another one.

        The same events make the same bytes, unless another version of a format's library runs.
        """
        is_beside = before.kind == "sidecar"
        named = self._rewriter.sidecar_name if is_beside else lambda target: target
        file = next(
            each
            for each in manifest.files
            if each.kind != "sidecar" and named(each.target) == before.target
        )
        try:
            made = self._rewriter.without(manifest, file, np.array(erased, np.int64))
        except CorruptError:  # its sidecar was replaced
            return False
        data = None if made is None else made.sidecar if is_beside else made.data
        if data is None or not matches_entry(data, after):
            return False
        with contextlib.suppress(AlreadyExistsError):
            self._store.put(after.staged, data)
        return True

    def find_rewrite(
        self, old: Manifest, known: Mapping[tuple[str, str], Sequence[Manifest]], wanted: Offsets
    ) -> Manifest | None:
        """Returns what the files of a commit have become; None if they are damaged, or the same.

        ``known`` has other manifests of its ranges, by start and end. By these the files lack
        nothing except wanted events, and keep their values.
        """
        ranges: list[Manifest] = []
        for manifest in old.each_range if self._values is None else ():
            others = (manifest, *known.get((manifest.start, manifest.end), ()))
            rewrites = (each for each in others if _is_rewrite(manifest, each, wanted))
            ranges += [each for each in rewrites if self._is_as_in(manifest, each)][:1]
        if len(ranges) != len(old.each_range) or tuple(ranges) == tuple(old.each_range):
            return None
        return msgspec.structs.replace(old, ranges=tuple(ranges)) if old.ranges else ranges[0]

    def _is_as_in(self, manifest: Manifest, then: Manifest) -> bool:
        """Returns whether each file is as a rewrite leaves it, or as it was before."""
        pairs = zip(manifest.files, then.files, strict=True)
        there = [each for each in pairs if self.is_there(each[0])]
        return all(self._holds(after) or self._holds(before) for before, after in there)

    def _holds(self, entry: FileEntry) -> bool:
        return matches_entry(self._store.get(entry.target), entry)

    def is_there(self, file: FileEntry) -> bool:
        """Returns whether a file exists: a replay deletes files of dead letters, never data files.

        That may happen at any step of an erasure, and then nothing is left to replace.
        """
        return file.kind != "dead" or self.exists(file.target)

    def exists(self, key: str) -> bool:
        return object_exists(self._store, key)

    def _files_with(self, manifest: Manifest, offsets: Offsets) -> list[FileEntry]:
        """Returns the files that may have some of the offsets between their ends."""
        return [
            file
            for file in manifest.files
            if file.kind in ("data", "dead")
            and file.events
            and np.searchsorted(offsets, file.first_offset)
            < np.searchsorted(offsets, file.last_offset, side="right")
            and self.is_there(file)
        ]

    def _rewritten(
        self, manifest: Manifest, file: FileEntry, offsets: Offsets
    ) -> RewrittenFile | None:
        """Returns a file as it must become; None if it is so already, or a replay deletes it."""
        try:
            if self._values is None:
                return self._rewriter.without(manifest, file, offsets)
            if manifest.as_is:
                self._output.add(file.target)
                return None
            wanted = {int(each): self._values[int(each)] for each in offsets}
            return self._rewriter.with_values(manifest, file, wanted)
        except (CorruptError, NotFoundError):
            if self.is_there(file):
                raise
            return None

    def _stage(
        self,
        uploads: StagedFiles,
        files: list[FileEntry],
        file: FileEntry,
        rewritten: RewrittenFile,
    ) -> None:
        def entry(before: FileEntry, events: int, erased: int) -> None:
            data = rewritten.data if before.kind != "sidecar" else rewritten.sidecar or b""
            uploads.add(
                data,
                lambda staged, size, crc: msgspec.structs.replace(
                    before,
                    staged=staged,
                    size=size,
                    crc=crc,
                    events=events,
                    erased=before.erased + erased,
                    updated=before.updated + (rewritten.updated if events else 0),
                ),
            )

        entry(file, rewritten.events, rewritten.erased)
        if rewritten.sidecar is not None:
            beside = self._rewriter.sidecar_name(file.target)
            entry(next(each for each in files if each.target == beside), 0, 0)


def _left_in(ranges: Sequence[Manifest], wanted: Offsets) -> Iterator[tuple[Manifest, Offsets]]:
    """Yields ranges with the offsets that were not erased from them before."""
    for manifest in ranges:
        yield manifest, np.setdiff1d(wanted, np.array(manifest.erased, np.int64))


def _is_rewrite(manifest: Manifest, then: Manifest, wanted: Offsets) -> bool:
    """Returns whether two manifests are of the same range, and one lacks only wanted events."""
    more = np.setdiff1d(np.array(then.erased, np.int64), np.array(manifest.erased, np.int64))
    return (
        msgspec.structs.replace(then, files=manifest.files, erased=manifest.erased) == manifest
        and [(each.target, each.updated) for each in then.files]
        == [(each.target, each.updated) for each in manifest.files]
        and bool(np.isin(more, wanted).all())
    )


def changed_files(old: Manifest, new: Manifest) -> list[tuple[FileEntry, FileEntry]]:
    """Returns the files that a rewrite replaces, before and after it."""
    return [
        (before, after)
        for before, after in zip(files_of(old), files_of(new), strict=True)
        if before.crc != after.crc or before.size != after.size
    ]


def files_of(manifest: Manifest) -> list[FileEntry]:
    """Returns the files of all its ranges."""
    return [file for one in manifest.each_range for file in one.files]


def replace_file(store: Store, before: FileEntry, after: FileEntry) -> None:
    """Puts a staged file in its place: idempotent, and settled by what the file holds."""

    def is_new(found: bytes) -> bool:
        if matches_entry(found, after):
            return True
        if not matches_entry(found, before):
            raise CorruptError(
                f"archive file `{after.target}`: is neither what its manifest says nor what an "
                "erasure has made of it: keep it, and run `tidelog archive verify`",
                file=after.target,
            )
        return False

    replace_object(store, after.target, is_new, lambda: store.get(after.staged))


def matches_entry(data: bytes, entry: FileEntry) -> bool:
    """Returns whether these are the bytes of a file."""
    return (len(data), crc32c.crc32c(data)) == (entry.size, entry.crc)


@dataclass(frozen=True)
class RangeRewrite:
    """The files of a commit, to rewrite anywhere; pickles."""

    number: int  # for the caller
    store: str  # URL
    written_as: ArchiveFormat
    ranges: tuple[Manifest, ...]
    wanted: Offsets
    values: Values | None
    staging: str = ""

    @classmethod
    def of(
        cls,
        number: int,
        where: tuple[str, ArchiveFormat],
        ranges: tuple[Manifest, ...],
        wanted: Offsets,
        values: Values | None,
    ) -> RangeRewrite:
        """Keeps only what its files may have of the wanted offsets, and of the values."""
        files = [
            file for manifest in ranges for file in manifest.files if file.kind in ("data", "dead")
        ]
        first = min((file.first_offset for file in files), default=0)
        last = max((file.last_offset for file in files), default=-1)
        here = wanted[(wanted >= first) & (wanted <= last)]
        some = None if values is None else {int(each): values[int(each)] for each in here}
        return cls(number, *where, ranges, here, some)

    @property
    def size(self) -> int:
        return sum(file.size for manifest in self.ranges for file in manifest.files)


@dataclass(frozen=True, slots=True)
class FileReplace:
    """A decided file, to put in its place from anywhere; pickles."""

    number: int  # for the caller
    store: str  # URL
    before: FileEntry
    after: FileEntry

    @property
    def size(self) -> int:
        return self.before.size + self.after.size


def manifest_without(old: Manifest, staged: Mapping[str, FileEntry], wanted: Offsets) -> Manifest:
    """Returns the manifest of a range whose files were staged without the wanted offsets."""
    gone = np.array(old.erased, np.int64)
    left = np.setdiff1d(wanted, gone)
    first = min((f.first_offset for f in old.files), default=0)
    last = max((f.last_offset for f in old.files), default=-1)
    here = left[(left >= first) & (left <= last)]
    return msgspec.structs.replace(
        old,
        files=tuple(staged.get(entry.target, entry) for entry in old.files),
        erased=tuple(int(each) for each in np.union1d(gone, here)),
    )


def holds_here(work: RangeRewrite) -> bool:
    """Returns whether a file has to be rewritten."""
    return _rewriter(work).holds_some(work.ranges, work.wanted)


def stage_here(work: RangeRewrite) -> dict[str, FileEntry]:
    """Stages rewritten files; returns their entries by target."""
    return _rewriter(work).stage(work.ranges, work.wanted, work.staging)


def replace_here(work: FileReplace) -> bool:
    """Puts a staged file in its place."""
    replace_file(shared_store(work.store), work.before, work.after)
    return True


def _rewriter(work: RangeRewrite) -> RangeRewriter:
    return RangeRewriter(shared_store(work.store), work.written_as, work.values)


class RewrittenFile:
    """The bytes of a file and its sidecar, if any, and how many events were removed or changed."""

    def __init__(
        self, data: bytes, sidecar: bytes | None, events: int, erased: int, updated: int = 0
    ) -> None:
        self.data = data
        self.sidecar = sidecar
        self.events = events
        self.erased = erased
        self.updated = updated


class FileRewriter:
    """Removes events from files of one generation, or updates their values, by offset."""

    def __init__(self, store: Store, written_as: ArchiveFormat) -> None:
        self._files = ArchiveFiles(store, written_as)
        settings = settings_of(written_as.format_settings)
        self._format: Format = open_format(written_as.format, written_as.codec or None, settings)

    def sidecar_name(self, target: str) -> str | None:
        """Returns the name of the sidecar of a data file."""
        return self._format.sidecar_name(target)

    def without(
        self, manifest: Manifest, file: FileEntry, offsets: np.ndarray[Any, Any]
    ) -> RewrittenFile | None:
        """Returns the file without these offsets; None if it has none of them.

        Raises ``CorruptError`` if it does not match the manifest.
        """
        gone = pa.array(offsets, pa.int64())

        def is_gone(batch: pa.RecordBatch) -> pa.Array:
            return pc.is_in(self._files.offsets(batch, file).cast(pa.int64()), gone)

        return self.without_rows(manifest, file, is_gone)

    def without_rows(
        self, manifest: Manifest, file: FileEntry, is_gone: Callable[[pa.RecordBatch], pa.Array]
    ) -> RewrittenFile | None:
        """Returns the same, without the rows of each batch that ``is_gone`` selects."""
        kept: list[pa.RecordBatch] = []
        erased = 0
        for batch in self._files.batches(manifest, file):
            left = batch.filter(pc.invert(is_gone(batch)))
            erased += batch.num_rows - left.num_rows
            kept.append(left)
        if not erased:
            return None
        events = sum(each.num_rows for each in kept)
        if file.kind == "dead":
            return RewrittenFile(_dead_letters(kept), None, events, erased)
        if not self._files.restorable:
            return RewrittenFile(self._own_columns(kept), None, events, erased)
        return RewrittenFile(*self._of_events(kept), events, erased)

    def with_values(
        self, manifest: Manifest, file: FileEntry, values: Mapping[int, bytes | None]
    ) -> RewrittenFile | None:
        """Returns the file with other values at these offsets; None if it has them already.

        Raises ``InvalidError`` for a file without values, and for values that do not fit its
        schema.
        """
        if file.kind == "data" and not self._files.restorable:
            raise InvalidError(f"archive file `{file.target}`: has columns, and no values")
        kept: list[pa.RecordBatch] = []
        updated = 0
        for batch in self._files.batches(manifest, file):
            changed_batch, changed = _with_values(batch, values)
            updated += changed
            kept.append(changed_batch)
        if not updated:
            return None
        events = sum(each.num_rows for each in kept)
        if file.kind == "dead":
            return RewrittenFile(_dead_letters(kept), None, events, 0, updated)
        try:
            return RewrittenFile(*self._of_events(kept), events, 0, updated)
        except InternalError as exc:
            raise InvalidError(
                f"archive file `{file.target}`: a new value does not fit the file's schema"
            ) from exc

    def _of_events(self, kept: list[pa.RecordBatch]) -> tuple[bytes, bytes | None]:
        data = Spool()
        sidecar = Spool() if self._format.sidecar_name("x") else None
        writer = self._format.writer(data, sidecar)
        for batch in kept:
            misfits = writer.write(batch) if batch.num_rows else None
            if misfits is not None and misfits.num_rows:
                raise InternalError("a file's own events do not fit its schema any more")
        writer.close()
        return data.take(), sidecar.take() if sidecar else None

    def _own_columns(self, kept: list[pa.RecordBatch]) -> bytes:
        """Returns typed columns without the raw value: rows are copied unchanged."""
        if isinstance(self._format, OwnColumns):
            file = Spool()
            self._format.write_columns(file, kept)
            return file.take()
        table = pa.Table.from_batches(kept)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=self._format.codec, write_page_checksum=True)
        return bytes(sink.getvalue().to_pybytes())


def _with_values(
    batch: pa.RecordBatch, values: Mapping[int, bytes | None]
) -> tuple[pa.RecordBatch, int]:
    """Returns a batch with other values, by offset, and how many of them differ."""
    offsets = batch.column("offset").to_pylist()
    rows = [row for row, offset in enumerate(offsets) if offset in values]
    column, at = batch.column("value"), batch.schema.get_field_index("value")
    rows = [row for row in rows if column[row].as_py() != values[offsets[row]]]
    if not rows:
        return batch, 0
    found = column.to_pylist()
    for row in rows:
        found[row] = values[offsets[row]]
    changed = pa.array(found, column.type)
    return batch.set_column(at, batch.schema.field(at), changed), len(rows)


def _dead_letters(kept: list[pa.RecordBatch]) -> bytes:
    return encode_dead_letters(pa.Table.from_batches(kept, MISFIT_SCHEMA))


FILE_ATTEMPTS = 50  # at one file that changes


def replace_object(
    store: Store, key: str, is_new: Callable[[bytes], bool], data: bytes | Callable[[], bytes]
) -> None:
    """Replaces an object until ``is_new`` says of its bytes that it has been replaced.

    So it is settled by what the object holds, whichever process replaced it. ``is_new`` raises for
    bytes that are neither the old nor the new ones.
    """
    for _ in rounds(FILE_ATTEMPTS, file_busy(key)):
        info, found = store.head(key), store.get(key)
        if is_new(found):
            return
        # Another erasure deletes a staged copy when it is done: then the next look ends.
        with contextlib.suppress(ConflictError, UnknownOutcomeError, NotFoundError):
            store.replace(key, data if isinstance(data, bytes) else data(), info.etag)


def file_busy(key: str) -> UnavailableError:
    """Returns the error of a file that others keep changing."""
    return UnavailableError(f"file `{key}`: others keep changing it: erase again")
