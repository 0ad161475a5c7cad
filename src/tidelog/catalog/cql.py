"""A catalog in one CQL table, on Scylla or Cassandra.

*Every* write is conditional, so that only the servers' consensus orders writes, and never a clock.
Several changes are one conditional batch. A row is read serially, which also completes a write that
was left half done. A scan reads at quorum, which sees every acknowledged write. Each call is one
raw attempt; ``update.write_settled`` and ``read_repeated`` repeat it.

A scan goes page by page, each from the key where the last one ended. Cassandra fails a read that
meets more than 100,000 deleted rows. Its range is then split into smaller ones until each can be
read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from tidelog.catalog.base import (
    ABSENT,
    Catalog,
    Change,
    Check,
    Put,
    Row,
    check_limit,
    check_name,
    check_write,
    conflict,
)
from tidelog.catalog.cql_session import (
    CqlAddress,
    CqlSession,
    TombstonesError,
    open_session,
    parse_cql_address,
)
from tidelog.catalog.update import Repeat, read_repeated, write_settled
from tidelog.errors import CorruptError, InvalidError, UnavailableError
from tidelog.model import limits
from tidelog.model.address import Address

__all__ = ["CqlCatalog", "open_cql"]

_PAGE_ROWS_FIRST = 100  # before we know how large the rows are
_PAGE_ROWS_MAX = 1_000
_PAGE_BYTES = 1 << 20  # target size of a page; CQL only counts rows
_SPLIT_PARTS = 16  # a part without rows costs a millisecond or two, one that fails a hundred
_SPLITS_MAX = 256  # two for each byte of a key, so keys may share 128 bytes beyond the bounds'
_AFTER_ALL_ROWS = b"\xff"  # no UTF-8 text begins with this byte


def open_cql(
    address: Address, *, create: bool, repeat: Repeat, environ: Mapping[str, str]
) -> CqlCatalog:
    """Opens the catalog at ``cql://host1,host2:9042/keyspace?table=tidelog&datacenter=dc1``.

    The table must exist, in our shape. With ``create``, a missing table is created, and on a single
    node its keyspace too. ``cql_tls`` has the options for TLS. User name and password come from
    ``TIDELOG_CQL_USERNAME`` and ``TIDELOG_CQL_PASSWORD`` of ``environ``.
    """
    place = parse_cql_address(address, environ)
    session = read_repeated(lambda: open_session(place, create), repeat)
    return CqlCatalog(address.text, place, session, repeat)


class CqlCatalog:
    """Rows of one table. Every process has its own session, since the driver's survive no fork."""

    def __init__(self, url: str, place: CqlAddress, session: CqlSession, repeat: Repeat) -> None:
        self._url = url
        self._place = place
        self._repeat = repeat
        self._session: CqlSession | None = session
        self._inherited: list[CqlSession] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def get(self, partition: str, row: str) -> Row | None:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_name("row", row, limits.ROW_BYTES_MAX)
        key = (partition.encode(), row.encode())
        found = read_repeated(lambda: self._live_session().read_serially("get", key), self._repeat)
        return _row(partition, *found) if found else None

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
        last = _AFTER_ALL_ROWS if end is None else end.encode()
        return self._scan(_Range(partition, start.encode(), last, reverse), limit)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        check_write(partition, changes, write_id)
        write_settled(
            lambda: self._attempt(partition, changes, write_id),
            lambda row: self._read_version(partition, row),
            partition,
            changes,
            write_id,
            self._repeat,
        )

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _read_version(self, partition: str, row: str) -> str | None:
        found = self.get(partition, row)
        return found.version if found else None

    def _attempt(self, partition: str, changes: Sequence[Change], write_id: str) -> None:
        statements = [_statement(partition, change, write_id) for change in changes]
        found = self._live_session().write(statements)
        if not found[0]["[applied]"]:
            raise conflict(partition, changes, _rows(partition, changes, found))

    def _scan(self, wanted: _Range, limit: int | None) -> Iterator[Row]:
        left = limit
        page_rows = _PAGE_ROWS_FIRST
        to_read = [wanted]
        while to_read and left != 0:
            part = to_read.pop()
            if part.first >= part.last:
                continue
            count = page_rows if left is None else min(page_rows, left)
            try:
                rows, more = read_repeated(partial(self._page, part, count), self._repeat)
            except TombstonesError as exc:
                to_read += _split(part, exc)
                continue
            if more:
                to_read.append(part.after(rows[-1].row.encode()))
            if rows:
                page_rows = _page_rows(rows)
            if left is not None:
                left -= len(rows)
            yield from rows

    def _page(self, part: _Range, count: int) -> tuple[list[Row], bool]:
        """Returns up to ``count`` rows of a range, and whether there may be more."""
        name = "scan back" if part.reverse else "scan"
        values = (part.partition.encode(), part.first, part.last, count)
        found, more = self._live_session().read_page(name, values)
        rows = [_row(part.partition, *each) for each in found]
        return rows, more or len(rows) == count

    def _live_session(self) -> CqlSession:
        """Returns this process's session: one that a parent opened has lost its threads."""
        session = self._session
        if session is not None and session.pid == os.getpid():
            return session
        with self._lock:
            session = self._session
            if session is None:
                raise InvalidError(f"catalog `{self._url}`: is closed: open it again")
            if session.pid != os.getpid():
                # Kept, since a collected session would write to the parent's connections.
                self._inherited.append(session)
                self._session = session = open_session(self._place, create=False)
            return session


