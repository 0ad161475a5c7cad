"""Lists a folder: which source partitions its files are, by their names, and which cannot be read.

Each file name is checked twice: as it is, and as the source partition it refers to, which becomes a
catalog row. A file that fails either check is an error of its own, which names the file. The offset
in a name is compared with the events of the file if both are known: a file with events holds at
least one offset at or above the one in its name.

A subfolder that may not be read is skipped, and blocks only what may be in it.

**Names** say where the events of a backup came from, and the format of any file. Archives name
files ``<generation>_<partition>_<first offset>.<ext>`` below a folder of their topic, so a folder
of them can be read without a catalog. After ranges were set aside, names have a further part before
the extension. Escaped names are decoded. Names over 200 bytes (100 for a partition) stay in their
shortened form. A name that begins with ``_`` or ``.`` is not data, unless the address itself names
it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pyarrow as pa

from tidelog.codec.formats import FORMATS, FormatSettings, open_format
from tidelog.codec.formats.base import Format
from tidelog.codec.formats.parquet import ParquetFormat, TableReader, last_value, sidecar_name
from tidelog.codec.parsers.base import unescaped
from tidelog.connectors.source import SourcePartition
from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError
from tidelog.model.address import Address, format_address, nearest, parse_address
from tidelog.model.limits import (
    FILE_PARTITION_BYTES_MAX,
    KEY_BYTES_MAX,
    KEY_SEGMENT_BYTES_MAX,
    OFFSET_END_MAX,
)
from tidelog.store.base import ObjectInfo, Store, after_folder
from tidelog.store.fetch import naming, opened

__all__ = [
    "LINES",
    "ArchivedName",
    "Chain",
    "FileAddress",
    "FolderListing",
    "ListedFile",
    "archived_error",
    "archived_name",
    "clashes",
    "escaped_name",
    "found_files",
    "hidden_part",
    "listed",
    "name_error",
    "packed_error",
    "parse_file_address",
    "partition_problem",
    "readable_files",
    "topic_of_folder",
]

LINES = "lines"  # a line is the value of an event
_OPTIONS = ("delimiter", "format", "generation", "key", "mode", "schema")
_ARCHIVED = re.compile(r"(\d+)_(.+)_(\d{20})(?:_[0-9A-Za-z-]+)?(\.[A-Za-z0-9.]+)?")
_GENERATION = re.compile(r"g(\d+)")
_SHOWN_MAX = 300  # characters of a path in an error message
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_PACKED = re.compile(
    r"\.(?:7z|br|bz2|lz4|lzma|lzo|rar|snappy|sz|tar|tar\.gz|tar\.zst|tbz2?|tgz|txz|xz|z|zip)\Z",
    re.IGNORECASE,
)
_ENDINGS = {".parquet": "parquet", ".orc": "orc", ".avro": "avro", ".seq": "sequence"}


@dataclass(frozen=True, slots=True)
class FileAddress:
    """A folder or a file of a store, and its format; plain values."""

    url: str
    store: str  # URL of the store
    name: str  # of the folder or file there; empty: the root of the store
    format: str = ""  # empty: from each file name
    mode: str | None = None
    delimiter: str | None = None
    key: str | None = None
    schema: str | None = None
    generation: int | None = None  # of a backup; None: the only one

    @property
    def folder(self) -> str:
        """Returns the prefix of the paths of all its files."""
        return f"{self.name}/" if self.name else ""

    @property
    def root_name(self) -> str:
        """Returns the folder's own name: the topic of files that are not in a topic's folder."""
        return self.name or self.parent_name

    @property
    def parent_name(self) -> str:
        """Returns the name of the folder that contains it."""
        address = parse_address(self.store)
        parts = [part for part in (address.host, *address.path.split("/")) if part]
        return parts[-1] if parts else "files"

    def format_of(self, name: str) -> tuple[str, str | None]:
        """Returns the format and the codec of a plain file."""
        stem, codec = _codec(name)
        ending = _ENDINGS.get(Path(stem).suffix.lower())
        if self.format in ("", "jsonlines") and ending is None and self.mode == "events":
            return "jsonlines", codec
        if self.format in ("", "jsonlines", "delimited", LINES):
            return (LINES, codec) if self.format or ending is None else (ending, None)
        return self.format, None

    def archived_format(self, name: str, has_sidecars: bool) -> Format:
        """Returns the format of an archive's file."""
        stem, codec = _codec(name)
        suffix = Path(stem).suffix.lower()
        chosen = self.format or _ENDINGS.get(suffix)
        if chosen is None:
            chosen = "jsonlines" if suffix == ".jsonl" else "delimited"
        mode = self.mode or ("value" if has_sidecars else "events")
        settings = FormatSettings(
            mode=mode if chosen == "jsonlines" else None,
            delimiter=self.delimiter if chosen == "delimited" else None,
            key=self.key if chosen == "sequence" else None,
        )
        if self.schema is not None:
            settings = FormatSettings(schema=self.schema, keep_value=True)
        text = chosen in ("jsonlines", "delimited")
        return open_format(chosen, codec if text else None, settings)


