"""``tidelog archive``: status, finalize and register; and tables of accounts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from tidelog.api.archives import ArchiveHandle
from tidelog.archive.status import ArchiveStatus, Limits, troubles
from tidelog.cli.output import (
    FAILED,
    Output,
    counted,
    echo_aside,
    json_option,
    to_seconds,
    write_out,
)
from tidelog.cli.terminal import open_home
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model import defaults
from tidelog.model.archive import Account, Archive
from tidelog.model.event import to_iso
from tidelog.model.pipeline import Aside, Gap, by_cause, offsets_between, same_in
from tidelog.model.times import duration_ms

__all__ = ["account_values", "finalize", "register", "show_accounts", "status"]

_GAPS_SHOWN = 20  # per source partition

_STATUS_COLUMNS = (
    "partition",
    "position",
    "end",
    "lag",
    "lag_s",
    "events",
    "files_written",
    "bytes_written",
    "dead",
    "lost",
    "under_way_s",
    "last_commit",
)
_ACCOUNT_COLUMNS = (
    "partition",
    "begin",
    "why",
    "position",
    "offsets",
    "archived",
    "dead",
    "dropped",
    "erased",
    "never there",
    "in gaps",
    "adds up",
)


def account_values(account: Account) -> dict[str, Any]:
    """Returns an account as JSON has it."""
    begin = account.begin
    return {
        "begin": None if begin is None else begin.position,
        "begin_reason": None if begin is None else begin.reason,
        "begin_at": None if begin is None or not begin.at_ms else to_iso(begin.at_ms),
        "end": account.end,
        "offsets": account.span,
        "numbered": account.is_numbered,
        "archived": account.archived,
        "dead": account.dead,
        "dropped": account.dropped,
        "erased": account.erased,
        "never_there": account.absent,
        "in_gaps": account.skipped,
        "gaps": [
            {"start": gap.start, "end": gap.end, "reason": gap.reason, "offsets": gap.offsets}
            for gap in account.gaps
        ],
        "adds_up": account.adds_up,
    }


def show_accounts(output: Output, name: str, accounts: Sequence[Account]) -> None:
    """Print what became of every offset, for people."""
    if output.as_json or not accounts:
        return
    output.title("What became of every offset since the archive's start")
    rare = ("dropped", "erased", "never there", "in gaps")
    output.records(_ACCOUNT_COLUMNS, [_row(each) for each in accounts], rare=rare)
    for each in accounts:
        for gap in each.gaps[:_GAPS_SHOWN]:
            output.say(
                f"{name}: {each.partition}: gap from {gap.start} to {gap.end}, {_size(gap)}: "
                f"{gap.reason}"
            )
        if more := len(each.gaps[_GAPS_SHOWN:]):
            output.say(f"{name}: {each.partition}: {counted(more, 'more gap')}: --json lists all")
        if each.problem:
            output.say(f"{name}: {each.partition}: does not add up: {each.problem}")
    if any(each.is_numbered for each in accounts):
        output.say(f"{name}: its source has no offsets: the archive numbers the events it reads")


def _size(gap: Gap) -> str:
    """How much is in a gap; one behind the position is not among the offsets that add up."""
    offsets = gap.offsets or offsets_between(gap.start, gap.end)
    return counted(offsets, "offset") if offsets else "an unknown number of events"


def _row(account: Account) -> dict[str, Any]:
    begin = account.begin
    return {
        "partition": account.partition,
        "begin": None if begin is None else begin.position,
        "why": None if begin is None else begin.reason,
        "position": account.end,
        "offsets": account.span,
        "archived": account.archived,
        "dead": account.dead,
        "dropped": account.dropped,
        "erased": account.erased,
        "never there": account.absent,
        "in gaps": account.skipped,
        "adds up": "yes" if account.adds_up else "NO",
    }


_SECONDS = click.FloatRange(min=0)


@click.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Show all archives.")
@click.option(
    "--generation", type=int, metavar="N", help="The generation to show. [default: the live one]"
)
@click.option(
    "--check", is_flag=True, help="Show only problems, with exit code 1 if there are any."
)
@click.option(
    "--max-lag",
    type=click.IntRange(min=0),
    metavar="N",
    help="The number of waiting events to tolerate.",
)
@click.option(
    "--max-lag-seconds",
    type=_SECONDS,
    metavar="S",
    help="How long an event may wait. [default: twice the archive's --max-age plus five minutes]",
)
@click.option(
    "--max-intent-age",
    type=_SECONDS,
    default=900,
    show_default=True,
    metavar="S",
    help="How long a range may be in progress.",
)
@click.option(
    "--max-dead",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The number of dead letters to tolerate in each source partition.",
)
@click.option(
    "--since",
    default="1d",
    show_default=True,
    metavar="DURATION",
    help="Ignore dead letters and losses older than this.",
)
@click.option(
    "--driver/--no-driver",
    default=True,
    help="Report a missing driver while events wait. Use --no-driver if a schedule runs it.",
)
@click.option("--prometheus", is_flag=True, help="Print the metrics that docs/alerts.yml uses.")
@click.option(
    "--statsd", metavar="HOST:PORT", help="Send these metrics to a StatsD server, as gauges."
)
@json_option
@click.pass_obj
def status(home_text: str | None, output: Output, /, name: str | None, **given: Any) -> None:
    """Show the progress, backlog and problems of an archive.

    \b
    Examples:
      tidelog archive status daily
      tidelog archive status daily --check
      tidelog archive status --all --check --max-lag-seconds 7200
      tidelog archive status --all --prometheus
    """
    if sum(bool(given[each]) for each in ("check", "prometheus", "statsd")) > 1:
        raise InvalidError("status: --check, --prometheus and --statsd: give one of them")
    with open_home(home_text) as home:
        archives = _chosen(home, name, given["every"])
        if given["prometheus"]:
            write_out(home.archives.metrics(each.name for each in archives).encode())
            return
        if given["statsd"]:
            home.archives.send_metrics(given["statsd"], (each.name for each in archives))
            return
        found = [each.status(given["generation"]) for each in archives]
    if given["check"]:
        _check(output, found, _limits(given))
        return
    for number, each in enumerate(found):
        if number:
            output.say("")
        _show(output, each)


@click.command()
@click.argument("name")
@click.option(
    "--delay",
    default=defaults.FINALIZE_DELAY,
    show_default=True,
    metavar="DURATION",
    help="How late events may arrive, and how long a reopened folder must stay quiet.",
)
@click.option(
    "--notify", metavar="URL", default="", help="Notify https://host/path of each complete folder."
)
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@json_option
@click.pass_obj
def finalize(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Mark complete date folders with _SUCCESS and move the watermark.

    Later files reopen their folder: its _SUCCESS is deleted, and written again after another delay.
    Safe to kill, to repeat, and to run twice at once. Run it every few minutes.

    \b
    Examples:
      tidelog archive finalize daily
      tidelog archive finalize daily --delay 15m --notify https://example.com/folders
      tidelog archive finalize daily --dry-run
    """
    with open_home(home_text) as home:
        done = home.archives.get(name).finalize(**given)
    rows = [msgspec.structs.asdict(notice) for notice in done.notices]
    if rows:
        output.records(("event", "folder", "files", "events"), rows)
    watermark = None if done.watermark_ms is None else to_iso(done.watermark_ms)
    output.record({"archive": name, "watermark": watermark})
    for error in done.errors:
        echo_aside(f"not notified: {error}")
    if not done.is_clean:
        sys.exit(FAILED)


