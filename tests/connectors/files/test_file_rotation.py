"""Files that grow and are rotated while they are read: each line comes once, or is an error."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.homes import a_store
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings
from tidelog.connectors.by_url import open_source
from tidelog.connectors.files.row_tracking import rotated_from
from tidelog.connectors.files.source import FilesSource
from tidelog.connectors.source import SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.model.pipeline import Gap
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.local import LocalStore


class World:
    """A folder with a log file, and a pipeline that archives it."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self.folder = folder / "in"
        self.folder.mkdir(parents=True)
        self.context = self.folder / "app.log"
        self._out = folder / "out"
        self._url = source or f"file:{self.folder}"
        self._catalog = MemoryCatalog()
        self._pipeline = self.restarted()

    @classmethod
    def again(cls, world: World) -> World:
        """Another process that archives the same folder."""
        other = copy.copy(world)
        other.restarted()
        return other

    def restarted(self) -> Pipeline:
        """The same pipeline in another process: what a source remembers is lost."""
        sink = ArchiveSink(ArchiveSinkSettings(str(self._out), "archives/in", "dead/in"))
        source = open_source(self._url, environ={})
        self._pipeline = Pipeline("in", "inc", source, sink, LocalWorkers())
        return self._pipeline

    def run(self, **how: object) -> int:
        context = Context(
            a_store(str(self._out)), self._catalog, SystemClock(), RandomIds(), random.Random(1)
        )
        return Driver(context, self._pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]

    def archived(self) -> list[str]:
        """All lines, sorted."""
        source = open_source(f"file:{self._out}/archives/in", environ={})
        assert isinstance(source, FilesSource)
        found = []
        for partition, held in source.bounds(source.partitions()).items():
            for chunk in source.read(SourceRange(partition, held.first, held.end)):
                found += [value.decode() for value in chunk.batch.column("value").to_pylist()]
        return sorted(found)

    def gaps(self) -> list[Gap]:
        """What the head of the log file says."""
        context = Context(
            a_store(str(self._out)), self._catalog, SystemClock(), RandomIds(), random.Random(1)
        )
        head = read_progress(context, "inc", "in/app.log")
        assert head is not None
        return list(head.gaps)

    def write(self, *lines: str, to: str = "app.log") -> None:
        if "mode=events" in self._url:
            lines = tuple(event(line) for line in lines)
        with (self.folder / to).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def event(value: str) -> str:
    """Returns a line of a file that is read with `mode=events`."""
    line: dict[str, Any] = {"topic": "x", "partition": 0, "offset": 0, "value": value}
    line |= {"timestamp": "2026-01-01T00:00:00Z", "id": None, "key": None, "type": None}
    return json.dumps({**line, "headers": []})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(params=["", "?mode=events"])
def text_world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """Files of lines, or of events as JSON."""
    return World(tmp_path, f"file:{tmp_path}/in{request.param}")


def lines(name: str, count: int) -> list[str]:
    return [f"{name} {n}" for n in range(count)]


def rename(context: Path) -> None:
    context.rename(context.with_name("app.log.1"))


def copy_and_truncate(context: Path) -> None:
    shutil.copy(context, context.with_name("app.log.1"))
    os.truncate(context, 0)


def compress(context: Path) -> None:
    context.with_name("app.log.1.gz").write_bytes(gzip.compress(context.read_bytes()))
    context.unlink()


ROTATIONS = [rename, copy_and_truncate, compress]


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("mode", ["", "?mode=events"])
def test_each_line_of_a_rotated_file_comes_once(
    tmp_path: Path, rotate: Callable[[Path], None], restarts: bool, single: bool, mode: str
) -> None:
    world = World(tmp_path, f"file:{tmp_path}/in{'/app.log' if single else ''}{mode}")
    world.write(*lines("old", 5))
    assert world.run() == 5
    world.write("late 0", "late 1")
    rotate(world.context)
    world.write(*lines("new", 8))
    if restarts:
        world.restarted()
    assert world.run() == 10
    assert world.archived() == sorted([*lines("old", 5), "late 0", "late 1", *lines("new", 8)])
    assert world.run() == 0
    world.write("more")
    assert world.run() == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_new_file_that_begins_as_the_old_one_is_read_from_its_beginning(
    world: World, restarts: bool
) -> None:
    world.write(*lines("same", 5))
    assert world.run() == 5
    rename(world.context)
    world.write(*lines("same", 8))
    if restarts:
        world.restarted()
    assert world.run() == 8
    assert world.archived() == sorted([*lines("same", 5), *lines("same", 8)])


