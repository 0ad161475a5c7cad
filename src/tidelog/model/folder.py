"""The rows of an archive's date folders: what is in them, and whether they are final."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidelog.model.decoding import Persisted
from tidelog.model.event import to_iso

__all__ = ["Counted", "Folder", "State", "Success", "encode_success"]

State = Literal["open", "marking", "final", "reopening", "reopened"]


class Counted(Persisted, frozen=True):
    """Up to where the files of a source partition, or of its replays, are in folders' rows."""

    ordinal: int = 0  # of the first range that is not in them as a whole
    folders: int = 0  # of that range's folders, in their order, those that are


class Folder(Persisted, frozen=True):
    """A date folder that has files.

    Its state says what its marker must be: ``marking`` and ``final`` want it there, ``reopening``
    and ``reopened`` want it gone. The first of each pair is not yet done, or not yet told.
    """

    folder: str  # below the generation's own
    end_ms: int  # when its time is over
    length_ms: int  # about how long that is
    files: int = 0
    events: int = 0
    state: State = "open"
    watermark_ms: int = 0  # of the archive when it was last marked
    late_ms: int = 0  # when files last came after it was marked; 0: never
    marked_ms: int = 0  # when it was last marked


class Success(msgspec.Struct, frozen=True):
    """What the marker of a folder says."""

    archive: str
    folder: str
    watermark: str
    files: int
    events: int


def encode_success(archive: str, folder: Folder) -> bytes:
    """The marker that a folder's row asks for; it follows from the row, so verify compares both."""
    return msgspec.json.encode(
        Success(
            archive=archive,
            folder=folder.folder,
            watermark=to_iso(folder.watermark_ms),
            files=folder.files,
            events=folder.events,
        )
    )
