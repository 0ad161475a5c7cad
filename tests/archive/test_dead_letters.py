"""Dead letters tried again: P4 over crashes at every step, two replays at once, and real kills."""

from __future__ import annotations

import functools
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill, value
from tests.support.fake_pipelines import ListSource
from tests.support.races import race_two
from tests.support.rounds import rounds
from tidelog import Event, Home
from tidelog.archive import dead_letters as replaying
from tidelog.archive.archive import committed_files, open_pipeline, open_sink
from tidelog.archive.dead_letters import (
    ReplayOptions,
    dead_letters,
    open_replay,
    plan_replay,
    read_dead_files,
    remove_replaced,
    replay,
)
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import ABSENT, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import EVENT_SCHEMA, table_of, with_position
from tidelog.codec.formats import open_format
from tidelog.connectors.archive import dead_letters as dead_module
from tidelog.connectors.archive import sink as files_module
from tidelog.connectors.archive import staging as publish
from tidelog.connectors.archive import staging as uploads
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import Chunk, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    counting_files,
    dead_files,
    read_partitions,
    read_progress,
    replay_effect,
    replay_pipeline,
)
from tidelog.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
)
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Begin, FileEntry
from tidelog.model.times import Backoff
from tidelog.model.topic import encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.share import DriverShare
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

CALLS = 80  # of a whole replay, or somewhat more
DIED = "ignore::pytest.PytestUnraisableExceptionWarning"  # a writer that dies closes no file
RUN = """
import sys
import tidelog.archive.dead_letters as module
from tests.support.archive_look import AT_OR_WHEN
from tidelog.home import open_home
from tidelog.archive.archive import find_archive
from tidelog.pipeline.tasks import LocalWorkers
module._EVENTS_MAX = 300
with open_home(sys.argv[1]) as home:
    how = module.Replaying(parser=AT_OR_WHEN)
    module.replay(home, find_archive(home, "daily"), how, LocalWorkers(2))
"""

Key = tuple[str, int]  # source partition, offset


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 3)
        yield made


def test_plan_says_what_a_replay_does_and_changes_nothing(home: Home) -> None:
    for partition in (0, 1):
        fill(home, range(1, 60), partition=partition)
    drive(home, an_archive(home, parser=AT))
    archive = home.archives.get("daily")
    before = sorted(each.key for each in home.store.list(""))
    plan = archive.plan_replay(parser=AT_OR_WHEN)
    assert plan.reasons == {"no field at": 34, "no JSON": 16}
    assert plan.refused == {"no JSON": 16}
    assert archive.plan_replay().refused == plan.reasons, "the archive's own parser is as it was"
    assert plan_replay(home.context, archive.info, ReplayOptions(), most=30).tried == 30
    assert sorted(each.key for each in home.store.list("")) == before
    done = archive.replay(parser=AT_OR_WHEN)
    assert (plan.dead, plan.tried, plan.accepted) == (done.tried, done.tried, done.replayed)


def is_late(number: int) -> bool:
    """Whether an event is taken at the second try."""
    return number % 7 != 0 and number % 3 == 0


class JsonSource(ListSource):
    """Events in memory; offsets with a gap now and then."""

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        held = self.events[range.partition]
        for offset in sorted(n for n in held if int(range.start) <= n < int(range.limit)):
            table = table_of([Event(value(offset), timestamp=offset)], 0)
            batch = with_position(table.to_batches()[0], "t", int(range.partition.name), offset)
            yield Chunk(batch, str(offset + 1))
        yield Chunk(pa.RecordBatch.from_pylist([], EVENT_SCHEMA), range.limit)


