"""What clients used, on its way to the home: when each token, and on request how often each topic.

Requests only change a number in memory. Once a minute a thread stores what has changed since; what
a crash loses is the last minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tidelog.context import Context
from tidelog.coordination.actions import record_action
from tidelog.coordination.tokens import note_uses

__all__ = ["USAGE_S", "ClientUsage"]

USAGE_S = 60.0  # after which it is stored
_READS_MAX = 5_000  # kinds of reads in one minute; others are counted together
Read = tuple[str, str, str]  # who, the operation, the topic

_OTHERS: Read = ("others", "read", "")


class ClientUsage:
    """Counts reads, and stores them beside the times at which tokens were used."""

    def __init__(self, context: Context, audit_reads: bool) -> None:
        self._context = context
        self._audit_reads = audit_reads
        self._reads: Counter[Read] = Counter()

    def read(self, who: str, operation: str, topic: str) -> None:
        """Note that something was read."""
        if not self._audit_reads:
            return
        key = (who, operation, topic)
        if len(self._reads) >= _READS_MAX and key not in self._reads:
            key = _OTHERS
        self._reads[key] += 1

    def take_reads(self) -> Mapping[Read, int]:
        """Return what was read since the last call; call it where :meth:`read` is called."""
        taken, self._reads = self._reads, Counter()
        return taken

    def store(self, uses: Mapping[str, int], reads: Mapping[Read, int]) -> None:
        """Store when tokens were used, and what was read. Blocks."""
        note_uses(self._context, uses)
        for (who, operation, topic), count in sorted(reads.items()):
            note = f"{operation}, {count} requests"
            record_action(self._context, "read", f"topic {topic}" if topic else "home", note, who)
