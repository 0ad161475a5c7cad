# ruff: noqa: PLC0415 - rich takes a third of the time of `tidelog --help`, which prints without it
"""What commands read and print, and how they end.

Results are tables for people, or one JSON object per line with ``--json``. They go to standard
output; errors, and progress where that is a terminal, go to standard error, so that a pipe carries
results alone. The exit code is 0 for success, 1 for a failure and 2 for wrong usage. Arguments are
UTF-8, and help shows whole sentences.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec
from rich.cells import cell_len

from tidelog.errors import InvalidError, TidelogError
from tidelog.model.sizes import size_bytes

__all__ = [
    "EXIT_CODES",
    "FAILED",
    "FULL",
    "INTERRUPTED",
    "WRONG_USAGE",
    "CommandGroup",
    "Output",
    "Size",
    "TimeBar",
    "TimeLastCommand",
    "check_texts",
    "counted",
    "echo_aside",
    "exit_code",
    "json_option",
    "print_error",
    "progress_bar",
    "size_text",
    "to_seconds",
    "utf8",
    "visible",
    "write_out",
]

F = TypeVar("F", bound=Callable[..., Any])

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without room
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_AGO = re.compile(r"-[0-9]+[a-z]+")  # as in `-15m`
_NONE = "-"  # in place of no value
_PIPE_WIDTH = 1_000  # columns: what goes into a pipe or a file is not squeezed


class Output:
    """Prints one command's results, for a person or for a program."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.hide_bar: Callable[[], None] = lambda: None  # called before a person reads a result
        from rich.console import Console

        wide = None if sys.stdout.isatty() else _PIPE_WIDTH
        # What is printed comes from events and names: `[bold]` and `:smile:` are text there.
        self._console = Console(
            highlight=False, markup=False, emoji=False, soft_wrap=True, width=wide
        )

    def say(self, text: str) -> None:
        """Prints a line for people only."""
        if not self.as_json:
            self._print(visible(text, "\n\t"))

    def title(self, text: str) -> None:
        """Prints a heading for people only."""
        if not self.as_json:
            self._print(f"\n{visible(text)}", style="bold")

    def record(self, values: Mapping[str, Any], always: Collection[str] | None = None) -> None:
        """Prints one result: a JSON line, or its fields one below the other.

        With ``always`` people see no field that is zero or empty, except the ones that it names.
        """
        if self.as_json:
            self._json(values)
            return
        if always is not None:
            values = {name: value for name, value in values.items() if value or name in always}
        width = max(len(visible(name)) for name in values)
        for name, value in values.items():
            self._print(f"{visible(name):<{width}}  {_cell(value)}")

    def records(
        self,
        columns: Iterable[str],
        rows: Iterable[Mapping[str, Any]],
        none: str = "",
        rare: Collection[str] = (),
    ) -> None:
        """Prints several results: a JSON line each, or a table for people.

        On a terminal that is too narrow for the table, the last column is a line below each row;
        if the rest is too wide as well, each row becomes a record. A column of ``rare`` is left out
        if no row has a value there. ``none`` is printed on standard error if there are no rows.
        """
        if self.as_json:
            for row in rows:
                self._json(row)
            return
        found = list(rows)
        if none and not found:
            echo_aside(none)
            return
        names = [name for name in columns if name not in rare or any(row[name] for row in found)]
        shown = [[_cell(row[name]) for name in names] for row in found]
        room = self._console.width if shown and self._console.is_terminal else None
        if room is None or _width(names, shown) <= room:
            self._table([names, *shown])
        elif len(names) > 1 and _width(names[:-1], [cells[:-1] for cells in shown]) <= room:
            self._table([names, *shown], below=True)
        else:
            for number, cells in enumerate(shown):
                if number:
                    self.say("")
                self.record(dict(zip(names, cells, strict=True)))

    def _table(self, rows: Sequence[Sequence[str]], below: bool = False) -> None:
        """Prints aligned rows, the names first; ``below``: with the last cell on its own line."""
        lines = [list(map(visible, rows[0])), *rows[1:]]
        widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
        for number, cells in enumerate(lines):
            apart = below and number > 0
            beside = cells[:-1] if apart else cells
            padded = [
                cell + " " * (width - cell_len(cell))
                for cell, width in zip(beside, widths, strict=False)
            ]
            self._print("  ".join(padded).rstrip(), style="" if number else "bold")
            if apart and cells[-1] != _NONE:
                self._print(f"  {cells[-1]}")

    def _print(self, text: str, style: str = "") -> None:
        self.hide_bar()
        self._console.print(text, style=style)

    def _json(self, values: Mapping[str, Any]) -> None:
        write_out(msgspec.json.encode(values) + b"\n")


def _cell(value: object) -> str:
    """Returns a value as people read it."""
    if value is None or value in ((), []):
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return visible(str(value))


