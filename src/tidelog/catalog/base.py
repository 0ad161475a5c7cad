"""What a catalog is: rows in partitions, changed only by conditional writes.

Three calls carry everything above. A row's *version* is the id of the write that made it, so it
never recurs, also when a row is deleted and made again: an expectation that went stale can never
fit by accident. The one expectation that can come true twice is ``ABSENT``. So a write that creates
a row which may be deleted later also expects the version of another row, and the write that deletes
it, or an earlier one, changes that other row: no write that landed can land again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from tidelog.errors import ConflictError, InvalidError
from tidelog.model import limits

__all__ = [
    "ABSENT",
    "Catalog",
    "Change",
    "Check",
    "Delete",
    "Expectation",
    "Put",
    "Row",
    "WriteOutcome",
    "carries",
    "check_limit",
    "check_name",
    "check_write",
    "conflict",
    "judge",
    "versions_of",
]


class Absent(Enum):
    """The type of :data:`ABSENT`."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

Expectation = str | Absent | None
"""A version that the row must have, ``ABSENT`` where there must be no row, or None for either."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    row: str
    value: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Put:
    """Make or overwrite a row."""

    row: str
    value: bytes
    expect: Expectation = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a row; one that is not there is no error unless a version is expected."""

    row: str
    expect: Expectation = None


@dataclass(frozen=True, slots=True)
class Check:
    """Change nothing, but let the whole write fail unless the row is as expected."""

    row: str
    expect: str | Absent


Change = Put | Delete | Check


class Catalog(Protocol):
    """Rows in partitions. Safe to share between threads; usable again after a fork.

    Partition and row keys are text, ordered by code point (which is the order of their UTF-8
    bytes). Limits are those of ``model.limits``; a key, value or write beyond them raises
    ``InvalidError`` before anything is sent.
    """

    @property
    def url(self) -> str:
        """The address that opens this catalog again; never with a secret in it."""
        ...

    def get(self, partition: str, row: str) -> Row | None:
        """The row as the last acknowledged write left it, or None. ``UnavailableError``."""
        ...

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        """The rows of ``[start, end)`` in key order, or against it when ``reverse``.

        Strongly consistent page by page, not as a whole: what is written during a scan may or may
        not be seen. Lazy; ``UnavailableError`` may come with any page.
        """
        ...

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        """Apply all changes or none, if every expectation holds; durable on return.

        Idempotent by ``write_id``: a repeat of a write that landed returns as the first one did.
        ``ConflictError``: an expectation failed and nothing was written; its ``rows`` hold every
        row whose expectation failed as it is now, so that the caller can decide again without a
        read. A row of the write that ``rows`` leaves out was as expected. ``UnavailableError``:
        nothing was written. ``UnknownOutcomeError``: the reply was lost, and what is there now
        does not tell. A lost reply is never reported as a conflict.
        """
        ...

    def close(self) -> None:
        """Release connections; calling it twice is fine."""
        ...


class WriteOutcome(Enum):
    """What the rows of a write say about it."""

    DONE = "a row carries its id"
    HOLDS = "every expectation holds"
    FAILED = "an expectation does not hold"


def judge(
    changes: Sequence[Change], versions: Mapping[str, str | None], write_id: str
) -> WriteOutcome:
    """Tell a write's state from the present versions of the rows that it names."""
    if carries(changes, versions, write_id):
        return WriteOutcome.DONE
    if all(_holds(change.expect, versions[change.row]) for change in changes):
        return WriteOutcome.HOLDS
    return WriteOutcome.FAILED


def carries(changes: Sequence[Change], versions: Mapping[str, str | None], write_id: str) -> bool:
    """Whether a row that the write puts carries its id, which proves that the write landed."""
    return any(
        isinstance(change, Put) and versions.get(change.row) == write_id for change in changes
    )


def versions_of(rows: Mapping[str, Row | None]) -> dict[str, str | None]:
    """The version of each row; None for one that does not exist."""
    return {name: row.version if row else None for name, row in rows.items()}


def conflict(
    partition: str, changes: Sequence[Change], rows: Mapping[str, Row | None]
) -> ConflictError:
    """The error for a write of which at least one expectation does not hold.

    ``rows`` are the rows of the write as they are now, those whose expectation failed at least.
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
    """Refuse a write that some backend could not take, before anything is sent."""
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
    """Refuse a key that is empty, too long, or not text that UTF-8 can hold."""
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


def check_limit(limit: int | None) -> None:
    """Refuse a scan's limit below zero."""
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
