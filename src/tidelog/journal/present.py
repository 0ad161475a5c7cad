"""Which events of a stray the topic has: the same events, not only their ids.

Ids need not be unique: an id may be that of a thing, and each event a new version of it. So an
event counts as present only where the topic had the same one before the recovery: with the same id,
key, type, headers and value, and a time that is not earlier, as an event has that its producer sent
again. What the recovery itself appends says nothing about the next event.

An update replaces a value and leaves no trace in the event. Where an id was updated, an event with
it and another value may be an older state of the one that the topic has, or another event. Such
an event is **doubted**: it is not appended, and its object is not listed as unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA
from tidelog.journal.audit import id_mark, read_records
from tidelog.journal.lookup import Lookup, Occurrence
from tidelog.log.base import Log
from tidelog.log.topics import read_head

__all__ = ["Present"]

_LOOKED_UP = 10_000  # ids at once
_READ = 200  # events at once, with their values
_SAME = [name for name in STORED_SCHEMA.names if name != "timestamp"]

Rows = npt.NDArray[np.bool_]


class Present:
    """What a topic has, as it was when this was made."""

    def __init__(self, log: Log, lookup: Lookup) -> None:
        self._log = log
        self._lookup = lookup
        self._topic = lookup.topic
        partitions = range(self._topic.partitions)
        self._ends = [read_head(log, self._topic, each)[0].next for each in partitions]

    def look(self, events: pa.Table) -> tuple[Rows, Rows]:
        """Which rows the topic has, and which are doubted."""
        has, doubted = (np.zeros(events.num_rows, np.bool_) for _ in range(2))
        rows: dict[str, list[int]] = {}
        for row, event_id in enumerate(events.column("id").to_pylist()):
            if event_id is not None:
                rows.setdefault(event_id, []).append(row)
        met = self._met(sorted(rows))
        updated = self._updated() if met else set()
        times = events.column("timestamp").cast(pa.int64())
        for first in range(0, len(met), _READ):
            found = self._lookup.find(met[first : first + _READ], columns=None).events
            for event_id, some in found.items():
                there = [each for each in some if self._was_here(each)]
                is_updated = id_mark(event_id) in updated
                for row in rows[event_id]:
                    content, time_ms = _content(events.slice(row, 1)), times[row].as_py()
                    if any(e.time_ms >= time_ms and _content(e.row) == content for e in there):
                        has[row] = True
                    else:
                        doubted[row] = is_updated and bool(there)
        return has, doubted

    def _met(self, ids: Sequence[str]) -> list[str]:
        """Those that events of the topic have."""
        met: list[str] = []
        for first in range(0, len(ids), _LOOKED_UP):
            found = self._lookup.find(ids[first : first + _LOOKED_UP]).events
            met += [each for each in found if any(map(self._was_here, found[each]))]
        return met

    def _was_here(self, event: Occurrence) -> bool:
        return event.offset < self._ends[event.partition]

    def _updated(self) -> set[str]:
        """The marks of ids whose events were updated."""
        records = read_records(self._log, self._topic)
        updates = (record for record, _ in records if record.op == "update")
        return {each.id for record in updates for each in record.events if each.id is not None}


def _content(row: pa.RecordBatch | pa.Table) -> dict[str, Any]:
    """All but the time of the one event in it."""
    content: dict[str, Any] = row.select(_SAME).to_pylist()[0]
    return content
