# ruff: noqa: PLC0415 - the server's libraries may not be there
"""``tidelog serve`` and ``tidelog load``: a home over HTTP, and sample traffic to size a server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from tidelog.api.load_test import LoadPlan, LoadReport, load_test
from tidelog.cli.output import Output, json_option
from tidelog.cli.terminal import open_home
from tidelog.errors import FailedError, InvalidError, NotFoundError
from tidelog.model import defaults
from tidelog.model.times import duration_ms

__all__ = ["serve"]

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
    type=int,
    default=defaults.BODY_BYTES,
    show_default=True,
    metavar="BYTES",
    help="The largest request body. One event may have event_bytes_max of it.",
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
