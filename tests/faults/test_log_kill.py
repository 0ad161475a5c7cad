"""Real processes, SIGKILLed at random: 4 producers and 4 consumers of one name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.crowd import LEASE_TTL_MS, Crowd, Line, drain
from tidelog import Home
from tidelog.home import create_home
from tidelog.settings import Settings

PARTITIONS = 3


class Killed(Crowd):
    """Producers and consumers, some of which die all the time."""

    def __init__(self, config: str, folder: Path, seed: int) -> None:
        super().__init__("tests.support.log_workers", config, folder, seed)
        self.kills = 0
        for role in ("produce", "consume"):
            for _ in range(4):
                self._add(role)

    def wait_for_life(self) -> None:
        """Until events flow from end to end, however busy the machine is."""
        end = time.monotonic() + 120
        while not {"acknowledged", "handled"} <= {line.verb for line in self.lines()}:
            assert time.monotonic() < end, "no event came through"
            time.sleep(0.2)

    def kill_for(self, seconds: float, kills: int) -> None:
        """For so long, and until so many were killed, a consumer at work among them."""
        self.wait_for_life()
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.kills < kills or not self._has_seen_enough():
            assert time.monotonic() < end + 120, "too little happens"
            time.sleep(self._random.uniform(0.2, 0.8))
            self._replace_one()
            self.kills += 1

    def _has_seen_enough(self) -> bool:
        lines = self.lines()
        return self.killed_at_work(lines) > 0 and len(acknowledged_of(lines)) > 100


@pytest.fixture(params=["local", pytest.param("remote", marks=pytest.mark.server)])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=LEASE_TTL_MS)
    if request.param == "remote":
        s3: S3 = request.getfixturevalue("s3_server")
        dynamodb: DynamoDb = request.getfixturevalue("dynamodb_server")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        settings = Settings(
            f"s3://{s3.fresh_bucket()}?endpoint={s3.endpoint}&region={s3.region}",
            f"dynamodb://kill{time.monotonic_ns()}?endpoint={dynamodb.endpoint}&region=us-east-1",
            lease_ttl_ms=LEASE_TTL_MS,
        )
    with create_home(settings)[0] as made:
        made.create_topic("t", PARTITIONS)
        yield made


def run(home: Home, folder: Path, seconds: float, kills: int) -> None:
    crowd = Killed(home.config, folder, seed=20261115)
    try:
        crowd.kill_for(seconds, kills)
    finally:
        crowd.stop()
    with tidelog.open(home.config) as opened:
        drain(opened, folder, PARTITIONS)
    check(home, crowd.lines())


def acknowledged_of(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.verb == "acknowledged"]


def check(home: Home, lines: list[Line]) -> None:
    stored: dict[tuple[int, int], str] = {}
    for partition in range(PARTITIONS):
        events = list(home.read("t", partition))
        assert [event.offset for event in events] == list(range(len(events)))
        stored |= {(partition, e.offset or 0): (e.value or b"").decode() for e in events}
    assert len(set(stored.values())) == len(stored), "an event is stored twice"
    for line in acknowledged_of(lines):
        assert stored.get((line.partition, line.offset)) == line.value, f"lost: {line}"
    handled = [line for line in lines if line.verb == "handled"]
    for line in handled:
        assert stored[line.partition, line.offset] == line.value
    assert {(line.partition, line.offset) for line in handled} == set(stored), "not all handled"
    check_order(lines)


def check_order(lines: list[Line]) -> None:
    """Each stretch of one worker is in order; it begins at or after what others had committed."""
    committed: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    last: dict[tuple[str, int], int] = {}
    for line in lines:
        place = (line.worker, line.partition)
        if line.verb == "committed":
            committed[line.partition].append((line.at, line.worker, line.offset))
        if line.verb != "handled":
            continue
        if line.offset != last.get(place, -2) + 1:  # a new stretch: from its lease's cursor
            others = [c for at, who, c in committed[line.partition] if who != line.worker]
            assert line.offset >= max(others, default=0), f"handled again after a commit: {line}"
        last[place] = line.offset


def test_nothing_is_lost_when_processes_are_killed(home: Home, tmp_path: Path) -> None:
    run(home, tmp_path, seconds=6, kills=11)


@pytest.mark.long
def test_nothing_is_lost_when_processes_are_killed_for_a_minute(home: Home, tmp_path: Path) -> None:
    run(home, tmp_path, seconds=60, kills=61)
