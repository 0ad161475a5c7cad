"""Looking into archives: where an event is, what files hold, and whether all is as it should be."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.servers.kafka import Kafka
from tests.servers.s3 import S3
from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.read import ReadRequest, archived_rows, file_rows, find_event
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions, ArchiveVerifyReport
from tidelog.catalog.base import Delete, Put
from tidelog.codec.event_json import row_lines
from tidelog.connectors.sink import Sink
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.pipeline_rows import read_progress, replay_pipeline
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout
from tidelog.model.archive import Archive, DateFolder, encode_success
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Begin, Commit, FileEntry, Intent, Manifest, read_manifest
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

FORMATS: dict[str, dict[str, object]] = {
    "parquet": {},
    "orc": {},
    "avro": {},
    "jsonlines": {},
    "events": {"format": "jsonlines", "format_settings": {"mode": "events"}},
    "delimited": {"codec": "none"},
    "sequence": {"format_settings": {"key": "msgpack"}},
}
SCHEMA = {"format_settings": {"schema": "n BIGINT, at BIGINT", "keep_value": False}}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        yield made


def printed(batches: Iterator[object]) -> list[dict[str, object]]:
    return [json.loads(line) for b in batches for line in row_lines(b).splitlines()]  # type: ignore[arg-type]


def files_of(home: Home, archive: Archive, kind: str = "data") -> list[FileEntry]:
    return [file for _, file in committed_files(home.context, archive) if file.kind == kind]


def kinds(found: ArchiveVerifyReport) -> list[str]:
    assert found.problem_count == len(found.problems)
    assert all(each.where and each.what and each.do for each in [*found.problems, *found.notes])
    return sorted({each.kind for each in found.problems})


def verified(home: Home, archive: Archive, **how: object) -> ArchiveVerifyReport:
    return verify_archive(home.context, archive, ArchiveVerifyOptions(**how))  # type: ignore[arg-type]


# Find.


def test_every_event_is_found_where_it_is(home: Home) -> None:
    for first in range(0, 90, 30):
        fill(home, range(first, first + 30))
        if not first:
            archive = an_archive(home, parser=AT)
        drive(home, archive)
    for offset in range(90):
        found = find_event(home.context, archive, "0", offset, read=True)
        is_dead = offset % 7 == 0 or offset % 3 == 0
        assert found.status == ("dead" if is_dead else "archived")
        assert found.row is not None
        assert found.row.column("offset").to_pylist() == [offset]
        assert (found.file or files_of(home, archive)[0]).first_offset <= offset
        assert ("dead letter" in found.says) == is_dead
    assert (
        find_event(home.context, archive, "t/0", 90).says == "not archived yet (committed up to 90)"
    )
    with pytest.raises(NotFoundError, match="it has t/0, t/1"):
        find_event(home.context, archive, "7", 0)
    with pytest.raises(InvalidError):
        find_event(home.context, archive, "0", -1)


def test_only_files_that_may_hold_it_are_read(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home, range(300))
    raw = an_archive(home, "raw")
    drive(home, raw, policy=FilePolicy(max_bytes=1_000))
    assert find_event(home.context, raw, "0", 150).status == "archived"
    for file in files_of(home, raw):  # a dense file holds every offset between its ends
        home.store.delete([file.target])
    assert find_event(home.context, raw, "0", 150).status == "archived"
    with pytest.raises(CorruptError, match="is not there"):
        find_event(home.context, raw, "0", 150, read=True)


def test_what_a_replay_has_archived_is_found_there(home: Home) -> None:
    fill(home, range(60))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    assert find_event(home.context, archive, "0", 9).status == "dead"
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    found = find_event(home.context, archive, "0", 9, read=True)
    assert found.status == "archived"
    assert found.row is not None
    still = find_event(home.context, archive, "0", 7, read=True)
    assert still.status == "dead"
    assert "no JSON" in still.says
    assert find_event(home.context, archive, "0", 8).status == "archived"


def edit_manifest(
    home: Home, archive: Archive, edit: Callable[[Manifest], Manifest], partition: str = "t/0"
) -> None:
    """Put an edited manifest in the place of the first one, its row following."""
    where = layout.pipeline_partition(archive.pipeline(), partition)
    (row,) = home.catalog.scan(where, "commit/", "commit0", limit=1)
    committed = decode_row(row.value, Commit, "commit")
    manifest = edit(read_manifest(home.store.get(committed.manifest), ""))
    key = f"{committed.manifest}.{home.context.ids.new()}"
    home.store.put(key, seal_json(manifest))
    edited = encode_row(msgspec.structs.replace(committed, manifest=key))
    home.catalog.write(where, Put(row.row, edited), write_id=home.context.ids.new())


def test_it_says_what_became_of_the_others(home: Home) -> None:
    fill(home, range(40))
    home.trim("t", ToOffsets({0: 10}), past_readers=True)
    archive = an_archive(home, "raw")
    drive(home, archive)
    assert find_event(home.context, archive, "0", 5).status == "before"
    fill(home, range(40, 50))
    home.trim("t", ToOffsets({0: 45}), past_readers=True)
    drive(home, archive, accept_loss=True)
    lost = find_event(home.context, archive, "0", 42)
    assert (lost.status, lost.says) == (
        "lost",
        "was lost at the source (recorded): offsets 40 to 45",
    )
    assert find_event(home.context, archive, "0", 46).status == "archived"

    def without(manifest: Manifest, dropped: int) -> Manifest:
        files = tuple(
            msgspec.structs.replace(file, first_offset=20, events=5) for file in manifest.files
        )
        return msgspec.structs.replace(manifest, files=files, dropped=dropped)

    edit_manifest(home, archive, lambda manifest: without(manifest, 0))
    assert find_event(home.context, archive, "0", 15).status == "gap"
    edit_manifest(home, archive, lambda manifest: without(manifest, 10))
    assert find_event(home.context, archive, "0", 15).says == "dropped by the transform"
    edit_manifest(home, archive, lambda m: msgspec.structs.replace(m, read=25))
    assert find_event(home.context, archive, "0", 15).status == "unclear"


# Contents.


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_every_format_come_as_the_events_they_hold(home: Home, form: str) -> None:
    home.append("t", [Event(None, b"k", "id", 5, "made", (("h", b"\xff"),))], partition=0)
    fill(home, range(1, 40))
    archive = an_archive(home, **{"format": form, **FORMATS[form]})
    drive(home, archive)
    rows = printed(archived_rows(home.context, archive, ReadRequest()))
    assert [row["offset"] for row in rows] == list(range(40))
    assert rows[0] == {
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:00.005Z",
        "id": "id",
        "key": "k",
        "value": None,
        "type": "made",
        "headers": [["h", {"base64": "/w=="}]],
    }
    (file,) = files_of(home, archive)
    root = home.store.url.removeprefix("file://")
    given = "delimited" if form == "delimited" else ""
    assert printed(file_rows(f"{root}/{file.target}", given)) == rows
    assert printed(file_rows(f"{home.store.url}/{file.target}", given)) == rows
    for name in (file.target, Path(file.target).name, f"{archive.store}/{file.target}"):
        assert printed(archived_rows(home.context, archive, ReadRequest(files=[name]))) == rows


def test_ranges_dead_letters_sidecars_and_typed_columns(home: Home) -> None:
    fill(home, range(60))
    fill(home, range(60), partition=1)
    archive = an_archive(home, parser=AT, format="jsonlines")
    drive(home, archive)
    wanted = ReadRequest(partition="t/0", start=20, end=40)
    found = printed(archived_rows(home.context, archive, wanted))
    assert sorted(r["offset"] for r in found) == [n for n in range(20, 40) if n % 7 and n % 3]  # type: ignore[type-var]
    dead = next(f for f in files_of(home, archive, "dead") if "_0_" in f.target)
    letters = printed(archived_rows(home.context, archive, ReadRequest(files=[dead.target])))
    assert {letter["error"] for letter in letters} == {"no JSON", "no field at"}
    root = home.store.url.removeprefix("file://")
    assert printed(file_rows(f"{root}/{dead.target}")) == letters
    beside = files_of(home, archive, "sidecar")[0]
    rows = printed(archived_rows(home.context, archive, ReadRequest(files=[beside.target])))
    assert "length" in rows[0]
    assert printed(file_rows(f"{root}/{beside.target}")) == rows
    for form in ("parquet", "orc", "avro"):
        typed = an_archive(home, f"typed-{form}", format=form, **SCHEMA)
        drive(home, typed)
        rows = printed(
            archived_rows(home.context, typed, ReadRequest(partition="0", start=1, end=3))
        )
        assert [(row["n"], row["offset"]) for row in rows] == [(1, 1), (2, 2)]
        assert "value" not in rows[0]
        assert rows[0]["timestamp"] == "1970-01-01T00:00:00.001Z"
        file = files_of(home, typed)[0]
        assert printed(file_rows(f"{root}/{file.target}"))[0]["n"] == 1
        assert find_event(home.context, typed, "0", 2).status == "archived"
        assert find_event(home.context, typed, "0", 14).status == "dead"
        assert kinds(verified(home, typed, deep=True)) == []


@pytest.mark.server
def test_an_archive_on_s3(tmp_path: Path, s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    for name, text in keys.items():
        monkeypatch.setenv(name, text)
    place = f"endpoint={s3_server.endpoint}&region={s3_server.region}"
    bucket = s3_server.fresh_bucket()
    settings = Settings(f"s3://{bucket}/deep?{place}", str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ=keys))[0] as home:
        home.create_topic("t", 2)
        fill(home, range(60))
        archive = an_archive(home, parser=AT, format="delimited")
        drive(home, archive)
        replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
        assert kinds(verified(home, archive, deep=True, source=True)) == []
        assert find_event(home.context, archive, "0", 9, read=True).status == "archived"
        file = files_of(home, archive)[0]
        url = f"s3://{bucket}/deep/{file.target}"
        rows = printed(archived_rows(home.context, archive, ReadRequest(files=[url])))
        assert len(rows) == file.events
        assert printed(file_rows(f"{url}?{place}", "delimited")) == rows
        home.store.delete([file.target])
        assert kinds(verified(home, archive)) == ["missing"]


@pytest.mark.server
def test_gaps_of_kafka_are_told_from_losses(home: Home, kafka_server: Kafka) -> None:
    name = f"looked-at-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, 1)
    producer = kafka_server.producer(transactional_id=name)
    producer.init_transactions()
    for first in (0, 10):
        producer.begin_transaction()
        for number in range(first, first + 10):
            producer.produce(name, b"%d" % number)
        producer.commit_transaction()  # its marker takes an offset
    kafka_server.settle(name, 1)
    source = f"kafka://{kafka_server.bootstrap}/{name}"
    archive = an_archive(home, "clicks", source=source)
    drive(home, archive)
    assert kinds(verified(home, archive, deep=True, source=True)) == []
    assert find_event(home.context, archive, "0", 9).status == "archived"
    assert find_event(home.context, archive, "0", 10).status == "gap"
    assert find_event(home.context, archive, "0", 11, read=True).status == "archived"
    edit_manifest(
        home,
        archive,
        lambda m: msgspec.structs.replace(m, read=1_000, written=1_000),
        f"{name}/0",
    )
    assert "source" in kinds(verified(home, archive, source=True))


def test_what_cannot_be_read_is_told(home: Home, tmp_path: Path) -> None:
    archive = an_archive(home)
    assert printed(archived_rows(home.context, archive, ReadRequest())) == []
    with pytest.raises(NotFoundError, match="archive manifest daily"):
        printed(archived_rows(home.context, archive, ReadRequest(files=["nope"])))
    with pytest.raises(InvalidError, match="say which"):
        ReadRequest(start=3)
    with pytest.raises(NotFoundError, match="is not there"):
        file_rows(str(tmp_path / "nope.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(CorruptError):
        printed(file_rows(str(tmp_path / "bad.parquet")))
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(CorruptError):
        printed(file_rows(str(tmp_path / "empty.parquet")))
    (tmp_path / "lonely.seq").write_bytes(b"SEQ\x06")
    with pytest.raises(CorruptError):
        printed(file_rows(str(tmp_path / "lonely.seq")))
    (tmp_path / "x.txt").write_bytes(b"text")
    with pytest.raises(InvalidError, match="sidecar"):
        printed(file_rows(str(tmp_path / "x.txt"), "delimited"))
    with pytest.raises(InvalidError, match="did you mean `parquet`"):
        file_rows(str(tmp_path / "x.txt"), "parket")


# Verify.


@pytest.mark.parametrize("form", FORMATS)
def test_a_sound_archive_has_no_problem(home: Home, form: str) -> None:
    archive = an_archive(home, parser=AT, **{"format": form, **FORMATS[form]})
    assert kinds(verified(home, archive, deep=True, source=True)) == []
    for first in (0, 100):
        fill(home, range(first, first + 100))
        fill(home, range(first, first + 100), partition=1)
        drive(home, archive)
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    done: list[int] = []
    found = verified(home, archive, deep=True, source=True, progress=done.append)
    assert kinds(found) == []
    assert found.notes == []
    late = sum(n % 3 == 0 and n % 7 > 0 for n in range(200))
    dead = sum(n % 7 == 0 for n in range(200))
    assert (found.events, found.written, found.dead) == (400, 400 - 2 * dead, 2 * dead)
    assert late
    assert sum(done) == found.bytes
    assert found.files == len(done)
    assert kinds(verified(home, archive)) == []


def damaged(home: Home, archive: Archive, kind: str = "data") -> FileEntry:
    return files_of(home, archive, kind)[0]


def _delete(home: Home, archive: Archive) -> None:
    home.store.delete([damaged(home, archive).target])


def _delete_dead(home: Home, archive: Archive) -> None:
    home.store.delete([damaged(home, archive, "dead").target])


def _shorten(home: Home, archive: Archive) -> None:
    key = damaged(home, archive).target
    data = home.store.get(key)
    home.store.delete([key])
    home.store.put(key, data[:-1])


def _flip(home: Home, archive: Archive) -> None:
    key = damaged(home, archive).target
    data = bytearray(home.store.get(key))
    data[len(data) // 2] ^= 1
    home.store.delete([key])
    home.store.put(key, bytes(data))


def _stray(home: Home, archive: Archive) -> None:
    key = damaged(home, archive).target
    home.store.put(f"{Path(key).parent}/copy-of-{Path(key).name}", home.store.get(key))


def _no_manifest(home: Home, archive: Archive) -> None:
    for info in home.store.list("pipelines/"):
        home.store.delete([info.key])


def _bad_manifest(home: Home, archive: Archive) -> None:
    (first, *_) = home.store.list("pipelines/")
    home.store.delete([first.key])
    home.store.put(first.key, b"{}")


def _no_commit(home: Home, archive: Archive) -> None:
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    (row, *_) = home.catalog.scan(where, "commit/", "commit0")
    home.catalog.write(where, Delete(row.row), write_id="gone")


def _count(home: Home, archive: Archive) -> None:
    edit_manifest(home, archive, lambda m: msgspec.structs.replace(m, written=m.written + 1))


def _range(home: Home, archive: Archive) -> None:
    def moved(file: FileEntry) -> FileEntry:
        return msgspec.structs.replace(file, last_offset=10_000)

    edit_manifest(
        home,
        archive,
        lambda m: msgspec.structs.replace(m, files=tuple(map(moved, m.files))),
    )


def _double(home: Home, archive: Archive) -> None:
    edit_manifest(home, archive, lambda m: msgspec.structs.replace(m, files=m.files + m.files[:1]))


DAMAGES = {
    "a file is gone": (_delete, False, {"missing"}),
    "dead letters are gone": (_delete_dead, False, {"missing"}),
    "a file is shorter": (_shorten, False, {"size"}),
    "a bit has flipped": (_flip, True, {"contents"}),
    "a file that no manifest names": (_stray, False, {"stray"}),
    "manifests are gone": (_no_manifest, False, {"manifest", "stray"}),
    "a manifest is damaged": (_bad_manifest, False, {"manifest", "stray"}),
    "a commit is gone": (_no_commit, False, {"rows", "stray", "manifest"}),
    "a count is wrong": (_count, False, {"counts"}),
    "offsets lie outside": (_range, False, {"range"}),
    "a file is named twice": (_double, True, {"double", "counts", "manifest", "overlap"}),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_told(home: Home, case: str) -> None:
    damage, deep, expected = DAMAGES[case]
    archive = an_archive(home, parser=AT)
    for first in (0, 50):
        fill(home, range(first, first + 50))
        drive(home, archive)
    damage(home, archive)
    found = verified(home, archive, deep=deep)
    assert found.problem_count
    assert set(kinds(found)) <= expected
    assert kinds(found)[0] in expected
    if {"manifest", "rows"} & set(kinds(found)):  # what it named is not known
        advice = {each.do for each in found.problems if each.kind == "stray"}
        assert not any("move it" in each for each in advice)


def test_the_source_is_asked(home: Home) -> None:
    fill(home, range(50))
    archive = an_archive(home)
    drive(home, archive)
    assert kinds(verified(home, archive, source=True)) == []
    edit_manifest(home, archive, lambda m: msgspec.structs.replace(m, read=49, dropped=-1))
    assert "source" in kinds(verified(home, archive, source=True))
    assert "source" not in kinds(verified(home, archive))
    home.delete_topic("t")
    home.create_topic("t", 2)
    assert "source" in kinds(verified(home, archive, source=True))


def test_what_crashes_leave_is_noted_and_no_problem(home: Home) -> None:
    fill(home, range(50))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    pipeline = archive.pipeline()
    home.store.put(f"{layout.staging_of(pipeline)}0000000001/x/y/0", b"left")
    where = layout.pipeline_partition(pipeline, "t/0")
    intent = Intent("50", "60")
    home.catalog.write(where, Put("intent", encode_row(intent)), write_id="intent")
    (folder, *_) = {str(Path(file.target).parent) for file in files_of(home, archive)}
    for name in ("_SUCCESS", "_temporary/0/part-0.parquet"):
        home.store.put(f"{folder}/{name}", b"x")
    dead = damaged(home, archive, "dead")
    data = home.store.get(dead.target)
    home.catalog.write(where, Delete("intent"), write_id="none")
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    home.catalog.write(where, Put("intent", encode_row(intent)), write_id="again")
    home.store.put(dead.target, data)  # as if the replay had died before it removed it
    found = verified(home, archive, deep=True)
    assert kinds(found) == []
    assert {note.kind for note in found.notes} == {"staging", "intent", "replaced"}
    assert read_progress(home.context, replay_pipeline(pipeline), "t/0") is not None


def final_folder(home: Home, archive: Archive) -> tuple[str, str, DateFolder]:
    """Finalizes; returns the place of a folder's row, its name, and the row itself."""
    finalize(home.context, archive, FinalizeOptions(delay_ms=0))
    where = layout.pipeline_members(archive.pipeline())
    row = next(iter(home.catalog.scan(where, "folder/", "folder0")))
    folder = decode_row(row.value, DateFolder, row.row)
    assert folder.state == "final"
    return where, row.row, folder


