"""Appends events only if their ids are new (``if_absent``).

Such events go to the partition of their id. There, the check and the append are atomic: the append
expects the partition's end as it was when the check found nothing, and the check is repeated when
others have moved that end. Other partitions, where a key or a person has put events with the same
id, are checked before. But other producers can append there at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.partitioner import partitions_for
from tidelog.coordination.outcome import append_error
from tidelog.errors import AlreadyExistsError, InvalidError, TidelogError, UnknownOutcomeError
from tidelog.journal.lookup import Lookup, Occurrence
from tidelog.model.event import Positions

__all__ = ["append_absent"]

_NAMED_MAX = 10  # ids that an error lists

Events = Any  # Event objects, or an Arrow table or batch


class Append(Protocol):
    """Appends events to one partition, at the offset that ``find_end`` returns.

    Asks it again after a conflict. What it raises refuses the events.
    """

    def __call__(
        self, events: Any, *, partition: int, find_end: Callable[[], int]
    ) -> Positions: ...


def append_absent(lookup: Lookup, events: Events, append: Append) -> Positions:
    """Appends events whose ids are new; returns their positions, in the order given.

    Raises ``AlreadyExistsError`` with the ids that exist, and appends nothing. If one is appended
    by others between the appends to two partitions, raises ``PartialAppendError``, which says what
    is stored.
    """
    given: Any = events if isinstance(events, pa.Table | pa.RecordBatch) else list(events)
    ids = _ids(given)
    name, partitions = lookup.topic.name, lookup.topic.partitions
    found = lookup.find(ids)
    if found.events:
        raise _exist(name, found.events)
    keys = pa.chunked_array([pa.array(ids, pa.string()).cast(pa.binary())])
    places = partitions_for(keys, partitions, 0)
    offsets = np.full(len(ids), -1, np.int64)
    rows = np.empty(0, np.int64)
    try:
        for partition in np.unique(places).tolist():
            rows = np.flatnonzero(places == partition)
            lot = _Lot(partition, [ids[row] for row in rows.tolist()], _select_rows(given, rows))
            end = found.heads[partition][0].next
            offsets[rows] = lot.append(lookup, append, end).offsets
    except TidelogError as exc:
        unknown = rows.tolist() if isinstance(exc, UnknownOutcomeError) else []
        raise append_error(Positions(name, places, offsets), unknown, exc)  # noqa: B904 - its cause
    return Positions(name, places, offsets)


@dataclass(frozen=True)
class _Lot:
    """The events of one partition."""

    partition: int
    ids: Sequence[str]
    events: Any

    def append(self, lookup: Lookup, append: Append, end: int) -> Positions:
        """Appends at ``end``, up to which nothing was found, or later after checking again."""
        known = [end]

        def find_end() -> int:
            if known:
                return known.pop()
            found = lookup.find(self.ids, partitions=[self.partition])
            if found.events:
                raise _exist(lookup.topic.name, found.events)
            return found.heads[self.partition][0].next

        return append(self.events, partition=self.partition, find_end=find_end)


def _ids(given: Any) -> list[str]:
    """Returns the ids of events, which must all have different ids."""
    if isinstance(given, pa.Table | pa.RecordBatch):
        has_ids = "id" in given.schema.names
        ids: list[Any] = given.column("id").to_pylist() if has_ids else [None] * given.num_rows
    else:
        ids = [event.id for event in given]
    seen: set[str] = set()
    for number, each in enumerate(ids):
        if each is None:
            raise InvalidError(f"append if absent: event {number} has no id: give it one")
        if each in seen:
            raise InvalidError(
                f"append if absent: id `{each[:200]}` is given twice: give each id once"
            )
        seen.add(each)
    return ids


def _select_rows(given: Any, rows: npt.NDArray[np.int64]) -> Any:
    if isinstance(given, pa.Table | pa.RecordBatch):
        return given.take(pa.array(rows))
    return [given[row] for row in rows.tolist()]


def _exist(topic: str, found: Mapping[str, Sequence[Occurrence]]) -> AlreadyExistsError:
    named = ", ".join(f"`{each[:200]}`" for each in _first(found))
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return AlreadyExistsError(
        f"topic `{topic}`: has events with the ids {named}{more}: nothing was appended: leave "
        "them out, or update them",
        ids=list(_first(found)),
    )


def _first(found: Mapping[str, Any]) -> Iterator[str]:
    return (each for number, each in enumerate(found) if number < _NAMED_MAX)
