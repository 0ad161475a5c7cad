"""Copies of events into a topic: what was erased from it is left out, whenever that happens.

See ``log.ledger`` for the steps on both sides. A commit of a copy is refused with
``LedgerMovedError`` where the head tells that the ledger has grown since the events were held
against it; the copier then reads the ledger again, leaves out what was erased meanwhile, and
commits the rest under the sequences that these events had before. That is another segment: the one
that was refused holds erased events, and is listed as unused where it was not committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA
from tidelog.codec.segment import encode_staged, read_piece
from tidelog.errors import AlreadyExistsError, ConflictError, NotFoundError, UnavailableError
from tidelog.log.append import Appender, Stored
from tidelog.log.base import Log
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, read_erased
from tidelog.log.staged import Staged, staged_origin
from tidelog.log.witnesses import is_claimed, put_witness
from tidelog.model.run import Head, Piece
from tidelog.model.topic import Topic
from tidelog.store.base import Store
from tidelog.store.fresh import put_same

__all__ = ["Copier", "LedgerMovedError", "append_staged", "is_appended", "without_erased"]

T = TypeVar("T")


class LedgerMovedError(ConflictError):
    """Something was erased from the topic since the events were held against its ledger."""

    kind = "ledger moved"


class Copier(Appender):
    """An appender whose commits expect the ledger by which erased events were left out."""

    erased: ErasedIds = NOTHING_ERASED
    needs_offsets = False

    def __init__(self, log: Log, topic: Topic, producer: str) -> None:
        super().__init__(log, topic, producer)
        self.committed: set[tuple[str, int]] = set()  # staged segments, and by which partition

    @property
    def store(self) -> Store:
        """Where segments are."""
        return self._log.store

    def look(self) -> ErasedIds:
        """The ledger as it is now; the next commits expect it."""
        self.erased = read_erased(self._log, self._topic, self.erased)
        return self.erased

    def forget(self) -> None:
        """Read the rows of all partitions again, when they are next needed."""
        for partition in range(self._topic.partitions):
            self._forget(partition)

    def check_head(self, partition: int, head: Head) -> None:
        super().check_head(partition, head)
        if head.erasures != self.erased.stamp[partition]:
            self._heads.pop(partition, None)  # it may be the head that is old, not the ledger
            raise LedgerMovedError(
                f"partition `{self._topic.name}/{partition}`: events were erased while others were "
                "copied into it: try again"
            )

    def bear_witness(self, segments: Iterable[Staged], pool: Executor | None = None) -> None:
        """Say in the store which partitions have committed each of some staged segments.

        After the commits, and before they are acknowledged: so the catalog cannot lose these
        unseen. ``UnavailableError`` if that fails: then append them again, which commits nothing.
        """

        def put(staged: Staged) -> None:
            has = [each.partition for each in staged.pieces if self._has(staged, each.partition)]
            if has:
                put_witness(self._log, self._topic, staged_origin(staged.key), has)

        each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
        list(each(put, segments))

    def _has(self, staged: Staged, partition: int) -> bool:
        """Whether a partition has committed a staged segment, in this call or before it."""
        is_ours = (staged.key, partition) in self.committed
        return is_ours or is_claimed(self._log, self._topic, staged_origin(staged.key), partition)

    def copy(self, attempt: Callable[[ErasedIds], T]) -> T:
        """Run ``attempt`` with the ledger, again and again until that holds for its commits.

        It must leave out what is erased, and skip what it has committed before.
        """
        erased = self.erased if self.erased.stamp else self.look()
        for delay_s in self._delays():
            with contextlib.suppress(LedgerMovedError):
                done = attempt(erased)
                self.list_abandoned()
                return done
            self._log.clock.sleep(delay_s)
            erased = self.look()
        raise UnavailableError(
            f"topic `{self._topic.name}`: events are erased faster than others are copied into it: "
            "try again"
        )


def append_staged(
    producer: Copier,
    segments: Sequence[Staged],
    first_sequence: int = 0,
    pool: Executor | None = None,
) -> int:
    """Copy segments and commit their pieces, partition by partition, each piece once.

    In each partition the events are numbered from ``first_sequence``; those that were erased keep
    their numbers, and are left out. Returns how many these are. ``NotFoundError`` when the topic
    was deleted, or when a segment is neither staged nor appended.
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
            # Another driver has appended them all, and deleted what it had made beside.
        if made:
            producer.store.delete(made)
        return sum(len(out) for each in wanted for out in each.left_out.values())

    tried: dict[str, Staged] = {}  # all that may be committed, also with events that were erased
    left_out = producer.copy(attempt)
    producer.bear_witness(tried.values(), pool)
    return left_out


def _append(
    producer: Copier, segments: Sequence[Staged], first_sequence: int, pool: Executor | None
) -> None:
    todo = _pieces(producer, segments, first_sequence)
    named = {staged.key: staged for pieces in todo.values() for _, _, staged in pieces}

    def copy(staged: Staged) -> Stored:
        return producer.adopt(staged.key, staged.pieces)

    def commit(partition: int) -> LedgerMovedError | None:
        copies = dict(stored)
        for index, (first, piece, staged) in enumerate(todo[partition]):
            sequences = staged.sequences(piece, first)
            try:
                _, copies[staged.key] = producer.commit(copies[staged.key], piece, sequences)
                producer.committed.add((staged.key, partition))
            except AlreadyExistsError:
                continue  # by another driver, meanwhile
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
                producer.abandon(piece.partition, stored[staged.key])  # it has these events
    moved = [error for error in each(commit, todo) if error is not None]
    for error in moved:  # when all commits under way have ended
        raise error


def is_appended(producer: Appender, segments: Sequence[Staged], first_sequence: int = 0) -> bool:
    """Whether all pieces are in the topic, as a producer that was just made sees it."""
    return not _pieces(producer, segments, first_sequence)


def _pieces(
    producer: Appender, segments: Sequence[Staged], first_sequence: int
) -> dict[int, list[tuple[int, Piece, Staged]]]:
    """What is not committed yet: for each partition its pieces in order, with their sequences."""
    counted: dict[int, int] = {}
    todo: dict[int, list[tuple[int, Piece, Staged]]] = {}
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


def without_erased(store: Store, staged: Staged, erased: ErasedIds, writer: str = "") -> Staged:
    """A staged segment without what was erased since its writer began; often it is the same one.

    One that is gone has been appended, or will be missed there.
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
            again = Staged(_beside(staged.key, erased.mark), (), left_out)
            return _staged_again(store, again, tables, writer)
    return staged


def _beside(key: str, mark: str) -> str:
    """The key of a segment without erased events; of the same kind as that of the whole one."""
    kind = ".arrow"
    return f"{key.removesuffix(kind)}.{mark}{kind if key.endswith(kind) else ''}"


def _staged_again(
    store: Store, again: Staged, tables: list[tuple[int, pa.Table]], writer: str
) -> Staged:
    if not tables:
        return again
    segment = encode_staged(tables, writer=writer)
    put_same(store, again.key, segment.data)  # another driver may have put the same
    return Staged(again.key, segment.pieces, again.left_out)


def _table(store: Store, key: str, piece: Piece) -> pa.Table:
    data = store.get(key, piece.byte_start, piece.byte_end)
    what = f"staged segment `{key}`, bytes {piece.byte_start} to {piece.byte_end}"
    return pa.Table.from_batches(read_piece(data, piece.crc, piece.count, what), STORED_SCHEMA)
