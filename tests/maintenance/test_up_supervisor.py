"""What keeps programs running: waits that grow, the last words, and an end that nobody escapes."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

from tests.support.up_run import is_gone
from tidelog.clock import SystemClock
from tidelog.maintenance.up_supervisor import Program, ProgramState, Supervisor


class NotingClock(SystemClock):
    """Knows what time it told last: that by which the supervisor decided."""

    told_s = 0.0

    def monotonic_s(self) -> float:
        self.told_s = super().monotonic_s()
        return self.told_s


class Kept:
    """A supervisor of one program, and what it told."""

    def __init__(self, script: str, grace_s: float = 60.0) -> None:
        self.changes: list[tuple[float, ProgramState]] = []
        self.lines: list[tuple[str, bool]] = []
        clock = NotingClock()
        self.supervisor = Supervisor(
            clock,
            random.Random(1),
            lambda running: self.changes.append((clock.told_s, running)),
            lambda _, text, is_complaint: self.lines.append((text, is_complaint)),
            grace_s,
        )
        self.supervisor.add(Program("it", [sys.executable, "-c", script]))

    def tick_until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            self.supervisor.tick()
            assert time.monotonic() < deadline

    def states(self) -> list[str]:
        return [running.state for _, running in self.changes]


def test_one_that_always_fails_is_started_again_ever_more_rarely() -> None:
    kept = Kept("import sys; print('why', file=sys.stderr); sys.exit(3)")
    kept.tick_until(lambda: kept.states().count("failed") == 3)
    kept.supervisor.stop()
    failed = [at for at, running in kept.changes if running.state == "failed"]
    started = [at for at, running in kept.changes if running.state == "running"]
    waits = [begun - ended for ended, begun in zip(failed, started[1:], strict=False)]
    assert waits[0] > 0.24
    assert waits[1] > 0.48
    assert kept.changes[-1][1].error == "why"
    assert [running.restarts for _, running in kept.changes if running.state == "running"] == [
        0,
        1,
        2,
    ]


def test_a_program_that_is_not_there_is_told_and_tried_again() -> None:
    kept = Kept("")
    kept.supervisor.change(Program("it", ["/nowhere/at/all"]))
    kept.tick_until(lambda: kept.states().count("failed") == 2)
    assert "No such file" in kept.changes[0][1].error
    kept.supervisor.stop()


def test_one_that_does_not_listen_to_sigterm_is_killed_with_what_it_started() -> None:
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); time.sleep(600)"
    )
    kept = Kept(script, grace_s=0.5)
    kept.tick_until(lambda: kept.lines)
    pids = [int(kept.lines[0][0]), kept.changes[0][1].pid]
    began = time.monotonic()
    kept.supervisor.stop()
    assert 0.4 < time.monotonic() - began < 60
    assert kept.states()[-1] == "stopped"
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_line_is_heard_also_the_last_and_bytes_that_are_no_text() -> None:
    script = (
        "import os; os.write(1, b'one\\n\\xff\\n'); os.write(1, b'x' * 3000000 + b'\\n');"
        "os.write(2, b'last words')"
    )
    kept = Kept(script)
    kept.tick_until(lambda: "failed" in kept.states())
    kept.supervisor.stop()
    said = [text for text, is_complaint in kept.lines if not is_complaint]
    assert said[:2] == ["one", "\N{REPLACEMENT CHARACTER}"]
    assert len(said[2]) == 3_000_000
    assert ("last words", True) in kept.lines
    assert kept.changes[-1][1].error == "last words"


def test_a_stop_waits_for_who_finishes_and_hears_it() -> None:
    script = (
        "import signal, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('done'), sys.exit()));"
        "print('up', flush=True); time.sleep(600)"
    )
    kept = Kept(script)
    kept.tick_until(lambda: kept.lines)
    assert os.getpgid(kept.changes[0][1].pid) == kept.changes[0][1].pid
    kept.supervisor.stop()
    assert ("done", False) in kept.lines
    kept.supervisor.tick()
    assert kept.states() == ["running", "stopped"]
