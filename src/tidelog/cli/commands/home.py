"""``tidelog init``, ``tidelog home``, ``tidelog doctor`` and ``tidelog completion``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click
import msgspec
from click.shell_completion import get_completion_class

from tidelog.adoption import adopt_home
from tidelog.api.doctor import diagnose
from tidelog.cli.output import FAILED, CommandGroup, Output, json_option
from tidelog.cli.terminal import open_home
from tidelog.errors import AlreadyExistsError, InvalidError
from tidelog.home import Home, create_home
from tidelog.settings import FILE_NAME, Settings, config_string, load_settings

__all__ = ["completion", "doctor", "home", "init"]


@click.command()
@click.option(
    "--store", metavar="URL", help="Where objects are stored: a folder, s3://, gs:// or az://."
)
@click.option(
    "--catalog", metavar="URL", help="Where rows are stored: a SQLite file, dynamodb:// or cql://."
)
@click.option(
    "--create-catalog",
    is_flag=True,
    help="Create the DynamoDB or CQL table if it is missing. A SQLite file is always created.",
)
@click.option(
    "--save", is_flag=True, help=f"Write {FILE_NAME} here, so that commands find the home."
)
@json_option
@click.pass_obj
def init(
    home_text: str | None,
    output: Output,
    store: str | None,
    catalog: str | None,
    create_catalog: bool,
    save: bool,
) -> None:
    """Create a home, or finish and check an existing one.

    It first tests the store: of two racing creates, exactly one must win. Running it again changes
    nothing.

    \b
    Examples:
      tidelog init
      tidelog --home /srv/events init
      tidelog init --store s3://bucket/events --catalog dynamodb://tidelog --create-catalog --save
    """
    settings = _settings(home_text, store, catalog)
    file = Path.cwd() / FILE_NAME
    if save and file.exists():
        raise AlreadyExistsError(f"`{file}`: exists already: edit it, or leave out --save")
    local = "://" not in settings.catalog or settings.catalog.startswith("sqlite:")
    made, is_new = create_home(settings, create_catalog=create_catalog or local)
    with made:
        if save:
            text = (msgspec.json.encode(url).decode() for url in (made.store.url, made.catalog.url))
            file.write_text("store = {}\ncatalog = {}\n".format(*text))
        output.say("Created a new home." if is_new else "The home already exists.")
        output.record(_describe(made) | ({"new": is_new} if output.as_json else {}))
        if not save and not settings.is_default and settings.found_in == "arguments":
            output.say(f"\nTo use it:  export TIDELOG_HOME='{made.config}'")


@click.group(cls=CommandGroup, invoke_without_command=True)
@json_option
@click.pass_context
def home(context: click.Context, output: Output) -> None:
    """Show where the home is and the config string that opens it.

    \b
    Examples:
      tidelog home
      tidelog home --json
      tidelog --home "$CONFIG" home
    """
    if context.invoked_subcommand is None:
        with open_home(context.obj) as opened:
            output.record(_describe(opened))


@home.command()
@click.option("--moved", is_flag=True, help="Keep the id, because the original no longer exists.")
@json_option
@click.pass_obj
def adopt(home_text: str | None, output: Output, moved: bool) -> None:
    """Give a copied home an identity of its own.

    A copy reads everything and writes inside itself, but nothing outside until it is adopted. Then
    it has a new id. What it inherited outside stays the original's: archives in other stores are
    read-only; pipelines, tables, playbacks and notifications to the outside do not run.

    With --moved the home keeps its id and all that is outside. Use it after a move, or after a
    restore to another place when the original no longer exists.

    A catalog that was restored from before the adoption gets the home's id back. Run `tidelog
    verify` then: it names what the catalog does not know.

    \b
    Examples:
      tidelog home adopt
      tidelog --home /srv/new home adopt --moved
    """
    done = adopt_home(home_text, moved=moved)
    if output.as_json:
        output.record(dataclasses.asdict(done))
        return
    if done.id != done.was:
        output.say(f"The copy has an id of its own: {done.id}. It was {done.was}.")
    else:
        output.say(f"The home is {done.id}, in its place.")
    for line in done.detached:
        output.say(f"Detached {line}")


def _settings(home_text: str | None, store: str | None, catalog: str | None) -> Settings:
    if store is None and catalog is None:
        return load_settings(home_text, os.environ, Path.cwd())  # noqa: TID251
    if home_text is not None:
        raise InvalidError(
            "init: --home and --store or --catalog contradict: give one or the other"
        )
    if store is None or catalog is None:
        missing = "--store" if store is None else "--catalog"
        raise InvalidError(f"init: {missing} is missing: give both --store and --catalog")
    both = config_string(store, catalog)
    given = load_settings(both, os.environ, Path.cwd())  # noqa: TID251
    return dataclasses.replace(given, found_in="arguments")


def _describe(opened: Home) -> dict[str, str]:
    return {
        "config": opened.config,
        "id": opened.id,
        "store": opened.store.url,
        "catalog": opened.catalog.url,
        "found_in": opened.settings.found_in,
        **({"copy_of": opened.copy_of} if opened.copy_of else {}),
    }


@click.command()
@json_option
@click.pass_obj
def doctor(home_text: str | None, output: Output) -> None:
    """Check the machine and the home, and say what to do.

    Looks at Python, Java, limits, extras, the store, the catalog, the clock and the disk. Creates
    no home. Exit code 1 if there is a problem; a warning does not change it.

    \b
    Examples:
      tidelog doctor
      tidelog --home ./elsewhere doctor --json
    """
    checks = diagnose(home_text)
    if output.as_json:
        output.records((), map(dataclasses.asdict, checks))
    else:
        output.records(("name", "state", "found"), map(dataclasses.asdict, checks))
        for check in checks:
            for do in filter(None, check.do.split("; ")):
                output.say(f"{check.name}: {do}")
    if any(check.state == "problem" for check in checks):
        sys.exit(FAILED)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and options in a shell.

    \b
    Examples:
      eval "$(tidelog completion bash)"             in ~/.bashrc
      eval "$(tidelog completion zsh)"              in ~/.zshrc
      tidelog completion fish > ~/.config/fish/completions/tidelog.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise InvalidError(f"shell `{shell}`: this version of click cannot complete for it")
    program = click.get_current_context().find_root().command
    click.echo(kind(program, {}, "tidelog", "_TIDELOG_COMPLETE").source())
