"""``tidelog up`` runs a whole system on a home; ``tidelog follow`` runs archives and pumps."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidelog.cli.commands.demo import DEMO_TOPICS, prepare, program
from tidelog.cli.output import FULL, Output, Size, counted, echo_aside, json_option, visible
from tidelog.cli.pipeline_options import spark_conf, spark_of, spark_options
from tidelog.cli.terminal import Interruption, open_home
from tidelog.coordination.jobs import SupervisedPart
from tidelog.errors import FailedError, InvalidError
from tidelog.maintenance.up_supervisor import UpSupervisor
from tidelog.model import defaults
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms

__all__ = ["up"]

_DEMO_MS = 8_000  # of sample traffic, if there is no terminal
_PASSED = ("socket", "topic_default", "rate", "body_max", "access_log", "tls_cert", "tls_key")
_FLAGS = ("behind_proxy", "audit_reads", "keep_request")
_REPEATED = ("public_pixel", "keep_header", "forward")
_DEMO_SCRIBE = ("--every", "15s", "--discard-older", "1m", "--older-than", "1m")
_STYLES = {"running": "green", "failed": "red", "standing by": "yellow", "stopped": "dim"}
_ERROR_MAX = 100  # characters of an error in the table; the whole line is above it


class _Up(click.Command):
    """A command whose help lists the server's options by their names alone."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        servers = (*_PASSED, *_FLAGS, *_REPEATED)
        own = [record for name, record in named.items() if record and name not in servers]
        with formatter.section("Options"):
            formatter.write_dl(own)
        passed = [record[0] for name in servers if (record := named[name])]
        with formatter.section("Options of the server, which `tidelog serve --help` explains"):
            formatter.write_text(", ".join(sorted(passed)))


@click.command(cls=_Up)
@click.option("--demo", is_flag=True, help="Add sample events and steady sample traffic.")
@click.option(
    "--host", default=defaults.SERVE_HOST, show_default=True, help="The address to listen on."
)
@click.option(
    "--port", type=int, help=f"The port; 0 picks a free one. [default: {defaults.SERVE_PORT}]"
)
@spark_options
@click.option("--for", "duration", metavar="D", help="Stop after this long, such as 30s or 5m.")
@click.option(
    "--grace",
    default="30s",
    show_default=True,
    metavar="D",
    help="How long running work may take to finish when stopping.",
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, resolve_path=True),
    help="Keep the scribe's Prometheus metrics in this file.",
)
@click.option("--behind-proxy", is_flag=True)
@click.option("--rate", type=float, metavar="N")
@click.option("--public-pixel", multiple=True, metavar="T")
@click.option("--forward", multiple=True, metavar="NAME=URL")
@click.option("--keep-header", multiple=True, metavar="NAME")
@click.option("--keep-request", is_flag=True)
@click.option("--body-max", type=Size(), metavar="SIZE")
@click.option("--socket", metavar="FILE")
@click.option("--topic-default", metavar="T")
@click.option("--audit-reads", is_flag=True)
@click.option("--access-log", metavar="FILE")
@click.option("--tls-cert", metavar="FILE")
@click.option("--tls-key", metavar="FILE")
@json_option
@click.pass_context
def up(context: click.Context, output: Output, /, **given: Any) -> None:
    """Run everything a home needs until Ctrl-C.

    This is the server with its console, the scribe, and one process that runs all archives and
    pumps and repairs notifications. A part that ends is restarted after growing waits. New archives
    and pumps are picked up. Several `up` processes on one home share the work. Archives and pumps
    share one Spark session, which starts when there is something to do; --no-spark is the light
    mode for small machines. With --demo it creates its own home unless one is given, uses Spark
    only with --master, and stops by itself if there is no terminal.

    \b
    Examples:
      tidelog up
      tidelog up --demo
      tidelog up --no-spark
      tidelog --home ./events up --port 9000 --master 'local[4]'
    """
    for_s = duration_ms(given["duration"]) / 1000 if given["duration"] else None
    grace_s = duration_ms(given["grace"]) / 1000
    home_text: str | None = context.obj
    port = defaults.SERVE_PORT if given["port"] is None else given["port"]
    if given["demo"]:
        home_text = _demo_home(home_text, output, _spark_flags(given))
        if for_s is None and not sys.stdout.isatty():
            for_s = _DEMO_MS / 1000
            output.say(f"No terminal: it stops by itself after {for_s:.0f} s (--for changes that).")
        if given["port"] is None and _is_taken(given["host"], port):
            port = 0
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=True), View(output) as view:
        if given["demo"]:
            prepare(home)
        supervisor = UpSupervisor(home.context, view, grace_s)
        for name, arguments in _programs(given, port):
            where = () if home_text is None else ("--home", home_text)
            child = (sys.executable, "-m", "tidelog", "--child-of", str(os.getpid()))
            supervisor.add(name, [*child, *where, *arguments, "--json"])
        supervisor.run(stop, for_s)
        if given["demo"]:
            done = [f"{part.name} {part.events:,}" for part in supervisor.parts() if part.events]
            view.close()
            view.say(f"\nEvents while it ran: {', '.join(done) or 'none'}")
            view.say("Everything is kept. To continue:")
            view.say(f"  {program()} --home {home_text} up --demo")


