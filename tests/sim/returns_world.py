"""Events that come again under an id or a key that was erased, with times before the erasure.

The topic is trimmed to what its archives have read. Events are erased by id or by key, most of them
trimmed ones, which only archives hold. When the delete has returned, producers append events with
the same id or key and earlier times. Generations are built of another archive of the topic, or of
their own source; in every third world the topic is deleted in the end.

An event that was appended after the delete returned is a new one: it is in the live generation
until another delete. A delete excuses only what was there before it returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from tests.sim.archive_accounts import Accountant
from tests.sim.archive_store import Generation, Stored
from tests.sim.archive_world import Done
from tests.sim.archive_worlds import WHY, ErasureWorld
from tests.sim.journal_home import KEYS, PARTITIONS
from tests.sim.journal_raw import DELETED, TRIMMED, Place, Raw
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.topics import find_topic
from tidelog.maintenance.erase import purge
from tidelog.model.archive import ArchiveFormat
from tidelog.model.event import Event
from tidelog.model.topic import Topic

__all__ = ["ReturnsWorld"]

DAY_MS = 86_400_000


@dataclass
class PlacesAccountant(Accountant):
    """Knows events by their places: several have one id, and only some of them were erased."""

    erased: set[Place] = field(default_factory=set)  # that a delete may have found
    under_way: list[Callable[[Raw], bool]] = field(default_factory=list)  # what deletes look for

    def mark(self, stored: Stored) -> str:
        return f"{stored.id}@{stored.place[1]}/{stored.place[2]}"

    def was_deleted(self, place: Place) -> bool:
        raw = self.truth.events.get(place)
        if raw is None:
            return False
        return place in self.erased or any(is_sought(raw) for is_sought in self.under_way)

    @contextlib.contextmanager
    def deleting(self, is_sought: Callable[[Raw], bool]) -> Iterator[None]:
        """While a process deletes events; later ones stay."""
        self.under_way.append(is_sought)
        try:
            yield
        finally:
            self.erased |= self.places(is_sought)
            self.under_way.remove(is_sought)

    def places(self, is_sought: Callable[[Raw], bool]) -> set[Place]:
        """Where such events are, or were."""
        return {place for place, raw in self.truth.events.items() if is_sought(raw)}


@dataclass
class ReturnsDone(Done):
    """What has happened here too."""

    returned_ids: int = 0
    returned_keys: int = 0
    only_archived: int = 0  # deletes of trimmed events


class ReturnsWorld(ErasureWorld):
    """One seed's world."""

    accountants = PlacesAccountant
    accountant: PlacesAccountant

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: ReturnsDone = ReturnsDone()
        self.kinds = {"erase", "build"} | ({"remake"} if seed % 3 == 2 else set())
        self.gone: set[Place] = set()  # found by a delete that has returned
        self.returned: list[Place] = []

    def erase(self) -> None:
        """Trim, delete, and let events come again."""
        home = self.home()
        for _ in range(5):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.trim_read(home)
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                key, event_id = self.some_mark()
                self.delete_all(home, key, event_id)
                for _ in range(self.random.choice([1, 2])):
                    self.send_again(home, key, event_id)
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                if self.chance(0.5):
                    purge(home.context, find_topic(home.context, "t"), 0)

    def trim_read(self, home: Home) -> None:
        """Trim what all archives have read, most often."""
        if self.chance(0.8):
            ends = {number: self.read_by_all(number) for number in range(PARTITIONS)}
            home.trim("t", ToOffsets(ends))
            self.done.trims += 1

    def some_mark(self) -> tuple[bytes | None, str]:
        """A key, or the id of an event; most often one that was trimmed."""
        if self.chance(0.4):
            return f"k{self.random.randrange(KEYS)}".encode(), ""
        trimmed = {
            raw.id
            for place, raw in self.truth.events.items()
            if raw.id and self.truth.now(place) is TRIMMED and place not in self.accountant.erased
        }
        known = sorted(trimmed) if trimmed and self.chance(0.8) else sorted(self.truth.by_id)
        return None, self.random.choice(known)

    def delete_all(self, home: Home, key: bytes | None, event_id: str) -> None:
        def is_sought(raw: Raw) -> bool:
            return raw.id == event_id if key is None else raw.key == key

        there = self.accountant.places(is_sought)
        trimmed = [place for place in there if self.truth.now(place) is TRIMMED]
        with self.accountant.deleting(is_sought):
            if key is None:
                delete_events(home.context, home.amender("t", WHY), [event_id])
            else:
                delete_key(home.context, home.amender("t", WHY), key)
        self.gone |= there
        self.done.erased += 1
        self.done.only_archived += bool(trimmed)

    def send_again(self, home: Home, key: bytes | None, event_id: str) -> None:
        """Append an event with the erased id or key, and a time before that."""
        event = self.event()
        event_id, key = event_id or event.id or "", key or event.key
        time_ms = self.scheduler.time.now_ms() - self.random.randrange(10_000, 30 * DAY_MS)
        value = f"{event_id}={time_ms}={self.random.choice('aab')}".encode()
        number = self.random.randrange(PARTITIONS)
        late = Event(value, key=key, id=event_id, timestamp=time_ms)
        before = set(self.truth.by_id.get(event_id, ()))
        self.append(home.context, number, [late])
        self.returned += sorted(set(self.truth.by_id[event_id]) - before)
        self.done.returned_ids += bool(before)
        self.done.returned_keys += not before

    def remake(self) -> None:
        """Delete the topic, late; its archives stay."""
        home = self.home()
        home.context.clock.sleep(self.random.uniform(10, 30))
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 2))
            with self.tolerating(InvalidError, NotFoundError, ConflictError):
                home.delete_topic("t", past_readers=True)
                self.done.remade += 1
                break

    def build(self) -> None:
        home = self.home()
        for _ in range(8):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(InvalidError, NotFoundError):
                self.change_generation(home)

    def format_of(self, of: ArchiveFormat) -> ArchiveFormat:
        """Most generations are built of another archive of the topic."""
        source = self.random.choice(["archive:raw", "archive:raw", ""])
        return msgspec.structs.replace(of, source=source)

    def is_gone(self, event_id: str, topic: Topic) -> bool:
        """Whether each event with an id was there when a delete of it began that has returned."""
        return all(
            place[0] == topic.incarnation
            and place in self.gone
            and any(state in (DELETED, TRIMMED) for _, state in self.truth.history[place])
            for place in self.truth.by_id.get(event_id, [])
        )

    def check_erased(self, home: Home) -> None:
        """Finish a topic that is half deleted; no archive has what was erased."""
        if self.is_remade():
            with contextlib.suppress(NotFoundError):
                home.delete_topic("t", past_readers=True)
        super().check_erased(home)
        for live in self.folders.live():
            left = self.gone & self.found_in(live)
            assert not left, f"{live.folder} has {left}, which were erased"

    def found_in(self, live: Generation) -> set[Place]:
        events = self.accountant.counting(live).values()
        return {self.accountant.source_of(each) for each in events}

    def check_archive(self, home: Home, live: Generation) -> None:
        super().check_archive(home, live)
        if self.is_remade():
            return
        found = self.found_in(live)
        for place in self.returned:
            assert place in self.accountant.erased or place in found, (
                f"{live.folder} lacks {self.truth.events[place]}, which came after the delete"
            )
