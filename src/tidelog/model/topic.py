"""A topic as the registry stores it, and the partition of a key."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from tidelog.errors import InvalidError
from tidelog.model import defaults, limits
from tidelog.model.decoding import Persisted
from tidelog.model.times import duration_ms

__all__ = ["Topic", "check_topic_name", "partition_for"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Topic(Persisted, frozen=True):
    """A named log of events in partitions, in one incarnation."""

    name: str
    incarnation: str
    partitions: int
    created_ms: int
    slot_ms: int = duration_ms(defaults.TOPIC_SLOT)  # resolution of the time index
    generation: int = 0  # of new segments; raised by sweeps
    state: Literal["creating", "ready", "deleting"] = "creating"
    notify: tuple[str, ...] = ()  # where notifications go
    max_latency_ms: int = defaults.NOTIFY_LATENCY_MS  # between two notifications of a partition
    home: str = ""  # that created it, and alone sends its notifications; empty: unknown

    def check_partition(self, partition: int) -> None:
        """Raises ``InvalidError`` for a partition that does not exist."""
        if not 0 <= partition < self.partitions:
            raise InvalidError(
                f"topic `{self.name}`: has no partition {partition}: {self.partitions_hint()}"
            )

    def partitions_hint(self) -> str:
        """Returns what an error says about the partitions that exist."""
        return "it has only 0" if self.partitions == 1 else f"give 0 to {self.partitions - 1}"


def check_topic_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that is unsafe in a path, a URL or a shell."""
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"topic name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, "
            "`.`, `_` or `-`, beginning with a letter, a digit or `_`"
        )


def partition_for(key: bytes, partitions: int) -> int:
    """Returns ``int(sha256(key)) mod partitions``, which never changes."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big") % partitions
