"""The audit: records of who amended what, when and why. They never contain bytes of an event.

A record contains the hash of an id or a key. The id itself would survive the erasure in the
catalog. A hash can be compared with a known id (:func:`id_mark`), but does not reveal it.

A record is written before the first row of its amendment, as ``begun``, and again after the last
one, as ``done``. If it stays ``begun``, its process died: some of its events may be amended and
others not. The same call again amends the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

from tidelog.catalog.base import ABSENT, Put
from tidelog.context import Context
from tidelog.coordination.actions import WHO_MAX
from tidelog.coordination.ownership import write_repeatedly
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.event import check_utf8
from tidelog.model.partition_rows import decode_row, encode_row

__all__ = [
    "MARK_BYTES",
    "RECORD_BYTES_MAX",
    "AuditRecord",
    "AuditedEvent",
    "AuditedProof",
    "AuditedSource",
    "Owner",
    "Why",
    "id_mark",
    "key_digest",
    "key_mark",
    "newest_records",
    "put_record",
    "read_audit",
    "read_records",
]

MARK_BYTES = 71  # of the hash of an id or a key
RECORD_BYTES_MAX = 150_000  # of marks and positions in one record
WHY_MAX = 2_000


class Owner(Protocol):
    """What has an audit: a topic, or an archive with deletes of its own."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


class AuditedEvent(Persisted, frozen=True, array_like=True):
    """One event of a record."""

    id: str | None  # its mark
    partition: int
    offset: int


class AuditedSource(Persisted, frozen=True, array_like=True):
    """A source partition of an archive, and its incarnation."""

    partition: str
    incarnation: str  # empty: unknown


class AuditedProof(Persisted, frozen=True, array_like=True):
    """The proof of an erasure: its result, the hash of its file, and the marks of its ids."""

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
    key: str = ""  # of a delete or a proof by key: the mark of the key
    archived: bool = False  # the events were found only in archives; decided once written
    until_ms: int = 0  # of those: the time in the ledger for their ids and key
    sources: tuple[AuditedSource, ...] = ()  # of an archive's own record: its partitions
    proof: AuditedProof | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the marks of the ids that it is about, each once."""
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
) -> str:
    """Writes a new record, or the next state of one by its version; returns its new version.

    A delayed repeat of an earlier state changes nothing, since it expects an older version or none.
    Raises ``NotFoundError`` if the topic was deleted in the meantime.
    """
    where = layout.audit_partition(topic.incarnation)
    row = layout.audit_row(record.at_ms, record.id)
    try:
        return write_repeatedly(context, where, Put(row, encode_row(record), version or ABSENT))
    except ConflictError as exc:
        raise NotFoundError(
            f"`{topic.name}`: was deleted while its events were amended: nothing more was amended"
        ) from exc


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
    wanted = None if event_id is None else id_mark(event_id)
    wanted_key = None if key is None else key_mark(key)
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


def key_mark(key: bytes) -> str:
    """Returns the hash of a key for a record. A key may be personal data."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


def id_mark(event_id: str) -> str:
    """Returns the hash of an id for a record. An id may be personal data."""
    return key_mark(event_id.encode())


def key_digest(mark: str) -> bytes:
    """Returns the digest in the ledger for a mark in a record."""
    return bytes.fromhex(mark.removeprefix("sha256:"))
