"""Turns rows of a change log into events: one for each change, in the order of its stream.

All rows of one stream and time are a batch, which is never split: it is within one window, and its
last row has a mark. Pre-images and post-images are joined to the change of the same row. An image
without such a change, for example of a row that a range delete removed, is its own event.

The value of an event is JSON::

    {"columns": {"name":  {"type": "text", "value": "x"},                a column was set
                 "gone":  {"type": "int", "deleted": true},              it was deleted
                 "tags":  {"type": "set<text>", "added": ["a"], "removed": ["b"]},
                 "words": {"type": "list<text>", "value": ["a"]}},       a collection was replaced
     "ttl": 60,                                                          seconds, if it has any
     "before": {"name": {"type": "text", "value": "w"}}, "after": {…},   the images
     "batch": {"number": 0, "of": 2, "whole": true}}                     if it is part of a batch

Unchanged columns are not included. Elements added to a list have their times as keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tidelog.connectors.scylla.schema import Column, RowLayout
from tidelog.connectors.scylla.session import ScyllaWay
from tidelog.connectors.scylla.types import second_text
from tidelog.model.event import Headers

__all__ = ["LATE", "OPERATIONS", "Changes", "time_ms_of"]

LATE = "tidelog.late_ms"  # header of an event that a sweep added: its age when found
OPERATIONS = (
    "pre_image",
    "update",
    "insert",
    "row_delete",
    "partition_delete",
    "range_delete_start_inclusive",
    "range_delete_start_exclusive",
    "range_delete_end_inclusive",
    "range_delete_end_exclusive",
    "post_image",
)
_PRE_IMAGE, _POST_IMAGE = b"\x00", b"\x09"
_TRUE = b"\x01"
_TICKS_1970 = 0x01B21DD213814000  # of 100 ns, the epoch of timeuuids

_Made = tuple[int, str, bytes, bytes, str, Headers, bytes]


def time_ms_of(timeuuid: bytes) -> int:
    """Returns the time of a timeuuid."""
    low = int.from_bytes(timeuuid[:4], "big")
    high = int.from_bytes(timeuuid[6:8], "big") & 0x0FFF
    ticks = high << 48 | int.from_bytes(timeuuid[4:6], "big") << 32 | low
    return (ticks - _TICKS_1970) // 10_000


class Changes:
    """The events of one window."""

    def __init__(
        self,
        layout: RowLayout,
        way: ScyllaWay,
        generation_ms: int,
        known: AbstractSet[bytes] = frozenset(),
        now_ms: int = 0,
    ) -> None:
        self._layout = layout
        self._way = way
        self._known = known  # changes that other pipelines committed
        self._now_ms = now_ms
        self._front = f'{{"cursor_gen":"{_moment(generation_ms)}","cursor_time":"'
        self._seconds: dict[int, str] = {}
        self._streams: dict[bytes, str] = {}
        self._unit: list[Any] = []
        self.events: list[_Made] = []
        self.unnamed: list[tuple[int, tuple[bytes, ...]]] = []  # their keys must be looked up

    def __len__(self) -> int:
        return len(self.events)

    def add(self, rows: Iterable[Any]) -> None:
        """Adds rows of some streams in order; the rows of each stream are consecutive."""
        unit, end_at = self._unit, self._layout.end_at
        for row in rows:
            if unit and (row[1] != unit[0][1] or row[0] != unit[0][0]):
                self._take(unit)
                unit.clear()
            if end_at < 0 or row[end_at] != _TRUE:
                unit.append(row)
            elif unit:
                self._take([*unit, row])
                unit.clear()
            else:
                self._put(row, "")  # a batch of one row, like most

    def end(self) -> None:
        """Ends these streams: no more rows follow."""
        if self._unit:
            self._take(self._unit)
        self._unit.clear()

    def extend(self, other: Changes) -> None:
        """Appends all events of another window."""
        base = len(self.events)
        self.events += other.events
        self.unnamed += [(base + index, values) for index, values in other.unnamed]

    def columns(self) -> list[Sequence[Any]]:
        """Returns the columns of all events: time, id, key, value, type, headers, identity."""
        return list(zip(*self.events, strict=True)) if self.events else [()] * 7

    # Internals.

    def _take(self, unit: list[Any]) -> None:
        """Adds a batch: the rows of one stream and time."""
        end_at = self._layout.end_at
        whole = end_at < 0 or unit[-1][end_at] == _TRUE
        if not whole and self._way.mode == "fast":
            return  # the sweep finds it complete
        if len(unit) == 1:
            self._put(unit[0], "" if whole else ',"batch":{"number":0,"of":1,"whole":false}')
            return
        changes, before, after = _join_images(self._layout, unit)
        texts = {True: "true", False: "false"}
        for number, row in enumerate(changes):
            tail = ""
            for name, images in (("before", before), ("after", after)):
                image = images.get(number)
                if image is not None:
                    tail += f',"{name}":{{{self._image(image)}}}'
            if len(changes) > 1 or not whole:
                tail += f',"batch":{{"number":{number},"of":{len(changes)},"whole":{texts[whole]}}}'
            self._put(row, tail, (before.get(number), after.get(number)))

    def _put(self, row: Any, tail: str, images: Sequence[Any] = ()) -> None:
        stream, time, seq, operation, *_ = row
        identity = stream + time + seq
        if identity in self._known:
            return
        time_ms = time_ms_of(time)
        name = OPERATIONS[operation[0]] if operation[0] < len(OPERATIONS) else str(operation[0])
        is_image = operation in (_PRE_IMAGE, _POST_IMAGE)
        columns = self._image(row) if is_image else self._columns(row)
        ttl_at = self._layout.ttl_at
        if ttl_at >= 0 and row[ttl_at] is not None:
            tail = f',"ttl":{int.from_bytes(row[ttl_at], "big", signed=True)}{tail}'
        if self._way.type_column is not None:
            name = self._of_column(self._way.type_column, row, images) or name
        late = ((LATE, b"%d" % max(0, self._now_ms - time_ms)),) if self._way.of else ()
        event_id = self._id(stream, time, seq, time_ms)
        value = f'{{"columns":{{{columns}}}{tail}}}'.encode()
        key = self._key(row, images)
        self.events.append((max(0, time_ms), event_id, key, value, name, late, identity))

    def _id(self, stream: bytes, time: bytes, seq: bytes, time_ms: int) -> str:
        second = self._seconds.get(time_ms // 1000)
        if second is None:
            second = self._seconds[time_ms // 1000] = _moment(time_ms // 1000 * 1000)
        name = self._streams.get(stream)
        if name is None:
            name = self._streams[stream] = f'","stream_id":"{stream.hex()}","stream_time":"'
        text = time.hex()
        return (
            f"{self._front}{second}{name}{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-"
            f'{text[20:]}","stream_seq":{int.from_bytes(seq, "big", signed=True)}}}'
        )

    def _key(self, row: Any, images: Sequence[Any]) -> bytes:
        wanted = self._way.key_column or self._way.key_lookup
        if wanted is not None:
            found = self._of_column(wanted, row, images)
            if found is not None:
                return found.encode()
            values = tuple(row[at] for _, at, _ in self._layout.key)
            if self._way.key_lookup is not None and None not in values:
                self.unnamed.append((len(self.events), values))
        parts = [
            label + kind(row[at]) for label, at, kind in self._layout.key if row[at] is not None
        ]
        return f"{{{','.join(parts)}}}".encode()

    def _columns(self, row: Any) -> str:
        parts: list[str] = []
        done: Column | None = None  # the cells of a column are adjacent
        for told, cell in zip(self._layout.told, row, strict=True):
            if cell is None or told is None:
                continue
            if isinstance(told, tuple):
                parts.append(f"{told[0]}{told[1](cell)}}}")
            elif told is not done:
                done = told
                text = _elements(told, row) if told.elements_at >= 0 else _deletion(told, row)
                if text:
                    parts.append(text)
        return ",".join(parts)

    def _image(self, row: Any) -> str:
        return ",".join(
            f'{each.label},"value":{each.whole(row[each.at])}}}'
            for each in self._layout.columns
            if row[each.at] is not None
        )

    def _of_column(self, name: str, row: Any, images: Sequence[Any]) -> str | None:
        """Returns a column as text: from the change, otherwise from the images."""
        for label, at, kind in self._layout.key:
            if label == f'"{name}":' and row[at] is not None:
                return text_of(kind(row[at]))
        column = self._layout.column(name)
        for each in (row, *reversed(images)) if column is not None else ():
            if column is not None and each is not None and each[column.at] is not None:
                return text_of(column.whole(each[column.at]))
        return None


def text_of(value: str) -> str:
    """Returns a JSON value as plain text."""
    return str(json.loads(value)) if value.startswith('"') else value


def _deletion(column: Column, row: Any) -> str:
    """Returns what the deletion mark of a column says."""
    if row[column.at] is None and row[column.deleted_at] == _TRUE:
        return f'{column.label},"deleted":true}}'
    return ""


def _elements(column: Column, row: Any) -> str:
    """Returns what changed in a collection or a user type; empty if nothing did."""
    value, removed = row[column.at], row[column.elements_at]
    if column.deleted_at >= 0 and row[column.deleted_at] == _TRUE:
        if value is None:
            return f'{column.label},"deleted":true}}'
        return f'{column.label},"value":{column.whole(value)}}}'
    text = "" if value is None else f',"added":{column.added(value)}'
    if removed is not None and column.removed is not None:
        text += f',"removed":{column.removed(removed)}'
    return f"{column.label}{text}}}" if text else ""


def _join_images(
    layout: RowLayout, unit: list[Any]
) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
    """Returns the changes of a batch and, by their numbers, the images of the same rows."""
    key = [at for _, at, _ in layout.key]

    def place(row: Any) -> tuple[bytes | None, ...]:
        return tuple(row[at] for at in key)

    first: dict[Any, Any] = {}
    last: dict[Any, Any] = {}
    for row in unit:
        if row[3] not in (_PRE_IMAGE, _POST_IMAGE):
            first.setdefault(place(row), row)
            last[place(row)] = row
    before: dict[int, Any] = {}
    after: dict[int, Any] = {}
    changes: list[Any] = []
    joined: list[tuple[dict[int, Any], Any, Any]] = []
    for row in unit:
        if row[3] == _PRE_IMAGE and place(row) in first:
            joined.append((before, first[place(row)], row))
        elif row[3] == _POST_IMAGE and place(row) in last:
            joined.append((after, last[place(row)], row))
        else:
            changes.append(row)
    numbers = {id(row): number for number, row in enumerate(changes)}
    for images, change, image in joined:
        images[numbers[id(change)]] = image
    return changes, before, after


def _moment(time_ms: int) -> str:
    """Formats a time like rscylla does: RFC 3339, without trailing digits."""
    whole, rest = divmod(time_ms, 1000)
    text = second_text(whole)
    return f"{text}.{rest:03}".rstrip("0") + "Z" if rest else f"{text}Z"
