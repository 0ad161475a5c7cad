"""Updates a partition's head against concurrent writers, for changes that are safe to repeat."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.log.topics import open_head
from tidelog.model import layout
from tidelog.model.partition_rows import Head, HeldRow, decode_row, encode_row
from tidelog.model.topic import Topic

__all__ = ["raise_epoch", "raise_head"]


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
