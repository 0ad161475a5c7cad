"""Names of source files that are ids or keys: numbers, and other names that a file had."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home
from tidelog import Home
from tidelog.connectors.files.row_marks import marked_names
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.erasure.proof import Trace


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        (tmp_path / "in").mkdir()
        yield made


def add(file: Path, *users: str) -> None:
    """Append lines to a file, which is finished then."""
    with file.open("a") as lines:
        lines.writelines(f'{{"user": "{user}"}}\n' for user in users)
    os.utime(file, (1, 1))


def partitions(traces: Iterable[Trace]) -> set[str]:
    return {each.object.split("/", 2)[2] for each in traces}


def test_number_is_the_name_of_a_file_but_not_of_a_partition(home: Home, tmp_path: Path) -> None:
    for name in ("471120", "0"):
        add(tmp_path / "in" / name, name, "1")
    source = f"file:{tmp_path / 'in'}?format=lines"
    home.pumps.create("p", source=source, topic="t", key_field="user").run()
    home.archives.create("day", source="topic:t").run()
    found = {
        key: partitions(home.erase("t", key=key.encode()).traces) for key in ("471120", "0", "1")
    }
    assert found == {"471120": {"in/471120"}, "0": {"in/0"}, "1": set()}


def test_all_names_that_a_source_file_had_are_searched(home: Home, tmp_path: Path) -> None:
    source, file = f"file:{tmp_path / 'in'}?format=lines", tmp_path / "in" / "upload.log"
    add(file, "user-6")
    pump = home.pumps.create("p", source=source, topic="t", key_field="user")
    home.archives.create("files", source=source)
    home.archives.create("chain", source="archive:files")
    runs = [pump.run, home.archives.get("files").run, home.archives.get("chain").run]
    for name in ("upload.log", "rows:user-7.log", "user-8.log", "done.log"):
        file = file.rename(tmp_path / "in" / name)
        for users in ((), ("user-6", "user-7", "user-8")):
            add(file, *users)
            for run in runs:
                run()
    head = read_progress(home.context, pump.info.incarnation, "in/upload.log")
    assert head is not None
    assert list(marked_names(head.note)) == ["done.log"]
    assert list(marked_names(b"other" + head.note + head.note)) == ["done.log"] * 2
    for user, named in ((b"user-6", set()), (b"user-7", {"in/upload.log"})):
        assert partitions(home.erase("t", key=user).traces) == named
    traces = home.archives.get("files").erase(key=b"user-8", prove=True).traces
    for do in ("archive delete files", "pipeline delete p"):
        assert any(f"tidelog {do}" in each.do for each in traces)
    pump.delete()
    assert home.purge_and_prove("t", keys=[b"user-7"]).is_clean
