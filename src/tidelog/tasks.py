"""Lets other processes do heavy work ahead: how maintenance uses a cluster.

Verification, proofs, searches and rewrites read far more than they change. With a
:class:`TaskRunner` they work in two passes:

1. tasks do ahead whatever needs only the store: read and check the files of a range, search an
   object, stage a file without erased events
2. the caller does its work as it does without a runner, and uses what a task has done. What no task
   could do, and what has changed since, the caller does itself

So results are the same with and without a runner, tasks may run twice or die, and only the caller
writes to the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

__all__ = ["TaskRunner"]

T = TypeVar("T")
R = TypeVar("R")


class TaskRunner(Protocol):
    """Runs a function on many items, in other processes."""

    @property
    def parallelism(self) -> int:
        """Returns how many calls run at once."""
        ...

    def run(
        self, title: str, function: Callable[[T], R], items: Iterable[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        """Yields items with what the function returned for them, in order.

        Omits an item if the function raised for it, so that the caller does it and gets the error
        itself. Raises ``UnavailableError`` if the store cannot be reached or jobs keep failing, and
        ``InvalidError`` if the other processes cannot work, such as without Tidelog.

        ``function`` and items pickle. A call may be repeated and its first result lost, so it
        changes nothing, adds objects under new names, or is idempotent. ``title`` says what it is
        for, and ``size`` how many bytes an item reads.
        """
        ...
