"""A store in a folder. An acknowledged object survives a power cut.

A put takes five steps. What a crash after each one leaves:

    1. write the bytes to a new name under ``.tidelog/tmp``  → a leftover there; a sweep removes it
    2. fsync that file                                       → the same
    3. link it to its key, which fails if the key exists     → the object, perhaps lost in a power
                                                               cut, never acknowledged; a leftover
                                                               that is a second name of its bytes
    4. fsync the key's folder                                → the object, for good; the leftover
    5. remove the new name                                   → nothing

A put locks its new file (``flock``) until step 5, and the system unlocks it when the process ends,
however it ends. So a file that is not locked is a leftover, whatever its date says.
:meth:`LocalStore.abort_uploads`, which every sweep calls for each store, locks a file before it
removes it. A put that finds its file removed between creating and locking it starts over. A replace
does steps 1 and 2, then renames; it may leave a leftover too. :meth:`LocalStore.uploads` lists
these files, so that a proof of an erasure can search them.

An error in step 4 leaves the outcome unknown: the object is there, and perhaps not for good. The
next attempt is refused, because the key exists, and so is that of another process. Either may then
rely on the object, so a refusal fsyncs the folder first. An error in step 5 is a leftover.

A put creates missing folders. It fsyncs a folder in its parent before this process first links
anything into it, even if another process created it, which may not have done so yet. A link is
atomic, so no reader ever sees a part of an object.

A delete removes the folders that it has emptied, up to the root. Otherwise every attempt of a
pipeline would leave some, until the file system has no inodes left. A put holds
``.tidelog/folders`` shared while it creates the folder and links; a delete holds it exclusively
while it removes. So no folder vanishes in between. A folder that another process removed and
created again may not be durable yet, although we remember it as durable. So the lock file counts
removals, and a put that finds another count forgets which folders are durable. A crash between
unlinking and removing leaves an empty folder, which harms no reader, and which the next delete in
it removes.

Listings leave out ``.tidelog``, which keys cannot reach. They follow links to folders. A link to a
folder that contains it, or to itself, is listed as an object that cannot be read.

What root creates belongs to the owner of the folder that it is in. So a command that an operator
runs as root leaves nothing that the home's own user cannot write to.

An etag is the file's inode, size and modification time, to which the put adds random nanoseconds.
So a file that reuses an inode within the file system's clock tick still differs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tidelog.clock import Clock, Ids
from tidelog.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidelog.local_files import create_file, create_folder, match_owner
from tidelog.store.base import (
    NoRoomError,
    ObjectInfo,
    Store,
    Upload,
    after_folder,
    check_data,
    check_key,
    check_range,
    exists_already,
    not_found,
    replaced_meanwhile,
)

__all__ = ["LocalStore"]

_PRIVATE = ".tidelog"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILE_MODE = 0o666  # less the umask, so that the users of a group can share a folder
_DURABLE_MAX = 50_000  # remembered folders; forgetting them costs an fsync each
_COUNT_BYTES = 20  # of the counter in the lock file
_lock_files: set[int] = set()  # descriptors of locks that threads of this process hold


def _drop_locks() -> None:
    """In a forked child: closes inherited locks, which would last as long as the child does.

    The parent's own descriptors keep them until its threads are done.
    """
    for descriptor in _lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lock_files.clear()


os.register_at_fork(after_in_child=_drop_locks)


class LocalStore:
    """Objects as files below a folder."""

    def __init__(self, root: Path, *, clock: Clock, ids: Ids, random: random.Random) -> None:
        self._root = root.absolute()
        self._tmp = self._root / _PRIVATE / "tmp"
        self._clock = clock
        self._ids = ids
        self._random = random
        self._durable: set[Path] = set()  # folders that will survive a power cut
        self._removals = -1  # the counter of removals when we learned that

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(self, key: str, data: bytes) -> str:
        path = self._path(key)
        check_data(key, data)
        with _translated(key), self._fresh(data) as (fresh, etag):
            self._link(fresh, path, key)
        return etag

    def replace(self, key: str, data: bytes, etag: str) -> str:
        path = self._path(key)
        check_data(key, data)
        with _translated(key), self._locked():
            found = _etag(os.stat(path))
            if found != etag:
                with _unsettled(key):  # it may be our own, of an attempt that failed to do this
                    _fsync_folder(path.parent)
                raise replaced_meanwhile(key, etag, found)
            with self._fresh(data) as (fresh, new_etag):
                os.rename(fresh, path)
                with _unsettled(key):
                    _fsync_folder(path.parent)
        return new_etag

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(key)
        check_range(start, end)
        with _translated(key), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = min(size, size if end is None else end) - start
            return _read_exactly(file.fileno(), start, max(0, wanted))

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with _translated(key):
            found = os.stat(path)
            if stat.S_ISDIR(found.st_mode):
                raise not_found(key)  # a folder is not an object
            return _info(key, found)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        with _translated(prefix):
            yield from self._walk(folder, prefix, start_after, False)

    def delete(self, keys: Iterable[str]) -> None:
        with _translated("delete"), self._locked():
            folders = set()
            for key in keys:
                path = self._path(key)
                folders.add(path.parent)  # even if an attempt that failed has deleted it
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
            for folder in sorted(folders):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    _fsync_folder(folder)
            self._remove_empty(folders)

    def copy(self, source: str, target: str) -> None:
        source_path, target_path = self._path(source), self._path(target)
        with _translated(source):
            os.stat(source_path)
            self._link(source_path, target_path, target)

    def uploads(self) -> Iterator[Upload]:
        with _translated(_PRIVATE):
            for path in _files_in(self._tmp):
                with contextlib.suppress(FileNotFoundError):  # its put ended in the meantime
                    found, is_locked = os.stat(path), _is_locked(path)
                    began_ms = found.st_mtime_ns // 1_000_000
                    name = str(path.relative_to(self._root))
                    yield Upload(name, found.st_size, began_ms, is_locked, _reader(path, name))

    def abort_uploads(self, before_ms: int) -> int:
        with _translated(_PRIVATE):
            removed = sum(_remove_unlocked(path, before_ms) for path in _files_in(self._tmp))
            if removed:
                _fsync_folder(self._tmp)
        return removed

    def presign(self, key: str, expires_s: int) -> str:
        self.head(key)
        return self._path(key).as_uri()

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.split("/", 1)[0] == _PRIVATE:
            raise InvalidError(f"object key `{key}`: begins with `{_PRIVATE}`, which is reserved")
        return self._root / key

    @contextlib.contextmanager
    def _fresh(self, data: bytes) -> Iterator[tuple[Path, str]]:
        """Steps 1, 2 and 5: yields the path and etag of a new, durable file with these bytes."""
        fresh, descriptor = self._create_fresh()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            jitter_ns = self._random.randrange(1_000_000)
            modified_ns = self._clock.now_ms() * 1_000_000 + jitter_ns
            os.utime(descriptor, ns=(modified_ns, modified_ns))
            os.fsync(descriptor)
            yield fresh, _etag(os.fstat(descriptor))
        finally:
            # A replace has renamed it. What cannot be removed now is a leftover.
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            _lock_files.discard(descriptor)
            os.close(descriptor)

    def _create_fresh(self) -> tuple[Path, int]:
        """Creates a new file and locks it, so that no sweep removes it as a leftover."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        while True:
            fresh = self._tmp / self._ids.new()
            try:
                descriptor = os.open(fresh, flags, _FILE_MODE)
            except (FileNotFoundError, NotADirectoryError):
                self._ensure_folder(self._tmp)
                descriptor = os.open(fresh, flags, _FILE_MODE)
            _lock_files.add(descriptor)
            match_owner(descriptor, self._tmp)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return fresh, descriptor
            _lock_files.discard(descriptor)  # a sweep removed it before it was locked
            os.close(descriptor)

    def _link(self, source: Path, target: Path, key: str) -> None:
        """Steps 3 and 4."""
        try:
            with self._folders_locked(fcntl.LOCK_SH) as removals:
                if removals != self._removals:
                    self._durable.clear()
                    self._removals = removals
                self._ensure_folder(target.parent)
                os.link(source, target)
        except FileExistsError:
            self._settle_link(target, key)
            raise exists_already(key) from None
        except NotADirectoryError:
            raise InvalidError(
                f"object key `{key}`: a part of it is itself an object: choose another key"
            ) from None
        self._settle_link(target, key)

    def _settle_link(self, target: Path, key: str) -> None:
        """Step 4. Raises ``UnknownOutcomeError`` if the object may not be durable."""
        with contextlib.suppress(FileNotFoundError), _unsettled(key):  # deleted, its folder too
            _fsync_folder(target.parent)

    def _remove_empty(self, folders: Iterable[Path]) -> None:
        """Removes folders that a delete has emptied, and their parents if they are empty then."""
        empty = [folder for folder in folders if folder != self._root and _is_empty(folder)]
        if not empty:
            return
        with self._folders_locked(fcntl.LOCK_EX) as removals:
            self._count_removals(removals + 1)
            for deepest in empty:
                folder = deepest
                while folder != self._root and _is_removed(folder):
                    folder = folder.parent

    @contextlib.contextmanager
    def _folders_locked(self, how: int) -> Iterator[int]:
        """Holds the lock of folders, shared or exclusive; yields the counter of removals."""
        with self._lock_file("folders", how) as descriptor:
            yield int(os.pread(descriptor, _COUNT_BYTES, 0) or b"0")

    def _count_removals(self, count: int) -> None:
        """Raises the counter before a folder is removed, so that a crash in between is harmless."""
        descriptor = os.open(self._root / _PRIVATE / "folders", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, b"%0*d" % (_COUNT_BYTES, count), 0)
        finally:
            os.close(descriptor)

    def _ensure_folder(self, folder: Path) -> None:
        if folder in self._durable:
            return
        if folder == self._root:
            _make_folders(folder)
        else:
            self._ensure_folder(folder.parent)
            create_folder(folder)
        _fsync_folder(folder.parent)
        if len(self._durable) >= _DURABLE_MAX:
            self._durable.clear()
        self._durable.add(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps replaces and deletes apart, across processes; puts need no lock."""
        with self._lock_file("lock", fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _lock_file(self, name: str, how: int) -> Iterator[int]:
        """Holds a lock across processes, shared or exclusive; yields the descriptor of its file."""
        path = self._root / _PRIVATE / name
        try:
            descriptor = create_file(path, os.O_RDWR, path.parent, _FILE_MODE)
        except (FileNotFoundError, NotADirectoryError):
            self._ensure_folder(path.parent)
            descriptor = create_file(path, os.O_RDWR, path.parent, _FILE_MODE)
        _lock_files.add(descriptor)
        try:
            fcntl.flock(descriptor, how)
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # even if a forked child has a copy
            _lock_files.discard(descriptor)
            os.close(descriptor)

    def _walk(
        self, folder: str, prefix: str, start_after: str, is_link: bool
    ) -> Iterator[ObjectInfo]:
        """Yields objects below a folder in key order; a folder sorts as its name and a slash."""
        try:
            with os.scandir(self._root / folder) as entries:
                found = [(e.name + "/" if _is_folder(e) else e.name, e) for e in entries]
        except (FileNotFoundError, NotADirectoryError):
            return
        except PermissionError as exc:
            raise _denied_error(folder) from exc
        base = f"{folder}/" if folder else ""
        for name, entry in sorted(found, key=lambda pair: pair[0]):
            key = base + name
            if name == _PRIVATE + "/" and not folder:
                continue
            if name.endswith("/"):
                may_match = key.startswith(prefix) or prefix.startswith(key)
                is_passed = start_after == after_folder(key[:-1])
                is_after = key > start_after or (start_after.startswith(key) and not is_passed)
                if may_match and is_after:
                    linked = is_link or entry.is_symlink()
                    yield from self._walk(key[:-1], prefix, start_after, linked)
            elif key.startswith(prefix) and key > start_after:
                try:
                    info = _info(key, _stat_of(entry), is_link or entry.is_symlink())
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                except PermissionError as exc:
                    raise _denied_error(folder) from exc
                yield info


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns the operating system's errors into ours."""
    try:
        yield
    except IsADirectoryError as exc:
        raise (_in_circle(key) if _is_circle(exc.filename) else not_found(key)) from exc
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise not_found(key) from exc
    except PermissionError as exc:
        raise InvalidError(
            f"object `{key}`: no permission for `{exc.filename}`: "
            "change the folder's rights or choose another folder",
            key=key,
        ) from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _in_circle(key) from exc
        if exc.errno == errno.EROFS:
            raise InvalidError(
                f"object `{key}`: `{exc.filename}` is on a read-only file system: "
                "choose another folder",
                key=key,
            ) from exc
        if exc.errno in _NO_ROOM:
            raise NoRoomError(
                f"object `{key}`: the disk is full ({exc.strerror}), nothing was stored: free some "
                "space, as with `tidelog trim` and `tidelog sweep`, and try again",
                key=key,
            ) from exc
        raise UnavailableError(
            f"object `{key}`: the file system says `{exc.strerror}`: fix it and try again",
            key=key,
        ) from exc


@contextlib.contextmanager
def _unsettled(key: str) -> Iterator[None]:
    """Turns errors into the unknown outcome of a write whose object readers can see already."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise UnknownOutcomeError(
            f"object `{key}`: was written, but the file system says `{exc.strerror}`, so a power "
            "cut may undo it: write it again",
            key=key,
        ) from exc


def _denied_error(folder: str) -> InvalidError:
    return InvalidError(
        f"folder `{folder or '.'}`: no permission to read what is in it: change its rights",
        key=folder,
        folder=folder,
    )


def _in_circle(key: str) -> InvalidError:
    return InvalidError(
        f"object `{key}`: is a symbolic link that leads back to itself, or to a folder that it is "
        "in: remove it, or let it point elsewhere",
        key=key,
    )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a folder to list; False for a link to a parent of its own."""
    try:
        return entry.is_dir() and not (entry.is_symlink() and _is_circle(entry.path))
    except OSError:  # a link that cannot be followed
        return False


def _is_circle(path: str) -> bool:
    """Returns whether a path leads to a folder that contains it."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return any(os.path.samestat(found, os.stat(above)) for above in Path(path).parents)
    return False


def _stat_of(entry: os.DirEntry[str]) -> os.stat_result:
    """Returns the stat of an entry; for a link that cannot be followed, of the link itself."""
    try:
        return entry.stat()
    except FileNotFoundError:
        raise
    except OSError:
        return entry.stat(follow_symlinks=False)


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _reader(path: Path, name: str) -> Callable[[], bytes]:
    def read() -> bytes:
        with _translated(name):
            return path.read_bytes()

    return read


def _is_locked(path: Path) -> bool:
    """Returns whether a running put holds a temporary file."""
    with open(path, "rb") as file:
        return not _locks(file.fileno(), fcntl.LOCK_SH)


def _remove_unlocked(path: Path, before_ms: int) -> bool:
    """Removes a temporary file whose put died, if it is old enough; returns whether it did."""
    try:
        with open(path, "r+b", buffering=0) as file:
            is_old = os.fstat(file.fileno()).st_mtime_ns // 1_000_000 <= before_ms
            if not is_old or not _locks(file.fileno(), fcntl.LOCK_EX):
                return False
            os.unlink(path)
            return True
    except FileNotFoundError:  # its put ended, or another sweep was faster
        return False


def _locks(descriptor: int, how: int) -> bool:
    """Takes a lock if it is free; returns whether it did. Closing the descriptor frees it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_folders(folder: Path) -> None:
    if folder.exists():
        if folder.is_dir():
            return
        raise InvalidError(f"store: `{folder}` is a file: choose another folder")
    _make_folders(folder.parent)
    create_folder(folder)
    _fsync_folder(folder.parent)


def _is_removed(folder: Path) -> bool:
    """Returns whether a folder is removed now; one that is in use stays."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:  # another process removed it
        return True
    except OSError:
        return False
    return True


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_exactly(descriptor: int, start: int, size: int) -> bytes:
    chunk = os.pread(descriptor, size, start)
    if len(chunk) == size:
        return chunk
    chunks = [chunk]
    while chunk and sum(map(len, chunks)) < size:  # one pread returns at most 2 GiB
        read = sum(map(len, chunks))
        chunk = os.pread(descriptor, size - read, start + read)
        chunks.append(chunk)
    return b"".join(chunks)


def _etag(stat: os.stat_result) -> str:
    return f"{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}"


def _info(key: str, stat: os.stat_result, is_link: bool = False) -> ObjectInfo:
    file = f"{stat.st_dev:x}-{stat.st_ino:x}"
    modified_ms = stat.st_mtime_ns // 1_000_000
    return ObjectInfo(key, stat.st_size, _etag(stat), modified_ms, file, is_link)


def _prove(root: Path, clock: Clock, ids: Ids, random: random.Random) -> Store:
    return LocalStore(root, clock=clock, ids=ids, random=random)
