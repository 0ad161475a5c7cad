"""CONTRIBUTING.md is followed to the letter: its source is installed as a package, and archived."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tidelog
from tidelog.home import Home, World, create_home
from tidelog.settings import Settings

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
SECTION = PAGE.split("### Add a source\n", 1)[1].split("\n### ", 1)[0]


def block(language: str) -> str:
    """The one block of code in this language in the section about sources."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.S)
    return str(found)


def home_in(folder: Path) -> Home:
    given = Settings(str(folder / "objects"), str(folder / "catalog.sqlite"))
    return create_home(given, world=World(environ={}))[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the page's package is installed."""
    folder = tmp_path / "site"
    code = block("python")
    module = code.partition("\n")[0].removeprefix("# ")
    info = folder / "lines_source-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / module).write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-source\nVersion: 1.0\n")
    groups = tomllib.loads(block("toml"))["project"]["entry-points"]
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_source_of_the_page_is_archived_once(tmp_path: Path, package: Path) -> None:
    log = tmp_path / "words.txt"
    log.write_bytes(b"one\ntwo\nthree\n")
    with home_in(tmp_path) as home:
        archive = home.archives.create("words", source=f"lines://{log}")
        assert archive.run().events == 3
        with log.open("ab") as file:
            file.write(b"four\n")
        assert archive.run().events == 1
        assert archive.run().events == 0
        batches = list(archive.read())
    values = [value for batch in batches for value in batch.column("value").to_pylist()]
    assert values == [b"one", b"two", b"three", b"four"]


def test_file_that_is_missing_is_named(tmp_path: Path, package: Path) -> None:
    missing = pytest.raises(tidelog.NotFoundError, match="no such file: check its path")
    with home_in(tmp_path) as home, missing:
        home.archives.create("words", source=f"lines://{tmp_path}/none").run()


def test_source_pickles_for_tasks_on_other_machines(tmp_path: Path, package: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b"one\n")
    code = (
        "import pickle\n"
        "from tidelog.connectors.by_url import open_source\n"
        "from tidelog.connectors.source import SourceRange\n"
        f"source = open_source('lines://{tmp_path}/words.txt', environ={{}})\n"
        "(partition,) = source.partitions()\n"
        "reader = pickle.loads(pickle.dumps(source.reader(SourceRange(partition, '0', '1'))))\n"
        "print([chunk.batch.num_rows for chunk in reader.read()])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[1]\n"


def test_groups_that_the_page_names_are_those_that_the_code_reads() -> None:
    named = set(re.findall(r"`(tidelog\.[a-z]+s)`", PAGE.split("## Where to add things")[1]))
    sources = (Path(__file__).parent.parent / "src" / "tidelog").rglob("*.py")
    read = {
        group
        for path in sources
        for group in re.findall(r'find_plugins\("([a-z.]+)"', path.read_text())
    }
    assert named == read
