"""Reads the files of an archive, or a single file, and finds the event at an offset.

A file of events has event columns; one of dead letters also has ``error``. Typed columns without
the raw value, and sidecars, have their own columns, because no event can be rebuilt from them.

To find an event: one commit covers an offset, and its manifest names the few files that may hold
it. Only these are read, and none if a file holds every offset between its first and last.

**A file's own columns** are read as they are: for people who inspect it, and if no event can be
restored. Files with typed columns and without the raw value have no events that could be restored,
but they have rows; so do sidecars. Only formats with columns have them: Parquet, ORC and Avro.

:func:`count_rows` reads only a file's footer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import orc

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.codec.formats.avro import AvroContainer, check_installed
from tidelog.codec.formats.base import MISFIT_SCHEMA, Data, OwnColumns, file_name
from tidelog.codec.formats.batches import decoding, open_data
from tidelog.codec.formats.orc import read_all_columns
from tidelog.codec.formats.parquet import SIDECAR_SCHEMA
from tidelog.codec.formats.sequence import BYTES, SequenceReader
from tidelog.connectors.by_url import store_at
from tidelog.connectors.files.listing import FileAddress, parse_file_address
from tidelog.context import Context
from tidelog.coordination.commits import CommitRow, Manifests, read_commits
from tidelog.coordination.pipeline_rows import (
    Replays,
    counting_files,
    read_archive,
    read_intent,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.address import nearest, parse_address
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Commit, FileEntry, Manifest, Progress
from tidelog.store import open_store_here
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.fetch import fetched, opened

__all__ = [
    "FOOTED",
    "ROW_FORMATS",
    "ArchiveFiles",
    "FindResult",
    "ReadRequest",
    "archived_rows",
    "count_rows",
    "file_rows",
    "find_event",
    "is_changing",
    "is_removed",
    "read_rows",
    "source_partition",
]

ROW_FORMATS = ("parquet", "orc", "avro")
_ROWS = 10_000  # decoded at a time


def read_rows(format: str, data: Data) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, in its own columns. Raises as ``Format.read``."""
    if format not in ROW_FORMATS:
        raise InvalidError(
            f"format `{format}`: its files have no columns: those of {', '.join(ROW_FORMATS)} have"
        )
    if format == "avro":
        check_installed()
    source, what = open_data(data), file_name(format, data)
    return {"parquet": _parquet, "orc": _orc, "avro": _avro}[format](source, what)


