"""Files as a source: a backup's folder with nothing else at hand, and files of any other origin."""

from __future__ import annotations

import gzip
import os
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidelog
from tests.codec.formats.files import batch, label, opened, write
from tests.servers.s3 import S3
from tests.support.homes import a_store
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats import FormatSettings
from tidelog.codec.parsers import FolderSettings
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings
from tidelog.connectors.archive.staging import publish_files
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import Source, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers

DAY_MS = 86_400_000
FIRST_MS = 1_794_700_800_000  # 2026-11-15
CLICKS = SourcePartition("clicks", "0")
VARIANTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("parquet", "zstd", {}, ""),
    ("orc", "zlib", {}, ""),
    ("avro", "deflate", {}, ""),
    ("jsonlines", "gzip", {}, ""),
    ("jsonlines", "zstd", {}, ""),
    ("jsonlines", "none", {"mode": "events"}, ""),
    ("delimited", "gzip", {}, ""),
    ("delimited", "none", {"delimiter": "|"}, "?delimiter=%7C"),
    ("sequence", "zlib", {}, ""),
    ("sequence", "none", {"key": "msgpack"}, "?key=msgpack"),
    ("parquet", "zstd", {"schema": "offset string", "keep_value": True}, "?schema=offset%20string"),
]


def events(numbers: Sequence[int], partition: int = 0) -> pa.RecordBatch:
    return batch(
        [
            {
                "topic": "clicks",
                "partition": partition,
                "offset": n,
                "timestamp": FIRST_MS + n % 3 * DAY_MS,
                "value": None if n % 11 == 0 else b'{"n": %d}' % n,
                "key": None if n % 3 else b"\xff",
                "headers": None if n % 4 else [{"name": "h", "value": b"1"}] * 2,
            }
            for n in numbers
        ]
    )


def lay(folder: Path, batches: Sequence[pa.RecordBatch], **settings: Any) -> None:
    """The files that an archive makes of a range."""
    store = str(folder)
    partition = batches[0].column("partition")[0].as_py()
    writer = ArchiveSink(ArchiveSinkSettings(store, "raw", "dead/raw", **settings)).writer(
        f"clicks/{partition}", "staging"
    )
    for each in batches:
        writer.write(each)
    publish_files(a_store(store), writer.close().files)


def at(path: Path | str, options: str = "") -> Source:
    return open_source(f"file:{path}{options}", environ={})


def read(source: Source, start: int, limit: int, partition: SourcePartition = CLICKS) -> pa.Table:
    plan = source.reader(SourceRange(partition, str(start), str(limit)))
    chunks = list(pickle.loads(pickle.dumps(plan)).read())
    assert chunks[-1].position == str(limit)
    assert all(chunk.batch.schema.equals(EVENT_SCHEMA) for chunk in chunks)
    return pa.Table.from_batches([chunk.batch for chunk in chunks])


def bounds(source: Source, partition: SourcePartition = CLICKS) -> tuple[int, int]:
    found = source.bounds([partition])[partition]
    return int(found.first), int(found.end)


def values(source: Source, name: str, topic: str) -> list[bytes | None]:
    """All of a plain file."""
    partition = SourcePartition(topic, name)
    start, end = bounds(source, partition)
    table = read(source, start, end, partition)
    assert table["offset"].to_pylist() == list(range(end))
    assert set(table["topic"].to_pylist()) <= {topic}
    found: list[bytes | None] = table["value"].to_pylist()
    return found


# Backups.


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: label(each[:3]))
def test_a_backup_of_any_format_is_read_from_its_folder_alone(
    tmp_path: Path, variant: tuple[str, str, dict[str, Any], str]
) -> None:
    form, codec, settings, options = variant
    how = {"format": form, "codec": codec, "format_settings": FormatSettings(**settings)}
    lay(tmp_path, [events(range(5, 50))], **how)
    lay(tmp_path, [events([n for n in range(50, 120) if n % 10])], **how)
    lay(tmp_path, [events(range(7), partition=12)], **how)
    other = SourcePartition("clicks", "12")
    expected = [n for n in range(5, 120) if n < 50 or n % 10]
    if "schema" in settings:
        expected = [n for n in expected if n % 11]  # no value, no columns: those are dead letters
    for root in ("raw", "raw/g1", "raw/g1/clicks", "raw/g1/"):  # whatever somebody brings back
        source = pickle.loads(pickle.dumps(at(tmp_path / root, options)))
        assert source.partitions() == [CLICKS, other]
        assert bounds(source) == (5, 120)
        first = 1 if "schema" in settings else 0  # the event at 0 is a dead letter then
        assert bounds(source, other) == (first, 7)
        assert read(source, 5, 120).equals(pa.Table.from_batches([events(expected)]))
    for start, limit in ((5, 6), (49, 52), (60, 61), (50, 51), (7, 7), (119, 120)):
        wanted = [n for n in expected if start <= n < limit]
        assert read(source, start, limit)["offset"].to_pylist() == wanted


