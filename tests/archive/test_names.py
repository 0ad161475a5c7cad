"""Archives of topics whose names readers of folders would skip, or that no store could hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import duckdb
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner

from tidelog import Event
from tidelog.cli.main import cli
from tidelog.codec.parsers.base import escaped, unescaped
from tidelog.connectors.files.listing import archived_name
from tidelog.home import create_home
from tidelog.model import layout
from tidelog.model.limits import FILE_PARTITION_BYTES_MAX, KEY_SEGMENT_BYTES_MAX
from tidelog.settings import load_settings

OWN = ["_x", "_delta_log", "_replayed", "_", "plain", "t" * 200, "a..b", "a."]
FOREIGN = [".hidden", "..x", "漢" * 27, "漢" * 75, "k" * 240, "a=b", "50% %5F", "a b ", "🎉", "_~"]


def ascii_start(name: str) -> str:
    return ascii(name)[:20]


class Shell:
    """Commands on one home."""

    def __init__(self, folder: Path) -> None:
        self.home = str(folder / "home")
        self.made = create_home(load_settings(self.home, {}, folder))[0]

    def __call__(self, *words: str) -> str:
        done = CliRunner().invoke(cli, ["--home", self.home, *words])
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def listed(shell: Shell, root: str) -> tuple[int, int]:
    """How many rows two readers find that only list the folder of the archive."""
    folder = next(Path(shell.home).rglob(f"archives/{root}/g1"))
    rows = ds.dataset(folder, format="parquet").count_rows()
    found = duckdb.sql(f"select count(*) from read_parquet('{folder}/**/*.parquet')").fetchall()
    return rows, found[0][0]


@pytest.mark.parametrize("name", ["_delta_log", "_replayed", "t" * 200], ids=ascii_start)
def test_topic_of_any_name_is_found_restored_and_read_from_its_folder(
    name: str, shell: Shell, tmp_path: Path
) -> None:
    shell.made.create_topic(name, 1)
    shell.made.append(name, [Event(b"%d" % n, timestamp=1_700_000_000_000 + n) for n in range(3)])
    parser = ["--parser", "timestamp"]
    shell("archive", "create", "a", "--source", f"topic:{name}", "--kind", "backup")
    shell("archive", "create", "p", "--source", f"topic:{name}", "--kind", "partition", *parser)
    for archive in ("a", "p"):
        shell("archive", "run", archive, "--no-spark")
        assert listed(shell, archive) == (3, 3)
        shell("archive", "verify", archive, "--deep")
    shell("archive", "finalize", "p")
    shell.made.create_topic("back", 1)
    shell("archive", "restore", "a", "--to", "topic:back", "--no-spark")
    assert [event.value for event in shell.made.read("back", 0)] == [b"0", b"1", b"2"]
    folder = tmp_path / "copy"  # files may appear behind a reader of the archive's own folder
    shutil.copytree(next(Path(shell.home).rglob("archives/a/g1")), folder)
    shell("archive", "create", "c", "--source", f"file:{quote(str(folder))}", "--kind", "backup")
    shell("archive", "run", "c", "--no-spark")
    assert listed(shell, "c") == (3, 3)
    shown = json.loads(shell("archive", "status", "c", "--json"))
    assert f"{name}/0" in json.dumps(shown)


@pytest.mark.parametrize("name", [".hidden", "漢" * 27, "k" * 240, "50% a=b🎉 "], ids=ascii_start)
def test_source_of_any_name_is_found_by_readers_that_list(
    name: str, shell: Shell, tmp_path: Path
) -> None:
    folder = tmp_path / "in" / name
    (folder / ("d" * 100)).mkdir(parents=True)
    (folder / "lines.txt").write_text('{"a": 1700000000001}\n{"a": 1700000000002}\nno json\n')
    (folder / ("d" * 100) / ("f" * 120)).write_text('{"a": 1700000000003}\n')
    source = f"file:{quote(str(folder))}?format=lines"
    shell("archive", "create", "a", "--source", source, "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    assert listed(shell, "a") == (4, 4)
    shell("archive", "verify", "a", "--deep")
    how = ["--parser", "json:a", "--dead-share", "1"]
    shell("archive", "create", "d", "--source", source, "--kind", "partition", *how)
    shell("archive", "run", "d", "--no-spark")
    assert listed(shell, "d") == (3, 3)
    dead = next(Path(shell.home).rglob("dead/d"))
    assert ds.dataset(dead, format="parquet").count_rows() == 1


@pytest.mark.parametrize("name", [*OWN, *FOREIGN, "k" * 248, "shardId-000000000000", "a%2Fb.log"])
def test_names_in_paths_are_seen_fit_and_turn_back(name: str) -> None:
    topic, partition = escaped(name), escaped(name, FILE_PARTITION_BYTES_MAX)
    assert topic[0] not in "_."
    assert "/" not in topic
    file = f"1_{partition}_{7:020}.jsonl.zst"
    assert max(len(part.encode()) for part in (topic, f".{file}.meta.parquet")) <= 200
    assert len(layout.manifest_folder(f"{name}/0")) <= KEY_SEGMENT_BYTES_MAX
    found = archived_name(f"g1/{topic}/dt=1/{file}", "root")
    assert found is not None
    assert found.topic == (topic if "~" in topic else name)
    assert found.partition == (partition if "~" in partition else name)


def test_names_that_no_archive_made_stay_as_they_are() -> None:
    for name in ("50%", "%5f", "%FF", "a%20b", "plain", "漢"):
        assert unescaped(name) == name


def test_manifests_of_long_names_have_folders_of_their_own() -> None:
    long = ["漢" * 27 + end for end in ("/0", "/1")]
    folders = {layout.manifest_folder(each) for each in (*long, "a/0", "sha256=x/0")}
    assert len(folders) == 4
    key = layout.manifest("p", 3, long[0], "id")
    assert layout.folder_of_manifest(key) == layout.manifest_folder(long[0])
    assert layout.manifest_epoch(key) == 3
