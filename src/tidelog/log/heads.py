"""Changing a partition's head against other writers, where a change only grows or narrows."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.catalog.base import ABSENT, Put
from tidelog.context import Context
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.backoff import Backoff
from tidelog.model.partition_rows import Head, HeldRow, decode_row, encode_row
from tidelog.model.topic import Topic

__all__ = ["RACE", "raise_epoch", "raise_head"]

RACE = Backoff(limits.COMMIT_ATTEMPTS, base_ms=1, max_ms=200)  # against producers on one row


def raise_head(
    context: Context, topic: Topic, partition: int, raised: Callable[[Head], Head]
) -> tuple[Head, Head]:
    """Change a head by what only grows; the head as it was found, and as it is now.

    ``raised`` gives the head as it should be, or the same one where it is so already: a conflict
    and a lost reply are both settled by asking it again. ``NotFoundError`` for a deleted topic.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    found: Head | None = None
    for delay_s in RACE.delays_s(context.random):
        head, version = read_head(context, topic, partition)
        if found is None:
            found = head
        if head.closed:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was changed")
        wanted = raised(head)
        if wanted == head:
            return found, head
        try:
            change = Put("head", encode_row(wanted), expect=version)
            context.catalog.write(where, change, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            context.clock.sleep(delay_s)
        else:
            return found, wanted
    raise UnavailableError(
        f"partition `{topic.name}/{partition}`: too many writers at once: try again"
    )


def raise_epoch(context: Context, topic: Topic, partition: int, above: int = 0) -> int:
    """Raise the epoch of a partition's ``compile`` row; returns the new one.

    No journal of a lower epoch can take its place any more. Writes nothing where nothing compiles
    and the next compiler takes an epoch above ``above``.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    before: HeldRow | None = None
    for delay_s in RACE.delays_s(context.random):
        row = context.catalog.get(where, layout.COMPILE_ROW)
        if row is None and not above:
            return 0
        what = f"compile row of `{topic.name}/{partition}`"
        lease = HeldRow("", 0) if row is None else decode_row(row.value, HeldRow, what)
        if not lease.owner and lease.epoch >= above:
            return lease.epoch + 1
        if before is not None and lease.epoch > max(before.epoch, above):
            return lease.epoch
        before = lease
        epoch = max(lease.epoch, above) + 1
        expect = ABSENT if row is None else row.version
        free = Put(layout.COMPILE_ROW, encode_row(HeldRow("", epoch)), expect=expect)
        try:
            context.catalog.write(where, free, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            context.clock.sleep(delay_s)
        else:
            return epoch
    raise UnavailableError(f"topic `{topic.name}`: too many writers at once: sweep again")
