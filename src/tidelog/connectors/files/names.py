"""Parses file names: where the events of a backup came from, and the format of any file.

Archives name files ``<generation>_<partition>_<first offset>.<ext>`` below a folder of their topic,
so a folder of them can be read without a catalog. After ranges were set aside, names have a further
part before the extension. Escaped names are decoded. Names over 200 bytes (100 for a partition)
stay in their shortened form. A name that begins with ``_`` or ``.`` is not data, unless the address
itself names it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from tidelog.codec.formats import FORMATS, Format, FormatSettings, open_format
from tidelog.codec.parsers.base import unescaped
from tidelog.errors import InvalidError
from tidelog.model.address import Address, format_address, nearest, parse_address
from tidelog.model.limits import (
    FILE_PARTITION_BYTES_MAX,
    KEY_BYTES_MAX,
    KEY_SEGMENT_BYTES_MAX,
    OFFSET_END_MAX,
)

__all__ = [
    "LINES",
    "ArchivedName",
    "FileAddress",
    "archived_error",
    "archived_name",
    "escaped_name",
    "hidden_part",
    "name_error",
    "packed_error",
    "parse_file_address",
    "partition_problem",
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
