"""Named pipelines: made once, found, and removed so that nothing of the old one can come back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.heartbeats import beaten_between_looks
from tests.support.named_pipelines import create_pipeline, open_named
from tidelog import Event, Home
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.pipeline_rows import list_partitions, list_pipelines
from tidelog.errors import AlreadyExistsError, FencedError, InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.model import layout
from tidelog.model.pipeline import Begin, ListedPartition
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.registry import delete_pipeline, find_pipeline
from tidelog.pipeline.share import DriverMembers
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=300)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("from", 2)
        made.create_topic("to", 2)
        yield made


def append(home: Home, first: int, end: int) -> None:
    for partition in range(2):
        events = [Event(b"%d" % n) for n in range(first, end)]
        home.append("from", events, partition=partition)


def opened(home: Home, name: str = "copy") -> Pipeline:
    return open_named(home.context, find_pipeline(home.context, name), LocalWorkers())


def drive(home: Home, name: str = "copy") -> int:
    return Driver(home.context, opened(home, name), DriverOptions()).run()


def copied(home: Home) -> int:
    return sum(len(list(home.read("to", partition))) for partition in range(2))


def test_a_pipeline_is_made_once_and_found_by_its_name(home: Home) -> None:
    made = create_pipeline(home.context, "copy", "topic:from", "topic:to?partition=same")
    assert find_pipeline(home.context, "copy") == made
    assert list(list_pipelines(home.context)) == [made]
    assert made.target == home.topic("to").incarnation
    with pytest.raises(AlreadyExistsError, match="pipeline `copy`: exists already"):
        create_pipeline(home.context, "copy", "topic:from", "topic:to")
    append(home, 0, 5)
    assert drive(home) == 10
    assert drive(home) == 0


BAD = {
    "no such source": (("copy", "topic:nope", "topic:to"), "topic `nope`: not found"),
    "no such sink": (("copy", "topic:from", "topic:nope"), "topic `nope`: not found"),
    "a name with a slash": (("a/b", "topic:from", "topic:to"), "pipeline name `a/b`"),
    "no name": (("", "topic:from", "topic:to"), "pipeline name ``"),
    "a name without end": (("x" * 251, "topic:from", "topic:to"), "give 1 to 250 letters"),
    "too few partitions": (("copy", "topic:from", "topic:thin?partition=same"), "1 partition,"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_could_never_run_is_not_made(home: Home, case: str) -> None:
    given, message = BAD[case]
    home.create_topic("thin", 1)
    with pytest.raises((InvalidError, NotFoundError), match=message):
        create_pipeline(home.context, *given)
    assert list(list_pipelines(home.context)) == []


def test_of_many_who_make_the_same_one_does(home: Home) -> None:
    made: list[str] = []
    refused: list[Exception] = []

    def make() -> None:
        try:
            made.append(create_pipeline(home.context, "copy", "topic:from", "topic:to").incarnation)
        except AlreadyExistsError as exc:
            refused.append(exc)

    makers = [threading.Thread(target=make) for _ in range(6)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert made == [find_pipeline(home.context, "copy").incarnation]
    assert len(refused) == 5


def test_a_target_that_was_made_anew_is_refused(home: Home) -> None:
    wanted = PumpOptions("topic:from", "to", "copy")
    open_pump(home.context, wanted, LocalWorkers())
    home.delete_topic("to")
    home.create_topic("to", 2)
    with pytest.raises(InvalidError, match="its topic `to` was deleted and made again"):
        open_pump(home.context, wanted, LocalWorkers())


def test_a_removed_pipeline_leaves_what_it_wrote_and_its_name_is_free(home: Home) -> None:
    made = create_pipeline(home.context, "copy", "topic:from", "topic:to")
    append(home, 0, 5)
    drive(home)
    delete_pipeline(home.context, "copy")
    assert copied(home) == 10
    with pytest.raises(NotFoundError, match="pipeline `copy`: not found"):
        find_pipeline(home.context, "copy")
    with pytest.raises(NotFoundError, match="nothing to delete"):
        delete_pipeline(home.context, "copy")
    for folder in ("staging/", "pipelines/"):
        assert list(home.store.list(folder)) == []
    where = layout.pipeline_partition(made.incarnation, "from/0")
    assert [row.row for row in home.catalog.scan(where)] == ["head"]
    create_pipeline(home.context, "copy", "topic:from", "topic:to")
    assert drive(home) == 10
    assert copied(home) == 20


def test_a_driver_that_slept_through_the_removal_writes_nothing(home: Home) -> None:
    made = create_pipeline(home.context, "copy", "topic:from", "topic:to")
    append(home, 0, 5)
    pipeline = opened(home)
    cycle = Cycle(home.context, pipeline, "one")
    partitions = pipeline.source.partitions()
    bounds = pipeline.source.bounds(partitions)
    for partition in partitions:
        cycle.claim(partition, Begin("0", "earliest"))
    cycle.run(dict.fromkeys(partitions, "3"), bounds)
    assert copied(home) == 6
    delete_pipeline(home.context, "copy")
    report = cycle.run(dict.fromkeys(partitions, "5"), bounds)
    assert all(isinstance(error, FencedError) for error in report.errors.values())
    with pytest.raises(FencedError):
        Cycle(home.context, pipeline, "later").claim(partitions[0], Begin("0", "earliest"))
    assert copied(home) == 6
    assert made.incarnation == pipeline.id


def test_a_pipeline_that_is_driven_is_not_removed(home: Home) -> None:
    made = create_pipeline(home.context, "copy", "topic:from", "topic:to")
    member, stop = DriverMembers(home.context, made.incarnation), threading.Event()
    member.join()

    def beat() -> None:
        while not stop.wait(0.05):
            member.beat()

    driver = threading.Thread(target=beat)
    driver.start()
    try:
        with (
            beaten_between_looks(member),
            pytest.raises(InvalidError, match="a driver runs it: stop that one"),
        ):
            delete_pipeline(home.context, "copy")
    finally:
        stop.set()
        driver.join()
    assert find_pipeline(home.context, "copy") == made
    home.context = replace(home.context, clock=FakeClock())  # a stall would use up its patience
    delete_pipeline(home.context, "copy")  # one that fell silent is waited for


def test_a_removal_that_dies_after_any_call_is_finished_by_the_next(home: Home) -> None:
    real = home.context = replace(
        home.context, clock=FakeClock()
    )  # who died in this process is waited for
    append(home, 0, 3)
    for call in range(1, 200):
        create_pipeline(home.context, "copy", "topic:from", "topic:to")
        assert drive(home) == 6
        faults = Faults(crash_after_call=call)
        home.context = replace(
            real,
            catalog=FaultyCatalog(real.catalog, faults, real.clock),
            store=FaultyStore(real.store, faults),
        )
        died = True
        with contextlib.suppress(Crash):
            delete_pipeline(home.context, "copy")
            died = False
        home.context = real
        with contextlib.suppress(NotFoundError):  # it died after its last write
            delete_pipeline(home.context, "copy")
        assert list(list_pipelines(home.context)) == []
        assert list(home.store.list("pipelines/")) == []
        if not died:
            break
    assert not died
    assert call > 10


def test_pipelines_that_feed_each_other_are_refused(home: Home) -> None:
    home.create_topic("third", 2)
    create_pipeline(home.context, "one", "topic:from", "topic:to")
    create_pipeline(home.context, "two", "topic:to", "topic:third")
    for source in ("to", "third"):
        with pytest.raises(InvalidError, match=r"by pipeline `.*`.*never ends"):
            create_pipeline(home.context, "back", f"topic:{source}", "topic:from")
    delete_pipeline(home.context, "two")
    create_pipeline(home.context, "back", "topic:third", "topic:from")


def test_head_that_a_stalled_driver_would_make_is_closed(home: Home) -> None:
    named = create_pipeline(home.context, "copy", "topic:from", "topic:to")
    list_partitions(home.context, named.incarnation, [ListedPartition("from/0")])
    stalled = Cycle(home.context, opened(home), "stalled")  # sleeps here
    delete_pipeline(home.context, "copy")
    with pytest.raises(FencedError):
        stalled.claim(SourcePartition("from", "0"), Begin("0", "earliest"))
