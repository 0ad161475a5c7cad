"""How often the scribe works: a ticket every N minutes, and those older than M are dropped.

All scribes of a home share one row. Whoever looks first in a stretch of N minutes adds its ticket,
by the row's version, so there is one for each stretch however many look. At most M/N wait. A ticket
is removed when its turn is over: that of a scribe that died is met again by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Check, Put
from tidelog.errors import InvalidError
from tidelog.log.base import Log
from tidelog.log.hold import write_held
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.run import decode_row, encode_row
from tidelog.model.times import duration_text

__all__ = ["Place", "Queue", "Rate", "Tickets"]

_ATTEMPTS = 100  # against other scribes on one row
_WAITING_MAX = 1_000  # tickets; the row has a limit


@dataclass(frozen=True, slots=True)
class Rate:
    """When tickets are added, and when they are dropped."""

    every_ms: int = 600_000
    discard_ms: int = 3_600_000

    def __post_init__(self) -> None:
        if self.every_ms < 1:
            raise InvalidError(f"scribe: a turn every {self.every_ms}ms: give 1ms or more")
        if not self.every_ms < self.discard_ms <= self.every_ms * _WAITING_MAX:
            raise InvalidError(
                f"scribe: a ticket every {duration_text(self.every_ms)}, dropped after "
                f"{duration_text(self.discard_ms)}: drop it after more than "
                f"{duration_text(self.every_ms)} and at most "
                f"{duration_text(self.every_ms * _WAITING_MAX)}"
            )


class Place(Persisted, frozen=True):
    """A partition of a topic, where a turn begins or ended."""

    topic: str = ""  # name; empty: the first
    partition: int = 0


class Queue(Persisted, frozen=True):
    """The row that scribes share."""

    issued_ms: int = 0  # the stretch that had its ticket last
    tickets: tuple[int, ...] = ()  # those that wait, by their stretch, the oldest first
    dropped: int = 0  # so far
    turns: int = 0  # so far
    place: Place = Place()  # where the next turn begins
    swept_ms: int = 0  # when a sweep last ended, by the clock of that scribe


class Tickets:
    """One scribe's view of the queue."""

    def __init__(self, log: Log, rate: Rate) -> None:
        self._log = log
        self._rate = rate

    def issue(self) -> Queue:
        """Add the ticket of this stretch if nobody has, drop old ones; the queue as it is now."""
        for _ in range(_ATTEMPTS):
            queue, version = self.read()
            wanted = self._issued(queue)
            if wanted == queue or self._put(wanted, version):
                return wanted
        raise _crowded()

    def read(self) -> tuple[Queue, str | None]:
        """The queue and its version; an empty one before anybody wrote it."""
        row = self._log.catalog.get(layout.SCRIBE, layout.SCRIBE_QUEUE)
        if row is None:
            return Queue(), None
        return decode_row(row.value, Queue, "the scribe's queue"), row.version

    def done(self, ticket: int | None, place: Place, swept_ms: int, held: Check) -> bool:
        """A turn is over: its ticket goes. False when the scribe's row is no longer ours."""
        for _ in range(_ATTEMPTS):
            queue, version = self.read()
            wanted = msgspec.structs.replace(
                queue,
                tickets=tuple(each for each in queue.tickets if each != ticket),
                turns=queue.turns + 1,
                place=place,
                swept_ms=swept_ms,  # not the later one: a wrong clock may have written it
            )
            if self._put(wanted, version, held):
                return True
            row = self._log.catalog.get(layout.SCRIBE, held.row)
            if row is None or row.version != held.expect:
                return False
        raise _crowded()

    def _issued(self, queue: Queue) -> Queue:
        now_ms = self._log.clock.now_ms()
        stretch = now_ms // self._rate.every_ms * self._rate.every_ms
        waiting = queue.tickets
        # A stretch that lies ahead comes from a clock that was wrong.
        if stretch > queue.issued_ms or queue.issued_ms > stretch + self._rate.every_ms:
            waiting = (*waiting, stretch)
            queue = msgspec.structs.replace(queue, issued_ms=stretch)
        kept = tuple(each for each in waiting if now_ms - each < self._rate.discard_ms)
        dropped = queue.dropped + len(waiting) - len(kept)
        return msgspec.structs.replace(queue, tickets=kept[-_WAITING_MAX:], dropped=dropped)

    def _put(self, queue: Queue, version: str | None, *held: Check) -> bool:
        change = Put(layout.SCRIBE_QUEUE, encode_row(queue), version or ABSENT)
        what = "the scribe's queue"
        return write_held(self._log, layout.SCRIBE, what, change, *held) is not None


def _crowded() -> InvalidError:
    return InvalidError("the scribe's queue: too many scribes at once: run one or two of a home")
