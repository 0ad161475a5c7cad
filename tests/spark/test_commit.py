"""The driver's protocol without Spark: killed after every call, repeated, and done twice at once.

Each driver stages contents of its own for a batch, so that a check sees whose were stored. To the
sink they are repeats of one batch all the same: their digest is that of the batch.
Invariant: of every batch the topic holds exactly what one driver staged, once, batch after batch.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.support.archive_look import a_home
from tidelog import Home
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import Contents, table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.erasure.proof import Trace
from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.times import Backoff
from tidelog.model.topic import Topic
from tidelog.spark import write
from tidelog.spark.write import Batch, SparkSink
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

PARTITIONS = 2
QUERY = "query-1"


class World:
    """A topic in memory, and drivers that may reach it over a bad network."""

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.scheduler: Scheduler | None = None
        self.clock = FakeClock()
        self.rows, self.objects = MemoryCatalog(), MemoryStore(self.clock)
        self.ids = seeded_ids(seed)
        self.context = Context(self.objects, self.rows, self.clock, self.ids, random.Random(seed))
        self.topic = create_topic(self.context, Topic("t", self.ids.new(), PARTITIONS, 0))

    def behind(self, faults: Faults) -> Context:
        """The log as a driver sees it."""
        clock = self.scheduler.clock if self.scheduler else self.clock
        chance = random.Random(self.seed)
        store = FaultyStore(self.objects, faults)
        return Context(
            RetryingStore(store, clock=clock, random=chance, backoff=Backoff()),
            FaultyCatalog(self.rows, faults, clock),
            clock,
            self.ids,
            chance,
        )

    def stage(
        self, batch: int, driver: str, segments: int = 2, sink: str = "s"
    ) -> tuple[StagedSegment, ...]:
        """What the tasks of one driver put into the store."""
        found = []
        for number in range(segments):
            parts = [
                (partition, table_of([Event(f"{batch} {driver} {number}".encode())], 0))
                for partition in range(PARTITIONS)
            ]
            segment = encode_staged(parts)
            generation = find_topic(self.context, "t").generation
            place = (self.topic.incarnation, sink, batch, generation)
            key = layout.sink_staged(*place, self.ids.new())
            self.objects.put(key, segment.data)
            found.append(StagedSegment(key, segment.pieces))
        return tuple(found)

    def stored(self, partition: int) -> list[str]:
        stretches = Reader(self.context, find_topic(self.context, "t"), partition).read(0)
        return [(e.value or b"").decode() for stretch in stretches for e in stretch.events()]

    def check(self, batches: int, segments: int = 2) -> None:
        """Of each batch what one driver staged, in order, the same driver in all partitions."""
        found = self.stored(0)
        drivers = [value.split()[1] for value in found[::segments]]
        expected = [
            f"{batch} {driver} {number}"
            for batch, driver in enumerate(drivers)
            for number in range(segments)
        ]
        assert found == expected
        assert len(drivers) == batches
        assert self.stored(1) == expected
        assert verify_topic(self.context, self.topic).errors == 0

    def staged_left(self, sink: str = "s") -> list[str]:
        folder = layout.sinks(self.topic.incarnation, sink)
        return [info.key for info in self.objects.list(folder)]


def made(
    query: str | None,
    batch: int,
    staged: tuple[StagedSegment, ...],
    contents: Contents | None = None,
) -> Batch:
    """A batch whose repeats are all the same to the sink, unless contents are given."""
    return Batch(query, batch, staged, contents or Contents(len(staged), f"{batch:x}", "test"))


@pytest.fixture
def world() -> World:
    return World()


def test_one_lost_batch_is_proven(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    sink.commit(made(QUERY, 0, world.stage(0, "a")))
    before = {name: dict(rows) for name, rows in world.rows._partitions.items()}
    sink.commit(made(QUERY, 1, world.stage(1, "a", segments=1)))
    world.rows._partitions = before
    assert verify_topic(world.context, world.topic).proven_losses == 1
    sink.commit(made(QUERY, 2, world.stage(2, "a")))  # Spark goes on after its checkpoint
    assert verify_topic(world.context, world.topic).proven_losses == 1
    assert [each.topic for each in sweep_home(world.context, 0).refused] == ["t"]


def test_a_repeated_batch_is_stored_once(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    for batch in range(3):
        sink.commit(made(QUERY, batch, world.stage(batch, "a")))
        sink.commit(made(QUERY, batch, world.stage(batch, "b")))
    world.check(3)
    assert {value.split()[1] for value in world.stored(0)} == {"a"}


def test_a_batch_that_is_older_than_the_last_is_refused(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    for batch in range(3):
        sink.commit(made(QUERY, batch, world.stage(batch, "a")))
    with pytest.raises(InvalidError, match="batch 1 comes after batch 2, which is stored"):
        sink.commit(made(QUERY, 1, world.stage(1, "b")))
    sink.commit(made(QUERY, 1, ()))
    world.check(3)


@pytest.mark.parametrize(
    "other", [Contents(3, "7", "test"), Contents(2, "8", "test"), Contents(3, "7", "newer")]
)
def test_repeat_of_a_batch_with_other_events_is_refused(world: World, other: Contents) -> None:
    """As after a checkpoint was set back by one batch."""
    sink = SparkSink(world.context, world.topic, "s")
    sink.commit(made(QUERY, 0, world.stage(0, "a"), Contents(2, "7", "test")))
    repeat = made(QUERY, 0, world.stage(0, "b"), other)
    with pytest.raises(InvalidError, match=r"batch 0 is stored with 2 events.*acceptRepeat to 0"):
        sink.commit(repeat)
    with pytest.raises(InvalidError, match="acceptRepeat"):
        sink.commit(repeat, accept_repeat=1)
    sink.commit(repeat, accept_repeat=0)
    sink.commit(made(QUERY, 1, world.stage(1, "a")), accept_repeat=0)
    world.check(2)


def test_repeat_is_checked_after_a_decided_batch_was_finished(world: World) -> None:
    """The driver died before the batch was in the topic: its events are stored, then compared."""
    for call in range(1, 100):
        with contextlib.suppress(Crash):
            SparkSink(world.behind(Faults(crash_after_call=call)), world.topic, "s").commit(
                made(QUERY, 0, world.stage(0, "a"), Contents(2, "7", "test"))
            )
        row = world.rows.get(layout.topic_partition(world.topic.incarnation, 0), "sink/s")
        if row is not None:
            break
    with pytest.raises(InvalidError, match="comes again with 9"):
        SparkSink(world.context, world.topic, "s").commit(
            made(QUERY, 0, world.stage(0, "b"), Contents(9, "7", "test"))
        )
    world.check(1)


def dies(*_: object) -> int:
    raise Crash


def test_decided_batch_of_a_query_that_is_gone_is_stored_by_any_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = made(QUERY, 0, world.stage(0, "a"))
    with monkeypatch.context() as patch:
        patch.setattr(write, "append_staged", dies)
        with pytest.raises(Crash):
            SparkSink(world.context, world.topic, "s").commit(batch)
    assert world.stored(0) == []
    with pytest.raises(InvalidError, match="belongs to query query-1"):
        SparkSink(world.context, world.topic, "s").commit(made("", 0, world.stage(0, "b")))
    world.check(1)


def test_proof_says_that_a_decided_batch_must_be_stored_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_home(tmp_path) as home:
        topic = home.create_topic("t", 1)
        segment = encode_staged([(0, table_of([Event(b"v", b"ada", "e1", 1_000)], 0))])
        place = (topic.incarnation, "s", 0, topic.generation)
        key = layout.sink_staged(*place, home.context.ids.new())
        home.store.put(key, segment.data)
        batch = made(QUERY, 0, (StagedSegment(key, segment.pieces),))
        assert "a Spark write has staged it" in trace_of(home, key).what
        with monkeypatch.context() as patch:
            patch.setattr(write, "append_staged", dies)
            with pytest.raises(Crash):
                SparkSink(home.context, topic, "s").commit(batch)
        found = trace_of(home, key)
        assert "batch 0 of Spark sink `s` is decided, and not yet in the topic" in found.what
        assert "let its query run again, which stores the batch" in found.do
        assert "options sink `s` and batch 0" in found.do
        SparkSink(home.context, topic, "s").commit(batch)
        home.delete_key("t", b"ada")
        purge(home.context, home.topic("t"), grace_ms=0)
        assert home.prove_erased("t", keys=[b"ada"]).is_erased


def trace_of(home: Home, key: str) -> Trace:
    """Returns what a proof reports about one object."""
    (found,) = (each for each in home.prove_erased("t", keys=[b"ada"]).traces if each.object == key)
    return found


def test_counts_alone_are_compared_with_a_digest_of_another_version(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    sink.commit(made(QUERY, 0, world.stage(0, "a"), Contents(2, "7", "old")))
    sink.commit(made(QUERY, 0, world.stage(0, "b"), Contents(2, "9", "new")))
    world.check(1)


def test_query_whose_topic_was_deleted_and_made_again_is_refused(world: World) -> None:
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, world.stage(0, "a")))
    delete_topic(world.context, "t")
    world.topic = create_topic(world.context, Topic("t", world.ids.new(), PARTITIONS, 0))
    sink = SparkSink(world.context, world.topic, "s")
    sink.commit(made(QUERY, 1, ()))  # nothing to store, nothing lost
    with pytest.raises(InvalidError, match=r"deleted and made again since query query-1 wrote"):
        sink.commit(made(QUERY, 1, world.stage(1, "a")))
    assert world.stored(0) == []
    sink.commit(made("query-2", 0, world.stage(0, "b")))  # with a new checkpoint
    SparkSink(world.context, world.topic, "other").commit(made(QUERY, 2, world.stage(1, "c")))
    assert len(world.stored(0)) == 4


def test_what_was_staged_goes_when_a_batch_is_done(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    world.stage(0, "failed-task")
    sink.commit(made(QUERY, 0, world.stage(0, "a")))
    assert world.staged_left() == []
    late = world.stage(0, "late-task")
    sink.commit(made(QUERY, 1, world.stage(1, "a")))
    assert late
    assert world.staged_left() == []


DAY_S = 86_400


@pytest.mark.parametrize("sink", ["s", "~unnamed"])
def test_what_a_killed_write_staged_is_swept_after_a_day(world: World, sink: str) -> None:
    world.stage(0, "killed", sink=sink)
    world.clock.advance(DAY_S - 10)
    sweep_home(world.context, 0)
    assert len(world.staged_left(sink)) == 2, "a job may run that long"
    world.clock.advance(20)
    sweep_home(world.context, 0)
    assert world.staged_left(sink) == []


def test_batch_is_swept_as_a_whole(world: World) -> None:
    world.stage(0, "a")
    world.clock.advance(DAY_S)
    staged = world.stage(0, "a")  # by a later task of the same batch
    sweep_home(world.context, 0)
    assert len(world.staged_left()) == 4
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))
    world.check(1)


def test_batch_that_was_swept_is_refused_and_stores_nothing(world: World) -> None:
    staged = world.stage(0, "slow")
    world.clock.advance(DAY_S)
    sweep_home(world.context, 0)
    with pytest.raises(UnavailableError, match="a sweep has deleted what it had staged"):
        SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))
    assert world.stored(0) == []
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, world.stage(0, "again")))
    world.check(1)


def test_stream_that_stages_under_an_old_generation_is_not_refused(world: World) -> None:
    world.stage(7, "killed", sink="other")
    world.clock.advance(2 * DAY_S)
    first = world.stage(0, "a")  # as a query does that has read the topic long ago
    sweep_home(world.context, 0)
    assert world.staged_left("other") == []
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, first))
    world.check(1)


@pytest.mark.parametrize("call", range(1, 16))
def test_sweep_between_any_calls_of_a_commit_loses_no_decided_batch(
    world: World, call: int
) -> None:
    """An old batch is decided and its driver dies, or it is refused: it is never half there."""
    staged = world.stage(0, "slow")
    world.clock.advance(DAY_S)
    with contextlib.suppress(Crash):
        SparkSink(world.behind(Faults(crash_after_call=call)), world.topic, "s").commit(
            made(QUERY, 0, staged)
        )
    sweep_home(world.context, 0)
    with contextlib.suppress(UnavailableError):
        SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))
    if world.stored(0):
        world.check(1)
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, world.stage(0, "again")))
    world.check(1)


def test_sweep_before_the_row_is_written_makes_the_batch_fail(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has looked, then stalls; the sweep deletes; then it decides."""
    staged = world.stage(0, "slow")
    world.clock.advance(DAY_S)
    real = write.check_not_swept
    swept = []

    def then_swept(
        context: Context, topic: Topic, segments: tuple[StagedSegment, ...]
    ) -> str | None:
        version = real(context, topic, segments)
        if not swept:
            swept.append(sweep_home(world.context, 0))
        return version

    monkeypatch.setattr(write, "check_not_swept", then_swept)
    with pytest.raises(UnavailableError, match="a sweep has deleted"):
        SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))
    assert world.stored(0) == []


