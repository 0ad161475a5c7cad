"""Leaving out events whose ids were erased from a topic, on their way into it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA
from tidelog.codec.segment import encode_segment, read_piece
from tidelog.errors import AlreadyExistsError, NotFoundError
from tidelog.log.ledger import ErasedIds
from tidelog.log.staged import Staged
from tidelog.model.pipeline import FileEntry
from tidelog.model.run import Piece
from tidelog.sinks.base import RangeWriter, Written
from tidelog.store.base import Store
from tidelog.store.fresh import put_fresh

__all__ = ["ErasingWriter", "without_erased"]


@dataclass(frozen=True)
class ErasingWriter:
    """Another writer, which is not given what was erased."""

    writer: RangeWriter
    erased: ErasedIds

    def write(self, batch: pa.RecordBatch) -> None:
        keep = self.erased.kept(batch.column("id"))
        left = batch if keep is None else batch.filter(pa.array(keep))
        if left.num_rows:
            self.writer.write(left)

    def close(self) -> Written:
        return self.writer.close()


def without_erased(store: Store, file: FileEntry, erased: ErasedIds) -> Staged:
    """A staged segment without what was erased since its writer began; often it is the same one.

    Its name tells which ledger its writer had. One that is gone has been appended, or will be
    missed there.
    """
    whole = Staged(file.staged, file.pieces)
    name = file.staged.split("/")[-2]
    if not len(erased) or name.startswith(erased.mark) or not any(p.ids_end for p in file.pieces):
        return whole
    tables: list[tuple[int, pa.Table]] = []
    left_out: dict[int, tuple[int, ...]] = {}
    with contextlib.suppress(NotFoundError):
        for piece in file.pieces:
            table = _table(store, file.staged, piece)
            keep = erased.kept(table.column("id"))
            if keep is not None:
                left_out[piece.partition] = tuple(np.flatnonzero(~keep).tolist())
                table = table.filter(pa.array(keep))
            if table.num_rows:
                tables.append((piece.partition, table))
        if left_out:
            return _staged_anew(store, f"{file.staged}.{erased.mark}", tables, left_out)
    return whole


def _staged_anew(
    store: Store,
    key: str,
    tables: list[tuple[int, pa.Table]],
    left_out: dict[int, tuple[int, ...]],
) -> Staged:
    if not tables:
        return Staged(key, (), left_out)
    segment = encode_segment(tables)
    with contextlib.suppress(AlreadyExistsError):  # another driver has put the same
        put_fresh(store, key, segment.data)
    return Staged(key, segment.pieces, left_out)


def _table(store: Store, key: str, piece: Piece) -> pa.Table:
    data = store.get(key, piece.byte_start, piece.byte_end)
    what = f"staged segment `{key}`, bytes {piece.byte_start} to {piece.byte_end}"
    return pa.Table.from_batches(read_piece(data, piece.crc, piece.count, what), STORED_SCHEMA)


_: type[RangeWriter] = ErasingWriter
