"""``tidelog follow``: every archive and pump of a home, driven by one process."""

from __future__ import annotations

import sys
import threading
from typing import Any

import click
import msgspec

from tidelog.cli.interruption import Interruption
from tidelog.cli.output import Output, counted, echo_aside, json_option
from tidelog.cli.pipeline_options import spark_conf
from tidelog.coordination.supervisors import SupervisedPart
from tidelog.home import open_home
from tidelog.model.event import to_iso

__all__ = ["follow"]


@click.command()
@click.option("--master", metavar="URL", help="Spark master. Default: work in this process.")
@click.option(
    "--conf", "confs", multiple=True, metavar="K=V", help="A Spark setting; may be repeated."
)
@json_option
@click.pass_obj
def follow(home_text: str | None, output: Output, /, **given: Any) -> None:
    """Run every archive and pump of a home until Ctrl-C.

    What is made meanwhile is found within seconds. With --master all share one Spark session; a
    transform needs one. Notifications that a process left undone when it died are sent from here
    too. A second one stands by. `tidelog up` runs this beside the server.

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

    conf = spark_conf(given["confs"])
    sys.setswitchinterval(0.001)
    with open_home(home_text) as home, Interruption(stop, follows=True):
        home.follow(stop, spark=given["master"], spark_conf=conf, report=report)


def _line(part: SupervisedPart) -> str:
    parts = [to_iso(part.since_ms), part.name, part.state]
    if part.events is not None:
        parts.append(counted(part.events, "event"))
    if part.waiting:
        parts.append(f"{part.waiting:,} waiting")
    return "  ".join([*parts, part.error] if part.error else parts)
