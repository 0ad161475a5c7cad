"""Reading over journals, runs and amendments, whatever is compiled or removed meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidelog
from tests.support.compiled_logs import Bench
from tests.support.topic_upkeep import House
from tidelog import Event, Home
from tidelog.codec import journal_file as journal_codec
from tidelog.context import Context, Wakeups
from tidelog.errors import CorruptError, NotFoundError, UnknownOutcomeError
from tidelog.log import partition_reader as read_module
from tidelog.log import run_reader as amended
from tidelog.log import run_reader as contents
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.partition_reader import Reader, find_offset
from tidelog.log.producer.append import Appender
from tidelog.log.run_reader import RunSelection, describe_run, read_run
from tidelog.log.status import partition_states
from tidelog.model.topic import Topic

Model = dict[int, str | None]


class Meddled:
    """A catalog or store that lets something happen before its n-th read."""

    def __init__(self, inner: Any, number: int, meddle: Callable[[], None]) -> None:
        self._inner = inner
        self._left = number
        self._meddle = meddle

    def get(self, *args: Any, **more: Any) -> Any:
        self._look()
        return self._inner.get(*args, **more)

    def scan(self, *args: Any, **more: Any) -> Any:
        self._look()
        return self._inner.scan(*args, **more)

    @property
    def happened(self) -> bool:
        return self._left < 0

    def _look(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._meddle()


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Borders everywhere: of row groups, of pages of amendments, of pages of runs."""
    patch.setattr(journal_codec, "_GROUP_ROWS", 3)
    patch.setattr(amended, "_ROWS_MAX", 3)
    patch.setattr(read_module, "_RUNS_AT_ONCE", 2)
    patch.setattr(contents, "_WHOLE_BYTES", 2_000)


def seen(context: Context, topic: Topic, start: int = 0, end: int | None = None) -> Model:
    """What a reader finds, after a look at what every read must keep."""
    found: Model = {}
    at = start
    for stretch in Reader(context, topic, 0).read(start, end):
        assert stretch.base == at < stretch.end
        at = stretch.end
        table = stretch.arrow()
        events = list(stretch.events())
        assert table.column("offset").to_pylist() == [event.offset for event in events]
        assert table.column("value").to_pylist() == [event.value for event in events]
        for event in events:
            assert stretch.base <= (event.offset or 0) < stretch.end
            found[event.offset or 0] = None if event.value is None else event.value.decode()
    assert at == end or end is None
    return found


def planned(context: Context, topic: Topic, start: int, end: int) -> Model:
    """The same by a plan that needs the store alone."""
    plan = Reader(context, topic, 0).plan(start, end)
    found: Model = {}
    for run in plan.runs:
        what = describe_run(topic.name, 0, run)
        for rows in read_run(context.store, run, what, RunSelection(start, end), plan.amendments):
            values = rows.batch.column("value").to_pylist()
            for offset, value in zip(rows.offsets.tolist(), values, strict=True):
                found[offset] = None if value is None else value.decode()
    return found


