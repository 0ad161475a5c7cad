"""Writes amendments of one partition to the catalog: a few rows per write, together with the head.

Every write expects the head as we know it, and counts its rows in it. Five rules follow:

- An update is written only against a head all of whose amendments were checked for the update's own
  offsets. ``_looked`` is the sequence up to which that is true of every change still to be written.
  It moves only over this writer's own rows. If a batch finds a head with more amendments, it reads
  the rows of its offsets first. So an update never lands on a delete that it has not seen.
- A swap of a compile may have removed those rows. Then the events are looked up again, by a caller
  that repeats only what is not in ``applied``.
- If a write replaces a row that names an object, it lists that object as unused. So the object must
  be known before the write: from the lookup that found the event, while all amendments since are
  our own, or from a read.
- A large value may be stored again because a sweep has raised the floor above its generation, or
  its event may have to be looked up again. Then its old key is listed as unused, by the write that
  names the new one or by a separate one (``abandoned``).
- A lost reply is settled by the rows of the batch, once the head has moved past the version that
  the write expects. A row with a higher sequence than the head had before that write is ours, or
  newer than ours. Either way the change is done, and writing it again would bring an older value
  back. An offset without such a row shows that the batch did not land, and never will.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import crc32c
import msgspec

from tidelog.catalog.base import Put
from tidelog.catalog.update import attempts
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal.listing import MovedError, covering
from tidelog.journal.lookup import VersionedHead, amendment_of
from tidelog.log.run_reader import all_pending
from tidelog.log.topics import find_topic, read_head
from tidelog.log.unused_objects import list_unused
from tidelog.model import layout, limits
from tidelog.model.topic import Amendment, Head, Topic, encode_row
from tidelog.store.base import put_fresh

__all__ = ["INLINE_BYTES_MAX", "AmendmentChange", "AmendmentWriter", "Applied"]

INLINE_BYTES_MAX = 8_192  # of a new value in a row; a larger one is an object
_ROWS_AT_ONCE = limits.CHANGES_MAX - 2  # besides the head and the row of unused objects
_NEAR = 8  # offsets per change: a scan over this many costs less than a read of each row


@dataclass(frozen=True, slots=True)
class AmendmentChange:
    """What to do with the event at an offset."""

    id: str | None
    partition: int
    offset: int
    kind: Literal["update", "delete"]
    value: bytes | None = None
    time_ms: int = 0  # of the event
    is_looked: bool = False  # whether its amendment was looked up with the event
    before: str | None = None  # the object that this amendment names, if it was


Applied = dict[tuple[int, int], AmendmentChange]
"""Changes that are durable, by partition and offset."""


@dataclass
class AmendmentWriter:
    """Writes the changes of one audit record into one partition."""

    context: Context
    topic: Topic
    partition: int
    seen: (
        VersionedHead  # the head by which the events were found; then the one that a write expects
    )
    audit: str
    at_ms: int
    applied: Applied = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)  # stored values that no row will name
    _looked: int = field(init=False)  # amendments up to here were checked, for all changes
    _found: VersionedHead = field(init=False)
    _stored: dict[int, tuple[int, str]] = field(default_factory=dict)  # offset → generation, key

    def __post_init__(self) -> None:
        self._found = self.seen
        self._looked = self.seen[0].amendments

    @property
    def reached(self) -> VersionedHead:
        """Returns the newest head by which other events of the same lookup may be amended."""
        head = self.seen[0]
        is_known = self._looked == head.amendments and head.compiled == self._found[0].compiled
        return self.seen if is_known else self._found

    def put(self, changes: Sequence[AmendmentChange]) -> Sequence[AmendmentChange]:
        """Writes the changes; returns those whose events existed.

        Each change is in ``applied`` as soon as it is durable. Raises ``MovedError`` if the events
        of the others must be looked up again, since journals were compiled in the meantime. Raises
        ``NotFoundError`` if the topic was deleted, and ``UnknownOutcomeError`` if a reply was lost
        and a compile has removed the rows that would settle it.
        """
        for first in range(0, len(changes), _ROWS_AT_ONCE):
            self._put(changes[first : first + _ROWS_AT_ONCE])
            self.context.wakeups.amended(self.topic.incarnation)
        return [change for change in changes if (change.partition, change.offset) in self.applied]

    def _put(self, changes: Sequence[AmendmentChange]) -> None:
        """Writes one batch, against a head whose amendments of its offsets are known."""
        sent_for = write_id = ""
        before: Head | None = None  # what the first write with an unknown outcome expected
        for number in attempts(self.context, _busy(self.topic.name, self.partition)):
            if number:
                self.seen = read_head(self.context, self.topic, self.partition)
            head, version = self.seen
            if head.closed:
                raise self._deleted_error()
            if version == write_id:
                self._wrote(changes, head)
                return
            changes = [change for change in changes if change.offset >= head.start]
            if version != sent_for:  # otherwise it is the same write again
                changes = self._still_to_put(changes, before)
                sent_for, write_id = version, self.context.ids.new()
            if not changes:
                return
            new_head, rows = self._plan(changes, head)
            rows += list_unused(write_id, [*self._replaced_objects(changes, head), *self.abandoned])
            try:
                where = layout.topic_partition(self.topic.incarnation, self.partition)
                change = Put("head", encode_row(new_head), expect=version)
                self.context.catalog.write(where, change, *rows, write_id=write_id)
            except ConflictError:
                pass
            except UnknownOutcomeError:
                before = before or head
            else:
                self.seen = new_head, write_id
                self._wrote(changes, new_head)
                return

    def _wrote(self, changes: Sequence[AmendmentChange], head: Head) -> None:
        """Counts a batch as written: the last amendments that a head has."""
        if self._looked == head.amendments - len(changes):
            self._looked = head.amendments
        self.abandoned.clear()
        self._done(changes)

    def _done(self, changes: Sequence[AmendmentChange]) -> None:
        for change in changes:
            self.applied[change.partition, change.offset] = change

    def _still_to_put(
        self, changes: Sequence[AmendmentChange], before: Head | None
    ) -> Sequence[AmendmentChange]:
        """Returns the changes that may be written against the current head, by the rules above."""
        head = self.seen[0]
        if not changes or changes[0].kind == "delete":
            return changes  # a delete applies whatever others did
        is_settled = before is None or before.amendments == head.amendments
        rows: Sequence[Amendment | None] = [None] * len(changes)
        if head.amendments != self._looked or not is_settled:
            rows = self._rows(changes)
        left: list[AmendmentChange] = []
        overtaken: list[AmendmentChange] = []
        for change, row in zip(changes, rows, strict=True):
            if row is not None and row.kind == "delete":
                self._leave(change)
                continue  # final: the event no longer exists
            is_newer = before is not None and row is not None and row.sequence > before.amendments
            (overtaken if is_newer else left).append(change)
        self._done(overtaken)
        if before is not None and any(row and row.audit == self.audit for row in rows):
            self._done(left)  # one row of a batch is ours: all of it landed, and some was compiled
            return []
        if left and head.compiled != self._found[0].compiled:
            is_known = is_settled or self._is_not_compiled(left[0], before)
            for each in left if is_known else ():
                self._leave(each)
            raise self._moved_error(is_known)
        return left

    def _is_not_compiled(self, change: AmendmentChange, before: Head | None) -> bool:
        """Returns whether no journal contains what came after a head: then its row would exist."""
        offset = change.offset
        head = self.seen[0]
        try:
            runs = list(
                covering(self.context, self.topic, self.partition, head, (offset, offset + 1))
            )
        except MovedError:
            return False
        applied = [run.journal.applied for run in runs if run.journal is not None]
        return before is not None and all(each <= before.amendments for each in applied)

    def _rows(self, changes: Sequence[AmendmentChange]) -> Sequence[Amendment | None]:
        """Returns the current amendments of a batch's events."""
        offsets = [change.offset for change in changes]
        first, last = min(offsets), max(offsets)
        if last - first > _NEAR * len(offsets):
            return [
                amendment_of(self.context, self.topic, self.partition, each) for each in offsets
            ]
        found = all_pending(self.context, self.topic, self.partition, self.seen[0], first, last + 1)
        return [found.get(each) for each in offsets]

    def _replaced_objects(self, changes: Sequence[AmendmentChange], head: Head) -> Sequence[str]:
        """Returns the objects that rows of these offsets name, as of the head to expect."""
        first, last = head.amended or (0, -1)
        inside = [change for change in changes if first <= change.offset <= last]
        if not inside:
            return ()
        if self._looked == head.amendments and all(change.is_looked for change in inside):
            found = [change.before for change in inside]
        else:
            found = [None if row is None else row.object for row in self._rows(inside)]
        ours = {key for _, key in self._stored.values()}
        return [key for key in found if key is not None and key not in ours]

    def _plan(self, changes: Sequence[AmendmentChange], head: Head) -> tuple[Head, list[Put]]:
        """Returns the new head and the rows of one write."""
        rows = []
        for sequence, change in enumerate(changes, head.amendments + 1):
            row = Amendment(sequence, change.kind, self.at_ms, audit=self.audit)
            if change.kind == "update" and len(change.value or b"") <= INLINE_BYTES_MAX:
                row = msgspec.structs.replace(row, value=change.value)
            elif change.kind == "update":
                crc = crc32c.crc32c(change.value or b"")
                row = msgspec.structs.replace(row, object=self._object(change, head), crc=crc)
            rows.append(Put(layout.amend_row(change.offset), encode_row(row)))
        offsets = [change.offset for change in changes]
        first, last = head.amended or (offsets[0], offsets[0])
        new_head = msgspec.structs.replace(
            head,
            amendments=head.amendments + len(changes),
            amended=(min(first, *offsets), max(last, *offsets)),
        )
        return new_head, rows

    def _object(self, change: AmendmentChange, head: Head) -> str:
        """Returns the key of a large value.

        Stores it again if its generation is below the floor.
        """
        floor = head.floor
        generation, key = self._stored.get(change.offset, (-1, ""))
        if generation < floor or not key:
            self._leave(change)
            topic = self.topic
            if topic.generation < floor:
                topic = find_topic(self.context, self.topic.name)
                if topic.incarnation != self.topic.incarnation:
                    raise self._deleted_error()
                self.topic = topic
            generation = topic.generation
            key = layout.amendment(
                topic.incarnation,
                generation,
                self.partition,
                head.amendments,
                self.context.ids.new(),
            )
            put_fresh(self.context.store, key, change.value or b"")
            self._stored[change.offset] = generation, key
        return key

    def _leave(self, change: AmendmentChange) -> None:
        """Marks the stored value of a change to be listed as unused: no row will name it."""
        _, key = self._stored.pop(change.offset, (-1, ""))
        if key:
            self.abandoned.append(key)

    def _moved_error(self, is_settled: bool) -> Exception:
        where = f"partition `{self.topic.name}/{self.partition}`"
        if is_settled:
            return MovedError(f"{where}: was compiled meanwhile: try again")
        return UnknownOutcomeError(
            f"{where}: a reply was lost, and compile has removed the rows that show whether the "
            "update landed: read the events, then decide"
        )

    def _deleted_error(self) -> NotFoundError:
        return NotFoundError(f"topic `{self.topic.name}`: was deleted: nothing was amended")


def _busy(topic: str, partition: int) -> UnavailableError:
    return UnavailableError(f"partition `{topic}/{partition}`: too many writers at once: try again")
