"""Recognizes erased events in files, texts and paths.

A folder may be named by a field of the events in it, so the names in paths count too. In our own
files and metadata a value must be equal to an id or key. Files of others may have one in a longer
text, so these are searched for words.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote, unquote_to_bytes

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.archive.erased_events import Deletions, PartitionOffsets
from tidelog.archive.read import read_rows
from tidelog.codec.event_json import plain_rows
from tidelog.codec.formats.schema import PREFIX
from tidelog.codec.formats.text_lines import is_text
from tidelog.codec.parsers.base import escaped
from tidelog.errors import InvalidError
from tidelog.log.ledger import ErasedIds
from tidelog.model.decoding import is_deep_json
from tidelog.model.limits import FOLDER_NAME_BYTES_MAX

__all__ = [
    "EventMatcher",
    "folder_names",
    "has_columns",
    "is_event_lines",
    "is_plain_text",
    "names_of",
    "own_column",
    "rows_of",
    "time_ms_of",
]

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_KINDS = {b"PAR1": "parquet", b"ORC": "orc", b"Obj\x01": "avro"}
_FEW = 4  # fewer characters are a word of many texts that mean something else
_ESCAPED_MAX = 10
_ESCAPES = re.compile(rb"(?:\\u[0-9a-fA-F]{4})+|\\(.)", re.DOTALL)
_SIGNS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}
_OF_EVENT = {"topic", "partition", "offset", "id", "key", "value"}  # in a line that is an event
_parse_json = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class EventMatcher:
    """Ids and keys, and the places where events that had them were deleted.

    ``is_value_in`` and ``is_json_string_in`` look for an id or key as a whole value, as our own
    files and metadata have it. ``is_quoted_in`` and ``is_word_in`` also find one inside of a longer
    text, as files of others may have it.
    """

    deletions: Deletions
    by_offset: bool = True  # whether events above all offsets that a delete found are newer
    now_ms: int = sys.maxsize  # a later time says nothing about when an event was appended
    own: ErasedIds | None = None  # of a copy: its own ledger; None: it is not a copy

    def rows(
        self, batch: pa.RecordBatch, *, later: bool = True
    ) -> dict[int, list[PartitionOffsets]]:
        """Returns the rows of a batch with one of the ids or keys, and where those were deleted.

        Without ``later``, excludes rows after the erasure by the ledger's time, like copies do.
        That is right for events that a delete finds: the ledger's time is never before theirs. In a
        copy it may be, for an event dated in the future: ``now_ms`` counts such ones too. A copy
        refuses only what its own ledger has: after that time, offsets there say nothing.
        Raises ``InvalidError`` for a column that cannot be compared.
        """
        found: dict[int, list[PartitionOffsets]] = {}
        for name, kind, wanted in (
            ("id", pa.string(), self.deletions.by_id),
            ("key", pa.binary(), self.deletions.by_key),
        ):
            column = own_column(batch, name) if wanted else None
            if column is not None:
                for row, value in _matches(column, kind, wanted):
                    ledger, time_ms = self.deletions.ledger, time_ms_of(batch, row)
                    is_later = time_ms <= self.now_ms and ledger.is_later(name, value, time_ms)
                    if later or not is_later:
                        is_own = self.own is None or self.own.covers(name, value, time_ms)
                        found.setdefault(row, []).append(wanted[value] if is_own else {})
        return found

    def hidden(self, batch: pa.RecordBatch) -> list[str]:
        """Returns the columns that would identify rows and that a batch does not have."""
        sought = (("id", self.deletions.by_id), ("key", self.deletions.by_key))
        return [name for name, wanted in sought if wanted and own_column(batch, name) is None]

    def count_quoting_rows(self, batch: pa.RecordBatch) -> int:
        """Returns how many rows quote an id or key in any column (``is_quoted_in``).

        For files without our columns, such as files of others.
        """
        return sum(map(self.is_quoted_in, plain_rows(batch, lambda count, _: count)))

    def is_quoted_in(self, value: Any) -> bool:
        """Returns whether a value is an id or key, or has one in a text, at any depth."""
        return any(map(self._is_quote, _leaves(value)))

    def _is_quote(self, value: Any) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            return len(str(value)) >= _FEW and str(value) in self.deletions.by_id
        if not isinstance(value, str | bytes):
            return False
        text = value.encode() if isinstance(value, str) else _plain(value)
        return self._is_one(value) or self._is_in_texts(text, short=False)

    def is_value_in(self, value: Any) -> bool:
        """Returns whether a value is an id or key, or holds one at any depth, or in JSON there."""
        return any(map(self._is_one, _leaves(value)))

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, str):
            keys = self.deletions.by_key
            is_one = value in self.deletions.by_id or value.encode() in keys
            is_one = is_one or value in self._cut_names
            return is_one or self._is_json(value) or ("/" in value and self._is_in_path(value))
        return isinstance(value, bytes) and (
            value in self.deletions.by_key or self.is_json_string_in(value)
        )

    def _is_in_path(self, path: str) -> bool:
        """Returns whether a path has a folder that is named by an id or key."""
        names = list(names_of(path))
        keys, cut = self.deletions.by_key, self._cut_names
        return any(
            name in self.deletions.by_id or name.encode() in keys or name in cut for name in names
        )

    @cached_property
    def _cut_names(self) -> frozenset[str]:
        """Returns the folders' names of ids and keys that are too long to be one."""
        long = (text for text in self._texts if 3 * len(text.encode()) > FOLDER_NAME_BYTES_MAX)
        return frozenset(name for name in map(escaped, long) if "~" in name)

    def _is_json(self, value: str) -> bool:
        return '"' in value and self.is_json_string_in(value.encode())

    def state(
        self, partition: int, offset: int, places: list[PartitionOffsets]
    ) -> Literal["deleted", "another", "alive"]:
        """Returns what an event with one of the ids or keys is.

        ``places`` belong to ids and keys whose erasure is not before the event; without any, it is
        another event. The producer sets its time, which may be wrong. So it is also another event
        if it is above all offsets where the same id or key was deleted in its partition, unless
        others may have been read then (``by_offset``).
        """
        if offset in self.deletions.all.get(partition, ()):
            return "deleted"
        if not self.by_offset:
            return "alive" if places else "another"
        gone = [each.get(partition) for each in places]
        return "another" if all(each and offset > max(each) for each in gone) else "alive"

    def offsets(self, partition: int) -> set[int]:
        """Returns where events that had one of the ids or keys were deleted."""
        every = [*self.deletions.by_id.values(), *self.deletions.by_key.values()]
        return set().union(*(each.get(partition, set()) for each in every))

    def is_json_string_in(self, data: bytes) -> bool:
        """Returns whether text, possibly compressed, holds an id or key as JSON writes a string."""
        content = _plain(data)
        if not self._is_written(content):
            return False
        if not is_event_lines(data):
            return True
        # Names of an event's fields are in every line, so they do not count.
        lines = [_parse_json(line) for line in content.splitlines() if line]
        return any(self._is_written(msgspec.json.encode(list(line.values()))) for line in lines)

    def is_word_in(self, data: bytes) -> bool:
        """Returns whether text holds an id or key as JSON writes it; if not of events, as a word.

        Escapes of JSON and of addresses are decoded, as often as texts are in texts. Ids of few
        characters are words of many JSON documents, so there they count only as JSON writes them.
        Raises ``InvalidError`` if a text has too many escapes in each other.
        """
        content = _plain(data)
        if is_event_lines(data):
            return self.is_json_string_in(data)
        return self._is_in_texts(content, short=not _is_json(content))

    def _is_in_texts(self, text: bytes, *, short: bool) -> bool:
        """Returns whether a text, or what its escapes mean, has an id or key; short ones too."""
        patterns = [self._words[0], *([self._words[1]] if short else [])]
        return any(
            self._is_written(each) or any(words.search(each) for words in patterns if words)
            for each in _unescaped(text)
        )

    def _is_written(self, text: bytes) -> bool:
        return any(form in text for form in self._json_forms)

    @cached_property
    def _words(self) -> tuple[re.Pattern[bytes] | None, re.Pattern[bytes] | None]:
        """Returns the patterns of long ids and keys, and of short ones; None if there is none.

        A long one may have ``_`` next to it.
        """
        words = {each.encode() for each in self._texts} - {b""}
        long = [re.escape(each) for each in words if len(each) >= _FEW]
        short = [re.escape(each) for each in words if len(each) < _FEW]
        begin, end = rb"(?<![^\W_])(?<![.-])(?:", rb")(?![^\W_])(?!-)"
        return (
            re.compile(begin + b"|".join(long) + end) if long else None,
            re.compile(rb"(?<![\w.-])(?:" + b"|".join(short) + rb")(?![\w-])") if short else None,
        )

    @cached_property
    def _texts(self) -> list[str]:
        """Returns all ids and keys as texts; keys that are none in base64, as JSON has them."""
        keys = self.deletions.by_key
        texts = [*self.deletions.by_id, *(key.decode() for key in keys if is_text(key))]
        return texts + [base64.b64encode(key).decode() for key in keys if not is_text(key)]

    @cached_property
    def _json_forms(self) -> frozenset[bytes]:
        """Returns all ways in which JSON may write an id or key."""
        texts = self._texts
        forms = {json.dumps(text, ensure_ascii=plain) for text in texts for plain in (True, False)}
        return frozenset(map(str.encode, forms)) | frozenset(map(msgspec.json.encode, texts))


