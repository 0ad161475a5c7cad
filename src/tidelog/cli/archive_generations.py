"""``tidelog archive``: backfill, promote and drop of generations, and flush."""

from __future__ import annotations

import functools
import sys
from typing import Any

import click
import msgspec

from tidelog.cli.driving import Watch, open_workers, worker_options
from tidelog.cli.exit_codes import FAILED
from tidelog.cli.making import making_of, making_options
from tidelog.cli.output import Output, json_option
from tidelog.home import open_home
from tidelog.model.archive import Archive
from tidelog.pipeline.archive import find_archive, open_pipeline
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.flush import request_flush, wait_until_done
from tidelog.pipeline.generations import begin_backfill, drop_generation
from tidelog.pipeline.generations import promote as promote_newest
from tidelog.pipeline.places import source_at
from tidelog.pipeline.policy import Policy
from tidelog.sources.base import waits

__all__ = ["backfill", "dead_share_option", "drop", "flush", "promote", "with_dead_share"]

dead_share_option = click.option(
    "--dead-share",
    type=float,
    metavar="S",
    help="For this run: the share of dead letters that does not stop it, 0 to 1.",
)


def with_dead_share(archive: Archive, share: float | None) -> Archive:
    """An archive that bears more dead letters, or fewer, as long as it is driven from here."""
    return archive if share is None else msgspec.structs.replace(archive, dead_share_max=share)


@click.command()
@click.argument("name")
@click.option(
    "--from",
    "source",
    metavar="URL",
    default="",
    help="Where to read: archive:BACKUP, or (default) the archive's own source.",
)
@making_options
@dead_share_option
@worker_options
@json_option
@click.pass_obj
def backfill(
    home_text: str | None, output: Output, /, name: str, source: str, **given: Any
) -> None:
    """Make a new generation of an archive beside the live one, with other settings if need be.

    What is not given stays as it is. Killed and run again with the same options, it goes on. When
    it has caught up, `tidelog archive promote` lets readers go over to it.

    \b
    Examples:
      tidelog archive backfill daily --parser json:created_at
      tidelog archive backfill daily --from archive:raw --granularity hour --master spark://host:7077
    """
    with open_home(home_text) as home:
        making = making_of(given, find_archive(home, name).making(), source)
        found, generation = begin_backfill(home, name, making)
        found = with_dead_share(found, given["dead_share"])
        pipeline = open_pipeline(home, found, open_workers(name, given), generation, given["rate"])
        with Watch(output, f"{name} g{generation}") as watch:
            how = Driving(
                policy=Policy(found.max_bytes, found.max_age_ms),
                stop=watch.stop,
                on_look=watch.look,
                on_cycle=watch.cycle,
            )
            events = Driver(home.log, pipeline, how).run()
        output.record({"archive": name, "generation": generation, "events": events})
        output.say(f"Next: tidelog archive promote {name}")


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Even if it is behind the present generation.")
@click.option("--keep", is_flag=True, help="Leave the old generation to the next sweep.")
@json_option
@click.pass_obj
def promote(home_text: str | None, output: Output, /, name: str, force: bool, keep: bool) -> None:
    """Let readers and drivers go over to the newest generation, and remove the old one.

    \b
    Examples:
      tidelog archive promote daily
      tidelog archive promote daily --keep
    """
    with open_home(home_text) as home:
        found = promote_newest(home, name, force=force, keep=keep)
        output.record(
            {
                "archive": name,
                "generation": found.generation,
                "folder": f"{found.store}/{found.folder()}",
            }
        )


@click.command()
@click.argument("name")
@click.argument("generation", type=int)
@json_option
@click.pass_obj
def drop(home_text: str | None, output: Output, /, name: str, generation: int) -> None:
    """Give up a generation that is being built, and remove its files.

    \b
    Examples:
      tidelog archive drop daily 2
    """
    with open_home(home_text) as home:
        drop_generation(home, name, generation)
        output.record({"archive": name, "dropped": generation})


@click.command()
@click.argument("name")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait.")
@json_option
@click.pass_obj
def flush(home_text: str | None, output: Output, /, name: str, timeout: float) -> None:
    """Have the driver that follows an archive lay down all that waits, now; and wait for it.

    \b
    Examples:
      tidelog archive flush daily
    """
    with open_home(home_text) as home:
        found = find_archive(home, name)
        source = source_at(home, found.source)
        bounds = source.bounds(source.partitions())
        ends = {each.text: held.end for each, held in bounds.items() if held.first != held.end}
        request_flush(home.log, found.pipeline())
        left = functools.partial(waits, source)
        behind = wait_until_done(home.log, found.pipeline(), ends, left, timeout)
        output.record({"archive": name, "flushed": not behind, "behind": len(behind)})
        if behind:
            output.say(
                f"{behind[0]} and perhaps others still wait: is a driver running? "
                f"Start one with `tidelog archive run {name} --follow`"
            )
            sys.exit(FAILED)
