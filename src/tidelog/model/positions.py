"""The positions of an append's events: a sequence without one object per position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from tidelog.model.event import Position

__all__ = ["Positions"]


class Positions(Sequence[Position]):
    """One position for each event given, in the same order."""

    def __init__(
        self,
        topic: str,
        partitions: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        self.topic = topic
        self.partitions = partitions
        self.offsets = offsets

    @classmethod
    def joined(cls, topic: str, parts: Sequence[Positions]) -> Positions:
        """Returns several as one."""
        return cls(
            topic,
            np.concatenate([part.partitions for part in parts] or [np.empty(0, np.int32)]),
            np.concatenate([part.offsets for part in parts] or [np.empty(0, np.int64)]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> Positions: ...
    def __getitem__(self, index: int | slice) -> Position | Positions:
        if isinstance(index, slice):
            return Positions(self.topic, self.partitions[index], self.offsets[index])
        return Position(self.topic, int(self.partitions[index]), int(self.offsets[index]))

    def __iter__(self) -> Iterator[Position]:
        for partition, offset in zip(self.partitions.tolist(), self.offsets.tolist(), strict=True):
            yield Position(self.topic, partition, offset)

    def __repr__(self) -> str:
        return f"Positions({len(self)} events of {self.topic})"
