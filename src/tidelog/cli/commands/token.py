"""``tidelog token``: who may use the server."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli.output import Output, json_option
from tidelog.coordination.tokens import create_token, list_tokens, revoke_token
from tidelog.home import open_home
from tidelog.model.event import to_iso
from tidelog.model.token import Scope, Token

__all__ = ["token"]


@click.group()
def token() -> None:
    """Make, list and revoke tokens of the server.

    A home with a token is closed to requests without one, on loopback too.

    \b
    Examples:
      tidelog token create --write --label web
      tidelog token list
      tidelog token revoke 3f1c0a5b9e77
    """


@token.command()
@click.option("--read", is_flag=True, help="It may read topics, events and metrics.")
@click.option("--write", is_flag=True, help="It may append events.")
@click.option("--label", default="", metavar="L", help="What it is for, for `token list`.")
@json_option
@click.pass_obj
def create(home_text: str | None, output: Output, read: bool, write: bool, label: str) -> None:
    """Make a token, and print it: this once, as the home keeps only its hash.

    \b
    Examples:
      tidelog token create --write --label web
      tidelog token create --read --write --json
    """
    scopes: list[Scope] = []
    if read:
        scopes.append("read")
    if write:
        scopes.append("write")
    with open_home(home_text) as home:
        made, text = create_token(home.context, scopes, label)
        output.record({**_row(made, output), "token": text})
        output.say("Keep the token: nobody can show it again.")
        if len(list_tokens(home.context)) == 1:
            output.say("It is the first: running servers ask for a token from now on.")


@token.command(name="list")
@json_option
@click.pass_obj
def list_(home_text: str | None, output: Output) -> None:
    """List all tokens, without what they are used by.

    \b
    Examples:
      tidelog token list
      tidelog token list --json
    """
    with open_home(home_text) as home:
        rows = [_row(each, output) for each in list_tokens(home.context)]
        output.records(("id", "scopes", "label", "created"), rows)


@token.command()
@click.argument("token_id", metavar="ID")
@json_option
@click.pass_obj
def revoke(home_text: str | None, output: Output, token_id: str) -> None:
    """Revoke a token: running servers refuse it within seconds.

    \b
    Examples:
      tidelog token revoke 3f1c0a5b9e77
    """
    with open_home(home_text) as home:
        gone = revoke_token(home.context, token_id)
        output.say(f"Revoked token `{gone.id}`.")
        if output.as_json:
            output.record({"id": gone.id, "revoked": True})
        if not list_tokens(home.context):
            output.say("It was the last: servers on loopback are open to all on their machine.")


def _row(found: Token, output: Output) -> dict[str, Any]:
    return {
        "id": found.id,
        "scopes": list(found.scopes) if output.as_json else ", ".join(found.scopes),
        "label": found.label or None,
        "created": to_iso(found.created_ms),
    }
