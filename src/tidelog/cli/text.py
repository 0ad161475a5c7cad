"""Words of the command line that are kept: they must be text, which arguments need not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

__all__ = ["check_texts", "utf8"]

_PATHS = frozenset({"file", "files", "ids_file"})  # parameters that name files by str


def utf8(text: str) -> str:
    """The type of an option that takes no other bytes; Python hands those on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise click.BadParameter("is not UTF-8: give text") from exc
    return text


def check_texts(command: click.Command) -> None:
    """Let a command and those below it refuse arguments that are not UTF-8, except paths of files.

    A file may have any name, and Python opens it by the lone surrogates.
    """
    for param in command.params:
        is_path = isinstance(param.type, click.Path) or param.name in _PATHS
        if not is_path and not param.is_eager:
            param.callback = _checking(param.callback)
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        check_texts(below)


def _checking(callback: Callable[..., Any] | None) -> Callable[..., Any]:
    def check(context: click.Context, param: click.Parameter, value: Any) -> Any:
        for text in _texts(value):
            utf8(text)
        return value if callback is None else callback(context, param, value)

    return check


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _texts(each)