@click.command()
@click.argument("name")
@click.option(
    "--as", "kind", type=click.Choice(["delta", "iceberg", "glue"]), help="The kind of table."
)
@click.option(
    "--catalog",
    metavar="URI",
    help="For Iceberg, the catalog: sqlite:///FILE, https://host, or a name in pyiceberg's "
    "settings. In an SQL catalog the table belongs to the catalog named `tidelog`.",
)
@click.option(
    "--table",
    metavar="NAMESPACE.NAME",
    help="For Iceberg, the table in that catalog; for Glue, DATABASE.NAME.",
)
@click.option(
    "--keep/--no-keep",
    default=None,
    help="Update the table after each cycle of `archive run`, or stop doing so.",
)
@click.option(
    "--forget",
    is_flag=True,
    help="Forget a dropped table. Erasures and promotes no longer change it.",
)
@json_option
@click.pass_obj
def register(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Create or update a Delta, Iceberg or Glue table of an archive's Parquet files.

    Files are registered where they are, each once. The output shows how many data files were
    added, and how many the table lists now (Glue lists folders, not files).
    Without --as, all tables of the archive are brought up to date. Erasures and promotes correct
    every table that was ever registered, until you --forget it.

    \b
    Examples:
      tidelog archive register daily --as delta
      tidelog archive register daily --as iceberg --catalog sqlite:///lake.db --table lake.daily
      tidelog archive register daily --as delta --keep
      tidelog archive register daily --as glue --table lake.daily
      tidelog archive register daily
      tidelog archive register daily --as delta --forget
    """
    with open_home(home_text) as home:
        tables = home.archives.get(name).tables
        table = _table(given)
        if table is None and (given["forget"] or given["keep"] is not None):
            count = len(tables.list())
            raise InvalidError(
                f"archive `{name}`: has {counted(count, 'table')}: say which with --as"
            )
        if table is not None and given["forget"]:
            tables.forget(table)
            output.say(
                f"`{table}` is forgotten: later erasures and promotes leave it with entries "
                "of files that have changed or were deleted. Drop the table."
            )
            return
        if table is not None and given["keep"] is False:
            tables.keep(table, False)
            output.say(
                f"Drivers no longer bring `{table}` up to date. Erasures and promotes still do."
            )
            return
        done = tables.register(table, keep=bool(given["keep"]))
    rows = [
        {
            "archive": name,
            "table": each.table if output.as_json else each.table.partition(":")[0],
            "where": each.where,
            "files_added": each.files_added,
            "events_added": each.events_added,
            "files_now": each.files_now,
        }
        for each in done
    ]
    output.records(("table", "where", "files_added", "events_added", "files_now"), rows)
    if not any(each.files_added for each in done):
        output.say("Nothing was added: the table has every file that the archive has now.")


def _chosen(home: Home, name: str | None, every: bool) -> list[ArchiveHandle]:
    if (name is None) != every:
        raise InvalidError("status: give the name of an archive, or --all")
    if name is not None:
        return [home.archives.get(name)]
    return [each for each in home.archives.list() if each.info.state == "ready"]


def _limits(given: dict[str, Any]) -> Limits:
    lag_s = given["max_lag_seconds"]
    return Limits(
        max_lag=given["max_lag"],
        max_lag_ms=None if lag_s is None else int(lag_s * 1000),
        max_intent_ms=int(given["max_intent_age"] * 1000),
        max_dead=given["max_dead"],
        since_ms=duration_ms(given["since"]),
        driver=given["driver"],
    )


def _check(output: Output, found: list[ArchiveStatus], limits: Limits) -> None:
    wrong = {each.archive.name: troubles(each, limits) for each in found}
    ended = {each.archive.name for each in found if each.archive.ended is not None}
    for name, problems in wrong.items():
        if output.as_json:
            output.record({"archive": name, "healthy": not problems, "troubles": problems})
            continue
        healthy = "has ended" if name in ended else "is healthy"
        for problem in problems or [f"archive `{name}`: {healthy}"]:
            output.say(" ".join(problem.split()))
    if any(wrong.values()):
        sys.exit(FAILED)


def _show(output: Output, found: ArchiveStatus) -> None:
    rows: list[dict[str, Any]] = [
        {
            "archive": found.archive.name,
            "partition": each.partition,
            "position": each.position,
            "end": each.end,
            "lag": each.lag,
            "lag_s": each.lag_s,
            "events": each.events,
            "files_written": each.files_written,
            "bytes_written": each.bytes_written,
            "dead": each.dead,
            "lost": each.totals.lost + bool(each.unread),
            "account": None if each.account is None else account_values(each.account),
            "unread": each.unread,
            "remade": each.remade or None,
            "ended": each.ended or None,
            "ahead": each.ahead,
            "last_commit": to_iso(each.last_commit_ms) if each.last_commit_ms else None,
            "failure": each.failure.message if each.failure else None,
            "under_way_s": None
            if each.intent_ms is None
            else (found.read_ms - each.intent_ms) / 1000,
            "generation": found.generation,
            "folder": found.archive.folder_place(found.generation),
            "generations": _generations(found.archive),
            "state": found.archive.state_name,
            "watermark": _watermark(found),
            "drivers": found.drivers,
            "left_out": dict(found.left_out),
            "aside": [_aside(one) for one in found.aside if one.partition == each.partition],
        }
        for each in found.partitions
    ]
    _show_summary(output, found)
    _show_generations(output, found)
    output.say("")
    if not output.as_json:
        rows = [{**row, "last_commit": _seconds(row["last_commit"])} for row in rows]
    output.records(_STATUS_COLUMNS, rows, rare=("lost", "under_way_s"))
    accounts = [each.account for each in found.partitions if each.account is not None]
    show_accounts(output, found.archive.name, accounts)
    for one in found.aside:
        output.say(
            f"{found.archive.name}: {one.partition}: {one.start} to {one.end} was set aside at "
            f"{to_iso(one.at_ms)}, since a restored catalog did not know it: "
            f"{counted(one.events, 'event')} in {', '.join(one.files)}"
        )
    for what, why in sorted(found.left_out.items()):
        output.say(f"{found.archive.name}: `{what}` is not read: {why}")
    _show_partitions(output, found)
    if found.failure is not None:
        output.say(
            f"{found.archive.name}: its driver has not reached the source since "
            f"{to_iso(found.failure.since_ms)}, {counted(found.failure.attempts, 'attempt')}: "
            f"{found.failure.message}"
        )
    if found.source_error:
        output.say(f"{found.archive.name}: its source cannot be reached: {found.source_error}")


def _show_summary(output: Output, found: ArchiveStatus) -> None:
    """Prints the lines above the tables, with the name first, so that --all says whose they are."""
    events = sum(each.events for each in found.partitions)
    dead = sum(each.dead for each in found.partitions)
    behind = "an unknown number" if found.lag is None else f"{found.lag:,}"
    driver = counted(found.drivers, "driver") if found.drivers else "no driver"
    ended = found.archive.ended
    output.say(
        f"{found.archive.name}: {counted(events, 'event')} read, {counted(dead, 'dead letter')}, "
        f"{behind} behind, {driver} at work"
        + (f", ended at {to_iso(ended.at_ms)}" if ended else "")
    )
    watermark = _watermark(found)
    output.say(f"Generation {found.generation}: {_written(found)}")
    if watermark:
        output.say(f"Watermark: {watermark}")


def _seconds(time: str | None) -> str | None:
    return None if time is None else to_seconds(time)


def _written(found: ArchiveStatus) -> str:
    """How many files were written; `archive verify` counts those that are there."""
    files = sum(each.files_written for each in found.partitions)
    aside = sum(len(each.files) for each in found.aside)
    return f"{counted(files, 'file')} written so far" + (f", {aside} set aside" if aside else "")


def _show_partitions(output: Output, found: ArchiveStatus) -> None:
    """Print what is wrong with source partitions."""
    for each in found.partitions:
        if each.remade:
            output.say(f"{found.archive.name}: {each.remade}")
        if each.ahead:
            output.say(
                f"{found.archive.name}: {each.partition}: waits for its source, which ends at "
                f"{each.end}, {counted(each.ahead, 'offset')} before it"
            )
        if each.ended:
            output.say(
                f"{found.archive.name}: {each.partition}: ended at {each.position}: the source "
                "partition was deleted and made again"
            )
        if each.unread:
            output.say(
                f"{found.archive.name}: {each.partition}: its topic was deleted, and up to "
                f"{counted(each.unread, 'event')} of it were not archived: they are lost"
            )

    failures = {each.partition: each.failure for each in found.partitions if each.failure}
    said = [(name, failure.message) for name, failure in failures.items()]
    for partition, message, others in by_cause(said):
        failure = failures[partition]
        output.say(
            f"{found.archive.name}: {partition}: has failed since {to_iso(failure.since_ms)}, "
            f"{counted(failure.attempts, 'attempt')}: {message}{same_in(others)}"
        )


def _show_generations(output: Output, found: ArchiveStatus) -> None:
    output.say(f"Files: {found.archive.folder_place(found.generation)}")
    others = _generations(found.archive)
    if len(others) > 1:
        said = ", ".join(f"{number} {state}" for number, state in others.items())
        output.say(f"Generations: {said}")
        building = found.archive.building
        if building not in (None, found.generation):
            command = f"`tidelog archive status {found.archive.name} --generation {building}`"
            output.say(f"See {command} for the progress and the errors of generation {building}.")
    for force in found.archive.forced:
        shown = [f"{name} {start} to {end}" for name, start, end in force.ranges[:10]]
        more = len(force.ranges) - len(shown) + force.more
        ranges = ", ".join(shown) + (f" and {more} more" if more else "")
        output.say(
            f"{found.archive.name}: promoted with --force at {to_iso(force.at_ms)}: generation "
            f"{force.new} lacks of generation {force.old}: {ranges}"
        )


def _generations(archive: Archive) -> dict[str, str]:
    """Every generation, with its state."""
    return {str(number): archive.state_of(number) for number in sorted(archive.formats)}


def _aside(found: Aside) -> dict[str, Any]:
    return {
        "start": found.start,
        "end": found.end,
        "events": found.events,
        "files": list(found.files),
        "at": to_iso(found.at_ms),
    }


def _watermark(found: ArchiveStatus) -> str | None:
    watermark_ms = found.archive.watermark_ms
    return None if watermark_ms is None else to_iso(watermark_ms)


def _table(given: dict[str, Any]) -> str | None:
    """Returns the table that is meant; None: all of them."""
    kind, catalog, table = given["kind"], given["catalog"], given["table"]
    if bool(catalog) != (kind == "iceberg") or bool(table) != (kind in ("iceberg", "glue")):
        raise InvalidError(
            "register: --as delta goes without --catalog and --table, --as iceberg needs both, "
            "and --as glue needs --table"
        )
    if given["forget"] and given["keep"] is not None:
        raise InvalidError("register: --forget and --keep: give one of them")
    if kind is None:
        return None
    names = {"delta": "delta", "glue": f"glue:{table}"}
    return names.get(kind, f"iceberg:{catalog}#{table}")
