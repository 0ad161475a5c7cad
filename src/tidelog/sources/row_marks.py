"""How a file of rows is known again: by its first line, and by what was read of it.

A mark tells how many bytes were read and has digests of the first and the last 4 KiB of them. A
file that begins with these bytes is the one that was read, whatever its name is now; one that does
not was replaced or cut off. Where contents agree, an inode tells which of two files it is, so it is
a hint and never decides alone. Of a compressed file of lines the text counts, so a file is known
again after it was compressed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tidelog.codec.formats.streams import decoding, open_text
from tidelog.errors import CorruptError
from tidelog.model.decoding import Persisted
from tidelog.model.run import decode_row, encode_row
from tidelog.sources.objects import opened
from tidelog.store.base import ObjectInfo, Store

__all__ = [
    "Passed",
    "RowMark",
    "first_line",
    "first_text",
    "inode_of",
    "is_prefix",
    "mark_from",
    "mark_of",
    "matches",
    "may_match",
    "passed_at",
]

_PROBE_BYTES = 4096  # of the beginning and of the end
_READ_BYTES = 1 << 20
_ROWS = b"rows:"  # before a note of a range of rows
_FIRST_BYTES = 64 << 10  # of a compressed file, in which its first 4 KiB of text are


class RowMark(Persisted, frozen=True):
    """What was read of a file of rows."""

    rows: int
    size: int  # bytes of them, in a file of lines; else of the whole file
    head: str
    tail: str
    is_open: bool = False  # the last line had no end
    inode: str = ""  # where files have one

    def note(self) -> bytes:
        """As a manifest and a head keep it."""
        return _ROWS + encode_row(self)


@dataclass(slots=True)
class Passed:
    """What was read of some bytes so far: their size, and both ends of them."""

    rows: int = 0
    size: int = 0
    head: bytes = b""
    tail: bytes = b""

    def add(self, data: bytes, rows: int = 0) -> None:
        """Go on over bytes that follow."""
        self.rows += rows
        self.size += len(data)
        if len(self.head) < _PROBE_BYTES:
            self.head += data[: _PROBE_BYTES - len(self.head)]
        self.tail = (self.tail + data[-_PROBE_BYTES:])[-_PROBE_BYTES:]

    def mark(self, is_open: bool = False, inode: str = "") -> RowMark:
        return RowMark(self.rows, self.size, _digest(self.head), _digest(self.tail), is_open, inode)


def mark_from(note: bytes) -> RowMark | None:
    """The mark that a head keeps; None where nothing was read yet, or other files than of rows."""
    if not note.startswith(_ROWS):
        return None
    return decode_row(note.removeprefix(_ROWS), RowMark, "mark of a file")


def mark_of(store: Store, info: ObjectInfo, rows: int, size: int | None = None) -> RowMark:
    """Mark the first bytes of an object as they are now, or all of them."""
    passed = _probed(store, info.key, info.size if size is None else size)
    passed.rows = rows
    return passed.mark(inode=inode_of(info))


def passed_at(store: Store, info: ObjectInfo, mark: RowMark) -> Passed:
    """Where reading stands after what was marked, in a file that is not compressed."""
    passed = _probed(store, info.key, mark.size)
    passed.rows = mark.rows
    return passed


def matches(store: Store, info: ObjectInfo, mark: RowMark, codec: str | None) -> bool:
    """Whether a file begins with what was read."""
    if codec in (None, "none"):
        if info.size < mark.size:
            return False
        found = _probed(store, info.key, mark.size)
    else:
        found = Passed()
        try:
            with opened(store, info.key, info.size) as data, decoding(info.key):
                text = open_text(data, codec) if info.size else None
                while text is not None and found.size < mark.size:
                    block = text.read(min(_READ_BYTES, mark.size - found.size))
                    if not block:
                        break
                    found.add(block)
        except CorruptError:  # it is being written
            return False
    same = (found.size, _digest(found.head), _digest(found.tail))
    return same == (mark.size, mark.head, mark.tail)


def is_prefix(store: Store, info: ObjectInfo, other: ObjectInfo) -> bool:
    """Whether a file seems to be the beginning of another one, or all of it."""
    if info.size > other.size:
        return False
    one, two = (_probed(store, each.key, info.size) for each in (info, other))
    return (one.head, one.tail) == (two.head, two.tail)


def first_text(store: Store, info: ObjectInfo, codec: str | None) -> bytes:
    """The first 4 KiB of a file, of its text where it is compressed."""
    if codec in (None, "none"):
        return store.get(info.key, 0, min(info.size, _PROBE_BYTES)) if info.size else b""
    try:
        with opened(store, info.key, min(info.size, _FIRST_BYTES)) as data, decoding(info.key):
            return bytes(open_text(data, codec).read(_PROBE_BYTES)) if info.size else b""
    except CorruptError:  # it is being written
        return b""


def first_line(begin: bytes, delimiter: bytes) -> str:
    """A digest of the first line, or of its first 4 KiB; empty where it has no end yet."""
    line, found, _ = begin.partition(delimiter)
    whole = found or len(begin) >= _PROBE_BYTES
    return f"line-{_digest(line)}" if whole else ""


def may_match(begin: bytes, mark: RowMark) -> bool:
    """Whether the beginning of a file is what was marked."""
    return _digest(begin[: mark.size]) == mark.head


def inode_of(info: ObjectInfo) -> str:
    """The inode in a local file's etag; other etags have no such parts."""
    parts = info.etag.split("-")
    return parts[0] if len(parts) == 3 else ""


def _probed(store: Store, key: str, size: int) -> Passed:
    """Both ends of the first bytes of an object."""
    head = store.get(key, 0, min(size, _PROBE_BYTES))
    start = max(0, size - _PROBE_BYTES)
    tail = store.get(key, start, size) if start else head
    return Passed(0, min(size, start + len(tail)), head, tail)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
