"""The ledger of what was erased: hashes alone, so that no copy brings an event back.

A row is the hash of an id, or of a key whose events were all deleted. It says up to which time
events were erased: the time of the delete, by this machine's clock or the store's if that is ahead
(``ages``), or that of the newest deleted event where it is later. An event with that id or key and
a later time is a new one. Ordinary producers do not look at all.

Whatever copies events into a topic from a place that may still hold erased ones (pumps, restores,
playbacks, the Spark sink, recoveries) goes by ``log.copying``. The two sides meet in the head of
each partition, which every commit expects:

| a copy                                           | a delete                                    |
|--------------------------------------------------|---------------------------------------------|
| 1. says in every head that something is copied   | 1. its audit record                         |
| 2. notes ``erasures`` of every head              | 2. its rows of the ledger                   |
| 3. reads the ledger, leaves out what was erased  | 3. raises ``erasures`` in every head that   |
| 4. commits, expecting a head with the same       |    says so                                  |
|    ``erasures``; else it goes on at 2            | 4. looks up what came into those partitions |
|                                                  | 5. deletes the events                       |

A copy that is committed before step 3 of the delete is found by its step 4; one that is committed
later has read the ledger after step 2. Nothing gets between, and a topic into which nothing was
ever copied pays nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.catalog.base import ABSENT, Expectation, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.log.heads import RACE, raise_head
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.run import Erased, Head, decode_row, encode_row
from tidelog.model.topic import Topic
from tidelog.pool import Pool

__all__ = [
    "NOTHING_ERASED",
    "ErasedIds",
    "Stamp",
    "announce_erasure",
    "enter_erased",
    "erased_until",
    "read_erased",
    "read_ledger",
    "read_stamp",
    "was_erased",
]

_BUCKETS = [f"{number:02x}" for number in range(256)]
_KEYS = "key/"  # begins the rows of keys

Stamp = tuple[int, ...]
"""How often each partition was told that the ledger has grown."""

Times = Mapping[bytes, int]
"""Until when events were erased, by the digest of their id or key."""


@dataclass(frozen=True, eq=False)
class ErasedIds:
    """The ledger as it was at some time. Pickles."""

    ids: Times = field(default_factory=dict)
    keys: Times = field(default_factory=dict)
    stamp: Stamp = ()

    def __len__(self) -> int:
        return len(self.ids) + len(self.keys)

    @property
    def mark(self) -> str:
        """The same for the same ledger; empty where that is empty."""
        if not len(self):
            return ""
        told = hashlib.sha256()
        for times in (self.ids, self.keys):
            for digest in sorted(times):
                told.update(digest + times[digest].to_bytes(8, "big", signed=True))
            told.update(b"/")
        return told.hexdigest()[:16]

    def is_later(self, column: str, value: str | bytes, time_ms: int) -> bool:
        """Whether an event with an erased id or key came after the erasure: it is a new one."""
        until_ms = _time_of(value, self.ids if column == "id" else self.keys)
        return _NEVER < until_ms < time_ms

    def has(self, event_id: str) -> bool:
        """Whether an id was erased."""
        return _digest(event_id.encode()) in self.ids

    def kept(self, events: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_] | None:
        """Which events were not erased; None where that is all of them."""
        gone = np.zeros(events.num_rows, np.bool_)
        for name, times in (("id", self.ids), ("key", self.keys)):
            if times and events.num_rows:
                until = _until(events.column(name), times)
                if until is not None:
                    column = events.column("timestamp").cast(pa.int64())
                    gone |= column.to_numpy(zero_copy_only=False) <= until
        return ~gone if gone.any() else None


NOTHING_ERASED = ErasedIds()
_NEVER = np.iinfo(np.int64).min


def enter_erased(
    log: Log,
    topic: Topic,
    ids: Mapping[str, int] | Times,
    keys: Times | None = None,
    pool: Executor | None = None,
) -> None:
    """Enter ids, each with the time up to which its events are erased, and keys.

    Ids may be given as their sha256; keys always are.
    A row keeps the latest time of all that were entered, in whatever order writes arrive.
    """
    now_ms = log.clock.now_ms()
    buckets: dict[str, dict[str, Erased]] = {}
    for prefix, digest, until_ms in (
        *(("", _digest_of(each).hex(), until) for each, until in ids.items()),
        *((_KEYS, each.hex(), until) for each, until in (keys or {}).items()),
    ):
        where = layout.erased_partition(topic.incarnation, digest)
        buckets.setdefault(where, {})[prefix + digest] = Erased(now_ms, until_ms)

    def enter(bucket: tuple[str, dict[str, Erased]]) -> None:
        where, rows = bucket
        names = list(rows)
        for first in range(0, len(names), limits.CHANGES_MAX):
            _enter(log, where, {name: rows[name] for name in names[first:][: limits.CHANGES_MAX]})

    each_of: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    for _ in each_of(enter, buckets.items()):
        pass


def announce_erasure(log: Log, topic: Topic, partition: int) -> Head:
    """Let copies into a partition notice that the ledger has grown; the head after that.

    ``NotFoundError`` when the topic was deleted.
    """
    head, _ = read_head(log, topic, partition)
    if not head.copied:
        return head

    def raised(head: Head) -> Head:
        return msgspec.structs.replace(head, erasures=head.erasures + 1)

    return raise_head(log, topic, partition, raised)[1]


def was_erased(log: Log, topic: Topic, event_id: str) -> bool:
    """Whether one id is in the ledger."""
    digest = _digest(event_id.encode()).hex()
    where = layout.erased_partition(topic.incarnation, digest)
    return log.catalog.get(where, digest) is not None


def erased_until(log: Log, topic: Topic, ids: Iterable[str], keys: Iterable[bytes]) -> ErasedIds:
    """What the ledger has of some ids and keys."""
    names = {"": [_digest(each.encode()) for each in ids], _KEYS: [_digest(each) for each in keys]}
    found: dict[str, dict[bytes, int]] = {prefix: {} for prefix in names}
    for prefix, digests in names.items():
        for digest in digests:
            where = layout.erased_partition(topic.incarnation, digest.hex())
            row = log.catalog.get(where, prefix + digest.hex())
            if row is not None:
                erased = decode_row(row.value, Erased, f"row `{row.row}` of the ledger")
                found[prefix][digest] = erased.until_ms
    return ErasedIds(found[""], found[_KEYS])


def read_erased(log: Log, topic: Topic, known: ErasedIds = NOTHING_ERASED) -> ErasedIds:
    """The ledger as it is now, for a copy into the topic; ``known`` where it has not grown.

    ``NotFoundError`` when the topic was deleted.
    """
    stamp = read_stamp(log, topic)
    if stamp == known.stamp:
        return known
    return read_ledger(log, topic, stamp)


def read_stamp(log: Log, topic: Topic) -> Stamp:
    """Steps 1 and 2 of a copy: what its commits expect of the heads."""
    return tuple(_copied(log, topic, each).erasures for each in range(topic.partitions))


def read_ledger(log: Log, topic: Topic, stamp: Stamp = ()) -> ErasedIds:
    """The ledger as it is now, for what copies nothing into the topic."""
    audit = layout.audit_partition(topic.incarnation)
    if next(iter(log.catalog.scan(audit, limit=1)), None) is None:
        return ErasedIds(stamp=stamp)  # every delete begins with a record
    ids: dict[bytes, int] = {}
    keys: dict[bytes, int] = {}

    def read(bucket: str) -> None:
        for row in log.catalog.scan(layout.erased_partition(topic.incarnation, bucket)):
            erased = decode_row(row.value, Erased, f"row `{row.row}` of the ledger")
            times = keys if row.row.startswith(_KEYS) else ids
            times[bytes.fromhex(row.row.removeprefix(_KEYS))] = erased.until_ms

    if log.commits_at_once == 1:
        for bucket in _BUCKETS:
            read(bucket)
    else:  # each is a round trip
        with Pool(log.commits_at_once) as pool:
            list(pool.map(read, _BUCKETS))
    return ErasedIds(ids, keys, stamp)


def _copied(log: Log, topic: Topic, partition: int) -> Head:
    """A head that says that something copies events into its partition."""

    def raised(head: Head) -> Head:
        return head if head.copied else msgspec.structs.replace(head, copied=True)

    return raise_head(log, topic, partition, raised)[1]


def _enter(log: Log, where: str, rows: Mapping[str, Erased]) -> None:
    """Put rows of one bucket, or raise the times of those that are there."""
    changes = [Put(name, encode_row(row), ABSENT) for name, row in rows.items()]
    for delay_s in RACE.delays_s(log.random):
        if not changes:
            return
        try:
            log.catalog.write(where, *changes, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            log.clock.sleep(delay_s)
            changes = list(_raised(log, where, rows))
        else:
            return
    raise UnavailableError("ledger of erased ids: too many writers at once: try again")


def _raised(log: Log, where: str, rows: Mapping[str, Erased]) -> Iterable[Put]:
    for name, row in rows.items():
        found = log.catalog.get(where, name)
        expect: Expectation = ABSENT
        if found is not None:
            before = decode_row(found.value, Erased, f"row `{name}` of the ledger")
            if before.until_ms >= row.until_ms:
                continue
            expect = found.version
        yield Put(name, encode_row(row), expect)


def _until(column: pa.Array | pa.ChunkedArray, times: Times) -> npt.NDArray[np.int64] | None:
    """For each value of a column the time up to which it was erased; None where none was."""
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
