"""What is known about a backup's files: which were passed, and up to which offsets they went.

A source partition of a backup is a chain of files. What is remembered of it shows files that came
after their offsets were passed, and files that vanished before they were read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from typing import NamedTuple

from tidelog.connectors.files.listing import Chain
from tidelog.connectors.files.row_tracking import is_of_file
from tidelog.connectors.source import KnownPartition, SourcePartition, VanishedError, offset_at
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.limits import FILES_PASSED_MAX

__all__ = ["ChainTracking", "FilesBefore", "joined_notes"]

_FILES = b"files:"  # prefix of the note of a range of an archive's files
_NAME_BYTES = 5  # of the digest of a file name; among 50,000, a chance match is 1 in 20 million


class ChainTracking:
    """What a pipeline has read of a backup's files, and the last ends that were seen."""

    def __init__(self) -> None:
        self._known: dict[SourcePartition, KnownPartition] = {}
        self._ends: dict[SourcePartition, int] = {}

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Sets what was read of source partitions."""
        self._known = dict(known)
        for each, found in known.items():
            if found.seen and not is_of_file(found.incarnation):
                self._ends.setdefault(each, int(found.seen))

    def seen(self) -> dict[SourcePartition, str]:
        """Returns up to which offsets files were seen."""
        return {each: str(end) for each, end in self._ends.items()}

    def missing(self, there: Container[SourcePartition]) -> dict[SourcePartition, TidelogError]:
        """Returns errors of source partitions that have no file now, and had more than was read."""
        unread = {each: self._unread(each) for each in self._ends if each not in there}
        return {each: error for each, error in unread.items() if error is not None}

    def note_end(self, partition: SourcePartition, first: int, end: int) -> None:
        """Remembers the end of a chain. Raises ``VanishedError`` if the last files are gone.

        It does so only after the files before them were read.
        """
        known, seen = self._known.get(partition), self._ends.get(partition, 0)
        if end < seen and known is not None and offset_at(known.position) == end:
            error = self._unread(partition)
            if error is not None:
                raise error
        if first < end:
            self._ends[partition] = max(end, seen)

    def _unread(self, partition: SourcePartition) -> VanishedError | None:
        """Returns the error of files that are gone; None if they were read, or it is accepted."""
        known, end = self._known.get(partition), self._ends[partition]
        if known is None or end <= max(offset_at(known.position), int(known.lost or 0)):
            return None
        return VanishedError(
            f"source partition `{partition.text}`: files of it were removed before they were read: "
            f"it ended at {end}, and {known.position} is committed: put them back into the folder, "
            "or run with --accept-loss to record that they are lost",
            partition=partition.text,
            end=str(end),
        )

    def check_late_files(self, partition: SourcePartition, files: Chain) -> None:
        """Raises for files that appeared after their offsets: they would never be read."""
        known = self._known.get(partition)
        before = FilesBefore.read(known.note) if known is not None else None
        if known is None or before is None:  # or another source came before
            return
        found = FilesBefore.of(files, offset_at(known.position))
        if not found.digests <= before.digests:
            raise InvalidError(
                f"source partition `{partition.text}`: a file with offsets before "
                f"{known.position} came after these were read (dead letters that were replayed, or "
                "an archive that is being written): read archive:NAME with the archive's home, or "
                "wait until it is written and start a new pipeline",
                partition=partition.text,
            )


class FilesBefore(NamedTuple):
    """Which files begin before an offset, by digests of their names.

    Retention may delete files of the folder. A file that is not in this set came later.
    """

    digests: frozenset[bytes]

    @classmethod
    def of(cls, files: Chain, limit: int) -> FilesBefore:
        names = {f.data.key.rpartition("/")[2] for f in files if f.first < limit}
        if len(names) > FILES_PASSED_MAX:
            raise InvalidError(
                f"files before offset {limit}: there are {len(names)} of one source partition, and "
                f"at most {FILES_PASSED_MAX} can be remembered: read archive:NAME"
            )
        digests = (hashlib.sha256(name.encode()).digest() for name in names)
        return cls(frozenset(digest[:_NAME_BYTES] for digest in digests))

    @classmethod
    def read(cls, note: bytes) -> FilesBefore | None:
        if not note.startswith(_FILES):
            return None
        data = note.removeprefix(_FILES)
        starts = range(0, len(data), _NAME_BYTES)
        return cls(frozenset(data[at : at + _NAME_BYTES] for at in starts))

    def note(self) -> bytes:
        return _FILES + b"".join(sorted(self.digests))


def joined_notes(note: bytes, other: bytes) -> bytes:
    """Returns a note of the files that one of two notes names; the first if that cannot be."""
    found = [FilesBefore.read(each) for each in (note, other)]
    digests = frozenset(digest for each in found if each is not None for digest in each.digests)
    if None in found or len(digests) > FILES_PASSED_MAX:
        return note
    return FilesBefore(digests).note()
