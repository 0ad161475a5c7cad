"""Removes erased ids and keys from what the catalog shows to people: reasons and errors.

People write the reasons in audits, and audits stay. A record has hashes of ids and
keys, but its reason is text, such as ``customer-7 asked for it``. A delete replaces the words that
equal one of its ids or its key, in all records of the topic and its archives. Only records that are
done change: another process may be about to write the next state of one that is begun.

Failures of drivers may quote an event too. Their rows are only for display, so they are deleted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator

import msgspec

from tidelog.archive.derived_archives import Origin
from tidelog.archive.erased_events import Deletions
from tidelog.connectors.by_url import pipelines_of
from tidelog.context import Context
from tidelog.coordination.audit import Owner, id_hash, key_hash, put_record, read_records
from tidelog.errors import NotFoundError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.pipeline.failures import read_failures, remove_failures

__all__ = ["quoting_rows", "redact_reasons", "redacted", "remove_quotes"]

_ERASED = "[erased]"
_AROUND = "\"'`.,;:!?()[]{}<>"
_WORD = re.compile(r"[\w-]+(?:\.[\w-]+)*")


def quoting_rows(
    context: Context, owners: Iterable[Owner], sought: Deletions
) -> Iterator[tuple[Owner, str]]:
    """Yields the places of records whose reasons quote one of some ids and keys."""
    for owner in owners:
        for record, _ in read_records(context, owner):
            if record.why and _quoted_words(record.why, sought):
                row = layout.audit_row(record.at_ms, record.id)
                yield owner, f"{layout.audit_partition(owner.incarnation)} · {row}"


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
    """Replaces some ids and keys in the reasons of records that are done. Safe to repeat."""
    for owner in owners:
        for record, version in read_records(context, owner):
            if record.state == "done" and record.why and _quoted_words(record.why, sought):
                changed = msgspec.structs.replace(record, why=_redact(record.why, sought))
                with contextlib.suppress(NotFoundError):  # another process was faster
                    put_record(context, owner, changed, version)


def redacted(text: str, ids: Collection[str], keys: Collection[str]) -> str:
    """Returns a reason without the ids and keys that have one of these marks."""

    def found() -> set[str]:
        words = text.replace(_ERASED, " ")
        return {each for each in (*_words(words), *_spans(words)) if each and is_one(each)}

    def is_one(words: str) -> bool:
        is_id = bool(ids) and id_hash(words) in ids
        return is_id or (bool(keys) and key_hash(words.encode()) in keys)

    text = _without_words(text, found())
    for word in found():
        text = text.replace(word, _ERASED)
    return text


def _spans(text: str) -> Iterator[str]:
    """Yields all sequences of words, because ids may have blanks; a reason is short.

    Each comes also without some of the marks around it, which may be its own.
    """
    words = list(re.finditer(r"\S+", text))
    for number, first in enumerate(words):
        for last in words[number + 1 :]:
            span = text[first.start() : last.end()]
            heads = range(len(span) - len(span.lstrip(_AROUND)) + 1)
            tails = range(len(span) - len(span.rstrip(_AROUND)) + 1)
            yield from (span[head : len(span) - tail] for head in heads for tail in tails)


def _redact(text: str, sought: Deletions) -> str:
    text = _without_words(text, _quoted_words(text, sought))
    for word in _quoted_words(text, sought):
        text = text.replace(word, _ERASED)
    return text


def _without_words(text: str, words: Collection[str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", lambda _: _ERASED, text)
    return text


def _quoted_words(text: str, sought: Deletions) -> set[str]:
    """Returns the words of a text that equal one of some ids and keys, which may have blanks."""
    text = text.replace(_ERASED, " ")
    words = _words(text)
    found = {each for each in words if each in sought.by_id or each.encode() in sought.by_key}
    found |= {each for each in sought.by_id if len(each.split()) > 1 and each in text}
    data = text.encode()
    spaced = (each for each in sought.by_key if len(each.split()) > 1 and each in data)
    return (found | {each.decode(errors="replace") for each in spaced}) - {""}


def _words(text: str) -> set[str]:
    """Returns the words of a text, also without what may be around them."""
    words = {text, *text.split(), *_WORD.findall(text)}
    return words | {each.strip(_AROUND) for each in words}