def test_batch_numbers_may_leave_gaps_and_be_large(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    for batch in (3, 20_261_115, 1 << 60):
        sink.commit(made("", batch, world.stage(batch, "a", 1)))
    assert len(world.stored(0)) == 3


def test_an_empty_batch_writes_nothing_but_finishes_what_was_decided(world: World) -> None:
    SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, ()))
    assert world.rows.get(layout.topic_partition(world.topic.incarnation, 0), "sink/s") is None
    faults = Faults()
    decided = False
    for call in range(1, 100):
        crashing = Faults(crash_after_call=call)
        with contextlib.suppress(Crash):
            SparkSink(world.behind(crashing), world.topic, "s").commit(
                made(QUERY, 1, world.stage(1, str(call)))
            )
        row = world.rows.get(layout.topic_partition(world.topic.incarnation, 0), "sink/s")
        if row is not None:
            decided = True
            break
    assert decided
    SparkSink(world.behind(faults), world.topic, "s").commit(made(None, 2, ()))
    assert len(world.stored(0)) == 2


def test_another_query_is_refused(world: World) -> None:
    sink = SparkSink(world.context, world.topic, "s")
    sink.commit(made(QUERY, 0, world.stage(0, "a")))
    with pytest.raises(InvalidError, match=r"belongs to query query-1.*bring its checkpoint back"):
        sink.commit(made("query-2", 0, world.stage(0, "b")))
    with pytest.raises(InvalidError, match="this is batch writes"):
        sink.commit(made("", 1, world.stage(1, "b")))
    world.check(1)


