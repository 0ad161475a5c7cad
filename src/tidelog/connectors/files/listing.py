"""Lists a folder: which source partitions its files are, and which files cannot be read.

Each file name is checked twice: as it is, and as the source partition it refers to, which becomes a
catalog row. A file that fails either check is an error of its own, which names the file. The offset
in a name is compared with the events of the file if both are known: a file with events holds at
least one offset at or above the one in its name.

A subfolder that may not be read is skipped, and blocks only what may be in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from tidelog.codec.formats.base import Format
from tidelog.codec.formats.parquet import ParquetFormat, TableReader, last_value, sidecar_name
from tidelog.connectors.files.names import (
    FileAddress,
    archived_error,
    archived_name,
    escaped_name,
    hidden_part,
    name_error,
    packed_error,
    partition_problem,
    topic_of_folder,
)
from tidelog.connectors.files.objects import naming, opened
from tidelog.connectors.source import SourcePartition
from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError
from tidelog.model.limits import OFFSET_END_MAX
from tidelog.store.base import ObjectInfo, Store, after_folder

__all__ = [
    "Chain",
    "FolderListing",
    "ListedFile",
    "clashes",
    "found_files",
    "listed",
    "readable_files",
]

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