@dataclass(frozen=True, slots=True)
class ArchivedName:
    """The parts of the path of an archive's file."""

    topic: str
    partition: str
    folder: str  # the path between the topic and the file
    generation: int
    first: int  # every offset in the file is at or above this


def parse_file_address(address: Address) -> FileAddress:
    """Parses ``file:PATH?format=F`` or ``file:s3://bucket/folder?format=F``."""
    if address.host not in ("", "localhost") or not address.path:
        raise InvalidError(
            f"source `{address.text}`: give file:PATH, or a store's address as in "
            "file:s3://bucket/folder"
        )
    inner = parse_address(address.path, plain_scheme="file")
    local = inner.scheme == "file"
    own = address.take_options(_OPTIONS) if local else address.options
    given = {name: own[name] for name in _OPTIONS if name in own}
    others = {name: value for name, value in own.items() if name not in _OPTIONS}
    parent, _, name = inner.path.rstrip("/").rpartition("/")
    if local:
        base, store = quote(inner.path.rstrip("/") or "/"), Path(parent or "/").as_uri()
    else:
        base, store = address.path, format_address(inner.scheme, inner.host, parent, others)
    query = urlencode({**others, **given}, safe=":/")
    place = FileAddress(
        url=f"file:{base}?{query}" if query else f"file:{base}",
        store=store,
        name=name,
        format=_checked_format(address, given.get("format", "")),
        mode=given.get("mode"),
        delimiter=given.get("delimiter"),
        key=given.get("key"),
        schema=given.get("schema"),
        generation=_generation(address, given.get("generation")),
    )
    if place.format and place.format != LINES:
        place.archived_format("x", has_sidecars=True)  # raises for an invalid setting
    return place


def archived_name(path: str, root_name: str) -> ArchivedName | None:
    """Parses a path below the folder; None if it is not an archive's. The root may be a topic."""
    *folders, name = path.split("/")
    match = _ARCHIVED.fullmatch(name)
    if match is None:
        return None
    generation, partition, first, _ = match.groups()
    above = _GENERATION.fullmatch(folders[0]) if folders else None
    if above is not None and above[1] == generation:
        folders = folders[1:]  # the address gives the root of the archive
    topic, *names = folders or [root_name]
    source = unescaped(topic), unescaped(partition, FILE_PARTITION_BYTES_MAX)
    return ArchivedName(*source, "/".join(names), int(generation), int(first))


def archived_error(key: str, named: ArchivedName) -> InvalidError | None:
    """Returns why the name of an archive's file is invalid; None if it is valid.

    ``name_error`` checks the key itself; this checks what its escapes decode to.
    """
    problem = partition_problem(named.topic, named.partition)
    if not problem and named.first >= OFFSET_END_MAX:
        problem = f"offset {named.first} is above the greatest one, {OFFSET_END_MAX - 1}"
    if not problem and named.generation >= OFFSET_END_MAX:
        problem = f"generation {named.generation} is not a 64-bit number"
    return InvalidError(f"{_shown(key)}: its name: {problem}: rename it") if problem else None


def partition_problem(topic: str, name: str) -> str:
    """Returns why no source partition can have these names; empty if one can."""
    text = f"{topic}/{name}"
    shown = f"source partition `{escaped_name(text)}`"
    if any(map(_is_escaped, text)):
        return f"{shown} has a control character or is not UTF-8 (here with `%` escapes)"
    if "/" in name:
        return f"{shown} has a `/` in `{name}`, which stands for a number or a file"
    longest = max(map(len, (topic.encode(), name.encode())))
    if longest > KEY_SEGMENT_BYTES_MAX:
        return f"{shown} has a part of {longest} bytes (limit {KEY_SEGMENT_BYTES_MAX})"
    return ""


