"""Which file is which source partition: files of rows are found again when they are rotated.

A source partition is named by the path that its file had when it was first seen. What was read of
it tells later which file it is (``row_marks``): the one at that path, or one that was renamed,
copied or compressed since. Each file is one source partition at most, and each source partition one
file. A file that is none of those that were read becomes a new one; where its path's name is taken,
``~2`` and so on is added.

Not listed for now: a file that is the beginning of another one whose name it extends (a copy that
is being made before the original is cut off), and a compressed file beside its original. A file
that became shorter and still begins with the same line, and is nowhere else, is an error: it was
cut off. So is one that vanished before all of it was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tidelog.errors import NotFoundError, TidelogError
from tidelog.sources.base import Known, SourcePartition
from tidelog.sources.row_marks import (
    RowMark,
    first_line,
    first_text,
    inode_of,
    is_prefix,
    mark_from,
    matches,
    may_match,
)
from tidelog.sources.rows import RowFile
from tidelog.store.base import ObjectInfo, Store

__all__ = ["Bound", "RowTracking"]

K = TypeVar("K")
V = TypeVar("V")

_CODECS = (".gz", ".zst")
_BEGINS_MAX = 2_000  # of 4 KiB
_KEPT_MAX = 100_000  # answers about files that are remembered


@dataclass(frozen=True, slots=True)
class Bound:
    """The files of source partitions, and why some have none."""

    files: dict[SourcePartition, ObjectInfo] = field(default_factory=dict)
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)


class RowTracking:
    """Binds source partitions to files, by what is known of both."""

    def __init__(self, row_file: Callable[[ObjectInfo], RowFile]) -> None:
        self._row_file = row_file
        self._known: dict[SourcePartition, Known] = {}
        self._marks: dict[SourcePartition, RowMark | None] = {}
        self._last: dict[SourcePartition, tuple[str, str]] = {}  # name and inode, when last bound
        self._files: Mapping[str, ObjectInfo] = {}  # all that are there
        self._inodes: dict[str, list[str]] = {}  # their names
        self._ends: dict[SourcePartition, int] = {}  # rows that were last seen
        self._same: dict[tuple[str, str, bytes], bool] = {}
        self._lines: dict[tuple[str, str], str] = {}
        self._begins: dict[tuple[str, str], bytes] = {}

    def track(self, known: Mapping[SourcePartition, Known]) -> None:
        """Learn what was read of source partitions."""
        self._known = dict(known)
        self._marks = {each: mark_from(found.note) for each, found in known.items()}

    def known(self, partition: SourcePartition) -> Known | None:
        return self._known.get(partition)

    def note_end(self, partition: SourcePartition, rows: int) -> None:
        """Remember how many rows a source partition was seen to have."""
        self._ends[partition] = rows

    def incarnation(self, store: Store, info: ObjectInfo) -> str:
        """What a file of lines is known by before anything of it was read."""
        key, file = (info.key, info.etag), self._row_file(info)
        if key not in self._lines and file.has_lines:
            _keep(self._lines, key, first_line(self._begin(store, info), file.delimiter))
        return self._lines.get(key, "")

    def _begin(self, store: Store, info: ObjectInfo) -> bytes:
        """The beginning of a file, which is read once while it is compared with others."""
        key, file = (info.key, info.etag), self._row_file(info)
        if key not in self._begins:
            found = first_text(store, info, file.codec if file.has_lines else None)
            _keep(self._begins, key, found, _BEGINS_MAX)
        return self._begins[key]

    def bind(
        self, store: Store, topic: str, files: Mapping[str, ObjectInfo], only: str = ""
    ) -> Bound:
        """Find the file of each source partition; ``files`` are by the names of their paths.

        With ``only`` no other file becomes a new source partition.
        """
        bound, free = Bound(), dict(files)
        self._files, self._inodes = files, defaultdict(list)
        for name, info in files.items():
            self._inodes[inode_of(info)].append(name)
        ours = [each for each in self._known if each.topic == topic]
        ours.sort(key=lambda each: (self._marks[each] is None, -_number(each.name), each.name))

        def give(partition: SourcePartition, name: str) -> None:
            bound.files[partition] = info = free.pop(name)
            self._last[partition] = (name, inode_of(info))

        for prefer in (self._by_last, self._by_inode, self._by_path, self._by_content):
            for partition in ours:
                if partition not in bound.files:
                    found = prefer(store, partition, free)
                    if found is not None:
                        give(partition, found)
        self._add_missing(store, ours, free, bound)
        for left in sorted(free):
            if only in ("", left) and not self._is_copy(store, left):
                bound.files[self._fresh(topic, left, bound)] = files[left]
        return bound

    # Ways to find a file, the surest first. Each tells the name of one that is free.

    def _by_last(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        name, inode = self._last.get(partition, ("", ""))
        here = name in free and inode_of(free[name]) == inode
        return name if here and self._is_same(store, partition, free[name]) else None

    def _by_inode(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        mark = self._marks[partition]
        _, inode = self._last.get(partition, ("", mark.inode if mark is not None else ""))
        found = (name for name in self._inodes.get(inode, ()) if inode and name in free)
        return next((name for name in found if self._is_same(store, partition, free[name])), None)

    def _by_path(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        name = _path(partition.name)
        if name not in free or (self._marks[partition] is None and self._is_copy(store, name)):
            return None
        return name if self._is_same(store, partition, free[name]) else None

    def _by_content(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        if self._marks[partition] is None and not self._known[partition].incarnation:
            return None  # nothing tells
        base = _path(partition.name)
        names = sorted(free, key=lambda name: (not name.startswith(base), name))
        return next((name for name in names if self._is_same(store, partition, free[name])), None)

    def _is_same(self, store: Store, partition: SourcePartition, info: ObjectInfo) -> bool:
        """Whether a file begins with what was read of a source partition."""
        known, mark = self._known[partition], self._marks[partition]
        if mark is None:
            line = self.incarnation(store, info)
            return not known.incarnation or not line or known.incarnation == line
        key = (info.key, info.etag, known.note)
        if key not in self._same:
            file = self._row_file(info)
            codec = file.codec if file.has_lines else None
            same = may_match(self._begin(store, info), mark) and matches(store, info, mark, codec)
            _keep(self._same, key, same)
        return self._same[key]

    # What is left.

    def _add_missing(
        self,
        store: Store,
        ours: list[SourcePartition],
        free: dict[str, ObjectInfo],
        bound: Bound,
    ) -> None:
        """Source partitions whose file is gone though more was to be read, or was cut off."""
        for partition in ours:
            mark, known = self._marks[partition], self._known[partition]
            if partition in bound.files:
                continue
            info = free.get(_path(partition.name))
            shorter = info is not None and mark is not None and 0 < info.size < mark.size
            if info is not None and shorter and known.incarnation:
                if self.incarnation(store, info) == known.incarnation:
                    del free[_path(partition.name)]
                    bound.errors[partition] = _cut_off(partition, info)
            elif self._ends.get(partition, 0) > int(known.position):
                left = self._ends[partition] - int(known.position)
                bound.errors[partition] = _vanished(partition, left)

    def _is_copy(self, store: Store, name: str) -> bool:
        """Whether a file is made from another one that is still there."""
        files = self._files
        if any(name.endswith(codec) and name.removesuffix(codec) in files for codec in _CODECS):
            return True
        originals = (name[:end] for end in range(1, len(name)) if name[:end] in files)
        return any(is_prefix(store, files[name], files[each]) for each in originals)

    def _fresh(self, topic: str, name: str, bound: Bound) -> SourcePartition:
        """A name that no source partition has."""
        found, number = SourcePartition(topic, name), 1
        while found in self._known or found in bound.files:
            number += 1
            found = SourcePartition(topic, f"{name}~{number}")
        return found


def _keep(kept: dict[K, V], key: K, value: V, most: int = _KEPT_MAX) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


def _path(name: str) -> str:
    """The path that a source partition is named by; a `~` of a path is escaped."""
    return name.partition("~")[0]


def _number(name: str) -> int:
    number = name.partition("~")[2]
    return int(number) if number else 1


def _cut_off(partition: SourcePartition, info: ObjectInfo) -> NotFoundError:
    return NotFoundError(
        f"source partition `{partition.text}`: file `{info.key}` has shrunk to {info.size} bytes, "
        "and more of it was read: put back what it was, or remove it",
        file=info.key,
    )


def _vanished(partition: SourcePartition, rows: int) -> NotFoundError:
    return NotFoundError(
        f"source partition `{partition.text}`: its file is gone, or was replaced, before its last "
        f"{rows} rows were read: put it back into the folder under any name",
        rows=rows,
    )
