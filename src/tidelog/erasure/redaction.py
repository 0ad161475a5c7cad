"""Texts in the catalog that quote erased events: finds them for a proof, and redacts them.

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

**Errors.** Rows hold no ids, keys or values (the audit and the ledger have hashes), with one
exception beside reasons: errors shown to people, which may quote a value that a parser refused.
They are kept while something fails: in ``failure`` rows of pipelines, and in the rows of running
keepers. The row of jobs has texts too, but none of an error that could quote a value. A proof does
not know the values of erased events. So it recognizes a quote by the id or key, and by the offset
of the quoted event in the row. An error without an offset may quote any event that its pipeline has
not committed, and one of a keeper any event.

**Names.** A source that is a folder has a source partition for each file. The file's name is in the
names of archive files, manifests and rows, so it must not be an erased id or key either. If a file
is renamed, manifests and rows have its other names too. Names of topics, shards and streams are no
data of events.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from tidelog.archive.derived_archives import Origin
from tidelog.archive.erased_events import Deletions
from tidelog.connectors.by_url import pipelines_of
from tidelog.connectors.files.row_marks import marked_names
from tidelog.connectors.files.row_tracking import is_of_file
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
from tidelog.coordination.commits import manifests_by_range
from tidelog.coordination.jobs import Keeper, read_jobs
from tidelog.coordination.pipeline_rows import read_listed, read_progress, replay_pipeline
from tidelog.erasure import proof_remedies as remedies
from tidelog.erasure.matcher import EventMatcher, names_of
from tidelog.erasure.proof_scope import ProofScope
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import ListedPartition
from tidelog.model.topic import decode_row
from tidelog.pipeline.failures import read_failures, remove_failures

__all__ = [
    "Words",
    "named_source_files",
    "quoted_errors",
    "quoting_rows",
    "quoting_seeks",
    "redact_reasons",
    "redact_seeks",
    "redacted",
    "remove_quotes",
]

_ERASED = "[erased]"
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # an id that is a plain word
_LETTERS = re.compile(r"[^\W_]+")  # and digits


def quoting_rows(
    context: Context, owners: Iterable[Owner], sought: Deletions
) -> Iterator[tuple[Owner, str]]:
    """Yields the places of records whose reasons or authors quote one of some ids and keys."""
    words = Words(sought)
    for owner in owners:
        for record, _ in read_records(context, owner):
            if words.quoted(record.why) or words.quoted(record.who):
                row = layout.audit_row(record.at_ms, record.id)
                yield owner, f"{layout.audit_partition(owner.incarnation)} · {row}"


def quoting_seeks(context: Context, sought: Deletions) -> Iterator[str]:
    """Yields the places of records in the home's audit whose reasons quote one of them."""
    words = Words(sought)
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
    words = Words(sought)
    for owner in owners:
        for record, _ in read_records(context, owner):
            if words.quoted(record.why) or words.quoted(record.who):
                replace_texts(context, owner, record, words.replaced)


def redact_seeks(context: Context, sought: Deletions) -> None:
    """Replaces some ids and keys in the reasons of seeks in the home's audit. Safe to repeat."""
    words = Words(sought)
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


class Words:
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


@dataclass(frozen=True, slots=True)
class _ShownError:
    """An error in a row: where, its text, what deletes it, and what it may quote."""

    where: str
    text: str
    do: str
    pipeline: str = ""  # empty: any
    partition: str = ""  # of the source; empty: all
    quotes: str = "any"  # as in ``DriverFailure``
    position: str = ""  # what is before it is committed; empty: unknown

    def may_quote(self, offsets: Collection[int] | None) -> bool:
        """Returns whether it may quote an event at one of these offsets; None: any event."""
        if offsets is None:
            return bool(self.quotes)
        if self.quotes != "any":
            return bool(self.quotes) and int(self.quotes) in offsets
        begin = int(self.position) if self.position.isdecimal() else 0
        return any(offset >= begin for offset in offsets)


