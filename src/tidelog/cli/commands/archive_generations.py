"""``tidelog archive``: backfill, promote, rollback and drop of generations, and flush."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from tidelog.archive.archive import check_active, find_archive, open_pipeline
from tidelog.archive.damage import is_by_offset
from tidelog.archive.generations import begin_backfill, drop_generation
from tidelog.archive.generations import promote as promote_newest
from tidelog.archive.generations import rollback as roll_back
from tidelog.archive.restore import restore_limit
from tidelog.cli.archive_options import making_of, making_options
from tidelog.cli.output import FAILED, Output, json_option
from tidelog.cli.pipeline_options import DriverWatch, open_workers, worker_options
from tidelog.connectors.source import waits
from tidelog.errors import CorruptError
from tidelog.home import Home, open_home
from tidelog.model.archive import Archive
from tidelog.pipeline.base import Workers
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.endpoints import source_at
from tidelog.pipeline.policy import FilePolicy
from tidelog.pipeline.shard import request_flush, wait_until_done
from tidelog.pipeline.source_partitions import track

__all__ = [
    "backfill",
    "dead_share_option",
    "drop",
    "flush",
    "promote",
    "rollback",
    "with_dead_share",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

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
@click.option(
    "--start",
    type=click.Choice(["earliest"]),
    help="Begin at the first event that the source holds, be it before the archive's beginning. "
    "[default: where the archive begins]",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Leave out ranges that the source no longer has and whose files or manifests in the live "
    "generation are damaged. They are recorded as gaps. Reads these files twice.",
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
      tidelog archive backfill daily --from archive:raw --start earliest
    """
    with open_home(home_text) as home:
        making = making_of(given, find_archive(home.context, name).making(), source)
        making = msgspec.structs.replace(making, start=given["start"] or "")
        found, generation = begin_backfill(home.context, name, making)
        found = with_dead_share(found, given["dead_share"])
        workers, accept_loss = open_workers(name, given), given["accept_loss"]
        pipeline = open_pipeline(
            home.context, found, workers, generation, given["rate"], accept_loss
        )
        with DriverWatch(output, f"{name} g{generation}") as watch:
            how = DriverOptions(
                policy=FilePolicy(found.max_bytes, found.max_age_ms),
                accept_loss=accept_loss,
                stop=watch.stop,
                on_look=watch.look,
                on_cycle=watch.cycle,
            )
            try:
                events = Driver(home.context, pipeline, how).run()
            except CorruptError as exc:
                if not accept_loss and _is_own_damage(home, found, exc):
                    raise CorruptError(
                        f"{exc}; without a copy, leave out its range with `tidelog archive "
                        f"backfill {name} --accept-loss`",
                        **exc.context,
                    ) from exc
                raise
        output.record({"archive": name, "generation": generation, "events": events})
        limit = restore_limit(making)
        if limit:
            output.say(f"Note: {limit}.")
        output.say(f"Next: tidelog archive promote {name}")


def _is_own_damage(home: Home, archive: Archive, error: CorruptError) -> bool:
    """Whether it is in the live generation, which the one that is built can do without."""
    file, manifest = error.context.get("file", ""), error.context.get("manifest", "")
    if not is_by_offset(home.context, archive):
        return False
    return archive.pipeline() in str(manifest) or any(
        str(file).startswith(f"{folder}/")
        for folder in (archive.folder(archive.generation), archive.dead)
    )


def _switch_options(command: _Command) -> _Command:
    """The options of promote and rollback."""
    for option in (
        json_option,
        click.option("--conf", "confs", multiple=True, metavar="K=V", help="A setting of Spark."),
        click.option(
            "--master",
            metavar="URL",
            help="Spark master for a generation with a transform. [default: no Spark]",
        ),
        click.option(
            "--force",
            is_flag=True,
            help="Switch although it lacks events that the live generation has; status shows them.",
        ),
        click.argument("name"),
    ):
        command = option(command)
    return command


@click.command()
@_switch_options
@click.pass_obj
def promote(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Make the generation that was built the live one, and keep the old one.

    The new generation is brought up to the live one first. Promote refuses, and changes nothing, if
    it then lacks events that the live one has. `tidelog archive rollback` undoes a promote.

    \b
    Examples:
      tidelog archive promote daily
      tidelog archive promote daily --master local[*]
    """
    with open_home(home_text) as home:
        workers = _workers(name, given)
        found = promote_newest(home.context, name, force=given["force"], workers=workers)
        _tell_live(output, found)


@click.command()
@click.option("--to", "generation", type=int, metavar="N", help="Which generation, if several.")
@_switch_options
@click.pass_obj
def rollback(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Make the generation that was live before a promote the live one again.

    It first gets all events that came in since, from the source or from the live generation. The
    same test as for promote decides, and the other generation is kept.

    \b
    Examples:
      tidelog archive rollback daily
      tidelog archive rollback daily --to 1
    """
    with open_home(home_text) as home:
        found = roll_back(
            home.context,
            name,
            generation=given["generation"],
            force=given["force"],
            workers=_workers(name, given),
        )
        _tell_live(output, found)


@click.command()
@click.argument("name")
@click.argument("generation", type=int)
@click.option(
    "--force",
    is_flag=True,
    help="Delete events that neither the live generation nor the source has.",
)
@json_option
@click.pass_obj
def drop(home_text: str | None, output: Output, /, name: str, generation: int, force: bool) -> None:
    """Delete a generation that is being built or kept, with its files.

    \b
    Examples:
      tidelog archive drop daily 1
    """
    with open_home(home_text) as home:
        drop_generation(home.context, name, generation, force=force)
        output.record({"archive": name, "dropped": generation})


def _workers(name: str, given: dict[str, Any]) -> Workers:
    """Returns workers; with Spark only on request, since there is little left to read."""
    return open_workers(name, {**given, "no_spark": given["master"] is None})


def _tell_live(output: Output, found: Archive) -> None:
    kept = found.in_state("kept")
    output.record(
        {
            "archive": found.name,
            "generation": found.generation,
            "folder": f"{found.store}/{found.folder()}",
            "kept": kept,
        }
    )
    for number in kept:
        output.say(
            f"Generation {number} is kept: go back with `tidelog archive rollback {found.name}`, "
            f"or delete it with `tidelog archive drop {found.name} {number}`"
        )


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
        found = find_archive(home.context, name)
        check_active(found)
        source = source_at(home.context, found.source)
        track(home.context, found.pipeline(), source)
        bounds = source.bounds(source.partitions())
        ends = {each.text: held.end for each, held in bounds.items() if held.first != held.end}
        request_flush(home.context, found.pipeline())
        left = functools.partial(waits, source)
        behind = wait_until_done(home.context, found.pipeline(), ends, left, timeout)
        output.record({"archive": name, "flushed": not behind, "behind": len(behind)})
        if behind:
            output.say(
                f"{behind[0]} and perhaps others still wait: is a driver running? "
                f"Start one with `tidelog archive run {name} --follow`"
            )
            sys.exit(FAILED)
