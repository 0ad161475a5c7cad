"""Whether another process is dead: only certain knowledge counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidelog.concurrency import LocalProcesses

OTHER = 4_000_000  # a process id that no process of the test has


def a_proc(folder: Path, space: str = "pid:[1]", me: int | None = None) -> Path:
    """A ``/proc`` that shows this process and no other one, as ``hidepid=2`` does."""
    me = os.getpid() if me is None else me
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text("a-boot\n")
    (folder / str(me) / "ns").mkdir(parents=True)
    os.symlink(space, folder / str(me) / "ns/pid")
    os.symlink("time:[2]", folder / str(me) / "ns/time")
    os.symlink(str(me), folder / "self")
    show(folder, me, 77)
    return folder


def show(proc: Path, pid: int, started: int, state: str = "S", threads: int = 1) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    fields = [state, *["0"] * 16, str(threads), "0", str(started), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")


def mark_of(pid: int, started: int, space: str = "pid:[1]", boot: str = "a-boot") -> str:
    return f"{socket.gethostname()}/{boot}/{space}/time:[2]|{pid}|{started}"


def kernel_says(error: type[OSError] | None) -> Callable[[int, int], None]:
    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (OTHER, 0)
        if error is not None:
            raise error

    return kill


@pytest.mark.parametrize(
    ("error", "dead"), [(PermissionError, False), (None, False), (ProcessLookupError, True)]
)
def test_process_that_proc_hides_is_dead_only_if_the_kernel_says_so(
    tmp_path: Path, error: type[OSError] | None, dead: bool
) -> None:
    processes = LocalProcesses(a_proc(tmp_path), kernel_says(error))
    assert processes.is_dead(mark_of(OTHER, 5)) is dead


def test_process_that_may_not_be_read_is_not_dead(tmp_path: Path) -> None:
    proc = a_proc(tmp_path)
    (proc / str(OTHER) / "stat").mkdir(parents=True)  # reading it fails, also for root
    assert not LocalProcesses(proc, kernel_says(PermissionError)).is_dead(mark_of(OTHER, 5))


def test_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    proc = a_proc(tmp_path)
    processes = LocalProcesses(proc, kernel_says(None))
    show(proc, OTHER, 5)
    assert not processes.is_dead(mark_of(OTHER, 5))
    assert processes.is_dead(mark_of(OTHER, 4))


def test_zombie_is_dead_unless_its_threads_live_on(tmp_path: Path) -> None:
    proc = a_proc(tmp_path)
    processes = LocalProcesses(proc, kernel_says(None))
    show(proc, OTHER, 5, "Z")
    assert processes.is_dead(mark_of(OTHER, 5))
    show(proc, OTHER, 5, "Z", threads=3)
    assert not processes.is_dead(mark_of(OTHER, 5))


@pytest.mark.parametrize(
    "mark",
    [
        mark_of(OTHER, 5, space="pid:[9]"),
        mark_of(OTHER, 5, boot="another-boot"),
        f"elsewhere/a-boot/pid:[1]/time:[2]|{OTHER}|5",
        f"{socket.gethostname()}/a-boot/pid:[1]/time:[3]|{OTHER}|5",
        "",
        "|7|5",
        mark_of(OTHER, 5).rpartition("|")[0] + "|",
    ],
    ids=["namespace", "boot", "host", "time", "empty", "view", "start"],
)
def test_processes_of_other_views_are_not_judged(tmp_path: Path, mark: str) -> None:
    assert not LocalProcesses(a_proc(tmp_path), kernel_says(ProcessLookupError)).is_dead(mark)


def test_proc_of_another_namespace_says_nothing(tmp_path: Path) -> None:
    """As after ``unshare --pid`` without a new ``/proc``: its ids are not ours."""
    proc = a_proc(tmp_path, me=os.getpid() + 1)
    show(proc, os.getpid(), 5)
    processes = LocalProcesses(proc, kernel_says(ProcessLookupError))
    assert processes.mark() == ""
    assert not processes.is_dead(mark_of(OTHER, 5))


def test_living_and_ended_processes_of_this_machine_are_told_apart() -> None:
    processes = LocalProcesses()
    assert processes.mark()
    assert not processes.is_dead(processes.mark())
    code = "from tidelog.concurrency import LocalProcesses as P; print(P().mark()); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        mark = child.stdout.readline().strip()
        assert not processes.is_dead(mark)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.is_dead(mark), "it has ended and was not waited for"
        child.wait()
    assert processes.is_dead(mark)
