"""Who used the home: when each token was used, and on request how often each topic.

Requests only change a number in memory. Once a minute a thread stores what has changed since; what
a crash loses is the last minute. What a catalog that is out of reach refuses is stored with the
next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tidelog.context import Context
from tidelog.coordination.audit import record_action
from tidelog.coordination.tokens import note_uses

__all__ = ["USAGE_S", "ClientUsage", "Read"]

USAGE_S = 60.0  # after which it is stored
_READS_MAX = 5_000  # kinds of reads in one minute; others are counted together
Read = tuple[str, str, str]  # who, the operation, what it reads

_OTHERS: Read = ("others", "read", "home")


class ClientUsage:
    """Counts reads, and stores them beside the times at which tokens were used."""

    def __init__(self, context: Context, audit_reads: bool) -> None:
        self._context = context
        self._audit_reads = audit_reads
        self._reads: Counter[Read] = Counter()

    def read(self, who: str, operation: str, what: str = "home") -> None:
        """Counts a read of something, such as ``topic orders``."""
        if self._audit_reads:
            self._count((who, operation, what), 1)

    def _count(self, key: Read, count: int) -> None:
        if len(self._reads) >= _READS_MAX and key not in self._reads:
            key = _OTHERS
        self._reads[key] += count

    def take_reads(self) -> dict[Read, int]:
        """Returns the reads since the last call. Call it in the thread that calls :meth:`read`."""
        taken, self._reads = self._reads, Counter()
        return taken

    def put_back(self, reads: Mapping[Read, int]) -> None:
        """Counts reads that could not be stored; in the same thread as :meth:`take_reads`."""
        for key, count in reads.items():
            self._count(key, count)

    def store(self, uses: Mapping[str, int], reads: dict[Read, int]) -> None:
        """Stores when tokens were used, and what was read. Blocks.

        Removes from ``reads`` what is stored; if it raises, the rest is left.
        """
        note_uses(self._context, uses)
        for key in sorted(reads):
            who, operation, what = key
            note = f"{operation}, {reads[key]} request{'' if reads[key] == 1 else 's'}"
            record_action(self._context, "read", what, note, who)
            del reads[key]
