"""Lookups: what they hold, what they read, and that they follow whatever happens to a topic."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.all_times import ALL_TIMES
from tests.support.compiled_journals import Press
from tidelog import Event
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.coordination.audit import Why
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
)
from tidelog.home import Home, World, create_home, open_home
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.lookup import Lookup, Lookups
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.model.topic import Topic, partition_for
from tidelog.settings import Settings
from tidelog.testing.faults import Faults

T0 = 1_700_000_000_000


def append(press: Press, topic: Topic, ids: list[str], partition: int = 0) -> None:
    events = [Event(each.encode(), id=each, timestamp=T0) for each in ids]
    segment = encode_staged([(partition, table_of(events, T0))])
    appender = press.appender(topic)
    appender.commit(appender.upload(segment), segment.pieces[0])
    appender.close()


def many(press: Press, runs: int = 20, each: int = 50) -> Topic:
    topic = press.topic()
    for run in range(runs):
        append(press, topic, [f"{run}-{number}" for number in range(each)])
    return topic


def gets(lookup: Lookup, runs: int = 20, each: int = 50) -> None:
    for run in range(runs):
        wanted = f"{run}-{run % each}"
        event = lookup.get(wanted)
        assert (event.value, event.offset) == (wanted.encode(), run * each + run % each)


@pytest.mark.parametrize("bytes_max", [0, 1_000, 4_000, 1 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_finds_all_whatever_it_may_hold(bytes_max: int, compiled: bool) -> None:
    press = Press()
    topic = many(press)
    if compiled:
        press.compile(topic, CompilePolicy(min_events=1, max_events=300))
    lookup = Lookup(press.context, topic, bytes_max=bytes_max)
    gets(lookup)
    assert lookup.bytes <= bytes_max
    for wrong in ("0-50", "20-0", "0", "00-0"):
        with pytest.raises(NotFoundError):
            lookup.get(wrong)


def test_a_warm_look_reads_the_head_the_row_and_one_block() -> None:
    press = Press()
    topic = many(press)
    faults = Faults()
    lookup = Lookup(press.faulty(faults), topic)
    gets(lookup)
    before = faults.calls
    lookup.get("7-7")
    assert faults.calls - before == 3
    before = faults.calls
    with pytest.raises(NotFoundError):
        lookup.get("nowhere")
    assert faults.calls - before == 1


def test_it_follows_appends_compiles_trims_and_sweeps() -> None:
    press = Press()
    topic = many(press)
    lookup = Lookup(press.context, topic)
    gets(lookup)
    for number in range(4):
        append(press, topic, [f"new-{number}"])
        assert lookup.get(f"new-{number}").value == f"new-{number}".encode()
        press.compile(topic, CompilePolicy(min_events=1, max_events=200 * (number + 1)))
        gets(lookup)
        press.clock.advance(10)
        sweep_home(press.context, 0)
        gets(lookup)
        assert lookup.get("new-0").offset == 1_000
    held = lookup.bytes
    assert held == 8 * 1_004


def test_it_goes_on_when_objects_vanish_that_it_knew_of() -> None:
    press = Press()
    topic = many(press)
    lookup = Lookup(press.context, topic)
    gets(lookup)
    press.compile(topic)
    press.clock.advance(10)
    sweep_home(press.context, 0)
    assert not [key for key in press.objects() if key.endswith(".arrow")]
    gets(lookup)


def test_what_is_gone_for_no_reason_is_told() -> None:
    press = Press()
    topic = many(press)
    lookup = Lookup(press.context, topic)
    gets(lookup)
    press.store.delete([run.object for run in press.runs(topic)])
    with pytest.raises(CorruptError, match="verify"):
        lookup.get("3-3")


def test_many_ids_cost_as_little_as_their_blocks() -> None:
    press = Press()
    topic = many(press)
    faults = Faults()
    lookup = Lookup(press.faulty(faults), topic)
    gets(lookup)
    before = faults.calls
    wanted = [f"{run}-{number}" for run in (3, 5) for number in range(50)] + ["nowhere"]
    found = lookup.find([*wanted, *wanted])
    assert set(found.events) == set(wanted[:-1])
    assert all(len(some) == 1 for some in found.events.values())
    assert faults.calls - before == 5
    assert lookup.find([]).events == {}


def test_pending_amendments_are_read_together_and_compiled_ones_not_at_all() -> None:
    press = Press()
    topic = many(press, 2, 200)
    faults = Faults()
    context = press.faulty(faults)
    lookup = Lookup(context, topic)
    wanted = [f"0-{number}" for number in range(200)]
    amender = Amender(context, lookup, Why("ada"))
    amender.update(dict.fromkeys(wanted, b"new"))
    amender.delete(wanted[:50])
    before = faults.calls
    found = lookup.find(wanted)
    assert faults.calls - before == 5
    assert list(found.events) == wanted[50:]
    press.compile(topic)
    assert list(lookup.find(wanted).events) == wanted[50:]
    before = faults.calls
    assert list(lookup.find(wanted).events) == wanted[50:]
    assert faults.calls - before <= 6, "head, row, and the journal's footer and columns"


def test_topics_that_were_not_used_for_long_are_forgotten_first() -> None:
    press = Press()
    topics = []
    for name in ("a", "b", "c"):
        topic = press.topic(name)
        append(press, topic, [f"{name}-{number}" for number in range(100)])
        topics.append(topic)
    lookups = Lookups(press.context, bytes_max=1_700)
    for topic in (*topics, *topics):
        found = lookups.of(topic)
        assert found.get(f"{topic.name}-7").value == f"{topic.name}-7".encode()
    assert lookups.of(topics[2]) is lookups.of(topics[2])


def test_events_without_ids_cost_nothing() -> None:
    press = Press()
    topic = press.topic()
    for number in range(5):
        press.append(topic, [str(number)])
    lookup = Lookup(press.context, topic)
    with pytest.raises(NotFoundError):
        lookup.get("0")
    assert lookup.bytes == 0


def opened(tmp_path: Path) -> Home:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    home = create_home(settings, world=World(environ={}))[0]
    home.create_topic("t", 3)
    return home


def test_if_absent_places_by_id_keeps_the_order_and_refuses_all_or_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as home:
        events = [Event(b"%d" % n, b"key", f"id-{n}") for n in range(20)]
        positions = home.append("t", events, if_absent=True)
        for event, position in zip(events, positions, strict=True):
            assert position.partition == partition_for((event.id or "").encode(), 3)
            assert home.get("t", event.id or "").position == position
        with pytest.raises(AlreadyExistsError, match="`id-7`, `id-3`: nothing"):
            home.append("t", [Event(b"x", id=f"id-{n}") for n in (30, 7, 3)], if_absent=True)
        with pytest.raises(NotFoundError):
            home.get("t", "id-30")
        table = pa.table({"id": ["id-30", "id-31"], "value": [b"a", b"b"]})
        assert len(home.append("t", table, if_absent=True)) == 2
        assert home.get("t", "id-31").value == b"b"
        home.delete("t", "id-30")
        home.append("t", [Event(b"again", id="id-30")], if_absent=True)
        assert len(home.append("t", [], if_absent=True)) == 0
        for wrong in ([Event(b"x")], [Event(b"x", id="y"), Event(b"x", id="y")]):
            with pytest.raises(InvalidError):
                home.append("t", wrong, if_absent=True)
        with pytest.raises(InvalidError, match="leave out"):
            home.append("t", events, if_absent=True, partition=1)
        elsewhere = next(p for p in range(3) if p != partition_for(b"by-key", 3))
        home.append("t", [Event(b"x", id="by-key")], partition=elsewhere)
        with pytest.raises(AlreadyExistsError):
            home.append("t", [Event(b"y", id="by-key")], if_absent=True)


def test_of_many_who_append_the_same_ids_each_id_is_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path) as home, open_home(home.config, world=World(environ={})) as other:
        stored: list[str] = []
        failed: list[BaseException] = []

        def run(mine: Home, name: int) -> None:
            try:
                for number in range(15):
                    try:
                        mine.append("t", [Event(b"%d" % name, id=f"id-{number}")], if_absent=True)
                        stored.append(f"id-{number}")
                    except AlreadyExistsError:
                        continue
            except TidelogError as exc:
                failed.append(exc)

        threads = [threading.Thread(target=run, args=((home, other)[n % 2], n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert sorted(stored) == sorted(f"id-{number}" for number in range(15))
        assert sorted(e.id or "" for e in home.playback("t", *ALL_TIMES)) == sorted(stored)


def test_gets_beside_compiles_sweeps_and_updates_always_find_something_right(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as home, open_home(home.config, world=World(environ={})) as other:
        for number in range(20):
            home.append("t", [Event(b"0", id=f"{number}-{n}") for n in range(5)])
        ended = threading.Event()
        failed: list[BaseException] = []

        def compact() -> None:
            try:
                for number in range(1, 9):
                    other.update("t", "7-3", b"%d" % number)
                    compile_topic(other.context, other.topic("t"), CompilePolicy.everything())
                    other.sweep(0)
            except BaseException as exc:  # noqa: BLE001 - raised by the test
                failed.append(exc)
            finally:
                ended.set()

        thread = threading.Thread(target=compact)
        thread.start()
        seen, looks = 0, 0
        while not ended.is_set():
            now = int(home.get("t", "7-3").value or b"")
            assert now >= seen, "no get goes back behind an update"
            seen, looks = now, looks + 1
            assert home.get("t", f"{looks % 20}-4").value == b"0"
        thread.join()
        assert failed == []
        assert home.get("t", "7-3").value == b"8"


def test_what_is_trimmed_is_let_go_and_makes_room() -> None:
    press = Press()
    topic = press.topic()
    lookup = Lookup(press.context, topic, bytes_max=500)
    for number in range(30):
        append(press, topic, [f"{number}-{each}" for each in range(10)])
        assert lookup.get(f"{number}-3").offset == number * 10 + 3
        if number % 2:
            trim_topic(press.context, topic, ToOffsets({0: number * 10 + 5}))
            with pytest.raises(NotFoundError):
                lookup.get(f"{number}-3")
        assert lookup.bytes <= 160, "two runs at most are alive"
        assert lookup.get(f"{number}-7").offset == number * 10 + 7


def test_runs_that_had_no_room_get_it_when_others_are_trimmed() -> None:
    press = Press()
    topic = many(press, 4, 10)
    lookup = Lookup(press.context, topic, bytes_max=160)
    gets(lookup, 4, 10)
    trim_topic(press.context, topic, ToOffsets({0: 20}))
    assert lookup.get("3-3").offset == 33
    assert lookup.bytes == 160, "both that are left"
