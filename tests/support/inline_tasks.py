"""A task runner in this process: pickles what Spark would send, and can lose some of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tidelog.concurrency import TaskRunner
from tidelog.errors import TidelogError
from tidelog.store import shared_store


class InlineTasks:
    """Runs items at once, and counts them by function."""

    def __init__(self, *, twice: bool = False, lose: bool = False) -> None:
        """``twice`` runs each item a second time, and ``lose`` loses every other result."""
        self.parallelism = 2
        self.done: dict[str, int] = {}
        self._twice = twice
        self._lose = lose
        shared_store.cache_clear()  # a folder of an earlier test may have had the same name

    def run(
        self,
        title: str,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        size: Callable[[Any], int],
    ) -> Iterator[tuple[Any, Any]]:
        name = getattr(function, "func", function).__name__
        given = list(items)
        found = []
        for number, item in enumerate(given):
            assert size(item) >= 0
            sent, work = pickle.loads(pickle.dumps((function, item)))
            try:
                for _ in range(1 + self._twice):
                    outcome = pickle.loads(pickle.dumps(sent(work)))
            except TidelogError:
                continue
            self.done[name] = self.done.get(name, 0) + 1
            if not (self._lose and number % 2):
                found.append((item, outcome))
        yield from found


_: type[TaskRunner] = InlineTasks
