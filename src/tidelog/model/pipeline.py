"""A pipeline's rows and manifest: how far it has come, what it will do, what it did."""

from __future__ import annotations

import msgspec

from tidelog.errors import CorruptError

__all__ = ["Committed", "FileEntry", "Gap", "Intent", "Manifest", "Progress", "read_manifest"]


class Progress(msgspec.Struct, frozen=True):
    """The ``head`` of a source partition: every write there expects it."""

    position: str  # where reading goes on
    ordinal: int  # how many events were committed so far; numbers what has no offset of its own
    epoch: int  # of the driver that works on it
    closed: bool = False  # its generation is retired; nobody adopts it again


class Gap(msgspec.Struct, frozen=True):
    """Events that the source had lost before they were read."""

    start: str
    end: str


class Intent(msgspec.Struct, frozen=True):
    """A range that is about to be done; with a manifest, its contents are decided."""

    start: str  # the committed position
    limit: str
    lost: tuple[Gap, ...] = ()  # at its beginning, accepted by a person
    manifest: str = ""  # key of the manifest, once it is recorded


class FileEntry(msgspec.Struct, frozen=True):
    """One file: where it is staged, where it belongs, and how to know it."""

    staged: str
    target: str
    size: int
    crc: int  # crc32c of all its bytes
    events: int
    first_offset: int
    last_offset: int
    first_ms: int
    last_ms: int
    kind: str = "data"  # or "dead", or "sidecar"


class Manifest(msgspec.Struct, frozen=True):
    """What a range produced: decided once, published and committed from this alone."""

    pipeline: str  # incarnation
    partition: str  # of the source
    start: str
    end: str  # the end that was reached; the next range starts here
    ordinal: int  # of its first event
    read: int  # events read from the source
    written: int
    dropped: int = 0  # by the user's transform
    dead: int = 0  # that no parser took
    files: tuple[FileEntry, ...] = ()
    lost: tuple[Gap, ...] = ()


class Committed(msgspec.Struct, frozen=True):
    """A range that is done."""

    manifest: str
    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int


def read_manifest(data: bytes, key: str) -> Manifest:
    """A manifest from its bytes."""
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as exc:
        raise CorruptError(f"manifest `{key}`: {exc}: keep it, and restore it from a copy") from exc
