"""What every room works with: the store, the catalog, time, ids, randomness and settings.

:class:`Context` is an open home without its public methods. :class:`Wakeups` wakes readers in the
same process after a commit; a reader that misses a wakeup finds the events by polling.
:class:`Spans` is how the log reports its steps to a tracer. The log knows nothing else about
tracing.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from tidelog.catalog.base import Catalog
from tidelog.clock import Clock, Ids
from tidelog.concurrency import Flag, NoProcesses, Processes, TaskRunner
from tidelog.identity import HomeIdentity
from tidelog.model.times import Backoff
from tidelog.settings import LogSettings, Settings, config_string
from tidelog.store.base import Store
from tidelog.store.wrappers import Meter

__all__ = [
    "Context",
    "NoSpans",
    "OpenContext",
    "Spans",
    "Wakeups",
]

_NOTHING = nullcontext()


class Spans(Protocol):
    """Opens spans. A span's name says what happens in it, such as ``tidelog.upload``."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        """Returns a context manager that runs its body inside a span.

        The parent is the current span of this thread. ``links`` are the requests that the work is
        for, as the tracer knows them.
        """
        ...


class NoSpans:
    """The spans of a process without a tracer: does nothing."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        return _NOTHING


_: type[Spans] = NoSpans


class Wakeups:
    """The readers of this process that wait for new events, by topic."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Flag]] = {}
        self._listeners: list[Callable[[str, int, int], None]] = []
        self._amended: Counter[str] = Counter()
        self._newest: dict[tuple[str, int], int] = {}  # incarnation and partition → next offset
        self._lock = threading.Lock()

    def wait_on(self, incarnation: str, flag: Flag) -> None:
        """Sets ``flag`` at each commit to the topic, until :meth:`forget`."""
        with self._lock:
            self._waiting.setdefault(incarnation, []).append(flag)

    def forget(self, incarnation: str, flag: Flag) -> None:
        with self._lock:
            waiting = self._waiting.get(incarnation, [])
            if flag in waiting:
                waiting.remove(flag)

    def listen(self, listener: Callable[[str, int, int], None]) -> None:
        """Calls ``listener(incarnation, partition, next offset)`` after each commit."""
        self._listeners.append(listener)

    def committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """Wakes every reader that waits for the topic."""
        with self._lock:
            key = (incarnation, partition)
            self._newest[key] = max(next_offset, self._newest.get(key, 0))
            waiting = list(self._waiting.get(incarnation, ()))
        for flag in waiting:
            flag.set()
        for listener in self._listeners:
            listener(incarnation, partition, next_offset)

    def newest(self, incarnation: str, partition: int) -> int:
        """Returns the end of what this process has committed to a partition; 0 if nothing."""
        return self._newest.get((incarnation, partition), 0)

    def amended(self, incarnation: str) -> None:
        """Notes that this process amended events of a topic."""
        with self._lock:
            self._amended[incarnation] += 1

    def amendments(self, incarnation: str) -> int:
        """Returns how many amendments this process made to a topic.

        When the number has grown, everything read before that is stale.
        """
        return self._amended[incarnation]


def _ignore(topic: str) -> None:
    """Does nothing: no notifier runs in this process."""


@dataclass(frozen=True)
class Context:
    """An open home: its store, catalog and identity, and the outside world as it sees it."""

    store: Store
    catalog: Catalog
    clock: Clock
    ids: Ids
    random: random.Random
    log_settings: LogSettings = field(default_factory=LogSettings)
    backoff: Backoff = field(default_factory=Backoff)
    wakeups: Wakeups = field(default_factory=Wakeups)
    processes: Processes = field(default_factory=NoProcesses)
    spans: Spans = field(default_factory=NoSpans)
    identity: HomeIdentity = field(default_factory=HomeIdentity)
    commits_at_once: int = 1  # commits of one flush that run in parallel, one per partition
    environ: Mapping[str, str] = field(default_factory=dict)  # the environment of the process
    meter: Meter = field(default_factory=Meter)  # of the store: requests, bytes, time
    settings: Settings | None = None  # the settings that opened it; None in tests
    watch: Callable[[str], None] = _ignore  # starts notifications for a topic
    tasks: TaskRunner | None = None  # does heavy work ahead; None: all is done in this process

    @property
    def home_id(self) -> str:
        """Returns the id of the home; empty for a context that a test assembled."""
        return self.identity.id

    @property
    def config(self) -> str:
        """Returns the config string, which opens this home anywhere. It contains no secrets."""
        return config_string(self.store.url, self.catalog.url)

    def close(self) -> None:
        """Closes the catalog's connections. Idempotent."""
        self.catalog.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# Opens the home in the process that calls it, such as a Spark worker.
OpenContext = Callable[[], AbstractContextManager[Context]]
