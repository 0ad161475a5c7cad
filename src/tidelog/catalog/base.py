"""The interface of a catalog: rows in partitions, changed only by conditional writes.

Three calls carry everything above. A row's *version* is the id of the write that made it. So it
never recurs, even if a row is deleted and created again: a stale expectation can never match by
accident. The one expectation that can become true twice is ``ABSENT``. So a write that creates a
row which may be deleted later also expects the version of another row. The write that deletes it,
or an earlier one, changes that other row. So no write that landed can land again.

:func:`clear_deleted_rows` removes the bytes of deleted rows from a catalog's own files.
:func:`freeing` lets a command that frees space write to a catalog on a full disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, runtime_checkable

from tidelog.errors import ConflictError, InvalidError
from tidelog.model import limits

__all__ = [
    "ABSENT",
    "Catalog",
    "Change",
    "Check",
    "Delete",
    "Expectation",
    "FreeingCatalog",
    "Put",
    "Row",
    "WriteOutcome",
    "carries",
    "check_limit",
    "check_name",
    "check_write",
    "clear_deleted_rows",
    "conflict",
    "freeing",
    "judge",
    "prefix_end",
    "versions_of",
]


class Absent(Enum):
    """The type of :data:`ABSENT`."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

Expectation = str | Absent | None
"""A version that the row must have, ``ABSENT`` if it must not exist, or None for either."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    row: str
    value: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Put:
    """Creates or overwrites a row."""

    row: str
    value: bytes
    expect: Expectation = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a row; a missing row is not an error unless a version is expected."""

    row: str
    expect: Expectation = None


@dataclass(frozen=True, slots=True)
class Check:
    """Changes nothing, but makes the whole write fail unless the row is as expected."""

    row: str
    expect: str | Absent


Change = Put | Delete | Check


class Catalog(Protocol):
    """Rows in partitions. Thread-safe; usable again after a fork.

    Partition and row keys are text, ordered by code point (which is the order of their UTF-8
    bytes). Limits are those of ``model.limits``; a key, value or write beyond them raises
    ``InvalidError`` before anything is sent.
    """

    @property
    def url(self) -> str:
        """Returns the address that opens this catalog again, without secrets."""
        ...

    def get(self, partition: str, row: str) -> Row | None:
        """Returns the row as the last acknowledged write left it, or None.

        Raises ``UnavailableError`` if the catalog cannot be reached.
        """
        ...

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        """Yields the rows of ``[start, end)`` in key order, or backwards if ``reverse``.

        Strongly consistent page by page, not as a whole: it may or may not see what is written
        during the scan. Lazy; any page may raise ``UnavailableError``.
        """
        ...

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        """Applies all changes or none, if every expectation holds; durable on return.

        Idempotent by ``write_id``: a repeat of a write that landed returns as the first one did.
        ``ConflictError``: an expectation failed and nothing was written. Its ``rows`` hold every
        row whose expectation failed as it is now, so that the caller can decide again without a
        read. A row of the write that ``rows`` leaves out was as expected. ``UnavailableError``:
        nothing was written. ``UnknownOutcomeError``: the reply was lost, and the current rows do
        not settle it. A lost reply is never reported as a conflict.
        """
        ...

    def close(self) -> None:
        """Closes connections; calling it twice is fine."""
        ...


class WriteOutcome(Enum):
    """What the rows of a write say about it."""

    DONE = "a row carries its id"
    HOLDS = "every expectation holds"
    FAILED = "an expectation does not hold"


def judge(
    changes: Sequence[Change], versions: Mapping[str, str | None], write_id: str
) -> WriteOutcome:
    """Returns a write's outcome, by the current versions of its rows."""
    if carries(changes, versions, write_id):
        return WriteOutcome.DONE
    if all(_holds(change.expect, versions[change.row]) for change in changes):
        return WriteOutcome.HOLDS
    return WriteOutcome.FAILED


def carries(changes: Sequence[Change], versions: Mapping[str, str | None], write_id: str) -> bool:
    """Returns whether a row that the write puts has its id, which proves that the write landed."""
    return any(
        isinstance(change, Put) and versions.get(change.row) == write_id for change in changes
    )


def versions_of(rows: Mapping[str, Row | None]) -> dict[str, str | None]:
    """Returns the version of each row; None for one that does not exist."""
    return {name: row.version if row else None for name, row in rows.items()}


