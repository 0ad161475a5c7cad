"""Every error that Tidelog raises, grouped by what the one who catches it should do.

::

    TidelogError
    ├── ConflictError        another writer won           → refresh and decide again
    ├── FencedError          your lease or epoch is over  → stop; never retry
    ├── UnknownOutcomeError  the write may have landed    → read back, then decide
    ├── UnavailableError     store or catalog unreachable → retry with backoff
    ├── NotFoundError        (also KeyError)              → create it or fix the name
    ├── AlreadyExistsError                                → choose another or accept it
    ├── PartialAppendError   some events are stored       → append its remainder, read back unknown
    ├── FailedError          a part of the work is done   → read what is done, fix what it names
    ├── InvalidError         (also ValueError)            → fix the argument or setting
    ├── CorruptError         bytes are not what we wrote  → stop, keep the evidence, tell a person
    └── InternalError        our bug                      → report

A message reads *which thing: what happened, expected and found: what to do*. The ``kind`` of an
error is a stable word for machines (kinds are added, never renamed), and ``context`` holds the
names and numbers of the message. Errors pickle, since they cross from Spark workers to drivers.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "AlreadyExistsError",
    "ConflictError",
    "CorruptError",
    "FailedError",
    "FencedError",
    "InternalError",
    "InvalidError",
    "NotFoundError",
    "PartialAppendError",
    "TidelogError",
    "UnavailableError",
    "UnknownOutcomeError",
    "contained",
    "raise_first",
    "unexpected",
]


_NOTES_MAX = 20  # errors that are noted on the first one


class TidelogError(Exception):
    """The base class of all errors; only its subclasses are raised."""

    kind: ClassVar[str] = "tidelog"

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, Any] = context

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context))

    def as_json(self) -> dict[str, dict[str, object]]:
        """Returns the error as JSON; the command line and HTTP use the same shape."""
        return {"error": {"kind": self.kind, "message": self.message, "context": self.context}}


class ConflictError(TidelogError):
    """Another writer won, and nothing of this write was stored.

    ``rows`` is set by catalogs: the rows of the write as they are now, by name, None for one that
    does not exist. It holds at least every row whose expectation failed. It is not part of the
    message, of ``context``, or of the error's JSON.
    """

    kind = "conflict"

    def __init__(
        self, message: str, *, rows: Mapping[str, object] | None = None, **context: object
    ) -> None:
        super().__init__(message, **context)
        self.rows: Mapping[str, Any] = dict(rows or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context | {"rows": self.rows}))


class FencedError(TidelogError):
    """The lease or epoch under which this write was made is over."""

    kind = "fenced"


class UnknownOutcomeError(TidelogError):
    """The reply was lost and reading back could not tell whether the write landed."""

    kind = "unknown_outcome"


class UnavailableError(TidelogError):
    """A store, catalog or other server could not be reached; nothing of this call was stored."""

    kind = "unavailable"


class NotFoundError(TidelogError, KeyError):
    """The named thing does not exist."""

    kind = "not_found"


class AlreadyExistsError(TidelogError):
    """The named thing exists, and the call was to create it."""

    kind = "already_exists"


class PartialAppendError(TidelogError):
    """Some events of an append are stored, and others are not, or may not be.

    ``positions`` has one entry for each event that was given: its position, or None where it is not
    known to be stored. ``remainder`` has the indexes of events that are certainly not stored:
    append these again. ``unknown`` has the indexes of events whose fate is unknown: read back
    before you append one of these again. The cause says why.
    """

    kind = "partial_append"

    @property
    def positions(self) -> list[Any]:
        """Returns the position of each event; None for one that is not known to be stored."""
        stored: list[Any] = self.context["positions"]
        return stored

    @property
    def unknown(self) -> list[int]:
        """Returns the indexes of events that may or may not be stored."""
        found: list[int] = self.context.get("unknown", [])
        return found

    @property
    def remainder(self) -> list[int]:
        """Returns the indexes of events that are certainly not stored."""
        unknown = set(self.unknown)
        return [
            index
            for index, position in enumerate(self.positions)
            if position is None and index not in unknown
        ]


class FailedError(TidelogError):
    """A call or a command could not do all of its work; the message says what is done."""

    kind = "failed"


class InvalidError(TidelogError, ValueError):
    """An argument, setting, address or permission is wrong, and a retry will not help."""

    kind = "invalid"


class CorruptError(TidelogError):
    """Stored bytes are not what was written."""

    kind = "corrupt"


class InternalError(TidelogError):
    """A check inside Tidelog failed: a bug in Tidelog."""

    kind = "internal"


def unexpected(what: str, exc: Exception) -> TidelogError:
    """Returns a ``TidelogError`` for any exception, so that it can be kept with its part.

    An ``OSError`` may be temporary; anything else is a bug, here or in a library.
    """
    if isinstance(exc, TidelogError):
        return exc
    lines = str(exc).splitlines()
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    reason = f"{type(exc).__name__}{place}: {lines[0][:200] if lines else 'no reason given'}"
    found: TidelogError
    if isinstance(exc, OSError):
        found = UnavailableError(f"{what}: {reason}: fix the cause and try again")
    else:
        found = InternalError(f"{what}: unexpected {reason}: report it")
    found.__cause__ = exc
    return found


@contextlib.contextmanager
def contained(what: str, report: Callable[[TidelogError], object]) -> Iterator[None]:
    """Reports any exception of one part of the work, so that the other parts continue.

    Every loop that promises not to let one part stop the others uses this. It also contains foreign
    exceptions: one record that a library cannot handle must not stop the rest.
    """
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - one part must not stop the others
        report(unexpected(what, exc))


def raise_first(errors: Iterable[Exception]) -> None:
    """Raises the first of these errors, and adds the others to it as notes, for tracebacks.

    For the end of a loop that continues when one part fails. Does nothing without an error. The
    message stays that of the first error, and notes are lost when an error is pickled.
    """
    given = list(errors)
    if not given:
        return
    first, *others = given
    for other in others[:_NOTES_MAX]:
        first.add_note(f"also failed: {other}")
    if len(others) > _NOTES_MAX:
        first.add_note(f"also failed: {len(others) - _NOTES_MAX} more")
    raise first


def _rebuild(cls: type[TidelogError], message: str, context: dict[str, Any]) -> TidelogError:
    return cls(message, **context)
