"""Processes that fork with a home open, for ``tests/home/test_forks.py``; run by ``python -m``.

``python -m tests.support.forks FOLDER SCENARIO...`` works on the homes in ``FOLDER/SCENARIO/home``
and adds one line to ``FOLDER/SCENARIO/acknowledged`` for each event that a process was
acknowledged.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.synchronize import Event as Flag
from pathlib import Path

import pytest

from tidelog import Event, Home
from tidelog.errors import InvalidError
from tidelog.home import open_home

TOPIC = "orders"


class Scene:
    """One folder: a home, and what was acknowledged there."""

    def __init__(self, folder: str) -> None:
        self.home = str(Path(folder) / "home")
        self._acknowledged = Path(folder) / "acknowledged"

    def append(self, home: Home, who: str, events: int) -> None:
        """Append events one by one, and note each that was acknowledged."""
        for number in range(events):
            value = f"{who}-{os.getpid()}-{threading.get_ident()}-{number}"
            home.append(TOPIC, [Event(value.encode())])
            with open(self._acknowledged, "a") as file:
                file.write(value + "\n")

    def work(self, who: str, events: int = 5) -> None:
        """Open the home, append, close."""
        with open_home(self.home) as home:
            self.append(home, who, events)


def in_fork(work: Callable[[], object], *, end: Callable[[int], object] = os._exit) -> int:
    """Run in a child; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - shown, and the exit code tells
            traceback.print_exc()
            os._exit(1)
        end(0)
        os._exit(2)
    return child


def wait_for(*children: int) -> None:
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"child ended with {status}"


def late_child(scene: Scene, opened: Flag, closed: Flag) -> None:
    """Open and append, wait until the parent has closed, and append more."""
    with open_home(scene.home) as home:
        scene.append(home, "child", 5)
        opened.set()
        assert closed.wait(60)
        scene.append(home, "child-later", 20)


def parent_closes_first(scene: Scene, method: str = "fork") -> None:
    context = multiprocessing.get_context(method)
    opened, closed = context.Event(), context.Event()
    home = open_home(scene.home)
    scene.append(home, "before", 5)
    child = context.Process(target=late_child, args=(scene, opened, closed))
    child.start()
    assert opened.wait(60)
    scene.append(home, "parent", 5)
    home.close()
    closed.set()
    child.join()
    assert child.exitcode == 0


def parent_closes_first_forkserver(scene: Scene) -> None:
    parent_closes_first(scene, "forkserver")


def parent_closes_first_spawn(scene: Scene) -> None:
    parent_closes_first(scene, "spawn")


def child_closes_first(scene: Scene) -> None:
    with open_home(scene.home) as home:
        scene.append(home, "before", 5)
        for round_ in range(3):
            wait_for(in_fork(lambda: scene.work("child")))
            scene.append(home, f"parent-{round_}", 3)


def child_exits_normally(scene: Scene) -> None:
    """The child ends its interpreter, which drops all that it inherited."""
    home = open_home(scene.home)
    scene.append(home, "before", 5)
    children = [in_fork(lambda: scene.work("child"), end=sys.exit) for _ in range(2)]
    children.append(in_fork(lambda: None, end=sys.exit))
    scene.append(home, "parent", 10)
    wait_for(*children)
    scene.append(home, "parent-later", 5)
    home.close()


def child_uses_inherited(scene: Scene) -> None:
    """An inherited home is refused before anything is written; a new one works."""
    home = open_home(scene.home)
    scene.append(home, "before", 3)

    def child() -> None:
        with pytest.raises(InvalidError, match="open the home again"):
            scene.append(home, "refused", 1)
        scene.work("child")

    wait_for(in_fork(child))
    scene.append(home, "parent", 3)
    home.close()


def grandchildren(scene: Scene) -> None:
    home = open_home(scene.home)
    scene.append(home, "before", 3)

    def child() -> None:
        with open_home(scene.home) as own:
            scene.append(own, "child", 3)
            grandchild = in_fork(lambda: scene.work("grandchild", 10))
            scene.append(own, "child", 3)
        wait_for(grandchild)

    started = in_fork(child)
    scene.append(home, "parent", 3)
    home.close()
    wait_for(started)


def busy_threads(scene: Scene) -> None:
    """Other threads append all the time while this one forks."""
    home = open_home(scene.home)
    stop = threading.Event()
    failed: list[BaseException] = []

    def append() -> None:
        try:
            while not stop.is_set():
                scene.append(home, "thread", 1)
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that waits
            failed.append(exc)

    threads = [threading.Thread(target=append) for _ in range(3)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(6):
        scene.append(home, "parent", 1)
        children.append(in_fork(lambda: scene.work("child", 3)))
    wait_for(*children)
    stop.set()
    for thread in threads:
        thread.join()
    home.close()
    assert not failed, failed


def unprepared_fork(scene: Scene) -> None:
    """A fork that runs no hooks: the child is refused, and the parent loses nothing."""
    home = open_home(scene.home)
    scene.append(home, "before", 3)
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        try:
            scene.work("refused")
        except InvalidError as exc:
            os._exit(0 if "was open when this process was forked" in str(exc) else 3)
        os._exit(4)
    wait_for(child)
    scene.append(home, "parent", 3)
    home.close()


def fork_in_a_statement(scene: Scene) -> None:
    """A signal handler may fork while its thread is in the middle of a transaction."""
    home = open_home(scene.home)
    scene.append(home, "before", 3)
    inner = home.catalog
    while not hasattr(inner, "_connections"):
        inner = inner.inner  # type: ignore[attr-defined]
    with inner._connections.use() as connection:
        connection.execute("BEGIN IMMEDIATE")
        child = os.fork()
        if child == 0:
            try:
                scene.work("refused")
            except InvalidError as exc:
                sys.exit(0 if "was open when this process was forked" in str(exc) else 3)
            os._exit(4)
        wait_for(child)
        connection.execute("COMMIT")
    scene.append(home, "parent", 3)
    home.close()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        parent_closes_first,
        parent_closes_first_forkserver,
        parent_closes_first_spawn,
        child_closes_first,
        child_exits_normally,
        child_uses_inherited,
        grandchildren,
        busy_threads,
        unprepared_fork,
        fork_in_a_statement,
    )
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        SCENARIOS[name](Scene(f"{sys.argv[1]}/{name}"))
