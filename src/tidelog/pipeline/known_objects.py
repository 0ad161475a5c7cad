"""Objects beside an archive's files of which every field is known: what of them may be an event's.

A proof that searched their text would never be clean for an id such as ``parquet`` or ``WRITE``,
which each Delta log holds. So the fields that only settings fill are left out: names of columns
and tables, formats, operations, counts. What is left is searched: statistics, tags, settings of
users, and names of folders. A folder in which there is a file with events has its name from these.
Iceberg's metadata is in ``known_iceberg``.
An object, an action or a field that is not known here is searched as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from tidelog.codec.formats.rows import read_rows
from tidelog.model.folder import Success
from tidelog.pipeline.known_iceberg import ICEBERG, iceberg_values
from tidelog.pipeline.known_names import folder_names

__all__ = ["event_values", "folder_values"]

_parse_json = msgspec.json.Decoder().decode

_DELTA = "/_delta_log/"
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
    """The values of an object that an event may have filled; None for an object that is not known.

    ``living`` are the folders of an archive's generation that have files with events;
    ``everywhere`` are those of all generations, as the beginning of keys.
    """
    folder, _, name = key.rpartition("/")
    try:
        if ICEBERG in key:
            return iceberg_values(key, data, everywhere)
        if name == "_SUCCESS":
            return _of_marker(_parse_json(data), living)
        if f"{folder}/".endswith(_DELTA):
            return _of_log(name, data, living)
    except _NOT_KNOWN:
        pass  # not what its name says
    return None


def _of_marker(marker: dict[str, Any], living: Collection[str]) -> list[Any] | None:
    if marker.keys() != set(Success.__struct_fields__):
        return None
    return list(folder_values(str(marker["folder"]), living))


def _of_log(name: str, data: bytes, living: Collection[str]) -> list[Any] | None:
    """Of an object of a Delta log."""
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
    """The names in a folder's path, and what follows ``=`` in them; none of a living folder.

    The first name is that of the topic.
    """
    if folder not in living:
        yield from folder_names(folder.partition("/")[2])


def _of_actions(line: dict[str, Any], living: Collection[str]) -> Iterator[Any]:
    """The values of a line, which has one action, or of a row, which has columns for all."""
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
    """The values of statistics; the names are those of columns."""
    try:
        stats = _parse_json(text)
    except (msgspec.MsgspecError, TypeError):
        stats = None
    if not isinstance(stats, dict) or not stats.keys() <= _STATS:
        yield text
        return
    yield from _values(stats)


def _values(value: Any) -> Iterator[Any]:
    """All values at any depth, without the names of fields."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _values(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _values(each)
    else:
        yield value


def _as_dict(value: Any) -> Any:
    """A map of a Parquet file, which comes as pairs, as a dict; everything else as it is."""
    is_pairs = isinstance(value, list) and all(isinstance(each, tuple) for each in value)
    return dict(value) if is_pairs else value