def conflict(
    partition: str, changes: Sequence[Change], rows: Mapping[str, Row | None]
) -> ConflictError:
    """Returns the error for a write with at least one failed expectation.

    ``rows`` are the current rows of the write, at least those whose expectation failed.
    """
    versions = versions_of(rows)
    for change in changes:
        found = versions.get(change.row)
        if change.row in versions and not _holds(change.expect, found):
            expected = "no row" if change.expect is ABSENT else f"version {change.expect}"
            return ConflictError(
                f"row `{change.row}` of `{partition}`: expected {expected}, "
                f"found {f'version {found}' if found else 'no row'}: read it again and decide",
                rows=rows,
                partition=partition,
                row=change.row,
            )
    return ConflictError(
        f"a write to `{partition}`: an expectation failed: read its rows again and decide",
        rows=rows,
        partition=partition,
    )


def check_write(partition: str, changes: Sequence[Change], write_id: str) -> None:
    """Raises ``InvalidError`` for a write that some backend cannot take, before it is sent."""
    check_name("partition", partition, limits.PARTITION_BYTES_MAX)
    check_name("write id", write_id, limits.WRITE_ID_BYTES_MAX)
    if not 1 <= len(changes) <= limits.CHANGES_MAX:
        raise InvalidError(
            f"a write to `{partition}`: has {len(changes)} changes: "
            f"give 1 to {limits.CHANGES_MAX}, and split a larger one"
        )
    named: set[str] = set()
    for change in changes:
        _check_change(partition, change)
        if change.row in named:
            raise InvalidError(
                f"row `{change.row}` of `{partition}`: named twice in one write: "
                "a write names each row once"
            )
        named.add(change.row)
    total = sum(len(change.value) for change in changes if isinstance(change, Put))
    if total > limits.WRITE_BYTES_MAX:
        raise InvalidError(
            f"a write to `{partition}`: {total} bytes of values: "
            f"at most {limits.WRITE_BYTES_MAX} in one write"
        )


def check_name(what: str, name: str, bytes_max: int) -> None:
    """Raises ``InvalidError`` for a key that is empty, too long, or not valid UTF-8 text."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError as exc:
        raise InvalidError(
            f"{what} {name!r}: holds half of a surrogate pair, which no server stores: "
            "give valid Unicode text"
        ) from exc
    if not 1 <= size <= bytes_max:
        raise InvalidError(
            f"{what} `{name[:80]}`: has {size} bytes as UTF-8: give 1 to {bytes_max}"
        )
    if "\0" in name:
        raise InvalidError(f"{what} {name!r}: holds a NUL character: leave it out")


def prefix_end(prefix: str) -> str:
    """Returns where a scan of all rows that begin with ``prefix`` ends: no such row is at or after.

    Text behind the prefix may hold any character, so no character that is added to it is an end.
    """
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def check_limit(limit: int | None) -> None:
    """Raises ``InvalidError`` for a negative limit of a scan."""
    if limit is not None and limit < 0:
        raise InvalidError(f"scan: limit is {limit}: give 0 or more")


def _holds(expect: Expectation, version: str | None) -> bool:
    if expect is None:
        return True
    return version is None if expect is ABSENT else version == expect


def _check_change(partition: str, change: Change) -> None:
    check_name("row", change.row, limits.ROW_BYTES_MAX)
    if isinstance(change.expect, str):
        check_name("expected version", change.expect, limits.WRITE_ID_BYTES_MAX)
    if isinstance(change, Check) and change.expect is None:
        raise InvalidError(
            f"row `{change.row}` of `{partition}`: a check expects nothing: "
            "give it a version or ABSENT"
        )
    if isinstance(change, Put) and len(change.value) > limits.VALUE_BYTES_MAX:
        raise InvalidError(
            f"row `{change.row}` of `{partition}`: value of {len(change.value)} bytes: "
            f"at most {limits.VALUE_BYTES_MAX} are stored in a row"
        )


@runtime_checkable
class Clearing(Protocol):
    """A catalog whose files this process writes itself."""

    def clear_deleted_rows(self) -> bool:
        """Removes what its files hold of deleted rows. Returns whether all of it is removed."""
        ...


def clear_deleted_rows(catalog: Catalog) -> bool:
    """Removes what the files of a catalog hold of deleted and replaced rows.

    Returns False if another process prevented that. Servers have files of their own, which are out
    of reach: returns True for these.
    """
    return catalog.clear_deleted_rows() if isinstance(catalog, Clearing) else True


@runtime_checkable
class FreeingCatalog(Protocol):
    """A catalog with disk space in reserve."""

    def freeing(self) -> AbstractContextManager[None]:
        """While the block frees space, writes may use the reserve."""
        ...


def freeing(catalog: Catalog) -> AbstractContextManager[None]:
    """Lets writes of a block that frees space use a catalog's reserve, if it has one."""
    return catalog.freeing() if isinstance(catalog, FreeingCatalog) else contextlib.nullcontext()
