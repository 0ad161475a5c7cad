"""The catalog in one SQLite file: the default, for any number of processes of one machine.

It uses write-ahead logging with ``synchronous=FULL``, so that an acknowledged write survives a
power cut. Deleted rows are overwritten with zeros, and a sweep truncates the log, which has older
pages. A full disk leaves space for commands that free space (``Reserve``). A catalog that
cannot be written to can be read: with its log if another process has it open, otherwise as a file
that must not change. A change is noticed, and the file opened again.

Each thread has its own connection, and none is open while the process forks
(``sqlite_connections``). A scan reads page by page and holds nothing between pages. Network file
systems are refused: SQLite's locks and shared memory do not work there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tidelog.catalog.base import (
    Catalog,
    Change,
    Delete,
    Put,
    Row,
    WriteOutcome,
    check_limit,
    check_name,
    check_write,
    conflict,
    judge,
)
from tidelog.catalog.sqlite_connections import Connections, Reserve
from tidelog.catalog.update import LostReplyError, Repeat, write_settled
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.local_files import create_file, create_folder
from tidelog.model import limits
from tidelog.model.address import Address
from tidelog.model.times import Backoff

__all__ = ["SqliteCatalog", "open_sqlite"]

_APPLICATION_ID = 0x54494445  # "TIDE": distinguishes our files from other databases
_FORMAT = 3  # as that of the home, so that a file of another one is refused before it is read
_BUSY_MS = 10_000  # how long a writer waits for others; each takes about a millisecond
_PAGE_ROWS = 1_000
_OPEN_BYTES = 65_536  # of the reserve: what opening a file needs
_WRITE_BYTES = 262_144  # of the reserve: what some writes to the log need
_GROW_BYTES = 131_072  # kept free while space is freed: the log's pages move into the file
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "9p", "fuse.sshfs", "fuse.s3fs"}
    | {"glusterfs", "fuse.glusterfs", "lustre", "beegfs", "ocfs2", "gfs2"}
)

_GET = "SELECT value, version FROM rows WHERE partition = ? AND row = ?"
_EVERY = (
    "SELECT partition, row, value, version FROM rows "
    "WHERE (partition, row) > (?, ?) ORDER BY partition, row LIMIT ?"
)
_SCHEMA = """
CREATE TABLE rows (
  partition TEXT NOT NULL,
  row TEXT NOT NULL,
  version TEXT NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (partition, row)
) STRICT, WITHOUT ROWID
"""


class _Stamp(NamedTuple):
    """The state of a file when it was opened."""

    inode: int
    size: int
    modified_ns: int
    log_bytes: int


def open_sqlite(address: Address, *, create: bool, repeat: Repeat) -> SqliteCatalog:
    """Opens the file of ``sqlite:PATH``; creates it if ``create`` is set."""
    address.take_options(())
    if address.host or not address.path.startswith("/"):
        raise InvalidError(
            f"catalog `{address.text}`: give an absolute path, as in sqlite:///srv/tidelog/catalog.sqlite"
        )
    path = Path(address.path)
    _refuse_network_file_system(path)
    # SQLite itself waits for a busy file, so a write is tried once.
    catalog = SqliteCatalog(path, repeat=replace(repeat, backoff=Backoff(attempts=1)))
    with _translated(path):
        if create:
            catalog.create()
        catalog.check()
    return catalog


class SqliteCatalog:
    """Rows in one table of one file."""

    def __init__(self, path: Path, *, repeat: Repeat) -> None:
        self._path = path
        self._repeat = repeat
        self._connections = Connections(path, self._connect)
        self._reserve = Reserve(path)
        self._freeing = 0  # running commands that free space
        self._lock = threading.Lock()
        self._fixed: _Stamp | None = None  # of a file that was opened as one that never changes

    @property
    def url(self) -> str:
        return f"sqlite://{quote(str(self._path))}"

    def create(self) -> None:
        """Creates the file and its table; leaves an existing catalog as it is."""
        made_folder = not self._path.parent.exists()
        self._path.parent.parent.mkdir(parents=True, exist_ok=True)
        create_folder(self._path.parent)
        if not self._path.exists():  # before SQLite creates others beside it
            os.close(create_file(self._path, os.O_WRONLY, self._path.parent))
        with self._connections.once("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
                    connection.execute(_SCHEMA)
                    connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version={_FORMAT}")
            finally:
                connection.execute("COMMIT")
        self._reserve.fill()
        for folder in [self._path.parent, self._path.parent.parent][: 1 + made_folder]:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

    def check(self) -> None:
        """Raises for a file that is missing or empty, or that is not a catalog of ours."""
        if not self._path.exists():
            _refuse_unwritable(self._path)
            raise self._missing()
        application = self._ask("PRAGMA application_id")[0][0]
        version = self._ask("PRAGMA user_version")[0][0]
        columns = [row[1] for row in self._ask("PRAGMA table_info(rows)")]
        is_empty = not self._ask("SELECT 1 FROM sqlite_schema LIMIT 1")
        if is_empty:
            raise self._missing()  # another process is about to create it
        if application != _APPLICATION_ID or columns != ["partition", "row", "version", "value"]:
            raise InvalidError(
                f"catalog `{self._path}`: is a SQLite file of another program or shape: "
                "choose another file"
            )
        if version != _FORMAT:
            remedy = "update tidelog" if version > _FORMAT else "use the version that created it"
            raise InvalidError(
                f"catalog `{self._path}`: has format {version}, this version of tidelog reads "
                f"format {_FORMAT}: {remedy}"
            )

    def get(self, partition: str, row: str) -> Row | None:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_name("row", row, limits.ROW_BYTES_MAX)
        with _translated(self._path):
            found = self._ask(_GET, (partition, row))
        return Row(row, found[0][0], found[0][1]) if found else None

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_limit(limit)
        lower, lower_is, upper = start, ">=", end
        left = limit
        while left is None or left > 0:
            wanted = _PAGE_ROWS if left is None else min(_PAGE_ROWS, left)
            page = self._page(partition, (lower, lower_is, upper), wanted, reverse)
            yield from page
            if len(page) < wanted:
                return
            left = None if left is None else left - wanted
            if reverse:
                upper = page[-1].row
            else:
                lower, lower_is = page[-1].row, ">"

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        check_write(partition, changes, write_id)

        def read_version(row: str) -> str | None:
            found = self.get(partition, row)
            return found.version if found else None

        def attempt() -> None:
            is_emptied = False  # SQLite's log, for this write
            while True:
                try:
                    with _translated(self._path), self._connections.use() as connection:
                        _write_once(connection, partition, changes, write_id)
                    self._connections.check_commit()
                    if self._freeing and self._reserve.is_disk_full(_GROW_BYTES):
                        self._empty_log()  # while the file can still grow
                    return
                except (LostReplyError, UnavailableError) as exc:  # sent again under the same id
                    is_full = isinstance(exc.__cause__, sqlite3.Error) and _is_full(exc.__cause__)
                    if not (is_full and self._freeing):
                        raise
                    if is_emptied and not self._reserve.give(_WRITE_BYTES):
                        raise
                    is_emptied = True
                    self._empty_log()  # needs space itself if the file grows

        write_settled(attempt, read_version, partition, changes, write_id, self._repeat)

    def close(self) -> None:
        self._connections.close()

    @contextlib.contextmanager
    def freeing(self) -> Iterator[None]:
        """While the block frees space, its writes may use the reserve, which is then restored.

        If there is not plenty of space, the reserve gets back what the block has used: that is in
        SQLite's log, which is truncated.
        """
        with self._lock:
            self._freeing += 1
        before = self._reserve.size()
        try:
            self._reserve.give_if_full(_WRITE_BYTES)
            yield
        finally:
            with self._lock:
                self._freeing -= 1
            if self._reserve.size() < before:
                self._empty_log()
                self._reserve.take_back(before)
            self._reserve.fill()

    def clear_deleted_rows(self) -> bool:
        """Removes what SQLite's log holds of deleted rows; the file has zeros in their place.

        Returns False if a reader in another process needs the log for longer than a write waits.
        """
        return self._empty_log() or _stamp(self._path).log_bytes == 0

    def _empty_log(self) -> bool:
        """Moves SQLite's log into the file and truncates it. Best effort.

        Returns whether that succeeded.
        """
        with contextlib.suppress(sqlite3.Error), self._connections.use() as connection:
            ((is_busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return not is_busy
        return False

    def inspect(self) -> Iterator[str]:
        """Yields what SQLite's own integrity check finds."""
        with _translated(self._path):
            found = [row[0] for row in self._ask("PRAGMA integrity_check")]
        for line in found:
            if line != "ok":
                yield f"catalog `{self._path}`: {line}: keep the file, and restore it from a copy"

    def every_row(self) -> Iterator[tuple[str, Row]]:
        """Yields all rows of the file, page by page."""
        after = ("", "")
        while True:
            with _translated(self._path):
                page = self._ask(_EVERY, (*after, _PAGE_ROWS))
            yield from ((columns[0], Row(*columns[1:])) for columns in page)
            if len(page) < _PAGE_ROWS:
                return
            after = page[-1][0], page[-1][1]

    def _page(
        self, partition: str, bounds: tuple[str, str, str | None], rows: int, reverse: bool
    ) -> list[Row]:
        lower, lower_is, upper = bounds
        values: list[str | int] = [partition, lower]
        below = ""
        if upper is not None:
            below = "AND row < ?"
            values.append(upper)
        query = (  # only fixed words are interpolated; all values are bound
            "SELECT row, value, version FROM rows "  # noqa: S608
            f"WHERE partition = ? AND row {lower_is} ? {below} "
            f"ORDER BY row {'DESC' if reverse else 'ASC'} LIMIT ?"
        )
        with _translated(self._path):
            found = self._ask(query, (*values, rows))
        return [Row(*columns) for columns in found]

    def _missing(self) -> NotFoundError:
        return NotFoundError(
            f"catalog `{self._path}`: no such file: run `tidelog init` "
            "(`tidelog.create_home` in Python), or fix the path"
        )

    def _ask(self, query: str, values: tuple[str | int, ...] = ()) -> list[tuple[Any, ...]]:
        """Returns what a query finds. Opens a file again that was read-only and has changed."""
        while True:
            with self._connections.use() as connection:
                found = connection.execute(query, values).fetchall()
            fixed = self._fixed
            if fixed is None or fixed == _stamp(self._path):
                return found
            self._fixed = None
            self._connections.close()

    def _connect(self, mode: str) -> sqlite3.Connection:
        """Opens the file; opens a read-only file for reading."""
        if mode == "rw" and self._path.exists() and not _is_writable(self._path):
            return self._connect_to_read()
        try:
            return self._connect_as(f"mode={mode}")
        except sqlite3.OperationalError as exc:
            if not (_is_full(exc) and self._reserve.give(_OPEN_BYTES)):
                raise
        return self._connect_as(f"mode={mode}")

    def _connect_to_read(self) -> sqlite3.Connection:
        """Opens a file in a place that cannot be written to.

        SQLite reads a log that another process has open. Without a log it must be told that the
        file does not change, which ``_ask`` checks.
        """
        stamp = _stamp(self._path)
        try:
            return self._connect_as("mode=ro")
        except sqlite3.OperationalError as exc:
            if not _sqlite_name(exc).startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                raise
            if stamp.log_bytes:
                raise InvalidError(
                    f"catalog `{self._path}`: its last writes are in `{self._path.name}-wal`, "
                    "which cannot be read in a place that is read-only: copy the home to a place "
                    "that can be written to"
                ) from exc
        self._fixed = stamp
        return self._connect_as("mode=ro&immutable=1")

    def _connect_as(self, how: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?{how}",
            uri=True,
            timeout=_BUSY_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if how.startswith("mode=rw"):
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("PRAGMA secure_delete=ON")  # many builds leave bytes in pages
            connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1")
        except BaseException:
            connection.close()
            raise
        return connection


def _write_once(
    connection: sqlite3.Connection, partition: str, changes: tuple[Change, ...], write_id: str
) -> None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        versions = {change.row: _version(connection, partition, change.row) for change in changes}
        outcome = judge(changes, versions, write_id)
        if outcome is WriteOutcome.FAILED:
            # Read in the same transaction, so that the caller can decide again from them.
            rows = {name: _read(connection, partition, name) for name in versions}
            raise conflict(partition, changes, rows)
        if outcome is WriteOutcome.HOLDS:
            for change in changes:
                _apply(connection, partition, change, write_id)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    try:
        connection.execute("COMMIT")
    except sqlite3.Error as exc:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        if _sqlite_name(exc) == "SQLITE_FULL" and not connection.in_transaction:
            raise  # a commit frame needs space too, so nothing was written
        # Without space for the index of the log, the commit frame is in the log: the process that
        # opens the file after a crash reads the log, and finds the write.
        raise LostReplyError(str(exc)) from exc


def _version(connection: sqlite3.Connection, partition: str, row: str) -> str | None:
    found = connection.execute(
        "SELECT version FROM rows WHERE partition = ? AND row = ?", (partition, row)
    ).fetchone()
    return found[0] if found else None


def _read(connection: sqlite3.Connection, partition: str, row: str) -> Row | None:
    found = connection.execute(
        "SELECT value, version FROM rows WHERE partition = ? AND row = ?", (partition, row)
    ).fetchone()
    return Row(row, found[0], found[1]) if found else None


def _apply(connection: sqlite3.Connection, partition: str, change: Change, write_id: str) -> None:
    if isinstance(change, Put):
        connection.execute(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)",
            (partition, change.row, write_id, change.value),
        )
    elif isinstance(change, Delete):
        connection.execute(
            "DELETE FROM rows WHERE partition = ? AND row = ?", (partition, change.row)
        )


