"""Metadata objects next to an archive's files: extracts the values that events may have filled.

A proof that searched their whole text would never be clean for an id such as ``parquet`` or
``WRITE``, which every Delta log contains. So fields that only settings fill are excluded: names of
columns and tables, formats, operations, counts. Everything else is searched: statistics, tags,
settings of users, and names of folders. A folder with a file that holds events has its name from
these. An object, an action or a field that is not known here is searched as a whole.

An Iceberg table has three kinds of objects: its metadata in JSON and, in Avro, a manifest list for
each snapshot, and manifests. Settings, counts and clocks are excluded: otherwise no proof would be
clean for a key such as ``1`` or an id such as ``append``. Searched are folder names in paths of
data files, values of partitions, bounds of columns, properties that are not ours, and all unknown
fields.

**Manifests** list files by their names. A parser such as ``split:user`` names a folder by a field
of the events in it. A folder with a file that still holds events has its name from these. A folder
whose events were all erased is named by an erased event; so are the manifests that list its files,
including those before the erasure. ``FileEntry.named`` says which parts of a folder's name are not
times: the archive's parser does not, because a replay may have used another one.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np

from tidelog.archive.read import read_rows
from tidelog.codec.formats.avro import AvroContainer
from tidelog.codec.formats.batches import open_data
from tidelog.context import Context
from tidelog.coordination.commits import load_manifest, read_commit_rows
from tidelog.coordination.pipeline_rows import counting_files, read_partitions, replay_pipeline
from tidelog.erasure.matcher import EventMatcher, folder_names
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model.archive import Archive, Success
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store.base import Store

__all__ = [
    "DELTA",
    "ICEBERG",
    "ManifestNames",
    "erases",
    "event_values",
    "files_named_by_events",
    "folder_below",
    "folder_values",
    "iceberg_values",
    "is_named_by_events",
]

_parse_json = msgspec.json.Decoder().decode

DELTA = "/_delta_log/"
_NOT_KNOWN = (
    msgspec.MsgspecError,
    UnicodeDecodeError,
    AttributeError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OSError,
)
_FILE = frozenset(
    {
        "size",
        "modificationTime",
        "deletionTimestamp",
        "dataChange",
        "extendedFileMetadata",
        "baseRowId",
        "defaultRowCommitVersion",
        "clusteringProvider",
    }
)
_SETTINGS = {  # of each action: the fields that no event fills
    "add": _FILE,
    "remove": _FILE,
    "protocol": frozenset(
        {"minReaderVersion", "minWriterVersion", "readerFeatures", "writerFeatures"}
    ),
    "metaData": frozenset(
        {"id", "name", "format", "schemaString", "partitionColumns", "createdTime"}
    ),
    "txn": frozenset({"appId", "version", "lastUpdated"}),
    "commitInfo": frozenset(
        {
            "timestamp",
            "operation",
            "engineInfo",
            "clientVersion",
            "isolationLevel",
            "isBlindAppend",
            "readVersion",
            "operationMetrics",
        }
    ),
}
_PARAMETERS = frozenset({"partitionBy", "mode", "location", "protocol", "metadata"})
_STATS = frozenset({"numRecords", "minValues", "maxValues", "nullCount", "tightBounds"})
_CHECKPOINT = frozenset({"version", "size", "sizeInBytes", "numOfAddFiles", "parts", "checksum"})


def event_values(
    key: str, data: bytes, living: Collection[str], everywhere: Collection[str] = ()
) -> list[Any] | None:
    """Returns the values of an object that an event may have filled; None if it is unknown.

    ``living`` lists the folders of an archive's generation that have files with events;
    ``everywhere`` lists those of all generations, as prefixes of keys.
    """
    folder, _, name = key.rpartition("/")
    try:
        if ICEBERG in key:
            return iceberg_values(key, data, everywhere)
        if name == "_SUCCESS":
            return _of_marker(_parse_json(data), living)
        if f"{folder}/".endswith(DELTA):
            return _of_log(name, data, living)
    except _NOT_KNOWN:
        pass  # not what its name says
    return None


def _of_marker(marker: dict[str, Any], living: Collection[str]) -> list[Any] | None:
    if marker.keys() != set(Success.__struct_fields__):
        return None
    return list(folder_values(str(marker["folder"]), living))


def _of_log(name: str, data: bytes, living: Collection[str]) -> list[Any] | None:
    """Returns the values of an object of a Delta log."""
    if name == "_last_checkpoint":
        return [] if _parse_json(data).keys() <= _CHECKPOINT else None
    lines: list[dict[str, Any]] = []
    if name.endswith(".json"):
        lines = [_parse_json(line) for line in data.splitlines() if line.strip()]
    elif name.endswith(".checkpoint.parquet"):
        batches = read_rows("parquet", io.BytesIO(data))
        lines = [row for batch in batches for row in batch.to_pylist()]
    else:
        return None
    return [value for line in lines for value in _of_actions(line, living)]


def folder_values(folder: str, living: Collection[str]) -> Iterator[str]:
    """Yields the names in a folder's path, and what follows ``=``; none of a living folder.

    The first name is the topic's.
    """
    if folder not in living:
        yield from folder_names(folder.partition("/")[2])


def _of_actions(line: dict[str, Any], living: Collection[str]) -> Iterator[Any]:
    """Yields the values of a line with one action, or of a row with columns for all."""
    for action, body in line.items():
        settings = _SETTINGS.get(action)
        if body is None:
            continue
        if settings is None or not isinstance(body, dict):
            yield {action: body}
            continue
        folder = unquote(str(body.get("path") or "")).rpartition("/")[0]
        for field, value in body.items():
            if field in settings or value is None:
                continue
            if action in ("add", "remove") and field in ("path", "partitionValues"):
                yield from folder_values(folder, living)
                yield from () if folder in living else _values(_as_dict(value))
            elif field == "stats":
                yield from _of_stats(value)
            elif (action, field) == ("commitInfo", "operationParameters"):
                yield {
                    name: each for name, each in _as_dict(value).items() if name not in _PARAMETERS
                }
            else:
                yield value


def _of_stats(text: Any) -> Iterator[Any]:
    """Yields the values of statistics; their names are those of columns."""
    try:
        stats = _parse_json(text)
    except (msgspec.MsgspecError, TypeError):
        stats = None
    if not isinstance(stats, dict) or not stats.keys() <= _STATS:
        yield text
        return
    yield from _values(stats)


def _values(value: Any) -> Iterator[Any]:
    """Yields all values at any depth, without the names of fields."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _values(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _values(each)
    else:
        yield value


