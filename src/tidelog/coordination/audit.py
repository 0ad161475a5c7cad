"""Audits: who did what to the home, and who amended which events, when and why.

**Actions** concern the home as a whole: logins, and what is done to tokens, topics, archives, pumps
and consumers. The calls of ``Home`` record them, so commands and the console need not. A record is
written before its action, so nothing happens without one; if the action then fails, the record
stays. Records are kept for :data:`ACTIONS_KEPT_MS`; the sweep deletes older ones, except those that
say where events were copied to: a proof of erasure needs them as long as the copies may be there.

**Amendments** are in the audit of their topic or archive. A record never contains bytes of an
event. It contains the hash of an id or a key: the id itself would survive the erasure in the
catalog. A hash can be compared with a known id (:func:`id_hash`), but does not reveal it.

Such a record is written before the first row of its amendment, as ``begun``, and again after the
last one, as ``done``. If it stays ``begun``, its process died: some of its events may be amended
and others not. The same call again amends the rest.

**Copies.** Proofs find events that were copied into a topic by records in the home's audit. Events
get into another topic by a playback, a pump, a restore, or as dead letters of a handler. An event
that is erased from its topic must go from the copies too, and some of them leave no other record.
The kinds:

- A *playback*, before it reads its first event: one without a name leaves no other record. The
  record of one with a name has its label, as its own rows say more while it has the name.
- A *deleted* pump or restore. A proof finds the target of a deleted pipeline by its producers
  there. They go with the target, and archives of the target may stay: then only this record says
  where their events came from. Nor do producers say whether copies have other ids or keys, and a
  sink outside of the home has none.
- *Dead letters*. A dead letter is a whole event. A process writes the record before its first dead
  letter, and again before one on a later day, as it does not know if a catalog was restored.

Sweeps keep the last of equal records. They name topics, files and streams. An address of HTTP may
hold a secret, so only its scheme is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import msgspec

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.ownership import write_repeatedly
from tidelog.coordination.trusted_time import trusted_now_ms
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.model import layout, limits
from tidelog.model.address import recorded_name
from tidelog.model.decoding import Persisted
from tidelog.model.event import check_utf8, to_iso
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.playback import TimeRange
from tidelog.model.topic import decode_row, encode_row

__all__ = [
    "ACTIONS_KEPT_MS",
    "ARCHIVE_SEEK",
    "DEAD_LETTERS",
    "HASH_BYTES",
    "PIPELINE_DELETES",
    "PLAYBACK",
    "PUMP_SEEK",
    "RECORD_BYTES_MAX",
    "WHO_MAX",
    "Action",
    "AuditRecord",
    "AuditedEvent",
    "AuditedProof",
    "AuditedSource",
    "DeadLetterRecorder",
    "DeadLetterTopic",
    "DeletedCopy",
    "Owner",
    "PlayedTopic",
    "Why",
    "dead_letter_topic",
    "deleted_copy",
    "forget_actions",
    "id_hash",
    "key_digest",
    "key_hash",
    "newest_records",
    "played_topic",
    "put_record",
    "read_actions",
    "read_audit",
    "read_records",
    "read_seeks",
    "record_action",
    "record_deletion",
    "record_playback",
    "replace_action",
    "replace_texts",
    "user_at_host",
]

ACTIONS_KEPT_MS = 400 * 86_400_000  # more than a year
WHO_MAX = 200  # characters
_TEXT_MAX = 1_000  # characters of each other text: two names of sources or sinks, and more
_FORGET_AT_ONCE = 1_000  # records that one sweep deletes at most
# Operations that say where events were copied to.
PLAYBACK = "playback"
DEAD_LETTERS = "dead letters"
PIPELINE_DELETES = ("pump delete", "restore delete", "stream delete")
_COPIES = frozenset({PLAYBACK, DEAD_LETTERS, *PIPELINE_DELETES})

ARCHIVE_SEEK, PUMP_SEEK = "archive seek", "pump seek"  # operations: their notes have reasons
_SEEKS = (ARCHIVE_SEEK, PUMP_SEEK)
_WHY = ": "  # before the reason in a note


class Action(Persisted, frozen=True):
    """One record."""

    id: str
    at_ms: int
    who: str  # user@host, or the token over HTTP
    op: str  # login, token create, topic delete, archive promote, cursor move, ...
    what: str  # the token, topic, consumer or address
    note: str = ""  # more about it

    @property
    def why(self) -> str:
        """Returns the reason in the note of a seek, which a person wrote; empty for others."""
        return self.note.partition(_WHY)[2] if self.op in _SEEKS else ""

    def with_why(self, why: str) -> Action:
        """Returns the record of a seek with another reason."""
        begin, sign, _ = self.note.partition(_WHY)
        return msgspec.structs.replace(self, note=f"{begin}{sign}{why}")


def record_action(context: Context, op: str, what: str, note: str = "", who: str = "") -> None:
    """Writes a record; call it before the action. By default this process's user did it."""
    by = _stored_text(who or user_at_host(context.environ), WHO_MAX)
    texts = (_stored_text(each, _TEXT_MAX) for each in (what, note))
    action = Action(context.ids.new(), context.clock.now_ms(), by, op, *texts)
    row = layout.audit_row(action.at_ms, action.id)
    try:
        write_repeatedly(context, layout.HOME_AUDIT, Put(row, encode_row(action), ABSENT))
    except ConflictError:
        return  # ids are not reused: an earlier attempt of this very write


