"""Pages of a partition: some events from an offset on, as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidelog.codec.event_json import batch_lines
from tidelog.codec.sizes import fitting_rows
from tidelog.errors import NotFoundError
from tidelog.log.base import Log
from tidelog.log.read import Reader, Stretch
from tidelog.log.topics import read_head
from tidelog.model.topic import Topic
from tidelog.server.limits import PAGE_BYTES_MAX

__all__ = ["From", "Page", "as_array", "read_page"]

From = int | Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Page:
    """The events of consecutive offsets of a partition, and where the next page begins."""

    lines: bytes  # one JSON object each
    offsets: Sequence[int]  # of each event
    first: int  # where the page begins
    next: int  # the offset to go on from
    start: int  # of the partition, as it was then
    end: int

    @property
    def count(self) -> int:
        """How many events it has."""
        return len(self.offsets)


def as_array(lines: bytes) -> bytes:
    """JSON lines as one JSON array; within a line JSON has no newline."""
    return b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]"


def read_page(log: Log, topic: Topic, partition: int, offset: From, limit: int) -> Page:
    """Up to ``limit`` events, fewer where they are large; what was erased is passed over.

    ``NotFoundError`` for an offset that was trimmed or that lies beyond the end.
    """
    topic.check_partition(partition)
    head, _ = read_head(log, topic, partition)
    if not isinstance(offset, int):
        offset = head.start if offset == "earliest" else head.next
    if offset > head.next:
        raise NotFoundError(
            f"partition `{topic.name}/{partition}`: offset {offset} is beyond its end, "
            f"{head.next}: go on from there",
            offset=offset,
            end=head.next,
        )
    reader = Reader(log, topic, partition)
    if offset < head.start:
        reader.check_start(offset)
    lines: list[bytes] = []
    offsets: list[int] = []
    at, room = offset, PAGE_BYTES_MAX
    for stretch in reader.stretches(offset, head.next):
        part = _fitting(stretch, limit - len(offsets), room)
        lines.append(batch_lines(part.arrow()))
        offsets += part.offsets.tolist()
        at = part.end
        room -= len(lines[-1])
        if room <= 0 or len(offsets) == limit or part.end < stretch.end:
            break
    return Page(b"".join(lines), offsets, offset, at, head.start, head.next)


def _fitting(stretch: Stretch, count: int, room: int) -> Stretch:
    """Returns as many of its events as fit by their sizes, one at least, up to a count."""
    return stretch.take(min(count, fitting_rows(stretch.batch, room)))
