"""Which events a handler gets, and when: by type, by share, and not before they are old enough.

A share is one of n consumers that each take a part of the events, with a cursor of its own: for
handlers that must run side by side on keys of one partition. Members of one consumer share
partitions instead, and need nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tidelog.errors import InvalidError
from tidelog.model.event import Event

__all__ = ["Share", "until_young"]

_FNV_BASE = 0x811C9DC5
_FNV_PRIME = 0x01000193
_WAIT_S_MAX = 1.0  # other partitions may have older ones by then


@dataclass(frozen=True, slots=True)
class Share:
    """Share ``number`` of ``of``, counted from 0: events whose hash falls to it."""

    number: int
    of: int
    by: Literal["key", "id", "type"] = "key"

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise InvalidError(f"share {self.number} of {self.of}: give 0 to {self.of - 1}")
        if self.by not in ("key", "id", "type"):
            raise InvalidError(f"share by `{self.by}`: give key, id or type")

    def has(self, event: Event) -> bool:
        """Whether an event falls to this share; one without a key, id or type to the first."""
        value = getattr(event, self.by)
        if value is None:
            return self.number == 0
        return fnv1(value if isinstance(value, bytes) else value.encode()) % self.of == self.number

    def name(self, base: str) -> str:
        """What this share's consumer is called, so that each has a cursor: ``base_1_of_3``."""
        return f"{base}_{self.number + 1}_of_{self.of}"


def fnv1(data: bytes) -> int:
    """The 32-bit hash by which reflex shares events out."""
    found = _FNV_BASE
    for byte in data:
        found = (found * _FNV_PRIME & 0xFFFFFFFF) ^ byte
    return found


def until_young(
    events: Sequence[Event], old_ms: int, rewind: Callable[[int, int], None]
) -> tuple[list[Event], float]:
    """Those up to the first of each partition that is younger; the rest is rewound to.

    Where none is old enough, also for how many seconds to wait before looking again.
    """
    young: dict[int, int] = {}
    old: list[Event] = []
    for event in events:
        partition, time_ms = event.partition or 0, event.timestamp
        if partition in young:
            continue
        if isinstance(time_ms, int) and time_ms > old_ms:
            young[partition] = time_ms
            rewind(partition, event.offset or 0)
        else:
            old.append(event)
    if old or not young:
        return old, 0.0
    return old, min(_WAIT_S_MAX, (min(young.values()) - old_ms) / 1000)
