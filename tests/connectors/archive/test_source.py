"""An archive as a source: all that it holds, in the order and at the positions of its source."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.support.homes import a_store
from tidelog import Event, Home
from tidelog.archive.archive import create_archive, open_pipeline, open_sink
from tidelog.catalog.base import Delete, Put
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.archive.reader import PlannedCommits, plan_commits
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import Source, SourcePartition, SourceRange
from tidelog.coordination.commits import read_commits, read_manifests
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Commit, FileEntry, Gap, Manifest, Progress
from tidelog.model.topic import encode_row
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

DAY_MS = 86_400_000
FIRST_MS = 1_794_700_800_000  # 2026-11-15
T0 = SourcePartition("t", "0")
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("parquet", "", {}),
    ("orc", "", {}),
    ("avro", "", {}),
    ("jsonlines", "", {}),
    ("jsonlines", "zstd", {"mode": "events"}),
    ("delimited", "none", {"delimiter": "|"}),
    ("sequence", "", {"key": "msgpack"}),
    ("parquet", "", {"schema": "n bigint, value string", "keep_value": True}),
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 2)
        yield made


def fill(home: Home, count: int, first: int = 0) -> None:
    """Some of everything an event may have, over three days, in runs of 50."""
    for start in range(first, first + count, 50):
        numbers = range(start, min(start + 50, first + count))
        home.append("t", list(map(an_event, numbers)), partition=0)


def an_event(n: int) -> Event:
    return Event(
        None if n % 11 == 0 else json.dumps({"n": n}).encode(),
        key=None if n % 3 else b"k%d" % n,
        id=None if n % 5 else f"id-{n}",
        timestamp=FIRST_MS + n % 3 * DAY_MS + n,
        type=None if n % 7 else "made",
        headers=() if n % 4 else (("h", b"\xff"), ("h", b"")),
    )


def an_archive(home: Home, name: str = "raw", **written_as: Any) -> Archive:
    shared = {each: written_as.pop(each) for each in ("max_bytes", "source") if each in written_as}
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=shared.pop("source", "topic:t"),
        kind="partition" if "parser" in written_as else "backup",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(**written_as)},
        **shared,
    )
    return create_archive(home.context, wanted)


def drive(home: Home, archive: Archive) -> None:
    Driver(
        home.context, open_pipeline(home.context, archive, LocalWorkers()), DriverOptions()
    ).run()


def filled(home: Home, archive: Archive, commits: int = 3, each: int = 100) -> None:
    """A commit for each time that the topic was drained."""
    for number in range(commits):
        fill(home, each, number * each)
        drive(home, archive)


def at(home: Home, url: str = "archive:raw") -> Source:
    return source_at(home.context, url)


def table_of(reader: Any, limit: str) -> pa.Table:
    chunks = list(reader.read())
    assert chunks[-1].position == limit
    assert all(chunk.batch.schema.equals(EVENT_SCHEMA) for chunk in chunks)
    table = pa.Table.from_batches([chunk.batch for chunk in chunks])
    offsets = table["offset"].to_pylist()
    assert offsets == sorted(set(offsets))
    return table


def whole(source: Source, partition: SourcePartition = T0) -> pa.Table:
    bounds = source.bounds([partition])[partition]
    plan = source.reader(SourceRange(partition, bounds.first, bounds.end))
    return table_of(pickle.loads(pickle.dumps(plan)), bounds.end)


def of_topic(home: Home, start: int = 0, end: int | None = None) -> pa.Table:
    return pa.Table.from_batches(list(home.read_arrow("t", 0, start, end)), EVENT_SCHEMA)


def ends(home: Home, archive: Archive) -> list[str]:
    return [each.end for each in read_commits(home.context, archive.pipeline(), T0.text)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: "-".join([each[0], *each[2]]))
def test_every_format_gives_back_what_was_archived(
    home: Home, variant: tuple[str, str, dict[str, Any]]
) -> None:
    form, codec, settings = variant
    archive = an_archive(home, format=form, codec=codec, format_settings=settings)
    filled(home, archive)
    source = at(home)
    assert source.partitions() == [T0, SourcePartition("t", "1")]
    bounds = source.bounds([T0])[T0]
    topic = source_at(home.context, "topic:t").bounds([T0])[T0]
    # With its incarnation, so that reading goes on from the topic.
    assert bounds == dataclasses.replace(topic, is_dense=False, may_be_behind=True)
    assert whole(source).equals(of_topic(home))


@pytest.mark.parametrize("form", ["parquet", "jsonlines"])
def test_folders_and_rolled_files_come_back_in_the_order_of_the_source(
    home: Home, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_ROWS", 7)
    codec = "none" if form == "jsonlines" else ""
    daily = an_archive(home, "daily", parser="timestamp", format=form, codec=codec, max_bytes=100)
    filled(home, daily)
    files = [
        file.target
        for manifest in read_manifests(home.context, daily.pipeline(), T0.text)
        for file in manifest.files
        if file.kind == "data"
    ]
    assert len(files) > 3 * 3 + 5
    assert len({target.split("/")[-2] for target in files}) == 3
    source = at(home, "archive:daily")
    assert whole(source).equals(of_topic(home))
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_ROWS", 10)
    monkeypatch.setattr("tidelog.connectors.merge._MERGE_BYTES", 200)
    assert whole(source).equals(of_topic(home))


def test_dead_letters_come_in_their_place(home: Home) -> None:
    archive = an_archive(home, "daily", parser="json:at")
    days = [FIRST_MS // 1000 + n % 3 * 86_400 for n in range(60)]
    good = [Event(json.dumps({"at": day}).encode(), headers=(("h", b"1"),)) for day in days]
    bad = [Event(b"no json", headers=(("h", b"\x00"),)), Event(None), Event(b"{}")]
    home.append("t", [*good[:20], bad[0], *good[20:40], bad[1], *good[40:], bad[2]], partition=0)
    drive(home, archive)
    kinds = [
        file.kind
        for manifest in read_manifests(home.context, archive.pipeline(), T0.text)
        for file in manifest.files
    ]
    assert kinds.count("dead") == 1
    assert whole(at(home, "archive:daily")).equals(of_topic(home))


def test_ranges_are_exact_on_borders_and_inside_of_commits(home: Home) -> None:
    archive = an_archive(home, parser="timestamp")
    filled(home, archive)
    assert ends(home, archive) == ["100", "200", "300"]
    source = at(home)
    for start, limit in ((0, 300), (100, 200), (50, 250), (99, 101), (299, 300), (0, 1), (7, 7)):
        reader = source.reader(SourceRange(T0, str(start), str(limit)))
        assert table_of(reader, str(limit)).equals(of_topic(home, start, limit))
    plan = source.reader(SourceRange(T0, "120", "121"))
    assert isinstance(plan, PlannedCommits)
    assert len(plan.commits) == 1
    assert source.count("0", "200") == 200
    assert source.count("50", "60") == 10


def test_a_commit_is_read_only_where_it_overlaps(home: Home) -> None:
    archive = an_archive(home, parser="offset:10")
    filled(home, archive, commits=1)
    plan: Any = at(home).reader(SourceRange(T0, "15", "31"))
    assert [file.data.first_offset for file in plan.commits[0].files] == [10, 20, 30]


def test_cuts_are_the_ends_of_commits(home: Home) -> None:
    filled(home, an_archive(home))
    source = at(home)
    for events, cut in ((1, "100"), (100, "100"), (199, "100"), (200, "200"), (10_000, "300")):
        assert source.cut("0", "300", events) == cut
    assert source.cut("100", "300", 50) == "200"
    assert source.cut("300", "300", 50) == "300"
    assert source.cut("50", "300", 20) == "70"  # from inside of a commit, any offset will do
    assert source.before("9", "10")
    assert not source.before("10", "10")


def test_what_the_archive_does_not_hold_is_told(home: Home) -> None:
    filled(home, an_archive(home), commits=1)
    source = at(home)
    fill(home, 10, 100)
    with pytest.raises(NotFoundError, match="ends at offset 100, asked was up to 110") as caught:
        source.reader(SourceRange(T0, "0", "110"))
    assert caught.value.context == {"lost_from": 0, "first": 0, "end": 100}
    with pytest.raises(InvalidError, match="runs backwards"):
        source.reader(SourceRange(T0, "3", "2"))
    with pytest.raises(InvalidError, match="runs backwards"):
        source.reader(SourceRange(T0, "100", "0"))
    for gone in (SourcePartition("t", "2"), SourcePartition("u", "0")):
        with pytest.raises(NotFoundError, match="has none of that name"):
            source.bounds([gone])
        with pytest.raises(NotFoundError, match="has none of that name"):
            source.reader(SourceRange(gone, "0", "1"))


def test_an_archive_that_began_late_or_lost_events(home: Home) -> None:
    fill(home, 50)
    home.trim("t", ToOffsets({0: 20}))
    archive = an_archive(home)
    drive(home, archive)
    source = at(home)
    assert source.bounds([T0])[T0].first == "20"
    with pytest.raises(NotFoundError, match="continue from 20") as caught:
        source.reader(SourceRange(T0, "10", "50"))
    assert caught.value.context == {"lost_from": 10, "first": 20}
    fill(home, 50, 50)
    home.trim("t", ToOffsets({0: 70}), past_readers=True)
    how = DriverOptions(accept_loss=True)
    Driver(home.context, open_pipeline(home.context, archive, LocalWorkers()), how).run()
    plan: Any = source.reader(SourceRange(T0, "20", "100"))
    assert plan.lost == (Gap("50", "70", "retention", 20),)
    assert table_of(plan, "100")["offset"].to_pylist() == [*range(20, 50), *range(70, 100)]
    assert source.count("20", "100") == 60


def test_an_empty_archive_has_nothing_until_it_has_run(home: Home) -> None:
    archive = an_archive(home)
    source = at(home)
    assert source.partitions() == []
    assert source.bounds([]) == {}
    assert read_partitions(home.context, archive.pipeline()) == ["t/0", "t/1"], (
        "create has seen them"
    )
    assert source.partitions() == []
    drive(home, archive)
    assert source.partitions() == [T0, SourcePartition("t", "1")]
    bounds = source.bounds([T0])[T0]
    assert (bounds.first, bounds.end) == ("0", "0")
    assert whole(source).num_rows == 0


def test_partitions_are_remembered_when_the_source_is_gone(home: Home) -> None:
    archive = an_archive(home)
    filled(home, archive, commits=2)
    expected = of_topic(home)
    home.delete_topic("t")
    source = at(home)
    assert source.partitions() == [T0, SourcePartition("t", "1")]
    assert whole(source).equals(expected)


def test_commits_without_events_keep_their_order(home: Home) -> None:
    """Rows of such commits are sorted as text, where 10 stands before 9."""
    archive = an_archive(home)
    drive(home, archive)
    steps = ["0", "8", "9", "10", "11", "100"]
    for start, end in pairwise(steps):
        put_commit(home, archive, Manifest(archive.pipeline(), T0.text, start, end, 0, 0, 0))
    assert ends(home, archive) == steps[1:]
    source = at(home)
    assert (source.bounds([T0])[T0].first, source.bounds([T0])[T0].end) == ("0", "100")
    assert whole(source).num_rows == 0


def put_commit(home: Home, archive: Archive, manifest: Manifest) -> None:
    """A commit as a driver would make it."""
    key = layout.manifest(archive.pipeline(), 1, manifest.partition, home.context.ids.new())
    home.store.put(key, seal_json(manifest))
    done = Commit(key, manifest.start, manifest.end, manifest.read, len(manifest.files), 0, 0)
    head = read_progress(home.context, archive.pipeline(), manifest.partition)
    assert head is not None
    moved = msgspec.structs.replace(
        head, position=manifest.end, ordinal=manifest.ordinal + manifest.read
    )
    home.catalog.write(
        layout.pipeline_partition(archive.pipeline(), manifest.partition),
        Put(layout.commit_row(manifest.ordinal, manifest.start), encode_row(done)),
        Put("head", encode_row(moved)),
        write_id=home.context.ids.new(),
    )


@pytest.mark.parametrize(
    "positions", [["start", "b", "a"], ["9" * 30, "9" * 30 + "5", "9" * 30 + "7"]]
)
def test_positions_that_are_no_offsets_are_read_by_whole_commits(
    home: Home, positions: list[str]
) -> None:
    """Words, or numbers that only look like offsets; what the archive counts is the ordinal."""
    raw, odd = an_archive(home), an_archive(home, "odd")
    drive(home, odd)
    filled(home, raw, commits=2)
    where = layout.pipeline_partition(odd.pipeline(), T0.text)
    begun = Put("head", encode_row(Progress(positions[0], 0, 1)))
    home.catalog.write(where, begun, write_id=home.context.ids.new())
    for manifest, (start, end) in zip(
        read_manifests(home.context, raw.pipeline(), T0.text), pairwise(positions), strict=True
    ):
        put_commit(home, odd, msgspec.structs.replace(manifest, start=start, end=end))
    source = at(home, "archive:odd")
    assert source.bounds([T0])[T0].end == positions[2]
    assert whole(source).equals(of_topic(home))
    first, second, third = positions
    assert source.before(first, second)
    assert source.before(second, third)
    assert not source.before(third, second)
    assert not source.before(second, second)
    assert source.cut(first, third, 5) == second
    assert source.count(first, third) == 200
    assert list(source.read(SourceRange(T0, second, third)))[-1].position == third
    for inside in (second[:-1] + "6", "x"):
        with pytest.raises(InvalidError, match="cut a range"):
            source.reader(SourceRange(T0, first, inside))
    with pytest.raises(InvalidError, match="ask the source for its bounds"):
        source.before("x", first)


def data_file(home: Home, archive: Archive, kind: str = "data") -> FileEntry:
    (manifest,) = read_manifests(home.context, archive.pipeline(), T0.text)
    return next(file for file in manifest.files if file.kind == kind)


@pytest.mark.parametrize("kind", ["data", "sidecar", "dead"])
def test_a_file_that_is_missing_or_not_as_it_was_is_named(home: Home, kind: str) -> None:
    archive = an_archive(home, format="jsonlines", parser="json:n")
    home.append("t", [Event(b'{"n": 1794700800}')] * 50 + [Event(b"dead")], partition=0)
    drive(home, archive)
    file = data_file(home, archive, kind)
    plan = at(home).reader(SourceRange(T0, "0", "51"))
    store = a_store(home.store.url)
    content = store.get(file.target)
    store.delete([file.target])
    with pytest.raises(CorruptError, match="is not there") as caught:
        list(plan.read())
    assert caught.value.context == {"file": file.target}
    harmed = bytearray(content)
    harmed[len(harmed) // 2] ^= 1
    for wrong in (bytes(harmed), content[:-1], content + b"x", b"", content * 2):
        store.put(file.target, wrong)
        with pytest.raises(CorruptError, match=f"expected {file.size} bytes") as caught:
            list(plan.read())
        assert caught.value.context == {"file": file.target}
        store.delete([file.target])
    store.put(file.target, content)
    assert table_of(plan, "51").num_rows == 51


def test_a_manifest_that_is_missing_or_does_not_name_a_sidecar_is_told(home: Home) -> None:
    archive = an_archive(home, format="delimited")
    filled(home, archive, commits=1)
    (manifest,) = read_manifests(home.context, archive.pipeline(), T0.text)
    without = tuple(file for file in manifest.files if file.kind == "data")
    with pytest.raises(CorruptError, match="its manifest does not name it"):
        plan_commits(
            SourceRange(T0, "0", "100"),
            [msgspec.structs.replace(manifest, files=without)],
            archive.format_of(),
            archive.store,
        )
    (commit,) = read_commits(home.context, archive.pipeline(), T0.text)
    a_store(home.store.url).delete([commit.manifest])
    with pytest.raises(CorruptError, match="restore it from a copy") as caught:
        pickle.loads(pickle.dumps(at(home))).reader(
            SourceRange(T0, "0", "100")
        )  # in a home of its own
    assert caught.value.context == {"manifest": commit.manifest}


def test_files_that_hold_an_offset_twice_are_told(home: Home) -> None:
    archive = an_archive(home, parser="timestamp")
    filled(home, archive, commits=1)
    (manifest,) = read_manifests(home.context, archive.pipeline(), T0.text)
    again = msgspec.structs.replace(manifest, files=manifest.files * 2)
    plan = plan_commits(SourceRange(T0, "0", "100"), [again], archive.format_of(), archive.store)
    with pytest.raises(CorruptError, match="both have offset 0"):
        list(plan.read())


def test_commits_that_do_not_follow_one_another_are_told(home: Home) -> None:
    archive = an_archive(home)
    filled(home, archive)
    where = layout.pipeline_partition(archive.pipeline(), T0.text)
    middle = Delete(layout.commit_row(100, "100"))
    home.catalog.write(where, middle, write_id=home.context.ids.new())
    with pytest.raises(CorruptError, match="end at 100 and continue at 200"):
        at(home).bounds([T0])
    last = Delete(layout.commit_row(200, "200"))
    home.catalog.write(where, last, write_id=home.context.ids.new())
    with pytest.raises(CorruptError, match="end at 100 and continue at 300"):
        at(home).bounds([T0])


def test_files_without_values_cannot_be_read_back(home: Home) -> None:
    archive = an_archive(home, format_settings={"schema": "n bigint", "keep_value": False})
    home.append("t", [Event(b'{"n": 1}')], partition=0)
    drive(home, archive)
    with pytest.raises(InvalidError, match="--drop-value"):
        list(at(home).read(SourceRange(T0, "0", "1")))


def test_unknown_archives_and_generations_are_told(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    with pytest.raises(NotFoundError, match="archive `row`: not found"):
        at(home, "archive:row").partitions()
    with pytest.raises(NotFoundError, match="has no generation 2"):
        at(home, "archive:raw?generation=2").partitions()
    assert at(home, "archive:raw?generation=1").url == "archive:raw?generation=1"
    for wrong in ("archive:", "archive://raw", "archive:a/b", "archive:raw?generation=x"):
        with pytest.raises(InvalidError):
            at(home, wrong)
    with pytest.raises(InvalidError, match="did you mean `generation`"):
        at(home, "archive:raw?generatoin=1")
    with pytest.raises(InvalidError, match="did you mean `archive`"):
        at(home, "archiv:raw")
    where = layout.pipeline_partition(archive.pipeline(), T0.text)
    retired = Put("head", encode_row(Progress("0", 0, 1, closed=True)))
    home.catalog.write(where, retired, write_id=home.context.ids.new())
    with pytest.raises(NotFoundError, match="is retired"):
        at(home, "archive:raw?generation=1").partitions()


def test_a_source_pickles_and_a_plan_needs_no_catalog(home: Home, tmp_path: Path) -> None:
    filled(home, an_archive(home))
    there = pickle.loads(pickle.dumps(at(home)))
    assert there.url == "archive:raw"
    assert whole(there).equals(of_topic(home))
    data = pickle.dumps(at(home).reader(SourceRange(T0, "50", "250")))
    expected = of_topic(home, 50, 250)
    home.close()
    (tmp_path / "c.sqlite").rename(tmp_path / "elsewhere")
    assert table_of(pickle.loads(data), "250").equals(expected)


def test_a_backfill_goes_on_from_the_live_source(home: Home) -> None:
    raw = an_archive(home)
    filled(home, raw)
    daily = an_archive(home, "daily", parser="timestamp")
    backfill = Pipeline(
        "daily", daily.pipeline(), at(home, "archive:raw"), open_sink(daily), LocalWorkers()
    )
    assert Driver(home.context, backfill, DriverOptions()).run() == 300
    head = read_progress(home.context, daily.pipeline(), T0.text)
    assert head == msgspec.structs.replace(
        read_progress(home.context, raw.pipeline(), T0.text) or Progress("", 0, 0),
        epoch=head.epoch if head else 0,
        totals=head.totals if head else Progress("", 0, 0).totals,
        looked=head.looked if head else 0,
        begin=head.begin if head else None,
    )
    fill(home, 100, 300)
    drive(home, daily)
    assert ends(home, daily) == ["300", "400"]
    assert whole(at(home, "archive:daily")).equals(of_topic(home))
    home.delete_topic("t", past_readers=True)
    home.create_topic("t", 2)
    fill(home, 500)
    with pytest.raises(LostError, match="was deleted and made again"):
        drive(home, daily)
