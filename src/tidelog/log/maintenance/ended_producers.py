"""Deletes the rows of unnamed producers that have ended. Starts no threads, takes no locks.

A producer's row has a time of the producer's clock, which may be wrong. So a sweep marks a row that
looks old with its own time, and deletes it if it is unchanged a week after that mark.
"""

from __future__ import annotations

import contextlib

import msgspec

from tidelog.catalog.base import Delete, Put
from tidelog.context import Context
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.log.maintenance.references import Silent
from tidelog.model import layout
from tidelog.model.partition_rows import encode_row
from tidelog.model.topic import Topic

__all__ = ["PRODUCER_EXPIRES_MS", "forget_producer"]

# An unnamed producer that is silent for this long has ended.
PRODUCER_EXPIRES_MS = 7 * 24 * 3600 * 1000


def forget_producer(
    context: Context, place: tuple[Topic, int], row: Silent, newest_ms: int, now_ms: int
) -> bool:
    """Step 9 for one row: returns whether it was deleted."""
    state = row.state
    if newest_ms - state.seen_ms <= PRODUCER_EXPIRES_MS:
        return False
    if state.silent_ms == 0:  # only the producer's clock dates it, which may be wrong
        _note_silence(context, place, row, now_ms)
        return False
    return newest_ms - state.silent_ms > PRODUCER_EXPIRES_MS and _remove_producer(
        context, *place, row
    )


def _note_silence(context: Context, place: tuple[Topic, int], row: Silent, now_ms: int) -> None:
    """Marks a row that looks old: the week counts from this mark, which a sweep has dated."""
    where = layout.topic_partition(place[0].incarnation, place[1])
    noted = msgspec.structs.replace(row.state, silent_ms=now_ms)
    change = Put(row.row, encode_row(noted), expect=row.version)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep tries again
        context.catalog.write(where, change, write_id=context.ids.new())


def _remove_producer(context: Context, topic: Topic, partition: int, row: Silent) -> bool:
    """Deletes one row; returns whether it did. A changed row belongs to a live producer."""
    where = layout.topic_partition(topic.incarnation, partition)
    try:
        context.catalog.write(
            where, Delete(row.row, expect=row.version), write_id=context.ids.new()
        )
    except (ConflictError, UnknownOutcomeError):
        return False  # if the row is still there, the next sweep tries again
    return True