def _as_dict(value: Any) -> Any:
    """Converts a map of a Parquet file, which is a list of pairs, to a dict."""
    is_pairs = isinstance(value, list) and all(isinstance(each, tuple) for each in value)
    return dict(value) if is_pairs else value


ICEBERG = "/_iceberg/"

_METADATA = frozenset(
    {
        "format-version",
        "table-uuid",
        "location",
        "last-sequence-number",
        "last-updated-ms",
        "last-column-id",
        "last-partition-id",
        "schema",
        "schemas",
        "current-schema-id",
        "partition-spec",
        "partition-specs",
        "default-spec-id",
        "sort-orders",
        "default-sort-order-id",
        "current-snapshot-id",
        "snapshot-log",
        "metadata-log",
        "next-row-id",
    }
)
_SNAPSHOT = frozenset(
    {
        "snapshot-id",
        "parent-snapshot-id",
        "sequence-number",
        "timestamp-ms",
        "manifest-list",
        "schema-id",
        "first-row-id",
        "added-rows",
    }
)
_COUNTED = (
    "data-files",
    "delete-files",
    "equality-deletes",
    "equality-delete-files",
    "position-deletes",
    "position-delete-files",
    "files-size",
    "records",
)
_SUMMARY = frozenset(
    {
        "operation",
        "changed-partition-count",
        "tidelog.through",
        *(
            f"{verb}-{each}"
            for verb in ("added", "removed", "deleted", "total")
            for each in _COUNTED
        ),
    }
)
_PROPERTIES = frozenset({"tidelog.through", "schema.name-mapping.default"})
_REFERENCE = frozenset(
    {
        "snapshot-id",
        "type",
        "min-snapshots-to-keep",
        "max-snapshot-age-ms",
        "max-ref-age-ms",
    }
)
_LISTED = frozenset(  # of a manifest, in a manifest list
    {
        "manifest_path",
        "manifest_length",
        "partition_spec_id",
        "content",
        "sequence_number",
        "min_sequence_number",
        "added_snapshot_id",
        "added_files_count",
        "existing_files_count",
        "deleted_files_count",
        "added_data_files_count",
        "existing_data_files_count",
        "deleted_data_files_count",
        "added_rows_count",
        "existing_rows_count",
        "deleted_rows_count",
        "first_row_id",
    }
)
_ENTRY = frozenset({"status", "snapshot_id", "sequence_number", "file_sequence_number"})
_ICEBERG_FILE = frozenset(
    {
        "content",
        "file_format",
        "record_count",
        "file_size_in_bytes",
        "block_size_in_bytes",
        "column_sizes",
        "value_counts",
        "null_value_counts",
        "nan_value_counts",
        "distinct_counts",
        "split_offsets",
        "equality_ids",
        "sort_order_id",
        "spec_id",
        "first_row_id",
    }
)


