"""Two watchers of the store of a world with archives: of ``_SUCCESS`` and of erased events.

A marker may be put only into a folder that holds every event that was acknowledged before the
finalize began, unless the event came later than the delay allows. What a proof of erasure called
clean stays out of every object, name and row from then on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from tests.sim.archive_accounts import Accountant
from tests.sim.archive_store import Folders, Generation
from tests.sim.journal_raw import Place, Raw, Truth, WatchedCatalog, WatchedStore, _inner, traces
from tidelog.testing.scheduler import Scheduler

__all__ = ["Erasures", "Markers"]


@dataclass
class Erasures:
    """Ids of events that a proof has found nowhere."""

    rows: WatchedCatalog
    objects: WatchedStore
    proven: list[bytes] = field(default_factory=list)

    def prove(self, ids: Sequence[str], unsearched: Sequence[str] = ()) -> None:
        """A proof says that these were erased, except below folders that it names as unsearched."""
        needles = [each.encode() for each in ids]
        listed = tuple(f"object {folder}" for folder in unsearched)
        found = [
            each
            for each in traces(self.rows, self.objects, needles)
            if not listed or not each.startswith(listed)
        ]
        assert not found, f"the proof is clean, and there are {found[:4]}"
        if not unsearched:
            self.proven += needles

    def put(self, key: str, data: bytes) -> None:
        """An object is being put."""
        if self.proven:
            text = key.encode() + data + _inner(key, data)
            found = [each for each in self.proven if each in text]
            assert not found, f"`{key}` brings {found} back, which a proof found nowhere"


@dataclass
class Markers:
    """Which finalize is at work in which process, and the markers that it puts."""

    folders: Folders
    accountant: Accountant
    truth: Truth
    scheduler: Scheduler
    delay_ms: int
    acknowledged_ms: dict[Place, int] = field(default_factory=dict)
    _began: dict[Any, tuple[str, int, int]] = field(default_factory=dict)  # by process

    @contextlib.contextmanager
    def by(self, archive: str, generation: int, tick: int) -> Iterator[None]:
        """While the current process finalizes a generation, from this tick on."""
        current = self.scheduler.current
        process = None if current is None else current.group
        self._began[process] = archive, generation, tick
        yield
        del self._began[process]

    def look(self) -> None:
        """Note when events were acknowledged."""
        for place in islice(self.truth.events, len(self.acknowledged_ms), None):
            self.acknowledged_ms[place] = self.scheduler.time.now_ms()

    def put(self, key: str) -> None:
        """A marker is being put."""
        current = self.scheduler.current
        began = self._began.get(None if current is None else current.group)
        assert began is not None, f"`{key}` is put by a process that does not finalize"
        archive, number, tick = began
        now_ms, end_ms = self.scheduler.time.now_ms(), _end_ms(key.rpartition("/")[0])
        assert now_ms >= end_ms + self.delay_ms, f"`{key}` is put before its events may have come"
        live = [each for each in self.folders.live() if each.archive == archive]
        if live and live[0].number == number:
            self._check(live[0], key.rpartition("/")[0], tick)

    def _check(self, live: Generation, folder: str, tick: int) -> None:
        held = {stored.id for stored in self.folders.events(live)}
        for place, raw in self.truth.events.items():
            if self._is_due(live, place, raw, tick) and _folder_of(folder, raw) == folder:
                assert raw.id in held, f"`{folder}` is marked, and {raw.id} of {place} is not in it"

    def _is_due(self, live: Generation, place: Place, raw: Raw, tick: int) -> bool:
        """Whether an event must be in the archive by now."""
        if place[0] in self.truth.targets or raw.value is None:
            return False
        time_ms, kind = _time_and_kind(raw)
        late = self.acknowledged_ms.get(place, 0) - time_ms > self.delay_ms
        if kind != "a" or late or self.truth.history[place][0][0] > tick:
            return False
        return self.accountant.is_wanted(live, place)

    def check_all(self) -> None:
        """In the end: what markers say is what lies there."""
        for live in self.folders.live():
            for key in self.folders.markers(live):
                said = json.loads(self.folders.find(key) or b"")
                below = key.rpartition("/")[0] + "/"
                keys = [each for each in self.folders.data_keys(live) if each.startswith(below)]
                events = sum(len(self.folders.contents(each)) for each in keys)
                erased = sum(self.accountant.erased_in(live, each) for each in keys)
                assert said["files"] == len(keys), f"{key}: {said}, there are {len(keys)} files"
                assert events <= said["events"] <= events + erased, (
                    f"{key}: {said}, there are {events}"
                )


def _time_and_kind(raw: Raw) -> tuple[int, str]:
    _, time_ms, kind = (raw.value or b"").decode().split("=")
    return int(time_ms), kind


def _end_ms(folder: str) -> int:
    """When the time of a folder is over."""
    day, *rest = folder.partition("/dt=")[2].split("/")
    hour, minute = [*(int(part.partition("=")[2]) for part in rest), 0, 0][:2]
    start = datetime.fromisoformat(day).replace(hour=hour, minute=minute, tzinfo=UTC)
    length_s = (86_400, 3_600, 60)[len(rest)]
    return (int(start.timestamp()) + length_s) * 1000


def _folder_of(marked: str, raw: Raw) -> str:
    """The folder of an event that is as deep as the marked one."""
    time_ms, _ = _time_and_kind(raw)
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    above, _day, rest = marked.partition("/dt=")
    depth = rest.count("/")
    return above + moment.strftime("/".join(("/dt=%Y-%m-%d", "hr=%H", "min=%M")[: depth + 1]))
