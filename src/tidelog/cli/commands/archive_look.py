"""``tidelog archive``: find, cat, verify and dead, by which people look into an archive."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import click
import msgspec
import pyarrow as pa

from tidelog.archive.dead_letters import ReplayPlan
from tidelog.archive.read import FindResult, file_rows
from tidelog.archive.verify_checks import ArchiveVerifyReport
from tidelog.cli.commands.archive_status import account_values, show_accounts
from tidelog.cli.output import FAILED, Output, json_option, progress_bar, write_out
from tidelog.cli.pipeline_options import DriverWatch, task_options, tasks_of
from tidelog.cli.terminal import open_home
from tidelog.codec.event_json import row_lines
from tidelog.codec.parsers import either_parser
from tidelog.errors import InvalidError
from tidelog.model.event import to_iso

__all__ = ["cat", "dead", "find", "verify"]

_SHOWN = 20  # dead letters and reasons that people are shown
_REASON_MAX = 100  # characters of a reason in a table
_generation = click.option(
    "--generation", type=int, metavar="N", help="The generation to read. [default: the live one]"
)


@click.command()
@click.argument("name")
@click.argument("partition")
@click.argument("offset", type=int)
@_generation
@click.option("--event", is_flag=True, help="Print the event.")
@json_option
@click.pass_obj
def find(
    home_text: str | None, output: Output, /, name: str, partition: str, offset: int, **given: Any
) -> None:
    """Find the file that holds an event of the source, or show why there is none.

    PARTITION is the source's: orders/0, or just 0 where the archive has one topic. Only files
    that can hold the event are read. Ends with exit code 1 when the archive does not hold it.

    \b
    Examples:
      tidelog archive find daily orders/0 1200
      tidelog archive find daily 0 1200 --event
    """
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        found = archive.find(partition, offset, given["generation"], read=given["event"])
    shown = _found(name, found, output)
    if given["event"] and found.row is not None:
        line = row_lines(found.row).rstrip(b"\n")
        shown["event"] = msgspec.Raw(line) if output.as_json else line.decode()
    output.record(shown)
    if not found.is_there:
        sys.exit(FAILED)


@click.command()
@click.argument("name", required=False)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option(
    "--file",
    "path",
    metavar="PATH|URL",
    help="Read this file, which need not belong to an archive.",
)
@click.option(
    "--format",
    "file_format",
    metavar="F",
    default="",
    help="The format of --file, if its name does not show it.",
)
@click.option("--partition", metavar="P", help="The source partition: orders/0, or just 0.")
@click.option("--start", type=click.IntRange(min=0), metavar="O", help="The first offset.")
@click.option("--end", type=click.IntRange(min=0), metavar="O", help="The offset to stop before.")
@click.option(
    "--limit", type=click.IntRange(min=0), metavar="N", help="Limit on the number of events."
)
@_generation
@json_option
@click.pass_obj
def cat(home_text: str | None, output: Output, /, name: str | None, **given: Any) -> None:
    """Print the events of archived files, of any format, as JSON lines.

    Without FILE it prints all data files. Name a FILE as `archive manifest` shows it, or by the end
    of its path. Dead letters are printed with their errors. Typed columns without the raw value are
    printed as they are.

    \b
    Examples:
      tidelog archive cat daily | head
      tidelog archive cat daily 1_0_00000000000000000000.parquet
      tidelog archive cat daily --partition orders/0 --start 1000 --end 1100
      tidelog archive cat --file s3://bucket/daily/g1/orders/dt=2026-11-15/1_0_0000.seq
    """
    if (name is None) == (given["path"] is None):
        raise InvalidError("archive cat: give the name of an archive, or --file")
    if given["path"] is not None:
        _refuse(given, "--file", "files", "partition", "start", "end", "generation")
        _print(file_rows(given["path"], given["file_format"]), given["limit"])
        return
    if given["file_format"]:
        raise InvalidError("archive cat: --format is for --file: an archive knows its own")
    with open_home(home_text) as home:
        batches = home.archives.get(name or "").read(
            files=given["files"],
            partition=given["partition"],
            start=given["start"],
            end=given["end"],
            generation=given["generation"],
        )
        _print(batches, given["limit"])


@click.command()
@click.argument("name")
@click.option(
    "--generation", type=int, metavar="N", help="The generation to check. [default: all of them]"
)
@click.option("--source", is_flag=True, help="Compare with the number of events in the source.")
@click.option(
    "--deep", is_flag=True, help="Read every file and check its checksum, rows and offsets."
)
@task_options
@json_option
@click.pass_obj
def verify(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Check rows, manifests and files of an archive against each other.

    Checks all generations, and prints the counts of the live one. --source is for the live one, or
    for the one that you name.
    Changes nothing, and may run beside a driver. Ends with exit code 1 when there is a problem.

    \b
    Examples:
      tidelog archive verify daily
      tidelog archive verify daily --deep --source --json
      tidelog archive verify daily --deep --master 'local[*]'
    """
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        archive.info.format_of(given["generation"])

        def total() -> int:
            chosen = given["generation"]
            every = archive.info.formats if chosen is None else [chosen]
            return sum(archive.stored_bytes(each) for each in every)

        with progress_bar(f"verify {name}", total) as advance:
            found = archive.verify(
                deep=given["deep"],
                source=given["source"],
                generation=given["generation"],
                progress=advance,
                **tasks_of(given),
            )
    _show(output, found)
    if not found.is_clean:
        sys.exit(FAILED)


