"""Asking before something is destroyed: one rule for all commands that do so."""

from __future__ import annotations

import sys

import click

from tidelog.cli.exit_codes import FailedError
from tidelog.errors import InvalidError

__all__ = ["ask_first", "yes_option"]

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def ask_first(what: str, question: str, yes: bool) -> None:
    """Return when it may be done: by ``--yes``, or as a person at a terminal answers.

    ``InvalidError`` where there is neither, ``FailedError`` when the answer is no. Who calls it has
    made sure that there is something to destroy.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidError(f"{what}: deleting needs --yes without a terminal")
    if not click.confirm(question, err=True):
        raise FailedError(f"{what}: nothing was deleted")
