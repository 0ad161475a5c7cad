"""Connections to one SQLite file, one for each thread, and none of them across a fork.

SQLite counts a process's locks on a file in the memory of the process. A forked child inherits the
counts but not the locks. A connection that it opens to the same file believes that the process
already holds a lock, and takes none. The parent then closes as if it were the last one and deletes
the write-ahead log, and the child goes on writing to a deleted file. So no connection of ours is
open while a process forks:

1. Before a fork, every connection is closed as soon as its statement has ended. Opening another one
   waits until the fork is over, and the fork waits for one that an ending thread closes.
2. After it, parent and child each open their own connections when they next need one.

A fork that bypassed Python (a C library that calls ``fork`` itself), or one from a signal handler
in the middle of a statement, cannot be prepared. The child keeps what it inherited, untouched and
never closed, and refuses the file with one clear error before anything is written.

The same happens without a fork when other code of the process opens the file and closes it, to copy
it for example: the kernel then drops every lock that the process has on the file. The next process
that closes the catalog deletes the log, and this one would go on writing to a deleted file. So each
use of a connection first compares the log in the folder with the one that SQLite has open, and a
commit also compares it afterwards. If they differ, the connections are never used or closed again,
since that would overwrite what others have committed, and this process refuses the file.

A :class:`Reserve` keeps disk space beside the file, so that a full disk can be freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from tidelog.errors import InvalidError, UnknownOutcomeError
from tidelog.local_files import create_file
from tidelog.model import limits

__all__ = ["Connections", "Opener", "Reserve"]

Opener = Callable[[str], sqlite3.Connection]

_CLOSE_S = 30.0  # how long a fork waits for one statement; SQLite waits 10 s for a busy file
_FREE_TIMES = 4  # free space, in reserves, that is required to create one
_FORKED = (
    "was open when this process was forked, and SQLite cannot open it safely here: close the home "
    "before the fork, or start the process with multiprocessing's `spawn`"
)
_CUT_OFF = (
    "other code of this process has opened and closed the file, or it was replaced, and SQLite "
    "lost its locks or its log: start the process again, and copy catalogs in another process"
)

_File = tuple[int, int]
"""Which file is at a path: device and inode."""


class _ThreadConnection:
    """One thread's connection; closed when the thread ends."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path.resolve()
        self.log_path = f"{self.path}-wal"
        self.log = _identity(self.log_path)  # None: of a file that never changes
        self.file = _identity(str(self.path))
        self.connection = connection
        self.lock = threading.RLock()  # taken for each statement
        self.busy = 0  # statements of the thread that has the lock; 2 in a signal handler
        self.closed = False  # or not ours to close

    def close(self) -> None:
        """Closes it unless this thread is in the middle of a statement.

        Waits for another thread.
        """
        if self.lock.acquire(timeout=_CLOSE_S):
            try:
                if not self.busy and not self.closed:
                    self.end()
            finally:
                self.lock.release()

    def abandon(self) -> None:
        """Never closes it, not even when the interpreter ends: that would harm others."""
        self.closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.connection))

    def __del__(self) -> None:
        if not self.closed:
            _process.dropped.append(self)
            _process.close_dropped()

    def is_cut_off(self) -> bool:
        """Returns whether SQLite's log is not the one in the folder any more."""
        return (
            self.log is not None
            and _identity(self.log_path) != self.log
            and _is_deleted(self.log_path)
        )

    def end(self) -> None:
        """Closes it; abandons it if that would harm others."""
        if self.is_cut_off():  # closing would move the deleted log into the file
            _process.cut_off(self)
            self.abandon()
        else:
            self.connection.close()
            self.closed = True


