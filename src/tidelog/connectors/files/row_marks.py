"""Recognizes a file of rows by its first line and by what was read of it, and reads ranges.

A mark holds how many bytes were read and their digests: of the first and last 4 KiB and, in files
of text, of everything. Of a file whose rows are not lines it covers the whole file as it was. A
file that does not begin with these bytes was replaced or truncated. A file that does may still be
another one: ``row_tracking`` decides that by names and inodes. For compressed files of text the
digests cover the text, so a file is recognized after compression.

The digest of everything covers blocks of 64 KiB, each with the digest of those before it. So
reading resumes after a mark with only the last block.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA, with_position
from tidelog.codec.formats.batches import decoding, open_text
from tidelog.connectors.files.row_files import RowFile, without_errors
from tidelog.connectors.merge import gathered, noted
from tidelog.connectors.source import Chunk, RangeReader, SourceRange, offset_at, range_offsets
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model.decoding import Persisted
from tidelog.model.topic import decode_row, encode_row
from tidelog.store import open_store_here
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.fetch import opened

__all__ = [
    "PlannedRows",
    "ReadBytes",
    "RowMark",
    "first_line",
    "first_text",
    "inode_of",
    "is_begin",
    "mark_from",
    "mark_of",
    "marked_names",
    "matches",
    "may_match",
    "not_held",
    "passed_at",
]

_PROBE_BYTES = 4096  # of the beginning and of the end
_BLOCK_BYTES = 64 << 10  # digested at a time
_READ_BYTES = 1 << 20
_ROWS = b"rows:"  # prefix of the note of a range of rows
_FIRST_BYTES = 64 << 10  # of a compressed file, enough for its first 4 KiB of text


class RowMark(Persisted, frozen=True):
    """How far a file of rows was read, and digests that identify the bytes up to there."""

    rows: int
    size: int  # bytes read of a file of lines; else of the whole text or file
    head: str
    tail: str
    is_open: bool = False  # the last line had no newline
    etag: str = ""  # of the file when it was read
    blocks: str = ""  # digest of all whole blocks; empty: only the ends are known
    rest: str = ""  # digest of the bytes after them
    name: str = ""  # of the file when last found; empty: same as its source partition

    @property
    def is_whole(self) -> bool:
        """Returns whether all bytes were digested."""
        return bool(self.rest)

    def note(self) -> bytes:
        """Encodes it for manifests and heads."""
        return _ROWS + encode_row(self)


@dataclass(slots=True)
class ReadBytes:
    """A running digest of the bytes read so far: size, both ends, and blocks."""

    rows: int = 0
    size: int = 0
    head: bytes = b""
    tail: bytes = b""
    blocks: str = ""  # digest of all whole blocks
    rest: bytes | None = b""  # the bytes after them; None: only the ends matter

    def add(self, data: bytes, rows: int = 0) -> None:
        """Adds the bytes that follow."""
        self.rows += rows
        self.size += len(data)
        if len(self.head) < _PROBE_BYTES:
            self.head += data[: _PROBE_BYTES - len(self.head)]
        self.tail = (self.tail + data[-_PROBE_BYTES:])[-_PROBE_BYTES:]
        if self.rest is not None:
            view = memoryview(self.rest + data)
            whole = len(view) - len(view) % _BLOCK_BYTES
            for at in range(0, whole, _BLOCK_BYTES):
                self.blocks = _digest(self.blocks.encode() + view[at : at + _BLOCK_BYTES])
            self.rest = bytes(view[whole:])

    def mark(self, is_open: bool = False, etag: str = "", name: str = "") -> RowMark:
        ends = _digest(self.head), _digest(self.tail)
        rest = "" if self.rest is None else _digest(self.rest)
        return RowMark(self.rows, self.size, *ends, is_open, etag, self.blocks, rest, name)

    def is_at(self, mark: RowMark) -> bool:
        """Returns whether these are the marked bytes."""
        found = self.mark()
        if (found.size, found.head, found.tail) != (mark.size, mark.head, mark.tail):
            return False
        both = found.is_whole and mark.is_whole
        return not both or (found.blocks, found.rest) == (mark.blocks, mark.rest)


def mark_from(note: bytes) -> RowMark | None:
    """Decodes the mark in a head; None if nothing was read, or the files are not rows."""
    if not note.startswith(_ROWS):
        return None
    return decode_row(note.removeprefix(_ROWS), RowMark, "mark of a file")


def marked_names(note: bytes) -> Iterator[str]:
    """Yields the names of files that a note has; an archive joins those of its source's ranges."""
    left = b""
    for part in note.split(_ROWS)[1:]:
        left += (_ROWS if left else b"") + part
        with contextlib.suppress(CorruptError):  # a name may have the prefix in it
            mark, left = decode_row(left, RowMark, "mark of a file"), b""
            yield from [mark.name] if mark.name else []