def topic_of_folder(path: str) -> str | None:
    """Returns the topic whose events an archive may keep below a folder; None: any topic."""
    folders = path.split("/")
    if _GENERATION.fullmatch(folders[0]):
        folders = folders[1:]
    return unescaped(folders[0]) if folders else None


def hidden_part(path: str) -> str:
    """Returns the path up to the first part that begins with `_` or `.`; else empty.

    Such files are not data: sidecars, marks, and files of other tools.
    """
    parts = path.split("/")
    for number, part in enumerate(parts, 1):
        if part[:1] in ("_", "."):
            return "/".join(parts[:number])
    return ""


def escaped_name(name: str) -> str:
    """Returns a name with each control character and byte that is not UTF-8 as `%` and hex."""
    return "".join(
        "".join(f"%{byte:02X}" for byte in os.fsencode(char)) if _is_escaped(char) else char
        for char in name
    )


def name_error(key: str) -> InvalidError | None:
    """Returns why no file can be read under a key; None if one can."""
    what = _shown(key)
    if any(0xD800 <= ord(char) <= 0xDFFF for char in key):
        return InvalidError(f"{what}: its name is not UTF-8 (here with `%` escapes): rename it")
    if any(map(_is_escaped, key)):
        return InvalidError(
            f"{what}: its name has a control character (here with `%` escapes): rename it"
        )
    longest = max(len(part.encode()) for part in key.split("/"))
    if longest > KEY_SEGMENT_BYTES_MAX:
        return InvalidError(
            f"{what}: its name, or that of a folder, has {longest} bytes (limit "
            f"{KEY_SEGMENT_BYTES_MAX}): rename it"
        )
    if len(key.encode()) > KEY_BYTES_MAX:
        return InvalidError(
            f"{what}: its path has {len(key.encode())} bytes (limit {KEY_BYTES_MAX}): give a "
            "folder that is nearer to it as the source, or rename folders"
        )
    return None


def _shown(key: str) -> str:
    shown = key if len(key) <= _SHOWN_MAX else f"{key[:_SHOWN_MAX]}..."
    return f"file `{escaped_name(shown)}`"


def _is_escaped(char: str) -> bool:
    return ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) <= 0xDFFF


def packed_error(key: str) -> InvalidError | None:
    """Returns the error of a file whose name says that its bytes are not lines, or None."""
    name = key.rpartition("/")[2]
    if _PACKED.search(name) is None:
        return None
    return InvalidError(
        f"file `{key}`: is packed in a way that is not read: compress it by gzip (.gz) or zstd "
        "(.zst), or take it out of the folder; format=lines reads its bytes as they are",
        key=key,
    )


def _codec(name: str) -> tuple[str, str]:
    """Returns a name without the extension of its codec, and the codec."""
    ending = Path(name).suffix.lower()
    return (name[: -len(ending)], _CODECS[ending]) if ending in _CODECS else (name, "none")


def _checked_format(address: Address, given: str) -> str:
    known = (*FORMATS, LINES)
    if given and given not in known:
        raise InvalidError(
            f"source `{address.text}`: format `{given}` is unknown{nearest(given, known)}: "
            f"give one of {', '.join(known)}"
        )
    return given


def _generation(address: Address, given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()):
        raise InvalidError(
            f"source `{address.text}`: `{given}` is not a valid generation: give a whole number"
        )
    return int(given)


