"""Ends that a driver saw, kept in the catalog: a file or a topic may vanish before they are read.

A row is put as soon as rows wait in a source partition, then at most once a minute while it grows,
and when a driver ends. So a driver that starts after the file vanished reports the loss as the one
that saw it would, until a person accepts it (``losses``); one that was killed may have seen more.
Of topics only those of a pattern are kept: all others are an error as soon as they are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.archives import read_progress
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.model import layout, limits
from tidelog.model.pipeline import SeenEnd
from tidelog.model.run import decode_row, encode_row
from tidelog.pipeline.losses import vanished_end
from tidelog.sources.base import SourcePartition, VanishedError

__all__ = ["SeenEnds", "copy_seen", "read_seen", "vanished_error"]

_EVERY_S = 60.0


def read_seen(log: Log, pipeline: str) -> dict[SourcePartition, str]:
    """Returns the ends that drivers of a pipeline have seen, by source partition."""
    where, rows = layout.pipeline_shards(pipeline), layout.SEEN_ROWS
    found = log.catalog.scan(where, rows, f"{rows}\uffff")
    seen = [decode_row(row.value, SeenEnd, f"row `{row.row}`") for row in found]
    return {SourcePartition.named(each.partition): each.end for each in seen}


def copy_seen(log: Log, old: str, new: str) -> None:
    """Let another pipeline know the ends that drivers of a pipeline have seen."""
    _put(log, new, read_seen(log, old))


def _put(log: Log, pipeline: str, ends: Mapping[SourcePartition, str]) -> None:
    parts = list(ends.items())
    for first in range(0, len(parts), limits.CHANGES_MAX):
        _raise(log, pipeline, parts[first : first + limits.CHANGES_MAX])


def _raise(log: Log, pipeline: str, ends: Sequence[tuple[SourcePartition, str]]) -> None:
    """Put ends that are further than the stored ones; a repeated packet lowers none."""
    where = layout.pipeline_shards(pipeline)
    for delay_s in RACE.delays_s(log.random):
        rows = []
        for partition, end in ends:
            row = log.catalog.get(where, layout.seen_row(partition.text))
            known = None if row is None else decode_row(row.value, SeenEnd, f"row `{row.row}`")
            if known is None or int(known.end) < int(end):
                seen = encode_row(SeenEnd(partition.text, end))
                expect = ABSENT if row is None else row.version
                rows.append(Put(layout.seen_row(partition.text), seen, expect=expect))
        if not rows:
            return
        try:
            log.catalog.write(where, *rows, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            log.clock.sleep(delay_s)
        else:
            return
    raise UnavailableError("ends of files: too many drivers at once: run the archive again")


@dataclass
class SeenEnds:
    """The ends that one driver keeps."""

    log: Log
    pipeline: str
    _stored: dict[SourcePartition, int] | None = None
    _due_s: dict[SourcePartition, float] = field(default_factory=dict)

    def keep(
        self,
        ends: Mapping[SourcePartition, str],
        positions: Mapping[SourcePartition, str],
        is_last: bool = False,
    ) -> None:
        """Put the ends of partitions in which rows wait, where that is due."""
        if self._stored is None and not ends:
            return
        self._stored = stored = self.stored()
        now_s = self.log.clock.monotonic_s()
        rows: dict[SourcePartition, str] = {}
        for partition, text in ends.items():
            end, read = int(text), int(positions.get(partition) or 0)
            known = stored.get(partition, 0)
            due = is_last or known <= read or now_s >= self._due_s.get(partition, now_s)
            if end > max(read, known) and due:
                rows[partition] = text
                stored[partition], self._due_s[partition] = end, now_s + _EVERY_S
        _put(self.log, self.pipeline, rows)

    def stored(self) -> dict[SourcePartition, int]:
        """Returns the ends that are kept, of all drivers up to now and of this one."""
        if self._stored is None:
            found = read_seen(self.log, self.pipeline)
            self._stored = {each: int(end) for each, end in found.items()}
        return self._stored


def vanished_error(
    log: Log, pipeline: str, partition: SourcePartition, end: int
) -> VanishedError | None:
    """Returns the error of a partition that is gone, where it was seen to hold more than was read.

    None if all was read, or if a person has decided what becomes of it.
    """
    head = read_progress(log, pipeline, partition.text)
    if head is None or head.ended or int(head.position) >= end:
        return None
    if int(vanished_end(head) or 0) >= end:
        return None
    left = end - int(head.position)
    return VanishedError(
        f"source partition `{partition.text}`: its topic was deleted before its last {left} "
        f"offsets were read, from {head.position} to {end}: run with --accept-loss to record that "
        "they are lost",
        end=str(end),
    )