_OF_REPLAY = ("parser", "granularity", "time_zone", "dry_run", "master", "confs")


@click.command()
@click.argument("name")
@_generation
@click.option("--reason", metavar="TEXT", help="Only dead letters whose reason contains this text.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help="Limit on the number of rows. [default: 20; all with --events, --json]",
)
@click.option("--events", is_flag=True, help="Print whole events as JSON lines, with their errors.")
@click.option(
    "--replay", "is_replay", is_flag=True, help="Parse them again and archive those that parse."
)
@click.option("--parser", metavar="P", default="", help="With --replay, use another parser.")
@click.option(
    "--granularity",
    metavar="G",
    help="With --replay, the time span of a folder: day, hour or minute.",
)
@click.option("--time-zone", metavar="Z", help="With --replay, the time zone of folder names.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="With --replay, only try the first 10,000 in memory and print the result.",
)
@task_options
@json_option
@click.pass_obj
def dead(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """List or replay dead letters: events that the parser rejected.

    --replay parses them again, with the archive's fixed parser or with another one. Events that
    parse go into data files of the archive, each once, and are no longer dead letters. Safe to
    kill, to repeat, and to run twice at once.

    \b
    Examples:
      tidelog archive dead daily
      tidelog archive dead daily --reason "no field" --events | head
      tidelog archive dead daily --replay --parser json:created_at --dry-run
      tidelog archive dead daily --replay --parser json:created_at
    """
    with open_home(home_text) as home:
        archive = home.archives.get(name)
        if given["is_replay"]:
            _refuse(given, "--replay", "reason", "limit", "events")
            how = {key: given[key] for key in ("generation", "parser", "granularity", "time_zone")}
            if given["dry_run"]:
                _show_plan(output, name, archive.plan_replay(**how))
                return
            with DriverWatch(output, f"{name}, dead letters", omits="range") as watch:
                done = archive.replay(
                    **how, stop=watch.stop, on_cycle=watch.cycle, **tasks_of(given)
                )
            output.record({"archive": name, **asdict(done)})
            used, other = archive.info.format_of().parser, given["parser"]
            if other and other != used:
                parser = shlex.quote(either_parser(used, other))
                output.say(
                    f"New events are still read with `{used}`. To change that, run `tidelog "
                    f"archive backfill {name} --parser {parser}`, then `tidelog archive promote "
                    f"{name}`."
                )
            return
        if any(given[name] for name in _OF_REPLAY):
            raise InvalidError(
                "archive dead: --parser, --granularity, --time-zone, --dry-run, --master and "
                "--conf are for --replay: add it"
            )
        batches = archive.dead_letters(reason=given["reason"], generation=given["generation"])
        if given["events"]:
            _print(batches, given["limit"])
        else:
            _list_dead(output, batches, given["limit"])


def _show_plan(output: Output, name: str, plan: ReplayPlan) -> None:
    """Prints what a replay would do; for people the reasons as a table."""
    figures = {"archive": name, **asdict(plan)}
    if output.as_json:
        output.record(figures)
        return
    output.record({key: figures[key] for key in ("archive", "dead", "tried", "accepted")})
    reasons = dict.fromkeys([*plan.reasons, *plan.refused])
    if reasons:
        output.say("")
        rows = (
            {"reason": each, "now": plan.reasons.get(each, 0), "after": plan.refused.get(each, 0)}
            for each in reasons
        )
        output.records(("reason", "now", "after"), rows)


def _found(archive: str, found: FindResult, output: Output) -> dict[str, Any]:
    file = found.file
    shown = {
        "archive": archive,
        "partition": found.partition,
        "offset": found.offset,
        "status": found.status,
        "says": found.says,
        "file": file.target if file else None,
        "dead": file.kind == "dead" if file else None,
        "first_offset": file.first_offset if file else None,
        "last_offset": file.last_offset if file else None,
        "events": file.events if file else None,
    }
    if output.as_json:
        return shown
    shown["why"] = None if found.is_there and found.row is None else shown.pop("says")
    return {name: value for name, value in shown.items() if value not in (None, "archived")}


def _refuse(given: dict[str, Any], option: str, *names: str) -> None:
    """Refuse options that mean nothing beside another one."""
    for name in names:
        if given[name] not in (None, (), False, ""):
            raise InvalidError(f"archive: {option} goes without --{name}: leave one of them out")


def _print(batches: Iterable[pa.RecordBatch], limit: int | None) -> None:
    for batch in _first(batches, limit):
        write_out(row_lines(batch))


def _first(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        wanted = batch if left is None else batch.slice(0, left)
        if wanted.num_rows:
            yield wanted
        if left is not None:
            left -= wanted.num_rows
            if left == 0:
                return


def _list_dead(output: Output, batches: Iterator[pa.RecordBatch], limit: int | None) -> None:
    if output.as_json:
        for batch in _first(batches, limit):
            output.records((), _letters(batch))
        return
    reasons: Counter[str] = Counter()
    shown: list[dict[str, Any]] = []
    most = _SHOWN if limit is None else limit
    for batch in batches:
        reasons.update(text.partition(": ")[0] for text in batch.column("error").to_pylist())
        shown += _letters(batch.slice(0, most - len(shown)))
    counts = [{"dead": n, "reason": text[:_REASON_MAX]} for text, n in reasons.most_common(_SHOWN)]
    output.records(("dead", "reason"), counts, "There are no dead letters.")
    if shown:
        total = reasons.total()
        more = f"; --limit {total} shows all" if total > len(shown) else ""
        output.title(f"{len(shown)} of {total}{more}")
        rows = [{**letter, "reason": letter["reason"][:_REASON_MAX]} for letter in shown]
        output.records(("partition", "offset", "timestamp", "reason"), rows)


def _letters(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    names = ("topic", "partition", "offset", "error")
    columns = [batch.column(name).to_pylist() for name in names]
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    return [
        {
            "partition": f"{topic}/{partition}",
            "offset": offset,
            "timestamp": to_iso(time_ms),
            "reason": reason,
        }
        for topic, partition, offset, reason, time_ms in zip(*columns, times, strict=True)
    ]


def _show(output: Output, found: ArchiveVerifyReport) -> None:
    values = asdict(found)
    if output.as_json:
        values["accounts"] = [
            {"partition": each.partition, **account_values(each)} for each in found.accounts
        ]
        output.record(values)
        return
    del values["accounts"]
    values["files"] = str(found.file_counts)
    del values["data_files"], values["dead_files"]
    values["erased"] = sum(each.erased for each in found.accounts)
    values["problems"], values["notes"] = values.pop("problem_count"), len(found.notes)
    if others := values.pop("others"):
        values["other generations"] = others
    output.record(values)
    show_accounts(output, found.archive, found.accounts)
    for heading, listed in (("problems", found.problems), ("notes", found.notes)):
        if listed:
            output.title(heading)
        for each in listed:
            output.say(f"{each.kind}: {each.where}: {each.what}: {each.do}")