class InPlace:
    """Stands for a pool of threads, which a simulation cannot have."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., object], *given: object) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(call(*given))
        return done

    def shutdown(self) -> None: ...


class Ground:
    """An archive in memory with dead letters, and replays on it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, partitions: int = 1, count: int = 30
    ) -> None:
        self.rows, self.objects = MemoryCatalog(), MemoryStore(FakeClock())
        self.source = JsonSource(partitions, count)
        self.archive = Archive(
            name="daily",
            incarnation="inc",
            source="list:",
            kind="partition",
            store="file:///nowhere",
            root="archives/daily",
            created_ms=0,
            formats={1: ArchiveFormat(parser=AT)},
            state="ready",
        )
        row = Put(layout.archive_row("daily"), encode_row(self.archive), ABSENT)
        self.rows.write(layout.REGISTRY, row, write_id="made")
        self.epoch = 0
        self.store: Store = self.objects  # as workers see it
        monkeypatch.setattr(files_module, "open_store_here", lambda _: self.store)
        monkeypatch.setattr(replaying, "open_store_here", lambda _: self.store)
        monkeypatch.setattr(replaying, "_EVENTS_MAX", 3)
        monkeypatch.setattr(uploads, "Pool", InPlace)
        monkeypatch.setattr(publish, "Pool", InPlace)
        sink = open_sink(self.archive)
        pipeline = Pipeline("daily", "inc.1", self.source, sink, LocalWorkers())
        self.drain(self.context(), pipeline, step=8)

    def context(self, faults: Faults | None = None, scheduler: Scheduler | None = None) -> Context:
        clock = scheduler.clock if scheduler else FakeClock()
        chance, ids = random.Random(self.epoch), seeded_ids(1_000 + self.epoch)
        self.epoch += 1
        self.store = self.objects
        if faults is None:
            return Context(self.objects, self.rows, clock, ids, chance)
        faulty = FaultyStore(self.objects, faults)
        backoff = Backoff(attempts=3)
        self.store = RetryingStore(faulty, clock=clock, random=chance, backoff=backoff)
        return Context(self.store, FaultyCatalog(self.rows, faults, clock), clock, ids, chance)

    def drain(self, context: Context, pipeline: Pipeline, step: int | None = None) -> None:
        """A driver of its own epoch, until nothing is left to do."""
        cycle = Cycle(context, pipeline, f"driver-{self.epoch}")
        for _ in range(60):
            bounds = pipeline.source.bounds(pipeline.source.partitions())
            for partition, held in bounds.items():
                if not cycle.is_ready(partition):
                    cycle.claim(partition, Begin(held.first, "earliest"))
            limits = {p: b.end for p, b in bounds.items() if cycle.position(p) != b.end}
            if step is not None:
                limits = {
                    p: str(min(int(end), int(cycle.position(p)) + step))
                    for p, end in limits.items()
                }
            report = cycle.run(limits, bounds)
            if report.claimed_elsewhere:
                return
            for error in report.errors.values():
                raise error
            if not report.committed:
                return

    def replay(self, context: Context, parser: str = AT_OR_WHEN) -> None:
        self.drain(
            context,
            open_replay(context, self.archive, ReplayOptions(parser=parser), LocalWorkers()),
        )
        remove_replaced(context, context.store, self.archive)

    def expected(self) -> Counter[Key]:
        return Counter((p.name, n) for p, held in self.source.events.items() for n in held)

    def listed(self) -> Counter[Key]:
        """What a plain recursive listing finds."""
        return self.held(info.key for info in self.objects.list("archives/daily/g1/"))

    def held(self, keys: Iterable[str]) -> Counter[Key]:
        return Counter(each for key in keys for each in held_in(key, self.objects.get(key)))

    def dead(self, context: Context) -> list[FileEntry]:
        groups = [
            g for p in read_partitions(context, "inc.1") for g in dead_files(context, "inc.1", p)
        ]
        return [file for group in groups for file in group]

    def check(self, is_done: bool) -> None:
        """Each event once in the listing or among the dead letters, and the rows agree."""
        context, data, dead = self.context(), [], Counter[Key]()
        for partition in read_partitions(context, "inc.1"):
            files = [file for _, file in counting_files(context, "inc.1", partition)]
            data += [file.target for file in files if file.kind == "data"]
        for file in self.dead(context):
            offsets = [
                o for b in read_dead_files(self.objects, [file]) for o in b["offset"].to_pylist()
            ]
            assert len(offsets) == file.events
            dead.update((file.target.split("_")[-2], offset) for offset in offsets)
        assert self.held(data) + dead == self.expected()
        assert max(self.listed().values()) == 1
        if is_done:
            assert self.listed() == self.held(data)
            assert dead == Counter(key for key in self.expected() if key[1] % 7 == 0)
            there = {info.key for info in self.objects.list("dead/")}
            assert there == {file.target for file in self.dead(context)}


@functools.lru_cache(maxsize=10_000)
def held_in(key: str, data: bytes) -> list[Key]:
    rows = [row for batch in open_format("parquet").read(data) for row in batch.to_pylist()]
    assert key.endswith(f"_{rows[0]['offset']:020}.parquet")
    return [(str(row["partition"]), row["offset"]) for row in rows]


