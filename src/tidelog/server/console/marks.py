"""Which events of a page were amended: updated, or deleted and still to be compiled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidelog.log.base import Log
from tidelog.model.topic import Topic

__all__ = ["Mark", "read_marks"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What became of an event."""

    kind: Literal["update", "delete"]
    at_ms: int = 0


def read_marks(
    log: Log, topic: Topic, partition: int, start: int, end: int
) -> dict[tuple[int, int], Mark]:
    """The amendments of ``[start, end)``, by partition and offset."""
    return {}
