"""Topics: created, found, and deleted for good.

Creating, in three steps; whoever comes next finishes what a crash left:

1. registry row ``topic/<name>`` as ``creating``, with a fresh incarnation → a name, not usable yet
2. a ``head`` for each partition, so that commits always expect a version → the same
   (a partition that has other rows and no head is refused: it has lost it)
3. registry row as ``ready``                                              → a topic

A delete of a topic that has events which a reader has not read (a consumer, an archive, a pump, a
playback) is refused before step 1 unless the caller accepts that (``readers``). Events that a
producer appends while the topic is deleted are not looked at: stop producers first.

Deleting, in five:

1. registry row as ``deleting``         → not usable; the name is taken until step 5
2. close every ``head``, also one that
   is not there yet                     → no commit can land any more, and readers stop: a closed
                                          head is a deleted topic (:func:`read_head`)
3. erase from archives what was deleted
   from the topic (``closed``)          → archives without those events; deleting again resumes
4. remove its objects and rows, not
   the heads                            → some are gone; deleting again goes on
5. remove the registry row, and in the
   same write put a ``deleted`` row     → the name is free; late uploads are swept as orphans

A delete of events is a commit to its heads, after its audit record. So all that ever return are in
the audit when the heads are closed, and step 3 misses none; before that, one may still come.

Rows go in this order: consumers, the ledger of erased ids, the audit records, then each partition.
What was done to the events of a topic is forgotten with them: keep a copy of the audit first where
it must outlive the topic. The audit goes after the ledger, as an empty one says that there is none.

The registry's ``changes`` row is expected and raised whenever a name is made or removed: a delayed
repeat of an old creation can therefore never bring a deleted topic back. Closed heads, and the
``closed`` row among consumers, stay for good, for the same reason: a head is made where there is
none, and a delayed repeat of that would make an open one, to which a producer that slept could
append what no one reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from tidelog.catalog.base import ABSENT, Change, Delete, Put, Row
from tidelog.context import Context
from tidelog.coordination.registry import add_name, check_shown, remove_name
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
)
from tidelog.model import layout, limits
from tidelog.model.address import nearest
from tidelog.model.partition_rows import Head, decode_row, encode_row
from tidelog.model.topic import Topic, check_topic_name
from tidelog.pool import Pool

__all__ = [
    "check_exists",
    "create_topic",
    "delete_topic",
    "find_head",
    "find_partition",
    "find_target",
    "find_topic",
    "head_of",
    "list_topics",
    "read_head",
]

_NAMES = 1_000  # of topics that are compared with one that is not found
_CREATORS = 8  # heads written at once; each is a round trip on a remote catalog


def create_topic(
    context: Context, wanted: Topic, check: Callable[[], None] = lambda: None
) -> Topic:
    """Make a topic. ``AlreadyExistsError`` where there is one of this name.

    ``check`` may refuse it by what the registry has when the name is added (``add_name``).
    """
    check_topic_name(wanted.name)
    _check_settings(wanted)
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(wanted.name))
    if row is None:
        add_name(context, Put(layout.topic_row(wanted.name), encode_row(wanted), ABSENT), check)
        row = context.catalog.get(layout.REGISTRY, layout.topic_row(wanted.name))
    if row is None:
        raise ConflictError(f"topic `{wanted.name}`: was deleted while it was created: try again")
    topic = _decode(row)
    if topic.state != "creating":
        raise AlreadyExistsError(f"topic `{topic.name}`: exists already: choose another name")
    if topic.incarnation != wanted.incarnation and not _same_settings(topic, wanted):
        raise AlreadyExistsError(
            f"topic `{topic.name}`: its creation with {topic.partitions} partitions did not "
            "finish: create it with the same settings, or delete it"
        )
    _each_partition(topic, lambda partition: _create_head(context, topic, partition))
    ready = msgspec.structs.replace(topic, state="ready")
    try:
        _put_topic(context, ready, row.version)
    except ConflictError:  # somebody else finished it first, or deleted it
        found = find_topic(context, wanted.name)
        if found.incarnation != topic.incarnation:
            raise
    return ready


def find_topic(context: Context, name: str) -> Topic:
    """The topic of a name. ``NotFoundError``."""
    check_topic_name(name)
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(name))
    if row is None:
        like = nearest(name, _names(context))
        raise NotFoundError(
            f"topic `{name}`: not found{like}: see `tidelog topic list`", topic=name
        )
    topic = _decode(row)
    if topic.state == "creating":
        raise NotFoundError(f"topic `{name}`: its creation did not finish: create it again")
    if topic.state == "deleting":
        raise NotFoundError(f"topic `{name}`: is being deleted: delete it again to finish")
    return topic


def find_target(context: Context, name: str) -> Topic:
    """The topic of a name, to write to it. ``NotFoundError`` that says how to make it."""
    try:
        return find_topic(context, name)
    except NotFoundError as exc:
        if "topic" not in exc.context:  # it is there, half made or half deleted
            raise
        hint = f"or create it with `tidelog topic create {name}`"
        raise NotFoundError(f"{exc.message}, {hint}", topic=name) from exc


def list_topics(context: Context) -> Iterator[Topic]:
    """All topics, by name, also those whose creation or deletion did not finish."""
    for row in context.catalog.scan(layout.REGISTRY, layout.topic_row(""), "topic0"):
        yield _decode(row)


def delete_topic(
    context: Context,
    name: str,
    check: Callable[[Topic], None] | None = None,
    closed: Callable[[Topic], None] | None = None,
    shown: str = "",
) -> None:
    """Remove a topic with all its events, consumers and audit records. ``NotFoundError``.

    ``check`` gets the topic before anything is written, and refuses the delete by an error, such
    as ``readers.check_all_read``. A delete that has begun is finished without it. ``closed`` is
    step 3: it gets the topic once nothing more can be committed to it; its error leaves the topic
    half deleted, and a repeated delete calls it again. ``shown``: as in ``check_shown``.
    """
    check_topic_name(name)
    while True:
        row = context.catalog.get(layout.REGISTRY, layout.topic_row(name))
        if row is None:
            raise NotFoundError(f"topic `{name}`: not found: nothing to delete", topic=name)
        topic = _decode(row)
        check_shown(f"topic `{name}`", shown, topic.incarnation)
        if topic.state == "deleting":
            break
        if check is not None and topic.state == "ready":
            check(topic)
        with contextlib.suppress(ConflictError):
            _put_topic(context, msgspec.structs.replace(topic, state="deleting"), row.version)
    _each_partition(topic, lambda partition: _close_head(context, topic, partition))
    if closed is not None:
        closed(topic)
    _remove_objects(context, topic)
    _remove_consumers(context, topic)
    _remove_audit(context, topic)
    _each_partition(topic, lambda partition: _remove_rows(context, topic, partition))
    record = Put(layout.deleted_row(topic.incarnation), name.encode())
    remove_name(
        context,
        layout.topic_row(name),
        lambda found: _decode(found).incarnation == topic.incarnation,
        record,
    )


def check_exists(context: Context, topic: Topic) -> Row:
    """The registry row of a topic that can still be used.

    ``NotFoundError`` when it was deleted or is being deleted, also when another topic has its name
    now. What a reader of it misses then is not damage.
    """
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(topic.name))
    found = None if row is None else _decode(row)
    if row is None or found is None or found.incarnation != topic.incarnation:
        again = "" if row is None else ", and another one has its name now"
        raise NotFoundError(
            f"topic `{topic.name}`: was deleted{again}: open it again, or create it"
        )
    if found.state == "deleting":
        raise NotFoundError(f"topic `{topic.name}`: is being deleted: stop using it")
    return row


def read_head(context: Context, topic: Topic, partition: int) -> tuple[Head, str]:
    """A partition's head and its version. ``NotFoundError`` once the topic is deleted.

    Also for a closed head: a delete closes all heads before it removes anything. So a reader that
    misses a row or an object, and looks at the head again, learns that the topic is being deleted.
    ``CorruptError`` where the registry has the topic, and no delete has begun: the row was lost.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    row = context.catalog.get(where, "head")
    if row is None:
        raise _without_head(context, topic, partition)
    head, version = head_of(topic, partition, row)
    if head.closed:
        raise NotFoundError(
            f"topic `{topic.name}`: was deleted, or is being deleted: open it again, or create it"
        )
    return head, version


