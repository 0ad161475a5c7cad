"""Which blocks of events may hold an id: many indexes merged, so that a look is a few searches.

Eight bytes for each id: the half of its hash that indexes keep (``codec.ids``), and whose it is.
Pure; whoever uses it says how much may be held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Halves", "Shelves"]

Halves = npt.NDArray[np.uint32]


class Shelves:
    """Halves of hashes with their owners, in a few sorted rows of falling size."""

    def __init__(self) -> None:
        self._rows: list[tuple[Halves, npt.NDArray[np.uint32]]] = []

    @property
    def bytes(self) -> int:
        """How much is held."""
        return sum(halves.nbytes + owners.nbytes for halves, owners in self._rows)

    def add(self, blocks: Sequence[tuple[Halves, int]]) -> None:
        """Put blocks on the shelves, each with its owner."""
        if not blocks:
            return
        halves = np.concatenate([each for each, _ in blocks])
        counts = [len(each) for each, _ in blocks]
        owners = np.repeat(np.array([owner for _, owner in blocks], np.uint32), counts)
        self._rows.append(_sorted(halves, owners))
        while len(self._rows) > 1 and len(self._rows[-2][0]) <= 2 * len(self._rows[-1][0]):
            last, before = self._rows.pop(), self._rows.pop()
            joined = [np.concatenate(pair) for pair in zip(before, last, strict=True)]
            self._rows.append(_sorted(joined[0], joined[1]))

    def owners(self, wanted: Halves) -> Iterator[tuple[int, int]]:
        """Each place in ``wanted`` with an owner that has that half; the same pair may recur."""
        for halves, owners in self._rows:
            firsts = np.searchsorted(halves, wanted, "left")
            lasts = np.searchsorted(halves, wanted, "right")
            for at in np.flatnonzero(lasts > firsts).tolist():
                for owner in owners[firsts[at] : lasts[at]].tolist():
                    yield at, owner

    def keep(self, alive: npt.NDArray[np.bool_], numbers: npt.NDArray[np.uint32]) -> None:
        """Drop what belongs to owners that are not alive; the others get new numbers."""
        kept = []
        for halves, owners in self._rows:
            mask = alive[owners]
            if mask.any():
                kept.append((halves[mask], numbers[owners[mask]]))
        self._rows = kept


def _sorted(
    halves: Halves, owners: npt.NDArray[np.uint32]
) -> tuple[Halves, npt.NDArray[np.uint32]]:
    order = np.argsort(halves, kind="stable")
    return halves[order], owners[order]