def test_what_now_parses_is_archived_and_the_rest_stays_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, partitions=2)
    assert not any(is_late(number) for _, number in ground.listed())
    ground.replay(ground.context())
    ground.check(is_done=True)
    context = ground.context()
    effects = [replay_effect(context, "inc.1", p) for p in read_partitions(context, "inc.1")]
    late = sum(is_late(number) for _, number in ground.expected())
    assert sum(effect.replayed for effect in effects) == late
    ground.replay(ground.context())  # nothing parses now that did not before
    ground.check(is_done=True)
    ground.replay(ground.context(), parser="timestamp")  # which takes all
    assert ground.listed() == ground.expected()
    assert list(ground.objects.list("dead/")) == []
    ground.replay(ground.context())
    assert ground.listed() == ground.expected()
    assert list(ground.objects.list("staging/")) == []


def test_names_of_replayed_files_meet_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch, partitions=2)
    before = {info.key: ground.objects.get(info.key) for info in ground.objects.list("archives/")}
    ground.replay(ground.context())
    after = {info.key: ground.objects.get(info.key) for info in ground.objects.list("archives/")}
    assert before.items() < after.items()
    folders = [{key.rpartition("/")[0] for key in keys} for keys in (before, after.keys() - before)]
    assert len(folders[0] & folders[1]) == 2  # new files stand beside old ones


def test_an_event_that_no_schema_took_names_no_file(home: Home) -> None:
    """The first event of a range is a misfit: its offset is free for the replay's file."""
    home.append("t", [Event(b'{"n": 0, "more": 1}'), *(Event(b'{"n": 1}'),) * 9], partition=0)
    settings = {"schema": "n BIGINT", "strict": True}
    archive = an_archive(home, "typed", format_settings=settings)
    drive(home, archive)
    corrected = ArchiveFormat(format_settings={**settings, "strict": False})
    archive = msgspec.structs.replace(archive, formats={1: corrected})
    assert replay(home.context, archive, ReplayOptions(), LocalWorkers()).replayed == 1
    names = [info.key.rpartition("_")[2] for info in home.store.list(f"{archive.folder()}/")]
    assert names == [f"{0:020}.parquet", f"{1:020}.parquet"]


