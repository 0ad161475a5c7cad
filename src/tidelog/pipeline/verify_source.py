"""An archive against its source: whether all is there that it had, as far as it can tell."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.model.pipeline import Manifest, Progress
from tidelog.pipeline.verify_rows import Problem
from tidelog.sources.base import Bounds, Source, SourcePartition

__all__ = ["SourceCheck"]


class SourceCheck:
    """Asks a source once for its ends, and then for counts between positions."""

    def __init__(self, source: Source) -> None:
        self._source = source
        found = source.bounds(source.partitions())
        self._bounds: dict[str, Bounds] = {each.text: held for each, held in found.items()}

    def count(self, manifest: Manifest) -> Iterator[Problem]:
        """As many events were read as there are between the ends of the range."""
        start = manifest.lost[-1].end if manifest.lost else manifest.start
        expected = self._source.count(start, manifest.end)
        if expected is None:
            return
        too_few = manifest.read < expected and self._is_dense(manifest.partition)
        if manifest.read > expected or too_few:
            where = f"{manifest.partition}, {manifest.start} to {manifest.end}"
            most = "" if too_few else "at most "
            what = f"{manifest.read} events were read, the source has {most}{expected} there"
            do = "keep all as it is, and tell the maintainers; then backfill the archive"
            yield Problem("source", where, what, do)

    def _is_dense(self, partition: str) -> bool:
        """Whether the source had an event at each of its positions until now."""
        known = self._bounds.get(partition)
        if known is None or not known.is_dense:
            return False
        each = SourcePartition.named(partition)
        return self._source.bounds([each])[each].is_dense

    def ends(self, partition: str, head: Progress | None) -> Iterator[Problem]:
        """The source still is what was read, and has all that was committed."""
        held = self._bounds.get(partition)
        if held is None or head is None:
            return
        anew = bool(head.incarnation and held.incarnation and head.incarnation != held.incarnation)
        if anew or self._source.before(held.end, head.position):
            what = f"the source ends at {held.end}, and {head.position} is committed: it is another"
            do = "make a new archive of what the source is now; this one keeps what it was"
            yield Problem("source", partition, what, do)
