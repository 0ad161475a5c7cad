"""What every part of the log works with: the two substrates, time, ids and settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tidelog.catalog.base import Catalog
from tidelog.clock import Clock, Ids
from tidelog.errors import InvalidError
from tidelog.log.process import NoProcesses, Processes
from tidelog.log.spans import NoSpans, Spans
from tidelog.log.wakeups import Wakeups
from tidelog.model import limits
from tidelog.model.backoff import Backoff
from tidelog.model.standing import Standing
from tidelog.store.base import Store

__all__ = ["Log", "LogSettings", "OpenLog"]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the log behaves; plain values."""

    linger_ms: int = 5  # how long a producer collects events before it flushes
    segment_bytes: int = 8 << 20  # a flush of this size does not wait longer
    buffer_bytes: int = 64 << 20  # what a producer holds at most; a full one blocks
    event_bytes_max: int = limits.EVENT_BYTES_MAX  # larger events are refused
    lease_ttl_ms: int = 10_000  # a consumer that is silent this long loses its leases
    max_poll_interval_ms: int = 300_000  # a handler slower than this loses its leases

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < (0 if name == "linger_ms" else 1):
                raise InvalidError(f"setting {name}: is {getattr(self, name)}: give more than that")
        if self.segment_bytes > self.buffer_bytes:
            raise InvalidError(
                f"settings segment_bytes {self.segment_bytes} and buffer_bytes {self.buffer_bytes} "
                "contradict each other: a buffer holds at least one segment"
            )
        if self.event_bytes_max > min(self.buffer_bytes, limits.EVENT_BYTES_CEILING):
            raise InvalidError(
                f"setting event_bytes_max: is {self.event_bytes_max}: at most buffer_bytes, "
                f"and at most {limits.EVENT_BYTES_CEILING}"
            )


@dataclass(frozen=True)
class Log:
    """The substrates of one home, with what comes from outside."""

    store: Store
    catalog: Catalog
    clock: Clock
    ids: Ids
    random: random.Random
    settings: LogSettings = field(default_factory=LogSettings)
    backoff: Backoff = field(default_factory=Backoff)
    wakeups: Wakeups = field(default_factory=Wakeups)
    processes: Processes = field(default_factory=NoProcesses)
    spans: Spans = field(default_factory=NoSpans)
    standing: Standing = field(default_factory=Standing)
    commits_at_once: int = 1  # partitions of one flush; more where a commit is a round trip


OpenLog = Callable[[], AbstractContextManager[Log]]  # in the process that calls it