def test_marker_of_a_final_folder_is_held_against_its_row(home: Home) -> None:
    fill(home, range(10))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    _, _, folder = final_folder(home, archive)
    key = layout.success(f"{archive.folder()}/{folder.folder}")
    assert kinds(verified(home, archive)) == []
    said = home.store.get(key)
    assert said == encode_success(archive.name, folder)
    home.store.delete([key])
    assert kinds(verified(home, archive)) == ["marker"]
    home.store.put(key, said.replace(b'"events":', b'"events":1'))
    found = verified(home, archive)
    assert kinds(found) == ["marker"]
    assert said.decode() in found.problems[0].what


def test_row_of_a_folder_is_held_against_its_files(home: Home) -> None:
    fill(home, range(10))
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    where, row, folder = final_folder(home, archive)
    fill(home, range(10))
    drive(home, archive)  # not counted before the next finalize, which reopens the folder
    assert kinds(verified(home, archive)) == []
    finalize(home.context, archive, FinalizeOptions(delay_ms=0))
    assert kinds(verified(home, archive)) == []
    # Row and marker agree with each other, as before, but no longer with the folder.
    home.catalog.write(where, Put(row, encode_row(folder)), write_id="old")
    key = layout.success(f"{archive.folder()}/{folder.folder}")
    home.store.delete([key])
    home.store.put(key, encode_success(archive.name, folder))
    found = verified(home, archive)
    assert kinds(found) == ["folder"]
    said = f"says {folder.files} files with {folder.events} events, and manifests name"
    assert f"{said} {2 * folder.files} with {2 * folder.events}" in found.problems[0].what
    home.catalog.write(where, Delete(row), write_id="none")
    assert kinds(verified(home, archive)) == ["folder"]


