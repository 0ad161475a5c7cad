"""What fails in one source partition stops that one alone; a source that is away is waited for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tests.pipeline.test_driver import Home, grow
from tests.support.archive_look import a_home
from tests.support.fake_pipelines import listed
from tests.support.waiting import until
from tidelog.archive.archive import create_archive, open_pipeline
from tidelog.archive.metrics import status_text
from tidelog.archive.status import Limits, read_status, troubles
from tidelog.connectors.source import Bounds, SourcePartition, SourceRange
from tidelog.connectors.topic.source import TopicSource
from tidelog.errors import InternalError, InvalidError, NotFoundError, UnavailableError, unexpected
from tidelog.maintenance.follower import Follower
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import BeginReason, Progress
from tidelog.pipeline import driver, failures, gaps, source_partitions
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import PipelineFailures, read_failures
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.source_partitions import read_seen
from tidelog.pipeline.tasks import LocalWorkers

POISONED = SourcePartition("t", "1")


@pytest.fixture
def home() -> Home:
    return Home()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_FOLLOW_S", 0.05)
    monkeypatch.setattr(failures, "_WAIT_MAX_S", 0.1)


@contextmanager
def following(home: Home, **how: Any) -> Iterator[list[Exception]]:
    """A driver that follows in a thread; what it raised in the end."""
    raised: list[Exception] = []
    stop = threading.Event()
    driven = home.driver(follow=True, stop=stop, policy=FilePolicy(max_age_ms=20), **how)

    def run() -> None:
        try:
            driven.run()
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def poison(home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception) -> threading.Event:
    """Lets reading one source partition fail until the event is set."""
    read, fixed = home.source.read, threading.Event()

    def poisoned(range: SourceRange) -> Any:
        if range.partition == POISONED and not fixed.is_set():
            raise error
        return read(range)

    monkeypatch.setattr(home.source, "read", poisoned)
    return fixed


def archived(home: Home, partition: str) -> int:
    return sum(1 for value in listed(home.store) if value.startswith(f"{partition}:"))


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemError("a NULL"), OSError(5, "disk")])
def test_unexpected_exception_stops_only_its_source_partition(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fixed = poison(home, monkeypatch, error)
    with following(home) as raised:
        held = home.source.events
        until(lambda: archived(home, "0") == len(held[SourcePartition("t", "0")]))
        until(lambda: archived(home, "2") == len(held[SourcePartition("t", "2")]))
        until(lambda: POISONED.text in read_failures(home.context, "inc"))
        failure = read_failures(home.context, "inc")[POISONED.text]
        assert type(error).__name__ in failure.message
        assert archived(home, "1") == 0
        grow(home, 70)
        until(lambda: "0:69" in listed(home.store))
        assert not raised
        fixed.set()
        until(lambda: "1:69" in listed(home.store))
        until(lambda: not read_failures(home.context, "inc"))
    assert not raised
    home.check()


def test_failing_source_partition_is_tried_again_after_waits_that_grow(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_WAIT_MAX_S", 15)
    poison(home, monkeypatch, RuntimeError("boom"))
    with following(home):
        until(lambda: POISONED.text in read_failures(home.context, "inc"))
        until(lambda: read_failures(home.context, "inc")[POISONED.text].attempts >= 4)
    found = read_failures(home.context, "inc")[POISONED.text]
    # At least a quarter of a second, then half a second, then one.
    assert found.at_ms - found.since_ms >= 1_700


def test_draining_run_does_the_other_source_partitions_and_then_raises(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = poison(home, monkeypatch, RuntimeError("boom"))
    # More than fits into the range of one cycle.
    grow(home, 2_500)
    with pytest.raises(InternalError, match=r"t/1`: unexpected RuntimeError at .*boom"):
        home.driver(policy=FilePolicy(max_bytes=1)).run()
    assert "0:2499" in listed(home.store)
    assert "2:2499" in listed(home.store)
    assert archived(home, "1") == 0
    fixed.set()
    home.driver().run()
    home.check()
    assert not read_failures(home.context, "inc")


@pytest.mark.parametrize("error", [ValueError("odd"), NotFoundError("t/1: is gone")])
def test_source_partition_that_cannot_be_asked_stops_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bounds = home.source.bounds

    def some(partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        if POISONED in partitions:
            raise error
        return bounds(partitions)

    monkeypatch.setattr(home.source, "bounds", some)
    with following(home) as raised:
        until(lambda: archived(home, "0") and archived(home, "2"))
        until(lambda: POISONED.text in read_failures(home.context, "inc"))
        monkeypatch.setattr(home.source, "bounds", bounds)
        until(lambda: archived(home, "1"))
    assert not raised
    home.check()


@pytest.mark.parametrize(
    "error",
    [UnavailableError("the broker is away"), NotFoundError("topic: gone"), OSError(111, "refused")],
)
def test_following_driver_outlasts_an_outage_of_its_source(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    seen: list[str] = []
    partitions = home.source.partitions

    def away() -> list[SourcePartition]:
        raise error

    with following(home, on_outage=lambda exc, wait_s: seen.append(f"{exc} {wait_s}")) as raised:
        until(lambda: Counter(listed(home.store)).total() == 3 * 51)
        monkeypatch.setattr(home.source, "partitions", away)
        grow(home, 70)
        until(lambda: len(seen) >= 3)
        assert read_failures(home.context, "inc")[""].attempts >= 3
        assert not raised
        monkeypatch.setattr(home.source, "partitions", partitions)
        until(lambda: "2:69" in listed(home.store))
        until(lambda: not read_failures(home.context, "inc"))
    assert not raised
    home.check()


def test_following_driver_waits_for_a_source_that_is_away_at_its_start(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions, back = home.source.partitions, threading.Event()

    def away() -> list[SourcePartition]:
        if not back.is_set():
            raise UnavailableError("the broker is away")
        return partitions()

    monkeypatch.setattr(home.source, "partitions", away)
    with following(home, on_outage=lambda *_: back.set()) as raised:
        until(lambda: archived(home, "2"))
    assert not raised


@pytest.mark.parametrize("error", [InvalidError("wrong password"), NotFoundError("no such topic")])
def test_lasting_refusal_at_the_start_ends_the_run_at_once(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse() -> list[SourcePartition]:
        raise error

    monkeypatch.setattr(home.source, "partitions", refuse)
    with pytest.raises(type(error)):
        home.driver(follow=True).run()


def test_stop_during_an_outage_ends_the_run_without_an_error(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> list[SourcePartition]:
        raise UnavailableError("the broker is away")

    seen = threading.Event()
    with following(home, flush_on_stop=True, on_outage=lambda *_: seen.set()) as raised:
        until(lambda: archived(home, "2"))
        monkeypatch.setattr(home.source, "partitions", away)
        assert seen.wait(60)
    assert not raised


def test_error_of_any_exception_says_where_it_came_from() -> None:
    try:
        {}["x"]
    except KeyError as exc:
        found = unexpected("source partition `t/1`", exc)
    assert isinstance(found, InternalError)
    assert "KeyError at test_failures.py:" in found.message
    kept = InvalidError("as it is")
    assert unexpected("x", kept) is kept


# A folder that vanishes, as operators see it.


def lines(folder: Path, name: str, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"{n}\n" for n in numbers))


def an_archive_of(home: Any, source: str) -> Archive:
    return create_archive(
        home.context,
        Archive(
            name="raw",
            incarnation=home.context.ids.new(),
            source=source,
            kind="backup",
            store=home.store.url,
            root="archives/raw",
            created_ms=0,
            formats={1: ArchiveFormat()},
            max_age_ms=20,
        ),
    )


def test_outage_is_shown_in_status_check_and_metrics(tmp_path: Path) -> None:
    folder, away = tmp_path / "in", tmp_path / "away"
    lines(folder, "a.log", range(5))
    with a_home(tmp_path) as home:
        archive = an_archive_of(home, f"file:{folder}")
        stop = threading.Event()
        how = DriverOptions(follow=True, policy=FilePolicy(max_age_ms=20), stop=stop)
        driven = Driver(home.context, open_pipeline(home.context, archive, LocalWorkers()), how)
        thread = threading.Thread(target=driven.run)
        thread.start()
        try:
            until(lambda: read_status(home.context, archive).partitions[0].events == 5)
            folder.rename(away)
            until(lambda: read_status(home.context, archive).failure is not None)
            status = read_status(home.context, archive)
            told = "\n".join(troubles(status, Limits()))
            assert "its driver has not reached the source" in told
            assert 'tidelog_archive_source_up{archive="raw"} 0' in status_text([status])
            assert _metric(status_text([status]), "outage_seconds") > 0
            away.rename(folder)
            lines(folder, "b.log", range(3))
            until(lambda: sum(p.events for p in read_status(home.context, archive).partitions) == 8)
            until(lambda: read_status(home.context, archive).failure is None)
            assert _metric(status_text([read_status(home.context, archive)]), "outage_seconds") == 0
        finally:
            stop.set()
            thread.join(60)


def test_failing_source_partition_is_shown_in_status_check_and_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    lines(folder, "a.log", range(5))
    with a_home(tmp_path) as home:
        archive = an_archive_of(home, f"file:{folder}")
        (folder / "b.parquet").write_bytes(b"PAR1 but no more")
        pipeline = open_pipeline(home.context, archive, LocalWorkers())
        with pytest.raises(Exception, match=r"b\.parquet"):
            Driver(home.context, pipeline, DriverOptions()).run()
        status = read_status(home.context, archive)
        by_name = {each.partition: each for each in status.partitions}
        assert by_name["in/a.log"].events == 5
        assert by_name["in/a.log"].failure is None
        failure = by_name["in/b.parquet"].failure
        assert failure is not None
        assert "b.parquet" in failure.message
        assert any("has failed for" in each for each in troubles(status, Limits()))
        assert _metric(status_text([status]), "failing_seconds", "in/b.parquet") >= 0
        assert "in/b.parquet" in status_text([status])


def test_follower_shows_an_outage_and_its_end(tmp_path: Path) -> None:
    folder, away = tmp_path / "in", tmp_path / "away"
    lines(folder, "a.log", range(5))
    with a_home(tmp_path) as home:
        an_archive_of(home, f"file:{folder}")
        stop, parts = threading.Event(), {}
        follower = Follower(
            home.context, LocalWorkers(), lambda part: parts.__setitem__(part.name, part), stop
        )
        thread = threading.Thread(target=follower.run)
        thread.start()

        def is_part(fact: Callable[[Any], object]) -> bool:
            return "archive raw" in parts and bool(fact(parts["archive raw"]))

        try:
            until(lambda: is_part(lambda part: part.events == 5))
            folder.rename(away)
            until(lambda: is_part(lambda part: part.state == "failed" and part.error))
            away.rename(folder)
            until(lambda: is_part(lambda part: part.state == "running" and not part.error))
        finally:
            stop.set()
            thread.join(60)


@pytest.mark.parametrize("name", ["\U0001f600.csv", "\uffff", "\U0010ffff"])
def test_partition_of_any_name_is_known_to_the_next_driver(name: str) -> None:
    partition = SourcePartition(name, "0")
    with tidelog.open("memory:") as home:
        PipelineFailures(home.context, "raw").add([(partition, InvalidError("broken"))])
        assert PipelineFailures(home.context, "raw").partitions() == [partition]
        source_partitions._put(home.context, "raw", {partition: "7"})
        assert read_seen(home.context, "raw") == {partition: "7"}


def _metric(text: str, name: str, partition: str = "") -> float:
    for line in text.splitlines():
        if line.startswith(f"tidelog_archive_{name}{{") and partition in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} of {partition}: not in\n{text}")


def test_follower_outlasts_a_catalog_that_is_away(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, seen = threading.Event(), threading.Event()

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if away.is_set():
                raise UnavailableError("the catalog is away")
            return call(*args, **options)

        return called

    catalog = home.context.catalog
    for name in ("get", "scan", "write"):
        monkeypatch.setattr(catalog, name, failing(getattr(catalog, name)))
    with following(home, on_outage=lambda *_: seen.set()) as raised:
        until(lambda: len(listed(home.store)) == sum(map(len, home.source.events.values())))
        away.set()
        grow(home, 80)
        assert seen.wait(60)
        away.clear()
        until(lambda: "0:79" in listed(home.store))
    assert raised == []
    home.check()


@pytest.mark.parametrize(("begins", "reason"), [("retention", "retention"), ("explicit", "seek")])
def test_gap_before_what_a_source_holds_says_why(
    home: Home, begins: BeginReason, reason: str
) -> None:
    """A backfill holds nothing before the begin of the live generation, which a person may move."""
    source = TopicSource(lambda: nullcontext(home.context), "t")
    held = Bounds("26", "30", begins=begins)
    (gap,) = gaps.lost_before(POISONED, Progress("20", 0, 1), held, source, True)
    assert (gap.start, gap.end, gap.reason, gap.offsets) == ("20", "26", reason, 6)
