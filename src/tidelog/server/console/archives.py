"""Pages of archives and pumps: how far, what waits, files as a tree, dead letters.

:class:`Pipelines` looks at archives, pumps and keepers in a thread of its own, as some are slow. A
source that hangs holds up this thread alone; pages show what was known before, and since when.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidelog.api.archives import ArchiveHandle
from tidelog.api.doctor import response_times
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, troubles
from tidelog.coordination.jobs import Keeper, Keepers
from tidelog.errors import TidelogError
from tidelog.home import Home
from tidelog.model.archive import Archive
from tidelog.public import PumpStatus, TableStatus
from tidelog.server.console.charts import bar_chart
from tidelog.server.console.session import Answer, ShownPage, Visit
from tidelog.server.http.errors import shape

__all__ = ["PARSERS", "ArchivePages", "Pipelines", "PipelinesSeen"]

_BUSY_S = 5.0
_IDLE_S = 60.0
_FIRST_S = 0.5  # in which most have been seen once, after a start


@dataclass(frozen=True, slots=True)
class ArchiveSeen:
    """One archive; without a status where it could not be read."""

    archive: Archive
    status: ArchiveStatus | None
    troubles: tuple[str, ...]
    tables: tuple[TableStatus, ...] | None = None  # None: not looked at yet

    @property
    def dead(self) -> int:
        return sum(each.dead for each in self.status.partitions) if self.status else 0

    @property
    def events(self) -> int:
        return sum(each.events for each in self.status.partitions) if self.status else 0

    @property
    def intents(self) -> int:
        return sum(each.stuck for each in self.status.partitions) if self.status else 0


@dataclass(frozen=True, slots=True)
class PipelinesSeen:
    """All archives and pumps, the store's health, and what `tidelog up` keeps running."""

    read_ms: int = 0
    archives: tuple[ArchiveSeen, ...] = ()
    pumps: tuple[PumpStatus, ...] = ()
    store_ms: float | None = None  # how long a small read took
    catalog_ms: float | None = None
    store_error: str = ""
    keepers: tuple[Keeper, ...] = ()


class Pipelines:
    """Reads the state of archives and pumps again and again. Start it, and stop it at the end."""

    def __init__(self, home: Home, is_busy: Callable[[], bool]) -> None:
        self.seen = PipelinesSeen()
        self._home = home
        self._is_busy = is_busy
        self._waiting = WaitingTimes()
        self._keepers = Keepers(home.context)
        self._first = threading.Event()  # they were seen once
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidelog-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> PipelinesSeen:
        """Returns the last state; if that is old, asks for a new one."""
        self._first.wait(_FIRST_S)
        if self._home.context.clock.now_ms() - self.seen.read_ms > 1000 * _BUSY_S:
            self._wake.set()
        return self.seen

    def wake(self) -> None:
        """Asks for a new state soon, because something has changed or a page was opened."""
        self._wake.set()

    def stop(self) -> None:
        """Stops, without waiting for a source that hangs."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.seen = self._look()
            except TidelogError:
                pass  # the sampler tells that the catalog cannot be read
            except Exception:  # noqa: BLE001 - a source that is broken in its own way
                if self._stop.is_set():
                    return  # the home is closed
            self._first.set()
            self._wake.wait(_BUSY_S if self._is_busy() else _IDLE_S)
            self._wake.clear()

    def _look(self) -> PipelinesSeen:
        home, clock = self._home, self._home.context.clock
        times = response_times(home.context)
        error = times.store_error
        archives = [each for each in home.archives.list() if each.info.state == "ready"]
        pumps = [each for each in home.pumps.list(restores=True) if each.info.state == "ready"]
        return PipelinesSeen(
            clock.now_ms(),
            tuple(see_archive(each, self._waiting) for each in archives),
            tuple(each.status() for each in pumps),
            times.store_ms,
            times.catalog_ms,
            "" if error is None else shape(error)["error"]["message"],
            tuple(self._keepers.list()),
        )


def see_archive(archive: ArchiveHandle, waiting: WaitingTimes | None = None) -> ArchiveSeen:
    """Returns the current state of an archive; its tables only for a caller that may wait."""
    try:
        status = archive.status(waiting=waiting)
    except TidelogError as exc:
        return ArchiveSeen(archive.info, None, (f"archive `{archive.name}`: {exc}",))
    tables = None
    if waiting is not None or not archive.info.tables:
        tables = tuple(archive.tables.status()) if archive.info.tables else ()
    return ArchiveSeen(archive.info, status, tuple(troubles(status, Limits())), tables)


_LETTERS_MAX = 50  # dead letters on one page
_LETTERS_READ_MAX = 20_000  # whose reasons are counted
_READ_S = 0.3
_BARS = 60  # of a history
PARSERS = ("json", "iso8601", "date", "regex", "delimited", "timestamp", "offset", "first")


class ArchivePages:
    """Pages of archives and pumps."""

    def __init__(self, home: Home, pipelines: Pipelines) -> None:
        self._home = home
        self._pipelines = pipelines

    def archives(self, visit: Visit) -> Answer:
        """``GET /console/archives``"""
        return ShownPage("archives.html", {"seen": self._pipelines.look()})

    def archive(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}``"""
        archive = self._home.archives.get(visit.path["name"])
        info = archive.reload()
        history = archive.history(bars=_BARS)
        seen = self._seen(archive)
        values = {
            "archive": info,
            "seen": seen,
            "tables": {each.table: each for each in seen.tables or ()},
            "history": history,
            "chart": bar_chart([(bar.start_ms, bar.events) for bar in history.bars]),
            "generations": [(number, info.state_of(number)) for number in sorted(info.formats)],
            "building": info.building,
            "redo": info.format_of(info.building).redo if info.building else None,
            "sources": sorted({each.partition for each in seen.status.partitions})
            if seen.status
            else (),
            "parsers": PARSERS,
        }
        return ShownPage("archive.html", values)

    def pump(self, visit: Visit) -> Answer:
        """``GET /console/pumps/{name}``"""
        pump = self._home.pumps.get(visit.path["name"])
        known = [each for each in self._pipelines.look().pumps if each.named == pump.info]
        seen = known[0] if known else pump.status()
        return ShownPage("pump.html", {"named": pump.info, "seen": seen})

    def files(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}/files``"""
        archive = self._home.archives.get(visit.path["name"])
        under = visit.text("under").strip("/")
        page = archive.folder(under, after=visit.text("after"))
        parts = under.split("/") if under else []
        values = {
            "archive": archive.info,
            "under": under,
            "entries": page.entries,
            "more": page.following,
            "path": [(part, "/".join(parts[: at + 1])) for at, part in enumerate(parts)],
            "prefix": page.prefix,
        }
        return ShownPage("files.html", values)

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
            "parsers": PARSERS,
            "parser": archive.format_of().parser,
        }
        return ShownPage("dead.html", values)

    def _seen(self, archive: ArchiveHandle) -> ArchiveSeen:
        """Returns the last state of an archive; reads it now if it is new or was changed."""
        for each in self._pipelines.look().archives:
            if each.archive == archive.info:
                return each
        return see_archive(archive)


def _letters(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    some = batch.slice(0, 10 * _LETTERS_MAX)
    return [
        {**row, "reason": row["error"], "time_ms": time_ms}
        for row, time_ms in zip(some.to_pylist(), times, strict=False)
    ]
