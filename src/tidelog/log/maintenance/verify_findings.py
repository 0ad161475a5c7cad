"""What a verification has read and found so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.partition_rows import Run
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo, check_key

__all__ = ["FINDINGS_MAX", "Finding", "Severity", "VerifyTally"]

Severity = Literal["error", "warning", "note"]

# The limit for each severity. All findings are counted, and the report says how many were cut. An
# error or a warning may name the only copy of events, which a person needs to know before accepting
# its loss.
FINDINGS_MAX: dict[Severity, int] = {"error": 100_000, "warning": 100_000, "note": 1_000}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that a person may want to know."""

    severity: Severity
    where: str
    what: str


@dataclass
class VerifyTally:
    """Builds the report."""

    context: Context
    topic: Topic
    objects: dict[str, ObjectInfo]  # of the topic, as first listed
    progress: Callable[[int], None] | None
    named: set[str] = field(default_factory=set)  # objects
    healthy: set[Run] = field(default_factory=set)  # that tasks have read
    uses: dict[int, set[str]] = field(default_factory=dict)  # objects each partition names or lists
    nexts: dict[int, int] = field(default_factory=dict)  # of each partition, when it was read
    starts: dict[int, int] = field(default_factory=dict)  # the same
    floor: int = 0  # the highest of all heads
    runs: int = 0
    journals: int = 0
    events: int = 0
    bytes: int = 0
    amendments: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[Severity, int] = field(
        default_factory=lambda: {"error": 0, "warning": 0, "note": 0}
    )

    def add(self, severity: Severity, where: str, what: str) -> None:
        """Adds a finding."""
        self.counts[severity] += 1
        if self.counts[severity] <= FINDINGS_MAX[severity]:
            self.findings.append(Finding(severity, where, what))

    @property
    def cut(self) -> dict[Severity, int]:
        """Returns how many findings of each severity were counted but not kept; omits zeros."""
        over = {each: count - FINDINGS_MAX[each] for each, count in self.counts.items()}
        return {each: count for each, count in over.items() if count > 0}

    def name(self, partition: int, key: str) -> None:
        """Notes that a row of a partition names an object."""
        self.named.add(key)
        self.uses.setdefault(partition, set()).add(key)

    def list_unused(self, partition: int, keys: Iterable[str]) -> None:
        """Notes that a row of a partition lists objects as unused."""
        self.uses.setdefault(partition, set()).update(keys)

    def owns(self, key: str) -> bool:
        """Returns whether a key can be that of an object of the topic."""
        try:
            check_key(key)
        except InvalidError:
            return False
        return key.startswith(f"topics/{self.topic.incarnation}/")

    def size_of(self, key: str) -> int:
        """Returns the size of an object, even if it is newer than the listing.

        ``NotFoundError``.
        """
        info = self.objects.get(key)
        return self.context.store.head(key).size if info is None else info.size
