"""A proof lists every object of the home: what nothing explains, and names, are searched too."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive import generations
from tidelog.archive.archive import open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.read import ArchiveFiles
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats import open_format, settings_of
from tidelog.codec.formats.avro import AvroFormat
from tidelog.codec.parsers import FolderPaths, FolderSettings
from tidelog.connectors.archive.staging import Spool
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.erasure.proof import Trace
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.registry import delete_pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.local import LocalStore
from tidelog.testing.scheduler import Crash

USERS = ["ann", "bob/ü x", "eve"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        events = [
            Event(
                json.dumps({"at": FIRST_S, "user": user, "n": n}).encode(),
                key=user.encode(),
                id=f"id-{n}-{user}",
            )
            for n, user in enumerate(USERS * 4)
        ]
        made.append("t", events, partition=0)
        yield made


def build(home: Home, archive: Archive, parser: str = "") -> int:
    written_as = ArchiveFormat(parser=parser or archive.format_of().parser)
    built, generation = begin_backfill(home.context, archive.name, written_as)
    pipeline = open_pipeline(home.context, built, LocalWorkers(2), generation)
    Driver(home.context, pipeline, DriverOptions()).run()
    return generation


def prove(home: Home, *ids: str, keys: tuple[bytes, ...] = ()) -> list[Trace]:
    return home.prove_erased("t", ids=ids, keys=keys).traces


def test_copy_of_a_driver_into_a_dropped_generation_is_found_and_swept(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    generation = build(home, archive)
    left = {
        info.key: home.store.get(info.key)
        for prefix in ("archives/daily/g2/", f"pipelines/{archive.incarnation}.2/")
        for info in home.store.list(prefix)
    }
    assert len(left) == 2
    drop_generation(home.context, "daily", generation)
    for key, data in left.items():  # what a driver still did that had read its rows before
        home.store.put(key, data)
    late = f"staging/{archive.incarnation}.2/1/x/y/0"
    file = next(key for key in left if key.startswith("archives/"))
    home.store.put(late, left[file])
    dead = f"{archive.dead}/t/2_0_00000000000000000000.parquet"
    home.store.put(dead, left[file])
    ids = [f"id-{n}-ann" for n in range(0, 12, 3)]
    home.delete("t", ids)
    with monkeypatch.context() as patch:
        patch.setattr("tidelog.maintenance.pipeline_sweep.remove_strays", lambda *_: None)
        purge(home.context, home.topic("t"), grace_ms=0)
    found = {trace.object: trace for trace in prove(home, *ids)}
    assert {file, late, dead} <= found.keys()
    assert "tidelog sweep" in found[file].do
    sweep_archives(home.context, grace_ms=0)
    assert prove(home, *ids) == []
    for key in (*left, late, dead):
        assert list(home.store.list(key)) == [], key
    drive(home, home.archives.get("daily").info)


def test_strays_of_every_removed_generation_go(home: Home) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    build(home, archive)
    promoted = promote(home.context, "daily")
    drop_generation(home.context, "daily", 1)
    build(home, promoted)
    kept = home.archives.get("daily").info
    before = sorted(info.key for info in home.store.list(""))
    for number in (1,):
        home.store.put(f"archives/daily/g{number}/t/x.parquet", b"late")
    generations.remove_strays(home.context, kept)
    assert sorted(info.key for info in home.store.list("")) == before


@pytest.mark.parametrize("user", USERS)
def test_names_and_manifests_of_erased_events_keep_a_proof_from_being_clean(
    home: Home, user: str
) -> None:
    archive = an_archive(home, parser="split:user|json:at")
    drive(home, archive)
    home.delete_key("t", user.encode())
    purge(home.context, home.topic("t"), grace_ms=0)
    found = prove(home, keys=(user.encode(),))
    kinds = {trace.object.partition("/")[0] for trace in found}
    assert kinds == {"archives", "pipelines"}
    assert len([each for each in found if each.object.startswith("pipelines/")]) == 2
    assert all("backfill" in each.do or "sweep" in each.do for each in found)
    build(home, archive)
    promote(home.context, "daily")
    assert prove(home, keys=(user.encode(),)) != []
    drop_generation(home.context, "daily", 1)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, keys=(user.encode(),)) == []


def test_name_made_of_a_field_that_is_neither_id_nor_key_is_listed(home: Home) -> None:
    archive = an_archive(home, parser="split:n|json:at")
    drive(home, archive)
    home.delete("t", ["id-3-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    (trace,) = prove(home, "id-3-ann")
    assert "/3/" in trace.object
    assert "named by a field of the events it had" in trace.what


def test_folder_that_others_share_is_not_a_trace(home: Home) -> None:
    archive = an_archive(home, parser="split:user|json:at")
    drive(home, archive)
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "id-0-ann") == []


@pytest.mark.parametrize("word", ["daily", "t", "archives", "g1", "pipelines", "parquet", "1"])
def test_ids_that_are_words_of_our_own_names_are_proved_erased(home: Home, word: str) -> None:
    home.append("t", [Event(json.dumps({"at": FIRST_S, "user": "w"}).encode(), id=word)])
    archive = an_archive(home, parser="split:user|json:at")
    drive(home, archive)
    home.append("t", [Event(json.dumps({"at": FIRST_S, "user": "w"}).encode(), id="other")])
    drive(home, archive)
    home.delete("t", [word])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, word) == []


def test_object_that_nothing_explains_is_searched(home: Home) -> None:
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "id-0-ann") == []
    home.store.put("export/copy.json", b'{"id": "id-0-ann"}')
    home.store.put("export/id-0-ann.txt", b"x")
    home.store.put("export/of_id-0-ann_2.txt", b"x")
    found = {trace.object for trace in prove(home, "id-0-ann")}
    names = {"export/id-0-ann.txt", "export/of_id-0-ann_2.txt"}
    assert found == {"export/copy.json", *names}


QUOTE = "user/id-0-ann"
SENTENCE = f"GET /{QUOTE} was sent"
FOREIGN = {  # with the id in a longer text
    "sentence.json": json.dumps({"note": SENTENCE}).encode(),
    "lines.jsonl": json.dumps({"m": SENTENCE}).encode() + b'\n{"m": "x"}\n',
    "name.json": json.dumps({f"of {QUOTE}": 1}).encode(),
    "slash.json": b'{"id": "user\\/id-0-ann"}',
    "number.json": b'{"id": "user/\\u0069d-0-ann"}',
    "signs.json": json.dumps({"note": f"first line\n{QUOTE}"}).encode(),
    "nested.json": json.dumps({"p": json.dumps({"q": json.dumps({"id": QUOTE})})}).encode(),
    "nested.log": b"INFO " + json.dumps(json.dumps({"id": "user/\u00e4 id-0-ann"})).encode(),
    "not-a-number.json": b'{"n": NaN, "id": "user/\\u0069d-0-ann"}',
    "underscores.txt": b"a_id-0-ann_b\n",
    "address.txt": b"/user%2Fid-0-ann\n",
    "words.json.gz": gzip.compress(json.dumps({"note": SENTENCE}).encode()),
}


@pytest.mark.parametrize("folder", ["export", "archives/daily", "archives/daily/g1/t"])
def test_id_in_a_longer_text_of_a_file_of_others_is_found(home: Home, folder: str) -> None:
    drive(home, an_archive(home, parser="json:at"))
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    texts = {"note": [SENTENCE, "x"], "list": [[json.dumps({"id": SENTENCE})], []]}
    for number, (name, values) in enumerate(texts.items()):
        home.store.put(f"{folder}/{number}.parquet", a_table({name: values}))
    for name, data in FOREIGN.items():
        home.store.put(f"{folder}/{name}", data)
    found = {each.object for each in prove(home, "id-0-ann") if "holds 1 of them" in each.what}
    assert found == {f"{folder}/{name}" for name in (*FOREIGN, "0.parquet", "1.parquet")}


def test_id_is_not_found_in_other_words_of_files_of_others(home: Home) -> None:
    others = ["id-0-anna", "grid-0-ann", "re-id-0-ann", "id-0-ann-2", "www.id-0-ann"]
    home.store.put("export/words.json", json.dumps({each: [each] for each in others}).encode())
    home.store.put("export/words.txt", " ".join(others).encode())
    home.store.put("export/counts.json", b'{"n": [17, 1], "on": "2026-01-17", "of": "17 a"}')
    home.append("t", [Event(b"{}", id=each) for each in ("17", "a")])
    for each in ("id-0-ann", "17", "a"):
        home.delete("t", [each])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert [prove(home, each) for each in ("id-0-ann", "17", "a")] == [[], [], []]
    home.store.put("export/exact.json", json.dumps({"p": json.dumps({"id": "17"})}).encode())
    home.store.put("export/columns.parquet", a_table({"n": ["17"], "m": [4711]}))
    home.append("t", [Event(b"{}", id="4711")])
    home.delete("t", ["4711"])
    purge(home.context, home.topic("t"), grace_ms=0)
    found = {each.object for each in prove(home, "17")}
    assert found == {"export/exact.json", "export/columns.parquet"}
    assert [each.object for each in prove(home, "4711")] == ["export/columns.parquet"]


def test_text_with_too_many_escapes_in_each_other_cannot_be_searched(home: Home) -> None:
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    home.store.put("export/deep.txt", b"\\" * 5_000)
    (trace,) = prove(home, "id-0-ann")
    assert trace.what.startswith("cannot be searched")


def a_table(columns: dict[str, list[Any]]) -> bytes:
    written = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), written)
    return bytes(written.getvalue().to_pybytes())


def a_file(home: Home, format: str, codec: str, **settings: object) -> bytes:
    """A file that holds all events of the topic; its sidecar is lost."""
    data, sidecar = Spool(), Spool()
    form = open_format(format, codec, settings_of(settings))
    writer = form.writer(data, sidecar if form.sidecar_name("x") else None)
    (batch,) = pa.Table.from_batches(home.read_arrow("t", 0)).combine_chunks().to_batches()
    writer.write(batch.select(EVENT_SCHEMA.names).cast(EVENT_SCHEMA))
    writer.close()
    return data.take()


def test_object_that_nothing_explains_is_clean_only_if_all_of_it_is_decoded(home: Home) -> None:
    drive(home, an_archive(home, parser="json:at"))
    aside = "archives/daily/_aside/x/archives/daily/g7/t"  # of a generation that is gone
    avro = a_file(home, "avro", "zstd")
    found = {
        **{f"export/{codec}.avro": a_file(home, "avro", codec) for codec in AvroFormat.codecs},
        f"{aside}/1.avro": avro,
        "export/words.csv": b"n,id\n1,id-0-ann\n",
    }
    unread = {
        "export/cut.avro": avro[: len(avro) // 2],
        "export/values.seq": a_file(home, "sequence", "zlib"),
        f"{aside}/2.seq": a_file(home, "sequence", "none"),
        f"{aside}/3.jsonl.gz": a_file(home, "jsonlines", "gzip", mode="value"),
        "archives/daily/g1/t/late": b"a value\n",
        "export/cut.gz": gzip.compress(b"id-0-ann")[:-9],
        "export/packed": zlib.compress(b"id-0-ann"),
    }
    clean = {"export/notes.txt": b"id-0-anna\n", "export/empty": b"", "export/n.json": b"[1]"}
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "id-0-ann") == []
    for key, data in {**found, **unread, **clean}.items():
        home.store.put(key, data)
    traces = {trace.object: trace.what for trace in prove(home, "id-0-ann")}
    assert {key for key, what in traces.items() if "cannot be searched" in what} == set(unread)
    assert {key for key, what in traces.items() if "holds 1 of them" in what} == set(found)
    assert traces.keys() == found.keys() | unread.keys()


def test_generation_that_is_dropped_while_a_proof_reads_it_is_not_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    generation = build(home, archive)
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    real, drops = ArchiveFiles.batches, [lambda: drop_generation(home.context, "daily", generation)]

    def batches(
        files: ArchiveFiles, manifest: Manifest, file: FileEntry
    ) -> Iterator[pa.RecordBatch]:
        if f"/g{generation}/" in file.target and drops:
            with monkeypatch.context() as patch:  # the drop dies when the files are deleted
                patch.setattr(generations, "remove_work", dies)
                with pytest.raises(Crash):
                    drops.pop()()
        return real(files, manifest, file)

    monkeypatch.setattr(ArchiveFiles, "batches", batches)
    (trace,) = prove(home, "id-0-ann")
    assert trace.what == "was changed while it was searched"
    sweep_archives(home.context, grace_ms=0)
    assert prove(home, "id-0-ann") == []


def dies(*_: object) -> None:
    raise Crash("while it drops")


class ByUser:
    """A parser of a user's own: a folder for each user, with no time in it."""

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._prefix = argument

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        users = [json.loads(value)["user"] for value in batch.column("value").to_pylist()]
        paths = pa.array([f"{self._prefix}{user}" for user in users]).dictionary_encode()
        nulls = pa.nulls(batch.num_rows, pa.string())
        return FolderPaths(paths, nulls, pa.nulls(batch.num_rows, pa.int64()))