_HIDDEN = "its name begins with `_` or `.`: give its own address, or rename it, to read it"
_MARKS = ("_SUCCESS", "_owner")  # of archives and of other tools; these hold no events


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of an archive, with its sidecar if its format has one."""

    form: Format
    first: int  # from its name
    data: ObjectInfo
    sidecar: ObjectInfo | None

    def batches(self, store: Store) -> Iterator[pa.RecordBatch]:
        """Yields its events."""
        self._check_whole()
        with ExitStack() as stack:
            infos = [info for info in (self.data, self.sidecar) if info is not None]
            files = [stack.enter_context(opened(store, each.key, each.size)) for each in infos]
            stack.enter_context(naming(f"file `{self.data.key}`"))
            for batch in self.form.read(*files):
                if batch.num_rows and batch.column("offset")[0].as_py() < self.first:
                    raise CorruptError(
                        f"holds offset {batch.column('offset')[0]}, which is before the one in its "
                        "name: keep it, and restore it from a copy"
                    )
                yield batch

    def end(self, store: Store) -> int:
        """Returns the offset after its last event, or its first offset if it has no event.

        Raises ``CorruptError`` if its events end before the offset in its name, or at the highest
        offset.
        """
        self._check_whole()
        last = self._last(store)
        if last is None:
            return self.first
        if last < self.first:
            raise CorruptError(
                f"file `{self.data.key}`: holds offset {last}, which is before the one in its "
                "name: keep it, and restore it from a copy"
            )
        if last >= OFFSET_END_MAX:
            raise CorruptError(
                f"file `{self.data.key}`: holds offset {last}, and the greatest one is "
                f"{OFFSET_END_MAX - 1}: keep it, and restore it from a copy"
            )
        return last + 1

    def _last(self, store: Store) -> int | None:
        """Returns the offset of its last event; None if it has no event."""
        info, name = self.sidecar, "offset"
        if isinstance(self.form, ParquetFormat):
            info, name = self.data, self.form.columns.names["offset"]
        if info is not None:
            with opened(store, info.key, info.size) as file:
                found = last_value(file, f"file `{info.key}`", name)
            if found is not None:
                return found
        last: int | None = None
        for offsets in self.offsets(store):
            last = offsets[-1].as_py() if len(offsets) else last
        return last

    def offsets(self, store: Store) -> Iterator[pa.ChunkedArray | pa.Array]:
        """Yields the offsets of its events. Reads only this column if the format has columns."""
        info, name = self.sidecar, "offset"
        if isinstance(self.form, ParquetFormat):
            info, name = self.data, self.form.columns.names["offset"]
        if info is None:
            yield from (batch.column("offset") for batch in self.batches(store))
            return
        with opened(store, info.key, info.size) as file:
            for table in TableReader(file, f"file `{info.key}`").tables([name]):
                yield table.column(0)

    def _check_whole(self) -> None:
        beside = self.form.sidecar_name(self.data.key)
        if beside is not None and self.sidecar is None:
            raise CorruptError(
                f"sidecar `{beside}`: is not there, and without it the events of "
                f"`{self.data.key}` are not whole: restore it from a copy",
                file=beside,
            )


Chain = tuple[ListedFile, ...]  # the files of a source partition, by first offset


class FolderListing(NamedTuple):
    """What a folder holds. ``left_out`` lists what is not read, except sidecars and marks."""

    chains: dict[SourcePartition, Chain]  # of archives
    rows: dict[str, ObjectInfo]  # other files, by name
    root: str  # their topic
    only: str  # name of the file that the address gives; the others may be rotations of it
    errors: dict[SourcePartition, TidelogError]  # of files that cannot be read
    left_out: dict[str, str]  # why files and folders are not read
    denied: dict[str, TidelogError]  # of folders without rights, by prefix of the names in them


def listed(store: Store, place: FileAddress) -> FolderListing:
    """Lists a folder or a file. Raises ``InvalidError`` for files of two generations."""
    infos, denied, folder, root = found_files(store, place)
    only = place.name if not folder and place.name in infos else ""
    has_sidecars = any(key.endswith(".meta.parquet") for key in infos)
    chains: dict[SourcePartition, list[ListedFile]] = defaultdict(list)
    rows: dict[str, ObjectInfo] = {}
    generations: set[int] = set()
    errors: dict[SourcePartition, TidelogError] = {}
    left_out: dict[str, str] = {}
    sidecars = {sidecar_name(key) for key in infos}
    for key, info in infos.items():
        path = key.removeprefix(folder)
        if key in sidecars and key != only:
            continue
        hidden = "" if only else hidden_part(path)  # never hide what the address names
        if hidden:
            if key.rpartition("/")[2] not in _MARKS:
                left_out[escaped_name(f"{folder}{hidden}")] = _HIDDEN
            continue
        wrong = name_error(key) or (None if place.format else packed_error(key))
        if wrong is not None:
            if only in ("", path):
                errors[_partition_of(path, root)] = wrong
            else:
                left_out[escaped_name(key)] = str(wrong)
            continue
        named = archived_name(path, root) if only in ("", path) else None
        wrong = archived_error(key, named) if named is not None else None
        if named is None:
            rows[row_name(path)] = info
        elif wrong is not None:
            errors[_partition_of(path, root)] = wrong
        elif place.generation in (None, named.generation):
            generations.add(named.generation)
            form = place.archived_format(key, has_sidecars)
            file = ListedFile(form, named.first, info, infos.get(form.sidecar_name(key) or ""))
            partition = SourcePartition(named.topic, named.partition)
            chains[partition].append(file)
        else:
            root_folder = f"g{named.generation}/"
            where = f"{folder}{root_folder}" if path.startswith(root_folder) else key
            left_out[where] = f"is of generation {named.generation}: give generation=N to read it"
    if len(generations) > 1:
        raise InvalidError(
            f"source `{place.url}`: holds generations {min(generations)} and {max(generations)}, "
            "which have the same events: add generation=N, or give the folder of one"
        )
    ordered = {
        partition: tuple(sorted(files, key=lambda file: (file.first, file.data.key)))
        for partition, files in chains.items()
    }
    below = {
        path: error
        for key, error in denied.items()
        if not hidden_part(path := key.removeprefix(folder))
    }
    errors |= _folder_errors(below, root, ordered)
    denied = {row_name(f"{path}/"): error for path, error in below.items()}
    return FolderListing(ordered, rows, root, row_name(only), errors, left_out, denied)


def clashes(
    chains: Mapping[SourcePartition, Chain], rows: Mapping[SourcePartition, ObjectInfo]
) -> dict[SourcePartition, TidelogError]:
    """Returns an error for each name that both a backup and another file claim.

    If one of them were read under the name, the other would never be.
    """
    return {
        each: InvalidError(
            f"source partition `{each.text}`: file `{chains[each][0].data.key}`, by its name a "
            f"backup of it, and file `{rows[each].key}` are both called so, and neither is read: "
            "rename one of them, or put it into another folder",
            partition=each.text,
        )
        for each in chains.keys() & rows.keys()
    }


def row_name(path: str) -> str:
    """Turns a path into a name: a slash would end the topic's name, and a `~` begin a number."""
    return path.replace("%", "%25").replace("/", "%2F").replace("~", "%7E")


