"""Whose event it is that a proof finds: by each id and key, in any column, staged, half deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.archive import create_archive
from tidelog.archive.erased_events import deleted_offsets
from tidelog.archive.generations import begin_backfill, drop_generation
from tidelog.archive.read import ArchiveFiles, ReadRequest, archived_rows
from tidelog.connectors.by_url import store_at
from tidelog.coordination.pipeline_rows import replay_pipeline
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.proof_remedies import STAGED_BEFORE
from tidelog.erasure.proof_search import prove_erased
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.store.base import object_exists
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def append(home: Home, *ids: str, key: bytes | None = None, payload: Any = None) -> None:
    """Events whose values say their id, and some fields."""
    events = [
        Event(json.dumps({"who": each, **(payload or {})}).encode(), id=each, key=key)
        for each in ids
    ]
    home.append("t", events, partition=0)


def staged_copy(home: Home, archive: Archive) -> list[str]:
    """All files of an archive, staged as one of its attempts would under its present epoch."""
    files = [info.key for info in home.store.list(f"{archive.folder()}/")]
    folder = layout.staging(archive.pipeline(), "t/0", 9, "attempt")
    targets = [f"{folder}/0/{n}" for n in range(len(files))]
    for source, target in zip(files, targets, strict=True):
        home.store.copy(source, target)
    return targets


def test_each_id_is_proved_by_itself(home: Home) -> None:
    append(home, "a", "b", "c", "d")
    home.delete("t", ["c"])
    topic = home.topic("t")
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, ids=["c"]).is_erased
    for ids in (["c", "a"], ["c", "d"], ["d"]):
        proof = home.prove_erased(topic.name, ids=ids)
        assert [trace.what for trace in proof.traces] == [
            f"holds offset {'abcd'.index(ids[-1])} of partition 0: readers still see it"
        ]
        assert not proof.known


def test_an_earlier_event_of_the_same_id_is_no_later_one(home: Home) -> None:
    append(home, "twice", "other", "twice")
    archive = an_archive(home)
    drive(home, archive)
    home.trim("t", ToOffsets({0: 1}), past_readers=True)
    home.amender("t", home.reason()).delete(["twice"])  # in the topic alone
    purge(home.context, home.topic("t"), 0)
    proof = home.prove_erased("t", ids=["twice"])
    assert [trace.what for trace in proof.traces] == ["holds 1 of them"], "the trimmed one"


def test_a_later_event_of_a_key_that_was_deleted_by_its_id_is_found(home: Home) -> None:
    topic = home.topic("t")
    append(home, "first", key=b"K")
    home.delete_key("t", b"K")
    purge(home.context, topic, 0)
    append(home, "second", "third", key=b"K")
    archive = an_archive(home)
    drive(home, archive)
    sweep_home(home.context, 0)
    assert home.prove_erased(topic.name, keys=[b"K"]).is_erased, "they came later"
    home.delete("t", ["second"])
    compile_topic(home.context, topic, CompilePolicy.everything())
    sweep_home(home.context, 0)
    proof = home.prove_erased(topic.name, keys=[b"K"])
    assert [(trace.object, trace.what) for trace in proof.traces] == [
        (next(iter(home.store.list(f"{archive.folder()}/"))).key, "holds 1 of them")
    ]
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, keys=[b"K"]).is_erased


@pytest.mark.parametrize("format", ["parquet", "orc", "avro"])
@pytest.mark.parametrize("kind", ["BIGINT", "STRING"])
def test_a_field_of_the_payload_is_not_taken_for_ours(home: Home, format: str, kind: str) -> None:
    taken: Any = 1 if kind == "BIGINT" else "other"
    append(home, "gone", "stays", payload={"id": taken, "key": taken, "offset": taken})
    schema = f"who STRING, id {kind}, key {kind}, offset {kind}"
    archive = an_archive(home, format=format, format_settings={"schema": schema})
    drive(home, archive)
    topic = home.topic("t")
    home.delete("t", ["gone"])
    files = {info.key for info in home.store.list(f"{archive.folder()}/")}
    proof = home.prove_erased(topic.name, ids=["gone"])
    assert files <= {trace.object for trace in proof.traces}
    (copy,) = staged_copy(home, archive)
    purge(home.context, topic, 0)
    proof = home.prove_erased(topic.name, ids=["gone"])
    assert [trace.object for trace in proof.traces] == [copy]
    home.store.delete([copy])
    assert home.prove_erased(topic.name, ids=["gone"]).is_erased
    assert home.prove_erased(topic.name, ids=["other"]).is_erased, "a field of the payload is no id"


def test_a_binary_key_is_found_in_lines(home: Home) -> None:
    key = b"\xff\x01"
    append(home, "gone", key=key)
    archive = an_archive(home, format="jsonlines", format_settings={"mode": "events"})
    drive(home, archive)
    (copy,) = staged_copy(home, archive)
    home.delete_key("t", key)
    purge(home.context, home.topic("t"), 0)
    proof = home.prove_erased("t", keys=[key])
    assert [(trace.object, trace.what) for trace in proof.traces] == [
        (copy, "holds 1 of them: it is staged")
    ]


@pytest.mark.parametrize("format", ["jsonlines", "delimited", "sequence"])
def test_staged_values_without_ids_count(home: Home, format: str) -> None:
    append(home, "gone", "stays")
    archive = an_archive(home, format=format)
    drive(home, archive)
    home.delete("t", ["gone"])
    purge(home.context, home.topic("t"), 0)
    assert home.prove_erased("t", ids=["gone"]).is_erased
    data, sidecar = staged_copy(home, archive)  # what is erased no longer holds it
    proof = home.prove_erased("t", ids=["gone"])
    assert [(trace.object, trace.what) for trace in proof.traces] == [
        (data, "cannot be searched, as not all of it can be decoded: it is staged")
    ]
    home.store.delete([data])
    assert home.prove_erased("t", ids=["gone"]).is_erased, sidecar


def test_what_is_staged_for_archives_of_other_topics_does_not(home: Home) -> None:
    append(home, "gone")
    home.create_topic("u", 1)
    home.append("u", [Event(b"x", id="x")])
    archive = an_archive(home, "other", "topic:u", format="sequence")
    drive(home, archive)
    staged_copy(home, archive)
    home.delete("t", ["gone"])
    purge(home.context, home.topic("t"), 0)
    assert home.prove_erased("t", ids=["gone"]).is_erased


def killed(*_: object) -> None:
    raise Crash("a delete on its way")


def test_a_delete_that_died_before_it_deleted_leaves_archives_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(home, "a", "b", "c")
    archive = an_archive(home)
    drive(home, archive)
    with monkeypatch.context() as patch:
        patch.setattr(Amender, "_put", killed)
        with pytest.raises(Crash):
            home.delete("t", ["a"])
    home.delete("t", ["b"])
    topic = home.topic("t")
    assert deleted_offsets(home.context, topic) == {0: {1}}
    ArchiveEraser(home.context).turn()
    assert held(home, archive) == [0, 2]
    purge(home.context, topic, 0)
    assert deleted_offsets(home.context, topic) == {0: {1}}, "a journal has the other one"
    assert held(home, archive) == [0, 2]
    home.delete("t", ["a"])
    ArchiveEraser(home.context).turn()
    assert held(home, archive) == [2]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_delete_that_died_after_it_deleted_reaches_archives(
    home: Home, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    append(home, "a", "b", "c")
    archive = an_archive(home)
    drive(home, archive)
    put = Amender._put

    def killed_then(*given: Any) -> None:
        put(*given)
        killed()

    with monkeypatch.context() as patch:
        patch.setattr(Amender, "_put", killed_then)
        with pytest.raises(Crash):
            home.delete("t", ["a"])
    topic = home.topic("t")
    if compiled:
        compile_topic(home.context, topic, CompilePolicy.everything())
        home.context.clock.sleep(0.01)
        sweep_home(home.context, 0)
        where = layout.topic_partition(topic.incarnation, 0)
        assert list(home.catalog.scan(where, "amend/", "amend0")) == []
    assert deleted_offsets(home.context, topic) == {0: {0}}
    purge(home.context, topic, 0)
    assert held(home, archive) == [1, 2]


def held(home: Home, archive: Archive) -> list[int]:
    rows = archived_rows(home.context, home.archives.get(archive.name).info, ReadRequest())
    return sorted(n for batch in rows for n in batch.column("offset").to_pylist())


def test_what_was_never_there_is_not_known(home: Home) -> None:
    append(home, "a", "b", key=b"K")
    topic = home.topic("t")
    for asked in ({"ids": ["unknown"]}, {"keys": [b"unknown"]}):
        proof = prove_erased(home.context, topic, **asked)  # type: ignore[arg-type]
        assert (proof.is_erased, proof.known) == (True, False)
    home.delete("t", ["a"])
    assert home.prove_erased(topic.name, ids=["a"]).known
    assert not home.prove_erased(topic.name, ids=["a", "b"]).known
    assert not home.prove_erased(topic.name, keys=[b"K"]).known
    home.delete_key("t", b"K")
    assert home.prove_erased(topic.name, ids=["b"], keys=[b"K"]).known


def without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of archives have neither ids nor keys, as a format without them would make."""
    real = ArchiveFiles.batches

    def batches(reader: ArchiveFiles, *given: Any) -> Iterator[pa.RecordBatch]:
        for batch in real(reader, *given):
            yield batch.drop_columns(["id", "key"])

    monkeypatch.setattr(ArchiveFiles, "batches", batches)


