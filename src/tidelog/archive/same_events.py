"""Compares two sources of a source partition whose incarnation is unknown.

Files of a backup do not name their topic's incarnation: a topic that was deleted and created again
has other events at the same offsets. So some events that both hold are compared. They are different
if none has the same time, id, key or value: an update or a transform may change some of these.
"""

from __future__ import annotations

from tidelog.codec.formats.raw_columns import plain_rows
from tidelog.connectors.source import RangeReader

__all__ = ["SAMPLE_OFFSETS", "are_other_events"]

SAMPLE_OFFSETS = 1_000  # of a source partition to compare

_FIELDS = ("timestamp", "id", "key", "value")


def are_other_events(one: RangeReader, other: RangeReader) -> bool:
    """Returns whether two readers of a range have different events at the same offsets.

    Returns False if no offset is in both.
    """
    here, there = _events(one), _events(other)
    both = here.keys() & there.keys()
    return bool(both) and not any(_is_alike(here[each], there[each]) for each in both)


def _is_alike(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return any(a == b for a, b in zip(one, other, strict=True) if a is not None)


def _events(reader: RangeReader) -> dict[int, tuple[object, ...]]:
    """Returns the compared fields, by offset."""
    found: dict[int, tuple[object, ...]] = {}
    for chunk in reader.read():
        for row in plain_rows(chunk.batch.select(["offset", *_FIELDS]), lambda time, _: time):
            found[row["offset"]] = tuple(row[name] for name in _FIELDS)
    return found
