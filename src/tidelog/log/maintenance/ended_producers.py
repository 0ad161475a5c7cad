"""Unnamed producers that have ended: a sweep deletes their rows. No threads and no locks here.

A producer's row is dated by the producer's clock, which may be wrong. So a sweep marks a row that
looks old, with its own time, and deletes it when it is unchanged a week after that mark.
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

PRODUCER_EXPIRES_MS = 7 * 24 * 3600 * 1000  # of silence: then an unnamed producer has ended


def forget_producer(
    context: Context, place: tuple[Topic, int], row: Silent, newest_ms: int, now_ms: int
) -> bool:
    """Step 9, for one row: whether it was deleted."""
    state = row.state
    if newest_ms - state.seen_ms <= PRODUCER_EXPIRES_MS:
        return False
    if state.silent_ms == 0:  # dated by the producer's clock alone, which may be wrong
        _note_silence(context, place, row, now_ms)
        return False
    return newest_ms - state.silent_ms > PRODUCER_EXPIRES_MS and _remove_producer(
        context, *place, row
    )


def _note_silence(context: Context, place: tuple[Topic, int], row: Silent, now_ms: int) -> None:
    """Mark a row that looks old: from now on a week counts that a sweep has dated."""
    where = layout.topic_partition(place[0].incarnation, place[1])
    noted = msgspec.structs.replace(row.state, silent_ms=now_ms)
    change = Put(row.row, encode_row(noted), expect=row.version)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep looks again
        context.catalog.write(where, change, write_id=context.ids.new())


def _remove_producer(context: Context, topic: Topic, partition: int, row: Silent) -> bool:
    """Step 9, for one row: whether it was deleted. A changed row belongs to a live producer."""
    where = layout.topic_partition(topic.incarnation, partition)
    try:
        context.catalog.write(
            where, Delete(row.row, expect=row.version), write_id=context.ids.new()
        )
    except (ConflictError, UnknownOutcomeError):
        return False  # if the row is still there, the next sweep meets it again
    return True