class DyingSink:
    """Publishes, and is not heard of again."""

    def __init__(self, inner: Sink) -> None:
        self.writer, self.discard, self._inner = inner.writer, inner.discard, inner

    def publish(self, manifest: Manifest) -> int:
        self._inner.publish(manifest)
        raise UnavailableError("died")


def test_what_is_published_and_not_committed_yet_is_no_stray(home: Home) -> None:
    fill(home, range(50))
    archive = an_archive(home, parser=AT)
    pipeline = open_pipeline(home.context, archive, LocalWorkers())
    dying = dataclasses.replace(pipeline, sink=DyingSink(pipeline.sink))
    cycle, partition = Cycle(home.context, dying, "dying"), SourcePartition("t", "0")
    bounds = dying.source.bounds([partition])
    cycle.claim(partition, Begin("0", "earliest"))
    assert cycle.run({partition: "50"}, bounds).errors
    assert list(home.store.list(f"{archive.folder()}/"))
    found = verified(home, archive)
    assert kinds(found) == []
    assert {note.kind for note in found.notes} == {"intent", "staging"}
    waiting = find_event(home.context, archive, "0", 3)
    assert waiting.says == "not archived yet (committed up to 0); 0 to 50 is under way"
    drive(home, archive)
    assert kinds(verified(home, archive, deep=True)) == []


def test_it_is_right_while_drivers_and_replays_run(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    stop = threading.Event()

    def produce() -> None:
        number = 0
        while not stop.is_set():
            fill(home, range(number, number + 40))
            number += 40

    def archive_all() -> None:
        while not stop.is_set():
            drive(home, archive, policy=FilePolicy(max_bytes=5_000))

    def replay_all() -> None:
        while not stop.is_set():
            replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())

    threads = [threading.Thread(target=each) for each in (produce, archive_all, replay_all)]
    for thread in threads:
        thread.start()
    try:
        end_s, look = time.monotonic() + 60, 0
        while (found := verified(home, archive, deep=look % 3 == 0, source=True)).events < 3_000:
            assert [str(each) for each in found.problems] == []
            assert time.monotonic() < end_s
            look += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert look > 5
    drive(home, archive)
    assert kinds(verified(home, archive, deep=True, source=True)) == []