class Partition:
    """A partition, and a dict that says what it must hold."""

    def __init__(self, seed: int) -> None:
        self.house = House(seed)
        self.random = random.Random(seed)
        self.topic = self.house.topic()
        self.bench = Bench(self.house.context, self.topic)
        self.model: Model = {}
        self.next = 0

    def append(self) -> None:
        values = [f"v{self.next + n}" for n in range(self.random.randrange(1, 8))]
        self.house.append(self.topic, values, at_ms=1_000 + self.next, apart_ms=1)
        for value in values:
            self.model[self.next] = value
            self.next += 1

    def update(self) -> None:
        if self.model:
            offset = self.random.choice(sorted(self.model))
            value = self.random.choice([None, "", f"u{self.random.random()}"])
            is_large = value is not None and self.random.random() < 0.3
            self.bench.update(offset, None if value is None else value.encode(), is_large)
            self.model[offset] = value

    def delete(self) -> None:
        if self.model:
            offset = self.random.choice(sorted(self.model))
            self.bench.delete(offset)
            del self.model[offset]

    def delete_many(self) -> None:
        for _ in range(10):
            self.delete()

    def compile(self) -> None:
        """From an old journal, or from where they end, up to some run's end."""
        journals = [row.base for row in self.bench.rows("journal")]
        journaled = self.bench.head.journaled
        ends = [row.end for row in self.bench.rows("run") if row.end > journaled]
        ends += [row.end for row in self.bench.rows("journal")]
        start = self.random.choice([*journals, journaled])
        possible = [end for end in ends if end > start]
        if possible:
            self.bench.compile(start, self.random.choice(possible))

    def tidy(self) -> None:
        self.random.choice(
            [self.bench.remove_shadowed, self.bench.remove_amended, self.bench.sweep]
        )()

    def check(self) -> None:
        context, topic = self.house.context, self.topic
        assert seen(context, topic) == self.model
        start, end = sorted(self.random.randrange(self.next + 1) for _ in range(2))
        wanted = {offset: self.model[offset] for offset in self.model if start <= offset < end}
        assert seen(context, topic, start, end) == wanted
        assert planned(context, topic, start, end) == wanted
        time_ms = 1_000 + self.random.randrange(self.next + 1)
        later = [offset for offset in self.model if 1_000 + offset >= time_ms]
        assert find_offset(context, topic, 0, time_ms) == min(later, default=self.next)
        with ThreadPoolExecutor(2) as pool:
            assert partition_states(context, topic, pool, runs=True)[0].events == len(self.model)


