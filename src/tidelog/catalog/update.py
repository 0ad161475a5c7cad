"""All loops that retry: ``update``, ``attempts``, ``rounds``, ``read_stable``, ``write_settled``.

``update`` is the one loop that reads, decides, writes and retries:

1. the rows are read, in the order in which they are named
2. ``decide``, which is pure, says what to write, or that nothing is to be written
3. the changes are written under a new write id
4. a conflict returns the rows that were not as expected: after a wait, ``decide`` is called again
   with these. No read follows, except of rows of which the write expected nothing, and of all rows
   after a long wait
5. a lost reply: after a wait all rows are read again. The write has landed if a row carries its id,
   or if the mark of the decision says so. Otherwise ``decide`` is called again, and the decision
   must allow that: it has a mark, or what it wants is there already, or writing it twice does no
   harm

An earlier write may land after all while a later one is decided. Both expect the same versions, so
one of them conflicts, and the rows of that conflict carry the other's id.

| dies after | what is in the catalog       | who repairs it                       |
|------------|------------------------------|--------------------------------------|
| 1, 2       | as it was                    | nothing to repair                    |
| 3, 4, 5    | the whole change, or nothing | the next caller decides by the rows  |

``attempts`` is for what cannot be one ``update``: it works on objects, other systems or several
partitions between two writes. It has the same waits and the same bound. ``rounds`` is for work that
gets further in each round, so that it waits only where it meets another writer (``pause``).
``read_stable`` repeats a read while others change what it reads.

``write_settled`` is for backends over a network, whose replies get lost. It gets one *attempt* and
repeats it with the same write id until it knows the outcome:

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
5. It raises any other error (expired credentials, a revoked permission): that error, since nothing
   was written. After a lost reply ``UnknownOutcomeError``: only this attempt was refused.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tidelog.catalog.base import (
    ABSENT,
    Absent,
    Catalog,
    Change,
    Check,
    Delete,
    Put,
    Row,
    WriteOutcome,
    carries,
    judge,
    versions_of,
)
from tidelog.clock import Clock, Ids
from tidelog.errors import ConflictError, TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.model import limits
from tidelog.model.times import Backoff

__all__ = [
    "RACE",
    "REREAD",
    "Decision",
    "LostReplyError",
    "Repeat",
    "Rows",
    "UpdateContext",
    "WaitContext",
    "attempts",
    "pause",
    "read_if_stable",
    "read_repeated",
    "read_stable",
    "rounds",
    "update",
    "write_settled",
]

T = TypeVar("T")
RACE = Backoff(limits.COMMIT_ATTEMPTS, base_ms=1, max_ms=200)  # against others on one row
REREAD = Backoff(16, base_ms=1, max_ms=100)  # while others change rows; 0.7 s in total
_FRESH_S = 0.01  # after a longer wait, busy writers have changed the rows of a conflict again


class UpdateContext(Protocol):
    """What an update works with; a ``Context`` has it."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def ids(self) -> Ids: ...

    @property
    def random(self) -> random.Random: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows as ``decide`` sees them, and the id that its write will have.

    The methods make changes that expect the rows to be as they were read.
    """

    found: Mapping[str, Row | None]
    write_id: str

    def __getitem__(self, name: str) -> Row | None:
        """The row of this name, None where there is none. ``KeyError`` if it was not asked for."""
        return self.found[name]

    def expect(self, name: str) -> str | Absent:
        """The version of a row, or ``ABSENT``."""
        row = self.found[name]
        return ABSENT if row is None else row.version

    def put(self, name: str, value: bytes) -> Put:
        return Put(name, value, self.expect(name))

    def delete(self, name: str) -> Delete:
        return Delete(name, self.expect(name))

    def check(self, name: str) -> Check:
        return Check(name, self.expect(name))


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What to write, and what :func:`update` returns once that is written.

    ``mark`` tells from later rows whether this very decision has landed, though others have
    changed the rows since. A change that must not be made twice, such as a count, needs one.
    """

    result: T
    changes: Sequence[Change] = ()
    mark: Callable[[Rows], bool] | None = None


def update(
    context: UpdateContext,
    partition: str,
    rows: Sequence[str],
    decide: Callable[[Rows], Decision[T]],
    what: str,
    known: Mapping[str, Row | None] | None = None,
) -> T:
    """Changes rows of a partition as ``decide`` wants it; returns the decision's result.

    ``decide`` may raise, which ends the update. ``what`` names the thing in errors. Rows that are
    ``known`` are not read at first, so the changes must expect their versions.
    ``UnavailableError``: nothing was written, as others keep changing the rows or the catalog
    cannot be reached. ``UnknownOutcomeError``: the same, or any other error of the catalog, after a
    reply was lost.
    """
    lost: list[tuple[str, Decision[T]]] = []
    try:
        return _settled(context, partition, _Names(rows, known or {}), decide, lost)
    except (_SilentError, UnavailableError) as exc:
        error = exc.error if isinstance(exc, _SilentError) else exc
        if not lost:
            raise
        raise UnknownOutcomeError(
            f"{what}: a reply was lost, and whether its write has landed is not known "
            f"({error}): look at it, then try again",
            **error.context,
        ) from error
    except _BusyError as exc:
        if lost:
            raise UnknownOutcomeError(
                f"{what}: replies keep getting lost: look at it, then try again"
            ) from exc
        raise UnavailableError(f"{what}: too many writers at once: try again") from exc


class _BusyError(Exception):
    """The attempts are used up; never leaves the module."""