@pytest.mark.parametrize("by", ["id", "key"])
def test_files_without_ids_and_keys_are_listed_and_no_proof_is_clean(
    home: Home, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    append(home, "gone", "stays", key=b"ada")
    archive = an_archive(home)
    drive(home, archive)
    home.trim("t", ToOffsets({0: 2}))
    sweep_home(home.context, 0)
    without_ids(monkeypatch)
    files = sorted(info.key for info in home.store.list(f"{archive.folder()}/"))
    why, topic = home.reason("asked", "ada"), home.topic("t")
    if by == "id":
        deleted = delete_events(home.context, home.amender("t", why), ["gone"])
        proof = home.prove_erased(topic.name, ids=["gone"])
    else:
        deleted = delete_key(home.context, home.amender("t", why), b"ada")
        proof = home.prove_erased(topic.name, keys=[b"ada"])
    assert sorted(deleted.unseen) == files
    assert [trace.object for trace in proof.traces] == files
    assert f"has no column `{by}`" in proof.traces[0].what
    home.delete_topic("t")
    found = erase_archived(home.context, archive, why, ["gone"]) if by == "id" else None
    assert found is None or sorted(found.unseen) == files


@pytest.mark.parametrize("place", ["a string", "bytes", "JSON in a string"])
def test_columns_of_others_are_searched_whatever_they_are_called(home: Home, place: str) -> None:
    """As in the metadata of a table, whose statistics may hold an id."""
    append(home, "gone", "stays")
    archive = an_archive(home)
    drive(home, archive)
    home.delete("t", ["gone"])
    topic = home.topic("t")
    purge(home.context, topic, 0)
    held: Any = {"a string": "gone", "bytes": b'"gone"', "JSON in a string": '{"max":"gone"}'}[
        place
    ]
    key = f"{archive.root}/_delta_log/checkpoint.parquet"
    for value, is_erased in ((held, False), (type(held)(held[:0]), True)):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"add": [{"stats": [value]}]}), sink)
        home.store.put(key, sink.getvalue().to_pybytes())
        proof = home.prove_erased(topic.name, ids=["gone"])
        assert proof.is_erased == is_erased
        assert is_erased or [trace.object for trace in proof.traces] == [key]
        home.store.delete([key])


