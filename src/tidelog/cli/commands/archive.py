"""``tidelog archive``: create, run, list, manifest, delete, erase and audit.

The other files ``archive_*`` have its other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tidelog.api.archives import ArchiveHandle
from tidelog.api.erasure import ProveOptions
from tidelog.cli.commands.amend import (
    confirm_erasure,
    say_unseen,
    show_records,
    who_option,
    why_option,
)
from tidelog.cli.commands.archive_generations import (
    backfill,
    dead_share_option,
    drop,
    flush,
    promote,
    redo,
    restore,
    rollback,
    seek,
)
from tidelog.cli.commands.archive_look import cat, dead, find, verify
from tidelog.cli.commands.archive_status import finalize, register, status
from tidelog.cli.commands.proof import (
    GivenEvents,
    proof_option,
    removal_bars,
    report_proof,
    wait_option,
)
from tidelog.cli.output import (
    FAILED,
    CommandGroup,
    Output,
    Size,
    counted,
    json_option,
    utf8,
    visible,
)
from tidelog.cli.pipeline_options import (
    DriverWatch,
    format_of,
    format_options,
    run_options,
    spark_of,
    task_options,
    tasks_of,
    worker_options,
)
from tidelog.cli.terminal import ask_first, open_home, yes_option
from tidelog.erasure.delete_archived import ErasedFromArchives
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import defaults
from tidelog.model.address import nearest
from tidelog.model.archive import Archive
from tidelog.model.sizes import limit_text
from tidelog.model.times import duration_text

__all__ = ["archive"]


@click.command()
@click.argument("name")
@click.option("--delete-files", is_flag=True, help="Delete its files and free its name.")
@click.option(
    "--lost-files", is_flag=True, help="Free its name although its folder outside the home is lost."
)
@yes_option
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, name: str, yes: bool, **given: bool) -> None:
    """Delete an archive, or with --delete-files its files too.

    Its drivers stop, and trims no longer wait for it. Without --delete-files, its files can still
    be read, and erasures and proofs still reach them. --lost-files is for an archive outside the
    home whose folder is lost. If the folder comes back, sweeps delete the archive's files in it.
    Asks first on a terminal. In scripts, pass --yes.

    \b
    Examples:
      tidelog archive delete daily --yes
      tidelog archive delete daily --delete-files --yes
    """
    delete_files, lost_files = given["delete_files"], given["lost_files"]
    if delete_files and lost_files:
        raise InvalidError("archive delete: give one of --delete-files and --lost-files")
    with open_home(home_text) as home:
        found = {each.name: each for each in home.archives.list()}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"archive `{name}`: not found{like}: nothing to delete")
        archive = found[name]
        archive.delete(files=delete_files, lost=lost_files, dry_run=True)  # refuses before it asks
        folder = archive.info.place
        question = f"End archive `{name}`, for good? Its files in `{folder}` stay."
        if delete_files:
            question = f"Delete archive `{name}` and all its files in `{folder}`, for good?"
        if lost_files:
            question = f"Delete archive `{name}`, whose files in `{folder}` are lost, for good?"
        ask_first(f"archive `{name}`", question, yes)
        archive.delete(files=delete_files, lost=lost_files)
        if delete_files:
            output.say(f"Deleted archive `{name}` and its files.")
        elif lost_files:
            output.say(f"Deleted archive `{name}`. Its files in `{folder}` are lost.")
        else:
            after = (
                "They belong to the home that this one was copied from."
                if archive.is_detached
                else "Erasures still reach them. Delete them with `tidelog archive delete "
                f"{name} --delete-files`."
            )
            output.say(f"Ended archive `{name}`. Its files stay in `{folder}`. {after}")
        if output.as_json:
            output.record({"name": name, "deleted": True, "files_deleted": delete_files})


_NAMED = (
    "is empty, and its folder was named by a field of the events it had: make the files again with "
    "`tidelog archive backfill` and `tidelog archive promote`, then `tidelog archive drop` the old "
    "ones"
)


@click.command()
@click.argument("name")
@click.option(
    "--id",
    "ids",
    type=utf8,
    multiple=True,
    metavar="ID",
    help="Erase the event with this id. Repeatable.",
)
@click.option("--key", type=utf8, metavar="K", help="Erase all events with this key.")
@why_option
@who_option
@yes_option
@click.option(
    "--prove",
    is_flag=True,
    help="Also sweep what is left over, then search all objects for the events.",
)
@proof_option
@wait_option
@task_options
@json_option
@click.pass_obj
def erase(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Erase events from the files of an archive and of its copies, by id or by key.

    For an archive whose topic was deleted, or whose source is another system. While the topic is
    there, `tidelog delete` erases from its archives too. A command that dies is finished by the
    same command or by the scribe. Archives that this one was made from are not changed: the command
    names those that still hold the events, and sources and copies that it did not search. Exit
    code 1 if an id or the key is not there, if such an archive still holds one of the events, or
    if a folder still has a name that came from them.

    --prove sweeps and then searches every object that could hold the events: of the archive, its
    copies, those that it was made from, and others of the same source. It prints one verdict with
    its evidence, and the archive's audit records its hash. --proof FILE also writes it to a file,
    which `tidelog proof check` checks. Exit code 1 unless the verdict is "erased".

    \b
    Examples:
      tidelog archive erase daily --id order-17 --why "request 2026-118" --yes
      tidelog archive erase daily --key customer-7 --yes
      tidelog archive erase clicks --key customer-7 --proof request-118.json --yes
    """
    ids, key = list(given["ids"]), given["key"]
    if bool(ids) == (key is not None):
        raise InvalidError("archive erase: give --id or --key")
    what = f"all events with key `{key}`" if key is not None else counted(len(ids), "id")
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        tasks, wanted = tasks_of(given), None if key is None else key.encode()
        given_as = "has one of the ids" if key is None else f"has the key `{visible(key)}`"
        confirm_erasure(
            f"archive `{name}`",
            f"Erase {what} from archive `{name}`, for good?",
            given,
            lambda: archive.plan_erase(ids=ids, key=wanted),
            f"nothing was erased: no event of archive `{name}` or its copies {given_as}: check it; "
            f"`tidelog archive audit {name}` shows what was erased before",
            is_sure=given["yes"],
        )
        if given["prove"] or given["proof_file"]:
            with removal_bars(home, archive=name) as watch:
                how = ProveOptions(who=given["who"], wait=given["wait"], watch=watch, **tasks)
                proof = archive.erase(ids=ids, key=wanted, why=given["why"], prove=True, **how)
            report_proof(output, proof, given["proof_file"], watch.total, GivenEvents(ids, key))
            return
        who, why = given["who"], given["why"]
        done = archive.erase(ids=ids, key=wanted, why=why, prove=False, who=who, **tasks)
        covered = archive.copies()
    _show_erased(output, (ids, key), done, covered)


