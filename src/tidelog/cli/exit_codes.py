"""Which error ends the command with which exit code: 0 success, 1 failed, 2 wrong usage."""

from __future__ import annotations

from tidelog.errors import InvalidError, TidelogError

__all__ = ["EXIT_CODES", "FAILED", "INTERRUPTED", "WRONG_USAGE", "FailedError", "exit_code"]

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # what shells give for Ctrl-C


class FailedError(TidelogError):
    """A command could not do all that it was asked; its message says what is done."""

    kind = "failed"


EXIT_CODES: tuple[tuple[type[TidelogError], int], ...] = (
    (InvalidError, WRONG_USAGE),
    (TidelogError, FAILED),
)


def exit_code(error: TidelogError) -> int:
    """The first entry that fits, so the narrower ones come first."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
