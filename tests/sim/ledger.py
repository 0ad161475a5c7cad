"""What clients of the log were told, held against what the bare substrates have.

The checks know P1 to P3 and P7 and nothing of the code that keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.audit import AuditedCatalog
from tests.sim.bare import Bare
from tests.sim.base import CountingStore

__all__ = ["Ledger", "Place"]

Place = tuple[str, int, int]
"""A topic's incarnation, a partition and an offset."""


@dataclass
class Ledger:
    """What happened in one world."""

    rows: AuditedCatalog
    objects: CountingStore
    partitions: int
    acknowledged: dict[tuple[str, bytes], Place] = field(default_factory=dict)
    durable: set[tuple[str, bytes]] = field(default_factory=set)  # acknowledged, no place given
    denied: set[bytes] = field(default_factory=set)  # told not to be stored, and not sent again
    delivered: dict[tuple[str, str, int], set[int]] = field(default_factory=dict)  # by group
    seeks: dict[tuple[str, str, int], int] = field(default_factory=dict)  # the lowest, by group
    trims: dict[tuple[str, str, int], int] = field(default_factory=dict)  # accepted, the lowest
    told: dict[tuple[str, int], int] = field(default_factory=dict)  # the newest notified offset
    values: dict[Place, bytes] = field(default_factory=dict)  # all that was ever stored
    deleted: set[str] = field(default_factory=set)  # incarnations whose deletion has begun
    _cursors: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _moves: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    _epochs: dict[tuple[str, str], int] = field(default_factory=dict)
    _heads: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    _deletes: int = 0

    def __post_init__(self) -> None:
        self.bare = Bare(self.rows, self.objects)

    # What actors report.

    def acknowledge(self, value: bytes, place: Place) -> None:
        known = self.acknowledged.setdefault((place[0], value), place)
        assert known == place, f"{value!r} was acknowledged at {known} and at {place}"

    def deny(self, values: Iterable[bytes]) -> None:
        self.denied.update(values)

    def retry(self, values: Iterable[bytes]) -> None:
        """Sent again under the same value: stored once at most all the same."""
        self.denied.difference_update(values)

    def deliver(self, group: str, incarnation: str, events: Iterable[Any]) -> None:
        """One poll's events: dense and in order within a partition, and what is stored."""
        last: dict[int, int] = {}
        for event in events:
            before = last.get(event.partition)
            assert before is None or event.offset == before + 1, (
                f"a poll of {group} gave {event.offset} of {event.partition} after {before}"
            )
            last[event.partition] = event.offset
            place = (incarnation, event.partition, event.offset)
            assert self.values.get(place) == event.value, (
                f"{group} was given {event.value!r} at {place}, not {self.values.get(place)!r}"
            )
            self.delivered.setdefault((group, incarnation, event.partition), set()).add(
                event.offset
            )

    def seek(self, group: str, incarnation: str, partition: int, offset: int) -> None:
        key = (group, incarnation, partition)
        self.seeks[key] = min(offset, self.seeks.get(key, offset))

    def accept_trim(self, group: str, incarnation: str, partition: int, start: int) -> None:
        """A member seeks to the start: others that had the lease meanwhile may be further."""
        key = (group, incarnation, partition)
        self.trims[key] = min(start, self.trims.get(key, start))

    def moves(self, group: str, incarnation: str, partition: int) -> list[int]:
        """Where the cursor of a lease was so far, the last as it is now."""
        key = (group, incarnation, partition)
        lease = self.bare.row(f"consumer/{incarnation}/{group}/{partition}", "lease")
        return [*self._moves.get(key, ()), *([] if lease is None else [lease["cursor"]])]

    def tell(self, incarnation: str, partition: int, offset: int) -> None:
        key = (incarnation, partition)
        self.told[key] = max(offset, self.told.get(key, -1))

    # What must hold after every step.

    def check(self) -> None:
        touched, self.rows.touched = self.rows.touched, set()
        if "registry" in touched:
            states = self.bare.topics().values()
            self.deleted |= {t["incarnation"] for t in states if t["state"] == "deleting"}
        for where in sorted(touched):
            kind, _, rest = where.partition("/")
            if kind == "topic":
                self._check_partition(*_place(rest))
            elif kind == "consumer" and rest.count("/") == 2:
                self._check_lease(where, rest)
            elif kind == "consumer" and "/" in rest:
                self._check_members(where, *rest.split("/"))
            elif kind == "consumer":
                for row in self.rows.bare(where):
                    if row.startswith("consumer/"):
                        group = row.partition("/")[2]
                        self._check_members(f"{where}/{group}", rest, group)
            elif kind == "notify":
                self._check_notified(where, *_place(rest))
        if self._deletes != self.objects.deletes:
            self._deletes = self.objects.deletes
            for incarnation, partition in list(self._heads):
                self._check_partition(incarnation, partition)

    def _check_partition(self, incarnation: str, partition: int) -> None:
        """P2: rows tile up to the head's next, which only grows; objects are there."""
        head = self.bare.head(incarnation, partition)
        before = self._heads.get((incarnation, partition))
        if head is None or head.get("closed"):
            assert incarnation in self.deleted, f"a head of {incarnation} was closed unasked"
            self._heads.pop((incarnation, partition), None)
            return
        for name in ("next", "start", "floor"):
            assert before is None or before[name] <= head[name], f"{name} of a head went back"
        assert head["start"] <= head["next"], "the start is beyond the end"
        self._heads[incarnation, partition] = head
        at: int | None = None
        for run in self.bare.runs(incarnation, partition):
            assert at is None or run["base"] == at, f"rows do not tile: {run['base']} after {at}"
            if at is None:
                assert run["base"] <= head["start"], "rows are missing at the start"
            at = run["base"] + run["count"]
            if at > head["start"]:
                self._check_run(incarnation, partition, run)
        assert at is None or at == head["next"], "the last run does not end at the head's next"
        assert at is not None or head["start"] == head["next"], "rows are missing"
        self._check_producers(incarnation, partition)

    def _check_run(self, incarnation: str, partition: int, run: dict[str, Any]) -> None:
        if not self.objects.holds(run["object"]):
            assert incarnation in self.deleted, f"object {run['object']} is missing"
            return
        if (incarnation, partition, run["base"]) in self.values:
            return
        for number, event in enumerate(self.bare.events(run)):
            self.values[incarnation, partition, run["base"] + number] = event["value"]

    def _check_producers(self, incarnation: str, partition: int) -> None:
        """The epoch of a named producer only grows."""
        where = f"topic/{incarnation}/{partition}"
        for name in self.rows.bare(where):
            if name.startswith("producer/") and not name.startswith("producer/~"):
                state = self.bare.row(where, name)
                assert state is not None
                key = (where, name)
                assert state["epoch"] >= self._epochs.get(key, 0), f"the epoch of {name} went back"
                self._epochs[key] = state["epoch"]

    def _check_lease(self, where: str, rest: str) -> None:
        """P3: a cursor moves back only on request, and passes only what was delivered."""
        incarnation, group, partition = rest.split("/")
        lease = self.bare.row(where, "lease")
        if lease is None or incarnation in self.deleted:
            return
        key = (group, incarnation, int(partition))
        cursor, before = lease["cursor"], self._cursors.get(key, 0)
        epoch = (where, "lease")
        last = self._epochs.get(epoch, 0)
        assert lease["epoch"] >= last, "the epoch of a lease went back"
        self._epochs[epoch] = lease["epoch"]
        self._cursors[key] = cursor
        self._moves.setdefault(key, []).append(cursor)
        if lease.get("deleted"):
            if lease["epoch"] > last:
                self._check_deleted(key)
            return
        state = self.consumer_state(incarnation, group)
        assert state not in ("deleted", None), f"{key} has a cursor, its consumer is {state}"
        if cursor < before:
            asked = min(self.seeks.get(key, before), self.trims.get(key, before))
            assert cursor >= asked, f"the cursor of {key} went back unasked"
        head = self.bare.head(incarnation, int(partition))
        start = 0 if head is None else head["start"]
        delivered = self.delivered.get(key, set())
        if key in self.seeks:
            return  # a seek may also skip
        missing = [at for at in range(max(before, start), cursor) if at not in delivered]
        assert not missing, f"the cursor of {key} passed {missing}, which were never delivered"

    def _check_deleted(self, key: tuple[str, str, int]) -> None:
        """P3: a cursor is deleted only while its consumer is; a new one gets all events again."""
        group, incarnation, _ = key
        state = self.consumer_state(incarnation, group)
        assert state == "ending", f"the cursor of {key} was deleted, its consumer is {state}"
        self.delivered.pop(key, None)

    def _check_members(self, where: str, incarnation: str, group: str) -> None:
        """A deleted consumer has no members, also none that had joined before it was deleted."""
        if incarnation not in self.deleted and self.consumer_state(incarnation, group) == "deleted":
            left = [row for row in self.rows.bare(where) if row.startswith("member/")]
            assert not left, f"consumer {group} is deleted, and has {left}"

    def consumer_state(self, incarnation: str, group: str) -> str | None:
        """What a consumer's own row says."""
        row = self.bare.row(f"consumer/{incarnation}", f"consumer/{group}")
        return None if row is None else str(row.get("state", "ready"))

    def _check_notified(self, where: str, incarnation: str, partition: int) -> None:
        state = self.bare.row(where, "state")
        if state is not None:
            told = self.told.get((incarnation, partition), -1)
            assert state["notified"] <= told + 1, f"{where} says {state['notified']}, told {told}"

    # What must hold in the end.

    def check_end(self) -> None:
        """P1: what was acknowledged is stored, once, where it was acknowledged; P7."""
        for (_, value), place in self.acknowledged.items():
            if place[0] not in self.deleted:
                found = self.values.get(place)
                assert found == value, f"{value!r} was acknowledged at {place}, there is {found!r}"
        found_values = {(place[0], value) for place, value in self.values.items()}
        lost = [value for each, value in sorted(self.durable - found_values)]
        assert not lost, f"{lost[:3]} were sent before a flush or close that returned: not stored"
        counts = Counter((place[0], value) for place, value in self.values.items())
        for (_, value), count in counts.items():
            assert count == 1, f"{value!r} is stored {count} times"
        living = {v for place, v in self.values.items() if place[0] not in self.deleted}
        stored = self.denied & living
        assert not stored, f"{sorted(stored)[:3]} are stored, though told not to be"

    def end(self, incarnation: str, partition: int) -> tuple[int, int]:
        """Start and next of a partition, as it is."""
        head = self.bare.head(incarnation, partition)
        assert head is not None
        return head["start"], head["next"]

    def cursors(self, group: str, incarnation: str) -> dict[int, int]:
        """Where a group's leases are now."""
        found = {}
        for partition in range(self.partitions):
            lease = self.bare.row(f"consumer/{incarnation}/{group}/{partition}", "lease")
            if lease is not None:
                found[partition] = lease["cursor"]
        return found

    def undelivered(self, group: str, incarnation: str) -> list[tuple[int, int]]:
        """What a group has never been given, of all that can still be read."""
        found = []
        for partition in range(self.partitions):
            start, after = self.end(incarnation, partition)
            key = (group, incarnation, partition)
            delivered = self.delivered.get(key, set())
            cursor = 0 if key not in self.seeks else self._cursors.get(key, 0)
            first = max(start, cursor)
            found += [(partition, at) for at in range(first, after) if at not in delivered]
        return found


def _place(rest: str) -> tuple[str, int]:
    incarnation, _, partition = rest.partition("/")
    return incarnation, int(partition)
