"""Events that arrive in an archive while they are erased from it.

Archives read a backup that never had every third event (``BackupsWorld``). Events are erased from
them by key and by id. Before an erasure begins, more events of its key are in the source that no
archive has read yet, some of them in a source partition where the archive has none of that key.
Erasures are slow between their search and their record. Drivers and backfills read on meanwhile.

An erasure that found something and leaves nothing is a fact about all events that were in the
source when it began, up to its time: no live generation has one of them in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.sim.archive_accounts import Accountant
from tests.sim.archive_world import Done
from tests.sim.archive_worlds import WHY
from tests.sim.backups_world import BackupsWorld
from tests.sim.journal_home import KEYS, PARTITIONS
from tests.sim.journal_raw import Place
from tidelog.archive.archive import find_archive
from tidelog.coordination.audit import key_hash, read_audit
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.event_search import ArchiveSearch, FoundEvent, SourceOffset
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model.event import Event

__all__ = ["ArrivalsDone", "ArrivalsWorld"]


@dataclass
class KeysAccountant(Accountant):
    """Knows which keys were erased too."""

    asked_keys: set[bytes] = field(default_factory=set)

    def was_deleted(self, place: Place) -> bool:
        raw = self.truth.events.get(place)
        return super().was_deleted(place) or (raw is not None and raw.key in self.asked_keys)


@dataclass
class ArrivalsDone(Done):
    """What has happened here too."""

    clean: int = 0  # erasures that left nothing
    arrived: int = 0  # runs of a driver while an erasure was slow


class ArrivalsWorld(BackupsWorld):
    """One seed's world."""

    accountants = KeysAccountant
    accountant: KeysAccountant

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: ArrivalsDone = ArrivalsDone()
        self.kinds = {"build", "erase"}
        self.searching: list[str] = []  # archives that an erasure has searched
        self.gone: dict[str, set[Place]] = {}  # from an archive, by an erasure that has returned

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        look = ArchiveSearch.look

        def look_slowly(search: ArchiveSearch) -> Mapping[SourceOffset, FoundEvent]:
            found = look(search)
            self.searching.append(search.archive.name)
            try:
                search.context.clock.sleep(self.random.uniform(0, 8))
            finally:
                self.searching.remove(search.archive.name)
            return found

        patch.setattr(ArchiveSearch, "look", look_slowly)

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("arrive", self.arrive)

    def event(self) -> Event:
        """An event whose time is right, whatever clock its producer has."""
        event = super().event()
        time_ms = self.scheduler.time.now_ms()
        return Event(event.value, key=event.key, id=event.id, timestamp=time_ms)

    def event_of(self, key: bytes) -> Event:
        event = self.event()
        return Event(event.value, key=key, id=event.id, timestamp=event.timestamp)

    def arrive(self) -> None:
        """Drive an archive while an erasure from it is slow."""
        home = self.home()
        for _ in range(120):
            home.context.clock.sleep(0.5)
            if self.searching:
                with self.tolerating(InvalidError, NotFoundError):
                    self.drive(home, self.random.choice(self.searching), take_over=self.chance(0.3))
                    self.done.arrived += 1

    def erase_some(self, home: Home) -> None:
        name = self.random.choice(self.names())
        if self.chance(0.3):
            self.erase_ids(home, name)
        else:
            self.erase_key(home, name)

    def erase_ids(self, home: Home, name: str) -> None:
        ids = self.some_ids(3)
        self.accountant.asked.update(ids)
        erased = erase_archived(home.context, find_archive(home.context, name), WHY, ids)
        if erased.is_clean:
            found = {place for each in erased.ids for place in self.truth.by_id[each]}
            self.gone.setdefault(name, set()).update(found)
            self.done.clean += 1

    def erase_key(self, home: Home, name: str) -> None:
        """Erase a key, of which the source has events that no driver has read yet."""
        key = f"k{self.random.randrange(KEYS)}".encode()
        number = self.random.randrange(PARTITIONS)
        if self.chance(0.6):  # a new key, which an archive has in another source partition
            key = f"n{self.done.erased}-{number}".encode()
            other = (number + 1) % PARTITIONS
            self.append(home.context, other, [self.event_of(key) for _ in range(3)])
            self.drive(home, name, take_over=self.chance(0.3))
        self.append(home.context, number, [self.event_of(key) for _ in range(3)])
        there = {place for place, raw in self.truth.events.items() if raw.key == key}
        self.accountant.asked_keys.add(key)
        erased = erase_archived(home.context, find_archive(home.context, name), WHY, key=key)
        if erased.is_clean:
            until_ms = self.erased_until(name, key)
            known = {place for place in there if self.truth.events[place].time_ms <= until_ms}
            self.gone.setdefault(name, set()).update(known)
            self.done.clean += 1

    def erased_until(self, name: str, key: bytes) -> int:
        """Up to which time the events of a key are erased; a wrong clock may be far behind."""
        records = read_audit(self.quiet, find_archive(self.quiet, name))
        return max(each.until_ms for each in records if each.key == key_hash(key))

    def check_erased(self, home: Home) -> None:
        super().check_erased(home)
        for live in self.folders.live():
            events = self.accountant.counting(live).values()
            found = {self.accountant.source_of(each) for each in events}
            left = self.gone.get(live.archive, set()) & found
            assert not left, f"{live.folder} has {sorted(left)}, which were erased"