def find_head(context: Context, topic: Topic, partition: int) -> Head:
    """A partition's head, also a closed one. Errors as for :func:`read_head`, where it has none."""
    row = context.catalog.get(layout.topic_partition(topic.incarnation, partition), "head")
    if row is None:
        raise _without_head(context, topic, partition)
    return head_of(topic, partition, row)[0]


def _without_head(context: Context, topic: Topic, partition: int) -> NotFoundError | CorruptError:
    """Why a partition has no head: a delete marks the registry row before it removes any."""
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(topic.name))
    found = None if row is None else _decode(row)
    if found is None or found.incarnation != topic.incarnation or found.state != "ready":
        return NotFoundError(f"topic `{topic.name}`: was deleted: open it again, or create it")
    return _lost_head(topic, partition)


def _lost_head(topic: Topic, partition: int) -> CorruptError:
    return CorruptError(
        f"partition `{topic.name}/{partition}`: has no `head` row, so the catalog has lost rows: "
        "keep everything, and restore the catalog from a copy"
    )


def head_of(topic: Topic, partition: int, row: Row) -> tuple[Head, str]:
    """A partition's head and its version, from its row."""
    return decode_row(row.value, Head, f"head of `{topic.name}/{partition}`"), row.version


def _names(context: Context) -> list[str]:
    """The first topics by name, for an error that names the nearest one."""
    first = layout.topic_row("")
    rows = context.catalog.scan(layout.REGISTRY, first, "topic0", limit=_NAMES)
    return [row.row.removeprefix(first) for row in rows]


