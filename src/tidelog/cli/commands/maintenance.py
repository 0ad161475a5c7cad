"""``tidelog lag``, ``trim``, ``sweep`` and ``verify``: looking after topics."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import Any

import click

from tidelog.cli.commands.events import NO_CONSUMERS, owned
from tidelog.cli.commands.proof import GivenEvents, proof_option, report_proof, search_with_bar
from tidelog.cli.output import FAILED, Output, Size, counted, json_option, progress_bar, utf8
from tidelog.cli.pipeline_options import SparkFields, task_options, tasks_of
from tidelog.cli.terminal import ask_first, open_home, past_of, past_options, yes_option
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.log.maintenance.trim import KeepBytes, ToOffsets, TrimResult, TrimTo
from tidelog.log.maintenance.verify import VerifyReport
from tidelog.log.maintenance.verify_bytes import Severity
from tidelog.model import defaults

__all__ = ["lag", "sweep", "trim", "verify"]

_CLOCK_NOISE_MS = 1_000  # a clock that is ahead by less needs no attention
_NOTES_SHOWN = 3  # of a topic, on a terminal or in a pipe; --json has all


@click.command()
@click.argument("topic", required=False)
@json_option
@click.pass_obj
def lag(home_text: str | None, output: Output, topic: str | None) -> None:
    """Show how far behind each consumer is.

    Prints a row for each partition, of one topic or of all.

    \b
    Examples:
      tidelog lag
      tidelog lag orders --json
    """
    with open_home(home_text) as home:
        rows = [
            {
                "topic": each.topic,
                "consumer": each.consumer,
                "partition": each.partition,
                "cursor": each.cursor,
                "end": each.end,
                "lag": each.events,
                "owner": owner,
            }
            for name in _names(home, topic)
            for consumer in home.consumers(name)
            for each, owner in owned(consumer, output)
        ]
        columns = ("topic", "consumer", "partition", "cursor", "end", "lag", "owner")
        output.records(columns, rows, NO_CONSUMERS)


@click.command()
@click.argument("topic")
@click.option(
    "--before",
    metavar="TIME",
    help="Delete runs whose events are all older than this time: ISO 8601, or -7d.",
)
@click.option(
    "--offset",
    "offsets",
    multiple=True,
    metavar="P:N",
    help="Start partition P at offset N. Repeatable.",
)
@click.option(
    "--keep-bytes",
    type=Size(),
    metavar="SIZE",
    help="Keep the newest runs of the topic that fit into this size in the store: bytes, or 10GB.",
)
@past_options
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@yes_option
@json_option
@click.pass_obj
def trim(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """Delete the oldest events of a topic.

    The next sweep deletes their objects. Give one of --before, --offset and --keep-bytes. With
    --before and --keep-bytes it deletes whole runs (a run is what one flush stored), so it may keep
    a little more.

    Refuses to delete events that a consumer, an archive, a pump or an unfinished playback has not
    read, and names it with its position. Pass one with --past-reader, or all with --past-readers.
    Delete an unused consumer with `tidelog consumer delete`.

    Asks first on a terminal. In scripts it does not ask, so that you can run it from cron.

    \b
    Examples:
      tidelog trim orders --before -30d
      tidelog trim orders --before -30d --dry-run
      tidelog trim orders --before -30d --past-reader billing
      tidelog trim orders --offset 0:1200 --offset 1:980
      tidelog trim orders --keep-bytes 10GB
    """
    past = past_of(given.pop("past_readers"), given.pop("past_names"))
    dry_run, yes = given.pop("dry_run"), given.pop("yes")
    if sum(value not in (None, ()) for value in given.values()) != 1:
        raise InvalidError("trim: give exactly one of --before, --offset and --keep-bytes")
    with open_home(home_text) as home:
        to = _trim_to(**given)
        shown = home.topic(topic).incarnation
        kept: list[str] = []
        if not (dry_run or yes) and sys.stdin.isatty():
            plan = home.trim(topic, to, past_readers=past, dry_run=True, incarnation=shown)
            kept = _kept(plan)
            to = ToOffsets({each.partition: each.new_start for each in plan})
            if count := sum(each.events for each in plan):
                question = f"Delete the oldest {counted(count, 'event')} of `{topic}`, for good?"
                ask_first(f"topic `{topic}`", question, yes)
        found = home.trim(topic, to, past_readers=past, dry_run=dry_run, incarnation=shown)
        output.records(
            ("partition", "old_start", "new_start", "events", "runs", "bytes"),
            [asdict(each) | {"events": each.events} for each in found],
        )
        for line in kept or _kept(found):
            output.say(line)
        if dry_run:
            output.say("Nothing was deleted.")


def _kept(found: list[TrimResult]) -> list[str]:
    """Returns why partitions kept older events."""
    return [f"partition {each.partition} keeps all: {each.kept}" for each in found if each.kept]


@click.command()
@click.option(
    "--grace",
    default=defaults.SWEEP_GRACE,
    show_default=True,
    metavar="DURATION",
    help="Delete only objects older than this.",
)
@click.option(
    "--accept-loss",
    type=utf8,
    multiple=True,
    metavar="TOPIC",
    help="Delete lost events of TOPIC for good, instead of appending them with `tidelog topic "
    "recover TOPIC`.",
)
@json_option
@click.pass_obj
def sweep(home_text: str | None, output: Output, grace: str, accept_loss: tuple[str, ...]) -> None:
    """Delete objects that nothing refers to.

    These are objects of trimmed events, dead producers and deleted topics, and of attempts and old
    generations of archives.

    Safe at any time, beside producers and other sweeps.

    Deletes nothing of a topic, and ends with exit code 1, where objects show that the catalog has
    lost commits: these objects are the only copy of events then. Restore the catalog, or append
    the events again with `tidelog topic recover TOPIC`. Only if you can do without them, accept the
    loss of what is there now by --accept-loss, which is remembered.

    Ends with exit code 1, too, where a topic cannot be swept now, and where the credentials do not
    allow it to list or remove uploads that did not end. It sweeps all other topics.

    \b
    Examples:
      tidelog sweep
      tidelog sweep --grace 1d --json
      tidelog sweep --accept-loss orders
    """
    with open_home(home_text) as home:
        report = home.sweep(grace, accept_loss=accept_loss)
    values = asdict(report)
    values["refused"] = [{"topic": each.topic, "error": str(each.error)} for each in report.refused]
    values["unlisted"] = list(map(str, report.unlisted))
    if not output.as_json:
        values["refused"] = "; ".join(str(each.error) for each in report.refused) or None
        values["unlisted"] = "; ".join(map(str, report.unlisted)) or None
        if report.clock_ahead_ms < _CLOCK_NOISE_MS:
            values["clock_ahead_ms"] = 0
    output.record(values, always=("topics", "objects_seen", "objects_deleted"))
    if not report.is_clean:
        sys.exit(FAILED)


@click.command()
@click.argument("topic", required=False)
@click.option(
    "--erased",
    type=utf8,
    multiple=True,
    metavar="ID",
    help="Search all objects for an erased event with this id. Repeatable.",
)
@click.option(
    "--erased-key",
    type=utf8,
    metavar="K",
    help="Search all objects for erased events with this key.",
)
@proof_option
@task_options
@json_option
@click.pass_obj
def verify(home_text: str | None, output: Output, /, topic: str | None, **given: Any) -> None:
    """Check every event against the catalog and its checksum.

    Changes nothing. Ends with exit code 1 when something is damaged or lost; a warning, such as
    objects that a dead producer may have left, does not change the exit code.

    With --erased it searches all objects that could hold an event instead: the topic's, those of
    archives that were made from it, and what is staged. Ends with exit code 1 when something is
    left, or when the id or key was never deleted here. It also removes what the files of a SQLite
    catalog still hold of deleted rows. --proof also adds a record to the audit.

    \b
    Examples:
      tidelog verify
      tidelog verify orders --json
      tidelog verify orders --erased order-17
      tidelog verify orders --erased-key customer-7 --proof request-118.json
      tidelog verify orders --master 'local[*]'
    """
    if given["erased"] or given["erased_key"] is not None:
        if topic is None:
            raise InvalidError("verify: --erased is of one topic: say which")
        keys = [] if given["erased_key"] is None else [given["erased_key"].encode()]
        with open_home(home_text) as home:
            proof = search_with_bar(home, topic, given["erased"], keys, tasks_of(given))
            if given["proof_file"] is not None:
                home.record_proof(proof)
        wanted = GivenEvents(given["erased"], given["erased_key"])
        report_proof(output, proof, given["proof_file"], given=wanted)
        return
    if given["proof_file"] is not None:
        raise InvalidError("verify: --proof needs --erased or --erased-key")
    with open_home(home_text) as home:
        problems = home.inspect()
        how = tasks_of(given)
        reports = [_verified(home, name, how) for name in _names(home, topic)]
    columns = ("topic", "partitions", "runs", "events", "bytes", "objects", "orphans", "errors")
    if output.as_json:
        records = [asdict(report) for report in reports]
        if problems:
            records.append({"topic": None, "errors": len(problems), "findings": problems})
        output.records((), records)
    else:
        output.records(columns, [asdict(report) for report in reports])
        for problem in problems:
            output.say(f"error: {problem}")
        for severity in ("error", "warning", "note"):
            for report in reports:
                _say_findings(output, report, severity)
    if problems or not all(report.is_clean for report in reports):
        sys.exit(FAILED)


def _say_findings(output: Output, report: VerifyReport, severity: Severity) -> None:
    """Prints the findings of one severity; of notes a few, since they need no attention."""
    found = [each for each in report.findings if each.severity == severity]
    shown = found[:_NOTES_SHOWN] if severity == "note" else found
    for finding in shown:
        output.say(f"{severity}: {finding.where}: {finding.what}")
    cut = report.findings_cut.get(severity, 0)
    if more := len(found) - len(shown):
        output.say(f"note: topic `{report.topic}`: {more + cut} more such notes: see --json")
    elif cut:
        output.say(f"{severity}: topic `{report.topic}`: {cut} more, not shown")


def _verified(home: Home, name: str, how: SparkFields) -> VerifyReport:
    def total() -> int:
        return sum(state.bytes or 0 for state in home.partitions(name))

    with progress_bar(f"verify {name}", total) as advance:
        return home.verify(name, advance, **how)


def _names(home: Home, topic: str | None) -> list[str]:
    """The topic that was given, or all that can be used."""
    if topic is not None:
        return [topic]
    return [each.name for each in home.topics() if each.state == "ready"]


def _trim_to(before: str | None, offsets: tuple[str, ...], keep_bytes: int | None) -> TrimTo | str:
    if before is not None:
        return before
    if keep_bytes is not None:
        return KeepBytes(keep_bytes)
    found = [re.fullmatch(r"(\d+):(\d+)", text, re.ASCII) for text in offsets]
    starts = {int(each[1]): int(each[2]) for each in found if each}
    if len(starts) != len(offsets):
        raise InvalidError(
            f"trim: --offset {' '.join(offsets)}: give P:N, a partition and an offset, "
            "each partition once"
        )
    return ToOffsets(starts)
