"""An archive against its source: whether all is there that it had, as far as it can be checked.

A source, or a partition of it, that cannot be reached is a problem: nothing is proven then. One
that the source no longer lists is a note: its retention has deleted it, or a person.

A range may have as many events as offsets outside of its gaps; exactly as many where the source has
an event at each offset. A range from files of another generation was not read from the source, and
a partition that has ended, as a person accepted, is another one there: neither is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.errors import TidelogError, unexpected
from tidelog.model.pipeline import Manifest, Progress, offsets_between
from tidelog.pipeline.verify_rows import Problem
from tidelog.sources.archive import ArchiveSource
from tidelog.sources.base import (
    Bounds,
    LeavingOut,
    Source,
    SourcePartition,
    bounds_apart,
)

__all__ = ["SourceCheck"]


class SourceCheck:
    """Asks a source once for its ends, and then for counts between positions."""

    def __init__(self, source: Source, archive: str) -> None:
        self._source = source
        self._archive = archive  # its name, for remedies
        self._errors: dict[SourcePartition, TidelogError] = {}
        self._failure: TidelogError | None = None
        found: dict[SourcePartition, Bounds] = {}
        try:
            found = bounds_apart(source, source.partitions(), self._errors)
        except Exception as exc:  # noqa: BLE001 - all else is verified, and this is a problem of it
            self._failure = unexpected("source", exc)
        self._bounds: dict[str, Bounds] = {each.text: held for each, held in found.items()}

    def unasked(self) -> Iterator[Problem]:
        """Yields what could not be reached, so that nothing is known of it."""
        do = "make the source answer, then verify again"
        if self._failure is not None:
            yield Problem("source", self._source.url, f"cannot be reached: {self._failure}", do)
        for partition, error in sorted(self._errors.items()):
            yield Problem("source", partition.text, f"cannot be reached: {error}", do)

    def notes(self, partitions: Iterable[str]) -> Iterator[Problem]:
        """Yields what was not compared: deleted partitions, and what the source leaves out."""
        known = self._bounds.keys() | {each.text for each in self._errors}
        for each in partitions if self._failure is None else ():
            if each not in known:
                what = "the source no longer has it, so it was not compared"
                yield Problem("source", each, what, "nothing, if it was to be deleted there")
        if isinstance(self._source, LeavingOut):
            for each, why in sorted(self._source.left_out().items()):
                yield Problem("source", each, f"is not read: {why}", "nothing, if that is right")

    def count(self, manifest: Manifest) -> Iterator[Problem]:
        """As many events were read as there are between the ends of the range, without its gaps.

        Nothing was read of the source for a range from files of another generation.
        """
        expected = None if manifest.filled else self._expected(manifest)
        if expected is None:
            return
        too_few = manifest.read < expected and self._is_dense(manifest.partition)
        if manifest.read > expected or too_few:
            where = f"{manifest.partition}, {manifest.start} to {manifest.end}"
            most = "" if too_few else "at most "
            what = f"{manifest.read} events were read, the source has {most}{expected} there"
            do = "keep everything as it is, and report it; then backfill the archive"
            yield Problem("source", where, what, do)

    def _expected(self, manifest: Manifest) -> int | None:
        """How many events a range may have at most; None where nobody can tell.

        The offsets themselves tell, whatever the source counts now: an archive that is the source
        counts fewer events once it was built again without those that were erased.
        """
        offsets = offsets_between(manifest.start, manifest.end)
        if offsets is not None:
            return offsets - sum(gap.offsets for gap in manifest.lost)
        if manifest.lost:
            return None
        if isinstance(self._source, ArchiveSource):
            partition = SourcePartition.named(manifest.partition)
            return self._source.count_in(partition, manifest.start, manifest.end)
        return self._source.count(manifest.start, manifest.end)

    def _is_dense(self, partition: str) -> bool:
        """Whether the source had an event at each of its positions until now."""
        known = self._bounds.get(partition)
        if known is None or not known.is_dense:
            return False
        each = SourcePartition.named(partition)
        found = bounds_apart(self._source, [each], self._errors)
        return each in found and found[each].is_dense

    def ends(self, partition: str, head: Progress | None) -> Iterator[Problem]:
        """The source still is what was read, and has all that was committed."""
        held = self._bounds.get(partition)
        if held is None or head is None or head.ended:  # as a person accepted: it is another one
            return
        if not head.is_of(held.incarnation) or self._source.before(held.end, head.position):
            what = f"the source ends at {held.end}, and {head.position} is committed: it is another"
            do = (
                f"`tidelog archive run {self._archive} --accept-loss` records that the old one "
                "ended and goes on with this one; or make a new archive of what the source is now"
            )
            yield Problem("source", partition, what, do)
