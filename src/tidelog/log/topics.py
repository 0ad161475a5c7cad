"""Creates, finds and deletes topics.

Creating a topic takes three steps. The next caller finishes what a crash left:

    1. registry row ``topic/<name>`` as ``creating``, with
       a new incarnation                                   → a name, not usable yet
    2. a ``head`` for each partition, so that commits
       always expect a version. A partition with other
       rows and no head has lost it, and is refused        → the same
    3. registry row as ``ready``                           → a topic

A delete is refused before step 1 if a reader (a consumer, an archive, a pump, a playback) has not
read all events, unless the caller accepts that (``late_readers``). It does not check for events
that a producer appends during the delete: stop producers first.

Deleting a topic takes five steps:

    1. registry row as ``deleting``         → not usable; the name is taken until step 5
    2. close every ``head``, and create a
       closed one if it is missing          → no commit can land, and readers stop: a closed
                                              head means a deleted topic (:func:`read_head`)
    3. erase from archives what was deleted
       from the topic (``closed``)          → archives without those events; delete again
    4. delete its objects and rows, except
       the heads                            → some are deleted; delete again
    5. delete the registry row, and put a
       ``deleted`` row in the same write    → the name is free; late uploads are swept

A delete of events commits to the heads after it has written its audit record. So once the heads are
closed, the audit contains every delete of events that succeeds, and step 3 misses none.

Step 4 deletes rows in this order: consumers, the ledger of erased ids, the audit records, then each
partition. The audit follows the ledger because an empty audit means that there is no ledger. The
audit is deleted with the topic: save a copy first if you need it longer.

Every write that adds or removes a name expects the registry's ``changes`` row and raises it. So a
delayed repeat of an old creation can never bring a deleted topic back. Closed heads and the
``closed`` row among consumers stay for good, for the same reason. A creation puts a head where
there is none, and a delayed repeat of it would create an open head in a deleted topic, to which a
stalled producer could append.

:func:`raise_head` changes a partition's head against concurrent writers, and is safe to repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tidelog.catalog.base import ABSENT, Change, Delete, Put, Row, prefix_end
from tidelog.catalog.update import Decision, Rows, update
from tidelog.concurrency import Pool
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
from tidelog.model.event import check_whole
from tidelog.model.topic import Head, HeldRow, Topic, check_topic_name, decode_row, encode_row

__all__ = [
    "change_topic",
    "check_exists",
    "create_topic",
    "delete_topic",
    "find_head",
    "find_partition",
    "find_target",
    "find_topic",
    "head_of",
    "list_topics",
    "open_head",
    "raise_epoch",
    "raise_head",
    "read_head",
    "read_starts",
]

_NAMES = 1_000  # topics to compare with a name that does not exist
_CREATORS = 8  # heads written in parallel; each is a round trip on a remote catalog


def create_topic(
    context: Context, wanted: Topic, check: Callable[[], None] = lambda: None
) -> Topic:
    """Creates a topic. Raises ``AlreadyExistsError`` if one of this name exists.

    ``check`` may refuse it, given what the registry holds when the name is added (``add_name``).
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
    except ConflictError:  # another process finished or deleted it
        found = find_topic(context, wanted.name)
        if found.incarnation != topic.incarnation:
            raise
    return ready


def change_topic(
    context: Context,
    name: str,
    *,
    notify: Sequence[str] | None = None,
    max_latency_ms: int | None = None,
) -> Topic:
    """Changes where notifications go, and how often; None leaves a setting as it is.

    Processes that append read the row again (``notifier``). This home notifies new targets, also if
    it was copied from the home that created the topic. Raises ``NotFoundError``.
    """
    found = find_topic(context, name)

    def decide(rows: Rows) -> Decision[Topic]:
        row = rows[layout.topic_row(name)]
        now = find_topic(context, name) if row is None else _decode(row)  # which raises
        if now.incarnation != found.incarnation or now.state != "ready":
            raise NotFoundError(f"topic `{name}`: was deleted meanwhile: nothing was changed")
        changed = msgspec.structs.replace(
            now,
            notify=now.notify if notify is None else tuple(notify),
            home=now.home if notify is None else context.identity.id,
            max_latency_ms=now.max_latency_ms if max_latency_ms is None else max_latency_ms,
        )
        _check_settings(changed)
        return Decision(changed, [] if row is None else [rows.put(row.row, encode_row(changed))])

    return update(context, layout.REGISTRY, [layout.topic_row(name)], decide, f"topic `{name}`")