def _parquet(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        file = pq.ParquetFile(source, page_checksum_verification=True)
        yield from file.iter_batches(batch_size=_ROWS, use_threads=False)


def _orc(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        yield from read_all_columns(source, _ROWS)


def _avro(source: pa.NativeFile, what: str) -> Iterator[pa.RecordBatch]:
    with decoding(what):
        for rows in AvroContainer(source).records():
            yield pa.RecordBatch.from_pylist(rows)


FOOTED = ("orc", "parquet")  # formats whose footer has the count


def count_rows(form: str, data: BinaryIO, what: str) -> int:
    """Returns how many rows a file of such a format has. Raises ``CorruptError``."""
    with decoding(what):
        if form == "orc":
            return int(orc.ORCFile(data).nrows)
        return int(pq.ParquetFile(data).metadata.num_rows)


class ArchiveFiles:
    """Reads files of one generation, and checks each against its manifest."""

    def __init__(self, store: Store, written_as: ArchiveFormat) -> None:
        self._store = store
        settings = settings_of(written_as.format_settings)
        self._format: Format = open_format(written_as.format, written_as.codec or None, settings)
        columns = getattr(self._format, "columns", None)  # of formats with columns
        names = {name: name for name in EVENT_SCHEMA.names} if columns is None else columns.names
        self.names: Mapping[str, str] = names  # of the event columns in `schema`
        self.schema: pa.Schema = EVENT_SCHEMA if columns is None else columns.schema
        self.restorable = "value" in names  # whether events can be rebuilt from its files
        self._offset: str = "offset" if self.restorable else names["offset"]

    def batches(self, manifest: Manifest, file: FileEntry) -> Iterator[pa.RecordBatch]:
        """Yields the content of a manifest's file. Raises ``CorruptError`` if it does not match."""
        with ExitStack() as stack:
            data = stack.enter_context(fetched(self._store, file))
            if file.kind == "dead":
                for batch in read_rows("parquet", data):
                    yield batch.cast(MISFIT_SCHEMA)
            elif file.kind == "sidecar":
                yield from read_rows("parquet", data)
            elif not self.restorable and isinstance(self._format, OwnColumns):
                yield from self._format.read_columns(data)
            elif not self.restorable:
                yield from read_rows(self._format.name, data)
            else:
                beside = self._format.sidecar_name(file.target)
                sidecars = [each for each in manifest.files if each.target == beside]
                opened = [stack.enter_context(fetched(self._store, each)) for each in sidecars]
                yield from self._format.read(data, opened[0] if opened else None)

    def rows(self, manifest: Manifest, file: FileEntry) -> Iterator[pa.RecordBatch]:
        """Yields a data file in the columns of ``schema``, which has typed columns too."""
        if self.schema.names == EVENT_SCHEMA.names:
            yield from self.batches(manifest, file)
            return
        with fetched(self._store, file) as data:
            if isinstance(self._format, OwnColumns):
                yield from self._format.read_columns(data)
            else:
                yield from read_rows(self._format.name, data)

    def count(self, manifest: Manifest, file: FileEntry) -> int:
        """Returns how many events a file holds, from its own footer or its sidecar's.

        Raises ``CorruptError`` if that cannot be read, ``NotFoundError`` if the file is missing.
        """
        beside = None if file.kind == "dead" else self._format.sidecar_name(file.target)
        sidecars = [each for each in manifest.files if each.target == beside]
        counted = sidecars[0] if sidecars else file
        form = "parquet" if sidecars or file.kind == "dead" else self._format.name
        if form not in FOOTED:
            return sum(batch.num_rows for batch in self.batches(manifest, file))
        with opened(self._store, counted.target, counted.size) as data:
            return count_rows(form, data, f"archive file `{counted.target}`")

    def offsets(self, batch: pa.RecordBatch, file: FileEntry) -> pa.Array:
        """Returns the offsets of rows that were read from a file."""
        return batch.column(self._offset if file.kind == "data" else "offset")

    def row(self, manifest: Manifest, file: FileEntry, offset: int) -> pa.RecordBatch | None:
        """Returns the row of one offset, if it is in the file."""
        for batch in self.batches(manifest, file):
            found = batch.filter(pc.equal(self.offsets(batch, file), offset))
            if found.num_rows:
                return found
        return None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read from an archive."""

    generation: int | None = None
    files: Sequence[str] = ()  # by name, or as in the manifest; empty: all data
    partition: str | None = None  # of the source
    start: int | None = None  # offsets of [start, end)
    end: int | None = None

    def __post_init__(self) -> None:
        if (self.start is not None or self.end is not None) and self.partition is None:
            raise InvalidError("offsets are of one source partition: say which")

    def cut(self, batch: pa.RecordBatch, offsets: pa.Array) -> pa.RecordBatch:
        """Returns the rows of the wanted offsets."""
        if self.start is not None:
            kept = pc.greater_equal(offsets, self.start)
            batch, offsets = batch.filter(kept), offsets.filter(kept)
        return batch if self.end is None else batch.filter(pc.less(offsets, self.end))


def archived_rows(
    context: Context, archive: Archive, wanted: ReadRequest
) -> Iterator[pa.RecordBatch]:
    """Yields the content of an archive, file by file. Raises ``NotFoundError`` for a wrong file."""
    reader = ArchiveFiles(store_at(context, archive.store), archive.format_of(wanted.generation))
    left = set(wanted.files)
    for manifest, file in _candidates(context, archive, wanted):
        named = {name for name in wanted.files if _is_named(file, name)}
        left -= named
        if named or (not wanted.files and file.kind == "data"):
            for batch in reader.batches(manifest, file):
                yield wanted.cut(batch, reader.offsets(batch, file))
    for name in sorted(left):
        raise NotFoundError(
            f"archive `{archive.name}`: has no file `{name}` that counts: "
            f"`tidelog archive manifest {archive.name}` lists those that do"
        )


def _is_named(file: FileEntry, name: str) -> bool:
    """Returns whether a name is the file's: its URL, its key, or the end of its key."""
    path = urlsplit(name).path if "://" in name else name
    given, own = f"/{path.strip('/')}", f"/{file.target}"
    return own.endswith(given) or given.endswith(own)


def _candidates(
    context: Context, archive: Archive, wanted: ReadRequest
) -> Iterator[tuple[Manifest, FileEntry]]:
    pipeline = archive.pipeline(wanted.generation)
    partitions = read_partitions(context, pipeline)
    if wanted.partition is not None:
        partitions = [source_partition(context, archive, wanted.partition, wanted.generation)]
    start, end = wanted.start or 0, wanted.end
    for partition in partitions:
        for manifest, file in counting_files(context, pipeline, partition):
            if file.last_offset >= start and (end is None or file.first_offset < end):
                yield manifest, file


def source_partition(context: Context, archive: Archive, text: str, generation: int | None) -> str:
    """Returns the source partition of a text: ``topic/0``, or ``0`` if there is one topic."""
    known = read_partitions(context, archive.pipeline(generation))
    if text in known:
        return text
    found = [each for each in known if each.rpartition("/")[2] == text]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidError(
            f"archive `{archive.name}`: source partition `{text}` may be {' or '.join(found[:5])}: "
            "say which"
        )
    shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
    raise NotFoundError(
        f"archive `{archive.name}`: has nothing of a source partition `{text}`"
        f"{nearest(text, known)}: it has {shown or 'none yet'}"
    )


def file_rows(where: str, format: str = "") -> Iterator[pa.RecordBatch]:
    """Yields the content of a file by path or URL; its format is given, or follows from its name.

    Looks for a sidecar next to it. Raises ``NotFoundError``, ``CorruptError``, or ``InvalidError``
    if the name does not show the format.

    >>> [file] = home.archives.get("daily").files()
    >>> sum(batch.num_rows for batch in tidelog.read_file(f"{home.store.url}/{file.path}"))
    3
    """
    scheme, colon, _ = where.partition(":")
    address = f"file:{where}" if colon and scheme.isalnum() and len(scheme) > 1 else ""
    place = parse_file_address(
        parse_address(address or f"file:{quote(str(Path(where).absolute()))}")
    )
    if format:
        open_format(format)  # raises for an unknown format
        place = replace(place, format=format)
    store = open_store_here(place.store)
    try:
        return _rows(store, place, store.head(place.name).size)
    except NotFoundError as exc:
        raise NotFoundError(f"file `{where}`: is not there: give another") from exc


def _rows(store: Store, place: FileAddress, size: int) -> Iterator[pa.RecordBatch]:
    form = place.archived_format(place.name, has_sidecars=True)
    beside = form.sidecar_name(place.name)
    sidecar = None
    if beside is not None:
        try:
            sidecar = store.head(beside)
        except NotFoundError:
            form = place.archived_format(place.name, has_sidecars=False)
    if form.name == "sequence":
        form = _sequence(store, place, size)
    if form.name in ROW_FORMATS:
        return _columns(store, place.name, form, size)
    return _events(store, place.name, form, size, sidecar)


def _events(
    store: Store, name: str, form: Format, size: int, sidecar: ObjectInfo | None
) -> Iterator[pa.RecordBatch]:
    with ExitStack() as stack:
        data = stack.enter_context(opened(store, name, size))
        beside = None
        if sidecar is not None:
            beside = stack.enter_context(opened(store, sidecar.key, sidecar.size))
        yield from form.read(data, beside)


def _columns(store: Store, name: str, form: Format, size: int) -> Iterator[pa.RecordBatch]:
    """Yields events or dead letters if it has their columns; otherwise the columns as they are."""
    with opened(store, name, size) as data:
        first = next(read_rows(form.name, data), None)
    names = set(first.schema.names) if first is not None else set()
    events = set(EVENT_SCHEMA.names)
    if names >= events and names not in (events | {"error"}, set(SIDECAR_SCHEMA.names)):
        yield from _events(store, name, form, size, None)
        return
    with opened(store, name, size) as data:
        for batch in read_rows(form.name, data):
            yield batch.cast(MISFIT_SCHEMA) if names == events | {"error"} else batch


def _sequence(store: Store, place: FileAddress, size: int) -> Format:
    """Returns the format of a sequence file, whose header says which keys it has."""
    with (
        opened(store, place.name, size) as data,
        decoding(f"sequence file `{place.name}`"),
    ):
        keys = SequenceReader(open_data(data)).header.key_class
    chosen = replace(place, key="msgpack" if keys == BYTES else "offset")
    return chosen.archived_format(place.name, has_sidecars=True)


def is_changing(
    context: Context, archive: Archive, generation: int, partition: str, file: FileEntry
) -> bool:
    """Returns whether an erasure, a replay or a drop changes a file: then it is not damaged.

    Call it after the file was read: an erasure that ends meanwhile is in the rows, which come last.
    """
    pipeline = archive.pipeline(generation)
    pipelines = (pipeline, replay_pipeline(pipeline))
    commits = (each for name in pipelines for each in read_commits(context, name, partition))
    if any(each.rewrite for each in commits):
        return True
    if not any(each == file for _, each in counting_files(context, pipeline, partition)):
        return True
    return is_removed(context, archive, generation)


def is_removed(context: Context, archive: Archive, generation: int) -> bool:
    """Returns whether a generation is dropped, or is being dropped."""
    try:
        found = read_archive(context, archive.name)
    except NotFoundError:
        return True
    kept = found.incarnation == archive.incarnation and generation in found.formats
    return not kept or found.state_of(generation) == "removing"


Status = Literal[
    "archived", "dead", "erased", "waiting", "before", "lost", "gap", "dropped", "unclear"
]


@dataclass(frozen=True, slots=True)
class FindResult:
    """Where an event is, or why it is nowhere."""

    partition: str
    offset: int
    status: Status
    says: str  # the same as text
    file: FileEntry | None = None
    row: pa.RecordBatch | None = None  # the file's row at that offset, if it was read

    @property
    def is_there(self) -> bool:
        """Returns whether the archive holds it, also as a dead letter."""
        return self.file is not None


def find_event(
    context: Context,
    archive: Archive,
    partition: str,
    offset: int,
    generation: int | None = None,
    *,
    read: bool = False,
) -> FindResult:
    """Finds the event at an offset of a source partition; with ``read``, also returns it."""
    if offset < 0:
        raise InvalidError(f"offset {offset}: offsets begin at 0")
    name = source_partition(context, archive, partition, generation)
    reader = ArchiveFiles(store_at(context, archive.store), archive.format_of(generation))
    return _FileSearch(context, archive.pipeline(generation), name, offset, reader, read).run()


@dataclass(frozen=True, slots=True)
class _FileSearch:
    context: Context
    pipeline: str
    partition: str
    offset: int
    reader: ArchiveFiles
    read: bool

    def run(self) -> FindResult:
        head = read_progress(self.context, self.pipeline, self.partition)
        if head is None:
            return self._nowhere("waiting", "not archived yet: nothing of its partition is")
        by_offset = self._is_by_offset(head)
        if self.offset >= (int(head.position) if by_offset else head.ordinal):
            return self._not_archived(head, by_offset)
        committed = self._commit_at(by_offset)
        if committed is None:
            return self._nowhere("before", "was never archived: the archive begins after it")
        manifest = self._manifest(committed)
        for gap in manifest.lost if by_offset else ():
            if not gap.is_partial and int(gap.start) <= self.offset < int(gap.end):
                lost = f"offsets {gap.start} to {gap.end}"
                return self._nowhere("lost", f"was lost at the source (recorded): {lost}")
        found = self._in_files(manifest)
        if found is None and self._was_erased(manifest):
            return self._nowhere("erased", "was erased: it was deleted from its topic")
        return found or self._in_none(manifest, by_offset)

    def _was_erased(self, manifest: Manifest) -> bool:
        """Returns whether it was erased from the files of its range, or of a replay."""
        replays = Replays(self.context, self.pipeline, self.partition)
        manifests = [manifest, *(where for where, _ in replays.counting(self.offset))]
        return any(self.offset in each.erased for each in manifests)

    def _not_archived(self, head: Progress, by_offset: bool) -> FindResult:
        intent = read_intent(self.context, self.pipeline, self.partition)
        says = f"not archived yet (committed up to {head.position})"
        if intent is not None and by_offset and self.offset < int(intent.reach):
            says += f"; {intent.start} to {intent.reach} is under way"
        return self._nowhere("waiting", says)

    def _in_files(self, manifest: Manifest) -> FindResult | None:
        files = [
            (where, file)
            for where, file in self._candidates(manifest)
            if file.first_offset <= self.offset <= file.last_offset
        ]
        for where, file in files:
            is_dense = file.events == file.last_offset - file.first_offset + 1
            row = None
            if self.read or not is_dense:
                row = self.reader.row(where, file, self.offset)
            if row is None and (self.read or not is_dense):
                continue
            says = "archived"
            if file.kind == "dead":
                error = f": {row.column('error')[0].as_py()}" if row is not None else ""
                says = f"a dead letter{error}"
            status: Status = "dead" if file.kind == "dead" else "archived"
            return FindResult(self.partition, self.offset, status, says, file, row)
        return None

    def _candidates(self, manifest: Manifest) -> Iterator[tuple[Manifest, FileEntry]]:
        """Yields what counts of the range, then what replays made of its dead letters."""
        replays = Replays(self.context, self.pipeline, self.partition)
        for file in manifest.files:
            if file.kind != "sidecar" and not replays.replaces(file):
                yield manifest, file
        for where, file in replays.counting(self.offset):
            if file.kind != "sidecar":
                yield where, file

    def _in_none(self, manifest: Manifest, by_offset: bool) -> FindResult:
        gap = "no event at that offset: the source has none there"
        if not manifest.dropped:
            return self._nowhere("gap", gap)
        lost = sum(int(each.end) - int(each.start) for each in manifest.lost) if by_offset else 0
        is_dense = not by_offset or int(manifest.end) - int(manifest.start) - lost == manifest.read
        if is_dense:
            return self._nowhere("dropped", "dropped by the transform")
        return self._nowhere(
            "unclear",
            f"dropped by the transform, as {manifest.dropped} events of its range "
            f"{manifest.start} to {manifest.end} were, or {gap}",
        )

    def _nowhere(self, status: Status, says: str) -> FindResult:
        return FindResult(self.partition, self.offset, status, says)

    # Rows.

    def _is_by_offset(self, head: Progress) -> bool:
        """Returns whether positions are offsets; otherwise the pipeline numbered the events."""
        if not _is_number(head.position):
            return False
        for committed in self._commits():
            if not (_is_number(committed.start) and _is_number(committed.end)):
                return False
            if committed.files:
                start, end = int(committed.start), int(committed.end)
                files = self._manifest(committed).files
                return all(start <= f.first_offset <= f.last_offset < end for f in files)
        return True

    def _commit_at(self, by_offset: bool) -> Commit | None:
        """Returns the commit whose range holds the offset; later ones have a higher ordinal."""
        for row in self._rows(layout.commit_row(self.offset + 1, "")):
            for ordinal, committed in row.ranges():
                first, end = ordinal, ordinal + committed.events
                if by_offset:
                    first, end = int(committed.start), int(committed.end)
                if first <= self.offset < end:
                    return committed
        return None

    def _commits(self) -> Iterator[Commit]:
        """Yields ranges, the last one first."""
        for row in self._rows(None):
            yield from reversed(row.committed.each_range)

    def _rows(self, before: str | None) -> Iterator[CommitRow]:
        """Yields rows of commits, the last first; a merged one comes after those it replaces."""
        rows = self.context.catalog.scan(self._where, "commit/", before or "commit0", reverse=True)
        return map(CommitRow.of, rows)

    def _manifest(self, committed: Commit) -> Manifest:
        return Manifests(self.context, self.pipeline, self.partition).of(committed)

    @property
    def _where(self) -> str:
        return layout.pipeline_partition(self.pipeline, self.partition)


def _is_number(position: str) -> bool:
    return position.isascii() and position.isdecimal()
