"""What a member reads from one partition, and how far it has delivered."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.log.read import Reader, Stretch

__all__ = ["Intake"]


class Intake:
    """What a member reads from one partition, and how far it has delivered."""

    def __init__(self, reader: Reader, position: int, epoch: int) -> None:
        self.epoch = epoch  # of the lease under which it reads
        self.position = position  # the next offset to deliver
        self.moved = False  # by a seek, so that a commit is due also when it went back
        self._reader = reader
        self._coming: Iterator[Stretch] = iter(())
        self._stretch: Stretch | None = None
        self._is_new = True

    def take(self, count: int) -> Stretch | None:
        """Up to ``count`` events; None when there are none now. ``NotFoundError`` if trimmed."""
        if self._is_new:
            self._reader.check_start(self.position)
            self._is_new = False
        if self._stretch is None or self.position >= self._stretch.end:
            self._stretch = next(self._coming, None)
            if self._stretch is None:
                self._coming = self._reader.stretches(self.position)
                self._stretch = next(self._coming, None)
        if self._stretch is None:
            return None
        part = self._stretch.slice(self.position, self.position + count)
        self.position = part.end
        return part

    def seek(self, position: int) -> None:
        """Go on from here, forward or back; the next commit stores it."""
        self.rewind(position)
        self.moved = True
        self._is_new = True

    def rewind(self, position: int) -> None:
        """Deliver again from here on; the cursor stays where it is."""
        self.position = position
        self._coming, self._stretch = iter(()), None
