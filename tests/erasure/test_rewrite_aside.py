"""Erasure reaches files that were set aside after a restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.pipeline.test_forgotten_ranges import cycle
from tests.support.archive_look import AT, a_home, an_archive
from tests.support.forgotten_ranges import forget
from tidelog import Event, Home
from tidelog.catalog.base import ABSENT, Delete, Put
from tidelog.connectors.by_url import files_at
from tidelog.connectors.source import Chunk
from tidelog.coordination.audit import id_hash, key_digest, read_audit
from tidelog.erasure.aside_files import AsideFiles
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import erase_archived
from tidelog.errors import InvalidError
from tidelog.log.ledger import ErasedIds, read_ledger
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.tasks import Task, TaskOutcome, run_task
from tidelog.testing.faults import Faults, FaultyStore
from tidelog.testing.scheduler import Crash

FORMATS: list[dict[str, Any]] = [
    {"format": "parquet"},
    {"format": "jsonlines", "format_settings": {"mode": "value"}},
    {"format": "sequence", "codec": "zlib"},
    {"format": "avro", "codec": "zstd"},
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("old", 1)
        yield made


def events(*ids: str) -> list[Event]:
    return [Event(b'{"at": %d}' % n, key=b"k-%d" % n, id=each) for n, each in enumerate(ids)]


def an_archive_with_files_aside(home: Home, **written_as: Any) -> Archive:
    archive = an_archive(home, "old", "topic:old", **written_as)
    assert cycle(home, archive, 1).errors == {}
    forget(home, archive)
    assert cycle(home, archive, 2).errors == {}
    assert len(read_aside(home.context, archive.pipeline())) == 1
    return archive


class Redating:
    """Workers whose transform gives all events another time."""

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        for task in tasks:
            reader: Any = _Redated(task.reader)
            yield run_task(replace(task, reader=reader, transform=""))


class _Redated:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.range = reader.range

    def read(self) -> Iterator[Chunk]:
        for chunk in self._reader.read():
            batch = chunk.batch
            at = batch.schema.get_field_index("timestamp")
            times = pa.array([1 << 42] * batch.num_rows).cast(batch.schema.field(at).type)
            yield replace(chunk, batch=batch.set_column(at, batch.schema.field(at), times))


def kept(home: Home, archive: Archive) -> list[str]:
    batches = AsideFiles(files_at(home.context, archive), archive).batches()
    return [each for _, batch in batches for each in batch.column("id").to_pylist()]


@contextmanager
def restored_topic(home: Home) -> Iterator[None]:
    """After this the topic is what it was before, as if catalog and segments were restored."""
    where = layout.topic_partition(home.topic("old").incarnation, 0)
    before = list(home.catalog.scan(where))
    objects = {info.key for info in home.store.list("topics/")}
    yield
    new = {info.key for info in home.store.list("topics/")} - objects
    home.store.delete(sorted(new))
    for row in list(home.catalog.scan(where)):
        home.catalog.write(where, Delete(row.row), write_id=home.context.ids.new())
    for row in before:
        put = Put(row.row, row.value, expect=ABSENT)
        home.catalog.write(where, put, write_id=home.context.ids.new())


def erase(home: Home) -> None:
    purge(home.context, home.topic("old"), 0)
    purge(home.context, home.topic("old"), 0)  # what the first one has replaced is swept


@pytest.mark.parametrize("written_as", FORMATS, ids=lambda each: str(each["format"]))
def test_deleted_event_is_erased_from_a_file_set_aside(
    home: Home, written_as: dict[str, Any]
) -> None:
    home.append("old", events("gone", "stays"))
    archive = an_archive_with_files_aside(home, **written_as)
    (record,) = read_aside(home.context, archive.pipeline())
    delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    topic = home.topic("old")
    traces = [
        each
        for each in home.prove_erased(topic.name, ids=["gone"]).traces
        if "_aside" in each.object
    ]
    assert traces
    assert all(each.what.endswith("it was set aside after a restore") for each in traces)
    erase(home)
    proof = home.prove_erased(topic.name, ids=["gone"])
    assert (proof.traces, proof.known) == ([], True)
    assert kept(home, archive) == ["stays"]
    assert {each.key for each in home.store.list(f"{archive.root}/_aside/")} == set(record.files)


def test_dead_letters_set_aside_are_erased_too(home: Home) -> None:
    home.append("old", [*events("stays"), Event(b"not JSON", id="gone"), Event(b"no", id="bad")])
    archive = an_archive_with_files_aside(home, parser=AT)
    delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    erase(home)
    assert home.prove_erased("old", ids=["gone"]).traces == []
    assert sorted(kept(home, archive)) == ["bad", "stays"]


def test_event_that_only_a_file_set_aside_holds_can_be_deleted(home: Home) -> None:
    with restored_topic(home):
        home.append("old", events("gone", "key", "stays"))
        archive = an_archive_with_files_aside(home)
    # The restored topic has other events at the same offsets.
    home.append("old", events("a", "b", "c"))
    forget(home, archive)
    cycle(home, archive, 3)
    deleted = delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    assert deleted.archived > 0
    assert deleted.missing == ()
    assert (
        delete_key(home.context, home.amender("old", home.reason("asked", "me")), b"k-1").archived
        > 0
    )
    erase(home)
    topic = home.topic("old")
    proof = home.prove_erased(topic.name, ids=["gone"])
    assert (proof.traces, proof.known) == ([], True)
    assert home.prove_erased(topic.name, keys=[b"k-1"]).traces == []
    assert [each.id for each in home.read("old")] == ["a", "c"], "b has the key too"
    assert set(kept(home, archive)) == {"stays"}
    assert all(each.state == "done" for each in read_audit(home.context, topic))
    again = delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    assert again.missing == ("gone",)


def test_archive_erase_reaches_files_set_aside(home: Home) -> None:
    home.append("old", events("gone", "stays"))
    archive = an_archive_with_files_aside(home)
    home.delete_topic("old")
    erased = erase_archived(home.context, archive, home.reason("asked", "me"), ["gone"])
    assert erased.ids == {"gone"}
    assert kept(home, archive) == ["stays"]
    assert erase_archived(home.context, archive, home.reason("asked", "me"), ["gone"]).found == 0


def test_event_with_a_once_deleted_id_and_a_later_time_stays(home: Home) -> None:
    home.append("old", [Event(b"1", id="again", timestamp=1)])
    delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["again"])
    home.append("old", [Event(b"2", id="again", timestamp=1 << 42)])
    archive = an_archive_with_files_aside(home)
    erase(home)
    assert kept(home, archive) == ["again"]


def test_proof_finds_an_erased_event_in_a_file_set_aside_later_with_another_time(
    home: Home,
) -> None:
    home.append("old", events("gone", "stays"))
    archive = an_archive(home, "old", "topic:old", transform="m:f")
    assert cycle(home, archive, 1, workers=Redating()).errors == {}
    forget(home, archive)
    home.erase("old", ids=["gone"], why="asked")
    assert cycle(home, archive, 2, workers=Redating()).errors == {}
    assert sorted(kept(home, archive)) == ["gone", "stays"]
    (trace,) = home.prove_erased("old", ids=["gone"]).traces
    assert "/_aside/" in trace.object
    assert trace.do.startswith("run `tidelog delete old")
    home.erase("old", ids=["gone"], why="asked")
    assert kept(home, archive) == ["stays"]
    assert home.prove_erased("old", ids=["gone"]).is_clean


@pytest.mark.parametrize("written_as", FORMATS, ids=lambda each: str(each["format"]))
def test_erasure_that_dies_after_any_call_is_finished_by_the_next(
    home: Home, written_as: dict[str, Any]
) -> None:
    home.append("old", events("gone", "stays"))
    archive = an_archive_with_files_aside(home, **written_as)
    delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    erased = read_ledger(home.context, home.topic("old"))
    store = files_at(home.context, archive)
    before = {each.key: store.get(each.key) for each in store.list(f"{archive.root}/_aside/")}
    call = 0
    while True:
        call += 1
        for key, data in before.items():  # as it was
            store.replace(key, data, store.head(key).etag)
        faults = Faults(crash_after_call=call)
        with suppress(Crash):
            AsideFiles(FaultyStore(store, faults), archive).erase(erased)
            break
        AsideFiles(store, archive).erase(erased)
        assert kept(home, archive) == ["stays"]
        assert {each.key for each in store.list(f"{archive.root}/_aside/")} == set(before)
    assert call > 4


def test_two_erasures_at_once_leave_a_file_that_fits_its_sidecar(home: Home) -> None:
    home.append("old", events("one", "two", "stays"))
    archive = an_archive_with_files_aside(home, **FORMATS[1])
    store = files_at(home.context, archive)
    other = AsideFiles(store, archive)
    both = [ErasedIds({key_digest(id_hash(each)): 1 << 60}) for each in ("one", "two")]

    class Beside(Faults):
        """Another erasure is done between two calls."""

        at = 0

        def call(self, verb: str, effect: Any, lost: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                other.erase(both[1])
            return effect()

    before = {each.key: store.get(each.key) for each in store.list(f"{archive.root}/_aside/")}
    for at in range(1, 30):
        for key, data in before.items():
            store.replace(key, data, store.head(key).etag)
        faults = Beside()
        faults.at = at
        AsideFiles(FaultyStore(store, faults), archive).erase(both[0])
        other.erase(both[1])
        assert kept(home, archive) == ["stays"]
        assert {each.key for each in store.list(f"{archive.root}/_aside/")} == set(before)


def test_trimmed_topic_with_files_aside(home: Home) -> None:
    home.append("old", events("gone", "stays"))
    archive = an_archive_with_files_aside(home)
    home.trim("old", ToOffsets({0: 2}))
    delete_events(home.context, home.amender("old", home.reason("asked", "me")), ["gone"])
    erase(home)
    assert home.prove_erased("old", ids=["gone"]).traces == []
    assert kept(home, archive) == ["stays"]


def test_delete_leaves_files_set_aside_of_a_topic_that_had_the_same_name(home: Home) -> None:
    home.append("old", events("same", "stays"))
    archive = an_archive_with_files_aside(home)
    home.delete_topic("old", past_readers=True)
    home.create_topic("old", 1)
    home.append("old", [Event(b"another", id="same", key=b"k-0"), Event(b"b", id="b")])
    reason = home.reason("asked", "me")
    deleted = delete_events(home.context, home.amender("old", reason), ["same"])
    assert (deleted.events, deleted.archived) == (1, 0), "the other topic's event is another one"
    assert delete_events(home.context, home.amender("old", reason), ["stays"]).missing == ("stays",)
    erase(home)
    assert kept(home, archive) == ["same", "stays"]
    topic = home.topic("old")
    assert home.prove_erased(topic.name, ids=["same"]).traces == []
    assert home.prove_erased(topic.name, keys=[b"k-0"]).traces == []
    erased = erase_archived(home.context, archive, reason, ["same"])
    assert "same" in erased.ids
    assert kept(home, archive) == ["stays"], "`archive erase` reaches it"


def test_archive_erase_leaves_files_set_aside_of_a_topic_that_is_there(home: Home) -> None:
    home.append("old", events("same", "stays"))
    archive = an_archive_with_files_aside(home)
    with pytest.raises(InvalidError, match="its topic `old` exists: run `tidelog delete"):
        erase_archived(home.context, archive, home.reason("asked", "me"), ["same"])
    assert kept(home, archive) == ["same", "stays"]
    home.append("old", events("only"))
    with restored_topic(home):
        home.append("old", events("ahead"))
        cycle(home, archive, 3)
        forget(home, archive)
    cycle(home, archive, 4)
    with pytest.raises(InvalidError, match="its topic `old` exists: run `tidelog delete"):
        erase_archived(home.context, archive, home.reason("asked", "me"), ["ahead"])
    assert "ahead" in kept(home, archive)


@pytest.mark.parametrize("format", ["parquet", "sequence"])
def test_names_of_files_set_aside_have_no_part_of_an_event(home: Home, format: str) -> None:
    gone = Event(b'{"at": 1794700800, "user": "ann"}', id="gone", key=b"ann")
    stays = Event(b'{"at": 1794700800, "user": "bob"}', id="stays", key=b"bob")
    home.append("old", [gone, stays])
    archive = an_archive_with_files_aside(home, parser="split:user|json:at", format=format)
    (record,) = read_aside(home.context, archive.pipeline())
    moved = {each.key for each in home.store.list(f"{archive.root}/_aside/")}
    assert set(record.files) == moved
    assert all("/g1/old/dt=2026-11-15/" in each for each in moved)
    assert not any("ann" in each or "bob" in each for each in moved)
    delete_key(home.context, home.amender("old", home.reason("asked", "me")), b"ann")
    erase(home)
    assert kept(home, archive) == ["stays"]