def test_file_with_a_header_is_rotated_again_and_again(text_world: World) -> None:
    world = text_world
    expected: list[str] = []
    for turn in range(4):
        some = ["time,what", *lines(f"turn {turn}", 3 + turn)]
        world.write(*some)
        expected += some
        world.run()
        world.restarted()
        for number in (3, 2, 1):
            older = world.folder / f"app.log.{number}"
            if older.exists():
                older.rename(world.folder / f"app.log.{number + 1}")
        rename(world.context)
    world.run()
    assert world.archived() == sorted(expected)


def test_copy_that_is_being_made_is_not_read(text_world: World) -> None:
    world = text_world
    world.write(*lines("old", 5))
    assert world.run() == 5
    text = world.context.read_bytes()
    copy = world.folder / "app.log.1"
    for size in (0, 10, len(text) // 2, len(text)):
        copy.write_bytes(text[:size])
        assert world.run() == 0
    os.truncate(world.context, 0)
    assert world.run() == 0
    world.write(*lines("new", 2))
    assert world.run() == 2
    assert world.archived() == sorted([*lines("old", 5), *lines("new", 2)])


def test_compressed_file_beside_its_original_is_not_read(text_world: World) -> None:
    world = text_world
    world.write(*lines("old", 5))
    rename(world.context)
    assert world.run() == 5
    whole = gzip.compress((world.folder / "app.log.1").read_bytes())
    (world.folder / "app.log.1.gz").write_bytes(whole[:10])
    assert world.run() == 0
    (world.folder / "app.log.1.gz").write_bytes(whole)
    assert world.run() == 0
    (world.folder / "app.log.1").unlink()
    assert world.run() == 0
    assert world.archived() == lines("old", 5)


def test_numbered_file_is_found_if_the_one_after_it_was_compressed_too(text_world: World) -> None:
    """All that happens between two runs: a rotation, and then both files are compressed."""
    world = text_world
    world.write(*lines("older", 3), to="app.log.1")
    world.write(*lines("old", 5))
    assert world.run() == 8
    for number in (1, 0):
        name = f"app.log.{number}" if number else "app.log"
        plain = world.folder / name
        moved = world.folder / f"app.log.{number + 1}.gz"
        moved.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert world.run() == 0
    world.write(*lines("new", 2))
    assert world.run() == 2
    assert world.archived() == sorted([*lines("older", 3), *lines("old", 5), *lines("new", 2)])


def test_other_file_that_begins_as_a_deleted_one_is_read(world: World) -> None:
    """A new inode and a name that no rotation makes: nothing says that it was read."""
    world.write("ping", to="a.txt")
    assert world.run() == 1
    world.write("ping", to="b.txt")
    (world.folder / "a.txt").unlink()
    world.write("day,n", "1,1", to="c.txt")
    world.restarted()
    assert world.run() == 3
    world.write("day,n", "1,1", "2,5", to="d.txt")
    (world.folder / "c.txt").unlink()
    assert world.run() == 3
    assert world.archived() == sorted(["ping", "ping", *["day,n", "1,1"] * 2, "2,5"])


@pytest.mark.parametrize("restarts", [False, True])
def test_other_file_that_got_the_inode_of_a_deleted_one_is_read(
    world: World, restarts: bool
) -> None:
    """File systems use inodes again at once; here a file gets one by a rename."""
    world.write("ping", to="a.txt")
    assert world.run() == 1
    (world.folder / "a.txt").rename(world.folder / "b.txt")
    os.utime(world.folder / "b.txt", (1_700_000_000, 1_700_000_000))
    if restarts:
        world.restarted()
    assert world.run() == 1


def test_file_that_was_renamed_and_not_written_to_is_known_by_its_inode(world: World) -> None:
    world.write("ping", to="a.txt")
    assert world.run() == 1
    (world.folder / "a.txt").rename(world.folder / "b.txt")
    world.restarted()
    assert world.run() == 0


def test_names_that_only_look_like_rotations_are_files_of_their_own(world: World) -> None:
    world.write("start", to="log.1")
    world.write("start", to="log.10")
    world.write("one", "two", to="orders")
    world.write("one", to="orders-eu")
    assert world.run() == 5
    assert world.archived() == sorted(["start", "start", "one", "two", "one"])


def test_compressed_file_beside_another_one_of_its_name_is_read(world: World) -> None:
    world.write("one", to="x")
    (world.folder / "x.gz").write_bytes(gzip.compress(b"other\n"))
    assert world.run() == 2
    assert world.archived() == ["one", "other"]


def test_rotated_copy_that_differs_between_its_ends_is_read(world: World) -> None:
    """Both ends of 4 KiB are alike."""
    some = lines("x" * 90, 300)
    world.write(*some)
    other = [*some[:150], "y" * len(some[150]), *some[151:]]
    world.write(*other, to="app.log.1")
    assert world.run() == 600
    assert world.archived() == sorted(some + other)


@pytest.mark.parametrize("restarts", [False, True])
def test_rotated_file_that_differs_between_its_ends_is_read(world: World, restarts: bool) -> None:
    some = lines("x" * 90, 300)
    other = [*some[:150], "y" * len(some[150]), *some[151:]]
    world.write(*some)
    assert world.run() == 300
    text = "".join(f"{line}\n" for line in other).encode()
    (world.folder / "app.log.1.gz").write_bytes(gzip.compress(text))
    world.context.unlink()
    if restarts:
        world.restarted()
    assert world.run() == 300
    assert world.archived() == sorted(some + other)


def test_file_that_is_left_out_as_a_copy_is_listed_with_the_reason(world: World) -> None:
    world.write("one", "two")
    world.write("one", to="app.log.1")
    source = open_source(f"file:{world.folder}", environ={})
    assert isinstance(source, FilesSource)
    assert [each.name for each in source.partitions()] == ["app.log"]
    [(name, why)] = source.left_out().items()
    assert name == "in/app.log.1"
    assert "all of it is the beginning of `in/app.log`" in why


def test_compressed_file_that_stays_damaged_is_an_error(world: World) -> None:
    world.write("one")
    damaged = world.folder / "app.log.gz"
    damaged.write_bytes(gzip.compress(b"one\n")[:10])
    assert world.run() == 1  # it may be being written
    os.utime(damaged, (1_700_000_000, 1_700_000_000))
    with pytest.raises(TidelogError, match="does not decode"):
        world.run()


def test_numbered_file_is_known_after_it_was_moved_and_compressed(world: World) -> None:
    """As programs do that compress a file one rotation later."""
    world.write(*lines("older", 3), to="app.log.1")
    world.write(*lines("old", 4))
    assert world.run() == 7
    older = world.folder / "app.log.1"
    (world.folder / "app.log.2.gz").write_bytes(gzip.compress(older.read_bytes()))
    rename(world.context)
    world.write("new")
    world.restarted()
    assert world.run() == 1
    assert world.archived() == sorted([*lines("older", 3), *lines("old", 4), "new"])


def test_compressed_file_is_known_if_the_next_one_was_not_read_before_its_rotation(
    world: World,
) -> None:
    """As in a run a day, right after the rotation."""
    world.write(*lines("older", 3), to="app.log.1")
    assert world.run() == 3
    older = world.folder / "app.log.1"
    (world.folder / "app.log.2.gz").write_bytes(gzip.compress(older.read_bytes()))
    older.unlink()
    world.write(*lines("old", 4), to="app.log.1")
    world.restarted()
    assert world.run() == 4
    assert world.archived() == sorted([*lines("older", 3), *lines("old", 4)])


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("app.log.1", "app.log"),
        ("app.log.gz", "app.log"),
        ("app.log.12.zst", "app.log"),
        ("app.log-20261116", "app.log"),
        ("app.log-20261116.1.gz", "app.log"),
        ("app.log.2026-11-16", "app.log"),
        ("app.log.2026-11-16_13-05", "app.log"),
        ("app.1.log", "app.log"),
        ("app-2026-11-16.log.gz", "app.log"),
        ("app.log.1.gz", "app.log.1"),
    ],
)
def test_rotations_make_these_names(new: str, old: str) -> None:
    assert old in rotated_from(new)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("log.10", "log.1"),
        ("orders-eu", "orders"),
        ("app.log", "app.log"),
        ("app.log.bak", "app.log"),
        ("orders-1", "orders"),
        ("b.txt", "a.txt"),
    ],
)
def test_rotations_do_not_make_these_names(new: str, old: str) -> None:
    assert old not in rotated_from(new)