def _folder_errors(
    below: Mapping[str, TidelogError], root: str, chains: Mapping[SourcePartition, Chain]
) -> dict[SourcePartition, TidelogError]:
    """Returns errors for folders without rights: a reader must not skip offsets that are in one."""
    errors: dict[SourcePartition, TidelogError] = {}
    for path, error in below.items():
        errors[_partition_of(path, root)] = error
        topic = topic_of_folder(path)
        errors |= {each: error for each in chains if topic in (None, each.topic)}
    return errors


def _partition_of(path: str, root: str) -> SourcePartition:
    """Returns the source partition that lacks a file which cannot be read."""
    with suppress(UnicodeError):  # the name of the source partition itself is not UTF-8
        named = archived_name(path, root)
        if named is not None and not partition_problem(named.topic, named.partition):
            return SourcePartition(named.topic, named.partition)
    return SourcePartition(root, escaped_name(row_name(path)))


def found_files(
    store: Store, place: FileAddress
) -> tuple[dict[str, ObjectInfo], dict[str, TidelogError], str, str]:
    """Returns the files, errors of unreadable subfolders, the prefix, and the folder's name.

    The prefix is what precedes each path.
    """
    infos, denied = readable_files(store, place.folder)
    if infos or denied or not place.name:
        return infos, denied, place.folder, place.root_name
    for key in (place.name, sidecar_name(place.name)):  # the address may name a file
        with suppress(NotFoundError):
            infos[key] = store.head(key)
    if place.name not in infos:
        raise NotFoundError(
            f"source `{place.url}`: no file is there: check the path, or put some there"
        )
    beside, _ = readable_files(store, place.name)
    alike = {key: info for key, info in beside.items() if "/" not in key}
    return {**alike, **infos}, {}, "", place.parent_name


def readable_files(
    store: Store, prefix: str
) -> tuple[dict[str, ObjectInfo], dict[str, TidelogError]]:
    """Returns the objects below a prefix, and the errors of unreadable folders, by key.

    Raises ``InvalidError`` if the folder of the prefix itself may not be read.
    """
    infos: dict[str, ObjectInfo] = {}
    denied: dict[str, TidelogError] = {}
    start_after = ""
    while True:
        try:
            infos.update((info.key, info) for info in store.list(prefix, start_after))
        except InvalidError as exc:
            folder = str(exc.context.get("folder", ""))
            if not folder or f"{folder}/" == prefix or not folder.startswith(prefix):
                raise
            denied[folder] = exc
            start_after = after_folder(folder)
            continue
        below = tuple(f"{folder}/" for folder in denied)
        return {key: info for key, info in infos.items() if not key.startswith(below)}, denied
