"""Where a consumer begins, the first time that anybody takes its lease."""

from __future__ import annotations

from datetime import datetime

from tidelog.errors import InvalidError
from tidelog.log.base import Log
from tidelog.log.read import find_offset
from tidelog.log.topics import read_head
from tidelog.model.event import check_timestamp, from_iso
from tidelog.model.topic import Topic

__all__ = ["Start", "check_start", "resolve_start"]

Start = str | int | datetime
"""``earliest``, ``latest``, an offset, or a time: ISO 8601 text or an aware datetime."""


def check_start(start: Start) -> None:
    """Refuse what is no place to start from."""
    if isinstance(start, datetime):
        check_timestamp(start)
    elif isinstance(start, int):
        if start < 0:
            raise InvalidError(f"start {start}: give an offset of 0 or more")
    elif start not in ("earliest", "latest"):
        from_iso(start)


def resolve_start(log: Log, topic: Topic, partition: int, start: Start) -> int:
    """The offset to begin with; within what the partition holds now."""
    if isinstance(start, datetime):
        return find_offset(log, topic, partition, check_timestamp(start))
    head, _ = read_head(log, topic, partition)
    if isinstance(start, int):
        return min(max(start, head.start), head.next)
    if start == "earliest":
        return head.start
    if start == "latest":
        return head.next
    return find_offset(log, topic, partition, from_iso(start))