def outside(home: Home, folder: Path, name: str, source: str = "topic:t") -> Archive:
    """An archive whose folder is not in the home."""
    folder.mkdir(exist_ok=True)
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=source,
        kind="backup",
        store=folder.as_uri(),
        root=name,
        created_ms=0,
        formats={1: ArchiveFormat()},
    )
    return create_archive(home.context, wanted)


@pytest.mark.parametrize("of", ["a dropped generation", "replays"])
def test_what_is_staged_in_another_store_is_found_and_swept(
    home: Home, tmp_path: Path, of: str
) -> None:
    append(home, "gone", "stays")
    archive = outside(home, tmp_path / "out", "daily")
    drive(home, archive)
    store = store_at(home.context, archive.store)
    data = next(store.get(info.key) for info in store.list("daily/g1/"))
    pipeline = replay_pipeline(archive.pipeline())
    if of == "a dropped generation":
        begun, generation = begin_backfill(home.context, "daily", ArchiveFormat(codec="gzip"))
        pipeline = begun.pipeline(generation)
        drop_generation(home.context, "daily", generation)
    home.delete("t", ["gone"])
    topic = home.topic("t")
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, ids=["gone"]).traces == []
    late = f"{layout.staging(pipeline, 't/0', 0, 'attempt')}/0/0"  # of a driver that slept
    store.put(late, data)
    assert [trace.object for trace in home.prove_erased(topic.name, ids=["gone"]).traces] == [late]
    if of == "a dropped generation":
        purge(home.context, topic, 0)
        assert home.prove_erased(topic.name, ids=["gone"]).traces == []


