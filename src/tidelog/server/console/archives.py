"""Pages of archives and pumps: how far, what waits, files as a tree, dead letters, their replay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidelog.api.archives import ArchiveHandle
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.pipeline.endpoints import store_at
from tidelog.server.console.format import url
from tidelog.server.console.pipelines import ArchiveSeen, Job, Jobs, Pipelines, see_archive
from tidelog.server.console.session import Answer, Redirect, Shown, Visit
from tidelog.store.base import Store

__all__ = ["ArchivePages"]

_ENTRIES_MAX = 500  # of a folder on one page
_LETTERS_MAX = 50  # dead letters on one page
_LETTERS_READ_MAX = 20_000  # whose reasons are counted
_READ_S = 0.3
_PARSERS = ("json", "iso8601", "date", "regex", "delimited", "timestamp", "offset")


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder, or a file in one."""

    name: str
    size: int | None = None  # None: a folder
    modified_ms: int = 0


class ArchivePages:
    """What is shown of archives and pumps."""

    def __init__(self, home: Home, pipelines: Pipelines, jobs: Jobs) -> None:
        self._home = home
        self._pipelines = pipelines
        self._jobs = jobs

    def archives(self, visit: Visit) -> Answer:
        """``GET /console/archives``"""
        return Shown("archives.html", {"seen": self._pipelines.look()})

    def archive(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}``"""
        archive = self._home.archives.get(visit.path["name"])
        return Shown("archive.html", {"archive": archive.reload(), "seen": self._seen(archive)})

    def pump(self, visit: Visit) -> Answer:
        """``GET /console/pumps/{name}``"""
        pump = self._home.pumps.get(visit.path["name"])
        known = [each for each in self._pipelines.look().pumps if each.named == pump.info]
        seen = known[0] if known else pump.status()
        return Shown("pump.html", {"named": pump.info, "seen": seen})

    def files(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}/files``"""
        archive = self._home.archives.get(visit.path["name"]).reload()
        under = visit.text("under").strip("/")
        if any(part in ("", ".", "..") for part in under.split("/") if under):
            raise InvalidError(f"folder `{under[:80]}`: is none of an archive: choose one here")
        prefix = f"{archive.folder()}/" + (f"{under}/" if under else "")
        store = store_at(self._home.context, archive.store)
        entries, is_whole = list_folder(store, prefix, visit.text("after"))
        parts = under.split("/") if under else []
        values = {
            "archive": archive,
            "under": under,
            "entries": entries,
            "more": None if is_whole or not entries else entries[-1].name,
            "path": [(part, "/".join(parts[: at + 1])) for at, part in enumerate(parts)],
            "prefix": prefix,
        }
        return Shown("files.html", values)

    def dead(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}/dead``"""
        handle = self._home.archives.get(visit.path["name"])
        archive = handle.reload()
        wanted = visit.text("reason")
        reasons: Counter[str] = Counter()
        letters: list[dict[str, Any]] = []
        clock = self._home.context.clock
        until_s = clock.monotonic_s() + _READ_S
        is_whole = True
        for batch in handle.dead_letters():
            texts = batch.column("error").to_pylist()
            reasons.update(text.partition(": ")[0] for text in texts)
            if len(letters) < _LETTERS_MAX:
                found = (each for each in _letters(batch) if wanted in each["reason"])
                letters += [each for each, _ in zip(found, range(_LETTERS_MAX), strict=False)]
            if reasons.total() >= _LETTERS_READ_MAX or clock.monotonic_s() > until_s:
                is_whole = False
                break
        values = {
            "archive": archive,
            "reasons": reasons.most_common(20),
            "letters": letters[:_LETTERS_MAX],
            "total": reasons.total(),
            "is_whole": is_whole,
            "reason": wanted,
            "parsers": _PARSERS,
            "parser": archive.making().parser,
        }
        return Shown("dead.html", values)

    def replay(self, visit: Visit) -> Answer:
        """``POST /console/archives/{name}/replay``"""
        archive = self._home.archives.get(visit.path["name"])
        archive.reload()
        parser = visit.text("parser")
        if parser and parser.partition(":")[0] not in _PARSERS:
            raise InvalidError(
                f"parser `{parser[:80]}`: from here it may be {', '.join(_PARSERS)}: use "
                "`tidelog archive dead --replay` for one of your own"
            )

        def work(job: Job) -> str:
            done = archive.replay(parser=parser, stop=job.stop)
            self._pipelines.wake()
            return (
                f"{done.tried:,} dead letters tried, {done.replayed:,} are in the archive now, "
                f"{done.dead:,} stay dead"
            )

        what = f"replay of the dead letters of {archive.name}"
        self._jobs.start(what, url("/console/archives", archive.name), work)
        return Redirect("/console/jobs")

    def jobs(self, visit: Visit) -> Answer:
        """``GET /console/jobs``"""
        return Shown("jobs.html", {"jobs": self._jobs.all()})

    def stop(self, visit: Visit) -> Answer:
        """``POST /console/jobs/stop``"""
        self._jobs.stop(visit.text("job"))
        return Redirect("/console/jobs")

    def _seen(self, archive: ArchiveHandle) -> ArchiveSeen:
        """As it was seen last; one that is new, or that was changed, is looked at now."""
        for each in self._pipelines.look().archives:
            if each.archive == archive.info:
                return each
        return see_archive(archive)


def list_folder(store: Store, prefix: str, after: str = "") -> tuple[list[Entry], bool]:
    """What is right in a folder, in order, and whether that is all. Skips what is further down."""
    entries: list[Entry] = []
    start = f"{prefix}{after}\U0010ffff" if after else ""
    while len(entries) < _ENTRIES_MAX:
        jump = ""
        for info in store.list(prefix, start):
            name, slash, _ = info.key.removeprefix(prefix).partition("/")
            if slash:
                entries.append(Entry(name))
                jump = f"{prefix}{name}/\U0010ffff"
                break
            entries.append(Entry(name, info.size, info.modified_ms))
            if len(entries) >= _ENTRIES_MAX:
                return entries, False
        if not jump:
            return entries, True
        start = jump
    return entries, False


def _letters(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    some = batch.slice(0, 10 * _LETTERS_MAX)
    return [
        {**row, "reason": row["error"], "time_ms": time_ms}
        for row, time_ms in zip(some.to_pylist(), times, strict=False)
    ]