def _width(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Returns the width of a table that cuts nothing off, with two spaces between columns."""
    widest = [max(map(cell_len, cells)) for cells in zip(names, *rows, strict=True)]
    return sum(widest) + 2 * (len(names) - 1)


def json_option(command: F) -> F:
    """Add ``--json``; the command gets an :class:`Output` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
    @functools.wraps(command)
    def with_output(*args: Any, as_json: bool, **options: Any) -> Any:
        return command(Output(as_json), *args, **options)

    return with_output  # type: ignore[return-value]


def to_seconds(time: str) -> str:
    """Returns a time in ISO 8601 without milliseconds, for tables that people read."""
    return time[:19] + "Z"


def counted(number: int, one: str, many: str = "") -> str:
    """``1 event``, ``2 events``; ``many`` where an s will not do."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size_text(size: int) -> str:
    """``812 B``, ``2.2 KiB``, ``140 MiB``."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


class Size(click.ParamType[int]):
    """A number of bytes: ``10000``, ``200 MB`` or ``64MiB``."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the number of bytes."""
        try:
            size = value if isinstance(value, int) else size_bytes(value)
        except InvalidError as exc:
            self.fail(exc.message, param, ctx)
        if size < self._least:
            self.fail(f"{value} is too small: give {self._least} or more", param, ctx)
        return size


def write_out(data: bytes) -> None:
    """Bytes to standard output; all have left this process on return, or an error is raised.

    A terminal gets values of events as text that cannot steer it; a pipe or a file gets them as
    they are. Where Python runs unbuffered, one write may take a part only, and say so by its
    result alone.
    """
    if sys.stdout.isatty():
        data = visible(data.decode(errors="backslashreplace"), "\n\t").encode()
    left = memoryview(data)
    while left:
        left = left[sys.stdout.buffer.write(left) :]
    sys.stdout.buffer.flush()


def print_error(error: TidelogError, as_json: bool) -> None:
    """Prints one line on standard error, whatever the message holds."""
    if as_json:
        line = json.dumps(error.as_json(), default=str)  # unlike msgspec, takes lone surrogates
    else:
        line = "error: " + " ".join(error.message.split())
        line = visible(line.encode(errors="backslashreplace").decode())
    click.echo(line, err=True)


def echo_aside(text: str) -> None:
    """Prints one line for people on standard error; escapes what could steer a terminal."""
    click.echo(visible(text), err=True)


def visible(text: str, kept: str = "") -> str:
    """Return text with control characters, and marks that turn its direction, as escapes.

    Names and reasons come from clients: what they hold must not steer an operator's terminal.
    """
    if text.isprintable():
        return text
    return _UNSEEN.sub(lambda m: m[0] if m[0] in kept else _escape(m[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


@contextlib.contextmanager
def progress_bar(what: str, total: Callable[[], int | None]) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes that are done; ``total`` is asked only for a bar."""
    size = total() if sys.stderr.isatty() else None
    if size is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.advance(task, done)


class TimeBar:
    """A progress bar over a range of times, only if standard error is a terminal."""

    def __init__(self, what: str, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[says]}"))
        self._progress = Progress(
            *columns, console=Console(stderr=True), transient=True, disable=not shown
        )
        self._task = self._progress.add_task(what, total=None, says="")
        self._first_ms: int | None = None

    def __enter__(self) -> TimeBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, says: str) -> None:
        """Shows the bar, before it is known where it begins."""
        self._progress.update(self._task, says=says)
        self._progress.start()  # not before, as lines come first

    def move(self, time_ms: int, end_ms: int, says: str) -> None:
        """Shows that a time is done. The first call says where the bar begins."""
        if self._first_ms is None:
            self._first_ms = time_ms
        total = max(1, end_ms - self._first_ms)
        done = min(max(0, time_ms - self._first_ms), total)
        self._progress.update(self._task, total=total, completed=done, says=says)


FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # what shells give for Ctrl-C


EXIT_CODES: tuple[tuple[type[TidelogError], int], ...] = (
    (InvalidError, WRONG_USAGE),
    (TidelogError, FAILED),
)


def exit_code(error: TidelogError) -> int:
    """The first entry that fits, so the narrower ones come first."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


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


class TimeLastCommand(click.Command):
    """A command whose last argument may be a relative time: ``-15m`` is none of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_time_last(args))

    @staticmethod
    def with_time_last(args: list[str]) -> list[str]:
        """Returns the arguments with a relative time where no option can be."""
        times = [each for each in args if _AGO.fullmatch(each)]
        if not times or "--" in args:
            return args
        return [*(each for each in args if each not in times), "--", *times]


def utf8(text: str) -> str:
    """The type of an option that takes no other bytes; Python hands those on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise click.BadParameter("is not UTF-8: give text") from exc
    return text


def check_texts(command: click.Command) -> None:
    """Makes a command and those below it refuse arguments that are not UTF-8, except file paths.

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
