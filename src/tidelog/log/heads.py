"""Changing a partition's head against other writers, where a change only grows or narrows."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.catalog.base import Put
from tidelog.context import Context
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.backoff import Backoff
from tidelog.model.partition_rows import Head, encode_row
from tidelog.model.topic import Topic

__all__ = ["RACE", "raise_head"]

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