@pytest.mark.parametrize("block", rounds(4, every=4))
def test_a_replay_that_dies_after_any_call_is_finished_by_the_next(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    for call in range(1 + block, CALLS, 4):
        ground = Ground(monkeypatch, count=16)
        faults = Faults(crash_after_call=call)
        try:
            ground.replay(ground.context(faults))
        except Crash:
            ground.check(is_done=False)
            ground.replay(ground.context())
        else:
            assert call > CALLS - 10, "a replay makes fewer calls than this test dies after"
        ground.check(is_done=True)


@pytest.mark.filterwarnings(DIED)
@pytest.mark.parametrize("block", rounds(4, every=4))
def test_two_replays_at_once_in_a_bad_world(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        race_replays(Ground(monkeypatch), seed)


def race_replays(ground: Ground, seed: int) -> None:
    def act(faults: Faults, scheduler: Scheduler) -> None:
        ground.replay(ground.context(faults, scheduler))

    def no_doubles() -> None:
        assert max(ground.listed().values()) == 1

    race_two(seed, 3, act, no_doubles)
    ground.replay(ground.context())
    ground.check(is_done=True)


def offsets_of(home: Home, archive: Archive) -> Counter[Key]:
    form, found = open_format("parquet"), Counter[Key]()
    for info in home.store.list(f"{archive.folder()}/"):
        for batch in form.read(home.store.get(info.key)):
            found.update((str(row["partition"]), row["offset"]) for row in batch.to_pylist())
    return found


@pytest.mark.long
def test_replays_that_are_killed_archive_each_event_once(home: Home) -> None:
    for partition in range(3):
        fill(home, range(6_000), partition=partition)
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    chance = random.Random(20261115)
    for _ in range(5):
        command = [sys.executable, "-c", RUN, home.config]
        processes = [subprocess.Popen(command) for _ in range(2)]
        time.sleep(0.9 + chance.random())
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert max(offsets_of(home, archive).values()) == 1
    done = replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(2))
    assert done.tried == done.replayed + done.dead
    taken = offsets_of(home, archive)
    assert taken == Counter((str(p), n) for p in range(3) for n in range(6_000) if n % 7)
    assert sum(
        f.events for _, f in committed_files(home.context, archive) if f.kind == "data"
    ) == len(taken)
    left = [row for batch in dead_letters(home.context, archive) for row in batch.to_pylist()]
    assert [(r["partition"], r["offset"]) for r in left] == [
        (p, n) for p in range(3) for n in range(0, 6_000, 7)
    ]


def test_sweep_deletes_what_a_replay_left_that_died_after_its_commit(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, range(1, 5))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    with monkeypatch.context() as patch:
        patch.setattr(files_module.ArchiveSink, "discard", lambda *_: None)
        patch.setattr(DriverShare, "leave", lambda self, cycle: None)
        assert replay(
            home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers()
        ).replayed
    staged = layout.staging_of(replay_pipeline(archive.pipeline()))
    assert list(home.store.list(staged))
    home.sweep("0s")
    assert not list(home.store.list(staged))


def test_replay_without_dead_letters_fences_an_earlier_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sleeps in the middle of a range, whose dead letters another one has replayed."""
    fill(home, range(1, 5))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    options = ReplayOptions(parser=AT_OR_WHEN)
    assert replay(home.context, archive, options, LocalWorkers()).replayed
    where = replay_pipeline(archive.pipeline()), "t/0"
    before = read_progress(home.context, *where)
    assert replay(home.context, archive, options, LocalWorkers()).tried == 0
    after = read_progress(home.context, *where)
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch


def test_files_of_dead_letters_that_overlap_are_tried_together(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a schema refuses is found later than what a parser does."""
    lines = [b'{"at": 1, "n": 1}', b'{"at": 2, "n": "x"}', b"nonsense"]
    home.append("t", [Event(lines[n % 3]) for n in range(300)], partition=0)
    archive = an_archive(home, parser=AT, format_settings={"schema": "n BIGINT"})
    monkeypatch.setattr(dead_module, "_FILE_BYTES", 2_000)
    drive(home, archive)
    (group, *_) = dead_files(home.context, archive.pipeline(), "t/0")
    assert len(group) > 1
    dead = [
        row["offset"] for batch in dead_letters(home.context, archive) for row in batch.to_pylist()
    ]
    assert dead == [n for n in range(300) if n % 3]
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
    corrected = ArchiveFormat(parser=AT, format_settings={"schema": "n STRING"})
    archive = msgspec.structs.replace(archive, formats={1: corrected})
    done = replay(home.context, archive, ReplayOptions(), LocalWorkers())
    assert (done.tried, done.replayed, done.dead) == (200, 100, 100)
    dead = [
        row["offset"] for batch in dead_letters(home.context, archive) for row in batch.to_pylist()
    ]
    assert dead == [n for n in range(300) if n % 3 == 2]


@pytest.mark.parametrize("form", ["parquet", "jsonlines"])
def test_an_archive_is_read_whole_and_in_order_after_replays(home: Home, form: str) -> None:
    """By a backfill or a restore: dead letters and replayed events come in their places."""
    archive = an_archive(home, parser=AT, format=form)
    for first in range(0, 90, 30):
        fill(home, range(first, first + 30))
        drive(home, archive)
    source = source_at(home.context, "archive:daily")
    partition = SourcePartition("t", "0")

    def offsets(start: int, end: int) -> list[int]:
        chunks = list(source.read(SourceRange(partition, str(start), str(end))))
        assert chunks[-1].position == str(end)
        return [offset for chunk in chunks for offset in chunk.batch["offset"].to_pylist()]

    planned = source.reader(SourceRange(partition, "0", "90"))
    assert offsets(0, 90) == list(range(90))
    for parser in (AT_OR_WHEN, AT_OR_WHEN, "timestamp"):
        replay(home.context, archive, ReplayOptions(parser=parser), LocalWorkers())
        assert offsets(0, 90) == list(range(90))
        assert offsets(31, 58) == list(range(31, 58))
    with pytest.raises(CorruptError, match="is not there"):
        list(planned.read())  # an old plan; the next one is right again


def test_a_generation_that_goes_takes_its_replays_along(home: Home) -> None:
    fill(home, range(60))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    old = replay_pipeline(archive.pipeline())
    _, number = begin_backfill(home.context, "daily", ArchiveFormat(parser=AT_OR_WHEN))
    pipeline = open_pipeline(home.context, home.archives.get("daily").info, LocalWorkers(), number)
    Driver(home.context, pipeline, DriverOptions()).run()
    newer = promote(home.context, "daily")
    assert replay(home.context, newer, ReplayOptions(), LocalWorkers()).tried
    with pytest.raises(InvalidError, match="generation 1 is kept, and nothing is added to it"):
        replay(home.context, newer, ReplayOptions(1), LocalWorkers())
    promoted = drop_generation(home.context, "daily", 1)
    assert not any(old in info.key for info in home.store.list())
    assert all("/2_0_" in info.key for info in home.store.list("dead/"))
    assert (
        replay(home.context, archive, ReplayOptions(), LocalWorkers()).tried == 0
    )  # by who knows it not yet
    assert (
        verify_archive(
            home.context, promoted, ArchiveVerifyOptions(deep=True, source=True)
        ).problems
        == []
    )
    assert not list(home.store.list(f"{archive.folder(1)}/"))


def test_new_dead_letters_while_a_replay_runs_wait_for_the_next(home: Home) -> None:
    fill(home, range(50))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    grown = []

    def grow(_: object) -> None:
        if not grown:
            grown.append(True)
            fill(home, range(50, 100))
            drive(home, archive)

    first = replay(
        home.context, archive, ReplayOptions(parser=AT_OR_WHEN, on_cycle=grow), LocalWorkers()
    )
    second = replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    assert first.replayed == sum(map(is_late, range(50)))
    assert second.replayed == sum(map(is_late, range(50, 100)))
    assert offsets_of(home, archive) == Counter(("0", n) for n in range(100) if n % 7)


def test_dead_letters_come_once_while_a_replay_replaces_their_files(home: Home) -> None:
    fill(home, range(200), partition=0)
    fill(home, range(200), partition=1)
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    reading = dead_letters(home.context, archive)
    first = next(reading)
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    rest = [row["offset"] for batch in reading for row in batch.to_pylist()]
    assert set(first["partition"].to_pylist()) == {0}
    assert rest == list(range(0, 200, 7))  # of partition 1, what stays dead


def test_bad_overrides_are_refused_and_nothing_is_touched(home: Home) -> None:
    fill(home, range(20))
    archive, backup = an_archive(home, parser=AT), an_archive(home, "raw")
    drive(home, archive)
    before = [info.key for info in home.store.list()]
    for how in (
        ReplayOptions(parser="jsn:at"),
        ReplayOptions(layout={"time_zone": "Mars"}),
        ReplayOptions(layout={"granularity": "century"}),
    ):
        with pytest.raises(InvalidError):
            replay(home.context, archive, how, LocalWorkers())
    with pytest.raises(InvalidError, match="contradict"):
        replay(home.context, backup, ReplayOptions(parser=AT), LocalWorkers())
    with pytest.raises(NotFoundError, match="has no generation 7"):
        replay(home.context, archive, ReplayOptions(generation=7), LocalWorkers())
    assert [info.key for info in home.store.list()] == before


def test_a_damaged_file_of_dead_letters_stops_loudly_and_stays(home: Home) -> None:
    fill(home, range(20))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    files = committed_files(home.context, archive)
    ((_, file),) = [each for each in files if each[1].kind == "dead"]
    data = home.store.get(file.target)
    home.store.delete([file.target])
    with pytest.raises(TidelogError, match="restore it from a copy"):
        replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    home.store.put(file.target, data[:-9] + bytes(9))
    with pytest.raises(CorruptError, match="crc32c"):
        replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    home.store.delete([file.target])
    home.store.put(file.target, data)
    done = replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    assert done.replayed == sum(map(is_late, range(20)))


def test_proof_names_the_replay_that_removes_what_a_killed_one_has_staged(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(value(3), id="e3", timestamp=3)], partition=0)
    archive = an_archive(home, parser=AT)
    drive(home, archive)

    def die(*_: object) -> None:
        raise UnavailableError("store: away")

    options = ReplayOptions(parser=AT_OR_WHEN)
    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "_record", die)
        patch.setattr(DriverShare, "leave", lambda self, cycle: None)
        with pytest.raises(UnavailableError):
            replay(home.context, archive, options, LocalWorkers())
    home.sweep("0s")
    traces = home.prove_erased("t", ids=["e3"]).traces
    remedies = {each.do for each in traces if each.object.startswith("staging/")}
    assert remedies
    assert all("`tidelog archive dead NAME --replay` has run again" in do for do in remedies)
    assert replay(home.context, archive, options, LocalWorkers()).replayed == 1
    home.sweep("0s")
    assert not list(home.store.list("staging/"))
