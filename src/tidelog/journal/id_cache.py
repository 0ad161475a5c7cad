"""Caches the id indexes of a partition's runs and journals in memory.

:class:`PartitionIds` follows the partition's head: it adds new runs, and drops what a compile has
replaced. For each run it keeps only its first offset and its hashes, so a hit reads the run's row.

:class:`MergedIndexes` finds the blocks of events that may have an id. It merges many indexes, so
that a lookup is a few binary searches. Each id takes eight bytes: the half of its hash that indexes
keep (``codec.segment``), and the number of its block. It does no I/O; the caller limits its size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidelog.codec.segment import IdIndex, decode_index, read_index
from tidelog.context import Context
from tidelog.journal.listing import MovedError, covering, read_row
from tidelog.log.run_reader import describe_run
from tidelog.model.topic import Head, Run, Topic
from tidelog.store.fetch import fetch_ahead
from tidelog.store.wrappers import reread

__all__ = [
    "EventBlock",
    "Halves",
    "MergedIndexes",
    "PartitionIds",
]

_AHEAD = 8  # indexes fetched in advance
_RUNS_AT_ONCE = 512  # runs whose indexes are sorted together
_ID_BYTES = 8  # memory per id


class EventBlock(NamedTuple):
    """A block of events: its row, and its number in there."""

    base: int
    end: int  # the offset after the last one of its row
    block: int
    object: str = ""  # of a journal, since another may replace it at the same offset


class PartitionIds:
    """The ids of one partition. Thread-safe."""

    _head: Head | None
    _merged: MergedIndexes
    _places: list[EventBlock]  # by the number of the owner
    _apart: list[EventBlock]  # runs whose indexes are not cached

    def __init__(
        self, context: Context, topic: Topic, partition: int, pool: Executor | None, bytes_max: int
    ) -> None:
        self._context = context
        self._topic = topic
        self._partition = partition
        self._pool = pool
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self.forget()

    @property
    def bytes(self) -> int:
        """Returns how much memory it uses."""
        return self._merged.bytes

    def forget(self) -> None:
        """Starts over at the next lookup."""
        with self._lock:
            self._empty()

    def candidates(self, head: Head, wanted: Halves) -> tuple[Head, list[tuple[int, EventBlock]]]:
        """Returns the blocks that may hold each of the wanted halves, and the head that this is
        valid for.

        Raises ``MovedError`` and ``NotFoundError`` if rows or objects were deleted in the meantime.
        """
        with self._lock:
            self._follow(head)
            seen = self._head or head
            found = [(at, self._places[owner]) for at, owner in self._merged.owners(wanted)]
            apart = list(self._apart)
        for place in apart:
            found += self._look_apart(seen, place, wanted)
        return seen, found

    def _look_apart(
        self, head: Head, place: EventBlock, wanted: Halves
    ) -> list[tuple[int, EventBlock]]:
        """Returns the same for one run whose index is not cached."""
        try:
            run = read_row(self._context, self._topic, self._partition, head, place.base)
        except MovedError:
            if place.end <= head.start:
                return []  # it was trimmed
            raise
        merged = MergedIndexes()
        merged.add([(halves, block) for block, halves in enumerate(self._index(run).blocks)])
        return [(at, _place(run, block)) for at, block in merged.owners(wanted)]

    def _empty(self) -> None:
        """Forgets all. One statement, so that a signal's handler cannot run in between."""
        self._head, self._merged, self._places, self._apart = None, MergedIndexes(), [], []

    def _follow(self, head: Head) -> None:
        """Adds what is new, completely or not at all. The lock must be held."""
        before = self._head
        try:
            if before is None or head.compiled > before.compiled:
                self._swap(head)
            elif (head.next, head.start) > (before.next, before.start):
                self._trim(head)
                self._add(self._covering(head, before.next, head.next))
            else:
                return
        except BaseException:
            self._empty()
            raise
        self._head = head

    def _swap(self, head: Head) -> None:
        """Drops what journals have replaced; keeps what still exists."""
        old = self._head
        journals = list(self._covering(head, 0, head.journaled))
        there = {(run.base, run.object) for run in journals}
        self._keep(
            lambda place: place.base >= head.journaled or (place.base, place.object) in there
        )
        held = {place.object for place in chain(self._places, self._apart)}
        runs_from = head.journaled if old is None else max(head.journaled, old.next)
        new = (run for run in journals if run.object not in held)
        self._add(chain(new, self._covering(head, runs_from, head.next)))

    def _trim(self, head: Head) -> None:
        """Drops what is below the start, and adds what there was no room for."""
        if all(place.end > head.start for place in chain(self._places, self._apart)):
            return
        self._keep(lambda place: place.end > head.start)
        waiting = [place.base for place in self._apart if place.base >= head.start]
        self._apart = [place for place in self._apart if place.base < head.start]
        self._add(read_row(self._context, self._topic, self._partition, head, at) for at in waiting)

    def _keep(self, wanted: Callable[[EventBlock], bool]) -> None:
        """Keeps only the wanted blocks, whether they are cached or only known."""
        lives = [wanted(place) for place in self._places]
        alive = np.array(lives, np.bool_)
        self._merged.keep(alive, (np.cumsum(alive) - 1).astype(np.uint32))
        self._places = list(compress(self._places, lives))
        self._apart = [place for place in self._apart if wanted(place)]

    def _covering(self, head: Head, start: int, end: int) -> Iterator[Run]:
        return covering(self._context, self._topic, self._partition, head, (start, end))

    def _add(self, runs: Iterable[Run]) -> None:
        """Adds the indexes of runs while there is room."""
        with_ids = (run for run in runs if run.ids_end)
        blocks: list[tuple[Halves, int]] = []
        size = self._merged.bytes
        for number, (run, index) in enumerate(
            fetch_ahead(self._pool, self._index, with_ids, _AHEAD)
        ):
            own = _ID_BYTES * sum(map(len, index.blocks))
            if size + own > self._bytes_max:
                self._apart.append(_place(run, 0))
                continue
            size += own
            for block, halves in enumerate(index.blocks):
                blocks.append((halves, len(self._places)))
                self._places.append(_place(run, block))
            if number % _RUNS_AT_ONCE == _RUNS_AT_ONCE - 1:
                self._merged.add(blocks)
                blocks = []
        self._merged.add(blocks)

    def _index(self, run: Run) -> IdIndex:
        if not run.ids_end:
            return IdIndex(())
        what = describe_run(self._topic.name, self._partition, run)

        def read(_: bool) -> IdIndex:
            data = self._context.store.get(run.object, run.ids_start, run.ids_end)
            return read_index(data, what) if run.journal is None else decode_index(data, what)

        return reread(self._context.store, run.object, read)


