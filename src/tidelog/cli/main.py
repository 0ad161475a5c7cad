"""The ``tidelog`` command: its groups, and what happens when a command fails."""

from __future__ import annotations

import os
import sys

import click

from tidelog import __version__
from tidelog.cli.amend import audit, delete, get, update
from tidelog.cli.archive import archive
from tidelog.cli.compile import compile_
from tidelog.cli.consume import consume
from tidelog.cli.demo import demo
from tidelog.cli.exit_codes import FAILED, INTERRUPTED, exit_code
from tidelog.cli.follow import follow
from tidelog.cli.home import home, init
from tidelog.cli.load import load
from tidelog.cli.output import print_error
from tidelog.cli.pipeline import pipeline
from tidelog.cli.playback import playback
from tidelog.cli.produce import produce
from tidelog.cli.pump import pump
from tidelog.cli.replay import journals, replay
from tidelog.cli.scribe import scribe
from tidelog.cli.serve import serve
from tidelog.cli.token import token
from tidelog.cli.topic import topic
from tidelog.cli.traffic import sample_traffic
from tidelog.cli.up import up
from tidelog.cli.upkeep import lag, sweep, trim, verify
from tidelog.errors import TidelogError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--home",
    "home_text",
    metavar="HOME",
    help="The home to work on: a folder, a tidelog.toml, or a config string "
    "(tidelog:?store=…&catalog=…). Default: TIDELOG_HOME, else what tidelog.toml or "
    "TIDELOG_STORE and TIDELOG_CATALOG say, else ./tidelog-data, made on first use.",
)
@click.version_option(__version__, "-V", "--version", prog_name="tidelog")
@click.pass_context
def cli(context: click.Context, home_text: str | None) -> None:
    """An event log and archive that lives on object storage.

    \b
    Examples:
      tidelog topic create orders             in ./tidelog-data, made on first use
      tidelog produce orders orders.txt       append the lines of a file
      tidelog consume orders --name billing   read them, and remember how far
      tidelog --home ./elsewhere init         make a home in another folder
      tidelog demo                            see it work, in a folder of its own
    """
    context.obj = home_text


for command in (
    *(init, home, topic, produce, consume, playback, pump, pipeline),
    *(get, update, delete, audit, replay, journals, compile_, scribe),
    *(lag, trim, sweep, verify, archive, serve, token, load, demo, up, follow, sample_traffic),
):
    cli.add_command(command)


def main() -> None:
    """Run the command line; never shows a traceback for what a person can mend."""
    as_json = "--json" in sys.argv
    try:
        cli.main(prog_name="tidelog", standalone_mode=False)
    except click.ClickException as exc:
        exc.show()
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
