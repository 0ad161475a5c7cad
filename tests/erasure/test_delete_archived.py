"""Erasing what archives still hold and their topic does not: trimmed, or the topic is gone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tests.support.compiled_journals import Death
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.read import ReadRequest, archived_rows
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.catalog.base import Change
from tidelog.clock import Clock
from tidelog.connectors.sink import Lot
from tidelog.connectors.source import SourcePartition
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.coordination.audit import AuditedSource, Why, id_hash, read_audit
from tidelog.erasure import delete_archived as archived
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import erase_archived
from tidelog.errors import InvalidError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.journal import amend
from tidelog.log.ledger import read_erased, was_erased
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Begin
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        for number in range(6):
            made.append("t", [_event(number)], partition=number % 2)
        yield made


def _event(number: int) -> Event:
    """Every third event has no id; each has one of two keys."""
    own = None if number % 3 == 2 else f"id-{number}"
    return Event(b"v%d" % number, b"ada" if number < 4 else b"bob", own, 1_000 + number)


def archives(home: Home) -> list[Archive]:
    made = [an_archive(home, "daily"), an_archive(home, "copy", source="archive:daily")]
    for each in made:
        drive(home, each)
    return made


def held(home: Home, archive: Archive) -> list[str]:
    batches = archived_rows(home.context, archive, ReadRequest())
    return sorted(v.decode() for batch in batches for v in batch.column("value").to_pylist())


def trim(home: Home) -> None:
    """The first two events of each partition are in archives alone."""
    home.trim("t", ToOffsets({0: 2, 1: 2}))
    left = [event.value for partition in (0, 1) for event in home.read("t", partition, 2)]
    assert sorted(map(bytes, filter(None, left))) == [b"v4", b"v5"]


WHY: dict[str, Any] = {"why": "asked for", "who": "ada"}


@pytest.mark.parametrize("by", ["id", "key"])
def test_copy_that_a_restore_brings_during_the_delete_is_deleted_too(home: Home, by: str) -> None:
    archives(home)
    home.trim("t", ToOffsets({0: 3, 1: 3}))
    catalog = home.catalog
    write = catalog.write
    restored: list[int] = []

    def restore_first(where: str, *changes: Change, write_id: str) -> None:
        if where.startswith("audit/") and not restored:
            restored.append(0)
            restored.append(
                restore(home.context, RestoreOptions("daily", "topic:t"), LocalWorkers())
            )
        write(where, *changes, write_id=write_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "write", restore_first)
        if by == "id":
            delete_events(home.context, home.amender("t", home.reason(**WHY)), ["id-0"])
        else:
            delete_key(home.context, home.amender("t", home.reason(**WHY)), b"ada")
    assert restored[-1] == 6
    found = [event for partition in (0, 1) for event in home.read("t", partition, 3)]
    assert found, "the others were restored"
    assert not any(e.id == "id-0" if by == "id" else e.key == b"ada" for e in found)


def test_trimmed_event_is_erased_from_archives_by_its_id(home: Home) -> None:
    made = archives(home)
    trim(home)
    deleted = delete_events(
        home.context, home.amender("t", home.reason(**WHY)), ["id-0", "id-4", "nowhere"]
    )
    assert (deleted.events, deleted.archived, deleted.missing) == (1, 1, ("nowhere",))
    purge(home.context, home.topic("t"), grace_ms=0)
    for archive in made:
        assert held(home, archive) == ["v1", "v2", "v3", "v5"]
    proof = home.prove_erased("t", ids=["id-0", "id-4"])
    assert proof.is_erased
    assert proof.known
    assert read_erased(home.context, home.topic("t")).has("id-0")
    (record,) = [each for each in home.audit("t") if each.archived]
    assert (record.state, record.who, len(record.events)) == ("done", "ada", 1)
    again = delete_events(home.context, home.amender("t", home.reason(**WHY)), ["id-0"])
    assert (again.events, again.archived) == (0, 0)


def test_trimmed_events_are_erased_from_archives_by_key(home: Home) -> None:
    made = archives(home)
    trim(home)
    deleted = delete_key(home.context, home.amender("t", home.reason(**WHY)), b"ada")
    assert (deleted.events, deleted.archived) == (0, 4)
    ArchiveEraser(home.context).turn()
    for archive in made:
        assert held(home, archive) == ["v4", "v5"]
    purge(home.context, home.topic("t"), grace_ms=0)
    proof = home.prove_erased("t", keys=[b"ada"])
    assert proof.is_erased
    assert proof.known


def test_erasure_that_dies_after_any_call_is_finished(home: Home) -> None:
    """By the same call, or by the scribe once the record is there."""
    home.append("t", [Event(b"x%d" % n, id=f"x{n}", timestamp=5) for n in range(120)], partition=0)
    (archive, copy) = archives(home)
    home.trim("t", ToOffsets({0: 100, 1: 2}))
    topic = home.topic("t")
    calls = ended = 0
    while not ended:
        calls += 1
        each = f"x{calls}"
        assert calls < 90, "a call takes fewer calls than that"
        with dying(home, calls) as ended_here:
            delete_events(home.context, home.amender("t", home.reason(**WHY)), [each])
            ended_here.append(True)
        ended = len(ended_here)
        recorded = any(
            event.id == id_hash(each) for record in home.audit("t") for event in record.events
        )
        if not recorded or calls % 2:
            delete_events(home.context, home.amender("t", home.reason(**WHY)), [each])
        ArchiveEraser(home.context).turn()
        assert {record.state for record in home.audit("t")} == {"done"}
        assert was_erased(home.context, topic, each)
    for made in (archive, copy):
        gone = {f"x{n}" for n in range(1, calls + 1)}
        assert not gone & set(held(home, made))
        assert len(held(home, made)) == 126 - len(gone)


def test_delete_completes_the_record_of_a_delete_that_died_meanwhile(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other delete dies after its step 2, while this one searches: no copy comes back."""
    archives(home)
    trim(home)
    home.create_topic("other")
    home.append("other", [Event(b"v0", id="id-0"), Event(b"v1", id="id-1")])
    search, died = archived.search_generation, []

    def dies(*_: Any) -> None:
        died.append(True)
        raise Crash

    def searches(*args: Any) -> Any:
        found = search(*args)
        if not died:
            with monkeypatch.context() as patched:
                patched.setattr(archived, "search_generation", search)
                patched.setattr(archived, "_enter", dies)
                with pytest.raises(Crash):
                    delete_events(
                        home.context, home.amender("t", home.reason(why="the other")), ["id-0"]
                    )
        return found

    monkeypatch.setattr(archived, "search_generation", searches)
    delete_events(home.context, home.amender("t", home.reason(**WHY)), ["id-0"])
    assert was_erased(home.context, home.topic("t"), "id-0")
    assert {record.state for record in home.audit("t")} == {"done"}
    lot = Lot(0, next(iter(home.playback_arrow("other"))))
    TopicPlaybackSink(home.context, home.topic("t"), "back", False).put(lot)
    there = [event.id for partition in (0, 1) for event in home.read("t", partition, 2)]
    assert "id-0" not in there
    assert "id-1" in there


