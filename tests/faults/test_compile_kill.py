"""SIGKILL at every step of real compilers, with producers, consumers and amenders at work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tests.support.crowd import LEASE_TTL_MS, Crowd, Line, drain
from tidelog import Home
from tidelog.home import create_home
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.settings import Settings

PARTITIONS = 2
STEPS = 18  # of a compile: before and after it takes its row, uploads, swaps, and removes rows
NEVER = 1_000_000
OTHERS = ("produce", "consume", "amend", "sweep")


class Compiled(Crowd):
    """Compilers, which kill themselves, beside others, some of which are killed."""

    def __init__(self, config: str, folder: Path, seed: int) -> None:
        super().__init__("tests.support.journal_workers", config, folder, seed)
        self.compilers = 0  # that were started
        self.rounds = 0  # through all steps
        for role in (*OTHERS, "produce", "consume"):
            self._add(role, 0)

    def run_for(self, seconds: float, last: int, least: int, home: Home) -> None:
        """Compilers at once, each of which gets a step further than the one before it, to ``last``.

        For this time, and until at least ``least`` have run and the others have done enough.
        """
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end or self.compilers < least or not self._has_enough(home):
            number += 1
            steps = [number, number + STEPS // 2, *([NEVER] if number % 3 == 0 else [])]
            started = [self._start("compile", each)[1] for each in steps]
            self.compilers += len(started)
            self._wait(started)
            if number == last:
                self.rounds, number = self.rounds + 1, 0
            if self._random.random() < 0.1:
                self._replace_one(0)
            assert time.monotonic() < end + 300, "compilers are too slow"

    def _has_enough(self, home: Home) -> bool:
        return bool(self.rounds) and have_swapped(home) and has_enough(self.lines())

    def _wait(self, workers: list[int]) -> None:
        end = time.monotonic() + 120
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < end, "a compiler hangs"
            time.sleep(0.01)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=LEASE_TTL_MS)
    with create_home(settings)[0] as made:
        made.create_topic("t", PARTITIONS)
        yield made


def run(home: Home, folder: Path, seconds: float, last: int, least: int) -> None:
    crowd = Compiled(home.config, folder, seed=20261115)
    try:
        crowd.run_for(seconds, last, least, home)
    finally:
        crowd.stop()
    with tidelog.open(home.config) as last:
        before = events(last)
        assert last.compile("t").busy == 0
        last.sweep(0)
        assert events(last) == before, "compile and sweep change nothing that is read"
        drain(last, folder, PARTITIONS)
        check(last, crowd.lines())
        assert have_swapped(last), "some compilers have swapped"
        assert last.verify("t").errors == 0
        for partition in range(PARTITIONS):
            where = layout.topic_partition(last.topic("t").incarnation, partition)
            assert list(last.catalog.scan(where, "run/", "run0")) == [], "rows were left behind"


def events(home: Home) -> dict[tuple[int, int], tuple[str | None, str]]:
    found = {}
    for partition in range(PARTITIONS):
        for event in home.read("t", partition):
            place = (partition, event.offset or 0)
            found[place] = (event.id, (event.value or b"").decode())
    return found


def have_swapped(home: Home) -> bool:
    topic = home.topic("t")
    heads = [read_head(home.context, topic, partition)[0] for partition in range(PARTITIONS)]
    return all(head.compiled > 2 for head in heads)


def has_enough(lines: list[Line]) -> bool:
    """Whether there is something to check: events, amendments, and a delete among them."""
    acknowledged = sum(line.verb == "acknowledged" for line in lines)
    allowed = allowed_values(lines)
    return acknowledged > 50 and len(allowed) > 5 and ["-"] in allowed.values()


def check(home: Home, lines: list[Line]) -> None:
    """P1 to P3 for what producers sent, and P5 for what amenders did."""
    assert [line for line in lines if line.verb == "wrong"] == []
    assert has_enough(lines)
    stored = events(home)
    acknowledged = [line for line in lines if line.verb == "acknowledged"]
    for line in acknowledged:
        assert stored.get((line.partition, line.offset)) == (None, line.value), f"lost: {line}"
    sent = {place: value for place, (each, value) in stored.items() if each is None}
    assert len(set(sent.values())) == len(sent), "an event is stored twice"
    handled = {(line.partition, line.offset): line for line in lines if line.verb == "handled"}
    assert set(stored) <= set(handled), "not all handled"
    assert all(handled[place].value == value for place, value in sent.items())
    check_order(lines)
    check_amended(stored, lines)


def check_order(lines: list[Line]) -> None:
    """Each worker goes forward, over what is erased too; where it begins, others had come to."""
    committed: dict[int, dict[str, int]] = defaultdict(dict)
    last: dict[tuple[str, int], int] = {}
    for line in lines:
        place = (line.worker, line.partition)
        if line.verb == "committed":
            committed[line.partition][line.worker] = line.offset
        if line.verb != "handled":
            continue
        if line.offset <= last.get(place, 1 << 62):  # a new stretch: from its lease's cursor
            others = [at for who, at in committed[line.partition].items() if who != line.worker]
            assert line.offset >= max(others, default=0), f"handled again after a commit: {line}"
        last[place] = line.offset


def allowed_values(lines: list[Line]) -> dict[str, list[str]]:
    """For each event the value of its last amendment, and of the one that was under way then."""
    allowed: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        each, _, value = line.value.partition("=")
        if line.verb in ("put", "amended"):
            allowed[each] = [value]
        elif line.verb == "wants":
            allowed[each].append(value)
    return allowed


def check_amended(stored: dict[tuple[int, int], tuple[str | None, str]], lines: list[Line]) -> None:
    """Each event has one of the values that it may have."""
    found = {each: value for each, value in stored.values() if each is not None}
    for each, values in allowed_values(lines).items():
        assert found.get(each, "-") in values, f"{each} is {found.get(each)}, not of {values}"


@pytest.mark.long
def test_nothing_is_lost_when_compilers_are_killed(home: Home, tmp_path: Path) -> None:
    run(home, tmp_path, seconds=3, last=STEPS // 2, least=STEPS)


@pytest.mark.long
def test_nothing_is_lost_when_compilers_are_killed_for_minutes(home: Home, tmp_path: Path) -> None:
    run(home, tmp_path, seconds=150, last=STEPS, least=4 * STEPS)