def find_topic(context: Context, name: str) -> Topic:
    """Returns the topic of a name. Raises ``NotFoundError``."""
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
    """Returns the topic to write to. Raises ``NotFoundError`` that says how to create it."""
    try:
        return find_topic(context, name)
    except NotFoundError as exc:
        if "topic" not in exc.context:  # it exists, but a create or a delete of it did not finish
            raise
        hint = f"or create it with `tidelog topic create {name}`"
        raise NotFoundError(f"{exc.message}, {hint}", topic=name) from exc


def list_topics(context: Context) -> Iterator[Topic]:
    """Yields all topics by name, including those whose creation or deletion did not finish."""
    for row in context.catalog.scan(layout.REGISTRY, layout.topic_row(""), "topic0"):
        yield _decode(row)


def delete_topic(
    context: Context,
    name: str,
    check: Callable[[Topic], None] | None = None,
    closed: Callable[[Topic], None] | None = None,
    shown: str = "",
    dry_run: bool = False,
) -> None:
    """Deletes a topic with all its events, consumers and audit records. Raises ``NotFoundError``.

    ``check`` gets the topic before anything is written, and may raise to refuse the delete, such as
    ``late_readers.check_all_read``. A delete that has already started skips it. ``closed`` is step
    3: it gets the topic once no commit can land any more. If it raises, the topic is half deleted,
    and the next delete calls it again. ``shown``: as in ``check_shown``.
    With ``dry_run`` it only checks.
    """
    check_topic_name(name)
    key = layout.topic_row(name)

    def decide(rows: Rows) -> Decision[Topic]:
        row = rows[key]
        if row is None:
            raise NotFoundError(f"topic `{name}`: not found: nothing to delete", topic=name)
        found = _decode(row)
        check_shown(f"topic `{name}`", shown, found.incarnation)
        if found.state == "deleting":
            return Decision(found)
        if check is not None and found.state == "ready":
            check(found)
        if dry_run:
            return Decision(found)
        going = msgspec.structs.replace(found, state="deleting")
        return Decision(going, [rows.put(key, encode_row(going))])

    topic = update(context, layout.REGISTRY, [key], decide, f"topic `{name}`")
    if dry_run:
        return
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
    """Returns the registry row of a topic that is still usable.

    Raises ``NotFoundError`` if it was deleted or is being deleted, even if another topic has its
    name now. Rows and objects that a reader then misses are not damage.
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
    """Returns a partition's head and its version.

    Raises ``NotFoundError`` if the topic was deleted, which a closed head shows too: a delete
    closes all heads before it removes anything. So a reader that misses a row or an object reads
    the head again to find out. Raises ``CorruptError`` if the registry has the topic and no delete
    has started: then the row was lost.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    return open_head(context, topic, partition, context.catalog.get(where, "head"))


def read_starts(
    context: Context, topic: Topic, partitions: Iterable[int] | None = None
) -> dict[int, int]:
    """Returns the first offset of each partition, or of some; raises as :func:`read_head`."""
    numbers = range(topic.partitions) if partitions is None else partitions
    return {number: read_head(context, topic, number)[0].start for number in numbers}


def open_head(context: Context, topic: Topic, partition: int, row: Row | None) -> tuple[Head, str]:
    """The head and its version from its row, which may be missing; as :func:`read_head`."""
    if row is None:
        raise _without_head(context, topic, partition)
    head, version = head_of(topic, partition, row)
    if head.closed:
        raise NotFoundError(
            f"topic `{topic.name}`: was deleted, or is being deleted: open it again, or create it"
        )
    return head, version


def find_head(context: Context, topic: Topic, partition: int) -> Head:
    """Returns a partition's head, even a closed one. Raises as :func:`read_head` if it has none."""
    row = context.catalog.get(layout.topic_partition(topic.incarnation, partition), "head")
    if row is None:
        raise _without_head(context, topic, partition)
    return head_of(topic, partition, row)[0]


def _without_head(context: Context, topic: Topic, partition: int) -> NotFoundError | CorruptError:
    """Returns why a head is missing: a delete marks the registry row before it removes heads."""
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
    """Returns a partition's head and its version, from its row."""
    return decode_row(row.value, Head, f"head of `{topic.name}/{partition}`"), row.version


