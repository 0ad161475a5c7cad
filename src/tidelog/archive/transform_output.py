"""Finds files that hold what a transform or a parser made of events, not the events themselves.

Such output is never processed again, and no value of a topic replaces it. It is in all files of a
generation with a transform, or with a parser that changes values. A later generation may have some
of it too: ranges that a backfill carried over (``Manifest.as_is``). So does an archive that reads
such an archive.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.archive.coverage import Interval, are_offsets
from tidelog.archive.derived_archives import archives_above
from tidelog.codec.parsers import LayoutSettings, changes_values, open_parser
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.archive import Archive, ArchiveFormat

__all__ = [
    "OutputSpans",
    "may_hold_output",
    "output_above",
    "output_of",
    "output_spans",
    "refuse_output",
]


def output_of(written_as: ArchiveFormat) -> str:
    """Returns what made the values in files: transform, parser, or nothing: the events' own."""
    if written_as.transform:
        return "transform"
    if not written_as.parser:
        return ""
    parser = open_parser(written_as.parser, LayoutSettings(**written_as.layout))
    return "parser" if changes_values(parser) else ""


def may_hold_output(written_as: ArchiveFormat) -> bool:
    """Returns whether files may hold output: so may those of a parser that cannot be opened."""
    try:
        return bool(output_of(written_as))
    except TidelogError:
        return True


def refuse_output(archive: Archive, building: ArchiveFormat) -> None:
    """Raises ``InvalidError`` if the parser of a generation would change output again."""
    if output_of(building) == "parser":
        made = output_of(archive.format_of()) or "transform or parser of an earlier generation"
        raise InvalidError(
            f"archive `{archive.name}`: its source no longer has these events, and its files hold "
            f"what the {made} made of them: a parser that changes values cannot read that; "
            "backfill from a backup with --from archive:NAME, or with another parser"
        )


@dataclass(frozen=True, slots=True)
class OutputSpans:
    """The ranges of one source partition whose files hold output."""

    all: bool = False
    starts: frozenset[str] = frozenset()  # of its commits
    offsets: tuple[Interval, ...] = ()  # the same, if positions are offsets

    def holds(self, start: str) -> bool:
        """Returns whether the range at a position holds output."""
        if self.all or start in self.starts:
            return True
        return are_offsets(start) and any(a <= int(start) < b for a, b in self.offsets)

    def until_border(self, start: str, end: str) -> str:
        """Returns up to where all offsets from one on hold output, or none do."""
        if self.all or not are_offsets(start, end):
            return end
        borders = [each for span in self.offsets for each in span if each > int(start)]
        return str(min([int(end), *borders]))


def output_spans(context: Context, archive: Archive, partition: str) -> OutputSpans:
    """Returns which ranges of the live generation hold output.

    Reads manifests only if some events were carried over from another generation.
    """
    if output_of(archive.format_of()):
        return OutputSpans(all=True)
    head = read_progress(context, archive.pipeline(), partition)
    if head is None or not head.totals.filled:
        return OutputSpans()
    manifests = read_manifests(context, archive.pipeline(), partition)
    ranges = [(each.start, each.end) for each in manifests if each.as_is]
    offsets = [(int(a), int(b)) for a, b in ranges if are_offsets(a, b)]
    return OutputSpans(starts=frozenset(start for start, _ in ranges), offsets=tuple(offsets))


def output_above(context: Context, archive: Archive, generation: int) -> str:
    """Returns an archive that a generation is made of and that holds output, or held some.

    Returns an empty text if there is none.
    """
    for above, _ in archives_above(context, archive, generation):
        is_own = above.incarnation == archive.incarnation  # whose ranges say it themselves
        if not is_own and (above.had_output or any(map(may_hold_output, above.formats.values()))):
            return above.name
    return ""
