"""Files of an archive: each event once, in bounded memory, whatever the folders are."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.codec.formats.files import batch
from tests.support.homes import a_store
from tidelog.codec.formats import FormatSettings, open_format
from tidelog.connectors.archive import dead_letters
from tidelog.connectors.archive import sink as files
from tidelog.connectors.archive import staging as uploads
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings, OpenFile
from tidelog.connectors.archive.staging import publish_files
from tidelog.connectors.sink import WriterResult
from tidelog.errors import InvalidError, UnavailableError
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock

FIRST_S = 1_794_700_800  # 2026-11-15
DAY_S = 86_400
BY_NAME = "split:name|json:at"


def event(number: int, name: str) -> dict[str, Any]:
    value = {"at": FIRST_S + number % 3 * DAY_S, "name": name, "n": number}
    return {"offset": number, "value": json.dumps(value).encode(), "timestamp": 7 + number}


def batches(names: Sequence[str], size: int = 100) -> Iterator[pa.RecordBatch]:
    """Events whose folders are those names and three dates."""
    rows = [event(number, name) for number, name in enumerate(names)]
    for first in range(0, len(rows), size):
        yield batch(rows[first : first + size])


def lay(folder: Path, rows: Iterator[pa.RecordBatch], **settings: Any) -> WriterResult:
    """What an archive makes of a range, published."""
    sink = ArchiveSink(ArchiveSinkSettings(str(folder), "a", "dead/a", **settings))
    writer = sink.writer("orders/3", "staging/p/1/x")
    for each in rows:
        writer.write(each)
    written = writer.close()
    sink.judge("orders/3", written)
    publish_files(a_store(str(folder)), written.files, at_once=4)
    return written


def numbers(folder: Path, written: WriterResult, name: str = "parquet") -> Counter[int]:
    """The events of all files, each of which holds what it says."""
    form, store = open_format(name), a_store(str(folder))
    beside = {file.target for file in written.files if file.kind == "sidecar"}
    found: Counter[int] = Counter()
    for file in written.files:
        if file.kind != "data":
            continue
        sidecar = form.sidecar_name(file.target)
        assert sidecar is None or sidecar in beside
        read = form.read(store.get(file.target), store.get(sidecar) if sidecar else None)
        table = pa.Table.from_batches(list(read))
        offsets = table["offset"].to_pylist()
        assert offsets == sorted(offsets)
        assert (offsets[0], offsets[-1]) == (file.first_offset, file.last_offset)
        assert f"_{offsets[0]:020}" in file.target
        assert file.events == len(offsets)
        times = table["timestamp"].cast(pa.int64()).to_pylist()
        assert (min(times), max(times)) == (file.first_ms, file.last_ms)
        folder = file.target.split("/")[3:-1]
        names = {json.loads(value)["name"] for value in table["value"].to_pylist()}
        assert not folder or {folder[0]} == names
        assert file.path_ms % DAY_S == 0 or file.path_ms == -1
        found.update(offsets)
    return found


@pytest.mark.parametrize("form", ["parquet", "orc", "avro", "jsonlines", "delimited", "sequence"])
@pytest.mark.parametrize("pressure", [{}, {"held_bytes_max": 4_000, "open_files_max": 3}])
def test_each_event_is_once_in_the_folder_of_its_name(
    tmp_path: Path, form: str, pressure: dict[str, int]
) -> None:
    names = [f"n{number * number % 17}" for number in range(700)]
    written = lay(tmp_path, batches(names), parser=BY_NAME, format=form, **pressure)
    assert written.events == 700
    assert numbers(tmp_path, written, form) == Counter(range(700))
    targets = [file.target for file in written.files]
    assert len(targets) == len(set(targets))
    folders = {target.rpartition("/")[0] for target in targets}
    assert len(folders) == len({(name, n % 3) for n, name in enumerate(names)})
    data = [file for file in written.files if file.kind == "data"]
    assert (len(data) > len(folders)) == bool(pressure)


def test_one_file_for_each_folder_however_many_there_are(tmp_path: Path) -> None:
    names = [f"n{number % 200}" for number in range(2_000)]
    written = lay(tmp_path, batches(names), parser=BY_NAME, open_files_max=5)
    assert len(written.files) == 600  # nothing had to be opened before the end
    assert numbers(tmp_path, written) == Counter(range(2_000))


def test_never_more_files_are_open_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    opening = OpenFile.__init__

    def opened(self: OpenFile, form: Any) -> None:
        opening(self, form)
        counts.append(len(writer._open))  # type: ignore[attr-defined]

    monkeypatch.setattr(OpenFile, "__init__", opened)
    settings = ArchiveSinkSettings(str(tmp_path), "a", "d", parser=BY_NAME, open_files_max=5)
    writer = ArchiveSink(settings).writer("orders/3", "staging")
    monkeypatch.setattr(files, "_PART_ROWS", 4)
    for each in batches([f"n{number % 40}" for number in range(3_000)]):
        writer.write(each)
    assert writer.close().events == 3_000
    assert max(counts) == 4  # and the one that is opened


def test_a_full_file_ends_and_the_next_begins_with_its_own_offset(tmp_path: Path) -> None:
    written = lay(tmp_path, batches(["x"] * 5_000), file_bytes_max=4_000)
    assert len(written.files) > 3
    assert numbers(tmp_path, written) == Counter(range(5_000))
    ends = [(file.first_offset, file.last_offset) for file in written.files]
    assert [first for first, _ in ends[1:]] == [last + 1 for _, last in ends[:-1]]


def test_encoded_bytes_go_to_disk_when_open_files_hold_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    writing = OpenFile.write

    def watched(self: OpenFile, share: Any) -> Any:
        held.append(self.spooled_bytes)
        return writing(self, share)

    monkeypatch.setattr(OpenFile, "write", watched)
    monkeypatch.setattr(files, "_SPOOL_BYTES", 3_000)
    monkeypatch.setattr(files, "_PART_ROWS", 50)
    written = lay(tmp_path, batches(["x", "y"] * 2_000), parser=BY_NAME)
    assert numbers(tmp_path, written) == Counter(range(4_000))
    assert max(held) <= 3_000
    assert len(written.files) == 6


def test_folders_beyond_the_limit_are_dead_letters_with_the_reason(tmp_path: Path) -> None:
    names = ["x" if number < 900 else f"n{number}" for number in range(1_000)]
    written = lay(tmp_path, batches(names), parser=BY_NAME, folders_max=50)
    assert written.dead == 53  # three folders for x, 47 for others
    (dead,) = [file for file in written.files if file.kind == "dead"]
    table = pq.read_table(tmp_path / dead.target)
    assert set(table["error"].to_pylist()) == {"its range has more than 50 folders"}
    offsets = table["offset"].to_pylist()
    assert numbers(tmp_path, written) + Counter(offsets) == Counter(range(1_000))
    assert dead.target == f"dead/a/orders/1_3_{min(offsets):020}.parquet"


def test_a_million_folders_stop_the_range_and_say_why(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(1_000)]
    with pytest.raises(InvalidError, match=r"500 of 1000 .* more than 500 folders"):
        lay(tmp_path, batches(names), parser=BY_NAME, folders_max=500)
    assert not list(tmp_path.glob("a/**/*.parquet"))


def test_many_dead_letters_make_several_files_each_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "_FILE_BYTES", 2_000)
    rows = [event(n, "x") if n % 2 else {"offset": n, "value": b"no"} for n in range(600)]
    parts = (batch(rows[first : first + 20]) for first in range(0, 600, 20))
    written = lay(tmp_path, parts, parser=BY_NAME, dead_share_max=1)
    dead = [file for file in written.files if file.kind == "dead"]
    assert len(dead) > 2
    assert len({file.target for file in dead}) == len(dead)
    found: Counter[int] = Counter()
    for file in dead:
        offsets = pq.read_table(tmp_path / file.target)["offset"].to_pylist()
        assert offsets == sorted(offsets)
        assert (offsets[0], offsets[-1], len(offsets)) == (
            file.first_offset,
            file.last_offset,
            file.events,
        )
        found.update(offsets)
    assert found == Counter(range(0, 600, 2))
    assert written.dead == written.events == 300


def test_a_file_is_named_by_its_first_event_and_not_by_a_misfit(tmp_path: Path) -> None:
    values = [b'{"a": "text"}', b'{"a": 1}', b'{"a": 2}', b'{"a": []}']
    rows = batch([{"offset": 5 + n, "value": value} for n, value in enumerate(values)])
    settings = FormatSettings(schema="a int", keep_value=True)
    written = lay(tmp_path, iter([rows]), format_settings=settings)
    data, dead = sorted(written.files, key=lambda file: file.kind)
    assert (data.first_offset, data.events) == (6, 2)
    assert data.target.endswith(f"1_3_{6:020}.parquet")
    assert pq.read_table(tmp_path / dead.target)["offset"].to_pylist() == [5, 8]


def test_a_range_without_any_event_has_no_files(tmp_path: Path) -> None:
    assert lay(tmp_path, iter([]), parser=BY_NAME) == WriterResult()
    assert lay(tmp_path / "b", iter([])) == WriterResult()


class SlowStore(MemoryStore):
    """Notes how much is on its way at once; fails for the keys that it is told.

    Nothing gets through before so many are on their way as are to come at once.
    """

    def __init__(self, failing: str = "never", at_once: int = 1) -> None:
        super().__init__(FakeClock())
        self.failing = failing
        self.at_once = at_once
        self.on_the_way: dict[int, int] = {}
        self.most = self.most_bytes = 0
        self._changed = threading.Condition()

    def put(self, key: str, data: bytes) -> str:
        with self._changed:
            self.on_the_way[threading.get_ident()] = len(data)
            self.most = max(self.most, len(self.on_the_way))
            self.most_bytes = max(self.most_bytes, sum(self.on_the_way.values()))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self.at_once, 60)
        time.sleep(0.01)
        with self._changed:
            del self.on_the_way[threading.get_ident()]
        if key.endswith(self.failing):
            raise UnavailableError("the store is gone")
        return super().put(key, data)


def entry(staged: str, size: int, crc: int) -> Any:
    return staged, size, crc


def test_uploads_go_side_by_side_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_BYTES_MAX", 1_000)
    store = SlowStore(at_once=4)
    on_the_way = uploads.StagedFiles(store, "s")
    for size in [10] * 20 + [400] * 10 + [5_000] * 2 + [10] * 5:
        on_the_way.add(bytes(size), entry)
    found: Any = on_the_way.close()
    assert [size for _, size, _ in found] == [10] * 20 + [400] * 10 + [5_000] * 2 + [10] * 5
    assert len({key for key, _, _ in found}) == len(found)
    assert store.most == 4
    assert store.most_bytes == 5_000  # which went alone


def test_an_upload_that_fails_fails_the_range() -> None:
    on_the_way = uploads.StagedFiles(SlowStore(failing="/3"), "s")
    for _ in range(4):
        on_the_way.add(b"x", entry)
    with pytest.raises(UnavailableError, match="the store is gone"):
        on_the_way.close()


MEMORY = """
import resource, sys
import numpy as np, pyarrow as pa
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.archive.sink import ArchiveSinkSettings, ArchiveSink