def _programs(given: dict[str, Any], port: int) -> list[tuple[str, list[str]]]:
    programs = [
        ("serve", ["serve", "--host", given["host"], "--port", str(port), *_of_server(given)]),
        ("archives and pumps", ["follow", *_spark_flags(given)]),
    ]
    figures = ["--metrics-file", given["metrics_file"]] if given["metrics_file"] else []
    rate = _DEMO_SCRIBE if given["demo"] else ()
    programs.append(("scribe", ["scribe", *rate, *figures]))
    if given["demo"]:
        programs.append(("sample traffic", ["sample-traffic"]))
    return programs


def _spark_flags(given: dict[str, Any]) -> list[str]:
    """The options about Spark for the programs."""
    is_light = given["demo"] and not given["master"]  # a demo starts at once
    flags = ["--no-spark"] if given["no_spark"] or is_light else []
    flags += ["--master", given["master"]] if given["master"] else []
    for each in given["confs"]:
        flags += ["--conf", each]
    return flags


def _of_server(given: dict[str, Any]) -> list[str]:
    """The options that are passed on to the server as they are."""
    passed = [f"--{name.replace('_', '-')}" for name in _FLAGS if given[name]]
    for name in _REPEATED:
        for value in given[name]:
            passed += [f"--{name.replace('_', '-')}", value]
    for name in _PASSED:
        if given[name] is not None:
            passed += [f"--{name.replace('_', '-')}", str(given[name])]
    return passed


def _demo_home(home_text: str | None, output: Output, spark: list[str]) -> str:
    """A home that has seen the demo; one of its own, unless a folder is given that is free."""
    if home_text is None:
        folder = Path(tempfile.mkdtemp(prefix="tidelog-demo-")) / "home"
    else:
        folder = Path(home_text)
        if (folder / "catalog.sqlite").exists():
            with open_home(home_text) as home:
                names = sorted(topic.name for topic in home.topics())
            if set(names) - set(DEMO_TOPICS):
                raise InvalidError(
                    f"up: --demo: home `{home_text}` has topics of its own ({', '.join(names)}): "
                    "give a folder that is free"
                )
            if "orders" in names:
                return home_text
    shown = [sys.executable, "-m", "tidelog", "--child-of", str(os.getpid()), "demo"]
    flags = ["--folder", str(folder), *spark, *(["--json"] if output.as_json else [])]
    if subprocess.run([*shown, *flags], check=False).returncode != 0:  # noqa: S603 - our own
        raise FailedError("up: --demo: the demo did not finish: its message is above")
    output.title("6. The whole system on this home, with sample traffic")
    return str(folder)


def _is_taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


