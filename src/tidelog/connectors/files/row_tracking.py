"""Decides which file is which source partition, so that rotated files are found again.

A source partition is named by the path that its file had when it was first seen. Later, the file is
found by what was read of it (``row_marks``) together with an inode or a name. The source partition
with the most data read chooses first, because a header alone begins many files.

1. The file has the inode, and its old name or a rotation of it. Both ends of what was read are
   compared.
2. The file has the inode and any other name, and was not written to since: it was renamed. A file
   that was written to may be another one, because file systems reuse inodes.
3. The file has the old name or a rotation of it. Everything read is compared, decompressed.
4. The file is compressed and has a higher number (``app.log.1``, ``app.log.3.gz``), and another
   file has moved to the old name, or to that name with an extension of compressed files. Everything
   read is compared.

Any other file becomes a new source partition, even if it begins like a known one. If the name of
its path is in use, ``~2`` and so on is added. Each file is at most one source partition, and each
source partition at most one file. A new source partition gets a unique incarnation and keeps it
while its file is found. A position without a mark of what is before it is never trusted.

The current name of a file goes into its mark (``renewed``), where the next rotation starts from.

A file with a rotation's name next to its original is skipped while all of it is a prefix of the
original: it is a copy in progress. Skipped files are listed with the reason. A file that became
shorter is an error (truncated) if it has the same first line, name and inode and is nowhere else.
So is a file that vanished before all of it was read: the pipeline stores how many rows were seen,
so any process raises this until a person accepts the loss.

A file with several names (links) is read once: by the name that is not a symbolic link, because a
link may point to another file later. Its other names are skipped, and count as names it may have.

A rotation adds a number, a date, an extension of compressed files, or both: ``app.log`` becomes
``app.log.1``, ``app.log.gz``, ``app.log-20261116``, ``app.log.1.gz``. Some programs put the number
or date before the extension: ``app.1.log``, ``app-2026-11-16.log.gz``. A name with another ending
(``orders`` and ``orders-eu``) or number (``log.1`` and ``log.10``) is not a rotation.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import TypeVar

import msgspec

from tidelog.clock import Clock
from tidelog.connectors.files.row_files import RowFile
from tidelog.connectors.files.row_marks import (
    RowMark,
    first_line,
    first_text,
    inode_of,
    is_begin,
    mark_from,
    matches,
    may_match,
)
from tidelog.connectors.source import KnownPartition, SourcePartition, VanishedError
from tidelog.errors import NotFoundError, TidelogError
from tidelog.model.limits import FILE_FINISHED_MS
from tidelog.store.base import ObjectInfo, Store

__all__ = [
    "BoundFiles",
    "RowTracking",
    "is_compressed",
    "is_of_file",
    "number_of",
    "rotated_from",
]

K = TypeVar("K")
V = TypeVar("V")

_BEGINS_MAX = 2_000  # of 4 KiB
_ID_CHARS = 24  # of an incarnation
_OF_FILE = "~"  # in an incarnation; those of other sources have none
_KEPT_MAX = 100_000  # results of comparisons to remember


@dataclass(frozen=True, slots=True)
class BoundFiles:
    """The files of source partitions, and why some have none."""

    files: dict[SourcePartition, ObjectInfo] = field(default_factory=dict)
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # why files are not read, by key


class RowTracking:
    """Binds source partitions to files by what is known about both."""

    def __init__(self, row_file: Callable[[ObjectInfo], RowFile], clock: Clock) -> None:
        self._row_file = row_file
        self._clock = clock
        self._known: dict[SourcePartition, KnownPartition] = {}
        self._marks: dict[SourcePartition, RowMark | None] = {}
        self._last: dict[SourcePartition, tuple[str, str]] = {}  # name and etag when last bound
        self._files: Mapping[str, ObjectInfo] = {}  # all current files
        self._inodes: dict[str, list[str]] = {}  # their names
        self._others: dict[str, list[str]] = {}  # more names of the same file
        self._rotated: dict[str, list[str]] = {}  # their names, by names they may have had
        # Compressed files, by the name they extend.
        self._numbered: dict[str, list[tuple[int, str]]] = {}
        self._holders: dict[str, SourcePartition] = {}  # of files found again, by name
        self._ends: dict[SourcePartition, int] = {}  # rows last seen
        self._same: dict[tuple[str, str, bytes, bool], bool] = {}
        self._copies: dict[tuple[str, str, str, str], bool | None] = {}
        self._lines: dict[tuple[str, str], str] = {}
        self._renewed: dict[SourcePartition, bytes] = {}
        self._minted: dict[SourcePartition, tuple[str, str]] = {}  # inode and incarnation
        self._begins: dict[tuple[str, str], bytes] = {}

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Sets what was read of source partitions."""
        self._known = dict(known)
        self._marks = {
            each: mark_from(found.further or found.note) for each, found in known.items()
        }
        for partition, found in known.items():
            if found.seen and self._marks[partition] is not None:
                self._ends.setdefault(partition, int(found.seen))

    def seen(self) -> dict[SourcePartition, str]:
        """Returns how many rows were seen in source partitions."""
        return {partition: str(rows) for partition, rows in self._ends.items()}

    def known(self, partition: SourcePartition) -> KnownPartition | None:
        return self._known.get(partition)

    def known_below(self, folder: str) -> list[SourcePartition]:
        """Returns source partitions last found in a folder, given by its name and a slash."""
        return [each for each in self._known if self.name(each).startswith(folder)]

    def note_end(self, partition: SourcePartition, rows: int) -> None:
        """Remembers how many rows a source partition was seen to have."""
        self._ends[partition] = rows

    def identify(self, partition: SourcePartition, note: bytes) -> None:
        """Remembers what the first rows of a known file are, of which nothing was read."""
        self._renewed[partition] = note

    def renewed(self) -> dict[SourcePartition, bytes]:
        """Returns notes with the names that files were last found under, or with first rows."""
        return dict(self._renewed)

    def name(self, partition: SourcePartition) -> str:
        """Returns the name that the file of a source partition was last found under."""
        last, _ = self._last.get(partition, ("", ""))
        return last or _path(partition.name)

    def incarnation(self, store: Store, partition: SourcePartition, info: ObjectInfo) -> str:
        """Returns the known incarnation, or a new unique one."""
        known = self._known.get(partition)
        if known is not None and known.incarnation:
            return known.incarnation
        inode, minted = self._minted.get(partition, ("", ""))
        if not minted or inode != inode_of(info.etag):
            seen = f"{info.key} {info.etag} {self._clock.now_ms()}"
            digest = hashlib.sha256(seen.encode()).hexdigest()[:_ID_CHARS]
            minted = f"{self._first_line(store, info)}{_OF_FILE}{digest}"
            self._minted[partition] = inode_of(info.etag), minted
        return minted

    def _first_line(self, store: Store, info: ObjectInfo) -> str:
        """Returns what identifies a file of text before anything of it was read."""
        key, file = (info.key, info.etag), self._row_file(info)
        if key not in self._lines and file.is_text:
            _keep(self._lines, key, first_line(self._begin(store, info), file.delimiter))
        return self._lines.get(key, "")

    def _begin(self, store: Store, info: ObjectInfo) -> bytes:
        """Returns the beginning of a file; reads it once while it is compared with others."""
        key, file = (info.key, info.etag), self._row_file(info)
        if key not in self._begins:
            found = first_text(store, info, file.text_codec)
            _keep(self._begins, key, found, _BEGINS_MAX)
        return self._begins[key]

    def bind(
        self, store: Store, topic: str, files: Mapping[str, ObjectInfo], only: str = ""
    ) -> BoundFiles:
        """Finds the file of each source partition. ``files`` maps names of paths to files.

        With ``only``, no other file becomes a new source partition.
        """
        bound = BoundFiles()
        files = self._one_name_each(files, only, bound)
        free = dict(files)
        self._index(files)
        ours = [each for each in self._known if each.topic == topic]
        ours.sort(key=lambda each: (-_number(each.name), each.name))
        sizes = {each: mark.size if (mark := self._marks[each]) else -1 for each in ours}
        ours.sort(key=lambda each: -sizes[each])

        def give(partition: SourcePartition, name: str) -> None:
            bound.files[partition] = info = free.pop(name)
            self._last[partition] = (name, info.etag)
            self._holders[name] = partition

        ways = (
            self._by_last,
            self._by_inode,
            self._by_name,
            self._by_rotation,
            self._by_higher_number,
            self._by_path,
        )
        # The most data read first: a header alone begins many files.
        for _, group in groupby(ours, key=lambda each: sizes[each]):
            for prefer, partition in product(ways, list(group)):
                if partition not in bound.files:
                    found = prefer(store, partition, free)
                    if found is not None:
                        give(partition, found)
        self._renew(bound)
        self._add_missing(store, ours, free, bound)
        for left in sorted(free):
            if only in ("", left):
                original = self._original(store, left)
                if original:
                    bound.left_out[files[left].key] = _why_left_out(files[original])
                else:
                    bound.files[self._fresh(topic, left, bound)] = files[left]
        return bound

    def _one_name_each(
        self, files: Mapping[str, ObjectInfo], only: str, bound: BoundFiles
    ) -> dict[str, ObjectInfo]:
        """Returns files with one name each, and lists their other names as left out."""
        names: dict[str, list[str]] = defaultdict(list)
        for name, info in files.items():
            names[info.file or f"/{name}"].append(name)
        self._others, found = {}, dict(files)
        for same in names.values():
            if len(same) > 1:
                kept, *others = sorted(same, key=lambda n: (n != only, files[n].is_link, n))
                self._others[kept] = others
                for name in others:
                    if not only:
                        bound.left_out[files[name].key] = (
                            f"is another name of the file `{files[kept].key}`, which is read"
                        )
                    del found[name]
        return found

    def _index(self, files: Mapping[str, ObjectInfo]) -> None:
        self._files, self._inodes = files, defaultdict(list)
        self._rotated, self._numbered = defaultdict(list), defaultdict(list)
        self._holders = {}
        for name, info in sorted(files.items()):
            self._inodes[inode_of(info.etag)].append(name)
            for old in rotated_from(name):
                self._rotated[old].append(name)
            numbered = number_of(name) if is_compressed(name) else None
            if numbered is not None:
                self._numbered[numbered[0]].append((numbered[1], name))

    # Ways to find a file, the most certain first. Each returns the name of a free file.

    def _by_last(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        name, etag = self._last.get(partition, ("", ""))
        inode = inode_of(etag)
        if name not in free or inode_of(free[name].etag) != inode:
            return None
        return name if self._is_same(store, partition, free[name], whole=not inode) else None

    def _by_inode(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        mark = self._marks[partition]
        _, etag = self._last.get(partition, ("", mark.etag if mark is not None else ""))
        for name in self._inodes.get(inode_of(etag), ()) if inode_of(etag) else ():
            info = free.get(name)
            if info is None or not (info.etag == etag or self._may_be_named(partition, name)):
                continue  # may be another file that reuses the inode of a deleted one
            if self._is_same(store, partition, info):
                return name
        return None

    def _by_name(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        mark = self._marks[partition]
        name = (mark.name if mark is not None else "") or _path(partition.name)
        return self._if_named(store, partition, free, name)

    def _by_path(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        """Finds a file by its first name: it may be moved back there."""
        return self._if_named(store, partition, free, _path(partition.name))

    def _if_named(
        self,
        store: Store,
        partition: SourcePartition,
        free: Mapping[str, ObjectInfo],
        name: str,
    ) -> str | None:
        if name not in free or (self._marks[partition] is None and self._original(store, name)):
            return None
        return name if self._is_same(store, partition, free[name], whole=True) else None

    def _by_rotation(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        names = (name for old in self._names(partition) for name in self._rotated.get(old, ()))
        return self._with_content(store, partition, free, names)

    def _by_higher_number(
        self, store: Store, partition: SourcePartition, free: Mapping[str, ObjectInfo]
    ) -> str | None:
        old = _path(partition.name)
        compressed = [each for each in self._rotated.get(old, ()) if _CODEC.sub("", each) == old]
        moved = [each for each in (old, *compressed) if each in self._files]
        holders = [held for each in moved if (held := self._holders.get(each)) is not None]
        if not moved or any(_path(each.name) == old for each in holders):
            return None  # nothing has moved there, so no rotation happened
        if old not in self._holders and self._if_named(store, partition, free, old):
            return None  # it was moved back there
        stem, number = number_of(old) or ("", 0)
        higher = sorted(each for each in self._numbered.get(stem, ()) if each[0] > number)
        return self._with_content(store, partition, free, (name for _, name in higher))

    def _with_content(
        self,
        store: Store,
        partition: SourcePartition,
        free: Mapping[str, ObjectInfo],
        names: Iterable[str],
    ) -> str | None:
        """Returns the first name whose file begins with everything that was read; None if none."""
        mark, known = self._marks[partition], self._known[partition]
        if not _line(known.incarnation) if mark is None else not mark.is_whole:
            return None  # nothing to compare
        found = (name for name in names if name in free and self._row_file(free[name]).is_text)
        return next(
            (name for name in found if self._is_same(store, partition, free[name], whole=True)),
            None,
        )

    def _names(self, partition: SourcePartition) -> list[str]:
        """Returns the names that a source partition is known to have had."""
        last, _ = self._last.get(partition, ("", ""))
        mark = self._marks[partition]
        names = (_path(partition.name), mark.name if mark is not None else "", last)
        return list(dict.fromkeys(name for name in names if name))

    def _may_be_named(self, partition: SourcePartition, name: str) -> bool:
        """Returns whether a name is an old one of a source partition, or a rotation of one."""
        names = {old for each in (name, *self._others.get(name, ())) for old in rotated_from(each)}
        names.update((name, *self._others.get(name, ())))
        return not names.isdisjoint(self._names(partition))

    def _is_same(
        self, store: Store, partition: SourcePartition, info: ObjectInfo, whole: bool = False
    ) -> bool:
        """Returns whether a file begins with what was read of a source partition."""
        known, mark = self._known[partition], self._marks[partition]
        if mark is None:
            before, line = _line(known.incarnation), self._first_line(store, info)
            return not int(known.position) and (not before or not line or before == line)
        key = (info.key, info.etag, known.further or known.note, whole and mark.is_whole)
        if key not in self._same:
            codec = self._row_file(info).text_codec
            same = may_match(self._begin(store, info), mark)
            _keep(self._same, key, same and matches(store, info, mark, codec, key[3]))
        return self._same[key]

    # After all files were matched.

    def _renew(self, bound: BoundFiles) -> None:
        """Records names that differ from those in the marks."""
        self._renewed = {}
        for partition, info in bound.files.items():
            mark, (name, _) = self._marks[partition], self._last[partition]
            if mark is not None and name != (mark.name or _path(partition.name)):
                mark = msgspec.structs.replace(mark, name=name, etag=info.etag)
                self._renewed[partition] = mark.note()

    def _add_missing(
        self,
        store: Store,
        ours: list[SourcePartition],
        free: dict[str, ObjectInfo],
        bound: BoundFiles,
    ) -> None:
        """Adds errors for files that vanished with unread rows, or were truncated."""
        for partition in ours:
            mark, known = self._marks[partition], self._known[partition]
            if partition in bound.files:
                continue
            name = (mark.name if mark is not None else "") or _path(partition.name)
            info = free.get(name)
            shorter = info is not None and mark is not None and self._is_shorter(info, mark)
            before = _line(known.incarnation)
            if info is not None and shorter and before:
                if self._first_line(store, info) == before:
                    del free[name]
                    bound.errors[partition] = _cut_off(partition, info)
            elif self._ends.get(partition, 0) > max(int(known.position), int(known.lost or 0)):
                ends = int(known.position), self._ends[partition]
                bound.errors[partition] = _vanished(partition, *ends)

    def _is_shorter(self, info: ObjectInfo, mark: RowMark) -> bool:
        """Returns whether a file has less than was read, and may be the one that was read."""
        inode, other = inode_of(mark.etag), inode_of(info.etag)
        is_other = inode and other and inode != other
        return not is_other and self._row_file(info).is_plain and 0 < info.size < mark.size

    def _original(self, store: Store, name: str) -> str:
        """Returns the file that a rotation copied to this name; empty: none."""
        info = self._files[name]
        for each in rotated_from(name):
            if each in self._files and each != name:
                found = self._is_copy(store, info, self._files[each])
                idle_ms = self._clock.now_ms() - info.modified_ms
                if found or (found is None and idle_ms < FILE_FINISHED_MS):
                    return each
        return ""

    def _is_copy(self, store: Store, info: ObjectInfo, original: ObjectInfo) -> bool | None:
        """Returns whether a file is a prefix of another; None: as far as it decompresses."""
        one, two = self._row_file(info), self._row_file(original)
        if not (one.is_text and two.is_text):
            return False
        key = (info.key, info.etag, original.key, original.etag)
        if key not in self._copies:
            begin, other = self._begin(store, info), self._begin(store, original)
            same = other.startswith(begin)
            found = same and is_begin(store, info, one.codec, original, two.codec)
            _keep(self._copies, key, found)
        return self._copies[key]

    def _fresh(self, topic: str, name: str, bound: BoundFiles) -> SourcePartition:
        """Returns a source partition with an unused name."""
        found, number = SourcePartition(topic, name), 1
        while found in self._known or found in bound.files:
            number += 1
            found = SourcePartition(topic, f"{name}~{number}")
        return found


def _keep(kept: dict[K, V], key: K, value: V, most: int = _KEPT_MAX) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


def _line(incarnation: str) -> str:
    """Returns the first line's part of an incarnation; empty if the line had no newline yet."""
    return incarnation.partition(_OF_FILE)[0]


def is_of_file(incarnation: str) -> bool:
    """Returns whether a source partition is a file of its own, which its name is that of."""
    return _OF_FILE in incarnation


def _path(name: str) -> str:
    """Returns the path that a source partition is named by; a `~` of a path is escaped."""
    return name.partition("~")[0]


def _number(name: str) -> int:
    number = name.partition("~")[2]
    return int(number) if number else 1


def _why_left_out(original: ObjectInfo) -> str:
    return (
        f"all of it is the beginning of `{original.key}`, which is read, and its name is that of a "
        "rotated copy: rename it if it is a file of its own"
    )


def _cut_off(partition: SourcePartition, info: ObjectInfo) -> NotFoundError:
    return NotFoundError(
        f"source partition `{partition.text}`: file `{info.key}` has shrunk to {info.size} bytes, "
        "and more of it was read: put back what it was, or remove it",
        file=info.key,
    )


def _vanished(partition: SourcePartition, position: int, end: int) -> VanishedError:
    return VanishedError(
        f"source partition `{partition.text}`: its file was removed or replaced before its last "
        f"{end - position} rows were read: put it back into the folder under its name, or run with "
        "--accept-loss to record that they are lost",
        rows=end - position,
        end=str(end),
    )


_CODEC = re.compile(r"\.(?:gz|zst)\Z", re.IGNORECASE)
_TIME = r"(?:[-_.T]?\d{2}(?:[-:.]?\d{2}){0,2})?"
_DATE = rf"[-_.](?:(?:19|20)\d\d-?[01]\d(?:-?[0-3]\d{_TIME})?|1\d{{9}})"  # or seconds since 1970
_NUMBER = r"\.\d{1,5}"
_ADDED = rf"(?:{_DATE}(?:[-.]\d{{1,5}})?|{_NUMBER})"
_ENDS = (  # the shortest addition, and the longest
    re.compile(rf"(?P<old>.*[^.]){_ADDED}(?P<ending>)\Z", re.DOTALL),
    re.compile(rf"(?P<old>.*?[^.]){_ADDED}(?P<ending>)\Z", re.DOTALL),
    re.compile(rf"(?P<old>.*?[^.]){_ADDED}(?P<ending>\.[A-Za-z]\w*)\Z", re.DOTALL),
)
_NUMBERED = re.compile(r"(?P<old>.+)\.(?P<number>\d{1,5})\Z", re.DOTALL)


def rotated_from(name: str) -> list[str]:
    """Returns the names that a file may have had before it was rotated to this one."""
    plain = _CODEC.sub("", name)
    found = [plain] if plain != name else []
    matches = (end.match(plain) for end in _ENDS)
    found += [match["old"] + match["ending"] for match in matches if match is not None]
    return list(dict.fromkeys(found))


def number_of(name: str) -> tuple[str, int] | None:
    """Returns a name without its number, and the number; None if it has none."""
    match = _NUMBERED.match(_CODEC.sub("", name))
    return None if match is None else (match["old"], int(match["number"]))


def is_compressed(name: str) -> bool:
    """Returns whether a name has an extension of compressed files."""
    return _CODEC.search(name) is not None
