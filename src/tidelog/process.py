"""Processes: whether another process on this machine is dead, and which process owns an object.

A lease of a process that is known to be dead can be taken over without a wait. Only certain
knowledge counts: we judge processes that share our machine, its current boot, and our pid and time
namespaces, and no others. ``/proc`` may hide a living process of another user (``hidepid``,
``ProtectProc``). So a process that is not listed there is dead only if the kernel says that no
process has its id.

A forked child inherits buffers, leases and locks, but none of the threads behind them. The parent
writes what is buffered and releases the leases. A lock that another thread held at the fork never
becomes free in the child. So an object with any of these has a :class:`ProcessGuard`: in a child,
every use of the object raises one clear error, and nothing of it is written.

Guards are marked when the process forks, so a check costs no system call. A :class:`RefusingLock`
replaces the object's lock, so hot paths need no check at all.

What root creates in a home belongs to the owner of the folder that it is in
(:func:`create_file`), as SQLite does it with its log.

Locks of native libraries are out of reach: a child may wait forever for a lock of Arrow's that
another thread held. So fork only while no other thread works, or use ``spawn``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tidelog.errors import InvalidError

__all__ = [
    "LocalProcesses",
    "NoProcesses",
    "ProcessGuard",
    "Processes",
    "RefusingLock",
    "check_process",
    "create_file",
    "create_folder",
    "describe_process",
    "locked_folder",
    "match_owner",
]

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def check_process(opened_in: int, what: str) -> None:
    """Raises ``InvalidError`` in a forked child, which lacks the object's threads."""
    if os.getpid() != opened_in:
        raise InvalidError(
            f"{what}: was opened in another process: open the home again in this one"
        )


class Processes(Protocol):
    """Identifies processes."""

    def mark(self) -> str:
        """Returns a string by which others can identify this process."""
        ...

    def is_dead(self, mark: str) -> bool:
        """Returns True only if that process has certainly ended."""
        ...


def describe_process(mark: str) -> str:
    """Returns the host and process of a mark: ``vm/…|31864|…`` is ``vm, process 31864``."""
    where, _, rest = mark.partition("|")
    number = rest.partition("|")[0]
    return f"{where.partition('/')[0]}, process {number}" if number else where


class NoProcesses:
    """Knows nothing about any process."""

    def mark(self) -> str:
        return ""

    def is_dead(self, mark: str) -> bool:
        return False


class LocalProcesses:
    """Reads ``/proc``; knows nothing on systems without it."""

    def __init__(
        self, proc: Path = Path("/proc"), kill: Callable[[int, int], None] = os.kill
    ) -> None:
        self._proc = proc
        self._kill = kill

    def mark(self) -> str:
        view, started = self._view(), self._started(os.getpid())
        return f"{view}|{os.getpid()}|{started}" if view and started else ""

    def is_dead(self, mark: str) -> bool:
        view, _, rest = mark.partition("|")
        pid, _, started = rest.partition("|")
        if not view or not started or view != self._view() or not pid.isdecimal():
            return False
        found = self._started(int(pid))
        return self._is_unused(int(pid)) if found is None else found != started

    def _view(self) -> str:
        """Returns the machine, its boot, and the namespaces of process ids and times.

        Empty if ``/proc`` shows another namespace than ours: its ids would not be our ids.
        """
        try:
            if os.readlink(self._proc / "self") != str(os.getpid()):
                return ""
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink(self._proc / "self/ns/pid")
        except OSError:
            return ""
        times = ""  # a time namespace shifts a process's start time
        with contextlib.suppress(OSError):
            times = os.readlink(self._proc / "self/ns/time")
        return f"{socket.gethostname()}/{boot}/{space}/{times}"

    def _started(self, pid: int) -> str | None:
        """Returns when a process started, which detects a reused process id.

        Empty for a process that has ended but was not waited for; None if ``/proc`` does not show
        it.
        """
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # otherwise its threads live on
        return "" if ended else fields[19]

    def _is_unused(self, pid: int) -> bool:
        """Returns whether the kernel says that no process has this id.

        A process that we are not allowed to signal exists.
        """
        try:
            self._kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


