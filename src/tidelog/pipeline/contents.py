"""What stands in files of an archive, or in a file by itself: events, dead letters, or columns.

A file of events gives event columns, one of dead letters these and ``error``. Typed columns without
the raw value, and sidecars, give their own columns, as no events come back from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.formats import Format, open_format, settings_of
from tidelog.codec.formats.base import MISFIT_SCHEMA, OwnColumns
from tidelog.codec.formats.footers import FOOTED, count_rows
from tidelog.codec.formats.hadoop import BYTES, SequenceReader
from tidelog.codec.formats.rows import ROW_FORMATS, read_rows
from tidelog.codec.formats.sidecar import SIDECAR_SCHEMA
from tidelog.codec.formats.streams import decoding, open_data
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.archives import read_archive, read_commits, read_partitions
from tidelog.log.base import Log
from tidelog.log.replays import counting_files, replay_pipeline
from tidelog.model.address import nearest, parse_address
from tidelog.model.archive import Archive, Making
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.places import store_at
from tidelog.sources.file_names import FilePlace, place_of
from tidelog.sources.objects import fetched, opened
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.here import open_store_here

__all__ = [
    "ArchiveFiles",
    "Wanted",
    "archived_rows",
    "file_rows",
    "is_changing",
    "source_partition",
]


class ArchiveFiles:
    """Reads files of one generation, each checked against its manifest."""

    def __init__(self, store: Store, making: Making) -> None:
        self._store = store
        settings = settings_of(making.format_settings)
        self._format: Format = open_format(making.format, making.codec or None, settings)
        columns = getattr(self._format, "columns", None)  # of formats whose files have some
        names = {name: name for name in EVENT_SCHEMA.names} if columns is None else columns.names
        self.restorable = "value" in names  # whether events come back from its files
        self._offset: str = "offset" if self.restorable else names["offset"]

    def batches(self, manifest: Manifest, file: FileEntry) -> Iterator[pa.RecordBatch]:
        """What is in a file of a manifest; ``CorruptError`` unless it is as the manifest says."""
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

    def count(self, manifest: Manifest, file: FileEntry) -> int:
        """Returns how many events a file holds, by its own footer or its sidecar's, if it has one.

        ``CorruptError`` where that cannot be read, ``NotFoundError`` where the file is missing.
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
        """The offsets of what was read from a file."""
        return batch.column(self._offset if file.kind == "data" else "offset")

    def row(self, manifest: Manifest, file: FileEntry, offset: int) -> pa.RecordBatch | None:
        """The row of one offset, if it is in the file."""
        for batch in self.batches(manifest, file):
            found = batch.filter(pc.equal(self.offsets(batch, file), offset))
            if found.num_rows:
                return found
        return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody wants to see of an archive."""

    generation: int | None = None
    files: Sequence[str] = ()  # by their names, or as the manifest has them; none: all data
    partition: str | None = None  # of the source
    start: int | None = None  # offsets of [start, end)
    end: int | None = None

    def __post_init__(self) -> None:
        if (self.start is not None or self.end is not None) and self.partition is None:
            raise InvalidError("offsets are of one source partition: say which")

    def cut(self, batch: pa.RecordBatch, offsets: pa.Array) -> pa.RecordBatch:
        """The rows of the offsets that are wanted."""
        if self.start is not None:
            kept = pc.greater_equal(offsets, self.start)
            batch, offsets = batch.filter(kept), offsets.filter(kept)
        return batch if self.end is None else batch.filter(pc.less(offsets, self.end))


def archived_rows(home: Home, archive: Archive, wanted: Wanted) -> Iterator[pa.RecordBatch]:
    """What stands in an archive, file by file. ``NotFoundError`` for a file that is none of it."""
    reader = ArchiveFiles(store_at(home, archive.store), archive.making(wanted.generation))
    left = set(wanted.files)
    for manifest, file in _candidates(home, archive, wanted):
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
    """Whether a name is the file's: its URL, its key, or the end of its key."""
    path = urlsplit(name).path if "://" in name else name
    given, own = f"/{path.strip('/')}", f"/{file.target}"
    return own.endswith(given) or given.endswith(own)


def _candidates(
    home: Home, archive: Archive, wanted: Wanted
) -> Iterator[tuple[Manifest, FileEntry]]:
    pipeline = archive.pipeline(wanted.generation)
    partitions = read_partitions(home.log, pipeline)
    if wanted.partition is not None:
        partitions = [source_partition(home, archive, wanted.partition, wanted.generation)]
    start, end = wanted.start or 0, wanted.end
    for partition in partitions:
        for manifest, file in counting_files(home.log, pipeline, partition):
            if file.last_offset >= start and (end is None or file.first_offset < end):
                yield manifest, file


def source_partition(home: Home, archive: Archive, text: str, generation: int | None) -> str:
    """The source partition that is meant: ``topic/0``, or ``0`` where there is one topic."""
    known = read_partitions(home.log, archive.pipeline(generation))
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
    """What stands in a file by its path or URL; its format is told by its name, or given.

    A sidecar is looked for beside it. ``NotFoundError``, ``CorruptError``, and ``InvalidError`` for
    a format that its name does not tell.
    """
    scheme, colon, _ = where.partition(":")
    address = f"file:{where}" if colon and scheme.isalnum() and len(scheme) > 1 else ""
    place = place_of(parse_address(address or f"file:{quote(str(Path(where).absolute()))}"))
    if format:
        open_format(format)  # an unknown one is refused by its name
        place = replace(place, format=format)
    store = open_store_here(place.store)
    try:
        return _rows(store, place, store.head(place.name).size)
    except NotFoundError as exc:
        raise NotFoundError(f"file `{where}`: is not there: give another") from exc


def _rows(store: Store, place: FilePlace, size: int) -> Iterator[pa.RecordBatch]:
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
    """Events or dead letters where the columns are theirs; else the columns as they are."""
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


def _sequence(store: Store, place: FilePlace, size: int) -> Format:
    """A sequence file says itself which kind of keys it has."""
    with (
        opened(store, place.name, size) as data,
        decoding(f"sequence file `{place.name}`"),
    ):
        keys = SequenceReader(open_data(data)).header.key_class
    chosen = replace(place, key="msgpack" if keys == BYTES else "offset")
    return chosen.archived_format(place.name, has_sidecars=True)


def is_changing(
    log: Log, archive: Archive, generation: int, partition: str, file: FileEntry
) -> bool:
    """Whether an erasure, a replay or a drop changes a file meanwhile: then it is not damaged."""
    pipeline = archive.pipeline(generation)
    if not any(each == file for _, each in counting_files(log, pipeline, partition)):
        return True
    pipelines = (pipeline, replay_pipeline(pipeline))
    commits = (each for name in pipelines for each in read_commits(log, name, partition))
    return any(each.rewrite for each in commits) or _is_removed(log, archive, generation)


def _is_removed(log: Log, archive: Archive, generation: int) -> bool:
    """Whether a generation is dropped by now, or is being dropped."""
    try:
        found = read_archive(log, archive.name)
    except NotFoundError:
        return True
    kept = found.incarnation == archive.incarnation and generation in found.makings
    return not kept or found.state_of(generation) == "removing"
