"""Clocks of hosts that are wrong: no lease, key or sweep depends on another host's wall time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import tidelog
from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S, House
from tidelog import Event
from tidelog.cli.main import cli
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.home import create_home
from tidelog.journal.scribe import Scribe, ScribeOptions
from tidelog.log.consumer.leases import Leases
from tidelog.log.maintenance import trim as trimming
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import KeepBytes, ToOffsets, check_clock, trim_topic
from tidelog.log.producer.append import Appender
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model.topic import Topic
from tidelog.settings import LogSettings, load_settings
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock, seeded_ids

TTL_MS = 10_000
YEAR_S = 365 * DAY_S


class HostClock(FakeClock):
    """A host whose wall clock is off, in a world where time passes for all alike."""

    def __init__(self, world: FakeClock, ahead_s: float) -> None:
        super().__init__()
        self._world = world
        self.ahead_s = ahead_s

    def now_ms(self) -> int:
        return self._world.now_ms() + int(self.ahead_s * 1000)

    def monotonic_s(self) -> float:
        return self._world.monotonic_s()

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)


@pytest.fixture
def house() -> House:
    return House()


def on_host(house: House, ahead_s: float, seed: int = 1) -> Context:
    clock = HostClock(house.clock, ahead_s)
    ids, chance = seeded_ids(1_000 + seed), random.Random(seed)
    return replace(
        house.context,
        clock=clock,
        ids=ids,
        random=chance,
        log_settings=LogSettings(lease_ttl_ms=TTL_MS),
    )


def member(context: Context, topic: Topic) -> Leases:
    return Leases(context, topic, "c", "earliest")


@pytest.mark.parametrize("ahead_s", [-3_600, 0, 3_600, YEAR_S])
def test_lease_of_a_one_shot_reader_that_died_is_taken_over_in_time(
    house: House, ahead_s: float
) -> None:
    topic = house.topic()
    dead = member(on_host(house, ahead_s), topic)
    assert dead.acquire_once(0)
    watching = member(on_host(house, 0, 2), topic)
    watching.join()
    assert not watching.take(0, watching.alive()), "it may be alive"
    house.clock.advance(1.4 * TTL_MS / 1000)
    watching.beat()
    assert not watching.take(0, watching.alive())
    house.clock.advance(0.2 * TTL_MS / 1000)
    assert watching.take(0, watching.alive())


@pytest.mark.parametrize("ahead_s", [-YEAR_S, 3_600, YEAR_S])
def test_one_shot_reader_does_not_rob_a_living_owner(house: House, ahead_s: float) -> None:
    topic = house.topic()
    living = member(on_host(house, 0), topic)
    living.join()
    assert living.take(0, living.alive())
    one_shot = member(on_host(house, ahead_s, 2), topic)
    for _ in range(10):
        assert not one_shot.acquire_once(0), "its heartbeats go on"
        house.clock.advance(0.8 * TTL_MS / 1000)
        living.beat()
    living.commit(0, 0)
    house.clock.advance(1.1 * TTL_MS / 1000)
    assert not one_shot.acquire_once(0), "the last beat is new to it"
    house.clock.advance(1.1 * TTL_MS / 1000)
    assert one_shot.acquire_once(0), "it has seen no sign of the owner for the time to live"


def test_one_shot_reader_that_works_keeps_its_lease(house: House) -> None:
    topic = house.topic()
    working = member(on_host(house, -3_600), topic)
    assert working.acquire_once(0)
    other = member(on_host(house, 3_600, 2), topic)
    for offset in range(10):
        assert not other.acquire_once(0)
        house.clock.advance(TTL_MS / 1000)
        working.commit(0, offset)


@pytest.mark.parametrize("ahead_s", [8 * DAY_S, YEAR_S])
def test_sweeper_with_a_clock_ahead_forgets_no_key(house: House, ahead_s: float) -> None:
    topic = house.topic()
    first = append_once(house.context, topic, "key", [Event(b"x")])
    report = sweep_home(on_host(house, ahead_s), HOUR_MS)
    assert report.producers_removed == 0
    assert report.clock_ahead_ms == ahead_s * 1000
    assert list(append_once(house.context, topic, "key", [Event(b"x")])) == list(first)
    assert house.values(topic) == ["x"]


def test_producer_with_a_clock_ahead_lets_no_sweep_forget_a_key(house: House) -> None:
    topic = house.topic()
    first = append_once(house.context, topic, "key", [Event(b"x")])
    Appender(on_host(house, YEAR_S), topic, "ahead").open_named()
    assert sweep_home(house.context, HOUR_MS).producers_removed == 0
    assert list(append_once(house.context, topic, "key", [Event(b"x")])) == list(first)


def test_producer_with_a_clock_behind_keeps_its_key(house: House) -> None:
    topic = house.topic()
    behind = on_host(house, -YEAR_S)
    first = append_once(behind, topic, "key", [Event(b"x")])
    house.append(topic, ["of a right clock"])
    trim_topic(house.context, topic, ToOffsets({0: 1}))  # no object says when it was stored
    for ahead_s in (-YEAR_S, 0, YEAR_S, 0):
        assert sweep_home(on_host(house, ahead_s), 0).producers_removed == 0
    assert list(append_once(behind, topic, "key", [Event(b"x")])) == list(first)
    house.clock.advance(8 * DAY_S)
    house.append(topic, ["later"])
    assert sweep_home(house.context, HOUR_MS).producers_removed > 0


def test_sweeper_with_a_clock_ahead_keeps_the_grace(house: House) -> None:
    topic = house.topic()
    orphan = house.orphan(topic)
    report = sweep_home(on_host(house, YEAR_S), HOUR_MS)
    assert (report.objects_deleted, report.objects_young) == (0, 1)
    assert orphan.key in house.objects()
    house.clock.advance(WEEK_S - 1)
    report = sweep_home(on_host(house, YEAR_S), HOUR_MS)
    assert (report.objects_deleted, report.objects_doubted) == (0, 1)
    house.clock.advance(1)
    assert sweep_home(on_host(house, YEAR_S), HOUR_MS).objects_deleted == 1


def test_garbage_that_is_dated_far_ahead_is_deleted(house: House) -> None:
    topic = house.topic()
    house.clock.jump(YEAR_S)
    house.append(topic, ["trimmed"])
    orphan = house.orphan(topic)
    house.clock.jump(-YEAR_S)
    trim_topic(house.context, topic, ToOffsets({0: 1}))
    report = sweep_home(house.context, HOUR_MS)
    assert (report.objects_deleted, report.objects_doubted) == (1, 1)
    assert house.objects() == {orphan.key}  # it may be a loss


def test_probe_that_a_dead_sweep_left_is_deleted_later(house: House) -> None:
    house.store.put("probe/left", b"")
    sweep_home(house.context, HOUR_MS)
    assert [info.key for info in house.store.list("probe/")] == ["probe/left"]
    house.clock.advance(2 * 3_600)
    sweep_home(house.context, HOUR_MS)
    assert list(house.store.list("probe/")) == []


def test_scribe_sweeps_although_the_last_sweep_is_dated_a_year_ahead(house: House) -> None:
    house.topic()
    how = ScribeOptions(sweep_every_ms=HOUR_MS)
    first = Scribe(on_host(house, YEAR_S), how).once()
    assert first is not None
    assert first.swept is not None
    right = Scribe(on_host(house, 0, 2), how)
    turn = right.once()
    assert turn is not None
    assert turn.swept is not None
    (trouble,) = turn.troubles
    assert "ahead of this machine's clock" in str(trouble.error)
    again = right.once()
    assert again is not None
    assert (again.swept, again.troubles) == (None, ()), "the time was put right"
    house.clock.advance(3_601)
    later = right.once()
    assert later is not None
    assert later.swept is not None


class Folder(MemoryStore):
    """A store that is dated by the machine's own clock, as a folder is."""

    @property
    def url(self) -> str:
        return "file:///home"


