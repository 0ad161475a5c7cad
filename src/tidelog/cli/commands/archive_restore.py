"""``tidelog archive restore``: events of an archive go back into a topic or into Kafka."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli.output import Output, counted, json_option
from tidelog.cli.pipeline_options import DriverWatch, run_options, spark_of, worker_options
from tidelog.home import open_home

__all__ = ["restore"]


@click.command()
@click.argument("name")
@click.option("--to", required=True, metavar="URL", help="topic:NAME, kafka://host:9092/topic.")
@click.option(
    "--generation", type=int, metavar="N", help="Whose files to read. Default: the promoted one."
)
@click.option(
    "--partition",
    type=click.Choice(["same", "key"]),
    help="Keep each event's partition (default), or choose it by key.",
)
@worker_options
@json_option
@click.pass_obj
def restore(home_text: str | None, output: Output, /, name: str, to: str, **given: Any) -> None:
    """Bring the events of an archive into a topic or into Kafka, each of them once.

    The target must be there. Safe to kill, to repeat, and to run twice at once: a restore goes on
    where it was, and brings what the archive has got since. Events that were erased from a topic
    are left out, and counted, unless their time is later than that. Dead letters that no topic
    accepts stay in the archive, and are counted as dead.

    \b
    Examples:
      tidelog archive restore daily --to topic:orders-again
      tidelog archive restore daily --to topic:wide --partition key
      tidelog archive restore raw --to kafka://127.0.0.1:9092/clicks --no-spark
    """
    with open_home(home_text) as home, DriverWatch(output, f"restore {name}") as watch:
        done = home.archives.get(name).restore(
            to,
            generation=given["generation"],
            partition=given["partition"],
            spark=spark_of(given),
            **run_options(given, watch),
        )
        if done.dead:
            watch.tell(
                f"archive `{name}`: no topic accepts {counted(done.dead, 'dead letter')}, which "
                f"stay in the archive: run `tidelog archive dead {name}`"
            )
        told = {"events": done.events, "left_out": done.left_out, "dead": done.dead}
        output.record({"archive": name, "to": to, **told})