_: tuple[type[Processes], type[Processes]] = (NoProcesses, LocalProcesses)


class ProcessGuard:
    """Knows whether this process created an object or inherited it through a fork."""

    __slots__ = ("__weakref__", "_on_fork", "is_foreign", "what")

    def __init__(self, what: str, on_fork: Callable[[], None] | None = None) -> None:
        self.what = what
        self.is_foreign = False
        self._on_fork = on_fork  # runs in a child; must not lock or raise
        _guards.add(self)

    def check(self) -> None:
        """Raises ``InvalidError`` in a process that inherited the object."""
        if self.is_foreign:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raises the ``InvalidError`` for an object that another process created."""
        raise InvalidError(
            f"{self.what}: was opened in another process: open the home again in this one"
        )

    def _enter_child(self) -> None:
        self.is_foreign = True
        if self._on_fork is not None:
            self._on_fork()


class RefusingLock:
    """Replaces an inherited lock or condition: entering it raises ``InvalidError``."""

    def __init__(self, guard: ProcessGuard) -> None:
        self._guard = guard

    def __enter__(self) -> NoReturn:
        self._guard.refuse()

    def __exit__(self, *_: Any) -> None:
        return None


_guards: weakref.WeakSet[ProcessGuard] = weakref.WeakSet()


def _mark_inherited() -> None:
    for guard in list(_guards):
        guard._enter_child()


os.register_at_fork(after_in_child=_mark_inherited)


def create_file(path: Path, flags: int, like: Path, mode: int = 0o644) -> int:
    """Opens a file, which it creates if there is none; returns the descriptor.

    As root it gives a new file to the owner of ``like``, so that this user can change it. Only a
    file that it has created: an existing one may be a link to a file of root's.
    """
    flags |= os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    if not _gives_away(like):
        return os.open(path, flags | os.O_CREAT, mode)
    fresh = _fresh_name(path)
    descriptor = os.open(fresh, flags | os.O_CREAT | os.O_EXCL, mode)
    try:
        match_owner(descriptor, like)
        os.link(fresh, path)
    except FileExistsError:  # another process was faster, or it is a link to a missing file
        os.close(descriptor)
        return os.open(path, flags | os.O_CREAT, mode)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        os.unlink(fresh)
    return descriptor


def create_folder(folder: Path) -> None:
    """Creates a folder if there is none; as root, for the owner of the folder that it is in."""
    if not _gives_away(folder.parent):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        return
    if os.path.lexists(folder):
        return
    with locked_folder(folder.parent):  # a rename would replace a folder that another has created
        if os.path.lexists(folder):
            return
        fresh = _fresh_name(folder)
        os.mkdir(fresh)
        try:
            with contextlib.suppress(OSError):  # best effort, and never through a link
                descriptor = os.open(fresh, _FOLDER_FLAGS | os.O_NOFOLLOW)
                try:
                    match_owner(descriptor, folder.parent)
                finally:
                    os.close(descriptor)
            os.rename(fresh, folder)
        except BaseException:
            os.rmdir(fresh)
            raise


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes that do so; leaves no file behind."""
    descriptor = os.open(folder, _FOLDER_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # even if a forked child has a copy
        os.close(descriptor)


def _gives_away(like: Path) -> bool:
    """Returns whether what is created gets another owner than this process."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        wanted = os.stat(like)
        return (wanted.st_uid, wanted.st_gid) != (0, os.getegid())
    return False


def _fresh_name(path: Path) -> Path:
    """Names what root creates until it has its owner.

    A second thread or process that finds a file or folder creates its own for the same owner, as
    SQLite does with its log. So the owner must be right when the final name appears.
    """
    return path.with_name(f".{path.name}-{os.urandom(8).hex()}")


def match_owner(created: int, like: Path) -> None:
    """Gives a file or folder that root has just created to the owner of ``like``, by descriptor.

    Other users cannot give files away, so for them it does nothing. Best effort: without the right
    to do it, root of a container or of a network file system keeps the file.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        wanted, found = os.stat(like), os.fstat(created)
        owner = wanted.st_uid, wanted.st_gid
        if owner != (found.st_uid, found.st_gid):
            os.fchown(created, *owner)
