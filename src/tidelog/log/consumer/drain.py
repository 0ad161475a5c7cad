"""Reading as a member of a consumer until everything is read, batch by batch.

A batch is committed after it was handled, so after a crash the last events may come again, and none
is missing. A run ends when no partition has events left. Partitions whose member died are waited
for until their leases expire; partitions that a living member holds are left to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.event import Event

__all__ = ["DrainOptions", "LostOffsets", "accept_loss", "drain"]

_WAIT_S = 0.5  # how soon a stop is seen while there are no events
_PATIENCE = 1.5  # lease durations, after which the lease of a dead member was taken over


@dataclass(frozen=True, slots=True)
class LostOffsets:
    """Events of a partition that were trimmed before the consumer read them."""

    partition: int
    cursor: int
    start: int  # the first offset that is left


@dataclass
class DrainOptions:
    """How a consumer is read."""

    follow: bool = False  # wait for more events until ``stop`` is set
    max_events: int | None = None  # end after this many; None: no limit
    max_batch: int = 1_000  # events between two commits
    accept_loss: bool = False  # skip events that were trimmed before they were read
    stop: threading.Event = field(default_factory=threading.Event)
    on_open: Callable[[Consumer], None] = lambda _: None  # called before the first poll
    on_loss: Callable[[LostOffsets], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.max_batch < 1 or (self.max_events is not None and self.max_events < 1):
            raise InvalidError("consume: max_batch and max_events: give 1 or more")


def drain(
    open_member: Callable[[], Consumer],
    handle: Callable[[list[Event]], object],
    how: DrainOptions,
) -> int:
    """Calls ``handle`` with each batch and commits it; returns how many events were handled.

    Raises ``NotFoundError`` for events that were trimmed before they were read, unless
    ``accept_loss``. An error of ``handle`` is raised, and its batch comes again.
    """
    run = _Drain(handle, how)
    lost: NotFoundError | None = None
    while True:
        # After a loss a new member joins: it begins at its cursors in all partitions.
        with open_member() as consumer:
            if lost is None:
                how.on_open(consumer)
            try:
                if lost is not None and (skipped := accept_loss(consumer, lost)):
                    how.on_loss(skipped)
                run.drain(consumer)
                return run.events
            except NotFoundError as exc:
                if not how.accept_loss or "cursor" not in exc.context:
                    raise
                lost = exc


def accept_loss(consumer: Consumer, lost: NotFoundError) -> LostOffsets | None:
    """Moves a cursor to the first event that is left; returns what is lost.

    Returns None if another member has accepted the loss and read on: its cursor stays. Also if
    another member has the partition now, or more was trimmed since: the next read says so.
    """
    found = LostOffsets(*(lost.context[name] for name in ("partition", "cursor", "start")))
    if (consumer.lag()[found.partition].cursor or 0) >= found.start:
        return None
    try:
        consumer.seek(found.partition, found.start)
        consumer.commit()
    except (InvalidError, FencedError):
        return None
    return found


class _Drain:
    """Counts what was handled, over all members that one call opens."""

    def __init__(self, handle: Callable[[list[Event]], object], how: DrainOptions) -> None:
        self._handle = handle
        self._how = how
        self.events = 0

    def drain(self, consumer: Consumer) -> None:
        """Polls, handles and commits until everything is read."""
        clock = consumer.context.clock
        patience_s = _PATIENCE * consumer.context.settings.lease_ttl_ms / 1000
        joined_s = clock.monotonic_s()
        wait_s = _WAIT_S if self._how.follow else 0.0
        is_last_look = False  # one more after all patience, as this process may have stalled
        while not self._how.stop.is_set() and self.events != self._how.max_events:
            events = consumer.poll(self._room(), wait_s)
            if events:
                self._handle(events)
                # A partition that another member has now is read again by that one.
                with contextlib.suppress(FencedError):
                    consumer.commit()
                self.events += len(events)
                is_last_look = False
            elif not self._how.follow:
                behind = {each.partition for each in consumer.lag() if each.events}
                if not behind or (is_last_look and behind.isdisjoint(consumer.partitions())):
                    return
                is_last_look = clock.monotonic_s() - joined_s > patience_s
                wait_s = _WAIT_S

    def _room(self) -> int:
        if self._how.max_events is None:
            return self._how.max_batch
        return min(self._how.max_batch, self._how.max_events - self.events)
