"""Whether what a playback has found in the catalog still stands.

Journals may take the place of runs at any time. Events stay where they are, and so do their times;
but rows go, new ones may stand before the time that was reached, and objects are swept later. Each
swap raises the head's ``compiled``. So a playback notes it before it reads rows, and compares it
after each read, before anything rests on what was read: as long as it is the same, so is the list
of runs. When it has changed, the playback is opened again after the last event that is out, which
is what a resume does.

Amendments are read when a run is loaded, and ``compiled`` and the start are compared after that: an
amendment's row goes only after a swap whose journal has it, or a trim beyond its offset.
"""

from __future__ import annotations

from tidelog.errors import ConflictError
from tidelog.log.amended import NO_AMENDMENTS, Amendments, all_pending, are_pending
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model.run import Head
from tidelog.model.topic import Topic

__all__ = ["Standing", "SwappedError"]

_RECENT_S = 1.0  # a head this old still tells of amendments; those that came later need not show


class SwappedError(ConflictError):
    """Journals took the place of runs that a playback had found: open it where it stands."""


class Standing:
    """The heads of a topic as a playback found them. Safe to share between threads."""

    def __init__(self, log: Log, topic: Topic) -> None:
        self.log = log
        self.topic = topic
        self._compiled: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._recent: dict[int, tuple[Head, float]] = {}

    def note(self, partition: int) -> Head:
        """To be called before any row of a partition is read."""
        head = self._read(partition)
        self._compiled[partition] = head.compiled
        self._starts[partition] = head.start
        return head

    def check(self, partition: int) -> Head:
        """The head as it is now. ``SwappedError`` when something was compiled since it was noted.

        ``NotFoundError`` when the topic was deleted.
        """
        return self._compared(partition, self._read(partition))

    def recent(self, partition: int) -> Head:
        """The head as it was a moment ago, after the playback had begun. Raises as ``check``."""
        head, read_s = self._recent[partition]
        if self.log.clock.monotonic_s() - read_s > _RECENT_S:
            return self.check(partition)
        return self._compared(partition, head)  # another thread may have met the swap

    def amendments(self, partition: int, start: int, end: int, head: Head) -> Amendments:
        """Those of ``[start, end)`` that are in no journal which was found.

        ``head`` is a recent one, or a newer. ``SwappedError`` when they may not be all.
        """
        found = NO_AMENDMENTS
        if are_pending(head, start, end):
            found = all_pending(self.log, self.topic, partition, head, start, end)
            head = self.check(partition)
        if head.start > max(start, self._starts[partition]):
            raise SwappedError(
                f"partition `{self.topic.name}/{partition}`: was trimmed while it was played: "
                "play again"
            )
        return found

    def _compared(self, partition: int, head: Head) -> Head:
        if head.compiled != self._compiled[partition]:
            raise SwappedError(
                f"partition `{self.topic.name}/{partition}`: was compiled while it was played: "
                "play again"
            )
        return head

    def _read(self, partition: int) -> Head:
        read_s = self.log.clock.monotonic_s()
        head, _ = read_head(self.log, self.topic, partition)
        self._recent[partition] = (head, read_s)
        return head
