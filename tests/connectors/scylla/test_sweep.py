"""A fast reader and the sweep behind it: each change gets into the topic once, late ones marked."""

from __future__ import annotations

import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play, Row
from tests.support.homes import local_store
from tests.support.named_pipelines import create_pipeline
from tests.support.scylla_reads import START_MS, a_play, at, identity, order_ticks, value
from tests.support.scylla_tables import drain, opened_pipeline
from tidelog import Event, Home
from tidelog.connectors.scylla import source as scylla_sweep
from tidelog.connectors.scylla.changes import LATE
from tidelog.coordination.commits import read_commits
from tidelog.coordination.pipeline_rows import read_partitions
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.home import World, create_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.registry import (
    delete_pipeline,
    ensure_pipeline,
    find_pipeline,
)
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock

ROOT = Path(__file__).resolve().parents[3]
LATEST_S = 40

pytestmark = pytest.mark.usefixtures("no_session_outlives_its_server")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("changes", 3)
        yield made


def make(home: Home, play: Play, **options: object) -> None:
    """The three pipelines into one topic."""
    for name, more in (
        ("fast", {"mode": "fast"}),
        ("sweep", {"mode": "sweep", "of": "fast"}),
        ("last", {"mode": "sweep", "of": "fast,sweep", "lag": "last"}),
    ):
        create_pipeline(home.context, name, play.url(**{**options, **more}), "topic:changes")


def stored(home: Home) -> list[Event]:
    return [event for partition in range(3) for event in home.read("changes", partition)]


def late_ms(event: Event) -> int | None:
    found = dict(event.headers).get(LATE)
    return None if found is None else int(found)


def check_whole(home: Home, play: Play) -> None:
    """Every change is there once, and in order within its stream, but for late ones."""
    events = stored(home)
    found = Counter(identity(event) for event in events)
    assert [key for key, count in found.items() if count > 1] == []
    expected = play.expected()
    assert set(found) == set(expected)
    assert {identity(event): event.type for event in events} == expected
    by_stream = defaultdict(list)
    for event in events:
        if late_ms(event) is None:
            by_stream[event.partition, identity(event)[0]].append(order_ticks(event))
    assert all(each == sorted(each) for each in by_stream.values())


def some_batch(chance: random.Random, number: int) -> list[Row]:
    region = f"r{chance.randrange(40)}"
    kind = chance.randrange(8)
    if kind == 0:
        return [
            Row("pre_image", region, number, {"state": "old"}),
            Row("update", region, number, {"state": "new"}, removed={"tags": {"x"}}),
            Row("post_image", region, number, {"state": "new"}),
        ]
    if kind == 1:
        return [Row("row_delete", region, number)]
    if kind == 2:
        return [Row("pre_image", region, number), Row("partition_delete", region)]
    if kind == 3:
        return [
            Row("range_delete_start_inclusive", region, 1),
            Row("range_delete_end_exclusive", region, number),
        ]
    if kind == 4:
        return [Row("insert", region, number + n, {"total": Decimal(n)}) for n in range(3)]
    return [Row("insert", region, number, {"tags": {"a"}, "marks": {"m": number}}, ttl=60)]


def some_delay_s(chance: random.Random) -> float:
    """How long after its own time a change lands; before it, where a clock is ahead."""
    dice = chance.random()
    if dice < 0.7:
        return chance.uniform(-2, 0.9)
    return chance.uniform(1, 8) if dice < 0.9 else chance.uniform(8, LATEST_S)


@pytest.mark.server
def test_what_the_fast_reader_misses_the_sweep_adds_and_the_last_sweep_finds_the_rest(
    home: Home, play: Play
) -> None:
    chance, clock = random.Random(20261115), at(0)
    clock.advance(5)
    make(home, play)
    fast = swept = number = 0
    for step in range(40):  # of five seconds
        if step in (10, 20):
            play.begin_generation(clock.now_ms() + 10_000, streams=10 + step)
        landing: list[tuple[int, list[Row]]] = []
        for _ in range(12):
            number += 10
            own_ms = max(START_MS, clock.now_ms() - int(1000 * some_delay_s(chance)))
            landing.append((own_ms, some_batch(chance, number)))
        for own_ms, rows in landing:
            play.write(own_ms, *rows)
        clock.advance(5)
        fast += drain(home, "fast", clock)
        swept += drain(home, "sweep", clock)
    clock.advance(LATEST_S + 90)
    fast += drain(home, "fast", clock)
    swept += drain(home, "sweep", clock)
    check_whole(home, play)
    expected = len(play.expected())
    assert fast + swept == expected
    assert swept > expected / 10
    late = [event for event in stored(home) if late_ms(event) is not None]
    assert len(late) == swept
    assert all((late_ms(event) or 0) >= 60_000 for event in late)
    # Changes with old timestamps, in windows that all have passed.
    for old in range(25):
        own_ms = START_MS + old * 5_000
        play.write(own_ms, Row("update", f"old{old}", old, {"state": "late"}))
    drain(home, "fast", clock)
    assert drain(home, "sweep", clock) == 0
    clock.advance(23 * 3600 - 100)
    assert drain(home, "fast", clock) == drain(home, "sweep", clock) == 0
    assert drain(home, "last", clock) == 25
    check_whole(home, play)


