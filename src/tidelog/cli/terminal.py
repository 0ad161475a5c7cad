"""What commands share: the home they open, questions before a deletion, and signals.

**Home.** The default home is created on first use. A command that cannot create anything in it,
such as ``tidelog topic list``, gets an empty home in memory as long as there is none: it finds
nothing, and leaves nothing behind.

**Questions.** One rule decides when a command asks before it destroys something.

**Signals.** The first Ctrl-C or SIGTERM is noted, so that a long command can end cleanly.

This is the one place that decides how such a command exits: with 128 and the signal's number, as
its work may not be done, unless it was asked to follow, where a signal is the way to end it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import click

from tidelog.backends import real_world
from tidelog.cli.output import echo_aside, utf8, visible
from tidelog.errors import FailedError, InvalidError
from tidelog.home import Home
from tidelog.home import open_home as open_any
from tidelog.settings import DEFAULT_FOLDER, load_settings

__all__ = [
    "CREATING",
    "Interruption",
    "ask_first",
    "confirm",
    "open_home",
    "past_of",
    "past_options",
    "yes_option",
]


CREATING = frozenset(
    {
        "archive create",
        "follow",
        "home",
        "pump",
        "sample-traffic",
        "scribe",
        "serve",
        "token create",
        "topic create",
        "up",
    }
)
"""Commands that need no topic, archive or pump that was created before."""


def open_home(home_text: str | None) -> Home:
    """Open the home that a command works on."""
    world = real_world()
    command = click.get_current_context().command_path.partition(" ")[2]
    if command not in CREATING:
        settings = load_settings(home_text, world.environ, world.folder)
        if settings.is_default and not (world.folder / DEFAULT_FOLDER).exists():
            home_text = "memory:"
    return open_any(home_text, world=world)


yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def ask_first(what: str, question: str, yes: bool, doing: str = "deleting") -> None:
    """Return when it may be done: by ``--yes``, or as a person at a terminal answers.

    ``InvalidError`` where there is neither, ``FailedError`` when the answer is no. Who calls it has
    made sure that there is something to destroy.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidError(f"{what}: {doing} needs --yes without a terminal")
    if not confirm(question):
        did = {"deleting": "deleted", "moving": "moved", "writing": "written"}[doing]
        raise FailedError(f"{what}: nothing was {did}, as you answered no")


def confirm(question: str) -> bool:
    """Returns a person's answer; unlike ``click.confirm``, with an error in the shape of others."""
    while True:
        answer = str(click.prompt(f"{visible(question)} [y/N]", "n", show_default=False, err=True))
        if answer.strip().lower() in ("y", "yes", "n", "no"):
            return answer.strip().lower() in ("y", "yes")
        echo_aside(f"error: answer `{answer}`: not understood: give y or n")


def past_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--past-reader`` and ``--past-readers`` to a command."""
    one = click.option(
        "--past-reader",
        "past_names",
        type=utf8,
        multiple=True,
        metavar="NAME",
        help="Delete events even if this reader has not read them, such as billing or "
        "consumer:billing. Repeatable.",
    )
    every = click.option(
        "--past-readers",
        is_flag=True,
        help="Delete events even if a consumer, archive, pump or playback has not read them.",
    )
    return every(one(command))


def past_of(past_readers: bool, past_names: tuple[str, ...]) -> bool | tuple[str, ...]:
    """Returns which readers to pass. Raises ``InvalidError`` if both options are given."""
    if past_readers and past_names:
        raise InvalidError("--past-reader and --past-readers contradict: give one or the other")
    return past_readers or past_names


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Notes a signal to stop. A second signal ends the process at once.

    Where it does not follow, the end of the body exits the process if a signal has come, unless
    :meth:`finished` was called.
    """

    def __init__(self, stop: threading.Event | None = None, *, follows: bool) -> None:
        self._stop = stop  # set too when a signal comes
        self._is_done = follows
        self._noted: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Returns whether a signal has come."""
        return self._noted is not None

    @property
    def is_unfinished(self) -> bool:
        """Returns whether a signal came before the work was done."""
        return self._noted is not None and not self._is_done

    @property
    def exit_code(self) -> int:
        """Returns the exit code that shells give to a process that this signal ended."""
        return 128 + (self._noted or 0)

    def finished(self) -> None:
        """Notes that all is done, although a signal may have come."""
        self._is_done = True

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self.is_unfinished:
            sys.exit(self.exit_code)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            raise KeyboardInterrupt
        self._noted = number
        if self._stop is not None:
            self._stop.set()
