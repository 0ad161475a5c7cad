"""Rows that note when a sweep first found an object to be a stray.

A stray is kept for a week, and that week begins with the note: the date of an object says when it
was uploaded, which may be long before the catalog lost the commit. A note has the latest of all
times that are known (this machine's, the store's, those of the topic's rows, the object's date):
the clock may be behind when the first sweep runs, and right at the next.

A sweep notes only objects that can no longer be committed. So every row that ever named such an
object is older than the note, and a copy of the catalog that has the note has that row too: no
restored copy makes a note older than the loss. The write of a note expects the head of partition 0,
so that it comes once.

Objects are deleted before their notes. A note whose objects are no longer strays is deleted, by its
version, or replaced by one of those that still are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidelog.catalog.base import Change, Check, Delete, Put
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.run import Strays, encode_row
from tidelog.model.topic import Topic

__all__ = ["NotedRow", "note_strays", "noted_since"]


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


def note_strays(
    log: Log,
    topic: Topic,
    rows: Sequence[NotedRow],
    strays: Collection[str],
    fresh: Mapping[str, int],
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
        elif len(left) < len(row.noted.objects):
            value = encode_row(Strays(row.noted.at_ms, left))
            changes.append(Put(row.row, value, expect=row.version))
    for change in changes:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(where, change, write_id=log.ids.new())
    for now_ms in sorted(set(fresh.values())):
        keys = sorted(key for key, ms in fresh.items() if ms == now_ms)
        for first in range(0, len(keys), limits.STRAYS_AT_ONCE):
            _note(log, topic, Strays(now_ms, tuple(keys[first : first + limits.STRAYS_AT_ONCE])))


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
