"""Copies events into a topic, except those that its ledger says are erased (``log.ledger``).

A :class:`Copier` appends like any producer, and starts again if the ledger has grown before a
commit. ``append_staged`` copies staged segments with it, each piece once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from tidelog.catalog.update import attempts
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.codec.segment import encode_staged, read_piece
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    raise_first,
)
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, read_erased
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.producer.staged import StagedSegment, is_claimed, put_witness, staged_origin
from tidelog.model.topic import Head, Piece, Topic
from tidelog.store.base import Store, put_same

__all__ = [
    "Copier",
    "LedgerMovedError",
    "append_staged",
    "is_appended",
    "without_erased",
]

T = TypeVar("T")


class LedgerMovedError(ConflictError):
    """Events were erased from the topic after the copy read the ledger."""

    kind = "ledger moved"


class Copier(Appender):
    """An appender whose commits fail if the ledger has grown since the copy read it."""

    erased: ErasedIds = NOTHING_ERASED
    needs_offsets = False

    def __init__(self, context: Context, topic: Topic, producer: str) -> None:
        super().__init__(context, topic, producer)
        self.committed: set[tuple[str, int]] = set()  # staged segment and partition

    @property
    def store(self) -> Store:
        """Returns the store that holds the segments."""
        return self._context.store

    def look(self) -> ErasedIds:
        """Returns the current ledger, which the next commits expect."""
        self.erased = read_erased(self._context, self._topic, self.erased)
        return self.erased

    def forget(self) -> None:
        """Forgets the rows of all partitions, so that the next use reads them again."""
        for partition in range(self._topic.partitions):
            self._forget(partition)

    def check_head(self, partition: int, head: Head) -> None:
        super().check_head(partition, head)
        if head.erasures != self.erased.stamp[partition]:
            self._heads.pop(partition, None)  # the head may be stale, not the ledger
            raise LedgerMovedError(
                f"partition `{self._topic.name}/{partition}`: events were erased while others were "
                "copied into it: try again"
            )

    def bear_witness(self, segments: Iterable[StagedSegment], pool: Executor | None = None) -> None:
        """Writes to the store which partitions have committed each staged segment.

        Call it after the commits and before acknowledging them, so that a catalog that loses these
        commits is noticed. Raises ``UnavailableError`` if it fails: append the segments again,
        which commits nothing twice.
        """

        def put(staged: StagedSegment) -> None:
            has = [each.partition for each in staged.pieces if self._has(staged, each.partition)]
            if has:
                put_witness(self._context, self._topic, staged_origin(staged.key), has)

        each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
        list(each(put, segments))

    def _has(self, staged: StagedSegment, partition: int) -> bool:
        """Returns whether a partition has committed a staged segment, in this call or earlier."""
        is_ours = (staged.key, partition) in self.committed
        return is_ours or is_claimed(
            self._context, self._topic, staged_origin(staged.key), partition
        )

    def copy(self, attempt: Callable[[ErasedIds], T]) -> T:
        """Calls ``attempt`` with the ledger until the ledger did not grow before its commits.

        ``attempt`` must leave out erased events and skip what it has already committed.
        """
        erased = self.erased if self.erased.stamp else self.look()
        busy = UnavailableError(
            f"topic `{self._topic.name}`: events are erased faster than others are copied into it: "
            "try again"
        )
        for number in attempts(self._context, busy):
            if number:
                erased = self.look()
            with contextlib.suppress(LedgerMovedError):
                done = attempt(erased)
                self.list_abandoned()
                return done
        raise busy


def append_staged(
    producer: Copier,
    segments: Sequence[StagedSegment],
    first_sequence: int = 0,
    pool: Executor | None = None,
) -> int:
    """Copies staged segments and commits their pieces, partition by partition, each piece once.

    Returns how many events were left out as erased. In each partition the events are numbered from
    ``first_sequence``, and erased ones keep their numbers. Raises ``NotFoundError`` if the topic
    was deleted, or if a segment is neither staged nor appended.
    """

    def attempt(erased: ErasedIds) -> int:
        wanted = [
            without_erased(producer.store, each, erased, producer.writer) for each in segments
        ]
        tried.update({each.key: each for each in wanted})
        made = {each.key for each in wanted} - {each.key for each in segments}
        try:
            _append(producer, wanted, first_sequence, pool)
        except NotFoundError:
            producer.forget()
            if not made or _pieces(producer, wanted, first_sequence):
                raise
            # Another driver has appended them all and deleted its filtered copies.
        if made:
            producer.store.delete(made)
        return sum(len(out) for each in wanted for out in each.left_out.values())

    # Everything that may be committed, including versions with events that were erased later.
    tried: dict[str, StagedSegment] = {}
    left_out = producer.copy(attempt)
    producer.bear_witness(tried.values(), pool)
    return left_out


def _append(
    producer: Copier, segments: Sequence[StagedSegment], first_sequence: int, pool: Executor | None
) -> None:
    todo = _pieces(producer, segments, first_sequence)
    named = {staged.key: staged for pieces in todo.values() for _, _, staged in pieces}

    def copy(staged: StagedSegment) -> StoredSegment:
        return producer.copy_staged(staged.key, staged.pieces)

    def commit(partition: int) -> LedgerMovedError | None:
        copies = dict(stored)
        for index, (first, piece, staged) in enumerate(todo[partition]):
            sequences = staged.sequences(piece, first)
            try:
                _, copies[staged.key] = producer.commit(copies[staged.key], piece, sequences)
                producer.committed.add((staged.key, partition))
            except AlreadyExistsError:
                continue  # another driver committed it in the meantime
            except LedgerMovedError as exc:
                for _, _, later in todo[partition][index:]:
                    producer.abandon(partition, copies[later.key])
                return exc
        return None

    each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    stored = dict(zip(named, each(copy, named.values()), strict=True))
    for staged in named.values():
        for piece in staged.pieces:
            if all(staged is not each for _, _, each in todo.get(piece.partition, ())):
                producer.abandon(piece.partition, stored[staged.key])  # already stored
    moved = [error for error in each(commit, todo) if error is not None]
    raise_first(moved)  # after all running commits have ended


def is_appended(
    producer: Appender, segments: Sequence[StagedSegment], first_sequence: int = 0
) -> bool:
    """Returns whether all pieces are in the topic, by the rows that a new producer reads."""
    return not _pieces(producer, segments, first_sequence)


def _pieces(
    producer: Appender, segments: Sequence[StagedSegment], first_sequence: int
) -> dict[int, list[tuple[int, Piece, StagedSegment]]]:
    """Returns the uncommitted pieces of each partition in order, with their first sequences."""
    counted: dict[int, int] = {}
    todo: dict[int, list[tuple[int, Piece, StagedSegment]]] = {}
    for staged in segments:
        for partition, out in staged.left_out.items():
            counted[partition] = counted.get(partition, first_sequence) + len(out)
        for piece in staged.pieces:
            before = len(staged.left_out.get(piece.partition, ()))
            first = counted.get(piece.partition, first_sequence) - before
            counted[piece.partition] = first + before + piece.count
            if first > producer.last_sequence(piece.partition):
                todo.setdefault(piece.partition, []).append((first, piece, staged))
    return todo


def without_erased(
    store: Store, staged: StagedSegment, erased: ErasedIds, writer: str = ""
) -> StagedSegment:
    """Returns a staged segment without the events that were erased since its writer started.

    Returns the same segment if there are none. A segment that is missing was already appended, or
    the append reports it.
    """
    is_known = staged.ledger.startswith(erased.mark)
    if not len(erased) or is_known or not (erased.keys or any(p.ids_end for p in staged.pieces)):
        return staged
    tables: list[tuple[int, pa.Table]] = []
    left_out: dict[int, tuple[int, ...]] = {}
    with contextlib.suppress(NotFoundError):
        for piece in staged.pieces:
            table = _table(store, staged.key, piece)
            keep = erased.kept(table)
            if keep is not None:
                left_out[piece.partition] = tuple(np.flatnonzero(~keep).tolist())
                table = table.filter(pa.array(keep))
            if table.num_rows:
                tables.append((piece.partition, table))
        if left_out:
            again = StagedSegment(_beside(staged.key, erased.mark), (), left_out)
            return _staged_again(store, again, tables, writer)
    return staged


def _beside(key: str, mark: str) -> str:
    """Returns the key of a segment without erased events; it has the same kind as the original."""
    kind = ".arrow"
    return f"{key.removesuffix(kind)}.{mark}{kind if key.endswith(kind) else ''}"


def _staged_again(
    store: Store, again: StagedSegment, tables: list[tuple[int, pa.Table]], writer: str
) -> StagedSegment:
    if not tables:
        return again
    segment = encode_staged(tables, writer=writer)
    put_same(store, again.key, segment.data)  # another driver may have put the same
    return StagedSegment(again.key, segment.pieces, again.left_out)


def _table(store: Store, key: str, piece: Piece) -> pa.Table:
    data = store.get(key, piece.byte_start, piece.byte_end)
    what = f"staged segment `{key}`, bytes {piece.byte_start} to {piece.byte_end}"
    return pa.Table.from_batches(read_piece(data, piece.crc, piece.count, what), STORED_SCHEMA)
