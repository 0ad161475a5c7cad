"""The ledger of erased events, and copies into a topic that respect it.

The ledger contains only hashes. A row is the hash of an id, or of a key whose events were all
deleted, and the time up to which its events are erased. That is the time of the delete, by this
machine's clock or by the store's if that is ahead (``coordination.trusted_time``), or the time of
the newest deleted event if it is later. An event with that id or key and a later time is a new
event. Ordinary producers do not read the ledger.

Everything that copies events into a topic from a place that may still hold erased ones (pumps,
restores, playbacks, the Spark sink, recoveries) uses a ``Copier`` (``producer.copier``). Copies and
deletes meet in the head of each partition, which every commit expects:

| a copy                                           | a delete                                     |
|--------------------------------------------------|----------------------------------------------|
| 1. sets ``copied`` in every head                 | 1. writes its audit record                   |
| 2. remembers ``erasures`` of every head          | 2. writes its rows of the ledger             |
| 3. reads the ledger, leaves out erased events    | 3. raises ``erasures`` in every head that    |
| 4. commits, expecting a head with the same       |    has ``copied`` set                        |
|    ``erasures``; otherwise resumes at 2          | 4. looks up what arrived in those partitions |
|                                                  | 5. deletes the events                        |

A copy that commits before step 3 of the delete is found by step 4 of the delete. A copy that
commits later has read the ledger after step 2. A topic that was never copied into pays nothing.

If the ledger has grown, the commit raises ``LedgerMovedError``. The copier reads the ledger again,
leaves out the newly erased events, and commits the others under the sequences that they had. That
takes a new segment: the refused one contains erased events, and is listed as unused unless a
partition has committed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.catalog.update import Decision, Rows, update
from tidelog.concurrency import Pool
from tidelog.context import Context
from tidelog.log.topics import raise_head, read_head
from tidelog.model import layout, limits
from tidelog.model.topic import Head, LedgerEntry, Topic, decode_row, encode_row

__all__ = [
    "NOTHING_ERASED",
    "ErasedIds",
    "Stamp",
    "Times",
    "announce_erasure",
    "enter_erased",
    "erased_until",
    "read_erased",
    "read_ledger",
    "read_stamp",
    "was_erased",
]

_BUCKETS = [f"{number:02x}" for number in range(256)]
_KEYS = "key/"  # prefix of the rows for keys

Stamp = tuple[int, ...]
"""How often the ledger has grown, as each partition's head counts it."""

Times = Mapping[bytes, int]
"""The time up to which events are erased, by the digest of their id or key."""


@dataclass(frozen=True, eq=False)
class ErasedIds:
    """The ledger at one point in time. Pickles."""

    ids: Times = field(default_factory=dict)
    keys: Times = field(default_factory=dict)
    stamp: Stamp = ()

    def __len__(self) -> int:
        return len(self.ids) + len(self.keys)

    @property
    def mark(self) -> str:
        """Returns a digest of the ledger; empty for an empty ledger."""
        if not len(self):
            return ""
        told = hashlib.sha256()
        for times in (self.ids, self.keys):
            for digest in sorted(times):
                told.update(digest + times[digest].to_bytes(8, "big", signed=True))
            told.update(b"/")
        return told.hexdigest()[:16]

    def is_later(self, column: str, value: str | bytes, time_ms: int) -> bool:
        """Returns whether an event is newer than the erasure of its id or key, so not erased."""
        until_ms = _time_of(value, self.ids if column == "id" else self.keys)
        return _NEVER < until_ms < time_ms

    def covers(self, column: str, value: str | bytes, time_ms: int) -> bool:
        """Returns whether an id or key was erased up to a time, so that no copy brings it back."""
        return time_ms <= _time_of(value, self.ids if column == "id" else self.keys)

    def has(self, event_id: str) -> bool:
        """Returns whether an id was erased."""
        return _digest(event_id.encode()) in self.ids

    def kept(
        self, events: pa.RecordBatch | pa.Table, by: Literal["timestamp", "offset"] = "timestamp"
    ) -> npt.NDArray[np.bool_] | None:
        """Returns a mask of the events that were not erased; None if none was.

        By ``offset``, the times are offsets.
        """
        gone = np.zeros(events.num_rows, np.bool_)
        for name, times in (("id", self.ids), ("key", self.keys)):
            if times and events.num_rows:
                until = _until(events.column(name), times)
                if until is not None:
                    column = events.column(by).cast(pa.int64())
                    gone |= column.to_numpy(zero_copy_only=False) <= until
        return ~gone if gone.any() else None


NOTHING_ERASED = ErasedIds()
_NEVER = np.iinfo(np.int64).min


def enter_erased(
    context: Context,
    topic: Topic,
    ids: Mapping[str, int] | Times,
    keys: Times | None = None,
    pool: Executor | None = None,
) -> None:
    """Adds ids and keys, each with the time up to which its events are erased.

    Ids can be strings or their sha256; keys are always sha256. A row keeps the latest time that was
    written, whatever the order of the writes.
    """
    now_ms = context.clock.now_ms()
    buckets: dict[str, dict[str, LedgerEntry]] = {}
    for prefix, digest, until_ms in (
        *(("", _digest_of(each).hex(), until) for each, until in ids.items()),
        *((_KEYS, each.hex(), until) for each, until in (keys or {}).items()),
    ):
        where = layout.erased_partition(topic.incarnation, digest)
        buckets.setdefault(where, {})[prefix + digest] = LedgerEntry(now_ms, until_ms)

    def enter(bucket: tuple[str, dict[str, LedgerEntry]]) -> None:
        where, rows = bucket
        names = list(rows)
        for first in range(0, len(names), limits.CHANGES_MAX):
            _enter(
                context, where, {name: rows[name] for name in names[first:][: limits.CHANGES_MAX]}
            )

    each_of: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    for _ in each_of(enter, buckets.items()):
        pass