class _SilentError(Exception):
    """The catalog failed after a lost reply: the outcome is unknown. Never leaves the module."""

    def __init__(self, error: TidelogError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Names:
    """Which rows to read, and those that the caller knows."""

    rows: Sequence[str]
    known: Mapping[str, Row | None]


def _settled(
    context: UpdateContext,
    partition: str,
    names: _Names,
    decide: Callable[[Rows], Decision[T]],
    lost: list[tuple[str, Decision[T]]],
) -> T:
    """All steps; ``lost`` gets the writes whose replies were lost."""
    delays = RACE.delays_s(context.random)
    found = dict(names.known)
    stale = {name for name in names.rows if name not in found}
    while True:
        with _asking(lost):
            found |= _read(context, partition, (name for name in names.rows if name in stale))
        rows = Rows(found, context.ids.new())
        for write_id, earlier in lost:
            if _has_landed(earlier, write_id, rows):
                return earlier.result
        decision = decide(rows)
        if not decision.changes:
            return decision.result
        try:
            with _asking(lost):
                context.catalog.write(partition, *decision.changes, write_id=rows.write_id)
        except ConflictError as exc:
            stale = _unreported(names.rows, decision.changes, exc.rows)
            found = found | dict(exc.rows)
        except UnknownOutcomeError:
            lost.append((rows.write_id, decision))
            stale = set(names.rows)
        else:
            return decision.result
        delay_s = next(delays, None)
        if delay_s is None:
            raise _BusyError
        context.clock.sleep(delay_s)
        if delay_s > _FRESH_S:
            stale = set(names.rows)


@contextlib.contextmanager
def _asking(lost: Sequence[object]) -> Iterator[None]:
    """Raises ``_SilentError`` if the catalog does not say what became of the writes in ``lost``."""
    try:
        yield
    except (ConflictError, UnknownOutcomeError):
        raise
    except TidelogError as exc:
        if lost:
            raise _SilentError(exc) from exc
        raise


def _read(context: UpdateContext, partition: str, names: Iterable[str]) -> dict[str, Row | None]:
    return {name: context.catalog.get(partition, name) for name in names}


def _has_landed(decision: Decision[T], write_id: str, rows: Rows) -> bool:
    """Step 5."""
    if carries(decision.changes, versions_of(rows.found), write_id):
        return True
    return decision.mark is not None and decision.mark(rows)


def _unreported(
    names: Iterable[str], changes: Iterable[Change], reported: Mapping[str, Row | None]
) -> set[str]:
    """The rows of which a conflict says nothing: it returned none, and nothing was expected."""
    expected = {change.row for change in changes if change.expect is not None}
    if not expected & set(reported):
        return set(names)
    return set(names) - expected - set(reported)


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

    def look() -> WriteOutcome:
        return _read_outcome(read_version, partition, changes, write_id)

    lost: Exception | None = None
    delays = repeat.backoff.waits_s(repeat.random, repeat.clock)
    while True:
        try:
            attempt()
            return
        except ConflictError as exc:
            is_ours = carries(changes, versions_of(exc.rows), write_id)
            if is_ours or (lost is not None and look() is WriteOutcome.DONE):
                return
            if lost is None:
                raise exc
            raise _unknown(partition, write_id, lost) from lost
        except LostReplyError as exc:
            lost = exc
            outcome = look()
            if outcome is WriteOutcome.DONE:
                return
            if outcome is WriteOutcome.FAILED:
                raise _unknown(partition, write_id, exc) from exc
            refusal: Exception = exc
        except UnavailableError as exc:
            refusal = exc
        except TidelogError as exc:  # a refusal for good, of this attempt alone
            if lost is None:
                raise
            raise _unknown(partition, write_id, exc) from exc
        delay_s = next(delays, None)
        if delay_s is None:
            if lost is not None:
                raise _unknown(partition, write_id, refusal) from refusal
            raise refusal
        repeat.clock.sleep(delay_s)


class WaitContext(Protocol):
    """What waiting needs; a ``Context`` has it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def random(self) -> random.Random: ...


def attempts(context: WaitContext, failed: TidelogError, backoff: Backoff = RACE) -> Iterator[int]:
    """Yields the number of each attempt at work that others may undo, from 0.

    The caller leaves the loop when it is done, and lets it go on after a conflict or a lost reply.
    It waits between two attempts, with jitter, and raises ``failed`` after the last one.
    """
    for number, delay_s in enumerate(backoff.delays_s(context.random)):
        yield number
        context.clock.sleep(delay_s)
    yield backoff.attempts - 1
    raise failed


def rounds(limit: int, failed: TidelogError) -> Iterator[int]:
    """Yields the number of each round of work that continues where the round before ended, from 0.

    It does not wait: a round that met another writer calls :func:`pause`. The caller leaves the
    loop when it is done; ``failed`` is raised after the last round.
    """
    yield from range(limit)
    raise failed


def pause(context: WaitContext, number: int, backoff: Backoff = RACE) -> None:
    """Waits after a conflict or a lost reply, with jitter, as ``attempts`` does."""
    context.clock.sleep(backoff.delay_s(number, context.random))


def read_stable(context: UpdateContext, read: Callable[[], T | None], failed: TidelogError) -> T:
    """Returns what ``read`` returns, which is called again while it returns None.

    None means that others changed rows while it read them. It waits between two calls, and raises
    ``failed`` when the calls are used up.
    """
    found = read_if_stable(context, read)
    if found is None:
        raise failed
    return found


def read_if_stable(context: WaitContext, read: Callable[[], T | None]) -> T | None:
    """Returns what ``read`` returns, like ``read_stable``; None when the calls are used up.

    It is the one loop that repeats reads of rows.
    """
    found = read()
    for delay_s in REREAD.delays_s(context.random) if found is None else ():
        context.clock.sleep(delay_s)
        found = read()
        if found is not None:
            break
    return found


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
    except TidelogError as exc:  # out of reach, or the credentials have expired since
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
