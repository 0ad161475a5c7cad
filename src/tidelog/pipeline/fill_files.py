"""The same source for files that are rotated: they keep the names that the live generation has.

A file of rows is named by the path that it had when it was first seen (``sources.row_tracking``).
A generation that looked at a folder for itself would name files by their present paths. What comes
from the live generation's files would then be there under another name too, and so twice. So what
the live generation has read tells which file is which; one that it has not begun yet is left to it,
and is read after the promote. What was read of each file is kept, also where it comes from the
live generation's files, so that the promoted generation finds its files again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidelog.errors import NotFoundError, TidelogError
from tidelog.home import Home
from tidelog.log.archives import read_progress
from tidelog.model.archive import Archive
from tidelog.pipeline.base import CarriedReader
from tidelog.pipeline.fill import FillSource
from tidelog.sources.base import (
    Bounds,
    Changing,
    Chunk,
    Known,
    Range,
    RangeReader,
    Source,
    SourcePartition,
    Tracking,
    bounds_apart,
)
from tidelog.sources.merge import noted
from tidelog.sources.row_marks import mark_from

__all__ = ["FillFilesSource", "fill_source"]


def fill_source(home: Home, archive: Archive, generation: int, source: Source) -> FillSource:
    """What a generation that is being built reads, of the archive's own source or another one."""
    if isinstance(source, Tracking) and not archive.making(generation).source:
        return FillFilesSource(home, archive, generation, source)
    return FillSource(home, archive, generation, source)


class FillFilesSource(FillSource):
    """What a generation that is being built reads of files; see this module."""

    def partitions(self) -> list[SourcePartition]:
        """Those that the live generation has begun."""
        return sorted(self._began())

    def track(self, known: Mapping[SourcePartition, Known]) -> None:
        """Find files again by what either generation has read of them."""
        read = {each: found for each in self._began() if (found := self._live(each)) is not None}
        own = {
            each: found
            for each, found in known.items()
            if each not in read or mark_from(found.note) is not None
        }
        if isinstance(self._source, Tracking):
            self._source.track({**read, **own})

    def seen(self) -> Mapping[SourcePartition, str]:
        """Nothing: drivers of the live generation keep what they see."""
        return {}

    def _live(self, partition: SourcePartition) -> Known | None:
        """What the live generation has read of a file of rows."""
        head = read_progress(self._home.log, self._archive.pipeline(), partition.text)
        if head is None or mark_from(head.note) is None:
            return None
        return Known(head.position, head.incarnation, head.note)

    def _bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """A file that is gone, or was cut off, comes from the live generation."""
        errors: dict[SourcePartition, TidelogError] = {}
        found = bounds_apart(self._source, partitions, errors)
        for error in errors.values():
            if not isinstance(error, NotFoundError):
                raise error
        return found

    def _carried(self, range: Range, end: str) -> CarriedReader:
        carried = super()._carried(range, end)
        live = self._live(range.partition)
        if live is None or live.position != carried.range.limit:
            return carried
        return replace(carried, reader=_Noted(carried.reader, live.note))


@dataclass(frozen=True, slots=True)
class _Noted:
    """A range whose last chunk has the mark of the file that it once came from; pickles."""

    reader: RangeReader
    note: bytes

    @property
    def range(self) -> Range:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return isinstance(self.reader, Changing) and self.reader.is_changing

    def read(self) -> Iterator[Chunk]:
        return noted(self.reader.read(), lambda: self.note)


_tracking: type[Tracking] = FillFilesSource
