"""Backfill, promote and rollback of archives of files: which file was read is not forgotten."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import AT, AT_OR_WHEN, an_archive, fill
from tests.support.file_logs import HEADER, Logs, lines, log_folder, text
from tidelog import Home
from tidelog.archive.archive import find_archive
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.coordination.pipeline_rows import read_listed, read_progress
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model.archive import ArchiveFormat
from tidelog.pipeline.tasks import LocalWorkers


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    with log_folder(tmp_path) as made:
        yield made


def copied(logs: Logs) -> Path:
    """A copy of the folder of archive `day`, as it is now."""
    copy = logs.folder.parent / "backup"
    shutil.copytree(logs.objects / "archives/day/g1", copy, dirs_exist_ok=True)
    return copy


def an_archived_topic(logs: Logs, **written_as: object) -> Home:
    """The home, with 30 events in a topic and in its archive ``day``."""
    home = logs.home
    home.create_topic("t", 1)
    fill(home, range(1, 31))
    an_archive(home, "day", **written_as)  # type: ignore[arg-type]
    logs.run(name="day")
    return home


@pytest.mark.parametrize("header", [HEADER, ""])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_promote_keeps_lines_of_rotated_files(logs: Logs, header: str, is_deleted: bool) -> None:
    logs.path.write_text(text(0, 10, header))
    logs.create()
    logs.run()
    logs.rotate(100, 130, header)
    logs.run()
    if is_deleted:
        Path(f"{logs.path}.1").unlink()
    logs.replace()
    assert logs.held(2) == lines(text(0, 10, header), text(100, 130, header))
    assert logs.problems() == []
    drop_generation(logs.home.context, "x", 1)
    logs.run()
    assert logs.held() == lines(text(0, 10, header), text(100, 130, header))


@pytest.mark.parametrize("header", [HEADER, ""])
def test_rotation_after_a_promote_is_followed(logs: Logs, header: str) -> None:
    logs.path.write_text(text(0, 10, header))
    logs.create()
    logs.run()
    logs.replace()
    logs.rotate(100, 130, header)
    logs.run()
    assert logs.held() == lines(text(0, 10, header), text(100, 130, header))
    logs.compress(Path(f"{logs.path}.1"))
    logs.run()
    assert logs.held() == lines(text(0, 10, header), text(100, 130, header))
    assert logs.problems() == []


def test_rotation_while_a_generation_is_built_is_followed(logs: Logs) -> None:
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    begin_backfill(logs.home.context, "x", ArchiveFormat())
    logs.run(2)
    logs.rotate(100, 130)
    logs.run(2)  # never ahead of the live one, which has not seen the new file
    assert logs.held(2) == lines(text(0, 10))
    logs.run()
    logs.run(2)
    promote(logs.home.context, "x")
    assert logs.held() == lines(text(0, 10), text(100, 130))


def test_line_that_was_read_without_its_end_is_guarded_after_a_promote(logs: Logs) -> None:
    logs.path.write_text("one\nhal")
    logs.age(logs.path)
    logs.create()
    logs.run()
    logs.replace()
    with logs.path.open("a") as file:
        file.write("f-two\nthree\n")
    with pytest.raises(InvalidError, match="now it has grown"):
        logs.run()
    assert logs.held() == lines("one\nhal")


def test_touched_file_that_ends_without_a_newline_is_not_made_again(logs: Logs) -> None:
    logs.path.write_text("one\nhal")
    logs.age(logs.path)
    logs.create()
    logs.run()
    logs.path.touch()
    assert logs.run() == 0


def test_files_below_a_passed_offset_are_refused_after_a_promote(logs: Logs) -> None:
    home = an_archived_topic(logs, parser=AT)
    backup = copied(logs)
    an_archive(home, "copy", source=f"file:{backup}")
    logs.run(name="copy")
    logs.replace("copy")
    replay(
        home.context,
        home.archives.get("day").info,
        ReplayOptions(parser=AT_OR_WHEN),
        LocalWorkers(1),
    )
    copied(logs)
    with pytest.raises(InvalidError, match="came after these were read"):
        logs.run(name="copy")
    logs.replace("copy")  # reads all files that are there now
    logs.run(name="copy")
    assert logs.held(name="copy") == logs.held(name="day")


def test_rollback_takes_on_files_that_came_since(logs: Logs) -> None:
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    logs.replace()
    logs.rotate(100, 130)
    logs.run()
    Path(f"{logs.path}.1").unlink()
    rollback(logs.home.context, "x")
    assert logs.held() == lines(text(0, 10), text(100, 130))
    logs.rotate(200, 205)
    logs.run()
    assert find_archive(logs.home.context, "x").generation == 1
    assert logs.held() == lines(text(0, 10), text(100, 130), text(200, 205))
    assert logs.problems() == []


def test_backfill_from_a_copy_of_the_files_knows_them_by_what_was_read(logs: Logs) -> None:
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    logs.rotate(100, 130)
    logs.run()
    copy = logs.folder.parent / "copy" / "logs"
    copy.mkdir(parents=True)
    for path in logs.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    logs.replace(source=f"file:{copy}")
    assert logs.held() == lines(text(0, 10), text(100, 130))
    logs.rotate(200, 205)
    logs.run()
    assert logs.held() == lines(text(0, 10), text(100, 130), text(200, 205))


def test_rollback_after_a_forced_promote_brings_lost_lines_back(logs: Logs) -> None:
    (logs.folder / "other").write_text("other\n")
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    logs.path.unlink()
    begin_backfill(logs.home.context, "x", ArchiveFormat())
    files = list(logs.objects.glob("archives/x/g1/**/*.parquet"))
    for path in files:
        path.rename(path.with_suffix(".away"))  # so that nothing can be built from them
    promote(logs.home.context, "x", force=True)
    logs.path.write_text(text(100, 130))
    with pytest.raises(NotFoundError, match="last 11 rows"):
        logs.run()
    assert logs.held() == lines("other\n", text(100, 130))
    for path in files:
        path.with_suffix(".away").rename(path)
    rollback(logs.home.context, "x")
    assert logs.run() == 0
    assert logs.held() == lines("other\n", text(0, 10), text(100, 130))


def test_promote_carries_what_drivers_saw_of_a_file(logs: Logs) -> None:
    (logs.folder / "other").write_text("other\n")
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    with logs.path.open("a") as file:
        file.write(text(10, 15, ""))
    with pytest.raises(RuntimeError):  # it dies after it has looked
        logs.run(on_look=_die)
    logs.build()
    logs.path.unlink()
    promote(logs.home.context, "x")
    with pytest.raises(NotFoundError, match="last 5 rows"):
        logs.run()
    logs.run(accept_loss=True)
    logs.replace()
    assert logs.run() == 0  # and what was accepted
    head = read_progress(
        logs.home.context, find_archive(logs.home.context, "x").pipeline(), "logs/app.log"
    )
    assert head is not None
    assert [gap.reason for gap in head.gaps] == ["vanished"]


def test_promote_carries_the_ends_that_creation_saw(logs: Logs) -> None:
    logs.path.write_text(text(0, 10))
    logs.create()
    with logs.path.open("a") as file:
        file.write(text(10, 15, ""))
    logs.replace()
    archive = find_archive(logs.home.context, "x")
    assert archive.generation == 2
    listed = read_listed(logs.home.context, archive.pipeline())["logs/app.log"]
    assert listed.end == "11"
    assert listed.note
    logs.run(start="latest")
    assert logs.held() == lines(text(10, 15, ""))


def _die(_: int) -> None:
    raise RuntimeError("the machine went down")


@pytest.mark.parametrize("runs_first", [True, False])
@pytest.mark.parametrize("header", [HEADER, ""])
def test_latest_skips_no_line_of_a_new_file(logs: Logs, runs_first: bool, header: str) -> None:
    logs.path.write_text(text(0, 10, header))
    logs.create()
    if runs_first:
        logs.run(start="latest")
    logs.rotate(100, 130, header)
    with Path(f"{logs.path}.1").open("a") as file:
        file.write("late\n")
    logs.run(start="latest")
    assert logs.held() == lines("late\n", text(100, 130, header))
    assert logs.problems() == []


def test_latest_follows_a_file_that_was_cut_off(logs: Logs) -> None:
    """A copy has all that creation saw; what is under the old name is new, and longer."""
    logs.path.write_text(text(0, 10))
    logs.create()
    Path(f"{logs.path}.1").write_bytes(logs.path.read_bytes())
    logs.path.write_text(text(100, 130))
    logs.run(start="latest")
    assert logs.held() == lines(text(100, 130))


def test_latest_passes_over_a_last_line_without_its_end(logs: Logs) -> None:
    logs.path.write_text("one\nhal")
    logs.age(logs.path)
    logs.create()
    logs.run(start="latest")
    assert logs.run() == 0
    with logs.path.open("a") as file:
        file.write("f-two\nthree\n")
    with pytest.raises(InvalidError, match="now it has grown"):
        logs.run()


def test_latest_of_an_archives_folder_refuses_files_below_it(logs: Logs) -> None:
    home = an_archived_topic(logs, parser=AT)
    backup = copied(logs)
    an_archive(home, "copy", source=f"file:{backup}")
    logs.run(name="copy", start="latest")
    replay(
        home.context,
        home.archives.get("day").info,
        ReplayOptions(parser=AT_OR_WHEN),
        LocalWorkers(1),
    )
    copied(logs)
    with pytest.raises(InvalidError, match="came after these were read"):
        logs.run(name="copy", start="latest")


def test_name_that_a_file_was_found_by_is_kept(logs: Logs) -> None:
    first = Path(f"{logs.path}.1")
    first.write_text("one\n")
    logs.path.write_text("two\n")
    logs.create()
    logs.run()
    first.rename(f"{logs.path}.2")
    logs.rotate(3, 4, "")
    logs.run()  # nothing more of `one` is read
    for number in (2, 1):
        logs.compress(Path(f"{logs.path}.{number}"))
    logs.run()
    assert logs.held() == lines("one\ntwo\n", text(3, 4, ""))


def test_file_below_the_beginning_of_a_backup_is_refused(logs: Logs) -> None:
    """It comes before anything was committed, and would never be read."""
    home = an_archived_topic(logs)
    fill(home, range(31, 41))
    logs.run(name="day")
    copied(logs)
    first, second = sorted(copied(logs).rglob("*.parquet"))
    first.rename(logs.folder / "away")
    an_archive(home, "copy", source=f"file:{second.parent}")
    with pytest.raises(RuntimeError):
        logs.run(name="copy", on_look=_die)
    (logs.folder / "away").rename(first)
    with pytest.raises(InvalidError, match="came after these were read"):
        logs.run(name="copy")


def test_rollback_to_a_generation_from_a_copy_of_files(logs: Logs) -> None:
    """It has read the topic since, and the files of the copy were not noted any more."""
    home = an_archived_topic(logs)
    logs.replace("day", source=f"file:{copied(logs)}")
    fill(home, range(31, 41))
    logs.run(name="day")
    assert logs.problems("day") == []
    rollback(home.context, "day")
    rollback(home.context, "day")
    assert home.archives.get("day").info.generation == 2
    assert logs.held(name="day").total() == 40


def test_file_belongs_to_the_partition_of_which_most_was_read(logs: Logs) -> None:
    """A header is all that was read of another one, which had the name of the copy."""
    rotated = Path(f"{logs.path}.1")
    rotated.write_text(HEADER)
    logs.path.write_text("")
    logs.create()
    logs.run()
    rotated.unlink()
    logs.path.write_text(text(0, 10))
    logs.run()
    rotated.write_bytes(logs.path.read_bytes())
    logs.path.write_text(text(100, 105))
    logs.run()
    assert logs.held() == lines(HEADER, text(0, 10), text(100, 105))


def test_backfill_of_a_chain_from_rotated_files_doubles_nothing(logs: Logs) -> None:
    """The archive that reads the files knows which file is which."""
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    for name, source in (("copy", "archive:x"), ("far", "archive:copy?generation=1")):
        an_archive(logs.home, name, source=source)
        logs.run(name=name)
    logs.rotate(100, 130)
    for name in ("copy", "far"):
        logs.replace(name, source=f"file:{logs.folder}")
        assert logs.held(name=name) == lines(text(0, 10))
        assert logs.problems(name) == []
    logs.run()
    logs.run(name="copy")
    assert logs.held(name="copy") == lines(text(0, 10), text(100, 130))
    assert logs.problems("copy") == []


@pytest.mark.parametrize("has_begun", [True, False])
def test_chain_of_rotated_files_is_built_of_another_archive_of_them(
    logs: Logs, has_begun: bool
) -> None:
    """The other archive has another name for the same file, because it saw it later."""
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    logs.rotate(100, 130)
    logs.create("late")
    logs.run(name="late")
    an_archive(logs.home, "chain", source="archive:x")
    if has_begun:
        logs.run(name="chain")
    logs.replace("chain", source="archive:late")
    logs.run()
    logs.run(name="chain")
    assert logs.held(name="chain") == lines(text(0, 10), text(100, 130))
    assert logs.problems("chain") == []
