"""``tidelog pump``, ``pipeline`` and ``spark-env``: pipelines other than archives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.api.pipelines import PumpHandle
from tidelog.api.spark_workers import pack_environment
from tidelog.cli.output import CommandGroup, Output, Size, json_option, write_out
from tidelog.cli.pipeline_options import (
    DriverWatch,
    run_options,
    spark_of,
    worker_options,
)
from tidelog.cli.terminal import ask_first, open_home, yes_option
from tidelog.errors import NotFoundError
from tidelog.model import defaults
from tidelog.model.address import nearest
from tidelog.model.event import to_iso
from tidelog.public import PositionMove

__all__ = ["pipeline", "pump", "seek_options", "show_moves", "spark_env"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def pipeline() -> None:
    """List, show, move and delete pumps, streams and restores.

    \b
    Examples:
      tidelog pipeline list
      tidelog pipeline show pump.orders.0a1b2c3d4e5f6071
    """


@pipeline.command("list")
@click.option("--prometheus", is_flag=True, help="Print Prometheus metrics of all pipelines.")
@json_option
@click.pass_obj
def list_all(home_text: str | None, output: Output, /, prometheus: bool) -> None:
    """List pumps, streams and restores.

    The state is `failing` while a driver cannot read its source, or a part of it: `tidelog pipeline
    show` says why. left_out counts events that were erased from the target before they arrived.

    \b
    Examples:
      tidelog pipeline list --json
      tidelog pipeline list --prometheus
    """
    with open_home(home_text) as home:
        if prometheus:
            write_out(home.pumps.metrics().encode())
            return
        rows = [_described(each) for each in home.pumps.list(restores=True)]
    names = ("name", "source", "sink", "events", "left_out", "last_commit", "state")
    output.records(names, rows, "There are no pumps, streams or restores yet.")


@pipeline.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(home_text: str | None, output: Output, /, name: str) -> None:
    """Show the position of a pipeline in each partition, and why it fails there.

    The state of a source partition is `ended` after --accept-loss, if its source was deleted
    and created again.

    \b
    Examples:
      tidelog pipeline show pump.orders.0a1b2c3d4e5f6071
    """
    with open_home(home_text) as home:
        status = home.pumps.get(name).status(source=False)
        rows: list[dict[str, object]] = [
            {
                "partition": each.partition,
                "position": each.position,
                "events": each.events,
                "left_out": each.totals.left_out,
                "last_commit": _time(each.totals.committed_ms),
                "state": "failing" if each.error else "ended" if each.has_ended else "ready",
                "error": each.error or None,
            }
            for each in status.partitions
            if each.has_begun or each.error
        ]
        names = ("partition", "position", "events", "left_out", "last_commit", "state", "error")
        if status.error and not any(each.error for each in status.partitions):
            whole = dict.fromkeys(names) | {"state": "failing", "error": status.error}
            rows.insert(0, whole)
        output.records(names, rows)


def seek_options(command: _Command) -> _Command:
    """The arguments and options of ``archive seek`` and ``pipeline seek``."""
    for option in (
        json_option,
        yes_option,
        click.option("--why", default="", metavar="TEXT", help="The reason, for the audit."),
        click.option(
            "--partition",
            metavar="P",
            help="Move the position of this source partition only, such as orders/0. "
            "[default: all]",
        ),
        click.argument("to"),
        click.argument("name"),
    ):
        command = option(command)
    return command


def show_moves(output: Output, moves: Sequence[PositionMove]) -> None:
    """Print where positions are, where they go, and what that means."""
    rows = [dataclasses.asdict(move) for move in moves]
    output.records(("partition", "position", "to", "skipped", "again"), rows)


@pipeline.command()
@seek_options
@click.option("--again", is_flag=True, help="Bring events a second time, if TO is further back.")
@click.pass_obj
def seek(home_text: str | None, output: Output, /, name: str, to: str, **given: Any) -> None:
    """Move the position of a pump or a stream in its source.

    TO is earliest, latest, or a position as `tidelog pipeline show` prints it. The audit records
    each move. Shows what it would skip or bring again and asks, on a terminal. In scripts, pass
    --yes. A driver that runs drops the range under way: stop it first, and start it again.

    \b
    Examples:
      tidelog pipeline seek pump.orders.0a1b2c3d4e5f6071 latest --why "only new ones"
      tidelog pipeline seek pump.orders.0a1b2c3d4e5f6071 4711 --partition clicks/0 --again --yes
    """
    with open_home(home_text) as home:
        found = home.pumps.get(name)
        if not given["yes"]:
            show_moves(output, found.plan_seek(to, given["partition"]))
        ask_first(f"pipeline `{name}`", f"Move `{name}` to {to}?", given["yes"], "moving")
        how = {"again": given["again"], "why": given["why"]}
        show_moves(output, found.seek(to, given["partition"], **how))


@pipeline.command()
@click.argument("name")
@yes_option
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, name: str, yes: bool) -> None:
    """Delete a pipeline but not what it has written.

    Asks first on a terminal, and needs --yes elsewhere.

    \b
    Examples:
      tidelog pipeline delete pump.orders.0a1b2c3d4e5f6071 --yes
    """
    with open_home(home_text) as home:
        found = {each.name: each for each in home.pumps.list(restores=True)}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"pipeline `{name}`: not found{like}: nothing to delete")
        found[name].delete(dry_run=True)
        ask_first(f"pipeline `{name}`", f"Delete `{name}`? What it has written stays.", yes)
        found[name].delete()
        output.record({"deleted": name})


def _described(pump: PumpHandle) -> dict[str, object]:
    status = pump.status(source=False)
    return {
        "name": pump.name,
        "source": pump.info.source,
        "sink": pump.info.sink,
        "events": status.events,
        "left_out": status.left_out,
        "last_commit": _time(status.last_commit_ms),
        "state": "failing" if status.error else pump.info.state,
    }


def _time(committed_ms: int | None) -> str | None:
    return to_iso(committed_ms) if committed_ms else None


@click.command()
@click.argument("source", metavar="SOURCE")
@click.option("--topic", required=True, metavar="T", help="The target topic, which must exist.")
@click.option("--name", metavar="N", help="The pump's name. [default: made from source and topic]")
@click.option(
    "--follow/--once", default=False, help="Keep running, or stop when caught up. [default: stop]"
)
@click.option("--key-field", default="", metavar="F", help="The JSON field with the key.")
@click.option("--id-field", default="", metavar="F", help="The JSON field with the id.")
@click.option("--type-field", default="", metavar="F", help="The JSON field with the type.")
@click.option("--time-field", default="", metavar="F", help="The JSON field with the time.")
@click.option(
    "--transform",
    default="",
    metavar="M:F",
    help="A Python function, MODULE:NAME, that takes a DataFrame and returns one.",
)
@click.option(
    "--partition",
    type=click.Choice(["key", "same"]),
    default="key",
    show_default=True,
    help="Choose the partition by key, or keep the number of the source partition.",
)
@click.option(
    "--max-age",
    default=defaults.PUMP_BATCH_AGE,
    show_default=True,
    metavar="D",
    help="With --follow, how long an event may wait.",
)
@click.option(
    "--max-bytes",
    type=Size(),
    default=defaults.PUMP_BATCH_BYTES,
    metavar="SIZE",
    help="Write to the topic when this many bytes wait. [default: 64MB]",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Continue after events that the source has lost. The gap is recorded.",
)
@click.option("--take-over", is_flag=True, help="Stop running pumps and take over, for upgrades.")
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Begin at the first event, or at the ends seen when the pump was created.",
)
@worker_options
@json_option
@click.pass_obj
def pump(home_text: str | None, output: Output, /, source: str, topic: str, **given: Any) -> None:
    """Copy the events of a source into a topic, each event once.

    Safe to kill, to repeat, and to run twice at once: it resumes where it stopped. Any number of
    processes with --follow share the source partitions. An event
    whose field cannot be read is stored unchanged, with the reason in a header
    `tidelog.not_extracted`.

    \b
    Examples:
      tidelog pump kafka://127.0.0.1:9092/clicks --topic clicks
      tidelog pump kinesis://orders?region=eu-west-1 --topic orders --follow --id-field order_id
      tidelog pump file:/var/log/orders --topic orders --no-spark
    """
    watching = DriverWatch(output, f"pump {topic}", follows=given["follow"], omits="files")
    with open_home(home_text) as home, watching as watch:
        made = home.pumps.create(
            given["name"],
            source=source,
            topic=topic,
            transform=given["transform"],
            partition=given["partition"],
            key_field=given["key_field"],
            id_field=given["id_field"],
            type_field=given["type_field"],
            time_field=given["time_field"],
        )
        if given["follow"] and not output.as_json:
            watch.tell(f"{made.name}: following {made.info.source}. Ctrl-C ends this.")
        done = made.run(
            follow=given["follow"],
            spark=spark_of(given),
            start=given["start"],
            max_bytes=given["max_bytes"],
            max_age=given["max_age"],
            **run_options({**given, "flush_on_stop": True}, watch),
        )
        told = {"events": done.events, "left_out": done.left_out}
        always = ("pump", "topic", "events")
        output.record({"pump": made.name, "topic": topic, **told}, always=always)


@click.command("spark-env")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def spark_env(_: str | None, output: Output, /, file: Path) -> None:
    """Pack Tidelog for Spark executors that do not have it.

    FILE is the archive to write; its name ends with .tar.gz. Executors need the same version of
    Python. Pass the printed settings to Spark, or to commands that take --conf, and set the
    printed variable for the driver.

    \b
    Examples:
      tidelog spark-env tidelog-env.tar.gz
    """
    packed = pack_environment(file)
    output.record(
        {
            "file": str(packed.file),
            "bytes": packed.bytes,
            "packages": len(packed.packages),
            "python": packed.python,
            "conf": " ".join(f"--conf {name}={value}" for name, value in packed.settings.items()),
            "driver": f"PYTHONPATH={packed.driver_path}",
        }
    )