def test_clock_that_jumps_ends_no_week_of_a_stray_in_a_folder() -> None:
    house = House()
    clock = HostClock(house.clock, 0)
    store = Folder(clock)
    context = replace(house.context, clock=clock, store=store)
    house.context, house.store = context, store
    topic = house.topic()
    stray = house.orphan(topic).key
    house.append(topic, ["a"])

    def sweep() -> bool:
        assert not sweep_home(context, HOUR_MS).refused
        return stray in {info.key for info in store.list()}

    for ahead_s in (0, YEAR_S, YEAR_S, 0, 2 * YEAR_S, 0):
        clock.ahead_s = ahead_s
        house.clock.advance(2 * 3600)
        house.append(topic, ["b"])  # dated by the same clock
        assert sweep(), "each jump takes a day off the week at most"
    for _ in range(3):
        house.clock.advance(DAY_S)
        assert sweep()
    for _ in range(5):
        house.clock.advance(DAY_S)
        sweep()
    assert not sweep()


def test_trim_by_age_is_refused_where_only_the_clock_has_moved() -> None:
    house = House()
    clock = HostClock(house.clock, 0)
    house.store = Folder(clock)
    house.context = replace(house.context, clock=clock, store=house.store)
    topic = house.topic(partitions=2)
    check_clock(house.context, topic, clock.now_ms() + YEAR_S * 1000)  # nothing is there to lose
    house.append(topic, ["a"])
    check_clock(house.context, topic, clock.now_ms())
    with pytest.raises(InvalidError, match="check the clock; if it is right, give a date"):
        check_clock(house.context, topic, clock.now_ms() + YEAR_S * 1000)
    context = replace(house.context, store=MemoryStore(clock))
    check_clock(context, topic, clock.now_ms() + YEAR_S * 1000)  # a store's own clock bounds ours


