"""Delivery: what a member reads under its leases, and what of it the caller has got.

A commit moves a cursor over what was delivered, and over nothing else. What a poll has read but
could not return, and what an iteration has not yielded, is delivered again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from tidelog.log.partition_reader import OffsetEvents, Pace, Reader
from tidelog.model.event import Event, check_whole

__all__ = ["LeaseReader", "all_or_nothing", "one_by_one"]

Saved = tuple[int, int, bool, int | None]
"""The state of a lease reader: position, delivered, moved, pending."""


class LeaseReader:
    """What a member reads from one partition under one lease, and how far it has delivered.

    It belongs to one epoch of the lease. If the member loses the lease and takes it again, it gets
    a new one that starts at the lease's cursor. No position carries over.
    """

    def __init__(self, reader: Reader, position: int, epoch: int) -> None:
        self.epoch = epoch  # of the lease under which it reads
        self.position = position  # the next offset to deliver
        self.delivered = position  # the same, without the erased offsets that were skipped since
        self.moved = False  # by a seek, so that a commit is due even if it went back
        # The first event that was read but that an iteration has not yielded yet (``one_by_one``).
        self.pending: int | None = None
        self.pace = Pace()
        self._reader = reader
        self._coming: Iterator[OffsetEvents] | None = None
        self._stretch: OffsetEvents | None = None

    @property
    def done(self) -> int:
        """Where a commit moves the cursor: the next offset that the caller has not got."""
        return self.position if self.pending is None else self.pending

    def is_reading(self) -> bool:
        """Returns whether something was read ahead, so that more may come without a poll."""
        return self._coming is not None

    def refresh(self) -> None:
        """Drops what was read ahead if amendments were made since.

        Called at the start of a poll.
        """
        if self._coming is not None and self._reader.is_amended():
            self._coming, self._stretch = None, None

    def take(self, count: int) -> OffsetEvents | None:
        """Returns up to ``count`` events; None if there are none now.

        The position skips erased offsets, even if no event follows yet. Raises ``NotFoundError`` if
        the position was trimmed.
        """
        count = check_whole("max_events", count)
        while True:
            if self._stretch is None or self.position >= self._stretch.end:
                self._stretch = self._next()
            if self._stretch is None:
                return None
            part = self._stretch.take(count, self.position)
            self.position = part.end
            if part.batch.num_rows:
                self.delivered = part.end
                return part

    def save(self) -> Saved:
        """Returns the current state, for :meth:`restore`."""
        return self.position, self.delivered, self.moved, self.pending

    def restore(self, saved: Saved) -> None:
        """Goes back to an earlier state: what was taken since comes again."""
        self.rewind(saved[0])
        self.delivered, self.moved, self.pending = saved[1:]

    def committed(self) -> None:
        """Notes that the cursor is where a commit moves it."""
        self.moved = False
        if self.pending is None:
            self.delivered = self.position

    def seek(self, position: int) -> None:
        """Continues from this position, forward or back; the next commit stores it."""
        self.rewind(position)
        self.moved = True

    def rewind(self, position: int) -> None:
        """Delivers again from this position on, without moving the cursor."""
        self.position = self.delivered = check_whole("offset", position)
        self.pending = None
        self._coming, self._stretch = None, None
        self.pace.hurry()

    def put_back(self) -> None:
        """Delivers again what an iteration has not yielded."""
        if self.pending is not None:
            self.rewind(self.pending)

    def _next(self) -> OffsetEvents | None:
        """Returns what follows in the current page, or in a new one."""
        found = None if self._coming is None else next(self._coming, None)
        if found is None:
            self._coming = self._reader.read(self.position)
            found = next(self._coming, None)
        if found is None:
            self._coming = None
        return found


@contextlib.contextmanager
def all_or_nothing(readers: dict[int, LeaseReader]) -> Iterator[None]:
    """Delivers again what a poll has read but could not return, for whatever reason."""
    before = {partition: (each, each.save()) for partition, each in readers.items()}
    try:
        yield
    except BaseException:
        for partition, reader in list(readers.items()):
            known, saved = before.get(partition, (None, (0, 0, False, None)))
            if known is reader:
                reader.restore(saved)
            else:  # of another epoch, or new: it starts at its lease's cursor again
                del readers[partition]
        raise


def one_by_one(events: Sequence[Event], readers: Mapping[int, LeaseReader]) -> Iterator[Event]:
    """Yields the events of a poll. A commit meanwhile covers only those that were yielded.

    The next poll delivers the rest again, after a ``break`` for example. So the iteration skips the
    rest of a partition once a seek, a poll or another lease of that partition came in between.
    Commits are limited from this call on, not from the first event: nothing is passed over if a
    signal handler raises before it.
    """
    coming: dict[int, list[int]] = {}  # the offsets of each partition that follow, in reverse
    for event in reversed(events):
        coming.setdefault(event.partition or 0, []).append(event.offset or 0)
    begun = {partition: readers.get(partition) for partition in coming}
    for partition, reader in begun.items():
        if reader is not None:
            reader.pending = coming[partition][-1]

    def deliver() -> Iterator[Event]:
        for event in events:
            partition = event.partition or 0
            reader = begun[partition]
            if reader is None or readers.get(partition) is not reader:
                continue
            if reader.pending != coming[partition].pop():
                continue
            reader.pending = coming[partition][-1] if coming[partition] else None
            yield event

    return deliver()
