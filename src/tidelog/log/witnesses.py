"""Objects that say which staged segments were committed, so that their loss proves itself.

A segment of a plain append carries what its appender knew of the partitions (``Known``). A staged
one is made before a driver knows where its events will stand, by a process that has no catalog, and
is copied as it is. So the driver puts a **witness** after the commits of a staged segment, and
before anything of them is acknowledged: which partitions have committed it, or a copy of it.

A witness is in the store, which a restored catalog does not take back. A stray that a witness says
a partition has committed, and that this partition neither names nor lists, proves that the catalog
went back, also where it is the only commit that was lost. One commit of a copy creates the row of
the producer by which a recovery would append it (``append``): where that row is there, the catalog
knows the commit, however late the witness was read.

A witness counts only for a stray, and is deleted by a sweep when no copy of its segment is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tidelog.errors import NotFoundError
from tidelog.log.base import Log
from tidelog.log.unused import origin_of, read_unused
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.producers import recovery_producer
from tidelog.model.run import Run, decode_row
from tidelog.model.sealed import open_json, seal_json
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo
from tidelog.store.fresh import put_fresh

__all__ = ["Witness", "is_claimed", "is_over", "list_witnesses", "lost_partition", "put_witness"]


class Witness(Persisted, frozen=True):
    """What an object of this kind says."""

    partitions: tuple[int, ...]  # that have committed a copy of the segment
    format: int = layout.FORMAT


def put_witness(log: Log, topic: Topic, origin: str, partitions: Sequence[int]) -> None:
    """Say that partitions have committed a segment. ``UnavailableError`` if that fails."""
    key = layout.witness(topic.incarnation, origin, log.ids.new())
    put_fresh(log.store, key, seal_json(Witness(tuple(partitions))))


def is_claimed(log: Log, topic: Topic, origin: str, partition: int) -> bool:
    """Whether a partition has the row that a commit of a copy creates."""
    where = layout.topic_partition(topic.incarnation, partition)
    row = layout.producer_row(recovery_producer(origin, partition))
    return log.catalog.get(where, row) is not None


def lost_partition(log: Log, topic: Topic, stray: ObjectInfo) -> int | None:
    """A partition that has committed a stray, and has forgotten it; None for none.

    ``CorruptError`` for a witness that does not decode.
    """
    if "_" not in stray.key.rpartition("/")[2]:
        return None  # not a copy
    origin, _ = origin_of(stray.key)
    for partition in _partitions(log, topic, origin):
        if not 0 <= partition < topic.partitions or is_claimed(log, topic, origin, partition):
            continue
        if not _is_mentioned(log, topic, origin, partition):  # that row goes after some weeks
            return partition
    return None


def list_witnesses(log: Log, topic: Topic) -> list[ObjectInfo]:
    """All witnesses of a topic: to be listed before its segments are, see :func:`is_over`."""
    return list(log.store.list(layout.witnesses(topic.incarnation)))


def is_over(info: ObjectInfo, origins: Collection[str]) -> bool:
    """Whether no object of its segment is left; a name that is not ours never is."""
    try:
        return layout.witness_origin(info.key) not in origins
    except ValueError:
        return False


def _partitions(log: Log, topic: Topic, origin: str) -> Iterator[int]:
    for info in log.store.list(layout.witness(topic.incarnation, origin, "")):
        try:
            data = log.store.get(info.key)
        except NotFoundError:
            continue  # a sweep has deleted it meanwhile
        yield from open_json(data, Witness, f"witness `{info.key}`").partitions


def _is_mentioned(log: Log, topic: Topic, origin: str, partition: int) -> bool:
    """Whether rows of a partition name or list a copy of a segment."""
    keys: Iterable[str] = (key for row in read_unused(log, topic, partition) for key in row.objects)
    if any(origin_of(key)[0] == origin for key in keys):
        return True
    where = layout.topic_partition(topic.incarnation, partition)
    for row in log.catalog.scan(where, "run/", "run0"):
        if origin_of(decode_row(row.value, Run, f"row `{row.row}`").object)[0] == origin:
            return True
    return False
