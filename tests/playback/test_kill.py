"""P6 by killing: players die by SIGKILL; nothing is skipped, and nothing doubled in a topic."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_processes import Nursery, is_alive
from tests.support.playback_stage import T0, playback_state, wait_for_number
from tests.support.players import LOT_EVENTS, let
from tidelog import Event, Home
from tidelog.home import create_home
from tidelog.model.playback import PlaybackState
from tidelog.settings import load_settings

EVENTS = 1_500
SPAN_MS = 60_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as made:
        made.create_topic("t", 3)
        made.create_topic("u", 2)
        chance = random.Random(3)
        times = sorted(chance.randrange(SPAN_MS) for _ in range(EVENTS))
        for first in range(0, EVENTS, 100):
            events = [
                Event(b"%d" % (first + n), b"%d" % (n % 17), timestamp=T0 + time)
                for n, time in enumerate(times[first : first + 100])
            ]
            made.append("t", events)
        yield made


class Players:
    """Processes that play, some of which die. Use it in a ``with``."""

    def __init__(self, home: Home, folder: Path, sink: str) -> None:
        self._home = home
        self.output = folder / "out"
        self._words = [
            *("--home", str(folder / "home"), "playback", "t", "--to", sink, "--resume", "p"),
            *("--start", "2023-11-14T22:13:20Z", "--end", "2023-11-14T22:14:20Z"),
            *("--speed", "20"),
        ]
        self._nursery = Nursery("tests.support.players")

    def __enter__(self) -> Players:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.close()

    def kill(self, kills: int, at_once: int = 1) -> None:
        """Let players die, each after some events more, and the last ones finish.

        Each time they may go on for some lots and no further, so none has finished when it dies.
        """
        chance = random.Random(kills)
        let(self.output, 0)
        living = [self._start() for _ in range(at_once)]
        for _ in range(kills):
            number = self._state().number + chance.randrange(EVENTS // kills - LOT_EVENTS)
            let(self.output, number + LOT_EVENTS)
            self._wait_for(number)
            time.sleep(chance.random() * 0.05)
            os.kill(living.pop(chance.randrange(len(living))), signal.SIGKILL)
            living.append(self._start())
        let(self.output, EVENTS)
        self._wait_for(EVENTS)
        while any(map(is_alive, living)):
            time.sleep(0.05)
        assert self._state().finished_ms

    def _start(self) -> int:
        return self._nursery.start(self.output, *self._words)

    def _state(self) -> PlaybackState:
        return playback_state(self._home, "p")

    def _wait_for(self, number: int) -> None:
        wait_for_number(self._home, "p", number, self.output)


def wanted() -> Counter[str]:
    return Counter(str(n) for n in range(EVENTS))


def values(home: Home) -> Counter[str]:
    """What is in the target."""
    events = [event for p in range(2) for event in home.read("u", p)]
    return Counter((event.value or b"").decode() for event in events)


def test_into_a_topic_nothing_is_skipped_or_doubled(home: Home, tmp_path: Path) -> None:
    with Players(home, tmp_path, "topic:u") as players:
        players.kill(8)
    assert values(home) == wanted()
    for partition in range(2):
        times = [event.timestamp for event in home.read("u", partition)]
        assert times == sorted(times)  # type: ignore[type-var]


def test_two_at_once_into_a_topic(home: Home, tmp_path: Path) -> None:
    with Players(home, tmp_path, "topic:u") as players:
        players.kill(8, at_once=2)
    assert values(home) == wanted()


def test_into_a_file_it_goes_on_where_it_was(home: Home, tmp_path: Path) -> None:
    with Players(home, tmp_path, f"file:{tmp_path}/events.jsonl") as players:
        players.kill(6)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert Counter(line["value"] for line in lines) == wanted()
    places = [(line["timestamp"], line["partition"], line["offset"]) for line in lines]
    assert places == sorted(places)


def test_to_standard_output_nothing_is_skipped(home: Home, tmp_path: Path) -> None:
    with Players(home, tmp_path, "stdout:") as players:
        players.kill(6)
    lines = [json.loads(line) for line in players.output.read_bytes().splitlines()]
    found = Counter(line["value"] for line in lines)
    assert set(found) == set(wanted())
    assert len(lines) < EVENTS * 1.5, "only lots in flight come again"
