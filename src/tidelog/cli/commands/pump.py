"""``tidelog pump``: any source into a topic, each event once."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli.output import Output, json_option
from tidelog.cli.pipeline_options import (
    DriverWatch,
    run_options,
    spark_of,
    traced_world,
    worker_options,
)
from tidelog.home import open_home

__all__ = ["pump"]


@click.command()
@click.argument("source", metavar="SOURCE")
@click.option("--topic", required=True, metavar="T", help="Where events go; it must be there.")
@click.option("--name", metavar="N", help="Default: from source and topic.")
@click.option("--follow/--once", default=False, help="Go on, or drain and end (default).")
@click.option("--key-field", default="", metavar="F", help="The JSON field that makes the key.")
@click.option("--id-field", default="", metavar="F", help="The JSON field that makes the id.")
@click.option("--type-field", default="", metavar="F", help="The JSON field that makes the type.")
@click.option("--time-field", default="", metavar="F", help="The JSON field that makes the time.")
@click.option("--transform", default="", metavar="M:F", help="From DataFrame to DataFrame.")
@click.option(
    "--partition",
    type=click.Choice(["key", "same"]),
    default="key",
    show_default=True,
    help="By key, or the number of the source partition.",
)
@click.option("--max-age", default="1s", show_default=True, metavar="D", help="While following.")
@click.option("--max-bytes", type=int, default=64_000_000, show_default=True, metavar="B")
@click.option("--accept-loss", is_flag=True, help="Go on where a source has lost events; recorded.")
@click.option("--take-over", is_flag=True, help="From a pump that runs: for upgrades.")
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where to begin: at the first event, or at the ends seen when the pump was created.",
)
@click.option("--shard", metavar="M/N", default="0/1", help="Drive one of N shares of partitions.")
@worker_options
@json_option
@click.pass_obj
def pump(home_text: str | None, output: Output, /, source: str, topic: str, **given: Any) -> None:
    """Copy the events of a source into a topic, each event once.

    Safe to kill, to repeat, and to run twice at once: it goes on where it was. An event of which a
    field cannot be taken is kept as it came, and a header `tidelog.untaken` says why.

    \b
    Examples:
      tidelog pump kafka://127.0.0.1:9092/clicks --topic clicks
      tidelog pump kinesis://orders?region=eu-west-1 --topic orders --follow --id-field order_id
      tidelog pump file:/var/log/orders --topic orders --no-spark
    """
    opened = open_home(home_text, world=traced_world())
    with opened as home, DriverWatch(output, f"pump {topic}", follows=given["follow"]) as watch:
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
        done = made.run(
            follow=given["follow"],
            spark=spark_of(given),
            start=given["start"],
            max_bytes=given["max_bytes"],
            max_age=given["max_age"],
            **run_options({**given, "flush_on_stop": True}, watch),
        )
        told = {"events": done.events, "left_out": done.left_out}
        output.record({"pump": made.name, "topic": topic, **told})
