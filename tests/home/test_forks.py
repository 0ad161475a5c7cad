"""Every acknowledged event survives forks, in every order of opening and closing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import ROOT
from tests.support.forks import SCENARIOS, TOPIC
from tests.support.homes import a_catalog, a_store
from tidelog.catalog import sqlite_connections
from tidelog.catalog.base import Put
from tidelog.home import create_home, open_home
from tidelog.settings import load_settings
from tidelog.store import local

STARTED = ("parent_closes_first_forkserver", "parent_closes_first_spawn")  # load all modules again
FORKED = tuple(name for name in SCENARIOS if name not in STARTED)


def run_scenarios(folder: Path, *names: str) -> None:
    """Run them in a process of their own, and count what each was acknowledged."""
    for name in names:
        home, _ = create_home(load_settings(str(folder / name / "home"), {}, folder))
        home.create_topic(TOPIC)
        home.close()
    command = [sys.executable, "-m", "tests.support.forks", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        acknowledged = (folder / name / "acknowledged").read_text().split()
        with open_home(folder / name / "home") as home:
            found = [str(event.value, "ascii") for event in home.read(TOPIC)]
            report = home.verify(TOPIC)
        assert sorted(found) == sorted(acknowledged), name
        assert not any(value.startswith("refused") for value in found), name
        assert (report.errors, report.orphans) == (0, 0), name


def test_acknowledged_events_survive_a_fork(tmp_path: Path) -> None:
    run_scenarios(tmp_path, *FORKED)


@pytest.mark.long
@pytest.mark.parametrize("name", STARTED)
def test_acknowledged_events_survive_other_ways_to_start(name: str, tmp_path: Path) -> None:
    run_scenarios(tmp_path, name)


@pytest.mark.long
def test_acknowledged_events_survive_many_rounds_of_forks(tmp_path: Path) -> None:
    for number in range(20):
        run_scenarios(tmp_path / str(number), *FORKED)


def test_no_connection_is_open_in_a_forked_child(tmp_path: Path) -> None:
    catalog = a_catalog(f"sqlite://{tmp_path}/catalog.sqlite", create=True)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    list(catalog.scan("p"))
    child = os.fork()
    if child == 0:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        opened = [link for link in links if str(tmp_path) in str(os.path.realpath(link))]
        os._exit(len(opened))
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert catalog.get("p", "a") is not None
    catalog.close()


def test_fork_waits_for_a_connection_that_an_ending_thread_closes(tmp_path: Path) -> None:
    closing, may_end = threading.Event(), threading.Event()

    class Slow:
        def close(self) -> None:
            closing.set()
            may_end.wait(60)

    def drop() -> None:
        held = sqlite_connections._ThreadConnection(tmp_path / "catalog.sqlite", Slow())  # type: ignore[arg-type]
        del held

    dropping = threading.Thread(target=drop)
    dropping.start()
    assert closing.wait(60)
    forked = threading.Event()

    def fork() -> None:
        sqlite_connections._process.before_fork()
        forked.set()
        sqlite_connections._process.after_in_parent()

    forking = threading.Thread(target=fork)
    forking.start()
    assert not forked.wait(0.3), "SQLite is in the middle of closing a file"
    may_end.set()
    assert forked.wait(60)
    forking.join()
    dropping.join()


@contextlib.contextmanager
def a_child() -> Iterator[None]:
    """Forks a child that lives as long as the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)


@contextlib.contextmanager
def a_child_of_a_lock(
    monkeypatch: pytest.MonkeyPatch, slow: str, work: Callable[[], object]
) -> Iterator[None]:
    """Forks while ``work`` is in a call of ``os``; the block runs when it has ended."""
    holds, go_on = threading.Event(), threading.Event()
    real = getattr(os, slow)

    def waiting(*args: Any, **how: Any) -> None:
        holds.set()
        assert go_on.wait(60)
        real(*args, **how)

    monkeypatch.setattr(local.os, slow, waiting)
    worker = threading.Thread(target=work)
    worker.start()
    assert holds.wait(60)
    with a_child():
        go_on.set()
        worker.join()
        yield


def check_free(lock: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the child holds it
    os.close(descriptor)


def test_a_child_does_not_keep_the_lock_of_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path.as_uri())
    store.put("a", b"1")
    with a_child_of_a_lock(monkeypatch, "unlink", lambda: store.delete(["a"])):
        check_free(tmp_path / ".tidelog" / "lock")


def test_child_does_not_keep_the_lock_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path.as_uri())
    store.put("a/b", b"1")
    with a_child_of_a_lock(monkeypatch, "link", lambda: store.put("c/d", b"2")):
        check_free(tmp_path / ".tidelog" / "folders")
        store.delete(["a/b"])