def mark_of(store: Store, info: ObjectInfo, rows: int, name: str, file: RowFile) -> RowMark:
    """Returns a mark of an object as it is now: by all of its text, or else by its ends."""
    if file.is_text:
        passed = ReadBytes()
        for block in _text(store, info, file.codec):
            passed.add(block)
    else:
        passed = _probe_ends(store, info.key, info.size)
    passed.rows = rows
    return passed.mark(etag=info.etag, name=name)


def passed_at(store: Store, info: ObjectInfo, mark: RowMark) -> ReadBytes:
    """Returns the state of reading after a mark, for a file that is not compressed."""
    passed = _probe_ends(store, info.key, mark.size)
    start = mark.size - mark.size % _BLOCK_BYTES
    rest = store.get(info.key, start, mark.size) if start < mark.size else b""
    passed.rows, passed.blocks, passed.rest = mark.rows, mark.blocks, rest
    return passed


def matches(
    store: Store, info: ObjectInfo, mark: RowMark, codec: str | None, whole: bool = False
) -> bool:
    """Returns whether a file begins with what was read.

    Without ``whole``, only both ends of an uncompressed file are compared.
    """
    is_plain = codec in (None, "none")
    if is_plain and info.size < mark.size:
        return False
    if is_plain and not _probe_ends(store, info.key, mark.size).is_at(mark):
        return False
    if is_plain and not whole:
        return True
    found = ReadBytes()
    try:
        for block in _text(store, info, codec, mark.size):
            found.add(block)
    except CorruptError:  # it is being written
        return False
    return found.is_at(mark)


def is_begin(
    store: Store, one: ObjectInfo, codec: str | None, other: ObjectInfo, other_codec: str | None
) -> bool | None:
    """Returns whether the text of a file is a prefix of another file's text, or all of it.

    Returns None if that holds for what can be decompressed, and the rest cannot be.
    """
    others, ahead = _text(store, other, other_codec), b""
    try:
        for block in _text(store, one, codec):
            while len(ahead) < len(block):
                more = next(others, b"")
                if not more:
                    return False
                ahead += more
            if ahead[: len(block)] != block:
                return False
            ahead = ahead[len(block) :]
    except CorruptError:
        return None
    return True


def _text(
    store: Store, info: ObjectInfo, codec: str | None, limit: int | None = None
) -> Iterator[bytes]:
    """Yields the bytes of a file, decompressed, up to a limit."""
    with opened(store, info.key, info.size) as data, decoding(info.key):
        text = open_text(data, codec or "none") if info.size else None
        done = 0
        while text is not None and (limit is None or done < limit):
            block = text.read(_READ_BYTES if limit is None else min(_READ_BYTES, limit - done))
            if not block:
                return
            done += len(block)
            yield block


def first_text(store: Store, info: ObjectInfo, codec: str | None) -> bytes:
    """Returns the first 4 KiB of a file, decompressed."""
    if codec in (None, "none"):
        return store.get(info.key, 0, min(info.size, _PROBE_BYTES)) if info.size else b""
    try:
        with opened(store, info.key, min(info.size, _FIRST_BYTES)) as data, decoding(info.key):
            return bytes(open_text(data, codec).read(_PROBE_BYTES)) if info.size else b""
    except CorruptError:  # it is being written
        return b""


def first_line(begin: bytes, delimiter: bytes) -> str:
    """Returns a digest of the first line, up to 4 KiB; empty if it has no newline yet."""
    line, found, _ = begin.partition(delimiter)
    whole = found or len(begin) >= _PROBE_BYTES
    return f"line-{_digest(line)}" if whole else ""


def may_match(begin: bytes, mark: RowMark) -> bool:
    """Returns whether the beginning of a file is what was marked."""
    return _digest(begin[: mark.size]) == mark.head


def inode_of(etag: str) -> str:
    """Returns the inode in the etag of a local file; empty for other etags."""
    parts = etag.split("-")
    return parts[0] if len(parts) == 3 else ""


def _probe_ends(store: Store, key: str, size: int) -> ReadBytes:
    """Reads both ends of the first bytes of an object."""
    head = store.get(key, 0, min(size, _PROBE_BYTES))
    start = max(0, size - _PROBE_BYTES)
    tail = store.get(key, start, size) if start else head
    return ReadBytes(0, min(size, start + len(tail)), head, tail, rest=None)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


