"""A file of an archive that is being written, and what is known of it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidelog.codec.formats import FileWriter, Format
from tidelog.model.pipeline import FileEntry
from tidelog.sinks.portions import Share
from tidelog.sinks.spool import Spool
from tidelog.sinks.uploads import Put

__all__ = ["OpenFile"]


class OpenFile:
    """One file and, where its format has one, its sidecar."""

    def __init__(self, form: Format) -> None:
        self.first_offset = self._last_offset = -1
        self._first_ms = self._last_ms = self._path_ms = -1
        self.data = Spool()
        self.sidecar = Spool() if form.sidecar_name("x") else None
        self.writer: FileWriter = form.writer(self.data, self.sidecar)

    @property
    def spooled_bytes(self) -> int:
        """What is encoded, and in memory."""
        return self.data.bytes_held + (self.sidecar.bytes_held if self.sidecar else 0)

    def to_disk(self) -> None:
        """Free that memory."""
        self.data.to_disk()
        if self.sidecar is not None:
            self.sidecar.to_disk()

    def write(self, share: Share) -> pa.RecordBatch | None:
        """Add a folder's rows; gives back the misfits."""
        misfits = self.writer.write(share.batch)
        rows = slice(share.start, share.end)
        offsets, times = share.portion.offsets[rows], share.portion.times[rows]
        lost = [] if misfits is None else misfits.column("offset").to_numpy()
        kept = np.setdiff1d(offsets, lost) if len(lost) else offsets
        if self.first_offset < 0:
            self.first_offset = int(kept[0]) if len(kept) else -1
            self._first_ms = int(times[0])
        self._first_ms = min(self._first_ms, int(times.min()))
        self._last_ms = max(self._last_ms, int(times.max()))
        self._last_offset = int(kept[-1]) if len(kept) else self._last_offset
        self._path_ms = share.path_ms
        return misfits

    @property
    def path_ms(self) -> int:
        """The parser's time of the last event; -1: its path was made of none."""
        return self._path_ms

    def entry(self, target: str, kind: str, named: int = 0) -> Put:
        """What the manifest says of it, once it is stored."""
        return lambda staged, size, crc: FileEntry(
            staged=staged,
            target=target,
            size=size,
            crc=crc,
            events=self.writer.rows if kind == "data" else 0,
            first_offset=self.first_offset,
            last_offset=self._last_offset,
            first_ms=self._first_ms,
            last_ms=self._last_ms,
            kind=kind,
            path_ms=self._path_ms,
            named=named,
        )