def read_actions(context: Context, since_ms: int = 0) -> Iterator[Action]:
    """Yields records from a time on, the oldest first."""
    for row in context.catalog.scan(layout.HOME_AUDIT, layout.audit_row(since_ms, "")):
        yield decode_row(row.value, Action, f"audit row `{row.row}`")


def read_seeks(context: Context) -> Iterator[tuple[Action, str]]:
    """Yields the records of seeks, each with its version."""
    for row in context.catalog.scan(layout.HOME_AUDIT):
        action = decode_row(row.value, Action, f"audit row `{row.row}`")
        if action.op in _SEEKS:
            yield action, row.version


def replace_action(context: Context, action: Action, version: str) -> None:
    """Writes a record again, unless it has changed or was deleted since it had this version."""
    row = layout.audit_row(action.at_ms, action.id)
    with contextlib.suppress(ConflictError):
        write_repeatedly(context, layout.HOME_AUDIT, Put(row, encode_row(action), version))


def forget_actions(context: Context) -> int:
    """Deletes some of the records that are too old. Returns how many.

    Of those that say where events were copied to, it keeps the newest of equal ones. The age of
    records counts to the newest one, or to the earlier of this machine's time and the store's. So
    no clock that is ahead deletes the audit.
    """
    newest = next(iter(context.catalog.scan(layout.HOME_AUDIT, limit=1, reverse=True)), None)
    if newest is None:
        return 0
    newest_ms = decode_row(newest.value, Action, f"audit row `{newest.row}`").at_ms
    if newest_ms < ACTIONS_KEPT_MS:
        return 0
    before_ms = min(newest_ms, trusted_now_ms(context)) - ACTIONS_KEPT_MS
    end = layout.audit_row(max(0, before_ms), "")
    rows = list(
        islice(_forgettable(context.catalog.scan(layout.HOME_AUDIT, "", end)), _FORGET_AT_ONCE)
    )
    for row in rows:
        change = Delete(row.row, expect=row.version)
        try:
            write_repeatedly(context, layout.HOME_AUDIT, change)
        except ConflictError:
            continue  # another sweep has deleted it
    return len(rows)


