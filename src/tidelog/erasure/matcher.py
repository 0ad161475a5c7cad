"""Recognizes erased events in files and paths, and removes their ids from what the catalog shows.

A folder may be named by a field of the events in it, so the names in paths count too. In our own
files and metadata a value must be equal to an id or key. Files of others may have one in a longer
text, so these are searched for words.

**Redaction** removes erased ids and keys from reasons and errors that the catalog shows to people.
People write the reasons in audits, and audits stay. A record has hashes of ids and keys, but its
reason is text, such as ``customer-7 asked for it``, and so is its author. A delete replaces its ids
or its key in both, in all records of the topic and its archives, also in those of a delete that
died. A process that is about to write the next state of a record keeps what was replaced. The
home's audit has the reasons of seeks; an erasure with a proof replaces them there
(``redact_seeks``).

An id is quoted where it is a word of its own: ``order-17`` is not in ``order-170``, nor in
``re-order-17``. An id with signs in it, such as an address of mail, only needs to have no letter or
digit next to it. One with blanks counts wherever it is. A single sign counts between blanks, and
blanks alone never: otherwise every comma would be a quote of ``,``.

Failures of drivers may quote an event too. Their rows are only for display, so they are deleted.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote, unquote_to_bytes

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.archive.derived_archives import Origin
from tidelog.archive.erased_events import Deletions, PartitionOffsets
from tidelog.archive.read import read_rows
from tidelog.codec.event_json import plain_rows
from tidelog.codec.formats.schema import PREFIX
from tidelog.codec.formats.text_lines import is_text
from tidelog.connectors.by_url import pipelines_of
from tidelog.context import Context
from tidelog.coordination.audit import (
    Owner,
    id_hash,
    key_hash,
    read_records,
    read_seeks,
    replace_action,
    replace_texts,
)
from tidelog.errors import InvalidError
from tidelog.log.ledger import ErasedIds
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.decoding import is_deep_json
from tidelog.pipeline.failures import read_failures, remove_failures

__all__ = [
    "EventMatcher",
    "folder_names",
    "has_columns",
    "is_event_lines",
    "is_plain_text",
    "names_of",
    "own_column",
    "quoting_rows",
    "quoting_seeks",
    "redact_reasons",
    "redact_seeks",
    "redacted",
    "remove_quotes",
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
    """Ids and keys, and the places where events that had them were deleted."""

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

    def in_values(self, batch: pa.RecordBatch) -> int:
        """Returns how many rows hold one of them in any column, at any depth, or in text there.

        For files without our columns, such as files of others.
        """
        return sum(map(self.is_quoted_in, plain_rows(batch, lambda count, _: count)))

    def is_quoted_in(self, value: Any) -> bool:
        """Returns whether a value of others is one of them, or has one in a text at any depth."""
        return any(map(self._is_quote, _leaves(value)))

    def _is_quote(self, value: Any) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            return len(str(value)) >= _FEW and str(value) in self.deletions.by_id
        if not isinstance(value, str | bytes):
            return False
        text = value.encode() if isinstance(value, str) else _plain(value)
        return self._is_one(value) or self._is_in_texts(text, short=False)

    def is_in(self, value: Any) -> bool:
        """Returns whether a value is one of them, or holds one at any depth, or in JSON there."""
        return any(map(self._is_one, _leaves(value)))

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, str):
            keys = self.deletions.by_key
            is_one = value in self.deletions.by_id or value.encode() in keys
            return is_one or self._is_json(value) or ("/" in value and self._is_in_path(value))
        return isinstance(value, bytes) and (value in self.deletions.by_key or self.in_text(value))

    def _is_in_path(self, path: str) -> bool:
        """Returns whether a path has a folder that is named by one of them."""
        names = list(names_of(path))
        keys = self.deletions.by_key
        return any(name in self.deletions.by_id or name.encode() in keys for name in names)

    def _is_json(self, value: str) -> bool:
        return '"' in value and self.in_text(value.encode())

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
        """Returns where events that had one of them were deleted."""
        every = [*self.deletions.by_id.values(), *self.deletions.by_key.values()]
        return set().union(*(each.get(partition, set()) for each in every))

    def in_text(self, data: bytes) -> bool:
        """Returns whether text, possibly compressed, holds one of them as JSON writes it."""
        content = _plain(data)
        if not self._is_written(content):
            return False
        if not is_event_lines(data):
            return True
        # Names of an event's fields are in every line, so they do not count.
        lines = [_parse_json(line) for line in content.splitlines() if line]
        return any(self._is_written(msgspec.json.encode(list(line.values()))) for line in lines)

    def in_any_text(self, data: bytes) -> bool:
        """Returns the same or, for text that is not lines of events, whether it has one as a word.

        Escapes of JSON and of addresses are decoded, as often as texts are in texts. Ids of few
        characters are words of many JSON documents, so there they count only as JSON writes them.
        Raises ``InvalidError`` if a text has too many escapes in each other.
        """
        content = _plain(data)
        if is_event_lines(data):
            return self.in_text(data)
        return self._is_in_texts(content, short=not _is_json(content))

    def _is_in_texts(self, text: bytes, *, short: bool) -> bool:
        """Returns whether a text, or what its escapes mean, has one; ``short`` ones as words."""
        patterns = [self._words[0], *([self._words[1]] if short else [])]
        return any(
            self._is_written(each) or any(words.search(each) for words in patterns if words)
            for each in _unescaped(text)
        )

    def _is_written(self, text: bytes) -> bool:
        return any(form in text for form in self._json_forms)

    @cached_property
    def _words(self) -> tuple[re.Pattern[bytes] | None, re.Pattern[bytes] | None]:
        """Returns the patterns of those that are long, and of short ones; None if there is none.

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
        """Returns all of them as texts; keys that are none in base64, as JSON has them."""
        keys = self.deletions.by_key
        texts = [*self.deletions.by_id, *(key.decode() for key in keys if is_text(key))]
        return texts + [base64.b64encode(key).decode() for key in keys if not is_text(key)]

    @cached_property
    def _json_forms(self) -> frozenset[bytes]:
        """Returns all ways in which JSON may write one of them."""
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