def test_line_counts_only_with_its_end(world: World) -> None:
    world.write("one")
    with world.context.open("a") as file:
        file.write("tw")
    assert world.run() == 1
    world.write("o")
    assert world.run() == 1
    assert world.archived() == ["one", "two"]


def test_last_line_without_an_end_counts_in_a_file_that_is_finished(world: World) -> None:
    world.context.write_text("one\ntwo")
    (world.folder / "b.log.gz").write_bytes(gzip.compress(b"three\nfour"))
    assert world.run() == 3  # a compressed file is finished
    os.utime(world.context, (1_700_000_000, 1_700_000_000))
    assert world.run() == 1
    assert world.archived() == ["four", "one", "three", "two"]
    assert world.run() == 0
    with world.context.open("a") as file:
        file.write(" and more\n")
    with pytest.raises(InvalidError, match="its line 2 was read without a newline"):
        world.run()


def test_file_that_was_cut_off_is_an_error(world: World) -> None:
    world.write(*lines("old", 5))
    assert world.run() == 5
    os.truncate(world.context, 12)
    world.restarted()
    with pytest.raises(NotFoundError, match="has shrunk to 12 bytes"):
        world.run()
    world.write(*lines("old", 1), to="other.log")
    with pytest.raises(NotFoundError, match="has shrunk"):
        world.run()
    assert world.archived() == sorted([*lines("old", 5), "old 0"])