def quoted_errors(scope: ProofScope, sought: EventMatcher) -> Iterator[tuple[str, str, str]]:
    """Yields rows whose errors quote erased events, or may: where, what, and what deletes it.

    Covers the archives and pipelines of a scope, keepers, which may run any of them, and jobs.
    """
    for error in (*_failures(scope), *_keeper_errors(scope), *_job_texts(scope.context)):
        if sought.is_word_in(error.text.encode()):
            yield error.where, "quotes one of them in an error", error.do
        elif error.may_quote(scope.quoted(error.pipeline, error.partition, sought)):
            yield error.where, "may quote one of them in an error", error.do


def _failures(scope: ProofScope) -> Iterator[_ShownError]:
    context = scope.context
    own = [archive.pipeline(number) for archive, number in scope.generations()]
    pipelines = [each for pipeline in own for each in (pipeline, replay_pipeline(pipeline))]
    for pipeline in (*pipelines, *(named.incarnation for named in scope.pipelines())):
        for partition, failure in read_failures(context, pipeline).items():
            where = f"{layout.pipeline_members(pipeline)} · {layout.failure_row(partition)}"
            head = read_progress(context, pipeline, partition) if partition else None
            position = "" if head is None else head.position
            place = (pipeline, partition)
            yield _ShownError(
                where, failure.message, remedies.FAILURE, *place, failure.quotes, position
            )


def _keeper_errors(scope: ProofScope) -> Iterator[_ShownError]:
    own = {f"archive {name}" for name in scope.archives()}
    own |= {f"pump {named.name}" for named in scope.pipelines()}
    for row in scope.context.catalog.scan(layout.KEEPERS, layout.keeper_row(""), "keeper0"):
        keeper = decode_row(row.value, Keeper, f"keeper row `{row.row}`")
        for part in keeper.parts:
            fails = part.error and part.name in own and part.state in ("failed", "running")
            where = f"{layout.KEEPERS} · {row.row}"
            yield _ShownError(where, part.error, remedies.KEEPER, quotes="any" if fails else "")


def _job_texts(context: Context) -> Iterator[_ShownError]:
    """Yields what jobs say; it may name an event of a source that failed."""
    where = f"{layout.JOBS} · {layout.JOB_LIST}"
    for job in read_jobs(context):
        texts = (job.what, job.says, *job.args.values(), *job.result.values())
        yield _ShownError(where, "\n".join(texts), remedies.JOB.format(job=job.id), quotes="")


def named_source_files(scope: ProofScope, sought: EventMatcher) -> Iterator[tuple[str, str, str]]:
    """Yields rows of source files whose names have an erased id or key: where, what, what to do.

    Covers the archives of a scope, and pipelines into its topic or from its sources.
    """
    found = [
        (archive.pipeline(number), remedies.NAMED_ARCHIVE.replace("{archive}", archive.name))
        for archive, number in scope.generations()
    ]
    for named in scope.pipelines():
        if scope.topic is None or named.target == scope.topic.incarnation:
            do = remedies.NAMED_PIPELINE.replace("{pipeline}", named.name)
            found.append((named.incarnation, do))
    for pipeline, do in found:
        for listed in read_listed(scope.context, pipeline).values():
            names = _file_names(scope.context, pipeline, listed)
            if any(sought.is_quoted_in(each) for name in names for each in names_of(name)):
                where = layout.pipeline_partition(pipeline, listed.partition)
                yield where, "is a file of the source with one of them in its name", do


def _file_names(context: Context, pipeline: str, listed: ListedPartition) -> Iterator[str]:
    """Yields the names that the file of a source partition has had, in rows and manifests.

    A file may be renamed after it was read. A number is the name of a file, or of a partition.
    """
    partition = listed.partition
    head = read_progress(context, pipeline, partition)
    incarnations = (listed.incarnation, "" if head is None else head.incarnation)
    is_file = any(map(is_of_file, incarnations))
    name = unquote(partition.rpartition("/")[2])
    if is_file or not name.isdecimal():
        yield name
    if is_file:
        ranges = manifests_by_range(context.store, pipeline, partition).values()
        notes = {part.note for parts in ranges for part in parts} | {listed.note}
        for note in notes if head is None else {*notes, head.note}:
            yield from marked_names(note)