form, folders, parts = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings = ArchiveSinkSettings(sys.argv[1], "a", "dead", parser="split:f|timestamp", format=form)
writer = ArchiveSink(settings).writer("t/0", "staging")
rows, text = 5_000, "x" * 2_000
chance = np.random.default_rng(1)


def part(number):
    values = [b'{"f":"%d","x":"%s%d"}' % (f, text.encode(), f)
              for f in chance.integers(0, folders, rows).tolist()]
    times = pa.array(np.full(rows, 5, np.int64)).cast(EVENT_SCHEMA.field("timestamp").type)
    columns = {
        "topic": pa.array(["t"] * rows), "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(np.arange(number * rows, (number + 1) * rows)),
        "timestamp": times, "value": pa.array(values, pa.binary()),
    }
    return pa.record_batch(
        [columns.get(f.name, pa.nulls(rows, f.type)) for f in EVENT_SCHEMA], schema=EVENT_SCHEMA
    )


writer.write(part(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(1, parts):
    writer.write(part(number))
written = writer.close()
assert written.events == parts * rows, written.events
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def memory_mib(folder: Path, form: str, folders: int, parts: int) -> int:
    """By how much a process grows that writes so many times 10 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), form, str(folders), str(parts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_is_bounded(tmp_path: Path) -> None:
    assert memory_mib(tmp_path, "parquet", 40, parts=50) < 400


@pytest.mark.long
@pytest.mark.parametrize(("form", "folders"), [("parquet", 1), ("parquet", 1_000), ("orc", 40)])
def test_memory_is_bounded_whatever_the_folders_are(
    tmp_path: Path, form: str, folders: int
) -> None:
    assert memory_mib(tmp_path, form, folders, parts=150) < 500


def test_portions_are_what_grouping_row_by_row_gives(tmp_path: Path) -> None:
    names = [f"n{number * 7 % 11}" for number in range(500)]
    sink = ArchiveSink(ArchiveSinkSettings(f"file://{tmp_path}", "a", "d", parser=BY_NAME))
    writer: Any = sink.writer("orders/3", "staging")
    (whole,) = batches(names, size=500)
    found = defaultdict(list)
    for path, share in writer._laid_out(whole):
        found[path] += share.batch.column("offset").to_pylist()
    expected = defaultdict(list)
    for number, name in enumerate(names):
        expected[f"{name}/dt=2026-11-{15 + number % 3}"].append(number)
    assert found == expected