_Pieces = Iterator[tuple[pa.RecordBatch, str]]


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Some rows of a file. Pickles."""

    range: SourceRange
    info: ObjectInfo
    file: RowFile
    store: str  # URL
    name: str = ""  # current name of the file
    note: bytes = b""  # of what was read before
    further: bytes = b""  # of what another pipeline read, which may be more

    def read(self) -> Iterator[Chunk]:
        """Yields the same chunks as ``FilesSource.read``. The last one has the mark of the file.

        Raises ``NotFoundError`` if the file is not the one read before, or is replaced meanwhile.
        """
        store, notes = open_store_here(self.store), [self.note]
        reading = self._lines(store, notes) if self.file.has_lines else self._others(store, notes)
        chunks = gathered(self._of_one_file(store, reading), self.range.limit)
        plain = (replace(each, batch=without_errors(each.batch)) for each in chunks)
        return noted(plain, lambda: notes[-1])

    def _of_one_file(self, store: Store, pieces: _Pieces) -> _Pieces:
        """Yields the pieces. A file that got the name of this one meanwhile is not damage."""
        try:
            yield from pieces
        except CorruptError as exc:
            with contextlib.suppress(NotFoundError):
                if store.head(self.info.key).etag == self.info.etag:
                    raise
            raise self._replaced() from exc

    def _lines(self, store: Store, notes: list[bytes]) -> _Pieces:
        start, limit = range_offsets(self.range)
        if start == limit:
            return
        passed, is_open = self._starting_state(store, start), False
        with opened(store, self.info.key, self.info.size) as data:
            data.seek(passed.size)
            for found in self.file.lines(data, passed.rows):
                row, lines, text = passed.rows, found.lines, found.text
                if len(lines) > limit - row:
                    lines = lines[: limit - row]
                    text = b"".join(line + self.file.delimiter for line in lines)
                passed.add(text, len(lines))
                is_open = found.is_open
                if passed.rows > start:
                    skipped = max(0, start - row)
                    yield self._piece(self.file.values(lines[skipped:]), row + skipped)
                if passed.rows == limit:
                    break
        if passed.rows < limit:
            raise not_held(self.range, 0, passed.rows)
        mark = passed.mark(is_open, self.info.etag, self.name)
        if self.file.is_plain and not self._is_still(store, mark):
            raise self._replaced()
        if not self.file.is_plain and store.head(self.info.key).etag != self.info.etag:
            raise self._replaced()
        notes.append(mark.note())

    def _starting_state(self, store: Store, start: int) -> ReadBytes:
        """Returns the state to begin with: after the last range, if the file is the same."""
        mark, codec = mark_from(self.note), self.file.codec
        if mark is None:
            return ReadBytes()
        if not matches(store, self.info, mark, codec):
            raise self._replaced()
        if self.file.is_plain and mark.rows == start and not mark.is_open:
            return passed_at(store, self.info, mark)
        return ReadBytes()

    def _others(self, store: Store, notes: list[bytes]) -> _Pieces:
        at, limit = range_offsets(self.range)
        if at == limit:
            return
        mark = mark_of(store, self.info, limit, self.name, self.file)
        known = mark_from(self.note)
        if known is not None and not matches(store, self.info, known, self.file.text_codec):
            raise self._replaced()
        with opened(store, self.info.key, self.info.size) as data:
            for row, batch in self.file.batches(data, at):
                rows = batch.slice(0, limit - row)
                at = row + rows.num_rows
                yield self._piece(rows, row)
                if at == limit:
                    break
        if at != limit:
            raise not_held(self.range, 0, at)
        if not self._is_still(store, mark):
            raise self._replaced()
        notes.append(mark.note())

    def _is_still(self, store: Store, mark: RowMark) -> bool:
        """Returns whether the file still is what was read now, and what another pipeline read."""
        marks, codec = (mark, mark_from(self.further)), self.file.text_codec
        return all(matches(store, self.info, each, codec) for each in marks if each is not None)

    def _piece(self, rows: pa.RecordBatch, row: int) -> tuple[pa.RecordBatch, str]:
        stored = rows.select(STORED_SCHEMA.names)
        batch = with_position(stored, self.range.partition.topic, 0, row)
        if "error" in rows.schema.names:
            batch = batch.append_column(rows.schema.field("error"), rows.column("error"))
        return batch, str(row + rows.num_rows)

    def _replaced(self) -> NotFoundError:
        return NotFoundError(
            f"source partition `{self.range.partition.text}`: file `{self.info.key}` was replaced "
            "or cut off: look at the source again",
            file=self.info.key,
        )


def not_held(range: SourceRange, first: int, end: int) -> NotFoundError:
    return NotFoundError(
        f"source partition `{range.partition.text}`: its files hold [{first}, {end}), asked was "
        f"[{range.start}, {range.limit}): files have shrunk or are missing: put them back",
        lost_from=offset_at(range.start),
        first=first,
        end=end,
    )


_: type[RangeReader] = PlannedRows