def _statement(partition: str, change: Change, write_id: str) -> tuple[str, list[object]]:
    """Returns the statement that makes a change, and its values."""
    kind, expected = "version", [change.expect]
    if change.expect is ABSENT:
        kind, expected = "absent", []
    elif change.expect is None:
        kind, expected = "any", []
    key = [partition.encode(), change.row.encode()]
    if isinstance(change, Put):
        return f"put {kind}", [write_id, change.value, *key, *expected]
    # To delete a row that must not exist is to check that it does not.
    verb = "check" if isinstance(change, Check) or change.expect is ABSENT else "delete"
    return f"{verb} {kind}", [*key, *expected]


def _rows(
    partition: str, changes: Sequence[Change], found: Sequence[Mapping[str, Any]]
) -> dict[str, Row | None]:
    """Returns the rows that a refused write returns; those that it leaves out do not exist."""
    rows: dict[str, Row | None] = {change.row: None for change in changes}
    for each in found:
        # A batch returns the key of each row that exists; a single statement's reply has no key.
        name = each.get("row") if len(changes) > 1 else changes[0].row.encode()
        if name is not None and each.get("version") is not None:
            rows[name.decode()] = _row(partition, name, each["version"], each.get("value"))
    return rows


def _row(partition: str, name: bytes, version: str | None, value: bytes | None) -> Row:
    try:
        if version is not None and value is not None:
            return Row(name.decode(), value, version)
        fault = "has no version or no value"
    except UnicodeDecodeError:
        fault = "its key is not valid UTF-8"
    raise CorruptError(
        f"row {name!r} of `{partition}`: {fault}: find out who else writes to this table",
        partition=partition,
    )


# Ranges of keys.


@dataclass(frozen=True, slots=True)
class _Range:
    """The rows of ``[first, last)`` in a partition that are still to be read."""

    partition: str
    first: bytes
    last: bytes
    reverse: bool
    splits: int = 0  # how often a larger one was split to get it

    def after(self, row: bytes) -> _Range:
        """Returns what is left after ``row``."""
        if self.reverse:
            return replace(self, last=row)
        return replace(self, first=row + b"\0")


def _split(part: _Range, cause: Exception) -> list[_Range]:
    """Returns the range in smaller ones; the first to be read is last."""
    bounds = [part.first, *_keys_between(part.first, part.last, _SPLIT_PARTS), part.last]
    if part.splits == _SPLITS_MAX or len(bounds) == 2:
        raise UnavailableError(
            f"partition `{part.partition}`: reading fails, also in the {part.splits}th part of a "
            f"part: {cause}: see what the server's log says of it",
            partition=part.partition,
        ) from cause
    parts = [
        replace(part, first=first, last=last, splits=part.splits + 1)
        for first, last in pairwise(bounds)
    ]
    return parts if part.reverse else parts[::-1]


def _keys_between(first: bytes, last: bytes, parts: int) -> list[bytes]:
    """Returns keys that split ``[first, last)`` into about ``parts`` even parts; fewer if narrow.

    They are short: as many leading bytes as it takes to tell the parts apart.
    """
    points: set[int] = set()
    width = 0
    for width in range(1, max(len(first), len(last)) + 2):
        low, high = (
            int.from_bytes(key[:width].ljust(width, b"\0"), "big") for key in (first, last)
        )
        points = {low + (high - low) * n // parts for n in range(1, parts)} - {low}
        if high - low >= parts:
            break
    return [point.to_bytes(width, "big") for point in sorted(points)]


def _page_rows(rows: Sequence[Row]) -> int:
    """Returns how many rows like these make a page."""
    average = sum(len(row.value) + len(row.row) for row in rows) // len(rows)
    return max(1, min(_PAGE_ROWS_MAX, _PAGE_BYTES // max(1, average)))


_: type[Catalog] = CqlCatalog
