"""Amendments of one partition on their way into the catalog: a few rows in a write, with the head.

Every write expects the head as it is known, and counts its rows in it; so whoever holds a head
knows all amendments that there are, and an update never lands on a delete that it has not seen. A
lost reply is settled by the first row: it has our record's id and the sequence that we gave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tidelog.catalog.base import Put
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.journal.lookup import Seen, amendment_of
from tidelog.journal.rows import MovedError
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.topics import find_topic, read_head
from tidelog.model import layout, limits
from tidelog.model.run import Amendment, Head, encode_row
from tidelog.model.topic import Topic

__all__ = ["INLINE_BYTES_MAX", "Mark", "Marker"]

INLINE_BYTES_MAX = 8_192  # of a new value in a row; a larger one is an object
_ROWS_AT_ONCE = limits.CHANGES_MAX - 1  # beside the head


@dataclass(frozen=True, slots=True)
class Mark:
    """What shall become of the event at an offset."""

    id: str | None
    partition: int
    offset: int
    kind: Literal["update", "delete"]
    value: bytes | None = None


@dataclass
class Marker:
    """Writes the marks of one audit record into one partition."""

    log: Log
    topic: Topic
    partition: int
    seen: Seen  # the head by which the events were found
    audit: str
    at_ms: int
    _stored: dict[int, tuple[int, str]] = field(default_factory=dict)  # offset → generation, key

    def put(self, marks: Sequence[Mark]) -> Iterator[Mark]:
        """Write them; those that were there to be amended, once they are durable.

        ``MovedError`` when an update's events must be looked for again, since journals were
        compiled meanwhile. ``NotFoundError`` when the topic was deleted.
        """
        for first in range(0, len(marks), _ROWS_AT_ONCE):
            done = self._put(marks[first : first + _ROWS_AT_ONCE])
            self.log.wakeups.amended(self.topic.incarnation)
            yield from done

    def _put(self, marks: Sequence[Mark]) -> Sequence[Mark]:
        sent_for = write_id = ""
        for delay_s in RACE.delays_s(self.log.random):
            head, version = self.seen
            left = [mark for mark in marks if mark.offset >= head.start]
            if not left:
                return ()
            new_head, rows = self._plan(left, head)
            if version != sent_for:  # else it is the same write again
                sent_for, write_id = version, self.log.ids.new()
            try:
                where = layout.topic_partition(self.topic.incarnation, self.partition)
                change = Put("head", encode_row(new_head), expect=version)
                self.log.catalog.write(where, change, *rows, write_id=write_id)
            except ConflictError:
                pass
            except UnknownOutcomeError:
                if self._landed(left[0], head.amendments + 1):
                    self.seen = read_head(self.log, self.topic, self.partition)
                    return left
            else:
                self.seen = new_head, write_id
                return left
            self.log.clock.sleep(delay_s)
            marks = self._look_again(left)
        raise UnavailableError(
            f"partition `{self.topic.name}/{self.partition}`: too many writers at once: try again"
        )

    def _plan(self, marks: Sequence[Mark], head: Head) -> tuple[Head, list[Put]]:
        """What one write makes true."""
        rows = []
        for sequence, mark in enumerate(marks, head.amendments + 1):
            row = Amendment(sequence, mark.kind, self.at_ms, audit=self.audit)
            if mark.kind == "update" and len(mark.value or b"") <= INLINE_BYTES_MAX:
                row = msgspec.structs.replace(row, value=mark.value)
            elif mark.kind == "update":
                row = msgspec.structs.replace(row, object=self._object(mark, head.floor))
            rows.append(Put(layout.amend_row(mark.offset), encode_row(row)))
        offsets = [mark.offset for mark in marks]
        first, last = head.amended or (offsets[0], offsets[0])
        new_head = msgspec.structs.replace(
            head,
            amendments=head.amendments + len(marks),
            amended=(min(first, *offsets), max(last, *offsets)),
        )
        return new_head, rows

    def _object(self, mark: Mark, floor: int) -> str:
        """Where a large value stands; stored anew when a sweep has passed its generation."""
        generation, key = self._stored.get(mark.offset, (-1, ""))
        if generation < floor or not key:
            topic = self.topic
            if topic.generation < floor:
                topic = find_topic(self.log, self.topic.name)
                if topic.incarnation != self.topic.incarnation:
                    raise self._deleted()
                self.topic = topic
            generation = topic.generation
            key = layout.amendment(topic.incarnation, generation, self.log.ids.new())
            self.log.store.put(key, mark.value or b"")
            self._stored[mark.offset] = generation, key
        return key

    def _landed(self, mark: Mark, sequence: int) -> bool:
        row = amendment_of(self.log, self.topic, self.partition, mark.offset)
        return row is not None and (row.audit, row.sequence) == (self.audit, sequence)

    def _look_again(self, marks: Sequence[Mark]) -> Sequence[Mark]:
        """Somebody else has written the head: which marks are still to be put."""
        before = self.seen[0]
        self.seen = read_head(self.log, self.topic, self.partition)
        head = self.seen[0]
        if head.closed:
            raise self._deleted()
        if marks[0].kind == "delete":
            return marks  # whatever others did, it is to go
        if head.compiled != before.compiled:
            raise MovedError(
                f"partition `{self.topic.name}/{self.partition}`: was compiled meanwhile: try again"
            )
        if head.amendments == before.amendments:
            return marks
        rows = [amendment_of(self.log, self.topic, self.partition, each.offset) for each in marks]
        return [
            mark
            for mark, row in zip(marks, rows, strict=True)
            if row is None or row.kind != "delete"
        ]

    def _deleted(self) -> NotFoundError:
        return NotFoundError(f"topic `{self.topic.name}`: was deleted: nothing was amended")
