"""Moving a consumer's cursor from outside: planned, shown to a person, and then done as shown.

The lease is written by the version that the plan was made of, with a higher epoch and no owner. So
whoever holds it loses it at its next commit, and goes on from the new cursor when it takes the
lease again; and a plan that was overtaken by a commit changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import ConflictError, InvalidError, NotFoundError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.log.lease import Lease, decode_registered, read_lease_row
from tidelog.log.read import find_offset
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.run import encode_row
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic

__all__ = ["Move", "check_consumer", "do_move", "plan_move"]


@dataclass(frozen=True, slots=True)
class Move:
    """Where a cursor stands, and where it is to stand."""

    partition: int
    cursor: int | None  # None: nobody has read the partition yet
    to: int
    owner: str
    version: str  # of the lease; empty where there is none

    @property
    def again(self) -> int:
        """Events that will be handled a second time."""
        return max(0, (self.cursor or 0) - self.to) if self.cursor is not None else 0

    @property
    def skipped(self) -> int:
        """Events that will never be handled."""
        return max(0, self.to - self.cursor) if self.cursor is not None else 0

    @property
    def text(self) -> str:
        """As a form carries it."""
        return f"{self.partition}:{self.to}:{self.version}"


def plan_move(log: Log, topic: Topic, name: str, partition: int, to: str) -> Move:
    """Where one cursor would go: ``earliest``, ``latest``, an offset, or a time.

    ``InvalidError`` for an offset that is not there.
    """
    topic.check_partition(partition)
    head, _ = read_head(log, topic, partition)
    if to == "earliest":
        offset = head.start
    elif to == "latest":
        offset = head.next
    elif to.isascii() and to.isdigit() and len(to) < 20:
        offset = int(to)
    else:
        offset = find_offset(log, topic, partition, moment_ms(to, log.clock.now_ms()))
    if not head.start <= offset <= head.next:
        raise InvalidError(
            f"seek in `{topic.name}/{partition}`: offset {offset} is outside of "
            f"[{head.start}, {head.next}]: give one inside"
        )
    found = read_lease_row(log, topic, name, partition)
    if found is None or found[0].deleted:
        return Move(partition, None, offset, "", found[1] if found else "")
    return Move(partition, found[0].cursor, offset, found[0].owner, found[1])


def do_move(log: Log, topic: Topic, name: str, text: str) -> bool:
    """Do what was planned; False when the lease has changed since. ``InvalidError``."""
    partition, to, version = _parse(text)
    again = plan_move(log, topic, name, partition, str(to))
    if again.version != version:
        return False
    found = read_lease_row(log, topic, name, partition)
    epoch = found[0].epoch + 1 if found else 1
    where = layout.lease_partition(topic.incarnation, name, partition)
    wanted = Put("lease", encode_row(Lease("", epoch, to)), expect=version or ABSENT)
    write_id = log.ids.new()
    try:
        log.catalog.write(where, wanted, write_id=write_id)
    except ConflictError:
        return False
    except UnknownOutcomeError:
        there = log.catalog.get(where, "lease")
        return there is not None and there.version == write_id
    return True


def check_consumer(log: Log, topic: Topic, name: str) -> None:
    """Refuse a consumer that the topic has not had. ``NotFoundError``."""
    found = log.catalog.get(layout.REGISTRY, layout.consumer_row(topic.incarnation, name))
    if not name or found is None or decode_registered(found).state != "ready":
        raise NotFoundError(f"consumer `{name[:80]}` of `{topic.name}`: not found: fix the name")


def _parse(text: str) -> tuple[int, int, str]:
    parts = text.split(":", 2)
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,19}", each) for each in parts[:2]):
        raise InvalidError("move: is none that a page has given: begin anew")
    return int(parts[0]), int(parts[1]), parts[2]