def _forgettable(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows of old records that no proof needs."""
    copies: dict[tuple[object, ...], Row] = {}  # the newest of equal ones so far
    for row in rows:
        action = decode_row(row.value, Action, f"audit row `{row.row}`")
        if action.op not in _COPIES:
            yield row
            continue
        played = played_topic(action)  # at any time
        said = (action.op, action.what, action.note if played is None else played)
        if said in copies:
            yield copies[said]
        copies[said] = row


def user_at_host(environ: Mapping[str, str]) -> str:
    """Returns the user and host of this process, as far as known."""
    user = environ.get("USER") or environ.get("LOGNAME")
    if not user:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
    return _stored_text(f"{user}@{socket.gethostname()}", WHO_MAX)


def _stored_text(text: str, most: int) -> str:
    """Returns the text as UTF-8 can hold it. An environment may hold bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()[:most]


HASH_BYTES = 71  # of the hash of an id or a key
RECORD_BYTES_MAX = 150_000  # of hashes and positions in one record
WHY_MAX = 2_000


class Owner(Protocol):
    """What has an audit: a topic, or an archive with deletes of its own."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


class AuditedEvent(Persisted, frozen=True, array_like=True):
    """One event of a record."""

    id: str | None  # its hash
    partition: int
    offset: int


class AuditedSource(Persisted, frozen=True, array_like=True):
    """A source partition of an archive, and its incarnation."""

    partition: str
    incarnation: str  # empty: unknown


class AuditedProof(Persisted, frozen=True, array_like=True):
    """The proof of an erasure: its result, the hash of its file, and the hashes of its ids."""

    verdict: str
    sha256: str
    ids: tuple[str, ...]


class AuditRecord(Persisted, frozen=True):
    """One amendment of some events, or the proof of an erasure."""

    id: str  # its own
    op: Literal["update", "delete", "prove"]
    who: str
    at_ms: int
    why: str
    events: tuple[AuditedEvent, ...]
    state: Literal["begun", "done"] = "begun"
    key: str = ""  # of a delete or a proof by key: the hash of the key
    archived: bool = False  # the events were found only in archives; decided once written
    until_ms: int = 0  # of those: the time in the ledger for their ids and key
    sources: tuple[AuditedSource, ...] = ()  # of an archive's own record: its partitions
    starts: tuple[int, ...] = ()  # of a topic's delete: first offsets of its partitions, if known
    proof: AuditedProof | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the hashes of the ids that it is about, each once."""
        found = self.proof.ids if self.proof else (each.id for each in self.events)
        return tuple(dict.fromkeys(each for each in found if each is not None))


@dataclass(frozen=True, slots=True)
class Why:
    """Who amends, and why."""

    who: str
    why: str = ""

    def __post_init__(self) -> None:
        for name, text, most in (("who", self.who, WHO_MAX), ("why", self.why, WHY_MAX)):
            if not isinstance(text, str) or len(text) > most:
                raise InvalidError(f"{name}: give text of at most {most} characters")
            check_utf8(name, text)
        if not self.who:
            raise InvalidError("who: is empty: say who does this")


def put_record(
    context: Context, topic: Owner, record: AuditRecord, version: str | None = None
) -> tuple[AuditRecord, str]:
    """Writes a new record, or the next state of one by its version.

    Returns the record with its new version. An erasure may have replaced words of its texts in the
    meantime (:func:`replace_texts`): they stay replaced. Another process may have finished the
    record: it stays as it is. A delayed repeat of an earlier state changes nothing, since it
    expects an older version or none. Raises ``NotFoundError`` if the topic was deleted in the
    meantime.
    """
    where = layout.audit_partition(topic.incarnation)
    row = layout.audit_row(record.at_ms, record.id)
    change = Put(row, encode_row(record), version or ABSENT)
    try:
        return record, write_repeatedly(context, where, change)
    except ConflictError as exc:
        deleted = NotFoundError(
            f"`{topic.name}`: was deleted while its events were amended: nothing more was amended"
        )
        if version is None:
            raise deleted from exc

    def decide(now: Rows) -> Decision[tuple[AuditRecord, str]]:
        found = now[row]
        if found is None:
            raise deleted
        stored = decode_row(found.value, AuditRecord, f"audit row `{row}` of `{topic.name}`")
        wanted = msgspec.structs.replace(record, who=stored.who, why=stored.why)
        if stored.state == "done" or stored == wanted:
            return Decision((stored, found.version))
        return Decision((wanted, now.write_id), [now.put(row, encode_row(wanted))])

    return update(context, where, [row], decide, f"audit of `{topic.name}`")


def replace_texts(
    context: Context, topic: Owner, record: AuditRecord, replaced: Callable[[str], str]
) -> None:
    """Replaces words in the reason and the author of a record, whatever its state is by then.

    A process that is about to write the record's next state keeps that (:func:`put_record`).
    """
    row = layout.audit_row(record.at_ms, record.id)

    def decide(now: Rows) -> Decision[None]:
        found = now[row]
        if found is None:
            return Decision(None)
        stored = decode_row(found.value, AuditRecord, f"audit row `{row}` of `{topic.name}`")
        texts = {"who": replaced(stored.who), "why": replaced(stored.why)}
        changed = msgspec.structs.replace(stored, **texts)
        changes = [now.put(row, encode_row(changed))] if changed != stored else []
        return Decision(None, changes)

    where = layout.audit_partition(topic.incarnation)
    update(context, where, [row], decide, f"audit of `{topic.name}`")


def read_audit(
    context: Context,
    topic: Owner,
    since_ms: int = 0,
    event_id: str | None = None,
    key: bytes | None = None,
) -> Iterator[AuditRecord]:
    """Yields the records of a topic or an archive from a time on, or those of an id or a key.

    The oldest comes first.
    """
    wanted = None if event_id is None else id_hash(event_id)
    wanted_key = None if key is None else key_hash(key)
    for record, _ in read_records(context, topic, since_ms):
        if (wanted is None or wanted in record.ids) and wanted_key in (None, record.key):
            yield record


def read_records(
    context: Context, topic: Owner, since_ms: int = 0
) -> Iterator[tuple[AuditRecord, str]]:
    """Yields the same, each with its version."""
    where = layout.audit_partition(topic.incarnation)
    for row in context.catalog.scan(where, layout.audit_row(since_ms, "")):
        what = f"audit row `{row.row}` of `{topic.name}`"
        yield decode_row(row.value, AuditRecord, what), row.version


def newest_records(context: Context, topic: Owner, most: int) -> list[AuditRecord]:
    """Returns the newest records of a topic or an archive, the newest first."""
    rows = context.catalog.scan(layout.audit_partition(topic.incarnation), limit=most, reverse=True)
    what = f"an audit row of `{topic.name}`"
    return [decode_row(row.value, AuditRecord, what) for row in islice(rows, most)]


def key_hash(key: bytes) -> str:
    """Returns the hash of a key for a record. A key may be personal data."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


def id_hash(event_id: str) -> str:
    """Returns the hash of an id for a record. An id may be personal data."""
    return key_hash(event_id.encode())


def key_digest(hashed: str) -> bytes:
    """Returns the digest in the ledger for a hash in a record."""
    return bytes.fromhex(hashed.removeprefix("sha256:"))


_TOPIC = "topic "
_SOURCE = "of "
_TARGET = ", to "
_LABEL = ", as "
_DEAD_LETTER_TARGET = ", to topic:"
_RENAMED = ", with another "
_AGAIN_S = 86_400.0


class PlayedTopic(NamedTuple):
    """The name of a topic, and what it was played into."""

    source: str
    sink: str  # such as topic:NAME; only the scheme of one that may hold a secret
    label: str = ""  # of a playback with a name, whose rows say more while it has it


def record_playback(
    context: Context, topic: str, times: TimeRange, sink: str, who: str, label: str = ""
) -> None:
    """Puts a playback into the home's audit; call it before it reads its first event.

    A home that cannot be written to, such as a read-only copy, is played without a record.
    """
    is_kept = bool(sink.partition(":")[2])  # not so of what is printed, or of a function
    to = recorded_name(sink) if is_kept else "a sink"
    start = to_iso(times.start_ms) if times.start_ms else "the first"
    end = to_iso(times.end_ms) if times.end_ms < limits.TIMESTAMP_MS_END else "the last"
    note = f"{start} to {end}{f'{_LABEL}{label}' if label else ''}{_TARGET}{to}"
    with contextlib.suppress(InvalidError):
        record_action(context, PLAYBACK, f"{_TOPIC}{topic}", note, who)


def played_topic(action: Action) -> PlayedTopic | None:
    """Returns what a record of the audit says about a playback; None for other records."""
    span, _, sink = action.note.partition(_TARGET)
    if action.op != PLAYBACK or ":" not in sink:
        return None
    return PlayedTopic(action.what.removeprefix(_TOPIC), sink, span.partition(_LABEL)[2])


class DeletedCopy(NamedTuple):
    """What a pipeline read, and what it wrote to."""

    source: tuple[str, str]  # scheme and name; without a name if that may hold a secret
    sink: str  # such as topic:NAME
    incarnation: str  # of that topic: another one with its name has none of these events
    renamed: frozenset[str]  # what its copies have other ones of: id, key, time


def record_deletion(context: Context, pipeline: NamedPipeline, kind: str, who: str) -> None:
    """Puts the deletion of a pipeline into the audit; call it before."""
    note = f"{_SOURCE}{recorded_name(pipeline.source)}{_TARGET}{recorded_name(pipeline.sink)}"
    if pipeline.target:
        note += f" ({pipeline.target})"
    if pipeline.renames:
        note += f"{_RENAMED}{' and '.join(sorted(pipeline.renames))}"
    record_action(context, f"{kind} delete", f"{kind} {pipeline.name}", note, who)


def deleted_copy(action: Action) -> DeletedCopy | None:
    """Returns what a record of the audit says about a deleted pipeline; None for other records."""
    if action.op not in PIPELINE_DELETES or _TARGET not in action.note:
        return None
    source, _, target = action.note.removeprefix(_SOURCE).rpartition(_TARGET)
    scheme, _, name = source.partition(":")
    place, _, renamed = target.partition(_RENAMED)
    sink, _, incarnation = place.removesuffix(")").partition(" (")
    renames = frozenset(filter(None, renamed.split(" and ")))
    return DeletedCopy((scheme, name), sink, incarnation, renames)


class DeadLetterTopic(NamedTuple):
    """What a handler read, and the name of the topic that got what it failed on."""

    source: tuple[str, str]  # scheme and name; without a name if that may hold a secret
    target: str
    handler: str  # such as "consumer `billing`"


class DeadLetterRecorder:
    """Puts into the audit that a handler of a source moves events to a topic; once a day."""

    def __init__(self, context: Context, source: str, target: str, handler: str) -> None:
        self._context = context
        self._what = recorded_name(source)
        self._note = f"{_SOURCE}{handler}{_DEAD_LETTER_TARGET}{target}"
        self._at_s: float | None = None

    def __call__(self) -> None:
        """Records it, unless this process did so in the last day; call it before each move."""
        now_s = self._context.clock.monotonic_s()
        if self._at_s is None or now_s - self._at_s >= _AGAIN_S:
            record_action(self._context, DEAD_LETTERS, self._what, self._note)
            self._at_s = now_s


def dead_letter_topic(action: Action) -> DeadLetterTopic | None:
    """Returns what a record of the audit says about dead letters; None for other records."""
    if action.op != DEAD_LETTERS or _DEAD_LETTER_TARGET not in action.note:
        return None
    handler, _, target = action.note.rpartition(_DEAD_LETTER_TARGET)
    scheme, _, path = action.what.partition(":")
    return DeadLetterTopic((scheme, path), target, handler.removeprefix(_SOURCE))