def commits_of(home: Home, name: str) -> int:
    pipeline = find_pipeline(home.context, name).incarnation
    partitions = read_partitions(home.context, pipeline)
    return sum(1 for p in partitions for _ in read_commits(home.context, pipeline, p))


@pytest.mark.server
def test_what_a_sweep_still_needs_of_the_reader_before_it_is_not_forgotten(
    home: Home, play: Play
) -> None:
    """A pump's old commits go with `tidelog sweep`, but for what is behind no sweep yet."""
    make(home, play)
    real, number = home.context, 0

    def look_after() -> list[int]:
        """As if a week and more had passed, for the home alone."""
        later = FakeClock(real.clock.now_ms() + 8 * 24 * 3_600_000)
        store = local_store(home)  # a sweep goes by the earlier of its own time and the store's
        own = store._clock
        home.context, store._clock = dataclasses.replace(real, clock=later), later
        sweep_archives(home.context, 0)
        home.context, store._clock = real, own
        return [commits_of(home, name) for name in ("fast", "sweep", "last")]

    for minute in (1, 2, 3, 4):
        for _ in range(20):
            number += 10
            own_ms = START_MS + minute * 60_000 - 5_000 - number
            play.write(own_ms, Row("insert", f"r{number}", number, {"state": "x"}))
        drain(home, "fast", at(minute))
    fast = commits_of(home, "fast")
    assert look_after()[0] == fast, "no sweep has begun"
    play.write(START_MS + 30_000, Row("insert", "late", 1, {"state": "x"}))
    drain(home, "sweep", at(4))
    swept = commits_of(home, "sweep")
    assert swept
    assert look_after()[:2] == [fast, swept], "the last one has not begun"
    drain(home, "last", at(23 * 60 + 3))
    some = look_after()
    assert 0 < some[0] < fast
    play.write(START_MS + 200_000, Row("insert", "later", 2, {"state": "x"}))
    drain(home, "sweep", at(6))
    drain(home, "last", at(24 * 60 - 1))
    check_whole(home, play)
    assert look_after()[0] < some[0]


@pytest.mark.server
def test_a_sweep_waits_for_the_pipelines_before_it(home: Home, play: Play) -> None:
    make(home, play)
    clock = at(10)
    play.write(START_MS + 60_000, Row("insert", "r", 1, {"state": "x"}))
    assert drain(home, "sweep", clock) == 0  # nobody has begun
    assert drain(home, "fast", at(2)) == 1
    play.write(START_MS + 60_000, Row("insert", "s", 1, {"state": "late"}))
    play.write(START_MS + 5 * 60_000, Row("insert", "t", 1, {"state": "not yet read"}))
    assert drain(home, "last", clock) == 0
    assert drain(home, "sweep", clock) == 1
    assert drain(home, "fast", clock) == 1
    assert drain(home, "sweep", clock) == 0
    check_whole(home, play)


@pytest.mark.server
def test_a_generation_that_is_told_too_late_is_left_to_the_sweep(home: Home, play: Play) -> None:
    make(home, play)
    clock = at(1)
    play.write(START_MS + 40_000, Row("insert", "r", 1, {"state": "x"}))
    assert drain(home, "fast", clock) == 1
    play.begin_generation(START_MS + 30_000)
    for number in range(12):
        play.write(START_MS + 35_000, Row("insert", f"r{number}", 2, {"state": "x"}))
        play.write(START_MS + 90_000, Row("insert", f"r{number}", 3, {"state": "x"}))
    clock.advance(120)
    assert drain(home, "fast", clock) >= 12  # groups that were quiet are read as a whole
    drain(home, "sweep", clock)
    check_whole(home, play)
    clock.advance(22.98 * 3600)
    assert drain(home, "last", clock) == 0
    check_whole(home, play)


