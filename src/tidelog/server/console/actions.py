"""What a person can do to an archive: run, backfill, redo, promote, roll back, drop, finalize,
register, and replay its dead letters.

Each action shows first what it would do, and with ``sure`` starts a job. All of them can be killed
and started again. A page must not make the server run code of others, or reach out to other hosts:
so parsers are those of Tidelog, and a new table is a Delta table beside the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidelog.api.archives import ArchiveHandle
from tidelog.codec.parsers import open_parser
from tidelog.codec.parsers.base import folder_settings
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model import defaults
from tidelog.model.archive import Archive
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms
from tidelog.public import BackfillOptions, CycleReport, RedoOptions, RunResult
from tidelog.server.console.archives import PARSERS, Pipelines
from tidelog.server.console.format import counted, size, url
from tidelog.server.console.jobs import WHOLE, Job, JobRunner, Work, check_incarnation
from tidelog.server.console.session import Answer, Redirect, ShownPage, Visit

__all__ = ["ActionPages"]

_FORMATS = ("parquet", "orc", "avro", "jsonlines")
_GRANULARITIES = ("day", "hour", "minute")
_REASONS = 20  # of dead letters in a preview
_SHOWN = {"generation", "live"}  # what a person saw, and means


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would do, before it is done."""

    title: str
    says: tuple[str, ...]  # each a sentence
    button: str
    what: str  # the job, in words
    args: Mapping[str, str]  # of the job, and of the form that starts it
    is_grave: bool = False  # readers of the archive see it
    reasons: tuple[tuple[str, int, int], ...] = ()  # of dead letters: how many now, and then
    is_idle: bool = False  # nothing would change
    back: str = ""  # the page to return to; the archive's by default


