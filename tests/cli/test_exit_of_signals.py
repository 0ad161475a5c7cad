"""A command that a signal ends exits with 128 and its number, unless it was asked to follow."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tidelog
from tests.support.heartbeats import beaten_between_takes
from tidelog import Event
from tidelog.api.topics import Tail
from tidelog.cli.main import cli
from tidelog.cli.terminal import Interruption
from tidelog.home import create_home
from tidelog.journal.scribe import Scribe
from tidelog.log.consumer.consumer import Consumer
from tidelog.pipeline.driver import Driver
from tidelog.playback.play import Playback
from tidelog.settings import load_settings

Run = Callable[..., Result]
KILL = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


@pytest.fixture
def path(tmp_path: Path) -> str:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as home:
        home.create_topic("src")
        home.create_topic("dst")
        home.append("src", [Event(b"%d" % n, id=f"e{n}") for n in range(10)])
    return str(tmp_path / "home")


@pytest.fixture
def run(path: str) -> Run:
    def call(*args: str) -> Result:
        return CliRunner().invoke(cli, ["--home", path, *args])

    return call


PUMP = ("pump", "topic:src", "--topic", "dst", "--no-spark")
ARCHIVE = ("archive", "run", "arc", "--no-spark")
COMMANDS = [
    (Driver, "run", PUMP, False),
    (Driver, "run", (*PUMP, "--follow"), True),
    (Driver, "run", ARCHIVE, False),
    (Driver, "run", (*ARCHIVE, "--follow"), True),
    (Driver, "run", ("archive", "restore", "arc", "--to", "topic:dst", "--no-spark"), False),
    (Driver, "run", ("archive", "backfill", "arc", "--no-spark"), False),
    (Scribe, "once", ("scribe", "--once"), False),
    (Playback, "batches", ("playback", "src", "--start", "-1h", "--to", "null:"), False),
    (Consumer, "poll", ("consume", "src", "--name", "c"), False),
    (Tail, "look", ("tail", "src"), True),
]


@pytest.mark.parametrize("name", KILL)
@pytest.mark.parametrize(("kind", "method", "args", "follows"), COMMANDS)
def test_command_that_a_signal_ends_exits_by_it(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type,
    method: str,
    args: tuple[str, ...],
    follows: bool,
) -> None:
    if args[0] == "archive":
        assert run("archive", "create", "arc", "--source", "topic:src").exit_code == 0
        if args[1] == "restore":
            assert run(*ARCHIVE).exit_code == 0
    real = getattr(kind, method)

    def signalled(self: object, *given: object, **more: object) -> object:
        os.kill(os.getpid(), KILL[name])
        return real(self, *given, **more)

    monkeypatch.setattr(kind, method, signalled)
    done = run(*args)
    assert done.exit_code == (0 if follows else 128 + KILL[name]), done.output


def test_interruption_exits_where_the_work_is_not_done() -> None:
    with pytest.raises(SystemExit) as ended, Interruption(follows=False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    with Interruption(follows=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.finished()
    with Interruption(follows=True):
        os.kill(os.getpid(), signal.SIGTERM)


def test_scribe_once_beside_another_fails(
    run: Run, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "300")
    with tidelog.open(path) as home, beaten_between_takes() as refused:
        holding = home.scribe()._holding
        assert holding.take()
        with holding.beating():
            assert run("scribe", "--once").exit_code == 1
        assert refused.count
        holding.release()
    assert run("scribe", "--once").exit_code == 0


def test_delete_of_a_key_that_no_event_has_fails(run: Run) -> None:
    assert run("delete", "src", "--key", "no-such", "--yes").exit_code == 1
