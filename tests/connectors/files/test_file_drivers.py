"""Several drivers of one folder, and drivers that die: each line comes once."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.files.test_file_rotation import World, lines, rename
from tidelog.connectors.files.source import FilesSource
from tidelog.errors import TidelogError
from tidelog.pipeline.cycle import Cycle


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_two_drivers_do_not_give_one_file_two_names(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one learns what is known, and then looks at a folder that was rotated since."""
    world.write(*lines("old", 5))
    source, others = world.restarted().source, World.again(world)
    assert isinstance(source, FilesSource)
    real = source.track

    def track(known: Any) -> None:
        real(known)
        monkeypatch.setattr(source, "track", real)
        assert others.run() == 5
        rename(world.context)

    monkeypatch.setattr(source, "track", track)
    world.run()
    assert world.run() == 0
    assert world.archived() == lines("old", 5)


@pytest.mark.parametrize("later", [False, True])
def test_file_that_is_renamed_before_anything_is_read_is_found_again(
    world: World, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """Also if it had no line yet when a driver began it."""
    if later:
        (world.folder / "app.log.1").touch()
        assert world.run() == 0
        world.restarted()
    world.write(*lines("old", 2), to="app.log.1")
    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "run", _dies)
        with pytest.raises(KeyboardInterrupt):
            world.run()
    (world.folder / "app.log.1").rename(world.folder / "app.log.2")
    world.restarted()
    assert world.run() == 2
    assert world.archived() == lines("old", 2)


def _dies(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_driver_that_does_not_see_the_files_keeps_no_other_one_from_them(
    world: World, tmp_path: Path
) -> None:
    """As on another machine, where the folder is missing: whichever of the two was first."""
    elsewhere = World.again(world)
    elsewhere._url = f"file:{tmp_path}/missing"
    elsewhere.restarted()
    world.write(*lines("old", 3))
    stop = threading.Event()
    blind = threading.Thread(target=_follow, args=(elsewhere, stop))
    blind.start()
    try:
        for number in range(4):
            assert world.run() == 3, number
            world.write(*lines(str(number), 3))
    finally:
        stop.set()
        blind.join()


def _follow(world: World, stop: threading.Event) -> None:
    """Fails at each look, and stays a member."""
    while not stop.is_set():
        with contextlib.suppress(TidelogError):
            world.run(follow=True, stop=stop)
        stop.wait(0.01)
