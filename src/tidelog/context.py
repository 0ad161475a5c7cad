"""The context: what every room works with, from the store and the catalog to time and ids.

:class:`Context` is one open home without its public methods. :class:`Wakeups` wakes readers of the
same process after a commit; a reader that misses a wakeup finds the events by polling.
:class:`Spans` is how the log reports its steps to a tracer, of which it knows nothing else.
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
from tidelog.model.backoff import Backoff
from tidelog.model.home import HomeIdentity
from tidelog.process import NoProcesses, Processes
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
    """Opens spans; a name says what is done, such as ``tidelog.upload``."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        """A span around what is done in a ``with``, inside the one that this thread is in.

        ``links`` are the requests that it is done for, as whoever put them there knows them.
        """
        ...


class NoSpans:
    """Nobody traces."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        return _NOTHING


_: type[Spans] = NoSpans


class Wakeups:
    """Who waits for which topic."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[threading.Event]] = {}
        self._listeners: list[Callable[[str, int, int], None]] = []
        self._amended: Counter[str] = Counter()
        self._newest: dict[tuple[str, int], int] = {}  # incarnation and partition → next offset
        self._lock = threading.Lock()

    def wait_on(self, incarnation: str, event: threading.Event) -> None:
        """Let ``event`` be set at each commit to the topic, until :meth:`forget`."""
        with self._lock:
            self._waiting.setdefault(incarnation, []).append(event)

    def forget(self, incarnation: str, event: threading.Event) -> None:
        with self._lock:
            waiting = self._waiting.get(incarnation, [])
            if event in waiting:
                waiting.remove(event)

    def listen(self, listener: Callable[[str, int, int], None]) -> None:
        """Call ``listener(incarnation, partition, next offset)`` after each commit."""
        self._listeners.append(listener)

    def committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """Tell all who wait."""
        with self._lock:
            key = (incarnation, partition)
            self._newest[key] = max(next_offset, self._newest.get(key, 0))
            waiting = list(self._waiting.get(incarnation, ()))
        for event in waiting:
            event.set()
        for listener in self._listeners:
            listener(incarnation, partition, next_offset)

    def newest(self, incarnation: str, partition: int) -> int:
        """The end of what this process has committed to a partition; 0 for nothing."""
        return self._newest.get((incarnation, partition), 0)

    def amended(self, incarnation: str) -> None:
        """Events of a topic were amended, here."""
        with self._lock:
            self._amended[incarnation] += 1

    def amendments(self, incarnation: str) -> int:
        """How often that was told; what was read before it last grew is old."""
        return self._amended[incarnation]


def _ignore(topic: str) -> None:
    """Do nothing: no notifier runs in this process."""


@dataclass(frozen=True)
class Context:
    """An open home: its store and catalog, its identity, and what comes from outside."""

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
    standing: HomeIdentity = field(default_factory=HomeIdentity)
    commits_at_once: int = 1  # partitions of one flush; more where a commit is a round trip
    environ: Mapping[str, str] = field(default_factory=dict)  # of the process
    meter: Meter = field(default_factory=Meter)  # of the store: requests, bytes, time
    configuration: Settings | None = None  # by which it was opened; None: it was put together
    watch: Callable[[str], None] = _ignore  # notify about a topic that this process commits to

    @property
    def home_id(self) -> str:
        """The id of the home; empty in a context that was put together."""
        return self.standing.id

    @property
    def config(self) -> str:
        """The config string: all that is needed to open this home elsewhere; no secrets."""
        return config_string(self.store.url, self.catalog.url)

    def close(self) -> None:
        """Close the catalog's connections. Idempotent."""
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


OpenContext = Callable[[], AbstractContextManager[Context]]  # in the process that calls it
