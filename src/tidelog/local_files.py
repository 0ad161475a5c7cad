"""Files and folders on this machine: creates them for the owner of their folder, and locks folders.

What root creates in a home belongs to the owner of the folder that it is in (:func:`create_file`),
as SQLite does it with its log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["create_file", "create_folder", "locked_folder", "match_owner"]


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
