"""``tidelog archive``: backfill, redo, promote, rollback, drop, flush, seek and restore."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import click

from tidelog.api.pipelines import RunResult
from tidelog.cli.commands.pipeline import seek_options, show_moves
from tidelog.cli.output import FAILED, Output, counted, json_option
from tidelog.cli.pipeline_options import (
    DriverWatch,
    format_of,
    new_format_options,
    run_options,
    spark_conf,
    spark_of,
    worker_options,
)
from tidelog.cli.terminal import ask_first, open_home, yes_option
from tidelog.model import defaults
from tidelog.model.archive import Archive

__all__ = [
    "backfill",
    "dead_share_option",
    "drop",
    "flush",
    "promote",
    "redo",
    "restore",
    "rollback",
    "seek",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

dead_share_option = click.option(
    "--dead-share",
    type=float,
    metavar="S",
    help="For this run, the share of dead letters to tolerate, 0 to 1.",
)


@click.command()
@click.argument("name")
@click.option(
    "--from",
    "source",
    metavar="URL",
    default="",
    help="Where to read, such as archive:BACKUP. [default: the archive's own source]",
)
@click.option(
    "--start",
    type=click.Choice(["earliest"]),
    help="Begin at the first event of the source, even before the archive's beginning. [default: "
    "where the archive begins]",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Skip ranges that the source no longer has and whose live files or manifests are "
    "damaged. Records them as gaps. Reads these files twice.",
)
@new_format_options
@dead_share_option
@worker_options
@json_option
@click.pass_obj
def backfill(
    home_text: str | None, output: Output, /, name: str, source: str, **given: Any
) -> None:
    """Build a new generation of an archive beside the live one.

    Settings that are not given stay as they are. If it is killed, run it again with the same
    options to resume. When it has caught up, `tidelog archive promote` makes it the live one.

    Its parser reads all events. Dead letters that another parser has replayed are dead letters
    again in the new generation: replay them there before you promote it.

    \b
    Examples:
      tidelog archive backfill daily --parser json:created_at
      tidelog archive backfill daily --from archive:raw --granularity hour --master spark://host:7077
      tidelog archive backfill daily --from archive:raw --start earliest
    """
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        generation = archive.info.building or archive.info.newest + 1
        with DriverWatch(output, f"{name} g{generation}") as watch:
            done = archive.backfill(
                source=source,
                start=given["start"],
                spark=spark_of(given),
                dead_share=given["dead_share"],
                **format_of(given),
                **run_options(given, watch),
            )
        record = {"archive": name, "generation": done.generation, "events": done.events}
        output.record({**record, "dead": done.dead})
        limit = archive.restore_limit(done.generation)
        if limit:
            output.say(f"Note: {limit}.")
        _say_next(output, name, done)


@click.command()
@click.argument("name")
@click.option(
    "--date",
    "dates",
    multiple=True,
    metavar="DAY",
    help="A day of the archive's folders, such as 2026-11-15. Repeatable. [default: all]",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="A topic of the source. Repeatable. [default: all]",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    metavar="P",
    help="A partition of the source, such as clicks/0. Repeatable. [default: all]",
)
@click.option(
    "--parser", metavar="PARSER", help="How events name their folders. [default: as before]"
)
@click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="A function that changes events, with Spark. [default: as before]",
)
@dead_share_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@worker_options
@json_option
@click.pass_obj
def redo(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Write a part of an archive again, as a new generation, and copy the rest.

    For a parser or a transform that was wrong for a while. The part consists of the events that
    its files hold now. All other files are copied on the server. Shows what it would write and
    copy and asks, on a terminal. In scripts, pass --yes. If it is killed, run it again with the
    same options to resume. `tidelog archive promote` makes the new generation the live one.

    \b
    Examples:
      tidelog archive redo daily --date 2026-11-15 --parser json:created_at
      tidelog archive redo daily --date 2026-11-15 --date 2026-11-16 --yes
      tidelog archive redo daily --topic clicks --master local[*]
    """
    part = {"dates": given["dates"], "topics": given["topics"], "partitions": given["partitions"]}
    how = {"parser": given["parser"], "transform": given["transform"]}
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        plan = archive.plan_redo(**part, **how)
        output.say(
            f"Writes {counted(plan.events, 'event')} of {counted(plan.files, 'file')} again. "
            f"Copies {counted(plan.copied_files, 'file')} "
            f"({plan.copied_bytes:,} bytes) in the store, which on S3 are about "
            f"{counted(plan.requests, 'request')}."
        )
        ask_first(f"archive `{name}`", "Write this part again?", given["yes"], "writing")
        generation = archive.info.building or archive.info.newest + 1
        with DriverWatch(output, f"{name} g{generation}") as watch:
            done = archive.redo(
                **part,
                **how,
                spark=spark_of(given),
                dead_share=given["dead_share"],
                **run_options(given, watch),
            )
        output.record(
            {
                "archive": name,
                "generation": done.generation,
                "events": plan.events,
                "copied": plan.copied_files,
                "dead": done.dead,
            }
        )
        _say_next(output, name, done)