def test_folders_by_date_come_back_in_the_order_of_the_source(tmp_path: Path) -> None:
    how = {"parser": "timestamp", "layout": FolderSettings(), "file_bytes_max": 100}
    for first in (0, 100, 200):
        pieces = [events(range(n, n + 20)) for n in range(first, first + 100, 20)]
        lay(tmp_path, pieces, **how)
    lay(tmp_path, [events(range(300, 310))])  # and a backup's file beside them
    folders = {path.parent.name for path in (tmp_path / "raw").rglob("*.parquet")}
    assert folders == {"dt=2026-11-15", "dt=2026-11-16", "dt=2026-11-17", "clicks"}
    source = at(tmp_path / "raw/g1")
    assert bounds(source) == (0, 310)
    assert read(source, 0, 310).equals(pa.Table.from_batches([events(range(310))]))
    assert read(source, 95, 203).equals(pa.Table.from_batches([events(range(95, 203))]))
    plan: Any = source.reader(SourceRange(CLICKS, "150", "151"))
    assert all(file.first <= 150 for file in plan.files)
    assert len(plan.files) <= 3


def test_generations_are_not_mixed(tmp_path: Path) -> None:
    lay(tmp_path, [events(range(10))])
    lay(tmp_path, [events(range(10))], generation=2)
    with pytest.raises(InvalidError, match="holds generations 1 and 2"):
        at(tmp_path / "raw").partitions()
    for options, root in (("?generation=2", "raw"), ("", "raw/g2"), ("?generation=1", "raw")):
        source = at(tmp_path / root, options)
        assert bounds(source) == (0, 10)
        assert read(source, 0, 10).num_rows == 10
    assert at(tmp_path / "raw", "?generation=3").partitions() == []


def test_what_is_beside_the_data_is_none(tmp_path: Path) -> None:
    lay(tmp_path, [events(range(10))])
    root = tmp_path / "raw"
    for name in (
        "_owner",
        "g1/_SUCCESS",
        "g1/clicks/_delta_log/0.json",
        "g1/.hidden",
        ".tmp/x.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("not ours")
    assert at(root).partitions() == [CLICKS]


def a_file(folder: Path, pattern: str) -> Path:
    (found,) = (folder / "raw").rglob(pattern)
    return found


@pytest.mark.parametrize("form", ["jsonlines", "delimited", "sequence"])
def test_a_missing_sidecar_is_named(tmp_path: Path, form: str) -> None:
    lay(tmp_path, [events(range(10))], format=form)
    lay(tmp_path, [events(range(10, 20))], format=form)
    name = "_1_0_00000000000000000010*.meta.parquet"
    sidecar = a_file(tmp_path, name)
    sidecar.unlink()
    source = at(tmp_path / "raw")
    assert source.partitions() == [CLICKS]
    with pytest.raises(CorruptError, match=r"sidecar `.*: is not there") as caught:
        source.bounds([CLICKS])
    assert caught.value.context["file"].endswith(sidecar.name)
    with pytest.raises(CorruptError, match="sidecar"):
        source.reader(SourceRange(CLICKS, "0", "10"))


def test_a_file_that_is_damaged_or_misnamed_is_told(tmp_path: Path) -> None:
    lay(tmp_path, [events(range(10))])
    lay(tmp_path, [events(range(10, 20))])
    file = a_file(tmp_path, "1_0_00000000000000000000.parquet")
    source = at(tmp_path / "raw")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError, match=rf"file `.*{file.name}`: .*does not decode"):
        read(source, 0, 20)
    file.write_bytes(content)
    assert bounds(source) == (0, 20)
    assert read(source, 0, 20).num_rows == 20
    wrong = file.with_name("1_0_00000000000000000003.parquet")
    file.rename(wrong)
    with pytest.raises(CorruptError, match="holds offset 0, which is before the one in its name"):
        read(at(tmp_path / "raw"), 3, 20)
    wrong.rename(file.with_name("1_0_00000000000000000000.orc"))
    with pytest.raises(CorruptError, match=r"00000\.orc`"):
        read(at(tmp_path / "raw"), 0, 20)


