"""Notes of strays, the objects that no row names or lists: when a sweep first found them.

A stray is kept for a week, which begins with the note: the date of an object says when it was
uploaded, which may be long before the catalog lost the commit. A note has the latest of all known
times (this machine's, the store's, those of the topic's rows, the object's date), since the clock
may be behind at the first sweep and right at the next.

A sweep notes only objects that can no longer be committed. So every row that ever named such an
object is older than the note, and a copy of the catalog that has the note has that row too: no
restored copy has a note that is older than the loss. The write of a note expects the head of
partition 0, so that it lands once.

A folder has no clock except the machine's, and that may jump by a year. There the week counts what
sweeps have seen pass: at most a day from one sweep to the next (``STRAY_STEP_MS``), and nothing if
the clock went back. Each sweep writes that into the note. So one jump shortens the week by at most
a day, and it takes at least seven sweeps to end it.

A sweep deletes objects before their notes. It deletes a note whose objects are no longer strays, by
its version, or replaces it with a note of the remaining ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import Change, Delete, Put
from tidelog.context import Context
from tidelog.coordination.trusted_time import has_own_clock
from tidelog.errors import (
    ConflictError,
    UnknownOutcomeError,
)
from tidelog.log.unused_objects import add_row
from tidelog.model import layout, limits
from tidelog.model.topic import Strays, Topic, encode_row

__all__ = [
    "NotedRow",
    "kept_since",
    "note_strays",
    "noted_since",
]


@dataclass(frozen=True, slots=True)
class NotedRow:
    """One row of notes."""

    row: str
    version: str
    noted: Strays


def noted_since(rows: Iterable[NotedRow]) -> dict[str, int]:
    """Returns when each object was noted."""
    since: dict[str, int] = {}
    for row in rows:
        for key in row.noted.objects:
            since[key] = min(row.noted.at_ms, since.get(key, row.noted.at_ms))
    return since


def kept_since(context: Context, rows: Iterable[NotedRow], now_ms: int) -> dict[str, int]:
    """Returns when each object's week began; if clocks may jump, by what sweeps have seen pass."""
    if has_own_clock(context.store):
        return noted_since(rows)
    since: dict[str, int] = {}
    for row in rows:
        begun_ms = now_ms - _advance(context, row.noted, now_ms).kept_ms
        for key in row.noted.objects:
            since[key] = min(begun_ms, since.get(key, begun_ms))
    return since


def _advance(context: Context, noted: Strays, now_ms: int) -> Strays:
    """Returns a note with the time that this sweep has seen pass."""
    if has_own_clock(context.store):
        return noted
    step_ms = now_ms - (noted.seen_ms or noted.at_ms)
    kept_ms = noted.kept_ms + min(max(step_ms, 0), limits.STRAY_STEP_MS)
    return msgspec.structs.replace(noted, kept_ms=kept_ms, seen_ms=now_ms)


def note_strays(
    context: Context,
    topic: Topic,
    rows: Sequence[NotedRow],
    strays: Collection[str],
    fresh: Mapping[str, int],
    now_ms: int,
) -> None:
    """Notes ``fresh`` strays with their times, and removes what is no longer a stray.

    If it fails, the next sweep starts the week.
    """
    where = layout.topic_partition(topic.incarnation, 0)
    changes: list[Change] = []
    for row in rows:
        left = tuple(key for key in row.noted.objects if key in strays)
        if not left:
            changes.append(Delete(row.row, row.version))
            continue
        moved = msgspec.structs.replace(_advance(context, row.noted, now_ms), objects=left)
        if moved != row.noted:
            changes.append(Put(row.row, encode_row(moved), expect=row.version))
    for change in changes:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            context.catalog.write(where, change, write_id=context.ids.new())
    for at_ms in sorted(set(fresh.values())):
        keys = sorted(key for key, ms in fresh.items() if ms == at_ms)
        for first in range(0, len(keys), limits.STRAYS_AT_ONCE):
            _note(context, topic, Strays(at_ms, tuple(keys[first : first + limits.STRAYS_AT_ONCE])))


def _note(context: Context, topic: Topic, noted: Strays) -> None:
    note = Put(layout.stray_row(context.ids.new()), encode_row(noted))
    with contextlib.suppress(UnknownOutcomeError):  # the next sweep notes what is not noted
        add_row(context, topic, 0, note)
