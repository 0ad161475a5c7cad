"""Leaving out events that were erased from a topic, on their way into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from tidelog.log.ledger import ErasedIds
from tidelog.sinks.base import RangeWriter, Written

__all__ = ["ErasingWriter"]


@dataclass
class ErasingWriter:
    """Another writer, which is not given what was erased."""

    writer: RangeWriter
    erased: ErasedIds
    left_out: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        keep = self.erased.kept(batch)
        left = batch if keep is None else batch.filter(pa.array(keep))
        self.left_out += batch.num_rows - left.num_rows
        if left.num_rows:
            self.writer.write(left)

    def close(self) -> Written:
        return replace(self.writer.close(), left_out=self.left_out)


_: type[RangeWriter] = ErasingWriter
