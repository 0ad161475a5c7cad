"""A server process can be paused, killed and restarted, and it does not outlive the tests."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import probe
from tests.servers.base import HOST, environment, free_port
from tests.servers.process import Launch, Process, StartError, started

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with started(_launch(tmp_path)) as process:
        yield process


def test_it_answers_when_started_and_is_gone_when_stopped(process: Process) -> None:
    pid = process.pid
    assert process.alive
    _eventually(process.launch.answers)
    process.stop()
    assert not process.alive
    assert not _exists(pid)


def test_a_paused_process_keeps_silent_until_it_is_resumed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.pause()
    assert process.alive
    with monkeypatch.context() as patch:
        patch.setattr(probe, "ANSWER_SECONDS_MAX", 0.2)
        with pytest.raises(TimeoutError):
            process.launch.answers()
    process.resume()
    _eventually(process.launch.answers)


def test_a_paused_process_can_be_stopped(process: Process) -> None:
    pid = process.pid
    process.pause()
    process.stop()
    assert not _exists(pid)


def test_a_killed_process_comes_back_at_the_same_address(process: Process) -> None:
    pid = process.pid
    process.kill()
    with pytest.raises(ConnectionRefusedError):
        process.launch.answers()
    process.restart()
    _eventually(process.launch.answers)
    assert process.pid != pid


def test_what_the_process_started_ends_with_it(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > child; exec {sys.executable} -m http.server $0 --bind {HOST}"
    launch = _launch(tmp_path, command=lambda port: ["sh", "-c", script, str(port)])
    with started(launch):
        child = int((tmp_path / "child").read_text())
        assert _exists(child)
    _eventually(lambda: not _exists(child))


def test_a_process_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    launch = _launch(tmp_path, command=lambda _port: ["sh", "-c", "echo no licence; exit 7"])
    with (
        pytest.raises(StartError, match=r"(?s)fake: ended with exit code 7 .*\nno licence"),
        started(launch),
    ):
        pass


def test_a_process_that_never_answers_is_stopped_and_named(tmp_path: Path) -> None:
    launch = _launch(tmp_path, command=lambda _port: ["sleep", "600"], start_seconds_max=0.3)
    process = Process(launch)
    with pytest.raises(StartError, match=r"fake: no answer in 0 s \(last: ConnectionRefusedError"):
        process.start()
    assert not process.alive


def test_it_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
import signal
from pathlib import Path
from tests.servers.test_process import _launch
from tests.servers.process import Process
process = Process(_launch(Path({str(tmp_path)!r})))
process.start()
print(process.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert _exists(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _eventually(lambda: not _exists(pid))


def _launch(
    folder: Path,
    command: Callable[[int], list[str]] | None = None,
    start_seconds_max: float = 60.0,
) -> Launch:
    """A web server that answers with a listing of its folder."""
    port = free_port()
    web_server = [sys.executable, "-m", "http.server", str(port), "--bind", HOST]
    return Launch(
        name="fake",
        command=command(port) if command else web_server,
        environment=environment(),
        folder=folder,
        answers=lambda: probe.http(port)[0] == 200,
        start_seconds_max=start_seconds_max,
    )


def _exists(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _eventually(holds: Callable[[], bool], seconds_max: float = 60.0) -> None:
    deadline = time.monotonic() + seconds_max
    while not _holds(holds):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _holds(fact: Callable[[], bool]) -> bool:
    try:
        return fact()
    except OSError:  # the server is up, but slow
        return False