@pytest.mark.parametrize("harm", ["vanish", "shrink"])
@pytest.mark.parametrize("name", ["1_0_00000000000000000000.parquet", "lines.txt"])
def test_a_file_that_vanished_or_shrank_after_it_was_seen_is_told(
    tmp_path: Path, name: str, harm: str
) -> None:
    lay(tmp_path, [events(range(10))])
    (tmp_path / "raw/lines.txt").write_bytes(b"x\n" * 10)
    partition = SourcePartition("raw", "lines.txt") if name == "lines.txt" else CLICKS
    source = at(tmp_path / "raw")
    assert bounds(source, partition) == (0, 10)
    plan = source.reader(SourceRange(partition, "5", "10"))
    file = a_file(tmp_path, name)
    if harm == "vanish":
        file.unlink()
    else:
        os.truncate(file, 10)
    says = "has vanished" if harm == "vanish" else "has shrunk"
    with pytest.raises(NotFoundError, match=says):
        list(plan.read())
    if harm == "vanish":
        with pytest.raises(NotFoundError, match="has no file of it"):
            source.bounds([partition])
    elif partition != CLICKS:
        assert bounds(source, partition) == (0, 5)
        with pytest.raises(NotFoundError, match=r"hold \[0, 5\), asked was \[3, 8\)"):
            read(source, 3, 8, partition)


# Other files.


def test_zeros_after_the_end_of_a_gzip_file_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    padded = gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(100)
    (folder / "a.txt.gz").write_bytes(padded)
    (folder / "b.txt.gz").write_bytes(padded[:-1])
    (folder / "c.txt.gz").write_bytes(padded + b"x")
    source = at(folder)
    for name in ("a.txt.gz", "b.txt.gz"):
        assert values(source, name, "in") == [b"one", b"two"]
    with pytest.raises(CorruptError, match=r"c\.txt\.gz"):
        source.bounds([SourcePartition("in", "c.txt.gz")])


