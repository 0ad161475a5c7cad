"""The protocols of sinks: a writer stages each range, and ``publish`` makes it visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from tidelog.codec.parsers import LayoutSettings
from tidelog.errors import InvalidError
from tidelog.model.pipeline import FileEntry, Manifest

__all__ = ["AsideSink", "RangeWriter", "RecordRefusedError", "Sink", "TargetSink", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer staged for one range."""

    files: tuple[FileEntry, ...] = ()
    written: int = 0
    dead: int = 0
    left_out: int = 0  # because they were erased from the target


class RecordRefusedError(InvalidError):
    """A record that is not a valid event. ``offset`` is its offset in its source partition.

    ``read`` is the number of events in the batches before its own.
    """

    kind = "refused"


class RangeWriter(Protocol):
    """Writes the events of one range, in order."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Stages events in event columns. Raises ``RecordRefusedError`` for one it cannot store."""
        ...

    def close(self) -> Written:
        """Closes all files; they are durable in staging."""
        ...


class Sink(Protocol):
    """Settings of a sink; picklable. Each call opens stores in the process where it runs."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        """Returns a writer for a range of a source partition. Its files go below ``staging``."""
        ...

    def publish(self, manifest: Manifest) -> int | None:
        """Makes the files of a manifest visible. Idempotent, also when two drivers call it at once.

        Returns how many events were skipped because they were erased from the target in the
        meantime. Raises ``CorruptError`` if a file is neither staged nor correctly published.
        """
        ...

    def discard(self, manifest: Manifest) -> None:
        """Deletes the staged files after the commit. Idempotent."""
        ...


@runtime_checkable
class AsideSink(Protocol):
    """A sink that can set files aside, where readers do not list them."""

    def published(self, manifest: Manifest) -> list[FileEntry]:
        """Returns the files of a manifest that have their final names and the right bytes."""
        ...

    def named(self, names: str) -> Sink:
        """Returns the same sink with a further part in the names of its files."""
        ...

    def aside(self, file: FileEntry, name: str) -> str:
        """Returns where to set aside a file of the range with this name."""
        ...

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        """Moves files there. Idempotent, also if another process already moved them."""
        ...

    def layout(self) -> LayoutSettings:
        """Returns how the folders of its files are named."""
        ...

    def folder(self, file: FileEntry) -> str:
        """Returns the folder of a file, below the folder of its generation."""
        ...

    def is_marked(self, folder: str) -> bool:
        """Returns whether a folder has a marker that declares it complete."""
        ...


class TargetSink(Sink, Protocol):
    """A sink with a URL: a topic, or a stream of another system."""

    @property
    def url(self) -> str:
        """Returns the address that opens this sink again; never contains a secret."""
        ...

    @property
    def incarnation(self) -> str:
        """Returns the id of the target; it changes if the target is deleted and created again."""
        ...

    def check(self, partitions: Sequence[str]) -> None:
        """Raises ``InvalidError`` if the target has no place for events of these partitions."""
        ...
