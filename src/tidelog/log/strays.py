"""Rows that note when a sweep first found an object to be a stray.

A stray is kept for a week, and that week begins with the note: the date of an object says when it
was uploaded, which may be long before the catalog lost the commit. A note has the latest of all
times that are known (this machine's, the store's, those of the topic's rows, the object's date):
the clock may be behind when the first sweep runs, and right at the next.

A sweep notes only objects that can no longer be committed. So every row that ever named such an
object is older than the note, and a copy of the catalog that has the note has that row too: no
restored copy makes a note older than the loss. The write of a note expects the head of partition 0,
so that it comes once.

In a folder there is no clock but the machine's, and that may jump by a year. There the week is what
sweeps have seen pass: from one to the next a day at most (``STRAY_STEP_MS``), and nothing where the
clock went back. Each sweep writes that into the note. So one jump takes a day off the week, and
it takes at least seven sweeps to end it.

Objects are deleted before their notes. A note whose objects are no longer strays is deleted, by its
version, or replaced by one of those that still are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import Change, Check, Delete, Put
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.log.ages import has_own_clock
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.run import Strays, encode_row
from tidelog.model.topic import Topic

__all__ = ["NotedRow", "kept_since", "note_strays", "noted_since"]


@dataclass(frozen=True, slots=True)
class NotedRow:
    """One row of this kind."""

    row: str
    version: str
    noted: Strays


def noted_since(rows: Iterable[NotedRow]) -> dict[str, int]:
    """Since when each object is noted."""
    since: dict[str, int] = {}
    for row in rows:
        for key in row.noted.objects:
            since[key] = min(row.noted.at_ms, since.get(key, row.noted.at_ms))
    return since


def kept_since(log: Log, rows: Iterable[NotedRow], now_ms: int) -> dict[str, int]:
    """Since when the week of each noted object counts: where clocks jump, by what sweeps saw."""
    if has_own_clock(log.store):
        return noted_since(rows)
    since: dict[str, int] = {}
    for row in rows:
        begun_ms = now_ms - _moved(log, row.noted, now_ms).kept_ms
        for key in row.noted.objects:
            since[key] = min(begun_ms, since.get(key, begun_ms))
    return since


def _moved(log: Log, noted: Strays, now_ms: int) -> Strays:
    """A note as a sweep leaves it: with the time that this sweep has seen pass."""
    if has_own_clock(log.store):
        return noted
    step_ms = now_ms - (noted.seen_ms or noted.at_ms)
    kept_ms = noted.kept_ms + min(max(step_ms, 0), limits.STRAY_STEP_MS)
    return msgspec.structs.replace(noted, kept_ms=kept_ms, seen_ms=now_ms)


def note_strays(
    log: Log,
    topic: Topic,
    rows: Sequence[NotedRow],
    strays: Collection[str],
    fresh: Mapping[str, int],
    now_ms: int,
) -> None:
    """Note ``fresh`` strays with their times, and forget what is no longer a stray.

    What fails is left to the next sweep, which then begins the week.
    """
    where = layout.topic_partition(topic.incarnation, 0)
    changes: list[Change] = []
    for row in rows:
        left = tuple(key for key in row.noted.objects if key in strays)
        if not left:
            changes.append(Delete(row.row, row.version))
            continue
        moved = msgspec.structs.replace(_moved(log, row.noted, now_ms), objects=left)
        if moved != row.noted:
            changes.append(Put(row.row, encode_row(moved), expect=row.version))
    for change in changes:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(where, change, write_id=log.ids.new())
    for at_ms in sorted(set(fresh.values())):
        keys = sorted(key for key, ms in fresh.items() if ms == at_ms)
        for first in range(0, len(keys), limits.STRAYS_AT_ONCE):
            _note(log, topic, Strays(at_ms, tuple(keys[first : first + limits.STRAYS_AT_ONCE])))


def _note(log: Log, topic: Topic, noted: Strays) -> None:
    where = layout.topic_partition(topic.incarnation, 0)
    for delay_s in RACE.delays_s(log.random):
        head, version = read_head(log, topic, 0)
        if head.closed:
            return
        write_id = log.ids.new()
        note = Put(layout.stray_row(write_id), encode_row(noted))
        try:
            log.catalog.write(where, Check("head", version), note, write_id=write_id)
        except UnknownOutcomeError:
            return
        except ConflictError:
            log.clock.sleep(delay_s)
        else:
            return