def test_delete_ends_well_when_another_one_completes_its_record(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives(home)
    trim(home)
    enter = archived._enter

    def slow(*args: Any) -> None:
        monkeypatch.setattr(archived, "_enter", enter)
        assert (
            delete_events(
                home.context, home.amender("t", home.reason(why="the other")), ["id-0"]
            ).archived
            == 0
        )
        assert was_erased(home.context, home.topic("t"), "id-0")
        enter(*args)

    monkeypatch.setattr(archived, "_enter", slow)
    assert (
        delete_events(home.context, home.amender("t", home.reason(**WHY)), ["id-0"]).archived == 1
    )
    assert [record.state for record in home.audit("t")] == ["done"]


@contextlib.contextmanager
def dying(home: Home, calls: int) -> Iterator[list[bool]]:
    """A home whose process dies after some calls to its catalog and its store."""
    real, faults = home.context, Death(calls)
    catalog = FaultyCatalog(home.catalog, faults, real.clock)
    home.context = dataclasses.replace(real, catalog=catalog, store=FaultyStore(home.store, faults))
    ended: list[bool] = []
    try:
        with contextlib.suppress(Crash):
            yield ended
    finally:
        home.context = real


def test_archive_of_a_deleted_topic_is_erased_by_itself(home: Home) -> None:
    made = archives(home)
    why = home.reason(**WHY)
    with pytest.raises(InvalidError, match="tidelog delete t ID"):
        erase_archived(home.context, made[0], why, ["id-0"])
    incarnation = home.topic("t").incarnation
    home.delete_topic("t")
    done = erase_archived(home.context, made[0], why, ["id-0", "nowhere"])
    assert (done.events, done.ids) == (1, {"id-0"})
    assert erase_archived(home.context, made[0], why, key=b"bob").events == 2
    for archive in made:
        assert held(home, archive) == ["v1", "v2", "v3"]
    records = list(read_audit(home.context, made[0]))
    assert [record.state for record in records] == ["done", "done"]
    assert records[0].sources == (AuditedSource("t/0", incarnation),)
    assert erase_archived(home.context, made[0], why, ["id-0"]).events == 0


def test_scribe_finishes_the_erasure_of_an_archive_that_died(home: Home) -> None:
    made = archives(home)
    home.delete_topic("t")
    calls = 0
    while not any(record.state == "begun" for record in read_audit(home.context, made[0])):
        calls += 1
        with dying(home, calls):
            erase_archived(home.context, made[0], home.reason(**WHY), ["id-1"])
    ArchiveEraser(home.context).turn()
    assert [record.state for record in read_audit(home.context, made[0])] == ["done"]
    for archive in made:
        assert held(home, archive) == ["v0", "v2", "v3", "v4", "v5"]


def test_nothing_to_look_for_is_refused(home: Home) -> None:
    (archive, _) = archives(home)
    with pytest.raises(InvalidError, match="give ids, or one key"):
        erase_archived(home.context, archive, home.reason(**WHY))


@pytest.mark.parametrize("by", ["id", "key"])
def test_delete_is_refused_while_a_range_with_trimmed_events_is_under_way(
    home: Home, by: str
) -> None:
    archive = an_archive(home, "daily")
    pipeline = open_pipeline(home.context, archive, LocalWorkers())
    partition = SourcePartition("t", "0")
    stalled = Cycle(home.context, pipeline, "stalled")
    stalled.claim(partition, Begin("0", "earliest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "_publish", _die)
        with pytest.raises(Crash):
            stalled.run({partition: "3"}, pipeline.source.bounds([partition]))
    home.trim("t", ToOffsets({0: 3}), past_readers=True)

    def delete() -> int:
        amender = home.amender("t", Why("ada", "asked for"))
        if by == "id":
            return delete_events(home.context, amender, ["id-0"]).archived
        return delete_key(home.context, amender, b"ada").archived

    refused = (UnavailableError, UnknownOutcomeError)  # the topic's own part may be done
    with pytest.raises(refused, match="t/0 from 0 to 3 is being archived"):
        delete()
    drive(home, archive)
    assert delete() == {"id": 1, "key": 2}[by]


def _stalled(home: Home, archive: Archive) -> None:
    """Leaves offsets 1 and 2 of ``t/0``, which were read, in a range that is not committed."""
    pipeline = open_pipeline(home.context, archive, LocalWorkers())
    partition = SourcePartition("t", "0")
    cycle = Cycle(home.context, pipeline, "stalled")
    cycle.claim(partition, Begin("0", "earliest"))
    cycle.run({partition: "1"}, pipeline.source.bounds([partition]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "_publish", _die)
        with pytest.raises(Crash):
            cycle.run({partition: "3"}, pipeline.source.bounds([partition]))


class _Waiting:
    """A clock whose sleep is short, and may let a driver finish."""

    def __init__(self, clock: Clock, wake: Callable[[], object]) -> None:
        self._clock, self._wake, self._slept_s = clock, wake, 0.0

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s() + self._slept_s

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds
        self._wake()


def test_erasure_of_an_archive_reaches_a_range_that_is_under_way(home: Home) -> None:
    archive = an_archive(home, "daily")
    _stalled(home, archive)
    home.delete_topic("t", past_readers=True)
    waiting = _Waiting(home.context.clock, lambda: None)
    why, context = home.reason(**WHY), dataclasses.replace(home.context, clock=waiting)
    done = erase_archived(context, archive, why, key=b"ada")
    assert (done.events, done.is_clean) == (1, False)
    assert "a range of `t/0` is under way" in done.left[0]
    with pytest.raises(NotFoundError):
        drive(home, archive)  # commits what was decided; its topic is gone
    assert held(home, archive) == ["v2", "v4"]
    assert erase_archived(home.context, archive, why, key=b"ada").is_clean
    assert held(home, archive) == ["v4"]


def test_erasure_is_not_clean_while_a_copy_has_a_range_under_way(home: Home) -> None:
    archive, copy = an_archive(home, "daily"), an_archive(home, "copy", source="archive:daily")
    drive(home, archive)
    _stalled(home, copy)
    home.delete_topic("t", past_readers=True)
    why = home.reason(**WHY)
    done = erase_archived(home.context, archive, why, ids=["id-4"])
    assert (done.events, done.is_waiting, done.is_clean) == (1, True, False)
    assert "archive `copy`: a range of generation 1 is under way" in done.left[0]
    drive(home, copy)  # commits what was decided
    assert "v4" in held(home, copy)
    assert erase_archived(home.context, archive, why, ids=["id-4"]).is_waiting is False
    assert "v4" not in held(home, copy)


def test_erasure_of_an_archive_waits_for_its_driver(home: Home) -> None:
    archive = an_archive(home, "daily")
    _stalled(home, archive)
    home.delete_topic("t", past_readers=True)

    def finish() -> None:
        with contextlib.suppress(NotFoundError):
            drive(home, archive)

    waiting = _Waiting(home.context.clock, finish)
    context = dataclasses.replace(home.context, clock=waiting)
    assert erase_archived(context, archive, home.reason(**WHY), key=b"ada").is_clean
    assert held(home, archive) == ["v4"]


def _die(*_: Any) -> int:
    raise Crash


@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_what_a_killed_delete_has_hidden_leaves_archives_though_it_is_trimmed(
    home: Home, monkeypatch: pytest.MonkeyPatch, by_key: bool, compiles: bool
) -> None:
    """The delete dies before its last step; repeated, it finds nothing that is not hidden."""
    daily, _ = archives(home)
    put = amend.put_record

    def put_or_die(*given: Any) -> Any:
        if given[2].state == "done":
            raise Crash
        return put(*given)

    sought: dict[str, Any] = {"key": b"ada"} if by_key else {"ids": ["id-0", "id-1", "id-3"]}
    with monkeypatch.context() as patch:
        patch.setattr(amend, "put_record", put_or_die)
        with pytest.raises(Crash):
            home.delete("t", **sought)
    assert home.delete("t", **sought).events == (2 if by_key else 0)
    if compiles:
        home.compile("t")
    trim(home)
    home.purge("t", wait=0)
    assert not {"v0", "v1", "v3"} & set(held(home, daily))
