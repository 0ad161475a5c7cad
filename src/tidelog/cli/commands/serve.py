"""``tidelog serve``: the home over HTTP."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tidelog.cli.output import Output, json_option
from tidelog.context import NoSpans
from tidelog.errors import InvalidError
from tidelog.home import World, open_home

__all__ = ["serve"]

_SWITCH_S = 0.0005  # in which a flush gets its turn beside requests; Python's own 5 ms add up


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=int, default=8480, show_default=True, help="The port; 0 for one that is free."
)
@click.option(
    "--socket",
    type=click.Path(),
    metavar="FILE",
    help="Listen on this unix socket in place of a port, for a proxy in its group (mode 0660). "
    "Implies --behind-proxy.",
)
@click.option(
    "--topic-default", metavar="T", help="The topic of pixels that name none in their query."
)
@click.option(
    "--public-pixel",
    "public_pixels",
    multiple=True,
    metavar="T",
    help="Let anybody send pixels to this topic, without a token; may be repeated.",
)
@click.option(
    "--rate",
    type=float,
    metavar="N",
    help="Requests a second of one token or address; beyond that it gets 429. 0: no limit. "
    "Default: 1000, and no limit while the server is open.",
)
@click.option(
    "--body-max",
    "body_bytes_max",
    type=int,
    default=8 << 20,
    show_default=True,
    metavar="BYTES",
    help="The largest body; one event may have event_bytes_max of it.",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="Believe X-Forwarded-For: rates count the address that the proxy names, and pixels "
    "keep it. Only where nobody but the proxy can reach the port.",
)
@click.option(
    "--tls-cert",
    type=click.Path(dir_okay=False),
    help="Speak HTTPS with this certificate (PEM, with its chain); read again when it changes.",
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

    Appends are answered when they are durable. Without tokens it listens on loopback alone, and
    is open to whoever is on this machine; see `tidelog token`. /openapi.json says what it takes.

    \b
    Examples:
      tidelog serve
      tidelog serve --port 9000 --topic-default clicks
      tidelog serve --host 0.0.0.0 --rate 100 --public-pixel clicks
    """
    try:
        from tidelog.server.http.telemetry import open_telemetry
        from tidelog.server.options import ServeOptions
        from tidelog.server.run import serve as run
    except ModuleNotFoundError as exc:
        raise InvalidError("the server is not installed: pip install 'tidelog[serve]'") from exc
    options = ServeOptions(**given)
    telemetry = open_telemetry()
    world = World(
        environ=os.environ,  # noqa: TID251 - here the world comes in
        spans=telemetry or NoSpans(),
    )

    def listening(url: str, is_open: bool) -> None:
        output.say(f"Listening on {url}")
        output.say("Open to all on this machine." if is_open else "Asks for tokens.")
        if output.as_json:
            output.record({"url": url, "open": is_open, "pid": os.getpid()})

    sys.setswitchinterval(_SWITCH_S)
    with open_home(home_text, world=world) as home:
        run(home, options, listening, telemetry)