@click.command()
@spark_options
@json_option
@click.pass_obj
def follow(home_text: str | None, output: Output, /, **given: Any) -> None:
    """Run every archive and pump of a home until Ctrl-C.

    New archives and pumps are picked up within seconds. All share one Spark session, which starts
    when there is something to archive. With --no-spark they run in this process, except those with
    a transform, which need Spark. It also sends notifications that a dead process left unsent.
    Several of them share the source partitions. `tidelog up` runs this beside the server.

    \b
    Examples:
      tidelog follow
      tidelog follow --master spark://host:7077
    """
    stop, lock = threading.Event(), threading.Lock()

    def report(part: SupervisedPart) -> None:
        with lock:
            if output.as_json:
                told = msgspec.to_builtins(part)
                output.record({"part": told.pop("name"), **told})
            else:
                echo_aside(_line(part))

    spark, conf = spark_of(given), spark_conf(given["confs"])
    sys.setswitchinterval(0.001)
    with open_home(home_text) as home, Interruption(stop, follows=True):
        home.follow(stop, spark=spark, spark_conf=conf, report=report)


def _line(part: SupervisedPart) -> str:
    parts = [to_iso(part.since_ms), part.name, part.state]
    if part.events is not None:
        parts.append(counted(part.events, "event"))
    if part.waiting:
        parts.append(f"{part.waiting:,} waiting")
    return "  ".join([*parts, part.error] if part.error else parts)


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    """Loses what a full disk refuses: the parts keep running."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise


class View:
    """Shows the parts of one ``tidelog up``: a live table on a terminal, else lines or JSON."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown: dict[str, tuple[str, str]] = {}  # state and error by part
        self._live: Live | None = None
        if not output.as_json and sys.stdout.isatty():
            self._live = Live(console=Console(highlight=False), refresh_per_second=4)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the table as it is; later lines come below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @_unless_full()
    def say(self, text: str) -> None:
        """A line for people."""
        if self._live is not None:
            self._live.console.print(visible(text, "\n\t"), markup=False, emoji=False)
        else:
            self._output.say(text)

    @_unless_full()
    def listening(self, url: str, is_open: bool) -> None:
        """The server has begun to listen."""
        where = url if url.startswith("unix:") else f"{url}/"
        if self._output.as_json:
            self._output.record({"console": where, "open": is_open})
        who = "open to all on this machine" if is_open else "asks for tokens"
        self.say(f"Console: {where} ({who})")

    @_unless_full()
    def complain(self, name: str, text: str) -> None:
        """What a part said on its standard error."""
        said = text if text.startswith(f"{name}: ") else f"{name}: {text}"
        if self._live is not None:
            self._live.console.print(visible(said), markup=False, emoji=False)
        else:
            echo_aside(said)

    @_unless_full()
    def changed(self, part: SupervisedPart, parts: Iterable[SupervisedPart]) -> None:
        """A part has changed; ``parts`` are all of them."""
        told = (part.state, part.error)
        is_news = self._shown.get(part.name) != told
        self._shown[part.name] = told
        if self._output.as_json:
            fields = msgspec.to_builtins(part)
            since = to_iso(fields.pop("since_ms"))
            self._output.record({"part": fields.pop("name"), "since": since, **fields})
        elif self._live is not None:
            self._live.update(_table(parts))
        elif is_news and part.state != "starting":
            self._output.say("  ".join(filter(None, (part.name, part.state, part.error))))


def _table(parts: Iterable[SupervisedPart]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("part", "state", "since", "restarts", "events", "waiting", "trouble"):
        table.add_column(name, justify="right" if name in ("events", "waiting") else "left")
    for part in parts:
        table.add_row(
            Text(visible(part.name)),
            Text(part.state, style=_STYLES.get(part.state, "")),
            to_iso(part.since_ms)[11:19],
            str(part.restarts),
            "" if part.events is None else f"{part.events:,}",
            "" if part.waiting is None else f"{part.waiting:,}",
            Text(visible(part.error[:_ERROR_MAX]), style="red"),
        )
    return table