def test_a_driver_that_dies_after_any_call_is_finished_by_the_next(world: World) -> None:
    batch = 0
    for call in range(1, 200):
        faults = Faults(crash_after_call=call)
        try:
            SparkSink(world.behind(faults), world.topic, "s").commit(
                made(QUERY, batch, world.stage(batch, "dies"))
            )
            died = False
        except Crash:
            died = True
        world.clock.sleep(10)
        sweep_home(world.context, 1)
        SparkSink(world.context, find_topic(world.context, "t"), "s").commit(
            made(QUERY, batch, world.stage(batch, "lives"))
        )
        batch += 1
        world.check(batch)
        assert world.staged_left() == []
        if not died:
            break
    assert not died
    assert batch > 10
    assert {value.split()[1] for value in world.stored(0)} == {"dies", "lives"}


def test_a_sweep_between_copy_and_commit_costs_another_copy(world: World) -> None:
    stale = world.topic  # as a driver knows it that has slept during a sweep
    world.clock.sleep(10)
    sweep_home(world.context, 1)
    SparkSink(world.context, stale, "s").commit(made(QUERY, 0, world.stage(0, "a")))
    world.check(1)


def test_a_deleted_topic_is_told(world: World) -> None:
    staged = world.stage(0, "a")
    delete_topic(world.context, "t")
    with pytest.raises(NotFoundError, match="was deleted"):
        SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))


