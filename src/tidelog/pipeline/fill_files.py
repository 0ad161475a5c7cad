"""The same source for files that are rotated: they keep the names that the live generation has.

A file of rows is named by the path that it had when it was first seen (``sources.row_tracking``).
A generation that looked at a folder for itself would name files by their present paths. What comes
from the live generation's files would then be there under another name too, and so twice. So the
source is passed the marks of the live generation, which tell which file is which. The generation
that is being built stays behind the live one: it reads what that one has begun, up to its position,
and the rest after the promote. So no name is ever given to two files. What the source cannot show
(a file is gone, was cut off, or went on behind a half line) comes from the live generation's files.
A promote copies the marks, and all else that the live generation knows (``freezing``).

An archive that reads another archive has no marks of its own. The archive at the top of the chain,
which reads the files, has them: a backfill from these files uses its marks and stays behind the
live generation too.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.home import Home
from tidelog.log.archives import read_archive
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.pipeline.fill import FillSource
from tidelog.pipeline.listing import read_known
from tidelog.pipeline.places import source_at
from tidelog.sources.base import Known, LeavingOut, Source, SourcePartition, Tracking

__all__ = ["FillFilesSource", "fill_source"]


def fill_source(home: Home, archive: Archive, generation: int, source: Source) -> FillSource:
    """What a generation that is being built reads, of the archive's own source or another one."""
    if isinstance(source_at(home, archive.source), Tracking):
        return FillFilesSource(home, archive, generation, source, archive.pipeline())
    if isinstance(source, Tracking):
        return FillFilesSource(home, archive, generation, source, _tracking_pipeline(home, archive))
    return FillSource(home, archive, generation, source)


def _tracking_pipeline(home: Home, archive: Archive) -> str:
    """Returns the pipeline that reads the files which an archive was made of; empty: none does.

    That is the archive's own, or that of the archive at the top of its chain.
    """
    pipeline, source, known = archive.pipeline(), archive.source, {archive.name}
    while not isinstance(source_at(home, source), Tracking):
        address = parse_address(source)
        if address.scheme != "archive" or address.path in known:
            return ""
        known.add(address.path)
        above = read_archive(home.log, address.path)
        pipeline, source = above.pipeline(), above.source
    return pipeline


class FillFilesSource(FillSource):
    """What a generation that is being built reads of files; see this module."""

    def __init__(
        self, home: Home, archive: Archive, generation: int, source: Source, tracks: str
    ) -> None:
        """``tracks`` is the pipeline that has the marks of these files; empty: none has."""
        super().__init__(home, archive, generation, source, follows=bool(tracks))
        self._tracks = tracks

    def track(self, known: Mapping[SourcePartition, Known]) -> None:
        """Pass on what this generation has read, and the marks of the live one."""
        if not isinstance(self._source, Tracking):
            return
        merged = dict(known)
        for partition, live in self._live().items():
            own = known.get(partition)
            position = "0" if live.note else live.position  # one without a note stays untrusted
            merged[partition] = Known(
                position if own is None else own.position,
                live.incarnation,
                b"" if own is None else own.note,
                further=live.note,
            )
        self._source.track(merged)

    def seen(self) -> dict[SourcePartition, str]:
        """Nothing: the live generation is ahead, and its driver keeps what it saw."""
        return {}

    def renewed(self) -> dict[SourcePartition, bytes]:
        """Nothing: the live generation's driver keeps new names, and a promote copies them."""
        return {}

    def left_out(self) -> dict[str, str]:
        return self._source.left_out() if isinstance(self._source, LeavingOut) else {}

    def _live(self) -> dict[SourcePartition, Known]:
        """What is known of the files that the archive was made of."""
        return read_known(self._home.log, self._tracks, {}) if self._tracks else {}


_tracking: type[Tracking] = FillFilesSource
_leaving: type[LeavingOut] = FillFilesSource