def _check_settings(topic: Topic) -> None:
    if not 1 <= topic.partitions <= limits.PARTITIONS_MAX:
        raise InvalidError(
            f"topic `{topic.name}`: {topic.partitions} partitions: "
            f"give 1 to {limits.PARTITIONS_MAX}"
        )
    if not 1 <= topic.slot_ms <= limits.SLOT_MS_MAX:
        raise InvalidError(
            f"topic `{topic.name}`: slots of {topic.slot_ms} ms: give 1 to {limits.SLOT_MS_MAX} ms"
        )
    if topic.max_latency_ms < 1:
        raise InvalidError(
            f"topic `{topic.name}`: max_latency_ms is {topic.max_latency_ms}: give 1 or more"
        )


def _same_settings(one: Topic, other: Topic) -> bool:
    names = ("partitions", "slot_ms", "notify", "max_latency_ms")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _put_topic(context: Context, topic: Topic, version: str) -> None:
    change = Put(layout.topic_row(topic.name), encode_row(topic), expect=version)
    context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())


def _create_head(context: Context, topic: Topic, partition: int) -> None:
    where = layout.topic_partition(topic.incarnation, partition)
    if find_partition(context, topic, partition) is None:
        with contextlib.suppress(ConflictError):
            change = Put("head", encode_row(Head()), expect=ABSENT)
            context.catalog.write(where, change, write_id=context.ids.new())


def find_partition(context: Context, topic: Topic, partition: int) -> Head | None:
    """A partition's head, also a closed one; None where the catalog has no row of the partition.

    ``CorruptError`` where it has rows and no head: a new one would give their offsets again.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    if next(iter(context.catalog.scan(where, limit=1)), None) is None:
        return None
    row = context.catalog.get(where, "head")
    if row is None:
        raise _lost_head(topic, partition)
    return head_of(topic, partition, row)[0]


def _close_head(context: Context, topic: Topic, partition: int) -> None:
    """Close the head, whatever is committed meanwhile; where there is none, put a closed one."""
    where = layout.topic_partition(topic.incarnation, partition)
    while True:
        row = context.catalog.get(where, "head")
        head, version = (Head(), ABSENT) if row is None else head_of(topic, partition, row)
        if head.closed:
            return
        closed = Put("head", encode_row(msgspec.structs.replace(head, closed=True)), version)
        with contextlib.suppress(ConflictError):
            context.catalog.write(where, closed, write_id=context.ids.new())
            return


def _remove_objects(context: Context, topic: Topic) -> None:
    keys: list[str] = []
    for info in context.store.list(f"topics/{topic.incarnation}/"):
        keys.append(info.key)
        if len(keys) == 1_000:
            context.store.delete(keys)
            keys.clear()
    context.store.delete(keys)


def _remove_consumers(context: Context, topic: Topic) -> None:
    """First close the list of consumers: from then on none is added."""
    where, prefix = layout.consumers_partition(topic.incarnation), layout.consumer_row("")
    context.catalog.write(where, Put(layout.CLOSED_ROW, b""), write_id=context.ids.new())
    names = [row.row.removeprefix(prefix) for row in _scan(context, where, prefix)]
    for name in names:
        remove_partition(context, layout.consumer_members(topic.incarnation, name))
        for partition in range(topic.partitions):
            remove_partition(context, layout.lease_partition(topic.incarnation, name, partition))
        row = layout.consumer_row(name)
        context.catalog.write(where, Delete(row), write_id=context.ids.new())


def _remove_audit(context: Context, topic: Topic) -> None:
    """The ledger of erased ids and the audit records; every amendment begins with one of these."""
    audit = layout.audit_partition(topic.incarnation)
    if next(iter(context.catalog.scan(audit, limit=1)), None) is None:
        return
    ledger = [layout.erased_partition(topic.incarnation, f"{number:02x}") for number in range(256)]
    with Pool(_CREATORS) as pool:
        list(pool.map(lambda partition: remove_partition(context, partition), ledger))
    remove_partition(context, audit)


def _remove_rows(context: Context, topic: Topic, partition: int) -> None:
    remove_partition(context, layout.notify_partition(topic.incarnation, partition))
    remove_partition(context, layout.topic_partition(topic.incarnation, partition))


def remove_partition(context: Context, partition: str) -> None:
    """Delete all rows of a catalog partition; a closed head stays, and keeps commits out."""
    rows = (row.row for row in context.catalog.scan(partition))
    pending: list[Change] = [Delete(row) for row in rows if row != "head"]
    for first in range(0, len(pending), limits.CHANGES_MAX):
        chunk = pending[first : first + limits.CHANGES_MAX]
        context.catalog.write(partition, *chunk, write_id=context.ids.new())


def _scan(context: Context, partition: str, prefix: str) -> list[Row]:
    rows = context.catalog.scan(partition, prefix, prefix + "\U0010ffff")
    return list(rows)


def _each_partition(topic: Topic, call: Callable[[int], None]) -> None:
    """Do it for every partition; side by side where there are many."""
    if topic.partitions < _CREATORS:
        for partition in range(topic.partitions):
            call(partition)
        return
    with Pool(_CREATORS) as pool:
        list(pool.map(call, range(topic.partitions)))


def _decode(row: Row) -> Topic:
    return decode_row(row.value, Topic, f"registry row `{row.row}`")
