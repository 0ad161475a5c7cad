"""What a member reads from one partition under one lease, and how far it has delivered."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.log.reader.partition_reader import OffsetEvents, Pace, Reader

__all__ = ["Intake", "Mark"]

Mark = tuple[int, int, bool]
"""The state of an intake: position, delivered, moved."""


class Intake:
    """What a member reads from one partition under one lease, and how far it has delivered.

    It belongs to one epoch of the lease. If the member loses the lease and takes it again, it gets
    a new intake that starts at the lease's cursor. No position carries over.
    """

    def __init__(self, reader: Reader, position: int, epoch: int) -> None:
        self.epoch = epoch  # of the lease under which it reads
        self.position = position  # the next offset to deliver
        self.delivered = position  # the same, without the erased offsets that were skipped since
        self.moved = False  # by a seek, so that a commit is due even if it went back
        self.pace = Pace()
        self._reader = reader
        self._coming: Iterator[OffsetEvents] | None = None
        self._stretch: OffsetEvents | None = None

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
        """Returns the current state, for :meth:`restore`."""
        return self.position, self.delivered, self.moved

    def restore(self, mark: Mark) -> None:
        """Goes back to an earlier state: what was taken since comes again."""
        self.rewind(mark[0])
        self.delivered, self.moved = mark[1:]

    def committed(self) -> None:
        """Notes that the cursor is at the position."""
        self.delivered, self.moved = self.position, False

    def seek(self, position: int) -> None:
        """Continues from this position, forward or back; the next commit stores it."""
        self.rewind(position)
        self.moved = True

    def rewind(self, position: int) -> None:
        """Delivers again from this position on, without moving the cursor."""
        self.position = self.delivered = position
        self._coming, self._stretch = None, None
        self.pace.hurry()

    def _next(self) -> OffsetEvents | None:
        """Returns what follows in the current page, or in a new one."""
        found = None if self._coming is None else next(self._coming, None)
        if found is None:
            self._coming = self._reader.stretches(self.position)
            found = next(self._coming, None)
        if found is None:
            self._coming = None
        return found
