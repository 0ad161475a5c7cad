"""Finds events that the files of one generation hold and those of another lack.

Positions and gaps say what a generation covers. Within a range, the source may have had fewer
events than offsets: records that Kafka compacted, holes of a backup, events that a transform of
another archive dropped. The other generation may have read them earlier, or from elsewhere. So the
offsets themselves are compared, for ranges that report something missing. A range that was read or
completed from that generation's files has everything they have.

A range only counts, and does not list, the offsets that its own transform dropped or that were
erased. So a range lacks something if more offsets are missing than that, or if its source lacked
more offsets than the other generation does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tidelog.archive.coverage import (
    Coverage,
    Interval,
    MissingRange,
    is_same_sequence,
    read_covered,
)
from tidelog.archive.read import ArchiveFiles
from tidelog.context import Context
from tidelog.coordination.dead_letter_rows import counting_files
from tidelog.coordination.pipeline_rows import read_manifests, read_partitions
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.endpoints import store_at

__all__ = ["LackingEvents"]

_KINDS = ("data", "dead")  # of files with events

Offsets = npt.NDArray[np.int64]


class LackingEvents:
    """Compares one generation with another; remembers ranges that need no second comparison."""

    def __init__(self, context: Context, archive: Archive, old: int, new: int) -> None:
        self._context = context
        self._archive = archive
        self._old = old
        self._new = new
        self._compared: set[tuple[str, str, str]] = set()  # ranges without a fault, and both ends

    def find(self) -> list[MissingRange]:
        """Returns where the old generation holds events that the new one lacks."""
        context, archive = self._context, self._archive
        found: list[MissingRange] = []
        for partition in read_partitions(context, archive.pipeline(self._old)):
            before = read_covered(context, archive.pipeline(self._old), partition)
            now = read_covered(context, archive.pipeline(self._new), partition)
            if before is None or now is None or not (before.by_offset and now.by_offset):
                continue
            if is_same_sequence(before, now):
                found += self._partition(partition, before)
        return found

    def _partition(self, partition: str, old: Coverage) -> Iterator[MissingRange]:
        doubtful = self._doubtful(partition, old)
        if not doubtful:
            return
        spans = [span for _, span in doubtful]
        before = self._offsets(self._old, partition, spans)
        now = self._offsets(self._new, partition, spans)
        for manifest, (start, end) in doubtful:
            lacking = np.setdiff1d(_within(before, start, end), _within(now, start, end))
            lacking = np.setdiff1d(lacking, np.array(manifest.erased, np.int64))
            excused = manifest.dropped + manifest.left_out + manifest.deleted
            held = len(_within(before, start, end))
            if len(lacking) > excused or (
                len(lacking) and _unread(manifest) > _span(manifest) - held
            ):
                yield MissingRange(partition, str(lacking[0]), str(lacking[-1] + 1))
            elif int(manifest.end) <= int(old.end):
                self._compared.add((partition, manifest.start, manifest.end))

    def _doubtful(self, partition: str, old: Coverage) -> list[tuple[Manifest, Interval]]:
        """Returns ranges of the new generation that report something missing from the old one."""
        pipeline, found = self._archive.pipeline(self._new), []
        for manifest in read_manifests(self._context, pipeline, partition):
            if self._old in (manifest.filled, manifest.completed):
                continue
            start = max(int(manifest.start), int(old.begin))
            end = min(int(manifest.end), int(old.end))
            is_known = (partition, manifest.start, manifest.end) in self._compared
            lacks = manifest.absent or any(gap.is_partial for gap in manifest.lost)
            if start < end and lacks and not is_known:
                found.append((manifest, (start, end)))
        return found

    def _offsets(self, generation: int, partition: str, spans: list[Interval]) -> Offsets:
        """Returns the offsets in the files of a generation, in order, around the given spans."""
        archive = self._archive
        files = ArchiveFiles(store_at(self._context, archive.store), archive.making(generation))
        found = [np.empty(0, np.int64)]
        pipeline = archive.pipeline(generation)
        for manifest, file in counting_files(self._context, pipeline, partition):
            if file.kind in _KINDS and _is_in(file, spans):
                held = (files.offsets(batch, file) for batch in files.batches(manifest, file))
                found.extend(each.to_numpy().astype(np.int64) for each in held)
        return np.sort(np.concatenate(found))


def _unread(manifest: Manifest) -> int:
    """Returns how many offsets of a range its source lacked; the range cannot have them."""
    return manifest.absent + sum(gap.offsets for gap in manifest.lost if gap.is_partial)


def _span(manifest: Manifest) -> int:
    return int(manifest.end) - int(manifest.start)


def _is_in(file: FileEntry, spans: list[Interval]) -> bool:
    return any(file.first_offset < end and file.last_offset >= start for start, end in spans)


def _within(offsets: Offsets, start: int, end: int) -> Offsets:
    low, high = np.searchsorted(offsets, (start, end))
    return offsets[low:high]