def test_a_staged_segment_that_is_gone_is_corruption(world: World) -> None:
    staged = world.stage(0, "a")
    world.objects.delete([staged[1].key])
    with pytest.raises(CorruptError, match="batch 0 is decided, but something of it is gone"):
        SparkSink(world.context, world.topic, "s").commit(made(QUERY, 0, staged))


def test_without_a_name_each_piece_is_stored_once(world: World) -> None:
    staged = world.stage(0, "a")
    producer = Copier(world.context, world.topic, "~me")
    append_staged(producer, staged)
    append_staged(Copier(world.context, world.topic, "~me"), staged)
    producer.close()
    world.check(1)


RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.04,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.10,
    Fault.CRASH_BEFORE: 0.01,
    Fault.CRASH_AFTER: 0.01,
}
BATCHES = 4


def simulate(seed: int) -> list[str]:
    """Two drivers go through the same batches, each as if the other were dead, and a sweeper."""
    world = World(seed)
    world.scheduler = scheduler = Scheduler(seed)
    faults = Faults(scheduler.random, RATES, scheduler)

    def drive(name: str) -> None:
        context = world.behind(faults)
        for batch in range(BATCHES):
            while True:
                try:
                    topic = find_topic(context, "t")
                    SparkSink(context, topic, "s").commit(
                        made(QUERY, batch, world.stage(batch, name))
                    )
                    break  # as Spark does, on to the next batch
                except InvalidError:
                    break  # the other one is past this batch
                except CorruptError:
                    raise
                except TidelogError:
                    continue

    def sweep() -> None:
        for _ in range(6):
            scheduler.sleep(1)
            with contextlib.suppress(TidelogError):
                sweep_home(world.behind(faults), 0)

    scheduler.spawn("a", lambda: drive("a"))
    scheduler.spawn("b", lambda: drive("b"))
    scheduler.spawn("sweeper", sweep)
    scheduler.run()
    for batch in range(BATCHES):  # whoever died, the query is started again
        topic = find_topic(world.context, "t")
        with contextlib.suppress(InvalidError):
            SparkSink(world.context, topic, "s").commit(made(QUERY, batch, world.stage(batch, "c")))
    world.check(BATCHES)
    return scheduler.trace


@pytest.mark.parametrize("seed", range(30))
def test_two_drivers_at_once_store_each_batch_once(seed: int) -> None:
    simulate(seed)


def test_one_seed_runs_the_same_twice() -> None:
    assert simulate(3) == simulate(3)
