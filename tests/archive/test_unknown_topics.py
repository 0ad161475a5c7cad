"""Archives of copied folders, whose files do not name the topic that their events come from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.archive_look import a_home
from tidelog import Event, Home
from tidelog.api.archives import ArchiveHandle
from tidelog.archive import fill
from tidelog.connectors.source import RangeReader
from tidelog.erasure.rewrite import erase_from_archive
from tidelog.errors import InvalidError


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def append(home: Home, word: str) -> None:
    home.append("t", [Event(word.encode(), id=f"{word}-{n}") for n in range(10)], partition=0)


def archive_of_a_copy(home: Home, tmp_path: Path) -> ArchiveHandle:
    """Returns an archive of a copied folder of another archive of the topic."""
    append(home, "old")
    home.archives.create("day", source="topic:t").run()
    shutil.copytree(tmp_path / "o/archives/day/g1", tmp_path / "copy")
    found = home.archives.create("found", source=f"file:{tmp_path / 'copy'}")
    found.run()
    return found


def ids(tmp_path: Path, generation: int) -> set[str]:
    files = (tmp_path / f"o/archives/found/g{generation}").glob("**/*.parquet")
    return {each for file in files for each in pq.read_table(file)["id"].to_pylist()}


@pytest.mark.parametrize("source", ["topic:t", "archive:new"])
def test_events_of_another_topic_replace_none_of_a_copied_folder(
    home: Home, tmp_path: Path, source: str
) -> None:
    found = archive_of_a_copy(home, tmp_path)
    home.archives.get("day").delete(files=True)
    home.delete_topic("t")
    home.create_topic("t", 1)
    append(home, "new")
    home.archives.create("new", source="topic:t").run()
    with pytest.raises(InvalidError, match="holds other events"):
        found.backfill(source=source, codec="gzip")
    home.delete("t", ["new-3"], why="asked")
    home.purge("t", wait=0)
    assert ids(tmp_path, 1) == {f"old-{n}" for n in range(10)}, "they are another topic's"


def test_erasure_during_the_comparison_with_the_live_generation_is_not_damage(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = archive_of_a_copy(home, tmp_path)
    compare = fill.are_other_events

    def erase_and_compare(one: RangeReader, other: RangeReader) -> bool:
        monkeypatch.undo()
        erase_from_archive(home.context, found.info, 1, {"t/0": [3]})
        return compare(one, other)

    monkeypatch.setattr(fill, "are_other_events", erase_and_compare)
    found.backfill(source="topic:t", codec="gzip")
    assert fill.are_other_events is compare
    assert ids(tmp_path, 2) == {f"old-{n}" for n in range(10)}, "only generation 1 was erased from"


def test_delete_reaches_all_generations_that_have_the_same_events(
    home: Home, tmp_path: Path
) -> None:
    found = archive_of_a_copy(home, tmp_path)
    found.backfill(source="archive:day", codec="gzip")
    proof = home.erase("t", ids=["old-3"], why="asked")
    assert not proof.is_clean
    (trace,) = proof.traces
    assert "of generation 1, which was made from something else" in trace.what
    assert trace.do == "run `tidelog archive erase found --id ID --prove`"
    assert found.erase(ids=["old-3"], why="asked").is_clean
    found.promote()
    assert home.erase("t", ids=["old-4"], why="asked").is_clean
    assert ids(tmp_path, 1) == ids(tmp_path, 2) == {f"old-{n}" for n in (0, 1, 2, 5, 6, 7, 8, 9)}


def test_drop_takes_no_other_topic_for_one_that_has_the_events(home: Home, tmp_path: Path) -> None:
    found = home.archives.create("found", source="topic:t")
    day = home.archives.create("day", source="topic:t")
    for number in range(3):
        home.append("t", [Event(b"old", id=f"old-{number}")], partition=0)
        day.run()
        if number == 1:
            found.seek("latest")
        found.run()
    shutil.copytree(tmp_path / "o/archives/day/g1", tmp_path / "copy")
    sorted((tmp_path / "copy").glob("**/*.parquet"))[1].unlink()
    found.backfill(source=f"file:{tmp_path / 'copy'}", codec="gzip")
    found.promote()
    found.backfill(codec="zstd")
    found.promote()
    found.rollback(2, force=True)
    day.delete(files=True)
    home.delete_topic("t")
    home.create_topic("t", 1)
    append(home, "new")
    with pytest.raises(InvalidError, match=r"generation 3 holds what neither .* from 1 to 2"):
        found.drop(3)


@pytest.mark.parametrize("source", ["topic:t", "archive:raw"])
def test_empty_archive_is_not_filled_from_a_topic_that_had_its_name(
    home: Home, source: str
) -> None:
    append(home, "old")
    home.archives.create("old", source="topic:t").run()
    home.delete_topic("t")
    home.create_topic("t", 1)
    home.append("t", [Event(b"new", id=f"new-{n}") for n in range(3)], partition=0)
    home.archives.create("raw", source="topic:t").run()
    empty = home.archives.create("empty", source=source)
    with pytest.raises(InvalidError, match=r"now, those of a topic that had .*another archive"):
        empty.backfill(source="archive:old")
    empty.drop(2)
    assert empty.run().events == 3
    assert empty.verify(deep=True, source=True).problem_count == 0