OWN = "tests.erasure.test_proof_everything:ByUser|user="


@pytest.mark.parametrize(
    ("parser", "later", "folder"),
    [
        ("split:at|split:user|timestamp", "", "/alone/"),
        (OWN, "", "/user=alone/"),
        ("json:nowhere", "split:user|json:at", "/alone/"),
        ("json:nowhere", OWN, "/user=alone/"),
    ],
)
def test_name_at_any_depth_and_by_any_parser_is_listed(
    home: Home, parser: str, later: str, folder: str
) -> None:
    event = json.dumps({"at": FIRST_S, "user": "alone"}).encode()
    home.append("t", [Event(event, id="one")])
    archive = an_archive(home, parser=parser)
    drive(home, archive)
    if later:
        replay(home.context, archive, ReplayOptions(parser=later), LocalWorkers())
    home.delete("t", ["one"])
    purge(home.context, home.topic("t"), grace_ms=0)
    (trace,) = prove(home, "one")
    assert folder in trace.object
    assert "named by a field of the events it had" in trace.what
    assert "backfill" in trace.do
    build(home, archive, parser="json:at")
    promote(home.context, "daily")
    drop_generation(home.context, "daily", 1)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "one") == []
    names = [info.key for info in home.store.list("") if "alone" in info.key]
    held = [info.key for info in home.store.list("") if b"alone" in home.store.get(info.key)]
    assert names + held == []