def _place(run: Run, block: int) -> EventBlock:
    return EventBlock(run.base, run.end, block, run.object if run.journal is not None else "")


Halves = npt.NDArray[np.uint32]


class MergedIndexes:
    """Halves of hashes with their owners, in a few sorted arrays of decreasing size."""

    def __init__(self) -> None:
        self._rows: list[tuple[Halves, npt.NDArray[np.uint32]]] = []

    @property
    def bytes(self) -> int:
        """Returns how much memory it uses."""
        return sum(halves.nbytes + owners.nbytes for halves, owners in self._rows)

    def add(self, blocks: Sequence[tuple[Halves, int]]) -> None:
        """Adds blocks, each with its owner."""
        if not blocks:
            return
        halves = np.concatenate([each for each, _ in blocks])
        counts = [len(each) for each, _ in blocks]
        owners = np.repeat(np.array([owner for _, owner in blocks], np.uint32), counts)
        self._rows.append(_sort(halves, owners))
        while len(self._rows) > 1 and len(self._rows[-2][0]) <= 2 * len(self._rows[-1][0]):
            last, before = self._rows.pop(), self._rows.pop()
            joined = [np.concatenate(pair) for pair in zip(before, last, strict=True)]
            self._rows.append(_sort(joined[0], joined[1]))

    def owners(self, wanted: Halves) -> Iterator[tuple[int, int]]:
        """Yields the index in ``wanted`` with each owner of that half; a pair may come twice."""
        for halves, owners in self._rows:
            firsts = np.searchsorted(halves, wanted, "left")
            lasts = np.searchsorted(halves, wanted, "right")
            for at in np.flatnonzero(lasts > firsts).tolist():
                for owner in owners[firsts[at] : lasts[at]].tolist():
                    yield at, owner

    def keep(self, alive: npt.NDArray[np.bool_], numbers: npt.NDArray[np.uint32]) -> None:
        """Drops the entries of owners that are not alive; renumbers the others."""
        kept = []
        for halves, owners in self._rows:
            mask = alive[owners]
            if mask.any():
                kept.append((halves[mask], numbers[owners[mask]]))
        self._rows = kept


def _sort(halves: Halves, owners: npt.NDArray[np.uint32]) -> tuple[Halves, npt.NDArray[np.uint32]]:
    order = np.argsort(halves, kind="stable")
    return halves[order], owners[order]