@pytest.mark.server
def test_a_torn_batch_is_left_to_the_sweep_as_a_whole(home: Home, play: Play) -> None:
    make(home, play)
    clock = at(1)
    rows = [Row("insert", "r", number, {"state": "x"}) for number in range(3)]
    torn = play.write(START_MS + 50_000, *rows, torn=1)
    play.write(START_MS + 50_001, Row("insert", "q", 1, {"state": "y"}))
    assert drain(home, "fast", clock) == 1
    play.land(torn, 1, 3)
    clock.advance(120)
    play.write(START_MS + 130_000, Row("insert", "q", 2, {"state": "y"}))
    assert drain(home, "fast", clock) == 1
    assert drain(home, "sweep", clock) == 3
    check_whole(home, play)
    batches = [value(event)["batch"] for event in stored(home) if "batch" in value(event)]
    assert [each["whole"] for each in batches] == [True] * 3


@pytest.mark.server
def test_many_ranges_of_the_fast_reader_are_swept_in_several(
    home: Home, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scylla_sweep, "_RANGES_MAX", 3)
    make(home, play, groups=1)
    clock = at(0)
    for number in range(12):
        play.write(clock.now_ms(), Row("insert", "r", number, {"state": "x"}))
        clock.advance(10)
        assert drain(home, "fast", clock) == 1
    for number in range(12):
        play.write(START_MS + number * 10_000, Row("insert", "s", number, {"state": "late"}))
    clock.advance(100)
    drain(home, "fast", clock)
    assert drain(home, "sweep", clock) == 12
    check_whole(home, play)


@pytest.mark.server
def test_windows_that_are_forgotten_stop_the_pump_and_are_accepted_on_request(
    home: Home, cassandra_server: Cassandra
) -> None:
    with a_play(cassandra_server, ttl_s=3_600) as play:
        make(home, play)
        play.write(START_MS, Row("insert", "r", 1, {"state": "x"}))
        drain(home, "fast", at(1))
        clock = at(180)
        with pytest.raises(LostError, match="--accept-loss"):
            drain(home, "fast", clock)
        pipeline = opened_pipeline(home, "fast", clock)
        Driver(home.context, pipeline, DriverOptions(accept_loss=True)).run()
        assert drain(home, "fast", clock) == 0


@pytest.mark.server
def test_a_log_or_a_pipeline_that_was_made_anew_is_another_one(home: Home, play: Play) -> None:
    make(home, play)
    play.write(START_MS, Row("insert", "r", 1, {"state": "x"}))
    drain(home, "fast", at(2))
    drain(home, "sweep", at(4))
    delete_pipeline(home.context, "fast")
    with pytest.raises(NotFoundError, match="pipeline `fast`: not found"):
        drain(home, "sweep", at(5))
    create_pipeline(home.context, "fast", play.url(mode="fast"), "topic:changes")
    drain(home, "fast", at(6))
    with pytest.raises(LostError, match="made again"):
        drain(home, "sweep", at(7))
    play.session.execute("DROP TABLE orders_scylla_cdc_log")
    with pytest.raises(NotFoundError):
        drain(home, "fast", at(8))
    play.session.execute(play._log_table(60))
    with pytest.raises(LostError, match="made again"):
        drain(home, "fast", at(9))


@pytest.mark.server
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"mode": "sweep", "of": "nobody"}, "pipeline `nobody`: not found"),
        ({"mode": "sweep", "of": "changing"}, "has a transform"),
        ({"mode": "sweep", "of": "safe"}, "with\n? ?mode=fast"),
        ({"mode": "sweep", "of": "fast", "groups": 5}, "in as many"),
    ],
)
def test_sweeps_of_what_cannot_be_swept_are_refused(
    home: Home, play: Play, source: dict[str, object], message: str
) -> None:
    create_pipeline(home.context, "safe", play.url(), "topic:changes")
    create_pipeline(home.context, "fast", play.url(mode="fast"), "topic:changes")
    changing = replace(find_pipeline(home.context, "fast"), name="changing", transform="m:f")
    ensure_pipeline(home.context, changing)
    with pytest.raises(TidelogError, match=message):
        create_pipeline(home.context, "sweep", play.url(**source), "topic:changes")


@pytest.mark.server
def test_a_sweep_into_another_topic_than_the_reader_before_it_is_refused(
    home: Home, play: Play
) -> None:
    home.create_topic("others", 3)
    open_pump(home.context, PumpOptions(play.url(mode="fast"), "changes", "fast"), LocalWorkers())
    wrong = PumpOptions(play.url(mode="sweep", of="fast"), "others", "sweep")
    message = "goes to `topic:changes.*`, not to `topic:others.*`: give it the same target"
    with pytest.raises(InvalidError, match=message):
        open_pump(home.context, wrong, LocalWorkers())
    with pytest.raises(InvalidError, match=message):
        create_pipeline(home.context, "sweep", wrong.source, "topic:others")
    with pytest.raises(NotFoundError):
        find_pipeline(home.context, "sweep")
    assert (
        open_pump(home.context, dataclasses.replace(wrong, topic="changes"), LocalWorkers()).name
        == "sweep"
    )


