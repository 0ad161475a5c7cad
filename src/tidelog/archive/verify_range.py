"""Reads the files of one range and compares them with their manifest; also ahead, in tasks.

:func:`check_range` needs only the store of the files. It reports what healthy files hold. A range
with any problem is checked again by the caller, who knows the rows that may explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidelog.archive.account import runs_of
from tidelog.archive.read import ArchiveFiles
from tidelog.errors import CorruptError
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store import shared_store

__all__ = [
    "Offsets",
    "RangeFiles",
    "RangeFound",
    "RangeKey",
    "check_range",
    "erased_left",
    "read_offsets",
]

Offsets = npt.NDArray[np.int64]
RangeKey = tuple[tuple[FileEntry, ...], tuple[int, ...]]
"""The files of a range and its erased offsets: what was found of them holds while they are same."""

_NONE: Offsets = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RangeFiles:
    """The files of a range that exist, to check anywhere; pickles."""

    store: str  # URL
    making: ArchiveFormat
    manifest: Manifest
    files: tuple[FileEntry, ...]  # without sidecars
    deep: bool  # read them, not only their footers

    @property
    def key(self) -> RangeKey:
        return self.files, self.manifest.erased

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class RangeFound:
    """What healthy files of a range hold."""

    events: tuple[int, ...]  # by file
    runs: Offsets  # first and last of each run of offsets; none unless files were read


def check_range(work: RangeFiles) -> RangeFound | None:
    """Returns what the files of a range hold; None, or an error, if something is wrong."""
    contents = ArchiveFiles(shared_store(work.store), work.making)
    if not work.deep:
        counts = tuple(contents.count(work.manifest, file) for file in work.files)
        is_healthy = counts == tuple(file.events for file in work.files)
        return RangeFound(counts, runs_of(_NONE)) if is_healthy else None
    found = [read_offsets(contents, work.manifest, file) for file in work.files]
    known = np.unique(np.concatenate([*found, _NONE]))
    total = sum(map(len, found))
    if len(known) != total or len(erased_left(known, work.manifest)):
        return None
    return RangeFound(tuple(map(len, found)), runs_of(known))


def read_offsets(contents: ArchiveFiles, manifest: Manifest, file: FileEntry) -> Offsets:
    """Returns the offsets in a file. Raises ``CorruptError`` if they are not as its manifest says.

    Reads its sidecar with it. Raises ``NotFoundError`` and ``InvalidError`` too.
    """
    parts: Sequence[Offsets] = [
        contents.offsets(batch, file).to_numpy() for batch in contents.batches(manifest, file)
    ]
    offsets: Offsets = np.concatenate([*parts, _NONE])
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (-1, -1)
    found, expected = (len(offsets), *ends), (file.events, file.first_offset, file.last_offset)
    if file.erased:  # its first or last event may be erased
        expected = (file.events, *ends)
    if found != expected or bool((np.diff(offsets) <= 0).any()):
        raise CorruptError(
            f"holds (events, first and last offset) {found}, its manifest says {expected}"
        )
    return offsets


def erased_left(known: Offsets, manifest: Manifest) -> Offsets:
    """Returns the erased offsets of a range that its files still hold."""
    left: Offsets = np.intersect1d(known, np.array(manifest.erased, np.int64))
    return left