def own_column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """Returns our column, also if a field of the payload has taken its name."""
    names = batch.schema.names
    own = f"{PREFIX}{name}" if f"{PREFIX}{name}" in names else name
    return batch.column(own) if own in names else None


def time_ms_of(batch: pa.RecordBatch, row: int) -> int:
    """Returns the time of an event; 0 if its file has none, since the delete is later then."""
    column = own_column(batch, "timestamp")
    if column is None or not pa.types.is_timestamp(column.type):
        return 0
    value = column.slice(row, 1).cast(pa.timestamp("ms"), safe=False).cast(pa.int64())[0].as_py()
    return value or 0


def rows_of(data: bytes) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file of any format with columns, detected by its first bytes.

    Raises ``InvalidError`` for a file without columns.
    """
    if data.startswith(b"ARROW1"):
        file = pa.ipc.open_file(pa.BufferReader(data))
        for number in range(file.num_record_batches):
            yield file.get_batch(number)
        return
    kind = next((name for magic, name in _KINDS.items() if data.startswith(magic)), None)
    if kind is None:
        raise InvalidError("no columns")
    yield from read_rows(kind, io.BytesIO(data))


def has_columns(data: bytes) -> bool:
    """Returns whether the first bytes show a file with columns, which :func:`rows_of` reads."""
    return data.startswith((b"ARROW1", *_KINDS))


def is_plain_text(data: bytes) -> bool:
    """Returns whether data is text, possibly compressed in a known way."""
    content = _plain(data)
    return is_text(content) and b"\0" not in content


def is_event_lines(data: bytes) -> bool:
    """Returns whether each line is a whole event, so that its id and key are in the text."""
    lines = _plain(data).splitlines()
    try:
        return not any(map(is_deep_json, lines)) and all(
            _parse_json(line).keys() >= _OF_EVENT for line in lines if line
        )
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        return False


def _matches(
    column: pa.Array, kind: pa.DataType, wanted: Mapping[Any, PartitionOffsets]
) -> Iterator[tuple[int, Any]]:
    try:
        values = column.cast(kind)
    except pa.ArrowException as exc:
        raise InvalidError(f"a column of {column.type} is compared with {kind}") from exc
    for row in pc.indices_nonzero(pc.is_in(values, pa.array(list(wanted), kind))).to_pylist():
        yield row, values[row].as_py()


def _is_json(text: bytes) -> bool:
    """Returns whether text is a JSON document, or each line is one."""
    for parts in ([text], text.splitlines()):
        try:
            if not any(map(is_deep_json, parts)):
                return all(_parse_json(part) is not None for part in parts if part.strip())
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return False


def _unescaped(text: bytes) -> Iterator[bytes]:
    """Yields a text, what its escapes of JSON mean, what those in that mean, and so on.

    Yields each also without the escapes of addresses. Raises ``InvalidError`` if there is no end.
    """
    for _ in range(_ESCAPED_MAX):
        yield text
        if b"%" in text:
            yield unquote_to_bytes(text)
        text, before = _ESCAPES.sub(_meant, text), text
        if text == before:
            return
    raise InvalidError(f"a text has more than {_ESCAPED_MAX} escapes in each other")


def _meant(escape: re.Match[bytes]) -> bytes:
    """Returns what an escape of JSON means; the sign after the backslash if it is none."""
    if escape[1] is None:  # numbers of characters; of some, two make one
        text: str = json.loads(b'"' + escape[0] + b'"')
        return text.encode("utf-8", "surrogatepass")
    return _SIGNS.get(escape[1], escape[1])


def _leaves(value: Any) -> Iterator[Any]:
    """Yields everything in a value, at any depth, including names of fields."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
        else:
            yield one


def _plain(data: bytes) -> bytes:
    """Returns bytes, decompressed if needed."""
    codec = next((name for magic, name in _CODECS.items() if data.startswith(magic)), None)
    if codec is None:
        return data
    try:
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), codec).read())
    except OSError:
        return data


def folder_names(folder: str) -> Iterator[str]:
    """Yields the names in a folder's path, also unescaped, and what follows ``=`` in them."""
    for part in folder.split("/"):
        for name in {part, unquote(part)} - {""}:
            yield name
            if "=" in name:
                yield name.partition("=")[2]


def names_of(key: str) -> Iterator[str]:
    """Yields the names in an object's key: unescaped, what follows ``=``, and without a suffix."""
    for part in key.split("/"):
        for name in {part, unquote(part)}:
            yield from {name, name.partition("=")[2], name.rpartition(".")[0]} - {""}