def _is_full(exc: BaseException) -> bool:
    return _sqlite_name(exc) in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")


def _sqlite_name(exc: BaseException) -> str:
    """Returns SQLite's name of an error, such as ``SQLITE_FULL``; empty if it has none."""
    name: str = getattr(exc, "sqlite_errorname", "")
    return name


def _has_no_inodes(folder: Path) -> bool:
    """Returns whether no file can be created on a disk; False if it has no such limit."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_files > 0 and found.f_favail == 0
    return False


def _is_writable(path: Path) -> bool:
    """Returns whether this process may change a file, and create its log beside it."""
    may = (os.access(each, os.W_OK, effective_ids=True) for each in (path, path.parent))
    return all(may)


def _stamp(path: Path) -> _Stamp:
    """Returns what changes when another process writes to a file."""
    found, log_bytes = path.stat(), 0
    with contextlib.suppress(FileNotFoundError):
        log_bytes = path.with_name(f"{path.name}-wal").stat().st_size
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns, log_bytes)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ours."""
    try:
        yield
    except sqlite3.DatabaseError as exc:
        name = _sqlite_name(exc)
        if name == "SQLITE_NOTADB" or name.startswith("SQLITE_CORRUPT"):
            raise CorruptError(
                f"catalog `{path}`: {exc}: keep the file, and restore it from a copy"
            ) from exc
        if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
            raise InvalidError(
                f"catalog `{path}`: is read-only here: change its rights, or work in a place that "
                "can be written to"
            ) from exc
        if name.startswith("SQLITE_CANTOPEN"):
            if _has_no_inodes(path.parent):
                raise UnavailableError(
                    f"catalog `{path}`: its disk has no inodes left, so SQLite cannot create its "
                    "log: delete or move other files on that disk, and try again"
                ) from exc
            raise InvalidError(
                f"catalog `{path}`: cannot be opened: check that its folder exists and is writable"
            ) from exc
        if name.startswith("SQLITE_BUSY"):
            raise UnavailableError(
                f"catalog `{path}`: other processes kept it locked for {_BUSY_MS} ms: try again"
            ) from exc
        if _is_full(exc):
            raise UnavailableError(
                f"catalog `{path}`: the disk is full, nothing was written: free some space, as "
                "with `tidelog trim` and `tidelog sweep`, and try again"
            ) from exc
        raise UnavailableError(f"catalog `{path}`: {exc}: fix it and try again") from exc
    except UnicodeDecodeError as exc:  # SQLite's message contains a damaged table name
        raise CorruptError(
            f"catalog `{path}`: {exc.reason}: keep the file, and restore it from a copy"
        ) from exc
    except PermissionError as exc:
        raise InvalidError(
            f"catalog `{path}`: no permission for `{exc.filename}`: "
            "change the folder's rights or choose another"
        ) from exc
    except OSError as exc:
        wrong = exc.errno in (errno.ENOTDIR, errno.EROFS, errno.EEXIST)
        error = InvalidError if wrong else UnavailableError
        raise error(
            f"catalog `{path}`: {exc.strerror} (`{exc.filename}`): choose another path"
        ) from exc


def _refuse_unwritable(path: Path) -> None:
    """Raises before anything is created if a new file could not be."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise InvalidError(
            f"catalog `{path}`: cannot be created in `{folder}`: "
            "change the folder's rights or choose another"
        )


def _refuse_network_file_system(path: Path) -> None:
    try:
        kind = _file_system(path)
    except (OSError, ValueError) as exc:  # such as a name that is too long, or has a NUL
        raise InvalidError(
            f"catalog {str(path)[:200]!r}: is not a path that can be opened: fix it"
        ) from exc
    if kind in _NETWORK_FILE_SYSTEMS:
        raise InvalidError(
            f"catalog `{path}`: is on a network file system ({kind}), where SQLite is not safe: "
            "choose a local disk, or a dynamodb:// or cql:// catalog"
        )


def _file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the type of the file system of a path; empty if Linux does not say."""
    if not mounts.exists():
        return ""
    best, kind = "", ""
    real = os.path.realpath(path)
    for line in mounts.read_text(errors="replace").splitlines():
        fields = line.split()
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best) and "-" in fields:
            best, kind = point, fields[fields.index("-") + 1]
    return kind


_: type[Catalog] = SqliteCatalog
