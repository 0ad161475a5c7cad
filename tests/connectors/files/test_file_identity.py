"""Each file of a folder has a source partition of its own, whose name and offsets are true."""

from __future__ import annotations

import gzip
import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connectors.files.test_source import events, lay
from tests.connectors.files.test_unreadable_files import looked_at
from tests.support.cli_run import Run, run_here
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.errors import CorruptError, InvalidError, NotFoundError

ZEROS = "0" * 20
PIECES = ["", "/", "%", "%2F", "%25", "x", "y", "0", "~", "~2", " ", ".", "..", "\\", "é", "//"]


@pytest.fixture
def tidelog(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Run:
    return run_here(monkeypatch, capfdbinary, tmp_path)


def backup(tmp_path: Path, form: str = "parquet", first: int = 0) -> Path:
    """A file of an archive with five events."""
    folder = tmp_path / f"made-{form}-{first}"
    codec = {"orc": "zlib", "avro": "deflate"}.get(form, "zstd")
    lay(folder, [events(range(first, first + 5))], format=form, codec=codec)
    (found,) = folder.rglob(f"1_0_*.{form}")
    return found


def test_text_of_a_source_partition_has_one_meaning() -> None:
    texts: dict[str, SourcePartition] = {}
    parts = ["".join(pair) for pair in itertools.product(PIECES, repeat=2)]
    for topic, name in itertools.product(parts, repeat=2):
        if "/" in name:
            with pytest.raises(InvalidError, match="has a `/`"):
                SourcePartition(topic, name)
            continue
        one = SourcePartition(topic, name)
        assert SourcePartition.named(one.text) == one
        assert texts.setdefault(one.text, one) == one


@given(st.text())
def test_any_text_names_the_source_partition_whose_text_it_is(text: str) -> None:
    found = SourcePartition.named(f"t/{text}")
    assert found.text == f"t/{text}"
    assert SourcePartition.named(found.text) == found


def test_two_files_of_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    """One of them would never be read."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "app.log").write_bytes(b"1\n2\n3\n")
    (folder / "good.log").write_bytes(b"1\n")
    shutil.copy(backup(tmp_path), folder / f"1_app.log_{ZEROS}.parquet")
    shutil.copy(backup(tmp_path), folder / f"1_7_{ZEROS}.parquet")
    ends, errors = looked_at(folder)
    assert ends == {"in/good.log": "1", "in/7": "5"}
    message = str(errors["in/app.log"])
    assert "`in/app.log`" in message
    assert f"`in/1_app.log_{ZEROS}.parquet`" in message


def test_a_clash_that_comes_later_loses_nothing(tmp_path: Path, tidelog: Run) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "app.log").write_bytes(b"1\n2\n")
    (folder / "good.log").write_bytes(b"1\n")
    tidelog("init")
    tidelog("archive", "create", "a", "--source", f"file:{folder}")
    tidelog("archive", "run", "a", "--no-spark")
    other = folder / f"1_app.log_{ZEROS}.parquet"
    shutil.copy(backup(tmp_path), other)
    with (folder / "app.log").open("ab") as file:
        file.write(b"3\n")
    with (folder / "good.log").open("ab") as file:
        file.write(b"2\n")
    failed = tidelog("archive", "run", "a", "--no-spark")
    assert failed.code != 0
    assert "are both called so" in failed.err
    assert tidelog("archive", "status", "a").out.count(b"are both called so")
    assert sorted(row["value"] for row in tidelog("archive", "cat", "a").rows()) == list("1122")
    (folder / "other").mkdir()
    other.rename(folder / "other" / f"1_0_{ZEROS}.parquet")
    tidelog("archive", "run", "a", "--no-spark")
    rows = tidelog("archive", "cat", "a").rows()
    assert sorted(row["value"] or "" for row in rows if row["topic"] == "in") == list("11223")
    assert len([row for row in rows if row["topic"] == "clicks"]) == 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"x/1_%00_{ZEROS}.parquet", "control character"),
        (f"x%00/1_0_{ZEROS}.parquet", "control character"),
        (f"x/1_%0A_{ZEROS}.parquet", "control character"),
        (f"x/1_y%2F0_{ZEROS}.parquet", "has a `/`"),
        ("x/1_0_99999999999999999999.parquet", "above the greatest one"),
        (f"x/1_0_{(1 << 63) - 1:020}.parquet", "above the greatest one"),
        (f"x/{1 << 63}_0_{ZEROS}.parquet", "is not a 64-bit number"),
    ],
)
def test_a_name_that_stands_for_no_source_partition_stops_only_its_file(
    tmp_path: Path, tidelog: Run, name: str, reason: str
) -> None:
    folder = tmp_path / "in"
    (folder / name).parent.mkdir(parents=True)
    (folder / "plain.log").write_bytes(b"1\n")
    shutil.copy(backup(tmp_path), folder / name)
    (folder / "x%2Fy").mkdir()
    shutil.copy(backup(tmp_path), folder / f"x%2Fy/1_0_{ZEROS}.parquet")
    ends, errors = looked_at(folder)
    assert ends == {"in/plain.log": "1", "x/y/0": "5"}
    (message,) = map(str, errors.values())
    assert reason in message
    assert f"file `in/{name}`" in message
    assert message.isprintable()
    assert tidelog("init").code == 0
    assert tidelog("archive", "create", "a", "--source", f"file:{folder}").code == 0
    assert tidelog("archive", "run", "a", "--no-spark").code == 2
    assert len(tidelog("archive", "cat", "a").rows()) == 6
    assert reason in tidelog("archive", "status", "a").out.decode()


@pytest.mark.parametrize("form", ["parquet", "orc", "avro"])
@pytest.mark.parametrize("first", [5, 7, 10**6])
def test_a_file_whose_events_are_before_the_offset_in_its_name_is_an_error(
    tmp_path: Path, form: str, first: int
) -> None:
    """Its range would be empty, and it would be passed over."""
    (tmp_path / "in/t").mkdir(parents=True)
    shutil.copy(backup(tmp_path, form), tmp_path / f"in/t/1_0_{first:020}.{form}")
    (tmp_path / "in/good.log").write_bytes(b"1\n")
    ends, errors = looked_at(tmp_path / "in")
    assert ends == {"in/good.log": "1"}
    assert isinstance(errors["t/0"], CorruptError)
    assert "which is before the one in its name" in str(errors["t/0"])


@pytest.mark.parametrize("form", ["parquet", "orc", "avro"])
def test_an_offset_after_which_there_is_none_is_an_error(tmp_path: Path, form: str) -> None:
    (tmp_path / "in/t").mkdir(parents=True)
    made = backup(tmp_path, form, first=(1 << 63) - 5)
    shutil.copy(made, tmp_path / f"in/t/1_0_{ZEROS}.{form}")
    ends, errors = looked_at(tmp_path / "in")
    assert not ends
    assert f"holds offset {(1 << 63) - 1}" in str(errors["t/0"])


@pytest.mark.parametrize("form", ["parquet", "avro"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_gap_of_any_size_is_passed_in_a_few_steps(
    tmp_path: Path, tidelog: Run, form: str, apart: bool
) -> None:
    (tmp_path / "in").mkdir()
    codec = {"avro": "deflate"}.get(form, "zstd")
    for numbers in [[0, 1], [1 << 62]] if apart else [[0, 1, 1 << 62]]:
        lay(tmp_path / "made", [events(numbers)], format=form, codec=codec)
    for file in (tmp_path / "made").rglob(f"1_0_*.{form}"):
        (tmp_path / "in/t").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "in/t" / file.name)
    assert tidelog("init").code == 0
    assert tidelog("archive", "create", "a", "--source", f"file:{tmp_path}/in").code == 0
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    found = [row["offset"] for row in tidelog("archive", "cat", "a").rows()]
    assert found == [0, 1, 1 << 62]


def test_compressed_file_that_was_renamed_before_it_is_read_is_not_damage(tmp_path: Path) -> None:
    """Rotation gives its name to a larger file, of which as many bytes do not decode."""
    older, newer = tmp_path / "app.log.2.gz", tmp_path / "app.log.1.gz"
    older.write_bytes(gzip.compress(b"one\n"))
    newer.write_bytes(gzip.compress(b"".join(b"%d two\n" % n for n in range(999))))
    source = open_source(f"file:{tmp_path}", environ={})
    (partition,) = [each for each in source.partitions() if each.name == older.name]
    plan = source.reader(SourceRange(partition, "0", "1"))
    older.rename(tmp_path / "app.log.3.gz")
    newer.rename(older)
    with pytest.raises(NotFoundError, match="was replaced or cut off"):
        list(plan.read())