@pytest.mark.parametrize(
    ("parser", "layout"),
    [
        ("timestamp", {"granularity": "minute", "time_zone": "Asia/Kolkata"}),
        ("timestamp", {"date_format": "%Y/%m/%d"}),
        ("offset:1", {}),
    ],
)
def test_names_of_times_and_offsets_are_not_listed(
    home: Home, parser: str, layout: dict[str, str]
) -> None:
    drive(home, an_archive(home, parser=parser, layout=layout))
    home.delete("t", ["id-0-ann"])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "id-0-ann") == []


def test_replay_with_other_names_of_times_is_not_listed(home: Home) -> None:
    home.append("t", [Event(json.dumps({"at": FIRST_S}).encode(), id="one")])
    archive = an_archive(home, parser="json:nowhere")
    drive(home, archive)
    how = ReplayOptions(parser="json:at", layout={"date_format": "day-%j-of-%Y"})
    replay(home.context, archive, how, LocalWorkers())
    assert [info.key for info in home.store.list("") if "/day-" in info.key]
    home.delete("t", ["one"])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "one") == []


@pytest.mark.parametrize("word", ["daily", "t", "dead"])
def test_emptied_dead_letters_are_no_trace_of_an_id_that_names_their_archive(
    home: Home, word: str
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    home.append("t", [Event(b"no JSON", id=word)])
    drive(home, archive)
    home.delete("t", [word])
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, word) == []


