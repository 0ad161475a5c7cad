"""When a source partition is due: by size or by age, whichever comes first.

Wall clocks only decide how much goes into a range, never what is in it; so any policy archives each
event once. Pure but for the clock that it is asked with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelog.errors import InvalidError
from tidelog.sources.base import SourcePartition

__all__ = ["Due", "Policy"]

_FIRST_GUESS_BYTES = 500  # of an event, before any was seen


@dataclass(frozen=True, slots=True)
class Policy:
    """How large and how old a file may get before it is laid down."""

    max_bytes: int = 200_000_000  # of events as they came, for each source partition
    max_age_ms: int = 3_600_000  # since the first event that waits was seen

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_age_ms < 1:
            raise InvalidError(
                f"policy: max_bytes is {self.max_bytes} and max_age {self.max_age_ms} ms: "
                "give more than 0"
            )


@dataclass
class Due:
    """Remembers since when events wait, and how large they are."""

    policy: Policy
    _since_s: dict[SourcePartition, float] = field(default_factory=dict)
    _event_bytes: float = _FIRST_GUESS_BYTES

    def is_due(self, partition: SourcePartition, waiting: int, now_s: float) -> bool:
        """Whether a partition with this many events waiting shall be done now."""
        if waiting <= 0:
            self._since_s.pop(partition, None)
            return False
        since_s = self._since_s.setdefault(partition, now_s)
        if waiting * self._event_bytes >= self.policy.max_bytes:
            return True
        return (now_s - since_s) * 1000 >= self.policy.max_age_ms

    def done(self, partition: SourcePartition, events: int, size: int) -> None:
        """Learn from a range that was committed."""
        self._since_s.pop(partition, None)
        if events and size:
            self._event_bytes = 0.7 * self._event_bytes + 0.3 * size / events

    def events_max(self) -> int:
        """How many events make one range of the wanted size."""
        return max(1_000, int(self.policy.max_bytes / self._event_bytes))
