"""Pages of consumers: who reads, how far behind, and moving a cursor with a look before it."""

from __future__ import annotations

import re

from tidelog.api.consumers import ConsumerHandle
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.log.consumer.move import CursorMove
from tidelog.server.api.by_offset import partition_of
from tidelog.server.console.format import line_chart, url
from tidelog.server.console.sampler import Sampler
from tidelog.server.console.session import Answer, Shown, Visit
from tidelog.server.console.topics import part_of

__all__ = ["ConsumerPages"]

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
        self._home.consumers(topic.name).get(name)
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
        consumer = self._home.consumers(topic.name).get(name)
        if "moves" in visit.form:
            return self._do(visit, consumer)
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
        moves = [consumer.plan_seek(to, each) for each in chosen]
        values = {
            "topic": topic,
            "name": name,
            "to": to,
            "moves": moves,
            "again": sum(each.again for each in moves),
            "skipped": sum(each.skipped for each in moves),
            "owned": sum(bool(each.owner) for each in moves),
            "packed": " ".join(map(_text, moves)),
        }
        return Shown("move.html", values)

    def _do(self, visit: Visit, consumer: ConsumerHandle) -> Answer:
        moved: list[str] = []
        overtaken: list[str] = []
        for text in visit.form["moves"].split():
            done = consumer.move(*_parse(text), who=visit.session.who)
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
            "link": url("/console/consumer", topic=consumer.topic.name, name=consumer.name),
            "link_text": f"Back to {consumer.name}",
            "grade": "warn" if overtaken else "good",
        }
        return Shown("done.html", values, 409 if overtaken and not moved else 200)


def _text(move: CursorMove) -> str:
    """Returns a move as a form carries it."""
    return f"{move.partition}:{move.to}:{move.version}"


def _parse(text: str) -> tuple[int, int, str]:
    parts = text.split(":", 2)
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,19}", each) for each in parts[:2]):
        raise InvalidError("move: is not a valid move: start again")
    return int(parts[0]), int(parts[1]), parts[2]