def test_command_trims_nothing_by_a_clock_that_is_a_year_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0].close()
    asked = ["--home", str(tmp_path / "home"), "trim", "t", "--before"]
    with tidelog.open(tmp_path / "home") as home:
        home.create_topic("t")
        home.append("t", [Event(b"a")])
    with monkeypatch.context() as patch:
        year_ms = YEAR_S * 1000
        patch.setattr(trimming, "trusted_now_ms", lambda context: context.clock.now_ms() + year_ms)
        refused = CliRunner().invoke(cli, [*asked, "-30d"])
        assert refused.exit_code != 0
        assert "check the clock" in str(refused.exception)
    assert CliRunner().invoke(cli, [*asked, "-30d"]).exit_code == 0
    with tidelog.open(tmp_path / "home") as home:
        assert [event.value for event in home.read("t")] == [b"a"]
    assert CliRunner().invoke(cli, [*asked, "2999-01-01T00:00:00Z"]).exit_code == 0


@pytest.mark.parametrize(("ahead_s", "wrong"), [(-YEAR_S, {5}), (-YEAR_S, {3}), (YEAR_S, {1})])
def test_trim_by_bytes_keeps_the_newest_runs_of_every_partition(
    house: House, ahead_s: float, wrong: set[int]
) -> None:
    topic, right = house.topic(partitions=2), house.context
    for number in range(6):
        for partition in (0, 1):
            is_wrong = partition == 0 and number in wrong
            house.context = on_host(house, ahead_s, 10 + number) if is_wrong else right
            house.append(topic, [f"event {number}"], partition)
            house.context = right
        house.clock.advance(DAY_S)
    size = max(run.byte_end - run.byte_start for run in house.runs(topic))
    trim_topic(right, topic, KeepBytes(4 * size))
    assert house.values(topic, 0) == house.values(topic, 1) == ["event 4", "event 5"]