STEPS = ["append", "update", "delete", "delete_many", "compile", "tidy", "check"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(STEPS), max_size=30))
def test_a_reader_sees_what_a_dict_would_hold(seed: int, steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        partition = Partition(seed)
        for step in ["append", *steps, "check", "compile", "tidy", "check"]:
            getattr(partition, step)()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_over_many_steps(seed: int, small: None) -> None:
    partition = Partition(seed)
    chosen = random.Random(seed)
    for step in ["append", *chosen.choices(STEPS[:-1], k=150)]:
        getattr(partition, step)()
        if chosen.random() < 0.2:
            partition.check()


def amended_partition(house: House) -> tuple[Bench, Model]:
    """Runs of four, two of them in a journal, with amendments on both sides."""
    topic = house.topic()
    bench = Bench(house.context, topic)
    for run in range(5):
        house.append(topic, [str(4 * run + n) for n in range(4)])
    model: Model = {n: str(n) for n in range(20)}
    bench.delete(2, 10)
    bench.compile(0, 8)
    bench.delete(5, 13)
    bench.update(6, b"six", is_large=True)
    bench.update(14, b"fourteen", is_large=True)
    for gone in (2, 5, 10, 13):
        del model[gone]
    model |= {6: "six", 14: "fourteen"}
    return bench, model


def compile_and_sweep(bench: Bench) -> None:
    bench.compile(0, 8)
    bench.compile(8, 20)
    bench.sweep()


def compile_and_lose_amendments(bench: Bench) -> None:
    """Whoever compiled died before it removed the rows of runs; amendments went first."""
    bench.compile(0, 8)
    bench.compile(8, 16)
    bench.remove_amended()


def compile_only(bench: Bench) -> None:
    bench.compile(8, 20)


@pytest.mark.parametrize("meddle", [compile_and_sweep, compile_and_lose_amendments, compile_only])
@pytest.mark.parametrize("end", [None, 20])
def test_nothing_comes_back_whatever_happens_between_two_reads(
    meddle: Callable[[Bench], None], end: int | None, small: None
) -> None:
    """A compile, and all that follows it, before any of a reader's calls."""
    for side, at_least in (("catalog", 8), ("store", 4)):
        for number in count():
            house = House()
            bench, model = amended_partition(house)
            hook = Meddled(getattr(house, side), number, lambda bench=bench: meddle(bench))  # type: ignore[misc]
            context = replace(house.context, **{side: hook})
            assert seen(context, bench.topic, 0, end) == model
            if not hook.happened:
                break
        assert number >= at_least


def test_a_plan_is_whole_whatever_happens_while_it_is_made(small: None) -> None:
    for meddle in (compile_and_lose_amendments, compile_only):
        for number in count():
            house = House()
            bench, model = amended_partition(house)
            hook = Meddled(house.catalog, number, lambda b=bench, m=meddle: m(b))  # type: ignore[misc]
            context = replace(house.context, catalog=hook)  # type: ignore[arg-type]
            assert planned(context, bench.topic, 0, 20) == model
            if not hook.happened:
                break


def test_an_object_that_is_gone_without_a_reason_is_told(house: House) -> None:
    bench, _ = amended_partition(house)
    (journal,) = bench.rows("journal")
    house.store.delete([journal.object])
    with pytest.raises(CorruptError, match="is gone, but partition `orders/0` has its offsets 0"):
        seen(house.context, bench.topic)


def test_a_value_that_is_gone_without_a_reason_is_told(house: House) -> None:
    bench, _ = amended_partition(house)
    keys = [info.key for info in house.store.list("topics/") if "/amendments/" in info.key]
    house.store.delete(keys)
    with pytest.raises(CorruptError, match="amendments"):
        seen(house.context, bench.topic)


def test_a_value_that_was_replaced_and_swept_is_read_anew(house: House) -> None:
    bench, model = amended_partition(house)

    def meddle() -> None:
        bench.update(14, b"again", is_large=True)
        bench.sweep()

    model[14] = "again"
    found = []
    for number in range(12):
        house = House()
        bench, model = amended_partition(house)
        hook = Meddled(house.store, number, meddle)
        result = seen(replace(house.context, store=hook), bench.topic)
        assert result in (model, model | {14: "again"})
        found.append(result[14])
    assert "again" in found


def test_what_is_trimmed_in_journals_is_told(house: House) -> None:
    bench, model = amended_partition(house)
    trim_topic(house.context, bench.topic, ToOffsets({0: 6}))
    with pytest.raises(NotFoundError) as caught:
        seen(house.context, bench.topic, 3)
    assert caught.value.context == {"offset": 3, "start": 6}
    assert seen(house.context, bench.topic, 6) == {n: v for n, v in model.items() if n >= 6}


def test_an_end_that_is_read_costs_one_call(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    counted = Meddled(house.catalog, 1_000, lambda: None)
    reader = Reader(replace(house.context, catalog=counted), topic, 0)  # type: ignore[arg-type]
    assert list(reader.read(1)) == []
    assert counted._left == 999


def test_a_gap_between_journals_is_damage(house: House) -> None:
    bench, _ = amended_partition(house)
    bench.compile(8, 16)
    house.catalog.write(
        bench.where,
        tidelog.catalog.Delete("journal/00000000000000000008"),
        write_id="w",
    )
    with pytest.raises(CorruptError, match="no run holds offset 8"):
        seen(house.context, bench.topic)


# Consumers.


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 1)
        yield opened


def numbers(events: list[Event]) -> list[int]:
    return [int(event.value or b"-1") for event in events]


def fill(home: Home, *counts: int) -> Bench:
    at = 0
    for many in counts:
        home.append("t", [Event(b"%d" % n) for n in range(at, at + many)])
        at += many
    return Bench(home.context, home.topic("t"))


def test_a_consumer_goes_over_what_was_erased(home: Home) -> None:
    bench = fill(home, 10, 10, 10)
    bench.delete(*range(5, 25))
    bench.compile(0, 20)
    with home.consumer("t", "c") as consumer:
        assert numbers(consumer.poll(3)) == [0, 1, 2]
        assert numbers(consumer.poll(3)) == [3, 4, 25]
        consumer.commit()
        assert home.lag("t")[0].cursor == 26
        assert numbers(consumer.poll(9)) == [26, 27, 28, 29]


def test_a_cursor_moves_over_an_erased_end(home: Home) -> None:
    bench = fill(home, 10)
    bench.delete(*range(10))
    bench.compile(0, 10)
    bench.sweep()
    with home.consumer("t", "c") as consumer:
        assert consumer.poll(timeout_s=0) == []
        assert not consumer.uncommitted(), "nothing was delivered"
        assert consumer.caught_up()
        consumer.commit()
        assert home.lag("t")[0].events == 0
    with home.consumer("t", "other") as consumer:
        assert consumer.run(print, until_caught_up=True) == 0
    assert [lag.cursor for lag in home.lag("t")] == [10, 10]


def test_an_amendment_is_seen_by_the_next_poll(home: Home) -> None:
    bench = fill(home, 20, 20)
    with home.consumer("t", "c") as consumer:
        assert numbers(consumer.poll(5)) == [0, 1, 2, 3, 4]
        bench.delete(5, 7)
        bench.update(6, b"66")
        assert numbers(consumer.poll(3)) == [66, 8, 9]
        bench.compile(0, 40)
        bench.sweep()
        bench.delete(10)
        assert numbers(consumer.poll(2)) == [11, 12]


def test_an_amendment_of_another_process_is_seen_soon(home: Home) -> None:
    bench = fill(home, 100)
    other = Bench(replace(home.context, wakeups=Wakeups()), bench.topic)
    with home.consumer("t", "c") as consumer:
        assert numbers(consumer.poll(5)) == [0, 1, 2, 3, 4]
        other.delete(*range(5, 100, 2))
        time.sleep(read_module._FRESH_S)
        assert numbers(consumer.poll(3)) == [6, 8, 10]


def test_a_handler_that_fails_gets_the_same_again(home: Home) -> None:
    bench = fill(home, 10)
    bench.delete(0, 1, 4)
    bench.compile(0, 10)
    handled: list[int] = []

    def fail_once(event: Event) -> None:
        handled.append(event.offset or 0)
        if handled == [2, 3, 5]:
            raise ValueError("no")

    with home.consumer("t", "c") as consumer:
        with pytest.raises(ValueError, match="no"):
            consumer.run(fail_once, retries=0, until_caught_up=True)
        assert home.lag("t")[0].cursor == 5
        assert consumer.run(fail_once, until_caught_up=True) == 5
    assert handled == [2, 3, 5, 5, 6, 7, 8, 9]


def test_reading_once_ends_behind_what_was_erased(home: Home) -> None:
    bench = fill(home, 10)
    bench.delete(3, *range(6, 10))
    found: list[int] = []
    consumer = home.consumer("t", "c")
    reply = consumer.read_once(0, 4, lambda event: found.append(event.offset or 0))
    assert (reply["events_read"], reply["done"]) == (4, False)
    reply = consumer.read_once(0, 4, lambda event: found.append(event.offset or 0))
    assert (reply["events_read"], reply["done"]) == (1, True)
    assert found == [0, 1, 2, 4, 5]
    bench.delete(0)
    assert consumer.read_once(0, 4)["events_read"] == 0


def test_events_that_can_be_read_are_counted(home: Home) -> None:
    bench = fill(home, 10, 10)
    bench.delete(1, 2, 15)
    bench.compile(0, 10)
    bench.delete(3)
    (state,) = home.partitions("t")
    assert (state.events, state.erased, state.runs) == (16, 4, 2)
    (state,) = home.partitions("t", runs=False)
    assert (state.next - state.start, state.erased) == (20, 0)


def test_home_reads_no_empty_batches(home: Home) -> None:
    bench = fill(home, 5, 5)
    bench.delete(*range(5))
    assert [batch.num_rows for batch in home.read_arrow("t")] == [5]
    assert numbers(list(home.read("t"))) == [5, 6, 7, 8, 9]


# Appends.


def test_an_append_that_was_compiled_before_anybody_could_tell(house: House) -> None:
    topic = house.topic()
    bench = Bench(house.context, topic)
    house.append(topic, ["a", "b"])
    (run,) = bench.rows("run")
    bench.compile(0, 2)
    appender = Appender(house.context, topic, "~p")
    with pytest.raises(UnknownOutcomeError, match="was compiled since"):
        appender._is_ours(0, run, bench.head)
