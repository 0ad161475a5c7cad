"""``tidelog archive``: create, run, list, status, manifest; other files have its other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidelog.api.archives import ArchiveHandle
from tidelog.cli.archive_options import format_of, format_options
from tidelog.cli.commands.archive_delete import audit, delete, erase
from tidelog.cli.commands.archive_generations import (
    backfill,
    dead_share_option,
    drop,
    flush,
    promote,
    rollback,
)
from tidelog.cli.commands.archive_look import cat, dead, find, verify
from tidelog.cli.commands.archive_restore import restore
from tidelog.cli.commands.archive_status import finalize, register, status
from tidelog.cli.metrics_file import AfterCycles
from tidelog.cli.output import Output, json_option
from tidelog.cli.pipeline_options import (
    DriverWatch,
    run_options,
    spark_of,
    worker_options,
)
from tidelog.cli.text import CommandGroup
from tidelog.home import open_home

__all__ = ["archive"]


@click.group(cls=CommandGroup)
def archive() -> None:
    """Write events to files that any engine can read, each event once.

    \b
    Examples:
      tidelog archive create daily --source topic:orders --kind partition --parser json:at
      tidelog archive run daily
      tidelog archive status daily
    """


@archive.command()
@click.argument("name")
@click.option("--source", required=True, metavar="URL", help="kafka://host:9092/topic, topic:NAME.")
@click.option(
    "--kind",
    type=click.Choice(["backup", "partition"]),
    default="backup",
    show_default=True,
    help="Every event as it is, or laid out by partition names.",
)
@click.option("--to", metavar="URL", help="Where it stands. Default: archives/NAME of the home.")
@format_options
@click.option(
    "--max-bytes",
    type=int,
    default=200_000_000,
    show_default=True,
    metavar="B",
    help="A file is laid down when so much waits for it,",
)
@click.option(
    "--max-age", default="1h", show_default=True, metavar="D", help="or when it waits so long."
)
@click.option(
    "--dead-share",
    type=float,
    default=0.1,
    show_default=True,
    metavar="S",
    help="More dead letters than this share of a range stop the archive: 0 to 1.",
)
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Begin at the first events of the source, or at the ends that it has now.",
)
@json_option
@click.pass_obj
def create(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Make an archive; its folder must be empty, and is never taken again.

    \b
    Examples:
      tidelog archive create raw --source kafka://127.0.0.1:9092/clicks
      tidelog archive create daily --source topic:orders --kind partition --parser json:at
      tidelog archive create hourly --source topic:orders --kind partition --parser timestamp \\
          --granularity hour
    """
    with open_home(home_text) as home:
        made = home.archives.create(
            name,
            source=given["source"],
            kind=given["kind"],
            to=given["to"],
            max_bytes=given["max_bytes"],
            max_age=given["max_age"],
            dead_share=given["dead_share"],
            start=given["start"],
            **format_of(given),
        )
        output.say(f"Made archive `{made.name}`.")
        limit = made.restore_limit()
        if limit:
            output.say(f"Note: {limit}.")
        output.record(_describe(made))


@archive.command()
@click.argument("name")
@click.option("--follow/--once", default=False, help="Go on by policy, or drain and end (default).")
@worker_options
@dead_share_option
@click.option("--accept-loss", is_flag=True, help="Go on where a source has lost events; recorded.")
@click.option("--take-over", is_flag=True, help="From a driver that runs: for upgrades.")
@click.option("--flush-on-stop", is_flag=True, help="Lay down what waits when told to stop.")
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    help="Change the start that `archive create` recorded; refused once the archive has begun.",
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep Prometheus text in this file, for a textfile collector.",
)
@click.option("--shard", metavar="M/N", default="0/1", help="Drive one of N shares of partitions.")
@json_option
@click.pass_obj
def run(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Bring an archive up to its source. Safe to kill, to repeat, and to run twice at once.

    A second driver stands by until the first one ends. Ctrl-C lets the cycle under way finish.

    \b
    Examples:
      tidelog archive run daily
      tidelog archive run daily --follow --master spark://host:7077
      tidelog archive run daily --follow --take-over
    """
    with open_home(home_text) as home, DriverWatch(output, name, follows=given["follow"]) as watch:
        archive = home.archives.get(name)
        after = AfterCycles(home, archive, given["metrics_file"])
        options = run_options(given, watch)
        options["on_cycle"] = lambda report: after.cycle(watch, report)
        options["on_outage"] = lambda error, wait_s: after.outage(watch, error, wait_s)
        options["on_error"] = lambda error: watch.tell(f"after the cycle: {error}")
        options["on_promote"] = lambda _: output.say(
            "A newer generation was promoted: going on with it."
        )
        done = archive.run(
            follow=given["follow"],
            spark=spark_of(given),
            start=given["start"],
            dead_share=given["dead_share"],
            **options,
        )
        after.finish()
        output.record({"archive": name, "events": done.events})


@archive.command("list")
@json_option
@click.pass_obj
def list_all(home_text: str | None, output: Output, /) -> None:
    """List archives.

    \b
    Examples:
      tidelog archive list
    """
    with open_home(home_text) as home:
        rows = [_describe(each) for each in home.archives.list()]
        output.records(("name", "kind", "source", "folder", "format", "state"), rows)


@archive.command()
@click.argument("name")
@json_option
@click.pass_obj
def manifest(home_text: str | None, output: Output, /, name: str) -> None:
    """List the files that count, with their events, offsets and checksums.

    \b
    Examples:
      tidelog archive manifest daily
      tidelog archive manifest daily --json
    """
    with open_home(home_text) as home:
        rows = (
            {
                "kind": file.kind,
                "file": file.path,
                "partition": file.partition,
                "events": file.events,
                "first_offset": file.first_offset,
                "last_offset": file.last_offset,
                "bytes": file.bytes,
                "crc32c": f"{file.crc32c:08x}",
            }
            for file in home.archives.get(name).files()
        )
        output.records(("kind", "events", "first_offset", "last_offset", "bytes", "file"), rows)


def _describe(handle: ArchiveHandle) -> dict[str, Any]:
    archive = handle.info
    return {
        "name": archive.name,
        "kind": archive.kind,
        "source": archive.source,
        "folder": f"{archive.store}/{archive.folder()}",
        "parser": archive.making().parser,
        "format": archive.making().format,
        "start": archive.start,
        "restorable": not handle.restore_limit(),
        "state": archive.state_name,
    }


for _command in (
    *(backfill, cat, dead, delete, drop, finalize, find, flush),
    *(promote, register, restore, rollback, status, verify, audit, erase),
):
    archive.add_command(_command)