class _Process:
    """What this process has open, over all catalogs."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.opening = threading.RLock()  # held while a connection is opened, and during a fork
        self.closing = threading.RLock()  # held while a dropped one is closed, and during a fork
        self.opened: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()
        self.dropped: list[_ThreadConnection] = []  # of ended threads, to be closed
        self.under_way: list[Path] = []  # files that are being opened
        self.refused: dict[Path, str] = {}  # files that cannot be opened here, and why
        self.cut: dict[Path, _File | None] = {}  # files whose log this process has lost

    def before_fork(self) -> None:
        self.opening.acquire()
        for held in list(self.opened):
            held.close()
        self.closing.acquire()  # last: the fork must not wait for a statement that waits for it
        self.close_dropped()

    def after_in_parent(self) -> None:
        self.closing.release()
        self.opening.release()
        self.close_dropped()

    def close_dropped(self) -> None:
        """Closes what ended threads have left, unless a fork or another thread is at it.

        The garbage collector calls this in any thread, whatever locks that has, so it must not
        wait: a fork holds ``closing`` while it waits for locks of other modules.
        """
        while self.dropped and self.closing.acquire(blocking=False):  # so no fork begins now
            try:
                with contextlib.suppress(IndexError):  # a signal handler was faster
                    self.dropped.pop().end()
            finally:
                self.closing.release()

    def after_in_child(self) -> None:
        self.pid = os.getpid()
        self.opening, self.closing = threading.RLock(), threading.RLock()
        for held in (*self.opened, *self.dropped):
            if not held.closed:
                self.refused[held.path] = _FORKED
                held.abandon()
        self.dropped = []
        self.refused |= dict.fromkeys(self.under_way, _FORKED)
        self.under_way = []
        self.opened = weakref.WeakSet()

    def cut_off(self, found: _ThreadConnection) -> None:
        """Never uses the connections to a file again: its log was deleted or replaced."""
        self.cut[found.path] = found.file
        for held in list(self.opened):
            if held.path == found.path and held.file == found.file and not held.closed:
                held.abandon()

    def why_refused(self, path: Path) -> str:
        """Returns why a file cannot be opened here; empty if it can.

        A file that was created where one was deleted is another one. The inode of the old one is
        not used again, as this process never closes it.
        """
        for each, why in self.refused.items():
            if _same_file(path, each):
                return why
        return _CUT_OFF if path in self.cut and _identity(str(path)) == self.cut[path] else ""

    def check(self) -> None:
        """Notices a fork that ran no hooks."""
        if self.pid != os.getpid():
            self.after_in_child()


_process = _Process()
os.register_at_fork(
    before=_process.before_fork,
    after_in_parent=_process.after_in_parent,
    after_in_child=_process.after_in_child,
)


class Connections:
    """The connections of one catalog: each thread has its own, a forked child has new ones."""

    def __init__(self, path: Path, opener: Opener) -> None:
        self._path = path
        self._opener = opener
        self._local = threading.local()
        self._held: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()

    @contextlib.contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Yields this thread's connection, for one statement or transaction inside the block."""
        _process.check()
        while True:
            held: _ThreadConnection | None = getattr(self._local, "held", None)
            if held is None or held.closed:
                held = self._open()
            with held.lock:
                if held.closed:
                    continue  # a fork was faster
                if held.is_cut_off():
                    _process.cut_off(held)
                    continue  # to be refused
                held.busy += 1
                try:
                    yield held.connection
                finally:
                    held.busy -= 1
                return

    def check_commit(self) -> None:
        """Raises ``UnknownOutcomeError`` if what this thread committed may be in no log."""
        held: _ThreadConnection | None = getattr(self._local, "held", None)
        if held is None:
            return
        if not held.closed and held.is_cut_off():
            _process.cut_off(held)
        if _process.cut.get(held.path, held) == held.file:  # perhaps by another thread
            raise UnknownOutcomeError(f"catalog `{self._path}`: {_CUT_OFF}")

    @contextlib.contextmanager
    def once(self, mode: str) -> Iterator[sqlite3.Connection]:
        """Yields a connection for this block alone; no fork happens inside."""
        _process.check()
        with _process.opening, self._under_way():
            connection = self._opener(mode)
            try:
                yield connection
            finally:
                connection.close()

    def close(self) -> None:
        """Closes all of them, also those of other threads."""
        _process.check()
        with _process.opening:
            for held in list(self._held):
                held.close()
            self._held = weakref.WeakSet()
            self._local = threading.local()

    def _open(self) -> _ThreadConnection:
        _process.close_dropped()
        with _process.opening, self._under_way():
            held = _ThreadConnection(self._path, self._opener("rw"))
            _process.opened.add(held)
            self._held.add(held)
            self._local.held = held
        return held

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        real = self._path.resolve()
        if why := _process.why_refused(real):
            raise InvalidError(f"catalog `{self._path}`: {why}")
        _process.under_way.append(real)
        try:
            yield
        finally:
            _process.under_way.remove(real)


class Reserve:
    """The file ``<catalog>-reserve``: disk space beside a catalog, to free a full disk with.

    SQLite writes to its log even to delete a row, so on a full disk nothing could be deleted. The
    file reserves some space. Opening the catalog, and commands that free space, cut a slice off its
    end when the disk is full. These commands restore it when there is space.

    Commands that free space write in batches of limited size (``limits.CHANGES_MAX``). When a batch
    does not fit, or little space is left after one, SQLite's log is moved into its file and
    truncated. Only then a slice of the reserve is released. The file may grow by that, so it
    happens before the disk is full. So the space needed does not grow with what is deleted. When
    such a command ends, the log is truncated again, and the reserve gets back what was used of it,
    if there is space.
    """

    def __init__(self, catalog: Path) -> None:
        self._catalog = catalog
        self._path = catalog.with_name(f"{catalog.name}-reserve")

    def give(self, size: int) -> bool:
        """Releases some bytes to the file system; returns whether there were any left."""
        try:
            left = self._path.stat().st_size
            if left:
                os.truncate(self._path, max(0, left - size))
        except OSError:
            return False
        return left > 0

    def size(self) -> int:
        """Returns how many bytes are left of it."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def take_back(self, size: int) -> None:
        """Restores the size that it had before some was released, as far as there is space."""
        with contextlib.suppress(OSError):
            wanted = min(size, self.size() + self._free_bytes())
            if wanted > self.size():
                self._allocate(wanted)

    def give_if_full(self, size: int) -> None:
        """Releases the same, if less than that is free."""
        if self.is_disk_full(size):
            self.give(size)

    def is_disk_full(self, size: int) -> bool:
        """Returns whether less than this is free; False if the disk does not say."""
        try:
            return self._free_bytes() < size
        except OSError:
            return False

    def fill(self) -> None:
        """Restores its full size if there is plenty of space; leaves a nearly full disk alone."""
        wanted = limits.RESERVE_BYTES
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size >= wanted:
                return
            if self._free_bytes() < _FREE_TIMES * wanted:
                return
            self._allocate(wanted)

    def _allocate(self, size: int) -> None:
        descriptor = create_file(self._path, os.O_WRONLY, self._catalog)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize


def _identity(path: str) -> _File | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_deleted(path: str) -> bool:
    """Returns whether this process has a deleted file of this name open; True if unknown."""
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return True
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}") == f"{path} (deleted)":
                return True
    return False


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other