_ERASED = "[erased]"
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # an id that is a plain word
_LETTERS = re.compile(r"[^\W_]+")  # and digits


def quoting_rows(
    context: Context, owners: Iterable[Owner], sought: Deletions
) -> Iterator[tuple[Owner, str]]:
    """Yields the places of records whose reasons or authors quote one of some ids and keys."""
    words = _Words(sought)
    for owner in owners:
        for record, _ in read_records(context, owner):
            if words.quoted(record.why) or words.quoted(record.who):
                row = layout.audit_row(record.at_ms, record.id)
                yield owner, f"{layout.audit_partition(owner.incarnation)} · {row}"


def quoting_seeks(context: Context, sought: Deletions) -> Iterator[str]:
    """Yields the places of records in the home's audit whose reasons quote one of them."""
    words = _Words(sought)
    for action, _ in read_seeks(context):
        if words.quoted(action.why):
            yield f"{layout.HOME_AUDIT} · {layout.audit_row(action.at_ms, action.id)}"


def remove_quotes(
    context: Context, archives: Iterable[Archive], erased: Iterable[tuple[Origin, int]]
) -> None:
    """Deletes failures of archives that quote erased events, or may, by source partition.

    A row is only for display, and a driver that still fails writes another one.
    """
    offsets: dict[str, set[str]] = {}
    for origin, offset in erased:
        offsets.setdefault(origin.partition, {"any"}).add(str(offset))
    for archive in archives if offsets else ():
        for pipeline in pipelines_of(archive):
            found = read_failures(context, pipeline).items()
            quoting = [name for name, each in found if each.quotes in offsets.get(name, ["any"])]
            remove_failures(context, pipeline, quoting)


