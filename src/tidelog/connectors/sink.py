"""What a sink is: a writer for each range, and publishing of what was decided."""

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
    """What a writer has staged of one range."""

    files: tuple[FileEntry, ...] = ()
    written: int = 0
    dead: int = 0
    left_out: int = 0  # since they were erased from the target


class RecordRefusedError(InvalidError):
    """A record that cannot become an event; ``offset`` is its own, in its source partition.

    ``read`` is how many events were read in the batches before its own.
    """

    kind = "refused"


class RangeWriter(Protocol):
    """Takes the events of one range, in order."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Stage events, in event columns. ``RecordRefusedError`` for one that cannot be stored."""
        ...

    def close(self) -> Written:
        """Finish all files, durable in staging."""
        ...


class Sink(Protocol):
    """Settings of a sink; picklable. Stores are opened by each call, where it runs."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        """A writer for a range of a source partition, whose files go below ``staging``."""
        ...

    def publish(self, manifest: Manifest) -> int | None:
        """Make what a manifest names visible; idempotent, by two at once too.

        How many of its events were left out, since they were erased from the target meanwhile.
        ``CorruptError`` when a file is neither staged nor published as it should be.
        """
        ...

    def discard(self, manifest: Manifest) -> None:
        """Remove what was staged, after the commit. Idempotent."""
        ...


@runtime_checkable
class AsideSink(Protocol):
    """A sink whose files can be set aside, where readers do not list them."""

    def published(self, manifest: Manifest) -> list[FileEntry]:
        """The files of a manifest that are at their final names, with its bytes."""
        ...

    def named(self, names: str) -> Sink:
        """The same sink, whose files have this as a further part of their names."""
        ...

    def aside(self, file: FileEntry, name: str) -> str:
        """Where a file of a range of this name is set aside."""
        ...

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        """Move files there. Idempotent, also where another one has moved them since."""
        ...

    def layout(self) -> LayoutSettings:
        """How the folders of its files are named."""
        ...

    def folder(self, file: FileEntry) -> str:
        """The folder of a file, below that of its generation."""
        ...

    def is_marked(self, folder: str) -> bool:
        """Whether a folder has a marker that says it is complete."""
        ...


class TargetSink(Sink, Protocol):
    """A sink that a URL names: a topic, or a stream of another system."""

    @property
    def url(self) -> str:
        """The address that opens this sink again; never with a secret in it."""
        ...

    @property
    def incarnation(self) -> str:
        """Which one of the targets of this name it writes to; another when it was made anew."""
        ...

    def check(self, partitions: Sequence[str]) -> None:
        """``InvalidError`` where events of these source partitions could not be placed."""
        ...
