"""Plays events into a file: JSON lines, or Parquet by its extension.

A file of lines can be resumed: its length is stored with the cursor, and the next process truncates
it there, so no line is repeated. A process that stalls may lose its playback without noticing, and
write on when it wakes up. So the file is locked while it is open, and no other process writes to it
until that one has ended. A Parquet file appears when the playback ends. A file that already holds
something is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from tidelog.codec.formats import FileWriter, open_format
from tidelog.connectors.sink import Lot, PlaybackSink, SinkContext, StreamSink
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, UnavailableError
from tidelog.model.address import Address
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["LinesPlaybackSink", "WholeFile", "check_file", "open_file"]


def check_file(address: Address, *, named: bool) -> None:
    """Raises ``InvalidError`` for a path that is not a file, or a named playback to Parquet."""
    address.take_options(())
    if address.host or not address.path or address.path.endswith("/"):
        raise InvalidError(f"sink `{address.text}`: names no file: give file:PATH")
    if named and _is_parquet(address.path):
        raise InvalidError(
            f"sink `{address.text}`: a Parquet file cannot be continued, so --resume has no use: "
            "play into a file of JSON lines (.jsonl), or without a name"
        )


def open_file(address: Address, setting: SinkContext) -> PlaybackSink:
    """Opens the sink at ``file:PATH``."""
    path = Path(address.path)
    try:
        if _is_parquet(address.path):
            return WholeFile(path, setting.id)
        return LinesPlaybackSink(path, setting)
    except OSError as exc:
        raise InvalidError(
            f"sink `{address.text}`: {exc.strerror}: check its folder, and its rights"
        ) from exc


class LinesPlaybackSink:
    """JSON lines; durable on disk when ``put`` returns."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, path: Path, setting: SinkContext) -> None:
        self._path = path
        self._file = path.open("ab", buffering=1 << 20)
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        try:
            self._check(setting)
        except BaseException:
            self._file.close()
            raise
        self._lines = StreamSink(self._file)

    def put(self, lot: Lot) -> None:
        try:
            self._lines.put(lot)
            if self._is_regular:
                os.fsync(self._file.fileno())
        except OSError as exc:
            raise UnavailableError(
                f"file `{self._path}`: {exc.strerror}: make room or fix it, and resume"
            ) from exc

    def reached(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._is_regular else 0

    def close(self, failed: bool = False) -> None:
        with contextlib.suppress(OSError) if failed else contextlib.nullcontext():
            self._file.close()

    def _check(self, setting: SinkContext) -> None:
        """Truncates what an earlier process added. Raises if the file is not ours."""
        if not self._is_regular:
            return
        self._lock()
        size = self.reached()
        if not setting.resumed and size:
            raise AlreadyExistsError(
                f"file `{self._path}`: holds {size} bytes already: choose another, or remove it"
            )
        if size < setting.reached:
            raise CorruptError(
                f"file `{self._path}`: has {size} bytes, but the playback had written "
                f"{setting.reached}: restore it, or play again under another name"
            )
        os.truncate(self._file.fileno(), setting.reached)

    def _lock(self) -> None:
        """Locks the file until it is closed. Raises ``UnavailableError`` if a process has it."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise UnavailableError(
                f"file `{self._path}`: another process still plays into it, perhaps one that "
                "stalls: end that one, and resume"
            ) from exc
        except OSError:
            return  # a file system without locks


class WholeFile:
    """One file, Parquet or lines, renamed to its place when it is complete.

    With ``replaces`` it overwrites an existing file: the same content, from another attempt.
    """

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, path: Path, attempt: str, replaces: bool = False) -> None:
        if path.exists() and not replaces:
            raise AlreadyExistsError(f"file `{path}`: exists already: choose another, or remove it")
        self._path = path
        self._replaces = replaces
        self._begun = path.with_name(f".{path.name}.{attempt}")
        self._file = self._begun.open("xb")
        self._parquet: FileWriter | None = None
        if _is_parquet(path.name):
            self._parquet = open_format("parquet").writer(self._file)
        self._lines = StreamSink(self._file)

    def put(self, lot: Lot) -> None:
        try:
            if self._parquet is None:
                self._lines.put(lot)
            else:
                self._parquet.write(lot.batch)
        except OSError as exc:
            raise self._write_error(exc) from exc

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        if self._file.closed:
            return
        try:
            if failed:
                self._discard()
            else:
                self._finish()
        except FileExistsError as exc:
            raise AlreadyExistsError(
                f"file `{self._path}`: came to be while this was played: choose another"
            ) from exc
        except OSError as exc:
            raise self._write_error(exc) from exc
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            self._begun.unlink(missing_ok=True)

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            if self._parquet is not None:
                self._parquet.close()

    def _finish(self) -> None:
        """Syncs the file, renames it, then syncs its folder."""
        if self._parquet is not None:
            self._parquet.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._replaces:
            self._begun.rename(self._path)
        else:
            os.link(self._begun, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write_error(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"file `{self._path}`: {error.strerror}: make room or fix it, and play again"
        )


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


_: tuple[type[PlaybackSink], type[PlaybackSink]] = (LinesPlaybackSink, WholeFile)
