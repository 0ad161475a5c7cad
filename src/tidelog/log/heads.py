"""Updates a partition's head against concurrent writers, for changes that are safe to repeat."""

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

RACE = Backoff(limits.COMMIT_ATTEMPTS, base_ms=1, max_ms=200)  # producers write the same row


def raise_head(
    context: Context, topic: Topic, partition: int, decide: Callable[[Head], Head]
) -> tuple[Head, Head]:
    """Replaces a head by ``decide(head)``; returns the head as first read and as it is now.

    ``decide`` returns the wanted head, or the same one if nothing has to change. It is called again
    after a conflict and after a lost reply, so it must only raise or narrow values. Raises
    ``NotFoundError`` for a deleted topic.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    found: Head | None = None
    for delay_s in RACE.delays_s(context.random):
        head, version = read_head(context, topic, partition)
        if found is None:
            found = head
        if head.closed:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was changed")
        wanted = decide(head)
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
    """Raises the epoch of a partition's ``compile`` row; returns the new one.

    After that, no journal of a lower epoch can replace runs. Writes nothing if no process compiles
    and the next compiler gets an epoch above ``above`` anyway.
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
