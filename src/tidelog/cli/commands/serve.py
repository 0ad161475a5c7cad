# ruff: noqa: PLC0415 - the server's libraries may not be there
"""``tidelog serve``, ``load`` and ``token``: a home over HTTP, its users, and sample traffic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.api.load_test import LoadPlan, LoadReport, load_test
from tidelog.cli.output import CommandGroup, Output, Size, echo_aside, json_option
from tidelog.cli.terminal import open_home
from tidelog.errors import FailedError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model import defaults
from tidelog.model.address import nearest
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms
from tidelog.model.token import ALL_TOPICS, SCOPES, Grant, Token

__all__ = [
    "serve",
    "token",
]

_SWITCH_S = 0.0005  # in which a flush gets its turn beside requests; Python's own 5 ms add up


@click.command()
@click.option(
    "--host", default=defaults.SERVE_HOST, show_default=True, help="The address to listen on."
)
@click.option(
    "--port",
    type=int,
    default=defaults.SERVE_PORT,
    show_default=True,
    help="The port; 0 picks a free one.",
)
@click.option(
    "--socket",
    type=click.Path(),
    metavar="FILE",
    help="Listen on this unix socket (mode 0660) instead of a port, for a proxy in its group. "
    "Implies --behind-proxy.",
)
@click.option("--topic-default", metavar="T", help="The topic of pixels whose query names none.")
@click.option(
    "--public-pixel",
    "public_pixels",
    multiple=True,
    metavar="T",
    help="Accept pixels for this topic without a token. Repeatable.",
)
@click.option(
    "--forward",
    multiple=True,
    metavar="NAME=URL",
    help="Send events of this name to kafka://host:9092/TOPIC or kinesis://STREAM instead of a "
    "topic. Repeatable.",
)
@click.option(
    "--keep-header",
    "keep_headers",
    multiple=True,
    metavar="NAME",
    help="Store this header of pixels, besides user-agent, referer and accept-language. "
    "Repeatable.",
)
@click.option("--keep-request", is_flag=True, help="Store the method and the path of pixels.")
@click.option(
    "--rate",
    type=float,
    metavar="N",
    help="Limit on requests per second of one token or address; 0 switches it off. Beyond it the "
    "server answers 429. [default: 1000; no limit while the server is open]",
)
@click.option(
    "--body-max",
    "body_bytes_max",
    type=Size(),
    default=defaults.BODY_BYTES,
    metavar="SIZE",
    help="The largest request body. One event may have event_bytes_max of it. [default: 8MiB]",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="Trust X-Forwarded-For for rate limits and pixels. Use it only if the proxy alone can "
    "reach the port.",
)
@click.option(
    "--tls-cert",
    type=click.Path(dir_okay=False),
    help="Serve HTTPS with this certificate (PEM, with its chain). Reloaded when it changes.",
)
@click.option("--tls-key", type=click.Path(dir_okay=False), help="The key of --tls-cert (PEM).")
@click.option(
    "--access-log",
    metavar="FILE",
    help="Append a JSON line for each request to this file; - for standard error.",
)
@click.option(
    "--audit-reads",
    is_flag=True,
    help="Count reads in the home's audit: a record each minute by token, topic and operation.",
)
@json_option
@click.pass_obj
def serve(home_text: str | None, output: Output, /, **given: Any) -> None:
    """Serve the HTTP API and the console until Ctrl-C.

    A success response means that the events are durable. Without tokens it listens on loopback
    only, and every user of this machine has access; see `tidelog token`. The page /docs
    shows the API.

    \b
    Examples:
      tidelog serve
      tidelog serve --port 9000 --topic-default clicks
      tidelog serve --host 0.0.0.0 --rate 100 --public-pixel clicks
      tidelog serve --forward 'clicks=kinesis://clicks?region=eu-west-1'
    """
    try:
        from tidelog.server.options import ServeOptions
        from tidelog.server.run import serve as run
    except ModuleNotFoundError as exc:
        raise InvalidError("the server is not installed: pip install 'tidelog[serve]'") from exc
    options = ServeOptions(**given)

    def listening(url: str, is_open: bool) -> None:
        output.say(f"Listening on {url}")
        output.say(
            "No token is needed on this machine until you create one: `tidelog token create`."
            if is_open
            else "Requests need a token: `tidelog token create`."
        )
        output.say(f"Console: {url}/   API: {url}/docs")
        if output.as_json:
            output.record({"url": url, "open": is_open, "pid": os.getpid()})

    sys.setswitchinterval(_SWITCH_S)
    with open_home(home_text) as home:
        run(home, options, listening)


@click.command()
@click.argument("url")
@click.option(
    "--rate",
    type=float,
    default=0.0,
    metavar="N",
    help="Requests per second. Latency then counts from the time each was due. [default: as fast "
    "as the server answers]",
)
@click.option(
    "--for", "duration", default="30s", show_default=True, metavar="D", help="How long to send."
)
@click.option(
    "--pixel/--post", default=False, help="Send pixels, or single events. [default: events]"
)
@click.option("--topic", metavar="T", help="The topic, if the URL has no path.")
@click.option(
    "--connections",
    type=int,
    default=16,
    show_default=True,
    metavar="C",
    help="The number of connections, each with one request at a time.",
)
@click.option(
    "--token", metavar="TOKEN", help="A token with the append scope; @FILE reads it from a file."
)
@json_option
def load(output: Output, /, url: str, duration: str, token: str | None, **given: Any) -> None:
    """Send sample traffic to a server and show its latency.

    The events are stored, so use a separate topic. Exit code 1 if half of the requests or more
    fail.

    \b
    Examples:
      tidelog load http://127.0.0.1:8480 --topic trial --for 10s
      tidelog load http://127.0.0.1:8480 --topic trial --rate 500 --pixel
      tidelog load https://events.example.com/track/trial.gif --connections 100
      tidelog load http://127.0.0.1:8480 --topic trial --token @token.txt
    """
    plan = LoadPlan(url, duration_ms(duration) / 1000, token=_token(token), **given)
    report = load_test(plan, _tell)
    values = _values(report)
    if output.as_json:
        output.record(values | {"errors": dict(report.errors)})
    else:
        told = ", ".join(f"{what}: {count}" for what, count in report.errors.most_common())
        output.record(values | {"errors": told or "none"})
    failed = report.errors.total()
    if failed >= report.answered:
        do = "see the errors above"
        if "401" in report.errors:
            do = "the server asks for a token that may write: give --token"
        told = f"{failed} of {failed + report.answered} requests to `{url}` failed"
        raise FailedError(f"load: {told}: {do}", answered=report.answered, failed=failed)


def _values(report: LoadReport) -> dict[str, Any]:
    latencies = report.latencies
    values: dict[str, Any] = {
        "requests": report.answered,
        "seconds": round(report.seconds, 1),
        "per_s": round(report.per_s, 1),
    }
    for share in (50, 90, 99):
        values[f"p{share}_ms"] = round(latencies.quantile(share / 100) * 1000, 2)
    return values | {"max_ms": round(latencies.most_s * 1000, 2)}


def _tell(report: LoadReport) -> None:
    """Each second, for a person who waits."""
    if sys.stderr.isatty():
        values = _values(report)
        errors = report.errors.total()
        click.echo(
            f"\r{values['seconds']:6.0f} s  {values['per_s']:9.1f} requests/s  "
            f"p99 {values['p99_ms']:8.2f} ms  {errors} errors ",
            err=True,
            nl=False,
        )


def _token(text: str | None) -> str | None:
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise NotFoundError(f"token file `{text[1:]}`: cannot be read: {exc}") from exc


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
        _warn_unmatched(home, grants)
        output.say("Keep the token: it cannot be shown again.")
        if len(home.tokens.list()) == 1:
            output.say("It is the first one: running servers require tokens within 6 seconds.")


def _warn_unmatched(home: Home, grants: Iterable[Grant]) -> None:
    """Warns of topics that do not exist: the name may be mistyped, or the topic created later."""
    names = [each.name for each in home.topics()]
    for grant in grants:
        if grant.topics != ALL_TOPICS and not any(
            grant.allows(grant.scope, name) for name in names
        ):
            echo_aside(
                f"warning: no topic matches `{grant.topics}`{nearest(grant.topics, names)}: the "
                f"token cannot {grant.scope} until there is one"
            )


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
        none = "There are no tokens yet: `tidelog token create` creates one."
        output.records(("id", "scopes", "label", "created", "expires", "used"), rows, none)


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
