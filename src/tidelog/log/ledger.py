"""The ledger of erased ids: hashes alone, so that no restore and no pump brings an event back.

A delete enters its ids before anything else changes. Whoever copies events into a topic from a
place that may still hold them takes a snapshot, and leaves those out. Ordinary producers do not
look: an erased id that is appended anew is a new event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.catalog.base import Put
from tidelog.log.base import Log
from tidelog.log.hold import write_repeatedly
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.topic import Topic

__all__ = [
    "NOTHING_ERASED",
    "ErasedIds",
    "Stamp",
    "enter_erased",
    "ledger_stamp",
    "read_erased",
    "was_erased",
]

_BUCKETS = [f"{number:02x}" for number in range(256)]

Stamp = tuple[int, ...]
"""How many amendments each partition has had. The ledger has not grown where it is the same, but
for what belongs to deletes that have not returned."""


@dataclass(frozen=True, eq=False)
class ErasedIds:
    """The ledger as it was at some time. Pickles."""

    digests: frozenset[bytes] = frozenset()
    stamp: Stamp = ()
    _prefixes: npt.NDArray[np.uint64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        firsts = [int.from_bytes(each[:8], "big") for each in self.digests]
        object.__setattr__(self, "_prefixes", np.sort(np.array(firsts, np.uint64)))

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def mark(self) -> str:
        """The same for the same ids; empty where there are none."""
        if not self.digests:
            return ""
        return hashlib.sha256(b"".join(sorted(self.digests))).hexdigest()[:16]

    def has(self, event_id: str) -> bool:
        """Whether an id was erased."""
        return hashlib.sha256(event_id.encode()).digest() in self.digests

    def kept(self, ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_] | None:
        """Which events of a column of ids were not erased; None where that is all of them."""
        if not self.digests or ids.null_count == len(ids):
            return None
        sha256 = hashlib.sha256
        hashed = [
            b"" if each is None else sha256(each.encode()).digest() for each in ids.to_pylist()
        ]
        joined = b"".join(each[:8] or bytes(8) for each in hashed)
        suspects = np.isin(np.frombuffer(joined, ">u8").astype(np.uint64), self._prefixes)
        rows = [row for row in np.flatnonzero(suspects).tolist() if hashed[row] in self.digests]
        if not rows:
            return None
        keep = np.ones(len(ids), np.bool_)
        keep[rows] = False
        return keep


NOTHING_ERASED = ErasedIds()


def enter_erased(log: Log, topic: Topic, ids: Iterable[str], pool: Executor | None = None) -> None:
    """Put ids into the ledger; twice does no harm."""
    buckets: dict[str, list[str]] = {}
    for each in set(ids):
        digest = hashlib.sha256(each.encode()).hexdigest()
        buckets.setdefault(layout.erased_partition(topic.incarnation, digest), []).append(digest)
    now = str(log.clock.now_ms()).encode()

    def enter(bucket: tuple[str, Sequence[str]]) -> None:
        where, digests = bucket
        for first in range(0, len(digests), limits.CHANGES_MAX):
            some = digests[first : first + limits.CHANGES_MAX]
            write_repeatedly(log, where, *[Put(digest, now) for digest in some])

    each_of: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    for _ in each_of(enter, buckets.items()):
        pass


def was_erased(log: Log, topic: Topic, event_id: str) -> bool:
    """Whether one id is in the ledger."""
    digest = hashlib.sha256(event_id.encode()).hexdigest()
    where = layout.erased_partition(topic.incarnation, digest)
    return log.catalog.get(where, digest) is not None


def ledger_stamp(log: Log, topic: Topic) -> Stamp:
    """What tells whether a snapshot is still good."""
    return tuple(read_head(log, topic, p)[0].amendments for p in range(topic.partitions))


def read_erased(log: Log, topic: Topic, known: ErasedIds = NOTHING_ERASED) -> ErasedIds:
    """The ledger as it is now; ``known`` where nothing was amended since that was read."""
    stamp = ledger_stamp(log, topic)
    if stamp == known.stamp:
        return known
    if not any(stamp):
        return ErasedIds(stamp=stamp)
    found = [
        bytes.fromhex(row.row)
        for bucket in _BUCKETS
        for row in log.catalog.scan(layout.erased_partition(topic.incarnation, bucket))
    ]
    return ErasedIds(frozenset(found), stamp)