@pytest.mark.parametrize("lost", ["epoch", "generation", "replay", "archive", "pipeline"])
def test_person_deletes_what_was_staged_before_the_catalog_was_restored(
    home: Home, lost: str
) -> None:
    append(home, "gone", "stays")
    archive = an_archive(home)
    drive(home, archive)
    (staged,) = staged_copy(home, archive)  # under an epoch that its head has not reached
    own = archive.pipeline()
    other = {
        "generation": archive.any_pipeline(archive.newest + 1),
        "replay": replay_pipeline(archive.any_pipeline(archive.newest + 1)),
        "archive": own.replace(archive.incarnation, "0" * 32),
        "pipeline": "1" * 32,
    }.get(lost, own)
    moved = staged.replace(own, other)
    if moved != staged:
        home.store.copy(staged, moved)
        home.store.delete([staged])
    staged = moved
    home.delete("t", ["gone"])
    purge(home.context, home.topic("t"), 0)
    assert object_exists(home.store, staged)
    (trace,) = home.prove_erased("t", ids=["gone"]).traces
    assert (trace.object, trace.do) == (staged, STAGED_BEFORE)
    home.store.delete([staged])
    assert home.prove_erased("t", ids=["gone"]).is_clean


def test_archive_in_another_store_explains_nothing_in_the_home(home: Home, tmp_path: Path) -> None:
    append(home, "gone", "stays")
    home.create_topic("u", 1)
    outside(home, tmp_path / "out", "loose", "topic:u")
    segment = next(info.key for info in home.store.list("topics/") if "/segments/" in info.key)
    home.store.copy(segment, "loose/copy")
    home.delete("t", ["gone"])
    topic = home.topic("t")
    purge(home.context, topic, 0)
    traces = home.prove_erased(topic.name, ids=["gone"]).traces
    assert [trace.object for trace in traces] == ["loose/copy"]


@pytest.mark.parametrize("name", ["user-7.parquet", "user-7/1.parquet", "of user-7.x.parquet"])
def test_source_file_that_is_named_by_a_key_is_a_trace(
    home: Home, tmp_path: Path, name: str
) -> None:
    for file in (name, "other.parquet"):
        (tmp_path / "in" / file).parent.mkdir(parents=True, exist_ok=True)
        row = {"id": [file], "key": [b"user-7" if file == name else b"other"], "value": [b"v"]}
        pq.write_table(pa.table(row), tmp_path / "in" / file)
    source = f"file:{tmp_path / 'in'}"
    archive = home.archives.create("files", source=source)
    archive.run()
    home.archives.create("chain", source="archive:files", format="orc").run()
    pump = home.pumps.create("p", source=source, topic="t")
    pump.run()
    assert home.delete_key("t", b"user-7").events == 1
    assert [t.do for t in home.purge_and_prove("t", keys=[b"user-7"]).traces] == [
        "run `tidelog pipeline delete p`; only rows keep the name then"
    ]
    pump.delete()
    proof = home.purge_and_prove("t", keys=[b"user-7"])
    assert proof.is_erased
    assert "rows of the catalog keep the names of its files" in proof.out_of_reach[0]
    traces = archive.erase(key=b"user-7", prove=True).traces
    assert {t.what for t in traces} == {"is a file of the source with one of them in its name"}
    for trace, each in zip(traces, ("files", "chain"), strict=True):
        assert f"`tidelog archive delete {each} --delete-files`" in trace.do
    for each in ("chain", "files"):
        home.archives.get(each).delete(files=True)
    home.sweep(0)
    assert [info.key for info in home.store.list("") if "user-7" in info.key] == []