def test_replay_that_died_is_finished_by_another_replay(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    home.append("t", [Event(b"no JSON", id="one")])
    drive(home, archive)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "copy", dies)
        with pytest.raises(Crash):
            replay(home.context, archive, ReplayOptions(parser="timestamp"), LocalWorkers())
    home.delete("t", ["one"])
    purge(home.context, home.topic("t"), grace_ms=0, wait_ms=0)
    (trace,) = (each for each in prove(home, "one") if "is under way" in each.what)
    assert "run `tidelog archive dead daily --replay`" in trace.do
    replay(home.context, archive, ReplayOptions(), LocalWorkers())
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home, "one") == []


def test_ended_archive_is_not_to_be_built_again(home: Home) -> None:
    archive = home.archives.create("split", source="topic:t", parser="split:user|json:at")
    archive.run()
    archive.delete()
    home.delete("t", key=b"eve")
    proof = home.purge_and_prove("t", keys=[b"eve"])
    assert not any("backfill" in each.do for each in proof.traces)
    assert any(
        "`tidelog archive restore split --to topic:NAME`" in each.do for each in proof.traces
    )
    home.create_topic("kept", 1)
    archive.restore("topic:kept")
    assert len([*home.read("kept", 0)]) == 8
    for pipeline in list_pipelines(home.context):
        delete_pipeline(home.context, pipeline.name)
    archive.delete(files=True)
    assert home.purge_and_prove("t", keys=[b"eve"]).is_clean
