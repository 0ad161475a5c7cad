"""Pages of consumers: who reads, how far behind, and moving a cursor with a look before it.

Moving a consumer's cursor from outside: planned, shown to a person, and then done as shown.

The lease is written by the version that the plan was made of, with a higher epoch and no owner. So
whoever holds it loses it at its next commit, and goes on from the new cursor when it takes the
lease again; and a plan that was overtaken by a commit changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidelog.catalog.base import ABSENT, Put
from tidelog.context import Context
from tidelog.errors import ConflictError, InvalidError, NotFoundError, UnknownOutcomeError
from tidelog.home import Home
from tidelog.log.consumer.leases import Lease, decode_registered, read_lease_row
from tidelog.log.reader.partition_reader import find_offset
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.partition_rows import encode_row
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic
from tidelog.server.api.by_offset import partition_of
from tidelog.server.console.format import line_chart, url
from tidelog.server.console.request import Answer, Shown, Visit
from tidelog.server.console.sampler import Sampler
from tidelog.server.console.topics import part_of

__all__ = [
    "ConsumerPages",
    "Move",
    "check_consumer",
    "do_move",
    "plan_move",
]

_PARTITIONS_MOVED_MAX = 500  # by one form
_PARTITIONS_A_PAGE = 100


class ConsumerPages:
    """What is shown of consumers."""

    def __init__(self, home: Home, sampler: Sampler) -> None:
        self._home = home
        self._sampler = sampler

    def consumers(self, visit: Visit) -> Answer:
        """``GET /console/consumers``"""
        snapshot = self._sampler.look()
        wanted = visit.text("q").lower()
        found = [
            each
            for each in snapshot.consumers
            if wanted in each.name.lower() or wanted in each.topic.lower()
        ]
        found.sort(key=lambda each: (-each.lag, each.topic, each.name))
        part = part_of(found, visit.number("page", 1, 10**6))
        with self._sampler.lock:
            rows = [
                {
                    "consumer": each,
                    "chart": line_chart(each.lags, 120, 28),
                    "rate": each.cursors.rate(),
                }
                for each in part.rows
            ]
        values = {"part": part, "rows": rows, "q": visit.text("q"), "snapshot": snapshot}
        return Shown("consumers.html", values)

    def consumer(self, visit: Visit) -> Answer:
        """``GET /console/consumer?topic=…&name=…``"""
        topic = self._home.topic(visit.text("topic"))
        name = visit.query.get("name", "")
        check_consumer(self._home.context, topic, name)
        consumer = self._sampler.consumer(topic, name)
        with self._sampler.lock:
            chart, rate = line_chart(consumer.lags), consumer.cursors.rate()
        values = {
            "topic": topic,
            "consumer": consumer,
            "part": part_of(consumer.held, visit.number("page", 1, 10**6), _PARTITIONS_A_PAGE),
            "chart": chart,
            "rate": rate,
            "snapshot": self._sampler.look(),
            "ttl_ms": self._home.context.settings.lease_ttl_ms,
        }
        return Shown("consumer.html", values)

    def move(self, visit: Visit) -> Answer:
        """``POST /console/consumer/move``: first what would be done, and with ``moves`` does it"""
        topic = self._home.topic(visit.text("topic"))
        name = visit.form.get("name", "")
        check_consumer(self._home.context, topic, name)
        if "moves" in visit.form:
            return self._do(visit, name)
        to = visit.text("where")
        to = visit.text("to") if to in ("", "at") else to
        if not to:
            raise InvalidError("seek: names no place: give earliest, latest, an offset or a time")
        given = visit.text("partition")
        chosen = range(topic.partitions) if given in ("", "all") else [partition_of(topic, given)]
        if len(chosen) > _PARTITIONS_MOVED_MAX:
            raise InvalidError(
                f"seek: {len(chosen)} partitions at once: choose one, or use the library for all"
            )
        moves = [plan_move(self._home.context, topic, name, each, to) for each in chosen]
        values = {
            "topic": topic,
            "name": name,
            "to": to,
            "moves": moves,
            "again": sum(each.again for each in moves),
            "skipped": sum(each.skipped for each in moves),
            "owned": sum(bool(each.owner) for each in moves),
            "packed": " ".join(each.text for each in moves),
        }
        return Shown("move.html", values)

    def _do(self, visit: Visit, name: str) -> Answer:
        topic = self._home.topic(visit.text("topic"))
        moved: list[str] = []
        overtaken: list[str] = []
        for text in visit.form["moves"].split():
            done = do_move(self._home.context, topic, name, text)
            (moved if done else overtaken).append(text.partition(":")[0])
        self._sampler.expire()
        says = f"The cursors of {len(moved)} partitions were moved." if moved else ""
        if overtaken:
            says += (
                f" In partitions {', '.join(overtaken)} the consumer was faster: its lease has "
                "changed since you looked. Nothing was moved there; look again."
            )
        values = {
            "title": "Cursor moved" if moved else "Nothing was moved",
            "says": says.strip(),
            "link": url("/console/consumer", topic=topic.name, name=name),
            "link_text": f"Back to {name}",
            "grade": "warn" if overtaken else "good",
        }
        return Shown("done.html", values, 409 if overtaken and not moved else 200)


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


def plan_move(context: Context, topic: Topic, name: str, partition: int, to: str) -> Move:
    """Where one cursor would go: ``earliest``, ``latest``, an offset, or a time.

    ``InvalidError`` for an offset that is not there.
    """
    topic.check_partition(partition)
    head, _ = read_head(context, topic, partition)
    if to == "earliest":
        offset = head.start
    elif to == "latest":
        offset = head.next
    elif to.isascii() and to.isdigit() and len(to) < 20:
        offset = int(to)
    else:
        offset = find_offset(context, topic, partition, moment_ms(to, context.clock.now_ms()))
    if not head.start <= offset <= head.next:
        raise InvalidError(
            f"seek in `{topic.name}/{partition}`: offset {offset} is outside of "
            f"[{head.start}, {head.next}]: give one inside"
        )
    found = read_lease_row(context, topic, name, partition)
    if found is None or found[0].deleted:
        return Move(partition, None, offset, "", found[1] if found else "")
    return Move(partition, found[0].cursor, offset, found[0].owner, found[1])


def do_move(context: Context, topic: Topic, name: str, text: str) -> bool:
    """Do what was planned; False when the lease has changed since. ``InvalidError``."""
    partition, to, version = _parse(text)
    again = plan_move(context, topic, name, partition, str(to))
    if again.version != version:
        return False
    found = read_lease_row(context, topic, name, partition)
    epoch = found[0].epoch + 1 if found else 1
    where = layout.lease_partition(topic.incarnation, name, partition)
    wanted = Put("lease", encode_row(Lease("", epoch, to)), expect=version or ABSENT)
    write_id = context.ids.new()
    try:
        context.catalog.write(where, wanted, write_id=write_id)
    except ConflictError:
        return False
    except UnknownOutcomeError:
        there = context.catalog.get(where, "lease")
        return there is not None and there.version == write_id
    return True


def check_consumer(context: Context, topic: Topic, name: str) -> None:
    """Refuse a consumer that the topic has not had. ``NotFoundError``."""
    where = layout.consumers_partition(topic.incarnation)
    found = context.catalog.get(where, layout.consumer_row(name))
    if not name or found is None or decode_registered(found).state != "ready":
        raise NotFoundError(f"consumer `{name[:80]}` of `{topic.name}`: not found: fix the name")


def _parse(text: str) -> tuple[int, int, str]:
    parts = text.split(":", 2)
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,19}", each) for each in parts[:2]):
        raise InvalidError("move: is none that a page has given: begin anew")
    return int(parts[0]), int(parts[1]), parts[2]