def _show_erased(
    output: Output,
    wanted: tuple[list[str], str | None],
    done: ErasedFromArchives,
    covered: list[str],
) -> None:
    """Print what was erased; exit with 1 unless everything was found and nothing is left."""
    ids, key = wanted
    missing = [each for each in ids if each not in done.ids]
    messages = {
        "left": [*done.left, *(f"file `{each}`: {_NAMED}" for each in done.named)],
        "out_of_reach": done.out_of_reach,
    }
    output.record(
        {
            "archive": covered[0],
            "erased": done.events,
            "files": sum(each.files for each in done.archives),
            "waiting": sum(each.waiting for each in done.archives),
            "covered": covered if output.as_json else ", ".join(covered),
            "missing": missing if output.as_json else ", ".join(missing) or None,
            **(messages if output.as_json else {}),
        }
    )
    for what, lines in messages.items():
        for each in () if output.as_json else lines:
            output.say(f"{what.replace('_', ' ')}: {each}")
    if key is not None and not done.events and not output.as_json:
        output.say(f"not found: no event of the archive has the key `{visible(key)}`")
    say_unseen(output, done.unseen)
    if missing or not done.is_clean:
        sys.exit(FAILED)


@click.command()
@click.argument("name")
@click.option("--id", "event_id", metavar="ID", help="Only records of events with this id.")
@click.option("--key", type=utf8, metavar="K", help="Only erasures and proofs by this key.")
@json_option
@click.pass_obj
def audit(
    home_text: str | None, output: Output, name: str, event_id: str | None, key: str | None
) -> None:
    """Show what was erased from an archive, when and why.

    While the topic of the archive exists, `tidelog audit TOPIC` has the records of its deletes.
    Ids and keys are shown as hashes (sha256). Use --id or --key to find the records of one.

    \b
    Examples:
      tidelog archive audit daily --json
      tidelog archive audit daily --id order-17
      tidelog archive audit daily --key customer-7
    """
    with open_home(home_text) as home:
        wanted = None if key is None else key.encode()
        show_records(output, home.archives.get(name).audit(event_id, key=wanted))


@click.group(cls=CommandGroup)
def archive() -> None:
    """Write events to files that any engine can read, each event once.

    \b
    Examples:
      tidelog archive create daily --source topic:orders --parser json:at
      tidelog archive run daily
      tidelog archive status daily
    """


