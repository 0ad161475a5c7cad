"""The source of a generation that is being built from files, or from an archive of files.

Rotated files keep the names that the live generation gave them. A file of rows is named by its path
when it was first seen (``files.row_tracking``). A generation that looked at the folder itself would
use current paths, and the live generation's events would be there twice, under two names. So the
source gets the marks of the live generation, which identify each file. The new generation stays
behind the live one: it reads what that one has begun, up to its position, and the rest after the
promote. So two files never get one name. What the source cannot provide (a file was deleted,
truncated, or continued after half a line) comes from the live generation's files. A promote copies
the marks and everything else that the live generation knows (``freeze``).

An archive that reads another archive has no marks of its own. The archive at the top of the chain,
which reads the files, has them: a backfill from these files uses its marks, and stays behind its
live generation too.

Another archive of the same files may have other names for them: it saw a rotation later, or
earlier. A chain that was built of that archive would read the same lines again, under the names of
its own source. So it reads nothing there of files that its live generation has not begun. Files
with an archive's names have offsets, which mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.archive.fill import FillSource
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import (
    Bounds,
    KnownPartition,
    SkippingSource,
    Source,
    SourcePartition,
    TrackingSource,
)
from tidelog.context import Context
from tidelog.model.archive import Archive
from tidelog.pipeline.source_partitions import read_known, tracking_pipeline

__all__ = ["FillFilesSource", "FillOtherNamesSource", "fill_source"]


def fill_source(context: Context, archive: Archive, generation: int, source: Source) -> FillSource:
    """Returns the source of a generation that is being built, from its own or another source."""
    if isinstance(source_at(context, archive.source), TrackingSource):
        return FillFilesSource(context, archive, generation, source, archive.pipeline())
    tracks = tracking_pipeline(context, archive.pipeline(), archive.source)
    if isinstance(source, TrackingSource):
        return FillFilesSource(context, archive, generation, source, tracks)
    if tracking_pipeline(context, "", source.url) not in ("", tracks):
        return FillOtherNamesSource(context, archive, generation, source)
    return FillSource(context, archive, generation, source)


class FillFilesSource(FillSource):
    """The source of a generation that is being built from files; see this module."""

    def __init__(
        self, context: Context, archive: Archive, generation: int, source: Source, tracks: str
    ) -> None:
        """``tracks`` is the pipeline that has the marks of these files; empty: none."""
        super().__init__(context, archive, generation, source, follows=bool(tracks))
        self._tracks = tracks

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Passes on what this generation has read, and the marks of the live one."""
        if not isinstance(self._source, TrackingSource):
            return
        merged = dict(known)
        for partition, live in self._live().items():
            own = known.get(partition)
            # A position without a note stays untrusted.
            position = "0" if live.note else live.position
            merged[partition] = KnownPartition(
                position if own is None else own.position,
                live.incarnation,
                b"" if own is None else own.note,
                further=live.note,
            )
        self._source.track(merged)

    def seen(self) -> dict[SourcePartition, str]:
        """Returns nothing: the live generation is ahead, and its driver stores what it saw."""
        return {}

    def renewed(self) -> dict[SourcePartition, bytes]:
        """Returns nothing: the live one's driver stores new names, and a promote copies them."""
        return {}

    def left_out(self) -> dict[str, str]:
        return self._source.left_out() if isinstance(self._source, SkippingSource) else {}

    def _live(self) -> dict[SourcePartition, KnownPartition]:
        """Returns what is known about the files that the archive was made of."""
        return read_known(self._context, self._tracks, {}) if self._tracks else {}


class FillOtherNamesSource(FillSource):
    """The source of a generation that is being built from an archive of files read elsewhere."""

    def _held(self) -> dict[SourcePartition, Bounds]:
        """Returns files of rows only if the live generation has one with this name.

        Then it is compared. Any other may be a file that the archive has under another name.
        """
        began = set(self._live_partitions())
        held = super()._held()
        return {each: b for each, b in held.items() if not b.incarnation or each in began}


_protocols: tuple[type[TrackingSource], type[SkippingSource]] = (FillFilesSource, FillFilesSource)