def iceberg_values(key: str, data: bytes, living: Collection[str]) -> list[Any] | None:
    """Returns the values of an object of a table that an event may have filled.

    None if it is unknown. ``living`` lists the folders with files that hold events, of all
    generations, as prefixes of keys. An error means that the object cannot be decoded.
    """
    root, _, name = key.partition(ICEBERG)
    if name.endswith(".metadata.json"):
        return list(_of_metadata(_parse_json(data)))
    if not name.endswith(".avro"):
        return None
    paths = _Paths(root, living)
    container = AvroContainer(open_data(io.BytesIO(data)))
    found: list[Any] = []
    for records in container.records():
        for record in records:
            if "manifest_path" in record:
                found += paths.of_listed(record)
            elif "data_file" in record:
                found += paths.of_entry(record)
            else:
                found.append(record)
    return found


def _of_metadata(table: Mapping[str, Any]) -> Iterator[Any]:
    for name, value in table.items():
        if name in _METADATA:
            continue
        if name == "snapshots":
            for snapshot in value:
                yield from _without(snapshot, _SNAPSHOT | {"summary"})
                yield from _without(snapshot.get("summary") or {}, _SUMMARY)
        elif name == "properties":
            yield from _without(value, _PROPERTIES)
        elif name == "refs":
            for reference, body in value.items():
                yield from () if reference == "main" else (reference,)
                yield from _without(body, _REFERENCE)
        elif value:
            yield {name: value}


class _Paths:
    """Values of objects that name data files of an archive."""

    def __init__(self, root: str, living: Collection[str]) -> None:
        self._root = root
        self._living = living
        self._names = {name for each in living for name in folder_names(_below(each, root))}

    def of_listed(self, record: dict[str, Any]) -> Iterator[Any]:
        """Yields the bounds of the partitions of a manifest in a manifest list."""
        yield from _without(record, _LISTED | {"partitions"})
        for bounds in record.get("partitions") or ():
            yield from _without(bounds, frozenset({"contains_null", "contains_nan"}), self._names)

    def of_entry(self, record: dict[str, Any]) -> Iterator[Any]:
        """Yields the values of a data file in a manifest."""
        yield from _without(record, _ENTRY | {"data_file"})
        file = record["data_file"]
        yield from _without(
            file, _ICEBERG_FILE | {"file_path", "partition", "lower_bounds", "upper_bounds"}
        )
        for bounds in (file.get("lower_bounds"), file.get("upper_bounds")):
            yield from (value for each in bounds or () for value in _texts(each["value"]))
        folder = str(file.get("file_path") or "").rpartition("/")[0]  # as it is in the store
        if self._is_living(folder):
            return
        yield from folder_names(_below(folder, self._root))
        partition = file.get("partition")
        yield from (partition or {}).values()

    def _is_living(self, folder: str) -> bool:
        """Returns whether a folder has a file with events."""
        _, found, below = folder.partition(f"/{self._root}/")
        return bool(found) and f"{self._root}/{below}" in self._living


