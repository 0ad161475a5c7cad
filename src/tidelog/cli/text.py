"""Texts of the command line: arguments are UTF-8, and help shows whole sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

__all__ = ["CommandGroup", "check_texts", "utf8"]

_PATHS = frozenset({"file", "files", "ids_file"})  # parameters that name files by str


class CommandGroup(click.Group):
    """A group whose help shows the first sentence of each command, however long it is."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str(limit=200))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


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
