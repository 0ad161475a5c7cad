"""``tidelog token``: who may use the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tidelog.cli.output import CommandGroup, Output, json_option
from tidelog.cli.terminal import open_home
from tidelog.model import defaults
from tidelog.model.event import to_iso
from tidelog.model.token import ALL_TOPICS, SCOPES, Grant, Token

__all__ = ["token"]

F = TypeVar("F", bound=Callable[..., Any])

_HELP = {
    "pixel": "Send pixels without choosing ids. Use only this scope in web pages.",
    "append": "Append events, also by the pixel.",
    "read": "Read topics and events; for all topics also metrics and the console.",
    "amend": "Replace the value of an event by its id.",
    "erase": "Delete events by their ids, or by key in the console.",
    "admin": "Do all of the above; for all topics also move cursors, play back, make tokens.",
}


@click.group(cls=CommandGroup)
def token() -> None:
    """Create, list, rotate and revoke the server's tokens.

    A home that has had a token is closed to requests without one, on loopback too, even after the
    last token is revoked.

    \b
    Examples:
      tidelog token create --append 'orders-*' --label web
      tidelog token create --pixel clicks
      tidelog token list
      tidelog token revoke 3f1c0a5b9e77
    """


def _scope_options(command: F) -> F:
    """Add one option for each scope: alone for all topics, or with a pattern."""
    for scope in reversed(SCOPES):
        command = click.option(
            f"--{scope}",
            is_flag=False,
            flag_value=ALL_TOPICS,
            metavar="[TOPICS]",
            help=_HELP[scope],
        )(command)
    return command


@token.command()
@_scope_options
@click.option("--label", default="", metavar="L", help="A label for `token list`.")
@click.option(
    "--expires", metavar="AGE", help="Expire after this time, such as 90d. [default: never]"
)
@json_option
@click.pass_obj
def create(
    home_text: str | None, output: Output, /, label: str, expires: str | None, **given: str | None
) -> None:
    """Create a token and print it once. The home keeps only its hash.

    Give at least one scope. A scope holds for all topics, or for those that TOPICS matches: the
    name of a topic, with * for any characters and ? for one.

    \b
    Examples:
      tidelog token create --append --label web
      tidelog token create --read 'orders-*' --append orders-web --expires 90d --json
    """
    grants = [Grant(scope, topics) for scope in SCOPES if (topics := given[scope]) is not None]
    with open_home(home_text) as home:
        made, text = home.tokens.create(grants, label=label, expires=expires)
        output.record({**_row(made, output), "token": text})
        output.say("Keep the token: it cannot be shown again.")
        if len(home.tokens.list()) == 1:
            output.say("It is the first one: running servers require tokens within 5 seconds.")


@token.command(name="list")
@json_option
@click.pass_obj
def list_(home_text: str | None, output: Output) -> None:
    """List all tokens without their texts, and when servers last admitted each, to the minute.

    \b
    Examples:
      tidelog token list
      tidelog token list --json
    """
    with open_home(home_text) as home:
        used = home.tokens.last_used()
        rows = []
        for each in home.tokens.list():
            at_ms = used.get(each.id)
            rows.append({**_row(each, output), "used": None if at_ms is None else to_iso(at_ms)})
        output.records(("id", "scopes", "label", "created", "expires", "used"), rows)


@token.command()
@click.argument("token_id", metavar="ID")
@click.option(
    "--overlap",
    default=defaults.ROTATION_OVERLAP,
    show_default=True,
    metavar="AGE",
    help="How long both tokens are valid.",
)
@json_option
@click.pass_obj
def rotate(home_text: str | None, output: Output, token_id: str, overlap: str) -> None:
    """Replace a token by one with the same scopes; the old one expires after the overlap.

    The new one has the same lifetime as the old one was created with, such as 90 days from now.

    \b
    Examples:
      tidelog token rotate 3f1c0a5b9e77
      tidelog token rotate 3f1c0a5b9e77 --overlap 10m
    """
    with open_home(home_text) as home:
        made, text = home.tokens.rotate(token_id, overlap)
        output.record({**_row(made, output), "token": text})
        output.say(
            "Keep the token: it cannot be shown again. "
            f"`{token_id}` expires in {overlap} or earlier."
        )


@token.command()
@click.argument("token_id", metavar="ID")
@json_option
@click.pass_obj
def revoke(home_text: str | None, output: Output, token_id: str) -> None:
    """Revoke a token: running servers refuse it within seconds, and end its tails.

    \b
    Examples:
      tidelog token revoke 3f1c0a5b9e77
    """
    with open_home(home_text) as home:
        gone = home.tokens.revoke(token_id)
        output.say(f"Revoked token `{gone.id}`.")
        if output.as_json:
            output.record({"id": gone.id, "revoked": True})
        if not home.tokens.list():
            output.say("It was the last: servers refuse all requests until you create another one.")


def _row(found: Token, output: Output) -> dict[str, Any]:
    scopes = list(map(str, found.grants))
    return {
        "id": found.id,
        "scopes": scopes if output.as_json else ", ".join(scopes),
        "label": found.label or None,
        "created": to_iso(found.created_ms),
        "expires": None if found.ends_ms is None else to_iso(found.ends_ms),
    }
