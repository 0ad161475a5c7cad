"""Whether a transform dropped the events that a generation lacks.

A range counts the offsets that its transform dropped and those that its source lacked, and lists
neither. So if another generation has events that a range lacks, the counts alone do not say which
of the two it was. There are two proofs that all of them were dropped:

- The other generation has the same range, read it from the same source, and found at least as many
  offsets without an event. What a source has lost stays lost, so it lacks these offsets too.
- The source still has the events, so the range has read them. It must not have more events than the
  range has read: then some came back, as files that were missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.errors import TidelogError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Manifest

__all__ = ["DroppedEvents", "alike_ranges"]

Offsets = npt.NDArray[np.int64]


class DroppedEvents:
    """Shows of one source partition which ranges of a generation lack only dropped events."""

    def __init__(
        self, context: Context, archive: Archive, old: int, new: int, partition: str
    ) -> None:
        self._context = context
        self._archive = archive
        self._old = old
        self._new = new
        self._partition = partition

    def are_all_of(self, manifest: Manifest, lacking: Offsets) -> bool:
        """Returns whether the transform of a range has dropped all of these events."""
        if (manifest.start, manifest.end) in self._alike:
            return True
        return all(self._has(url, manifest, lacking) for url in self._sources(self._new))

    @cached_property
    def _alike(self) -> set[tuple[str, str]]:
        read_from = [self._sources(each) for each in (self._old, self._new)]
        if read_from[0] != read_from[1] or len(read_from[0]) > 1:
            return set()  # another source may have lost as many other events
        pipelines = [self._archive.pipeline(each) for each in (self._old, self._new)]
        old, new = (read_manifests(self._context, each, self._partition) for each in pipelines)
        return alike_ranges(old, new)

    def _sources(self, generation: int) -> list[str]:
        """Returns what ranges of a generation may have been read from."""
        archive = self._archive
        given = archive.format_of(generation).source
        where = layout.pipeline_partition(archive.pipeline(generation), self._partition)
        was_live = self._context.catalog.get(where, layout.BEFORE) is not None
        is_live = was_live or generation == archive.generation
        return [given] if given and not is_live else sorted({given, archive.source} - {""})

    def _has(self, url: str, manifest: Manifest, offsets: Offsets) -> bool:
        """Returns whether a source has an event at each of these offsets, and had it before."""
        partition = SourcePartition.named(self._partition)
        found = [np.empty(0, np.int64)]
        try:
            span = SourceRange(
                partition, manifest.start, manifest.end, incarnation=manifest.incarnation
            )
            chunks = source_at(self._context, url).read(span)
            found += [each.batch.column("offset").to_numpy().astype(np.int64) for each in chunks]
        except TidelogError:
            return False  # what cannot be read now proves nothing
        there = np.unique(np.concatenate(found))
        return len(there) <= manifest.read and bool(np.isin(offsets, there).all())


def alike_ranges(old: Iterable[Manifest], new: Iterable[Manifest]) -> set[tuple[str, str]]:
    """Returns ranges of both where the new one found no more offsets without events.

    Several ranges were read at different times. So between their outer borders, as many other
    offsets may be missing. Leaves out ranges from files of another generation, and those with gaps
    that are only some of their offsets, as another transform or folder may have as many elsewhere.
    """
    before = {(each.start, each.end): each.absent for each in old if _is_counted(each)}
    return {
        (each.start, each.end)
        for each in new
        if _is_counted(each) and each.absent <= before.get((each.start, each.end), -1)
    }


def _is_counted(manifest: Manifest) -> bool:
    """Returns whether a range counts all offsets that its source lacked as never there."""
    is_partial = any(gap.is_partial or not gap.is_loss for gap in manifest.lost)
    return not (manifest.filled or manifest.completed or is_partial)