class ActionPages:
    """Shows what actions would do, and starts them."""

    def __init__(self, home: Home, pipelines: Pipelines, jobs: JobRunner) -> None:
        self._home = home
        self._pipelines = pipelines
        self._jobs = jobs
        self._actions: dict[str, Callable[[ArchiveHandle, Visit], Preview]] = {
            "run": self._plan_run,
            "backfill": self._plan_backfill,
            "redo": self._plan_redo,
            "promote": self._plan_promote,
            "rollback": self._plan_rollback,
            "drop": self._plan_drop,
            "replay": self._plan_replay,
            "finalize": self._plan_finalize,
            "register": self._plan_register,
        }
        for kind, work in (
            ("run", _run),
            ("backfill", _backfill),
            ("redo", _redo),
            ("promote", _promote),
            ("rollback", _rollback),
            ("drop", _drop),
            ("replay", _replay),
            ("finalize", _finalize),
            ("register", _register),
        ):
            jobs.register(kind, self._resume(work))

    def act(self, visit: Visit) -> Answer:
        """``POST /console/archives/{name}/act``: first what would be done; ``sure`` starts it"""
        archive = self._home.archives.get(visit.path["name"])
        archive.reload()
        action = visit.text("do")
        if action not in self._actions:
            raise InvalidError(f"action `{action[:40]}`: give one of {', '.join(self._actions)}")
        preview = self._actions[action](archive, visit)
        for name in _SHOWN & preview.args.keys():
            if visit.form.get("sure") and visit.text(name) not in ("", preview.args[name]):
                raise ConflictError(f"archive `{archive.name}`: has changed: look at it again")
        if not visit.form.get("sure"):
            values = {"archive": archive.info, "preview": preview, "do": action}
            values["can_stop"] = action not in WHOLE
            return ShownPage("act.html", values)
        args = {
            "archive": archive.name,
            "incarnation": archive.info.incarnation,
            **preview.args,
        }
        who = self._home.reason(who=visit.session.who or None).who
        self._jobs.start(action, preview.what, args, who)
        return Redirect("/console/jobs")

    def _resume(
        self, work: Callable[[ArchiveHandle, Mapping[str, str], Job], str]
    ) -> Callable[[Mapping[str, str], str], Work]:
        def resume(args: Mapping[str, str], who: str) -> Work:
            archive = self._home.archives.get(args["archive"])
            check_incarnation(f"archive `{archive.name}`", args, archive.info.incarnation)

            def run(job: Job) -> str:
                try:
                    return work(archive, args, job)
                finally:
                    self._pipelines.wake()

            return run

        return resume

    # What each would do.

    def _plan_run(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        status = archive.status()
        if status.lag is None:
            says = ["The source does not say how many events wait."]
        else:
            says = [f"{counted(status.lag, 'event')} waiting in the source."]
        if status.drivers:
            says.append("The driver that follows the archive writes them now, in smaller files.")
        else:
            says.append("No driver follows the archive: this server archives what waits, once.")
        says.append("Files that are smaller than usual cost readers a little more.")
        title = f"Archive what waits for {archive.name} now?"
        return Preview(title, tuple(says), "Run it now", f"run of {archive.name}", {})

    def _plan_backfill(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        args = {name: visit.text(name) for name in ("parser", "granularity", "format")}
        args["start"] = "earliest" if visit.form.get("start") else ""
        _check_backfill(info, args)
        made = info.format_of()
        building = info.building
        changed = [
            f"{name} {value} instead of {before}"
            for name, value, before in (
                ("parser", args["parser"], made.parser or "none"),
                ("granularity", args["granularity"], made.layout.get("granularity", "day")),
                ("format", args["format"], made.format),
            )
            if value and value != before
        ]
        events = sum(each.events for each in archive.status().partitions)
        number = building or info.newest + 1
        args["generation"] = str(number)
        says = [
            (
                f"Generation {number} is built beside generation {info.generation}, which readers "
                "keep seeing."
            ),
            (
                f"About {events:,} events are read again from the source, or from the live files "
                "where the source no longer has them."
            ),
            f"It has {' and '.join(changed)}." if changed else "It is written as the live one is.",
            (
                "Its parser reads all events: dead letters that another one has replayed are dead "
                "letters again in it."
            ),
            "When it is complete, promote it.",
        ]
        if building:
            says.insert(0, f"Generation {building} is being built already: this resumes it.")
        what = f"backfill of {archive.name}"
        title = f"Build a new generation of {archive.name}?"
        return Preview(title, tuple(says), "Begin the backfill", what, args)

    def _plan_redo(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        args = {name: visit.text(name) for name in ("dates", "topics", "partitions", "parser")}
        _check_parser(args["parser"], "redo")
        _check_transform(info, "redo")
        plan = archive.plan_redo(
            dates=_words(args["dates"]),
            topics=_words(args["topics"]),
            partitions=_words(args["partitions"]),
            parser=args["parser"] or None,
        )
        number = info.building or info.newest + 1
        args["generation"] = str(number)
        parser = f"parser {args['parser']}" if args["parser"] else "the same parser"
        says = [
            (
                f"Generation {number} is built beside generation {info.generation}, which readers "
                "keep seeing."
            ),
            (
                f"Writes {counted(plan.events, 'event')} of {counted(plan.files, 'file')} again, "
                f"with {parser}."
            ),
        ]
        if plan.copied_files:
            says.append(
                f"Copies {counted(plan.copied_files, 'other file')} ({size(plan.copied_bytes)}) in "
                f"the store, which on S3 costs about {counted(plan.requests, 'request')}."
            )
        else:
            says.append("There is no other file to copy.")
        says.append("When it is complete, promote it.")
        if info.building:
            says.insert(0, f"Generation {info.building} is being built already: this resumes it.")
        what = f"redo of a part of {archive.name}"
        title = f"Write a part of {archive.name} again?"
        return Preview(title, tuple(says), "Begin the redo", what, args)

    def _plan_promote(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        if info.building is None:
            raise InvalidError(f"archive `{info.name}`: no generation is being built: backfill one")
        built = archive.status(info.building)
        live = archive.status()
        says = (
            (
                f"Readers see generation {info.building} from then on: "
                f"{sum(each.events for each in built.partitions):,} events, where generation "
                f"{info.generation} has {sum(each.events for each in live.partitions):,}."
            ),
            (
                "It is brought up to the live one first. If it lacks events that the live one has, "
                "nothing changes."
            ),
            *_tables_follow(info),
            f"Generation {info.generation} is kept, so that you can roll back.",
        )
        title = f"Make generation {info.building} of {archive.name} the live one?"
        what = f"promote of generation {info.building} of {archive.name}"
        args = {"generation": str(info.building)}
        return Preview(title, says, "Promote it", what, args, is_grave=True)

    def _plan_rollback(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        number = visit.number("generation", 0)
        if number not in info.formats or info.state_of(number) != "kept":
            raise InvalidError(f"archive `{info.name}`: generation {number} is not kept")
        says = (
            (
                f"Readers see generation {number} again, instead of {info.generation}. It gets all "
                "events that came in since first."
            ),
            *_tables_follow(info),
            f"Generation {info.generation} is kept.",
        )
        title = f"Roll {archive.name} back to generation {number}?"
        what = f"rollback of {archive.name} to generation {number}"
        args = {"generation": str(number), "live": str(info.generation)}
        return Preview(title, says, "Roll back", what, args, is_grave=True)

    def _plan_drop(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        number = visit.number("generation", 0)
        if number not in info.formats or number == info.generation:
            raise InvalidError(f"archive `{info.name}`: generation {number} cannot be dropped")
        status = archive.status(number)
        files = sum(each.files_written for each in status.partitions)
        stored = sum(each.bytes_written for each in status.partitions)
        says = (
            f"Deletes its files: {files:,} written so far ({size(stored)}). This cannot be undone.",
            f"Readers keep seeing generation {info.generation}.",
            "If it holds events that neither the live one nor the source has, nothing changes.",
        )
        title = f"Drop generation {number} of {archive.name}?"
        what = f"drop of generation {number} of {archive.name}"
        args = {"generation": str(number)}
        return Preview(title, says, "Drop it", what, args, is_grave=True)

    def _plan_replay(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        parser = visit.text("parser")
        _check_parser(parser, "dead --replay")
        plan = archive.plan_replay(parser=parser)
        if not plan.dead:
            raise InvalidError(f"archive `{archive.name}`: has no dead letters: nothing to replay")
        tried = f"{counted(plan.dead, 'dead letter')}."
        if plan.tried < plan.dead:
            tried = f"{tried} The first {plan.tried:,} were tried."
        own = archive.info.format_of().parser
        named = f"Parser {parser or own}" if parser or own else "The archive, without a parser,"
        says = [
            tried,
            (
                f"{named} accepts {plan.accepted:,} of {plan.tried:,}, and rejects "
                f"{plan.tried - plan.accepted:,}."
            ),
            "Accepted events are written to data files, each once. The others stay dead letters.",
            *_tables_follow(archive.info),
        ]
        is_idle = plan.tried == plan.dead and not plan.accepted
        if is_idle:
            says[2:] = ["A replay would change nothing: fix the parser, or choose another one."]
        reasons = tuple(
            (text, plan.reasons.get(text, 0), plan.refused.get(text, 0))
            for text in [
                *plan.reasons,
                *(each for each in plan.refused if each not in plan.reasons),
            ]
        )
        title = f"Replay the dead letters of {archive.name}?"
        what = f"replay of the dead letters of {archive.name}"
        return Preview(
            title,
            tuple(says),
            "Replay them",
            what,
            {"parser": parser},
            reasons=reasons[:_REASONS],
            is_idle=is_idle,
            back=url("/console/archives", archive.name, "dead"),
        )

    def _plan_finalize(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        delay = visit.text("delay") or defaults.FINALIZE_DELAY
        duration_ms(delay)
        found = archive.finalize(delay, dry_run=True)
        if found.watermark_ms is None:
            says = ["No date folder is complete yet: nothing would be marked."]
        else:
            says = [f"All events before {to_iso(found.watermark_ms)} are in."]
            folders = counted(len(found.notices), "date folder")
            says.append(f"{folders} will have a _SUCCESS file.")
            says += [
                f"{each.folder}: {counted(each.events, 'event')}." for each in found.notices[:10]
            ]
        says.append("An event that comes later reopens its folder.")
        title = f"Mark complete date folders of {archive.name}?"
        return Preview(
            title, tuple(says), "Mark them", f"finalize of {archive.name}", {"delay": delay}
        )

    def _plan_register(self, archive: ArchiveHandle, visit: Visit) -> Preview:
        info = archive.info
        table = visit.text("table") or "delta"
        if table != "delta" and table not in info.tables:
            raise InvalidError(
                f"table `{table[:80]}`: from here it may be delta, or a table that is registered: "
                "use `tidelog archive register` for another one"
            )
        keep = "1" if visit.form.get("keep") else ""
        known = {each.table: each for each in archive.tables.status()}.get(table)
        if known is None:
            says = [f"Creates table {table} of the files of generation {info.generation}."]
        else:
            files, events = counted(known.files, "data file"), counted(known.events, "event")
            says = [f"{files} with {events} to add to {table}."]
        says.append("Files stay where they are: the table lists them.")
        if keep:
            says.append("Drivers bring it up to date after each cycle from then on.")
        title = f"{'Create' if known is None else 'Bring up to date'} table {table}?"
        what = f"registration of {table} of {archive.name}"
        return Preview(title, tuple(says), "Register it", what, {"table": table, "keep": keep})


def _tables_follow(info: Archive) -> tuple[str, ...]:
    if not info.tables:
        return ()
    return (f"Its tables follow: {', '.join(info.tables)}.",)


def _check_parser(parser: str, command: str) -> None:
    """Raises ``InvalidError`` for a parser that reads files of the server, or runs its code."""
    is_first = parser.startswith("first:")
    tried = parser.removeprefix("first:").split("||") if is_first else [parser]
    if any(each.strip().partition(":")[0] not in ("", *PARSERS) for each in tried):
        raise InvalidError(
            f"parser `{parser[:80]}`: from here it may be {', '.join(PARSERS)}: use "
            f"`tidelog archive {command}` for one of your own"
        )
    if parser:
        open_parser(parser, folder_settings(parser, {}))  # raises where a job would fail later


def _check_transform(info: Archive, command: str) -> None:
    if info.format_of().transform:
        raise InvalidError(
            f"archive `{info.name}`: has a transform, which needs Spark: use `tidelog archive "
            f"{command} --master`"
        )


def _check_backfill(info: Archive, args: Mapping[str, str]) -> None:
    _check_parser(args["parser"], "backfill")
    for name, known in (("granularity", _GRANULARITIES), ("format", _FORMATS)):
        if args[name] and args[name] not in known:
            raise InvalidError(f"{name} `{args[name][:40]}`: give one of {', '.join(known)}")
    _check_transform(info, "backfill")


def _words(text: str) -> list[str]:
    """Returns the words of a list that a person types with commas or blanks."""
    return text.replace(",", " ").split()


def _counting(job: Job, total: int | None) -> Callable[[CycleReport], None]:
    done = 0

    def on_cycle(report: CycleReport) -> None:
        nonlocal done
        done += report.events
        known = "" if not total else f" of about {max(total, done):,}"
        job.tell(f"{done:,}{known} events archived", 100 * done / total if total else None)

    return on_cycle


def _run(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    status = archive.status()
    if status.drivers:
        job.tell("asked the driver that follows it to write what waits")
        left = archive.flush(who=job.who)
        if left:
            return f"still waiting for {len(left)} partitions: {', '.join(left[:5])}"
        return "the driver has written everything that waited"
    done = archive.run(stop=job.stop, on_cycle=_counting(job, status.lag), who=job.who)
    return (
        f"{counted(done.events, 'event')} read, {counted(done.dead, 'dead letter')}, "
        f"wrote {done.files}"
    )


def _built_before(archive: ArchiveHandle, args: Mapping[str, str]) -> str:
    """Returns what to say if a generation to build needs nothing more; empty if it does.

    A job may be resumed long after its server ended, and must not begin another generation then.
    """
    info, number = archive.reload(), int(args["generation"])
    if number in (info.building, info.newest + 1):
        return ""
    if number in info.formats:
        return f"generation {number} was promoted since: nothing is left to do"
    raise NotFoundError(
        f"archive `{info.name}`: generation {number} was dropped since the job was started: start "
        "another one"
    )


def _backfill(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    if said := _built_before(archive, args):
        return said
    status = archive.status()
    total = sum(each.events for each in status.partitions) + (status.lag or 0)
    building = archive.info.building
    if building is not None:
        total -= sum(each.events for each in archive.status(building).partitions)
    how = BackfillOptions(stop=job.stop, on_cycle=_counting(job, max(0, total)), who=job.who)
    how["parser"] = args["parser"] or None
    how["granularity"] = args["granularity"] or None
    how["format"] = args["format"] or None
    start: Any = args["start"] or None
    done = archive.backfill(start=start, **how)
    return (
        f"generation {done.generation} has {done.events:,} more events in "
        f"{done.files}{_dead_again(done)}: promote it on the page of the archive"
    )


def _dead_again(done: RunResult) -> str:
    if not done.dead_again:
        return ""
    letters = counted(done.dead_again, "dead letter")
    return (
        f", and {letters} that the live one got by a replay (`tidelog archive dead NAME "
        f"--generation {done.generation} --replay` replays them)"
    )


def _redo(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    if said := _built_before(archive, args):
        return said
    total = sum(each.events for each in archive.status().partitions)
    how = RedoOptions(stop=job.stop, on_cycle=_counting(job, total), who=job.who)
    how["parser"] = args["parser"] or None
    done = archive.redo(
        dates=_words(args["dates"]),
        topics=_words(args["topics"]),
        partitions=_words(args["partitions"]),
        **how,
    )
    return (
        f"generation {done.generation} has {counted(done.events, 'event')}, copied or written "
        "again: promote it on the page of the archive"
    )


def _promote(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    number = int(args["generation"])
    if archive.reload().generation != number:  # else a server did that, and ended
        job.tell("bringing it up to the live one")
        archive.promote(number, who=job.who)
    return f"generation {number} is the live one"


def _rollback(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    info, number = archive.reload(), int(args["generation"])
    if info.generation not in (number, int(args["live"])):
        raise ConflictError(
            f"archive `{info.name}`: generation {info.generation} is live since the job was "
            "started: start another one"
        )
    if info.generation != number:  # else a server did that, and ended
        job.tell("bringing it up to the live one")
        archive.rollback(number, who=job.who)
    return f"generation {number} is the live one"


def _drop(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    archive.drop(int(args["generation"]), who=job.who)
    return f"generation {args['generation']} and its files are deleted"


def _replay(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    total = sum(each.dead for each in archive.status().partitions)
    tried = 0

    def on_cycle(report: CycleReport) -> None:
        nonlocal tried
        tried += report.events
        job.tell(f"{tried:,} of {total:,} dead letters tried", 100 * tried / (total or 1))

    done = archive.replay(parser=args["parser"], stop=job.stop, on_cycle=on_cycle, who=job.who)
    return (
        f"{counted(done.tried, 'dead letter')} tried, {done.replayed:,} archived now, "
        f"{done.dead:,} still dead"
    )


def _finalize(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    done = archive.finalize(args["delay"], who=job.who)
    if done.watermark_ms is None:
        return "no date folder is complete yet"
    marked = counted(len(done.notices), "date folder")
    return f"{marked} marked, complete up to {to_iso(done.watermark_ms)}"


def _register(archive: ArchiveHandle, args: Mapping[str, str], job: Job) -> str:
    done = archive.tables.register(args["table"], keep=bool(args["keep"]), who=job.who)
    return "; ".join(
        f"{each.table}: {counted(each.files_added, 'data file')} with "
        f"{counted(each.events_added, 'event')} added"
        for each in done
    )