@pytest.mark.server
def test_a_log_that_keeps_its_rows_for_good_has_no_last_sweep(
    home: Home, cassandra_server: Cassandra
) -> None:
    with a_play(cassandra_server, ttl_s=0) as play:
        make(home, play)
        drain(home, "fast", at(30))
        drain(home, "sweep", at(60))
        with pytest.raises(InvalidError, match="keeps its rows for good"):
            drain(home, "last", at(60))


# Killing.


def start(
    home: Home, name: str, clock: FakeClock, last: int = 0, *, follow: bool = True
) -> subprocess.Popen[bytes]:
    """A pump in a process that dies after some calls; 0: it lives on."""
    numbers = (clock.now_ms(), last, int(follow))
    command = [sys.executable, "-m", "tests.support.scylla_tables", home.config, name]
    return subprocess.Popen([*command, *map(str, numbers)], cwd=ROOT, stdout=subprocess.DEVNULL)


def fill(play: Play, count: int, first: int, start_ms: int, step_ms: int = 97) -> None:
    for number in range(first, first + count):
        row = Row("insert", f"r{number % 50}", number, {"state": "x"})
        play.write(start_ms + (number - first) * step_ms, row)


def kill_at(home: Home, play: Play, calls: range) -> None:
    """Fast reader and sweep die after these calls, each with work to do; then all is whole."""
    clock, ends = at(0), []
    for round_number, call in enumerate(calls):
        fill(play, 20, round_number * 100, clock.now_ms())
        clock.advance(10)
        ends.append(start(home, "fast", clock, call, follow=False).wait())
        drain(home, "fast", clock)
        late_ms = clock.now_ms() - 9_500
        fill(play, 10, round_number * 100 + 50, late_ms)
        clock.advance(90)
        play.write(clock.now_ms() - 2_000, Row("insert", "next", call, {"state": "x"}))
        drain(home, "fast", clock)
        ends.append(start(home, "sweep", clock, call, follow=False).wait())
        drain(home, "sweep", clock)
    check_whole(home, play)
    assert set(ends) <= {0, -signal.SIGKILL}
    assert ends.count(-signal.SIGKILL) >= len(ends) / 2


@pytest.mark.long
@pytest.mark.server
def test_pumps_that_are_killed_at_some_calls_bring_each_change_once(home: Home, play: Play) -> None:
    make(home, play, groups=2)
    kill_at(home, play, range(12, 40, 16))


@pytest.mark.long
@pytest.mark.server
@pytest.mark.parametrize("block", range(9))
def test_pumps_that_are_killed_at_any_call_bring_each_change_once(
    home: Home, play: Play, block: int
) -> None:
    make(home, play, groups=2)
    kill_at(home, play, range(1 + block * 5, 6 + block * 5))


@pytest.mark.long
@pytest.mark.server
def test_pumps_that_are_killed_at_random_bring_each_change_once(home: Home, play: Play) -> None:
    make(home, play, groups=4)
    chance, clock = random.Random(5), at(0)
    for number in range(6):
        fill(play, 300, number * 1_000, clock.now_ms(), 20)
        clock.advance(10)
        for name in ("fast", "sweep"):
            pumps = [start(home, name, clock) for _ in range(2)]
            time.sleep(1.5 + chance.random() * 2)
            for pump in pumps:
                pump.kill()
                pump.wait()
        fill(play, 50, number * 1_000 + 500, clock.now_ms() - 9_000, 20)
        clock.advance(100)
    clock.advance(300)
    for name in ("fast", "sweep"):
        drain(home, name, clock)
    check_whole(home, play)


@pytest.mark.long
@pytest.mark.server
def test_three_processes_share_the_groups_and_one_of_them_dies(home: Home, play: Play) -> None:
    create_pipeline(home.context, "pump", play.url(groups=9), "topic:changes")
    fill(play, 4_000, 0, START_MS, 20)
    clock = at(10)
    pumps = [start(home, "pump", clock, 60)]
    try:
        while not stored(home) and pumps[0].poll() is None:
            time.sleep(0.02)  # the others join it when it is at work, and do not end before it
        pumps += [start(home, "pump", clock) for _ in range(2)]
        assert pumps[0].wait(60) == -signal.SIGKILL  # in the middle of its work
        assert len(stored(home)) < 4_000
        deadline = time.monotonic() + 90
        while len(stored(home)) < 4_000 and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        for pump in pumps:
            pump.kill()
            pump.wait()
    check_whole(home, play)
