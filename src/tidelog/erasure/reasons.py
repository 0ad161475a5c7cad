"""Redacts reasons in audits that quote an erased event: people write them, and audits stay.

A record has hashes of ids and keys, but its reason is text, such as ``customer-7 asked for it``. A
delete replaces the words that equal one of its ids or its key, in all records of the topic and its
archives. Only records that are done change: another process may be about to write the next state of
one that is begun.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import msgspec

from tidelog.archive.deletions import Deletions
from tidelog.archive.derived_archives import archives_of
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.journal.audit import Owner, put_record, read_records
from tidelog.model import layout
from tidelog.model.topic import Topic

__all__ = ["owners_of", "quoting_rows", "redact_reasons"]

_ERASED = "[erased]"
_AROUND = "\"'`.,;:!?()[]{}<>"
_WORD = re.compile(r"[\w-]+(?:\.[\w-]+)*")


def owners_of(context: Context, topic: Topic) -> list[Owner]:
    """Returns a topic and its archives: all whose audits may name its events."""
    archives = {each.incarnation: each for each, _ in archives_of(context, topic)}
    return [topic, *archives.values()]


def quoting_rows(context: Context, owners: Iterable[Owner], sought: Deletions) -> Iterator[str]:
    """Yields the places of records whose reasons quote one of some ids and keys."""
    for owner in owners:
        for record, _ in read_records(context, owner):
            if record.why and _quoted_words(record.why, sought):
                row = layout.audit_row(record.at_ms, record.id)
                yield f"{layout.audit_partition(owner.incarnation)} · {row}"


def redact_reasons(context: Context, owners: Iterable[Owner], sought: Deletions) -> None:
    """Replaces some ids and keys in the reasons of records that are done. Safe to repeat."""
    for owner in owners:
        for record, version in read_records(context, owner):
            if record.state == "done" and record.why and _quoted_words(record.why, sought):
                changed = msgspec.structs.replace(record, why=_redact(record.why, sought))
                with contextlib.suppress(NotFoundError):  # another process was faster
                    put_record(context, owner, changed, version)


def _redact(text: str, sought: Deletions) -> str:
    words = sorted(_quoted_words(text, sought), key=len, reverse=True)
    for word in words:
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", lambda _: _ERASED, text)
    for word in _quoted_words(text, sought):
        text = text.replace(word, _ERASED)
    return text


def _quoted_words(text: str, sought: Deletions) -> set[str]:
    """Returns the words of a text that equal one of some ids and keys, which may have blanks."""
    text = text.replace(_ERASED, " ")
    words = {text, *text.split(), *_WORD.findall(text)}
    words |= {each.strip(_AROUND) for each in words}
    found = {each for each in words if each in sought.by_id or each.encode() in sought.by_key}
    found |= {each for each in sought.by_id if len(each.split()) > 1 and each in text}
    data = text.encode()
    spaced = (each for each in sought.by_key if len(each.split()) > 1 and each in data)
    return (found | {each.decode(errors="replace") for each in spaced}) - {""}