def redact_reasons(context: Context, owners: Iterable[Owner], sought: Deletions) -> None:
    """Replaces some ids and keys in the texts of records. Safe to repeat."""
    words = _Words(sought)
    for owner in owners:
        for record, _ in read_records(context, owner):
            if words.quoted(record.why) or words.quoted(record.who):
                replace_texts(context, owner, record, words.replaced)


def redact_seeks(context: Context, sought: Deletions) -> None:
    """Replaces some ids and keys in the reasons of seeks in the home's audit. Safe to repeat."""
    words = _Words(sought)
    for action, version in read_seeks(context):
        if words.quoted(action.why):
            replace_action(context, action.with_why(words.replaced(action.why)), version)


def redacted(text: str, ids: Collection[str], keys: Collection[str]) -> str:
    """Returns a text without the ids and keys that have one of these marks."""

    def is_one(word: str) -> bool:
        is_id = bool(ids) and id_hash(word) in ids
        return is_id or (bool(keys) and key_hash(word.encode()) in keys)

    def quoted(part: str) -> Iterator[str]:
        return (each for each in set(_parts(part)) if each.strip() and is_one(each))

    return _replaced(text, quoted)


class _Words:
    """Ids and keys that a text may quote."""

    def __init__(self, sought: Deletions) -> None:
        keys = (each.decode(errors="replace") for each in sought.by_key)
        # By their first letters and digits, which a text that quotes one has as well.
        self._words: dict[str, list[str]] = {}
        self._spaced: list[str] = []
        for word in filter(str.strip, {*sought.by_id, *keys}):
            if len(word.split()) > 1:
                self._spaced.append(word)
            else:
                self._words.setdefault(_first_letters(word), []).append(word)

    def quoted(self, text: str) -> list[str]:
        """Returns those that a text quotes, except in what was replaced before."""
        return [word for part in text.split(_ERASED) for word in self._quoted(part)]

    def replaced(self, text: str) -> str:
        """Returns a text without them."""
        return _replaced(text, self._quoted)

    def _quoted(self, text: str) -> Iterator[str]:
        if not text:
            return
        yield from (word for word in self._spaced if word in text)
        for first in {"", *_LETTERS.findall(text)} & self._words.keys():
            for word in self._words[first]:
                if word in text and _quote_of(word).search(text):
                    yield word


def _first_letters(word: str) -> str:
    found = _LETTERS.search(word)
    return found[0] if found else ""


def _replaced(text: str, quoted: Callable[[str], Iterable[str]]) -> str:
    """Returns a text with a mark in place of what it quotes, the longest first."""
    parts = text.split(_ERASED)
    for word in sorted({word for part in parts for word in quoted(part)}, key=len, reverse=True):
        parts = [left for part in parts for left in _quote_of(word).split(part)]
    return _ERASED.join(parts)


def _quote_of(word: str) -> re.Pattern[str]:
    """Returns the pattern of a word where it is not a part of another one."""
    if len(word.split()) > 1:
        return re.compile(re.escape(word))
    if _PLAIN.fullmatch(word):
        return re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
    if len(word) == 1 and word.isascii():
        return re.compile(rf"(?<!\S){re.escape(word)}(?!\S)")
    before = r"(?<![^\W_])" if _LETTERS.match(word[0]) else ""
    after = r"(?![^\W_])" if _LETTERS.match(word[-1]) else ""
    return re.compile(f"{before}{re.escape(word)}{after}")


def _parts(text: str) -> Iterator[str]:
    """Yields what a text may quote: from each beginning of a word or sign to each end of one."""

    def is_inside(at: int) -> bool:
        """Returns whether a place is between two letters or digits."""
        return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()

    places = [at for at in range(len(text) + 1) if not is_inside(at)]
    return (text[start:end] for start, end in itertools.combinations(places, 2))