def _below(folder: str, root: str) -> str:
    """Returns the part of a folder after the topic's name, which no event fills."""
    _, found, below = f"/{folder}".partition(f"/{root}/")
    return "/".join(below.split("/")[2:]) if found else folder


def _without(
    body: Mapping[str, Any], settings: Collection[str], names: Collection[str] = ()
) -> Iterator[Any]:
    """Yields the values of fields that are not settings, with the names of unknown fields."""
    for name, value in body.items():
        if name in settings or value is None:
            continue
        if name in ("lower_bound", "upper_bound"):
            yield from (each for each in _texts(value) if each not in names)
        elif name != "key_metadata":
            yield from folder_names(name)
            yield value
        else:
            yield value


def _texts(value: Any) -> Iterator[Any]:
    """Yields a bound as it is, and as the text that it may be."""
    yield value
    if isinstance(value, bytes):
        try:
            yield value.decode()
        except UnicodeDecodeError:
            return


_MANIFESTS = "pipelines/"


class ManifestNames:
    """Searches the names that manifests list."""

    def __init__(self, context: Context, sought: EventMatcher) -> None:
        self._context = context
        self._sought = sought
        self._living: dict[str, tuple[str, frozenset[str]]] = {}  # by pipeline: folder, living
        self._needed: set[str] = set()

    def note(self, archive: Archive, generation: int, living: Collection[str]) -> None:
        """Notes a generation that was searched, and its folders with events."""
        pipeline = archive.pipeline(generation)
        for each in (pipeline, replay_pipeline(pipeline)):
            self._living[each] = (f"{archive.folder(generation)}/", frozenset(living))
            for partition in read_partitions(self._context, each):
                for row in read_commit_rows(self._context, each, partition):
                    self._needed.add(row.committed.manifest)

    def is_needed(self, key: str) -> bool:
        """Returns whether a commit names a manifest."""
        return key in self._needed

    def names_in(self, store: Store, key: str) -> bool | None:
        """Returns whether a manifest lists a file in a folder named by an erased event.

        None for an object that is not a manifest.
        """
        if not key.startswith(_MANIFESTS):
            return None
        try:
            manifest = load_manifest(store, key)
        except NotFoundError:
            return False
        except CorruptError:
            return None
        root, living = self._living.get(key.split("/")[1], ("", frozenset()))
        return any(
            self._sought.is_value_in(value)
            for one in manifest.each_range
            for file in one.files
            for value in folder_values(folder_below(file.target, root), living)
        )


def is_named_by_events(folder: str, named: int, living: Collection[str]) -> bool:
    """Returns whether a part of a folder's name is a value of events that were all erased.

    ``named`` parts after the topic's are values of events, whichever parser set them. Each is such
    a value if no folder with events has it and all parts before it.
    """
    parts = folder.split("/")
    starts = ["/".join([*parts[: depth + 1], ""]) for depth in range(1, named + 1)]
    return any(not any(f"{each}/".startswith(own) for each in living) for own in starts)


def files_named_by_events(context: Context, archive: Archive) -> Iterator[str]:
    """Yields empty files of an archive whose folders were named by events that were all erased."""
    for generation in archive.in_state("live", "building", "kept"):
        pipeline, root = archive.pipeline(generation), f"{archive.folder(generation)}/"
        files = [
            file
            for partition in read_partitions(context, pipeline)
            for _, file in counting_files(context, pipeline, partition)
            if file.kind == "data"
        ]
        living = {folder_below(file.target, root) for file in files if file.events}
        for file in files:
            is_empty = file.erased and not file.events
            if is_empty and is_named_by_events(folder_below(file.target, root), file.named, living):
                yield file.target


def folder_below(target: str, root: str) -> str:
    """Returns the folder of a file below its generation's; events name none of dead letters."""
    return target.removeprefix(root).rpartition("/")[0] if target.startswith(root) else ""


def erases(manifest: Manifest, file: FileEntry, offsets: Sequence[int]) -> bool:
    """Returns whether some of these offsets were removed from a file."""
    taken = np.intersect1d(np.array(manifest.erased, np.int64), np.array(offsets, np.int64))
    return bool(((taken >= file.first_offset) & (taken <= file.last_offset)).any())
