"""Determines the outcome of a write when replies get lost.

A backend over a network gives one *attempt* to :func:`write_settled`, which repeats it with the
same write id until it knows the outcome:

1. The attempt returns: done.
2. It raises ``LostReplyError``: read the rows of the write. If a row has the write's id: done. If
   every expectation still holds: send it again; if the first one lands after all, one of the two
   finds the other's id. Anything else: ``UnknownOutcomeError``.
3. It raises ``ConflictError``: if a row in the error has the write's id, an earlier attempt or call
   had landed: done. If an earlier reply was lost, read all rows of the write: the conflict may be
   with our own write, which was overwritten since. So without the id it is an
   ``UnknownOutcomeError``. Otherwise it is a conflict, which takes no read: a backend reports every
   row whose expectation failed, and every row that has the id although nothing was expected of it.
4. It raises ``UnavailableError`` (nothing was sent, or the server refused for load): send again
   after a wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidelog.catalog.base import Change, WriteOutcome, carries, judge, versions_of
from tidelog.clock import Clock
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.model.backoff import Backoff

__all__ = ["LostReplyError", "Repeat", "read_repeated", "write_settled"]

T = TypeVar("T")


class LostReplyError(Exception):
    """Raised by an attempt whose request may have reached the server; never leaves the room."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """How retries are spaced, with which clock and randomness."""

    clock: Clock
    random: random.Random
    backoff: Backoff = field(default_factory=Backoff)


def write_settled(
    attempt: Callable[[], None],
    read_version: Callable[[str], str | None],
    partition: str,
    changes: Sequence[Change],
    write_id: str,
    repeat: Repeat,
) -> None:
    """Runs ``attempt`` until the write is done, refused, or has an unknowable outcome."""
    lost: Exception | None = None
    delays = repeat.backoff.waits_s(repeat.random, repeat.clock)
    while True:
        try:
            attempt()
            return
        except ConflictError as exc:
            if carries(changes, versions_of(exc.rows), write_id):
                return
            if lost is None:
                raise exc
            if _read_outcome(read_version, partition, changes, write_id) is WriteOutcome.DONE:
                return
            raise _unknown(partition, write_id, lost) from lost
        except LostReplyError as exc:
            lost = exc
            outcome = _read_outcome(read_version, partition, changes, write_id)
            if outcome is WriteOutcome.DONE:
                return
            if outcome is WriteOutcome.FAILED:
                raise _unknown(partition, write_id, exc) from exc
            refusal: Exception = exc
        except UnavailableError as exc:
            refusal = exc
        delay_s = next(delays, None)
        if delay_s is None:
            if lost is not None:
                raise _unknown(partition, write_id, lost) from lost
            raise refusal
        repeat.clock.sleep(delay_s)


def read_repeated(read: Callable[[], T], repeat: Repeat) -> T:
    """Retries ``read`` while it raises ``UnavailableError``; raises the last one."""
    for delay_s in repeat.backoff.waits_s(repeat.random, repeat.clock):
        try:
            return read()
        except UnavailableError:
            repeat.clock.sleep(delay_s)
    return read()


def _read_outcome(
    read_version: Callable[[str], str | None],
    partition: str,
    changes: Sequence[Change],
    write_id: str,
) -> WriteOutcome:
    try:
        versions = {change.row: read_version(change.row) for change in changes}
    except UnavailableError as exc:
        raise _unknown(partition, write_id, exc) from exc
    return judge(changes, versions, write_id)


def _unknown(partition: str, write_id: str, cause: Exception) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"a write to `{partition}`: no reply says whether write `{write_id}` landed, and its rows "
        f"do not show it ({str(cause) or 'no reply'}): read back what you meant to change, then "
        "decide",
        partition=partition,
        write_id=write_id,
    )
