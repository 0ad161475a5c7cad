"""Asking before something is destroyed: one rule for all commands that do so.

The options that say which readers a trim or a delete of a topic may pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from tidelog.cli.output import FailedError
from tidelog.cli.text import utf8
from tidelog.errors import InvalidError

__all__ = [
    "ask_first",
    "past_of",
    "past_options",
    "yes_option",
]

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


def past_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--past-reader`` and ``--past-readers`` to a command."""
    one = click.option(
        "--past-reader",
        "past_names",
        type=utf8,
        multiple=True,
        metavar="NAME",
        help="Delete events that this reader has not read yet, such as billing or "
        "consumer:billing; may be repeated.",
    )
    every = click.option(
        "--past-readers",
        is_flag=True,
        help="Delete events that any consumer, archive, pump or playback has not read yet.",
    )
    return every(one(command))


def past_of(past_readers: bool, past_names: tuple[str, ...]) -> bool | tuple[str, ...]:
    """What ``Home.trim`` and ``Home.delete_topic`` take. ``InvalidError`` for both at once."""
    if past_readers and past_names:
        raise InvalidError("--past-reader and --past-readers contradict: give one or the other")
    return past_readers or past_names