def _switch_options(command: _Command) -> _Command:
    """The options of promote and rollback."""
    for option in (
        json_option,
        click.option(
            "--conf",
            "confs",
            multiple=True,
            metavar="K=V",
            help="A Spark setting, NAME=VALUE. Repeatable.",
        ),
        click.option(
            "--master",
            metavar="URL",
            help="The Spark master for a generation with a transform. [default: no Spark]",
        ),
        click.option(
            "--force",
            is_flag=True,
            help="Switch even if it lacks events of the live generation. Status lists them.",
        ),
        click.argument("name"),
    ):
        command = option(command)
    return command


@click.command()
@_switch_options
@click.pass_obj
def promote(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Make the new generation the live one, and keep the old one.

    The new generation first catches up with the live one. Promote refuses, and changes nothing, if
    it then lacks events of the live one. `tidelog archive rollback` undoes a promote.

    \b
    Examples:
      tidelog archive promote daily
      tidelog archive promote daily --master local[*]
    """
    with open_home(home_text) as home:
        found = home.archives.get(name).promote(**_switch(given))
        _tell_live(output, found)


@click.command()
@click.option(
    "--to",
    "generation",
    type=int,
    metavar="N",
    help="The generation to go back to, if there are several.",
)
@_switch_options
@click.pass_obj
def rollback(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Undo a promote: make the earlier generation the live one again.

    It first receives all later events, from the source or from the live generation. It is refused
    if it would lack events, as a promote is. The other generation is kept.

    \b
    Examples:
      tidelog archive rollback daily
      tidelog archive rollback daily --to 1
    """
    with open_home(home_text) as home:
        found = home.archives.get(name).rollback(given["generation"], **_switch(given))
        _tell_live(output, found)


@click.command()
@click.argument("name")
@click.argument("generation", type=int)
@click.option(
    "--force",
    is_flag=True,
    help="Delete events that neither the live generation nor the source has.",
)
@yes_option
@json_option
@click.pass_obj
def drop(
    home_text: str | None, output: Output, /, name: str, generation: int, force: bool, yes: bool
) -> None:
    """Delete a generation that is being built or kept, with its files.

    Asks first on a terminal; in scripts it does not ask.

    \b
    Examples:
      tidelog archive drop daily 1
    """
    with open_home(home_text) as home:
        found = home.archives.get(name)
        if sys.stdin.isatty() and not yes:
            found.drop(generation, force=force, dry_run=True)  # refuse before asking
            question = f"Delete generation {generation} of `{name}` with its files, for good?"
            ask_first(f"archive `{name}`", question, yes)
        found.drop(generation, force=force)
        output.record({"archive": name, "dropped": generation})


class _Switch(TypedDict):
    force: bool
    spark: str | None
    spark_conf: dict[str, str]


def _switch(given: dict[str, Any]) -> _Switch:
    """Returns how to switch; with Spark only on request, since there is little left to read."""
    conf = spark_conf(given["confs"])
    return _Switch(force=given["force"], spark=given["master"], spark_conf=conf)


def _say_next(output: Output, name: str, done: RunResult) -> None:
    """Says what to do with a generation that was built; dead letters are looked at first."""
    if done.dead:
        output.say(
            f"{counted(done.dead, 'dead letter')}: run `tidelog archive dead {name} --generation "
            f"{done.generation}` to see why before you promote it"
        )
    if done.dead_again:
        output.say(
            f"Replays have archived {done.dead_again:,} of its dead letters in the live "
            "generation. To have them in files of this one too, run `tidelog archive dead "
            f"{name} --generation {done.generation} --replay --parser PARSER`"
        )
    output.say(f"Next: tidelog archive promote {name}")


def _tell_live(output: Output, found: Archive) -> None:
    kept = found.in_state("kept")
    output.record(
        {
            "archive": found.name,
            "generation": found.generation,
            "folder": found.folder_place(),
            "kept": kept,
        }
    )
    if "delta" in found.tables:
        output.say("Its Delta table is in that folder now.")
    for number in kept:
        which = f" --to {number}" if len(kept) > 1 else ""
        output.say(
            f"Generation {number} is kept: go back with `tidelog archive rollback {found.name}"
            f"{which}`, or delete it with `tidelog archive drop {found.name} {number}`"
        )


@click.command()
@click.argument("name")
@click.option(
    "--timeout",
    type=float,
    default=defaults.FLUSH_TIMEOUT_S,
    show_default=True,
    help="Seconds to wait.",
)
@json_option
@click.pass_obj
def flush(home_text: str | None, output: Output, /, name: str, timeout: float) -> None:
    """Make the driver of an archive write all waiting events to files now.

    \b
    Examples:
      tidelog archive flush daily
    """
    with open_home(home_text) as home:
        behind = home.archives.get(name).flush(timeout)
        output.record({"archive": name, "flushed": not behind, "behind": len(behind)})
        if behind:
            output.say(
                f"Events of {counted(len(behind), 'source partition')} still wait "
                f"({behind[0]}{', …' if len(behind) > 1 else ''}). Is a driver running? "
                f"Start one with `tidelog archive run {name} --follow`."
            )
            sys.exit(FAILED)


@click.command()
@click.argument("name")
@click.option(
    "--to", required=True, metavar="URL", help="The target: topic:NAME or kafka://host:9092/topic."
)
@click.option(
    "--generation", type=int, metavar="N", help="The generation to read. [default: the live one]"
)
@click.option(
    "--partition",
    type=click.Choice(["same", "key"]),
    help="Keep each event's partition, or choose it by key. [default: keep]",
)
@worker_options
@json_option
@click.pass_obj
def restore(home_text: str | None, output: Output, /, name: str, to: str, **given: Any) -> None:
    """Copy the events of an archive into a topic or into Kafka, each event once.

    The target must exist. Safe to kill, to repeat, and to run twice at once: a restore resumes
    where it stopped and adds what the archive has received since. Events that were erased from a
    topic are left out, and counted, unless their time is later than that. Dead letters that no
    topic accepts stay in the archive, and are counted as dead.

    \b
    Examples:
      tidelog archive restore daily --to topic:orders-again
      tidelog archive restore daily --to topic:wide --partition key
      tidelog archive restore raw --to kafka://127.0.0.1:9092/clicks --no-spark
    """
    with (
        open_home(home_text) as home,
        DriverWatch(output, f"restore {name}", omits="files") as watch,
    ):
        done = home.archives.get(name).restore(
            to,
            generation=given["generation"],
            partition=given["partition"],
            spark=spark_of(given),
            **run_options(given, watch),
        )
        told = {"events": done.events, "left_out": done.left_out, "dead": done.dead}
        output.record({"archive": name, "to": to, **told}, always=("archive", "to", "events"))
        if done.dead:
            output.say(
                f"No topic accepts {counted(done.dead, 'dead letter')}, which stay in the archive: "
                f"run `tidelog archive dead {name}`"
            )


@click.command()
@seek_options
@click.pass_obj
def seek(home_text: str | None, output: Output, /, name: str, to: str, **given: Any) -> None:
    """Move the position of an archive in its source.

    TO is earliest, latest, or a position as `tidelog archive status` prints it. What is skipped
    becomes a gap with the reason `seek` in the archive's account, and moving back undoes it.
    Refuses to archive an offset twice. The audit records each move. Shows what it would skip and
    asks, on a terminal. In scripts, pass --yes. A driver that runs drops the range under way: stop
    it first, and start it again.

    \b
    Examples:
      tidelog archive seek daily latest --why "a load test"
      tidelog archive seek daily 4711 --partition clicks/0 --yes
    """
    with open_home(home_text) as home:
        found = home.archives.get(name)
        if not given["yes"]:
            show_moves(output, found.plan_seek(to, given["partition"]))
        ask_first(f"archive `{name}`", f"Move archive `{name}` to {to}?", given["yes"], "moving")
        show_moves(output, found.seek(to, given["partition"], why=given["why"]))