def test_file_that_was_replaced_is_read_from_its_beginning(world: World) -> None:
    world.write(*lines("old", 5))
    assert world.run() == 5
    world.context.write_text("".join(f"{line}\n" for line in lines("other", 9)))
    world.restarted()
    assert world.run() == 9
    assert world.archived() == sorted([*lines("old", 5), *lines("other", 9)])


def test_file_that_vanished_before_its_end_was_read_is_an_error(world: World) -> None:
    world.write(*lines("old", 2_000))
    world.write("x", to="other.log")
    stop_after_one: list[object] = []

    def vanish(_: object) -> None:
        if not stop_after_one:
            stop_after_one.append(1)
            world.context.rename(world.folder.parent / "elsewhere.log")

    with pytest.raises(NotFoundError, match="its file was removed or replaced before its last"):
        world.run(policy=FilePolicy(max_bytes=1), on_cycle=vanish)
    (world.folder.parent / "elsewhere.log").rename(world.folder / "brought back.log")
    world.run()
    assert world.archived() == sorted([*lines("old", 2_000), "x"])


def vanished(world: World) -> None:
    """A file of 2,000 lines is moved away when 1,000 of them were read."""
    world.write(*lines("old", 2_000))
    world.write("x", to="other.log")
    elsewhere = world.folder.parent / "elsewhere.log"

    def vanish(_: object) -> None:
        if world.context.exists():
            world.context.rename(elsewhere)

    with pytest.raises(NotFoundError, match="its file was removed or replaced before its last"):
        world.run(policy=FilePolicy(max_bytes=1), on_cycle=vanish)


def test_file_that_vanished_is_an_error_in_every_later_run(world: World) -> None:
    """Else a restart would forget that lines were lost."""
    vanished(world)
    for _ in range(2):
        world.restarted()
        with pytest.raises(NotFoundError, match=r"before its last 1000 rows.*--accept-loss"):
            world.run()
    (world.folder.parent / "elsewhere.log").rename(world.context)
    world.restarted()
    assert world.run() == 1_000
    assert world.archived() == sorted([*lines("old", 2_000), "x"])


def test_accepted_loss_of_a_file_that_vanished_is_a_gap(world: World) -> None:
    vanished(world)
    world.restarted()
    assert world.run(accept_loss=True) == 0
    assert world.gaps() == [Gap("1000", "2000", "vanished")]
    world.restarted()
    assert world.run() == 0  # it was accepted
    (world.folder.parent / "elsewhere.log").rename(world.context)
    world.restarted()
    assert world.run() == 1_000
    assert world.gaps() == []  # it came back
    assert world.archived() == sorted([*lines("old", 2_000), "x"])


def test_file_that_vanished_while_its_driver_waited_is_an_error(world: World) -> None:
    """Nothing of it was planned: only its end was seen."""
    world.write(*lines("old", 5))
    assert world.run() == 5
    world.write(*lines("late", 3))
    world.write("x", to="other.log")
    stop = threading.Event()
    policy = FilePolicy()
    world.run(follow=True, policy=policy, stop=stop, on_look=lambda _: stop.set())
    world.context.unlink()
    world.restarted()
    with pytest.raises(NotFoundError, match="before its last 3 rows"):
        world.run()


def test_growing_file_is_read_from_where_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each look at a file that grows would read all of it."""
    world.write(*lines("x" * 1_000, 2_000))
    world.run()
    read: list[int] = []
    get = LocalStore.get

    def counted(self: LocalStore, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = get(self, key, start, end)
        if key.endswith("app.log"):
            read.append(len(data))
        return data

    monkeypatch.setattr(LocalStore, "get", counted)
    world.write("more")
    assert world.run() == 1
    assert sum(read) < 200_000


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_writes_reads_and_rotations_loses_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    world = World(tmp_path_factory.mktemp("rotated"))
    expected: list[str] = []
    world.write("0")
    expected.append("0")
    steps = data.draw(st.lists(st.sampled_from("wwwrrRncg"), min_size=4, max_size=14))
    for turn, step in enumerate(steps):
        if step == "w":
            some = lines(f"step {turn}", data.draw(st.integers(1, 4)))
            world.write(*some)
            expected += some
        elif step == "r":
            world.run()
        elif step == "R":
            world.restarted()
            world.run()
        elif world.context.exists() and step in "ncg":
            number = f"app.log.{turn}"
            if step == "n":
                world.context.rename(world.folder / number)
            elif step == "c":
                shutil.copy(world.context, world.folder / number)
                os.truncate(world.context, 0)
            elif step == "g":
                packed = gzip.compress(world.context.read_bytes())
                (world.folder / f"{number}.gz").write_bytes(packed)
                world.context.unlink()
    world.run()
    assert world.archived() == sorted(expected)
