"""The whole chain: a stream, a pump into a topic, a playback into another stream, and kills.

What comes out is what went in, in the order of each partition key, while shards split and merge,
and while the pump and the playback die by SIGKILL. A playback that died may put into Kinesis again
what it had in flight (P6), and nothing else: the row of its state tells what that was.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.kinesis.test_archive import merge, split
from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS, Moto
from tests.support.child_processes import Nursery, is_alive
from tests.support.kinesis_server import running_kinesis
from tests.support.playback_stage import playback_state, wait_for_number
from tests.support.players import LOT_EVENTS, let
from tidelog import Home
from tidelog.home import World, create_home
from tidelog.model.event import to_iso
from tidelog.model.playback import PlaybackState
from tidelog.settings import Settings

NAME = "again"  # of the playback
KEYS_COUNT = 17
STEPS: list[Callable[[Stream], None]] = [
    lambda stream: split(stream, 0, 2**126),
    lambda stream: merge(stream, 3, 1),
    lambda stream: split(stream, 4, 2**127 + 2**126),
    lambda stream: merge(stream, 2, 5),
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        made.create_topic("t", 3)
        yield made


class Commands:
    """Commands of one home, each in a process of its own that can be killed. Use it in a ``with``.

    They are forked from a process that has loaded everything, as most of them do not live long.
    """

    def __init__(self, home: Home, output: Path) -> None:
        self._home = home
        self.output = output
        self._nursery = Nursery("tests.support.players", KEYS)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.close()

    def start(self, *words: str) -> int:
        """Begin one; its process id."""
        return self._nursery.start(self.output, "--home", self._home.config, *words)

    def wait(self, process: int) -> None:
        """Until it has ended, by whatever."""
        deadline = time.monotonic() + 120
        while is_alive(process):
            assert time.monotonic() < deadline, Path(f"{self.output}.err").read_text()
            time.sleep(0.02)


class Feeder:
    """Puts numbers into a stream until it is stopped. Use it in a ``with``."""

    def __init__(self, stream: Stream, each: int) -> None:
        self.total = 0
        self._stream = stream
        self._each = each
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _feed(self) -> None:
        while not self._ended.wait(0.05):
            numbers = range(self.total, self.total + self._each)
            self._stream.put([(f"key-{n % KEYS_COUNT}", b"%d" % n) for n in numbers])
            self.total += self._each


def pump(
    commands: Commands, stream: Stream, kills: int, steps: Sequence[Callable[[Stream], None]] = ()
) -> int:
    """Feed a stream and pump it, with pumps that die; how many events went in."""
    chance = random.Random(kills)
    words = ("pump", stream.url(), "--topic", "t", "--no-spark", "--max-age", "100ms")
    with Feeder(stream, 40) as feeder:
        for number in range(kills):
            process = commands.start(*words, "--follow")
            time.sleep(0.3 + chance.random())
            if number < len(steps):
                steps[number](stream)
            time.sleep(chance.random() / 2)
            os.kill(process, signal.SIGKILL)
            commands.wait(process)
    commands.wait(commands.start(*words, "--once"))
    return feeder.total


def in_order(numbers: Sequence[tuple[str, int]]) -> None:
    """That those of each key come in order."""
    by_key = defaultdict(list)
    for key, number in numbers:
        by_key[key].append(number)
        assert key == f"key-{number % KEYS_COUNT}"
    assert all(each == sorted(each) for each in by_key.values())


def pumped(home: Home) -> list[int]:
    """The numbers in the topic, each once and in the order of its key, as a playback has them."""
    events = [event for partition in range(3) for event in home.read("t", partition)]
    assert len({event.id for event in events}) == len(events)
    in_order([((event.key or b"").decode(), int(event.value or b"")) for event in events])
    events.sort(key=lambda event: (event.timestamp, event.partition, event.offset))
    return [int(event.value or b"") for event in events]


def records(stream: Stream) -> list[tuple[str, int]]:
    """All that a stream holds, in the order in which it came."""
    found: list[dict[str, Any]] = []
    more: dict[str, str] = {"StreamName": stream.name}
    while more:
        page = stream.client.list_shards(**more)
        for shard in page["Shards"]:
            found += _of_shard(stream, shard["ShardId"])
        more = {"NextToken": page["NextToken"]} if page.get("NextToken") else {}
    found.sort(key=lambda each: int(each["SequenceNumber"]))
    return [(each["PartitionKey"], int(each["Data"])) for each in found]


def _of_shard(stream: Stream, shard: str) -> Iterator[dict[str, Any]]:
    at = stream.client.get_shard_iterator(
        StreamName=stream.name, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    while at:
        answer = stream.client.get_records(ShardIterator=at, Limit=10_000)
        yield from answer["Records"]
        at = answer.get("NextShardIterator") if answer["Records"] else None


class Playing:
    """A playback of all that is in the topic, by players that die."""

    def __init__(self, home: Home, commands: Commands, target: Stream, speed: str) -> None:
        self._home = home
        self._commands = commands
        now_ms = home.context.clock.now_ms()
        self._words = (
            *("playback", "t", "--to", target.url(), "--resume", NAME, "--speed", speed),
            *("--start", to_iso(now_ms - 3_600_000), "--end", to_iso(now_ms + 1_000)),
        )
        self.in_flight: set[int] = set()  # numbers of events, when one died

    def state(self) -> PlaybackState:
        return playback_state(self._home, NAME)

    def start(self) -> int:
        return self._commands.start(*self._words)

    def died(self, process: int) -> None:
        """Note what it had in flight."""
        self._commands.wait(process)
        state = self.state()
        if state.until is not None and not state.finished_ms:
            self.in_flight.update(range(state.number, state.until_number))

    def finish(self) -> None:
        self._commands.wait(self.start())
        assert self.state().finished_ms

    def check(self, wanted: Sequence[int], found: Sequence[tuple[str, int]]) -> None:
        """That nothing is missing, that only what was in flight came again, and the order."""
        counts = Counter(number for _, number in found)
        assert counts.keys() == set(wanted)
        again = {place for place, number in enumerate(wanted) if counts[number] > 1}
        assert again <= self.in_flight
        last = {number: at for at, (_, number) in enumerate(found)}
        in_order([found[at] for at in sorted(last.values())])


def chain_over_kills(home: Home, folder: Path, pumps: int, players: int) -> int:
    """The chain on the strict server; how many events came again."""
    with running_kinesis() as fake, Commands(home, folder / "out") as commands:
        source, target = Stream(fake.endpoint, shards=2), Stream(fake.endpoint, shards=2)
        total = pump(commands, source, pumps, STEPS)
        wanted = pumped(home)
        assert sorted(wanted) == list(range(total))
        assert len(fake.shards(source.name)) == 8
        playing = Playing(home, commands, target, speed="4")
        chance = random.Random(players)
        puts = 0
        victim = 0

        def trap(_: dict[str, Any]) -> bool:
            """In the middle of a request: the rest of it is put, and nobody hears of it."""
            nonlocal puts
            puts -= 1
            if puts == 0:
                assert victim > 0, "0 would be ourselves and all who belong to us"
                os.kill(victim, signal.SIGKILL)
            return False

        fake.put_fault = trap
        for number in range(players):
            let(commands.output, 0)
            victim = playing.start()
            puts = 1 + chance.randrange(total // players)  # from here on it may die
            let(commands.output, total)
            playing.died(victim)
            if number < len(STEPS):
                STEPS[number](target)
        puts = 0
        playing.finish()
        found = records(target)
        playing.check(wanted, found)
        assert len(fake.shards(target.name)) == 8
        return len(found) - total


def test_what_comes_out_is_what_went_in_over_kills_and_resharding(
    home: Home, tmp_path: Path
) -> None:
    assert chain_over_kills(home, tmp_path, pumps=5, players=5) > 0


@pytest.mark.long
def test_a_long_chain_over_many_kills(home: Home, tmp_path: Path) -> None:
    assert chain_over_kills(home, tmp_path, pumps=60, players=60) > 0


@pytest.mark.long
@pytest.mark.server
def test_the_chain_on_moto(home: Home, moto_server: Moto, tmp_path: Path) -> None:
    source, target = (Stream(moto_server.endpoint, shards=3) for _ in range(2))
    chance = random.Random(7)
    with Commands(home, tmp_path / "out") as commands:
        total = pump(commands, source, kills=3)
        wanted = pumped(home)
        assert sorted(wanted) == list(range(total))
        playing = Playing(home, commands, target, speed="4")
        for _ in range(3):
            number = playing.state().number
            let(commands.output, number + LOT_EVENTS)  # so that it cannot finish before it dies
            player = playing.start()
            wait_for_number(home, NAME, number + 1, commands.output)
            time.sleep(chance.random() / 5)
            os.kill(player, signal.SIGKILL)
            playing.died(player)
        let(commands.output, total)
        playing.finish()
        playing.check(wanted, records(target))
