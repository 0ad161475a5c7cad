"""The ``tidelog`` command: its groups, and what happens when a command fails."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from tidelog import __version__
from tidelog.cli.output import (
    FAILED,
    FULL,
    INTERRUPTED,
    check_texts,
    exit_code,
    print_error,
    utf8,
)
from tidelog.errors import FailedError, InvalidError, NotFoundError, TidelogError

__all__ = ["cli", "main", "run"]

_INIT = "`tidelog init"  # as errors name the command

# The module of each command and its summary. A command is imported only when it runs, since each
# loads libraries of its own; the summaries are here so that the list of commands loads none.
_COMMANDS = {
    "archive": ("archive", "Write events to files that any engine can read, each event once."),
    "audit": ("amend", "Show who updated or deleted events of a topic, when and why."),
    "compile": (
        "journals:compile_",
        "Compact a topic into journals, with updates and deletes applied.",
    ),
    "completion": ("home", "Print a script that completes commands and options in a shell."),
    "consume": ("events", "Read the events of a topic as a named consumer."),
    "consumer": ("events", "List, show, move and delete consumers."),
    "delete": ("amend", "Delete events by id or by key."),
    "demo": ("demo", "Show Tidelog at work: produce, consume, archive, query."),
    "doctor": ("home", "Check the machine and the home, and say what to do."),
    "follow": ("up", "Run every archive and pump of a home until Ctrl-C."),
    "get": ("amend", "Print the event that has an id."),
    "home": ("home", "Show where the home is and the config string that opens it."),
    "init": ("home", "Create a home, or finish and check an existing one."),
    "journals": ("journals", "List the objects that hold a topic's events, with URLs."),
    "lag": ("maintenance", "Show how far behind each consumer is."),
    "load": ("serve", "Send sample traffic to a server and show its latency."),
    "peek": ("events", "Print the newest events of a topic, by time."),
    "pipeline": ("pipeline", "List, show, move and delete pumps, streams and restores."),
    "playback": (
        "playback",
        "Print the events of a time range, or play them elsewhere.",
    ),
    "produce": ("events", "Append the lines of a file or of standard input as events."),
    "proof": ("proof", "Check the file of a proof of erasure."),
    "pump": ("pipeline", "Copy the events of a source into a topic, each event once."),
    "sample-traffic": ("demo:sample_traffic", ""),
    "scribe": ("journals", "Compile, apply amendments and sweep in the background."),
    "serve": ("serve", "Serve the HTTP API and the console until Ctrl-C."),
    "spark-env": ("pipeline:spark_env", "Pack Tidelog for Spark executors that do not have it."),
    "sql": ("sql", "Query topics and archives with SQL."),
    "sweep": ("maintenance", "Delete objects that nothing refers to."),
    "tail": ("events", "Print events as they are appended, until Ctrl-C."),
    "token": ("serve", "Create, list, rotate and revoke the server's tokens."),
    "topic": ("topic", "Create, list, show, notify and delete topics."),
    "trim": ("maintenance", "Delete the oldest events of a topic."),
    "up": ("up", "Run everything a home needs until Ctrl-C."),
    "update": ("amend", "Replace the value of an event."),
    "verify": ("maintenance", "Check every event against the catalog and its checksum."),
}


class _Commands(click.Group):
    """A group whose commands are imported as they are asked for; ``commands`` asks for all."""

    @property
    def commands(self) -> dict[str, click.Command]:
        return {name: _load(name) for name in sorted(_COMMANDS)}

    @commands.setter
    def commands(self, value: object) -> None:
        """None are given when the group is made."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load(cmd_name) if cmd_name in _COMMANDS else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns commands by their summaries, as completing must not load any of them."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in _COMMANDS.items()
            if text and name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items() if text])

    def invoke(self, ctx: click.Context) -> Any:
        """As always; an error that says how to make the home names the one that was given."""
        try:
            return super().invoke(ctx)
        except NotFoundError as exc:
            home_text = ctx.params["home_text"]
            if home_text is None or _INIT not in exc.message:
                raise
            there = f"`tidelog --home {shlex.quote(home_text)} init"
            raise NotFoundError(exc.message.replace(_INIT, there), **exc.context) from exc


@functools.cache
def _load(name: str) -> click.Command:
    module, _, attribute = _COMMANDS[name][0].partition(":")
    commands = import_module(f"tidelog.cli.commands.{module}")
    found: click.Command = getattr(commands, attribute or name)
    check_texts(found)
    return found


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--home",
    "home_text",
    metavar="HOME",
    type=utf8,
    help="The home to work on: a folder, a tidelog.toml, or a config string "
    "(tidelog:?store=…&catalog=…). Default: TIDELOG_HOME, else what tidelog.toml or "
    "TIDELOG_STORE and TIDELOG_CATALOG say, else ./tidelog-data, created on first use.",
)
@click.version_option(__version__, "-V", "--version", prog_name="tidelog")
@click.pass_context
def cli(context: click.Context, home_text: str | None) -> None:
    """An event log and archive that lives on object storage.

    \b
    Examples:
      tidelog topic create orders             in ./tidelog-data, created on first use
      tidelog produce orders orders.txt       append the lines of a file
      tidelog consume orders --name billing   read them, and remember the position
      tidelog --home ./elsewhere init         create a home in another folder
      tidelog demo                            see it work, in a folder of its own
    """
    context.obj = home_text


def main() -> None:
    """Run the command line; never shows a traceback for what a person can fix."""
    as_json = "--json" in sys.argv
    try:
        cli.main(prog_name="tidelog", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        print_error(_usage(exc), as_json)
        sys.exit(exc.exit_code)
    except TidelogError as exc:
        print_error(exc, as_json)
        sys.exit(exit_code(exc))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; without this Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as exc:
        if exc.errno in FULL:
            said = f"output: {exc.strerror}: make room, and give the command again"
        elif isinstance(exc.filename, str):  # a file that the command writes
            said = f"file `{exc.filename}`: {exc.strerror}: fix its path or its rights"
        else:
            raise
        print_error(FailedError(said), as_json)
        sys.exit(FAILED)


def _usage(error: click.ClickException) -> TidelogError:
    """What click has to say, in the words and shape of all other errors."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context is not None:
        option = error.option_name
        name = option.lstrip("-")
        params = context.command.params
        if any(each.param_type_name == "argument" and each.name == name for each in params):
            message = f"{option}: {name.upper()} is an argument: give it without `{option}`"
    hint = f": see `{context.command_path} --help`" if context is not None else ""
    return InvalidError(f"{message}{hint}")


def run() -> NoReturn:
    """The process that is the command: as ``main``, and ends at once when all is done.

    Threads of native libraries may let go of Python objects a moment later than Python itself
    ends, which then aborts. So nothing waits for that: output is flushed, what was registered to be
    done at exit is done, and the process ends.
    """
    code: object = 0
    try:
        main()
    except SystemExit as exc:
        code = exc.code
    except BaseException:  # noqa: BLE001 - a bug is shown as Python would show it
        traceback.print_exc()
        code = FAILED
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what was printed last is lost
        code = code or FAILED
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
