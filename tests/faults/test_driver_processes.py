"""Drivers of one archive in processes that join, leave, stall and die: each event is archived once.

A dead driver's partitions move to the living ones, a new driver gets its share, and shares differ
by one at most when no driver comes or goes.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.child_processes import Nursery, is_alive
from tests.support.up_run import upped
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.coordination.ownership import read_members
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.home import create_home
from tidelog.model import layout

PARTITIONS = 12
LEASE_S = 2.0
SLACK_S = 5.0  # beyond the lease, until another driver has a dead one's partitions


class Fleet:
    """An archive of a topic that grows, and processes that drive it."""

    def __init__(self, home: Home, place: Path) -> None:
        self.home = home
        self.place = place
        home.create_topic("t", PARTITIONS)
        home.archives.create("raw", source="topic:t", max_age="100ms")
        self.pipeline = home.archives.get("raw").info.pipeline()
        self.drivers: list[int] = []
        self.ended = threading.Event()
        self._nursery = Nursery("tests.support.driver_processes")
        self._producer = threading.Thread(target=self._produce)
        self._producer.start()

    def _produce(self) -> None:
        number = 0
        while not self.ended.wait(0.05):
            self.home.append("t", [Event(b"%d" % number)], partition=number % PARTITIONS)
            number += 1

    def start(self, count: int = 1) -> None:
        self.drivers += [self._nursery.start(self.place, "raw") for _ in range(count)]

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to the oldest driver; its process id. One that only stalls is kept."""
        pid = self.drivers.pop(0)
        os.kill(pid, number)
        return pid

    def owners(self) -> Counter[str]:
        """How many source partitions each driver has."""
        names = (f"t/{number}" for number in range(PARTITIONS))
        heads = (read_progress(self.home.context, self.pipeline, name) for name in names)
        return Counter(head.owner if head else "" for head in heads)

    def is_shared(self, drivers: int) -> bool:
        """Whether this many drivers have all partitions, in shares that differ by one at most."""
        found = self.owners()
        members = read_members(self.home.context, layout.pipeline_members(self.pipeline))
        shares = found.values()
        return found.keys() <= members.keys() and (
            len(found) == min(drivers, PARTITIONS) and max(shares) - min(shares) <= 1
        )

    def share(self, drivers: int, seconds: float = 60) -> float:
        """Wait until they share the partitions; how long that took."""
        began_s = time.monotonic()
        until(lambda: self.is_shared(drivers), seconds, lambda: str(self.owners()))
        return time.monotonic() - began_s

    def move(self, before: Counter[str]) -> float:
        """Wait until all partitions of a driver that ended have another; how long that took."""
        began_s = time.monotonic()

        def is_moved() -> bool:
            now = self.owners()
            return "" not in now and len(before.keys() & now.keys()) < len(before)

        until(is_moved, LEASE_S + SLACK_S, lambda: f"{before}, now {self.owners()}")
        return time.monotonic() - began_s

    def archived(self) -> Counter[tuple[str, int]]:
        """What is in the files, by partition and offset."""
        found: Counter[tuple[str, int]] = Counter()
        for info in self.home.store.list("archives/raw/"):
            if info.key.endswith(".parquet"):
                table = pq.read_table(io.BytesIO(self.home.store.get(info.key)))
                for row in table.select(["partition", "offset"]).to_pylist():
                    found[str(row["partition"]), row["offset"]] += 1
        return found

    def check(self) -> None:
        """Each event of the source is archived once."""
        self.ended.set()
        self._producer.join()
        ends = [self.home.partitions("t")[number].next for number in range(PARTITIONS)]
        wanted = Counter((str(p), n) for p, end in enumerate(ends) for n in range(end))
        assert wanted
        until(lambda: self.archived().total() >= wanted.total())
        assert self.archived() == wanted

    def close(self) -> None:
        self.ended.set()
        for pid in self.drivers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nursery.close()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", str(int(LEASE_S * 1_000)))
    place = tmp_path / "home"
    with create_home(str(place))[0] as home:
        assert home.settings.lease_ttl_ms == LEASE_S * 1_000
        made = Fleet(home, place)
        try:
            yield made
        finally:
            made.close()


def test_drivers_join_leave_stall_and_die(fleet: Fleet) -> None:
    fleet.start(2)
    fleet.share(2)
    fleet.signal(signal.SIGKILL)
    fleet.share(1)
    fleet.start(2)
    fleet.share(3)
    stalled = fleet.signal(signal.SIGSTOP)
    fleet.share(2)
    os.kill(stalled, signal.SIGCONT)  # it finds that it has lost its partitions, and goes on
    fleet.drivers.append(stalled)
    fleet.share(3)
    left = fleet.signal(signal.SIGTERM)
    fleet.share(2)
    until(lambda: not is_alive(left))
    fleet.check()


@pytest.mark.long
def test_drivers_come_and_go_for_two_minutes(fleet: Fleet) -> None:
    chance = random.Random(19)
    moves: list[float] = []
    fleet.start(3)
    fleet.share(3)
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        stalled, before = None, fleet.owners()
        kind = chance.choice(["join", "leave", "kill", "kill", "stall"])
        if len(fleet.drivers) < 2 or (kind == "join" and len(fleet.drivers) < 5):
            fleet.start()
        else:
            signals = {"leave": signal.SIGTERM, "stall": signal.SIGSTOP}
            ended = fleet.signal(signals.get(kind, signal.SIGKILL))
            stalled = ended if kind == "stall" else None
            moves.append(fleet.move(before))
        fleet.share(len(fleet.drivers))
        if stalled is not None:
            os.kill(stalled, signal.SIGCONT)
            fleet.drivers.append(stalled)
            fleet.share(len(fleet.drivers))
        time.sleep(chance.uniform(0, 2))
    fleet.check()
    print(f"{len(moves)} drivers ended or stalled, partitions moved within {max(moves):.1f} s")


@pytest.mark.long
def test_two_processes_of_up_come_and_go_for_two_minutes(fleet: Fleet) -> None:
    chance = random.Random(23)
    moves: list[float] = []
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(upped(fleet.place)) for _ in range(2)]
        fleet.share(2)
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s:
            ending, before = running.pop(chance.randrange(2)), fleet.owners()
            if chance.random() < 0.5:
                assert ending.end(signal.SIGKILL)
            else:
                assert ending.end() == 0
            moves.append(fleet.move(before))
            fleet.share(1)
            running.append(stack.enter_context(upped(fleet.place)))
            fleet.share(2)
        fleet.check()
    print(f"{len(moves)} processes ended, partitions moved within {max(moves):.1f} s")