@archive.command()
@click.argument("name")
@click.option(
    "--source",
    required=True,
    metavar="URL",
    help="The source: "
    "kafka://host:9092/topic, "
    "kinesis://, scylla://, topic:NAME, "
    "archive:NAME or file:PATH.",
)
@click.option(
    "--kind",
    type=click.Choice(["backup", "partition"]),
    help="Copy events as they are, or sort them into folders by the parser's partition names. "
    "[default: partition with --parser, else backup]",
)
@click.option(
    "--to",
    metavar="URL",
    help="The folder or bucket of its files. [default: archives/NAME in the home]",
)
@format_options
@click.option(
    "--max-bytes",
    type=Size(),
    default=defaults.ARCHIVE_FILE_BYTES,
    metavar="SIZE",
    help="Close a file when it reaches this size. [default: 200MB]",
)
@click.option(
    "--max-age",
    default=defaults.ARCHIVE_FILE_AGE,
    show_default=True,
    metavar="D",
    help="Close a file when its first event has waited this long.",
)
@click.option(
    "--dead-share",
    type=float,
    default=defaults.DEAD_SHARE,
    show_default=True,
    metavar="S",
    help="Stop the archive if more than this share of a range is dead letters, 0 to 1.",
)
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Begin at the first events of the source, or at its present ends.",
)
@json_option
@click.pass_obj
def create(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Create an archive.

    The folder must be empty and cannot be reused later.

    \b
    Examples:
      tidelog archive create raw --source kafka://127.0.0.1:9092/clicks
      tidelog archive create daily --source topic:orders --parser json:at
      tidelog archive create hourly --source topic:orders --parser timestamp \\
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
        output.say(f"Created archive `{made.name}`.")
        limit = made.restore_limit()
        if limit:
            output.say(f"Note: {limit}.")
        output.record(_describe(made, output))


@archive.command()
@click.argument("name")
@click.option(
    "--follow/--once", default=False, help="Keep running, or stop when caught up. [default: stop]"
)
@worker_options
@dead_share_option
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Continue after events that the source has lost. The gap is recorded.",
)
@click.option("--take-over", is_flag=True, help="Stop running drivers and take over, for upgrades.")
@click.option(
    "--flush-on-stop", is_flag=True, help="Write waiting events to files before stopping."
)
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    help="Change the start recorded by `archive create`. Refused once the archive has begun.",
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep Prometheus metrics in this file, for a textfile collector.",
)
@click.option(
    "--statsd", metavar="HOST:PORT", help="Send the metrics to this StatsD server too, as gauges."
)
@click.option(
    "--kafka-group",
    metavar="NAME",
    help="Publish the positions as offsets of this Kafka consumer group, for lag monitors.",
)
@json_option
@click.pass_obj
def run(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Archive the new events of the source.

    Safe to kill, to repeat, and to run twice at once.

    Any number of drivers with --follow share the source partitions, and take over those of one
    that dies. Without --follow, a run takes what no other driver has. Ctrl-C finishes the current
    cycle first.

    \b
    Examples:
      tidelog archive run daily
      tidelog archive run daily --follow --master spark://host:7077
      tidelog archive run daily --follow --take-over
    """
    with open_home(home_text) as home, DriverWatch(output, name, follows=given["follow"]) as watch:
        archive = home.archives.get(name)
        options = run_options(given, watch)
        options["on_error"] = lambda error: watch.tell(f"after the cycle: {error}")
        options["on_promote"] = lambda _: output.say(
            "A newer generation was promoted: going on with it."
        )
        if given["follow"] and not output.as_json:
            watch.tell(_closes(archive.info))
        done = archive.run(
            follow=given["follow"],
            spark=spark_of(given),
            start=given["start"],
            dead_share=given["dead_share"],
            metrics_file=given["metrics_file"],
            statsd=given["statsd"],
            kafka_group=given["kafka_group"],
            **options,
        )
        output.record({"archive": name, "events": done.events})
        if watch.dead:
            dead = counted(watch.dead, "dead letter")
            output.say(f"{dead}: run `tidelog archive dead {name}` to see why")


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
        rows = [_describe(each, output) for each in home.archives.list()]
        none = "There are no archives yet: see `tidelog archive create --help`."
        output.records(("name", "kind", "format", "state", "source", "folder"), rows, none)


@archive.command()
@click.argument("name")
@json_option
@click.pass_obj
def manifest(home_text: str | None, output: Output, /, name: str) -> None:
    """List the files of an archive with their events, offsets and checksums.

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


def _closes(archive: Archive) -> str:
    """Says when files appear, as an hour of silence looks like a fault."""
    return (
        f"{archive.name}: following {archive.source}. A file closes at "
        f"{limit_text(archive.max_bytes)} or after {duration_text(archive.max_age_ms)}; "
        f"`tidelog archive flush {archive.name}` closes all now. Ctrl-C ends this."
    )


def _describe(handle: ArchiveHandle, output: Output) -> dict[str, Any]:
    archive = handle.info
    return {
        "name": archive.name,
        "kind": archive.kind if output.as_json else archive.kind_text,
        "source": archive.source,
        "folder": archive.folder_place(),
        "parser": archive.format_of().parser,
        "format": archive.format_of().format,
        "start": archive.start,
        "restorable": not handle.restore_limit(),
        "state": archive.state_name,
    }


for _command in (
    *(backfill, cat, dead, delete, drop, finalize, find, flush),
    *(promote, redo, register, restore, rollback, seek, status, verify, audit, erase),
):
    archive.add_command(_command)