def _names(context: Context) -> list[str]:
    """Returns the first topics by name, for an error that suggests the nearest one."""
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
    if check_whole(f"topic `{topic.name}`: max_latency_ms", topic.max_latency_ms) < 1:
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
    """Returns a partition's head, even a closed one; None if the partition has no rows at all.

    Raises ``CorruptError`` if it has rows and no head: a new head would reuse their offsets.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    if next(iter(context.catalog.scan(where, limit=1)), None) is None:
        return None
    row = context.catalog.get(where, "head")
    if row is None:
        raise _lost_head(topic, partition)
    return head_of(topic, partition, row)[0]


def _close_head(context: Context, topic: Topic, partition: int) -> None:
    """Closes the head against concurrent commits; puts a closed one if there is none."""
    where = layout.topic_partition(topic.incarnation, partition)

    def decide(rows: Rows) -> Decision[None]:
        row = rows["head"]
        head = Head() if row is None else head_of(topic, partition, row)[0]
        if head.closed:
            return Decision(None)
        closed = encode_row(msgspec.structs.replace(head, closed=True))
        return Decision(None, [rows.put("head", closed)])

    update(context, where, ["head"], decide, f"partition `{topic.name}/{partition}`")


def _remove_objects(context: Context, topic: Topic) -> None:
    keys: list[str] = []
    for info in context.store.list(f"topics/{topic.incarnation}/"):
        keys.append(info.key)
        if len(keys) == 1_000:
            context.store.delete(keys)
            keys.clear()
    context.store.delete(keys)


def _remove_consumers(context: Context, topic: Topic) -> None:
    """Closes the list of consumers, so that none is added, and deletes them."""
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
    """Deletes the ledger of erased ids, then the audit records."""
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
    """Deletes all rows of a catalog partition except a closed head, which keeps commits out."""
    rows = (row.row for row in context.catalog.scan(partition))
    pending: list[Change] = [Delete(row) for row in rows if row != "head"]
    for first in range(0, len(pending), limits.CHANGES_MAX):
        chunk = pending[first : first + limits.CHANGES_MAX]
        context.catalog.write(partition, *chunk, write_id=context.ids.new())


def _scan(context: Context, partition: str, prefix: str) -> list[Row]:
    rows = context.catalog.scan(partition, prefix, prefix_end(prefix))
    return list(rows)


def _each_partition(topic: Topic, call: Callable[[int], None]) -> None:
    """Calls ``call`` for every partition, in parallel if there are many."""
    if topic.partitions < _CREATORS:
        for partition in range(topic.partitions):
            call(partition)
        return
    with Pool(_CREATORS) as pool:
        list(pool.map(call, range(topic.partitions)))


def _decode(row: Row) -> Topic:
    return decode_row(row.value, Topic, f"registry row `{row.row}`")


def raise_head(
    context: Context, topic: Topic, partition: int, decide: Callable[[Head], Head]
) -> tuple[Head, Head]:
    """Replaces a head by ``decide(head)``; returns the head as first read and as it is now.

    ``decide`` returns the wanted head, or the same one if nothing has to change. It is called again
    after a conflict and after a lost reply, so it must only raise or narrow values. Raises
    ``NotFoundError`` for a deleted topic.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    first: list[Head] = []

    def decide_row(rows: Rows) -> Decision[tuple[Head, Head]]:
        head, _ = open_head(context, topic, partition, rows["head"])
        first.append(head)
        wanted = decide(head)
        changes = [] if wanted == head else [rows.put("head", encode_row(wanted))]
        return Decision((first[0], wanted), changes)

    return update(context, where, ["head"], decide_row, f"partition `{topic.name}/{partition}`")


def raise_epoch(context: Context, topic: Topic, partition: int, above: int = 0) -> int:
    """Raises the epoch of a partition's ``compile`` row; returns the new one.

    After that, no journal of a lower epoch can replace runs. Writes nothing if no process compiles
    and the next compiler gets an epoch above ``above`` anyway.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    what = f"compile row of `{topic.name}/{partition}`"
    before: list[HeldRow] = []

    def decide(rows: Rows) -> Decision[int]:
        row = rows[layout.COMPILE_ROW]
        if row is None and not above:
            return Decision(0)
        lease = HeldRow("", 0) if row is None else decode_row(row.value, HeldRow, what)
        if not lease.owner and lease.epoch >= above:
            return Decision(lease.epoch + 1)
        if before and lease.epoch > max(before[-1].epoch, above):
            return Decision(lease.epoch)
        before.append(lease)
        epoch = max(lease.epoch, above) + 1
        return Decision(epoch, [rows.put(layout.COMPILE_ROW, encode_row(HeldRow("", epoch)))])

    return update(context, where, [layout.COMPILE_ROW], decide, what)
