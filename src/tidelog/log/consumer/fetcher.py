"""What a member reads from one partition under one lease, and how far it has delivered."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.log.reader.partition_reader import OffsetEvents, Pace, Reader

__all__ = ["Intake", "Mark"]

Mark = tuple[int, int, bool]
"""Where an intake was: position, delivered, moved."""


class Intake:
    """What a member reads from one partition under one lease, and how far it has delivered.

    It belongs to one epoch of the lease. A lease that was lost and is ours again has another epoch
    and another intake, which begins at the lease's cursor: no position is carried over.
    """

    def __init__(self, reader: Reader, position: int, epoch: int) -> None:
        self.epoch = epoch  # of the lease under which it reads
        self.position = position  # the next offset to deliver
        self.delivered = position  # the same, without what was passed over since as erased
        self.moved = False  # by a seek, so that a commit is due also when it went back
        self.pace = Pace()
        self._reader = reader
        self._coming: Iterator[OffsetEvents] | None = None
        self._stretch: OffsetEvents | None = None

    def is_reading(self) -> bool:
        """Whether something was read ahead, so that more may come without a look."""
        return self._coming is not None

    def refresh(self) -> None:
        """Let go what was read ahead, if amendments were made since; for the start of a poll."""
        if self._coming is not None and self._reader.is_amended():
            self._coming, self._stretch = None, None

    def take(self, count: int) -> OffsetEvents | None:
        """Up to ``count`` events; None when there are none now. ``NotFoundError`` if trimmed.

        The position moves over what was erased, also where no event follows yet.
        """
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

    def mark(self) -> Mark:
        """Where it is now, for :meth:`restore`."""
        return self.position, self.delivered, self.moved

    def restore(self, mark: Mark) -> None:
        """Go back to where it was: what was taken since comes again."""
        self.rewind(mark[0])
        self.delivered, self.moved = mark[1:]

    def committed(self) -> None:
        """The cursor is where the position is."""
        self.delivered, self.moved = self.position, False

    def seek(self, position: int) -> None:
        """Go on from here, forward or back; the next commit stores it."""
        self.rewind(position)
        self.moved = True

    def rewind(self, position: int) -> None:
        """Deliver again from here on; the cursor stays where it is."""
        self.position = self.delivered = position
        self._coming, self._stretch = None, None
        self.pace.hurry()

    def _next(self) -> OffsetEvents | None:
        """What follows in the page that is being read, or in a new one."""
        found = None if self._coming is None else next(self._coming, None)
        if found is None:
            self._coming = self._reader.stretches(self.position)
            found = next(self._coming, None)
        if found is None:
            self._coming = None
        return found