def announce_erasure(context: Context, topic: Topic, partition: int) -> Head:
    """Notifies copies into a partition that the ledger has grown; returns the head after that.

    Another call may have raised the count since the head was read here. That is enough: the ledger
    had grown before. Raises ``NotFoundError`` if the topic was deleted.
    """
    head, _ = read_head(context, topic, partition)
    if not head.copied:
        return head
    wanted = head.erasures + 1

    def raised(head: Head) -> Head:
        return msgspec.structs.replace(head, erasures=max(head.erasures, wanted))

    return raise_head(context, topic, partition, raised)[1]


def was_erased(context: Context, topic: Topic, event_id: str) -> bool:
    """Returns whether one id is in the ledger."""
    digest = _digest(event_id.encode()).hex()
    where = layout.erased_partition(topic.incarnation, digest)
    return context.catalog.get(where, digest) is not None


def erased_until(
    context: Context, topic: Topic, ids: Iterable[str], keys: Iterable[bytes]
) -> ErasedIds:
    """Returns the ledger's entries for some ids and keys."""
    names = {"": [_digest(each.encode()) for each in ids], _KEYS: [_digest(each) for each in keys]}
    found: dict[str, dict[bytes, int]] = {prefix: {} for prefix in names}
    for prefix, digests in names.items():
        for digest in digests:
            where = layout.erased_partition(topic.incarnation, digest.hex())
            row = context.catalog.get(where, prefix + digest.hex())
            if row is not None:
                erased = decode_row(row.value, LedgerEntry, f"row `{row.row}` of the ledger")
                found[prefix][digest] = erased.until_ms
    return ErasedIds(found[""], found[_KEYS])


def read_erased(context: Context, topic: Topic, known: ErasedIds = NOTHING_ERASED) -> ErasedIds:
    """Returns the current ledger, for a copy into the topic; ``known`` if it has not grown.

    Raises ``NotFoundError`` if the topic was deleted.
    """
    stamp = read_stamp(context, topic)
    if stamp == known.stamp:
        return known
    return read_ledger(context, topic, stamp)


def read_stamp(context: Context, topic: Topic) -> Stamp:
    """Steps 1 and 2 of a copy: returns what its commits expect of the heads."""
    return tuple(_mark_copied(context, topic, each).erasures for each in range(topic.partitions))


def read_ledger(context: Context, topic: Topic, stamp: Stamp = ()) -> ErasedIds:
    """Returns the current ledger, for callers that copy nothing into the topic."""
    audit = layout.audit_partition(topic.incarnation)
    if next(iter(context.catalog.scan(audit, limit=1)), None) is None:
        return ErasedIds(stamp=stamp)  # every delete writes an audit record first
    ids: dict[bytes, int] = {}
    keys: dict[bytes, int] = {}

    def read(bucket: str) -> None:
        for row in context.catalog.scan(layout.erased_partition(topic.incarnation, bucket)):
            erased = decode_row(row.value, LedgerEntry, f"row `{row.row}` of the ledger")
            times = keys if row.row.startswith(_KEYS) else ids
            times[bytes.fromhex(row.row.removeprefix(_KEYS))] = erased.until_ms

    if context.commits_at_once == 1:
        for bucket in _BUCKETS:
            read(bucket)
    else:  # each one is a round trip
        with Pool(context.commits_at_once) as pool:
            list(pool.map(read, _BUCKETS))
    return ErasedIds(ids, keys, stamp)


def _mark_copied(context: Context, topic: Topic, partition: int) -> Head:
    """Sets ``copied`` in a head; returns the head."""

    def raised(head: Head) -> Head:
        return head if head.copied else msgspec.structs.replace(head, copied=True)

    return raise_head(context, topic, partition, raised)[1]


def _enter(context: Context, where: str, rows: Mapping[str, LedgerEntry]) -> None:
    """Puts rows of one bucket, or raises the times of existing ones."""

    def decide(now: Rows) -> Decision[None]:
        return Decision(None, [now.put(name, encode_row(rows[name])) for name in _lower(now, rows)])

    what = "ledger of erased ids"
    update(context, where, list(rows), decide, what, dict.fromkeys(rows))  # most ids are new


def _lower(now: Rows, rows: Mapping[str, LedgerEntry]) -> Iterable[str]:
    """The rows that are not there, or that have an earlier time."""
    for name, row in rows.items():
        found = now[name]
        if found is not None:
            before = decode_row(found.value, LedgerEntry, f"row `{name}` of the ledger")
            if before.until_ms >= row.until_ms:
                continue
        yield name


def _until(column: pa.Array | pa.ChunkedArray, times: Times) -> npt.NDArray[np.int64] | None:
    """Returns for each value the time up to which it was erased; None if none was."""
    if column.null_count == len(column):
        return None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    coded = pc.dictionary_encode(column)
    found = [_time_of(each, times) for each in coded.dictionary.to_pylist()]
    if max(found, default=_NEVER) == _NEVER:
        return None
    indices = pc.fill_null(coded.indices, len(found)).to_numpy(zero_copy_only=False)
    until: npt.NDArray[np.int64] = np.array([*found, _NEVER], np.int64)[indices]
    return until


def _time_of(value: str | bytes, times: Times) -> int:
    return times.get(_digest(value.encode() if isinstance(value, str) else value), _NEVER)


def _digest_of(event_id: str | bytes) -> bytes:
    return event_id if isinstance(event_id, bytes) else _digest(event_id.encode())


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