@pytest.mark.parametrize(("ending", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_text_with_the_name_of_a_compressed_file_is_an_error_of_that_file(
    tmp_path: Path, ending: str, codec: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.txt").write_bytes(b"one\n")
    (folder / f"text.{ending}").write_bytes(b"two\n")
    home = tidelog.create_home(tmp_path / "home")[0]
    archive = home.archives.create("raw", source=f"file:{folder}")
    why = f"file `in/text.{ending}`: .*does not begin as {codec} does: if it is text, change its"
    with pytest.raises(CorruptError, match=why):
        archive.run()
    assert [row for each in archive.read() for row in each.column("value").to_pylist()] == [b"one"]
    failures = {each.partition: each.failure for each in archive.status().partitions}
    assert failures["in/good.txt"] is None
    assert failures[f"in/text.{ending}"] is not None


def test_lines_of_text_are_events(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    lines = [b'{"a": 1}', b"", b"\xff\x00", b"last without an end"]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (folder / "deep" / "50%.log").write_bytes(b"x\r\ny\r\n")
    (folder / "empty.json").write_bytes(b"")
    (folder / "empty.txt.gz").write_bytes(b"")
    pa.CompressedOutputStream(str(folder / "c.csv.zst"), "zstd").close()
    os.utime(folder / "a.jsonl", (1_700_000_000, 1_700_000_000))
    source = at(folder)
    assert [each.name for each in source.partitions()] == [
        "a.jsonl",
        "b.txt.gz",
        "c.csv.zst",
        "deep%2F50%25.log",
        "empty.json",
        "empty.txt.gz",
    ]
    assert {each.topic for each in source.partitions()} == {"in"}
    assert values(source, "a.jsonl", "in") == lines
    assert values(source, "b.txt.gz", "in") == [b"one", b"two"]
    assert values(source, "deep%2F50%25.log", "in") == [b"x\r", b"y\r"]
    for name in ("empty.json", "empty.txt.gz", "c.csv.zst"):
        assert values(source, name, "in") == []
    (row,) = read(source, 1, 2, SourcePartition("in", "a.jsonl")).to_pylist()
    assert (row["topic"], row["partition"], row["offset"], row["value"]) == ("in", 0, 1, b"")
    assert row["timestamp"].timestamp() == 1_700_000_000


def test_one_file_is_as_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a b.txt").write_bytes(b"1\n2\n")
    (tmp_path / "in/other.txt").write_bytes(b"3\n")
    source = at(f"{tmp_path}/in/a%20b.txt")
    assert source.partitions() == [SourcePartition("in", "a b.txt")]
    assert values(source, "a b.txt", "in") == [b"1", b"2"]
    assert open_source(source.url, environ={}).partitions() == source.partitions()
    lay(tmp_path, [events(range(10))], format="jsonlines")
    file = next((tmp_path / "raw/g1/clicks").glob("[0-9]*"))
    assert at(file).partitions() == [CLICKS]
    assert read(at(file), 0, 10).equals(pa.Table.from_batches([events(range(10))]))


def test_long_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.connectors.files.row_files._READ_BYTES", 100)
    lines = [b"x" * (n % 37) + b"%d" % n for n in range(2_000)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/long.txt").write_bytes(b"\n".join(lines) + b"\n")
    source, partition = at(tmp_path / "in"), SourcePartition("in", "long.txt")
    assert values(source, "long.txt", "in") == lines
    for start, limit in ((0, 1), (999, 1_003), (1_999, 2_000), (5, 5)):
        assert read(source, start, limit, partition)["value"].to_pylist() == lines[start:limit]
    monkeypatch.setattr("tidelog.connectors.files.row_files.EVENT_BYTES_CEILING", 30)
    source = at(tmp_path / "in")
    before = values(source, "long.txt", "in")
    assert 0 < len(before) < len(lines)
    assert before == lines[: len(before)]
    with pytest.raises(InvalidError, match="is it text"):
        read(source, 0, len(lines), partition)


def test_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.dat").write_bytes(b"one;;two\n;;three")
    os.utime(tmp_path / "in/a.dat", (1_700_000_000, 1_700_000_000))  # long finished
    options = "?format=delimited&delimiter=;;"
    assert values(at(tmp_path / "in", options), "a.dat", "in") == [b"one", b"two\n", b"three"]


def test_columns_of_parquet_are_taken_as_far_as_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.connectors.files.row_files._ROWS", 7)
    folder = tmp_path / "in"
    folder.mkdir()
    table = pa.table({"value": [f"v{n}" for n in range(50)], "id": [f"i{n}" for n in range(50)]})
    pq.write_table(table, folder / "some.parquet", row_group_size=20)
    pq.write_table(pa.Table.from_batches([events(range(100, 130))]), folder / "all.parquet")
    source = at(folder)
    assert values(source, "some.parquet", "in") == [b"v%d" % n for n in range(50)]
    rows = read(source, 33, 36, SourcePartition("in", "some.parquet")).to_pylist()
    assert [(row["offset"], row["id"]) for row in rows] == [(33, "i33"), (34, "i34"), (35, "i35")]
    rest = ["timestamp", "id", "key", "value", "type", "headers"]
    found = read(source, 0, 30, SourcePartition("in", "all.parquet"))
    assert found.select(rest).equals(pa.Table.from_batches([events(range(100, 130))]).select(rest))
    assert found["offset"].to_pylist() == list(range(30))
    pq.write_table(pa.table({"value": ["x"], "price": [1]}), folder / "other.parquet")
    with pytest.raises(InvalidError, match=r"other.parquet`: table: unknown column `price`"):
        read(source, 0, 1, SourcePartition("in", "other.parquet"))
    (folder / "rubbish.parquet").write_bytes(b"PAR1 no, it is not PAR1")
    with pytest.raises(CorruptError, match=r"rubbish\.parquet"):
        source.bounds([SourcePartition("in", "rubbish.parquet")])


@pytest.mark.parametrize(
    ("variant", "name", "options"),
    [
        (("orc", "zlib", {}), "a.orc", ""),
        (("avro", "none", {}), "a.avro", ""),
        (("jsonlines", "none", {"mode": "events"}), "a.jsonl", "?mode=events"),
        (("jsonlines", "gzip", {"mode": "events"}), "a.json.gz", "?format=jsonlines&mode=events"),
        (("parquet", "zstd", {}), "a.data", "?format=parquet"),
    ],
)
def test_whole_events_of_other_formats(
    tmp_path: Path, variant: tuple[str, str, dict[str, Any]], name: str, options: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(write(opened(variant), [events(range(40, 60))]).data)
    source, partition = at(tmp_path / "in", options), SourcePartition("in", name)
    assert bounds(source, partition) == (0, 20)
    table = read(source, 3, 17, partition)
    wanted = pa.Table.from_batches([events(range(43, 57))])
    rest = ["timestamp", "key", "value", "headers"]
    assert table.select(rest).equals(wanted.select(rest))
    assert table["offset"].to_pylist() == list(range(3, 17))


# Addresses.


def test_positions_are_whole_numbers(tmp_path: Path) -> None:
    source = at(tmp_path)
    assert source.before("9", "10")
    assert source.cut("5", "100", 10) == "15"
    assert source.cut("5", "7", 10) == "7"
    assert source.count("5", "7") == 2
    for wrong in ("", "-1", "x", "٣"):
        with pytest.raises(InvalidError, match="is not an offset"):
            source.before(wrong, "1")
    with pytest.raises(InvalidError, match="runs backwards"):
        source.reader(SourceRange(CLICKS, "2", "1"))


def test_a_place_where_nothing_is(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NotFoundError, match="no file is there"):
            at(path).partitions()
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="has no file of it"):
        at(tmp_path).reader(SourceRange(CLICKS, "0", "1"))


def test_a_relative_path_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"x\n")
    monkeypatch.chdir(tmp_path)
    source = at("in")
    assert source.url == f"file:{tmp_path}/in"
    monkeypatch.chdir("/")
    assert values(source, "a.txt", "in") == [b"x"]


@pytest.mark.server
def test_a_folder_of_a_bucket(
    tmp_path: Path, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    lay(tmp_path, [events(range(50))], format="jsonlines")
    bucket = s3_server.fresh_bucket()
    access = f"endpoint={s3_server.endpoint}&region={s3_server.region}"
    store = a_store(f"s3://{bucket}?{access}")
    for path in (tmp_path / "raw").rglob("*1_0*"):
        store.put(f"kept/{path.relative_to(tmp_path / 'raw')}", path.read_bytes())
    store.put("kept/notes.txt", b"one\ntwo")
    for place in (f"s3://{bucket}/kept", f"s3://{bucket}/kept/", f"s3://{bucket}/kept/g1"):
        source = at(place, f"?{access}&mode=value")
        assert CLICKS in source.partitions()
        assert read(source, 0, 50).equals(pa.Table.from_batches([events(range(50))]))
        assert open_source(source.url, environ={}).partitions() == source.partitions()
    whole = at(f"s3://{bucket}", f"?{access}&generation=1")
    assert SourcePartition(bucket, "kept%2Fnotes.txt") in whole.partitions()
    assert values(at(f"s3://{bucket}/kept/notes.txt", f"?{access}"), "notes.txt", "kept") == [
        b"one",
        b"two",
    ]


# In a pipeline.


def test_a_pipeline_takes_each_row_once_and_new_files_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/a.txt").write_bytes(b"".join(b"a%d\n" % n for n in range(1_000)))
    context = Context(
        a_store(str(tmp_path / "o")), MemoryCatalog(), SystemClock(), RandomIds(), random.Random(1)
    )
    sink = ArchiveSink(ArchiveSinkSettings(str(tmp_path / "o"), "archives/in", "dead/in"))
    pipeline = Pipeline("in", "inc", at(tmp_path / "in"), sink, LocalWorkers())
    assert Driver(context, pipeline, DriverOptions()).run() == 1_000
    (tmp_path / "in/b.jsonl").write_bytes(b"{}\n{}\n")
    assert Driver(context, pipeline, DriverOptions()).run() == 2
    assert Driver(context, pipeline, DriverOptions()).run() == 0
    archived = at(tmp_path / "o/archives/in")
    first, second = SourcePartition("in", "b.jsonl"), SourcePartition("in", "deep%2Fa.txt")
    assert archived.partitions() == [first, second]
    assert read(archived, 0, 1_000, second)["value"].to_pylist() == [
        b"a%d" % n for n in range(1_000)
    ]
    os.truncate(tmp_path / "in/deep/a.txt", 100)
    with pytest.raises(NotFoundError, match="has shrunk to 100 bytes, and more of it was read"):
        Driver(context, pipeline, DriverOptions()).run()
