"""Real servers, killed and stopped under load: what was answered is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidelog
from tests.support.cli_run import TIDELOG
from tidelog.home import create_home
from tidelog.settings import Settings

CLIENTS = 6
WITHOUT_END = """
from tidelog.server.http import limits
limits.WAIT_S_MAX = limits.STOP_S = 3_600  # what waits neither ends by itself nor is cut off
"""


@contextlib.contextmanager
def running(
    home: str, *args: str, first: str = "", **environ: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``tidelog serve`` in a process of its own, and its URL. ``first`` is code to run before."""
    *python, code = TIDELOG
    process = subprocess.Popen(
        [*python, f"{first}\n{code}", "--home", home, "serve", "--port", "0", "--json", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environ},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read().decode() if process.stderr else ""
        yield process, json.loads(line)["url"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def home(tmp_path: Path) -> str:
    with create_home(Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite")))[0] as made:
        made.create_topic("t", 2)
        return made.config


class Crowd:
    """Clients that append until the server is gone, each by posts and pixels in turns."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.stored: list[tuple[int, int, str]] = []  # what was answered, with where it stands
        self.refused: list[int] = []  # statuses other than success
        self.sent = 0
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.stored) < count:
            assert time.monotonic() < deadline, "the server does not get on"
            time.sleep(0.01)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, client: int) -> None:
        number = 0
        with (
            httpx.Client(base_url=self._url, timeout=30) as session,
            contextlib.suppress(httpx.TransportError),
        ):
            while True:
                number += 1
                name = f"{client}-{number}"
                self.sent += 1
                send = self._post if number % 2 else self._pixel
                if not send(session, name):
                    return

    def _post(self, session: httpx.Client, name: str) -> bool:
        answer = session.post("/topics/t/events", json={"value": name, "key": name})
        if answer.status_code != 201:
            self.refused.append(answer.status_code)
            return False
        at = answer.json()["positions"][0]
        self.stored.append((at["partition"], at["offset"], name))
        return True

    def _pixel(self, session: httpx.Client, name: str) -> bool:
        answer = session.get("/track/t.gif", params={"id": name})
        if answer.status_code != 200:
            self.refused.append(answer.status_code)
            return False
        partition, offset = answer.headers["tidelog-position"].split("/")[1:]
        self.stored.append((int(partition), int(offset), name))
        return True


def check(home: str, stored: list[tuple[int, int, str]]) -> int:
    """All that was answered is there, at its position, and offsets have no holes; how many."""
    found: dict[tuple[int, int], str] = {}
    with tidelog.open(home) as opened:
        for partition in range(2):
            events = list(opened.read("t", partition))
            assert [event.offset for event in events] == list(range(len(events)))
            for event in events:
                name = event.id or (event.value or b"").decode()
                found[partition, event.offset or 0] = name
        report = opened.verify("t")
    assert report.errors == 0
    for partition, offset, name in stored:
        assert found.get((partition, offset)) == name
    assert len(set(found.values())) == len(found), "nothing is there twice"
    return len(found)


@pytest.mark.parametrize("wait_for", [1, 300])
def test_nothing_that_was_answered_is_lost_when_it_is_killed(home: str, wait_for: int) -> None:
    with running(home) as (process, url):
        crowd = Crowd(url)
        crowd.wait_for(wait_for)
        process.kill()
        process.wait(30)
        crowd.join()
    assert crowd.refused == []
    assert check(home, crowd.stored) <= crowd.sent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stop_under_load_ends_well_and_answers_what_it_took(home: str, number: int) -> None:
    with running(home) as (process, url):
        crowd = Crowd(url)
        crowd.wait_for(150)
        process.send_signal(number)
        assert process.wait(60) == 0
        crowd.join()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert crowd.refused == []
    assert check(home, crowd.stored) == len(crowd.stored), "what was taken was also answered"


def wait_until(url: str, metric: str) -> None:
    deadline = time.monotonic() + 60
    while metric not in httpx.get(f"{url}/metrics", timeout=60).text:
        assert time.monotonic() < deadline, metric
        time.sleep(0.05)


def test_a_stop_ends_long_polls_and_tails_and_flushes_what_is_buffered(home: str) -> None:
    with running(home, first=WITHOUT_END, TIDELOG_LINGER_MS="3600000") as (process, url):
        ended: list[Any] = []

        def poll() -> None:
            path = "/topics/t/partitions/0/events?wait=3600"
            ended.append(httpx.get(url + path, timeout=600).json()["events"])

        def tail() -> None:
            with httpx.stream("GET", f"{url}/topics/t/tail", timeout=600) as answer:
                ended.append([line for line in answer.iter_lines() if line.startswith("data")])

        waiting = [threading.Thread(target=call) for call in (poll, tail)]
        for thread in waiting:
            thread.start()
        wait_until(url, "tidelog_waiting 2.0")
        assert httpx.get(f"{url}/track/t.gif?ack=0", timeout=60).status_code == 200
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as half:
            half.sendall(
                b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx"
            )
            wait_until(url, "tidelog_requests_in_flight 4.0")  # these three, and this question
            process.terminate()
            refused = half.recv(1_000)
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"\r\nretry-after: 1\r\n" in refused
        for thread in waiting:
            thread.join(60)
        assert process.wait(60) == 0
        assert len(ended) == 2
    with tidelog.open(home) as opened:
        assert sum(1 for p in range(2) for _ in opened.read("t", p)) == 1


def test_an_idle_server_ends_at_once_and_says_where_it_listened(home: str) -> None:
    process = subprocess.Popen(
        [*TIDELOG, "--home", home, "serve", "--port", "0"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.readline().decode()
    assert first.startswith("Listening on http://127.0.0.1:")
    assert process.stdout.readline() == (
        b"No token is needed on this machine until you create one: `tidelog token create`.\n"
    )
    host, port = first.split("//")[1].strip().split(":")
    said = process.stdout.readline().decode()
    assert said == f"Console: http://{host}:{port}/   API: http://{host}:{port}/docs\n"
    with socket.create_connection((host, int(port))):  # one that says nothing holds up no stop
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == b""


def test_several_servers_of_one_home_share_it(home: str) -> None:
    with running(home) as (_, one), running(home) as (_, two):
        answers = [
            httpx.post(
                f"{url}/topics/t/events",
                json={"value": "x"},
                headers={"idempotency-key": "same"},
                timeout=60,
            ).json()
            for url in (one, two, one)
        ]
        assert answers[0] == answers[1] == answers[2]
        poll = "/topics/t/partitions/{}/events?wait=20"
        at = answers[0]["positions"][0]["partition"]
        page = httpx.get(two + poll.format(at), timeout=60).json()
        assert [event["value"] for event in page["events"]] == ["x"]


def test_without_its_libraries_it_says_what_to_install(home: str) -> None:
    script = (
        "import sys; sys.modules['starlette'] = None; sys.modules['uvloop'] = None\n"
        "from tidelog.cli.main import run; run()"
    )
    commands = (["serve"], ["load", "http://127.0.0.1:1", "--topic", "t"])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, "--home", home, *command], stderr=subprocess.PIPE
        )
        for command in commands
    ]
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert b"pip install 'tidelog[serve]'" in err


@pytest.mark.long
def test_nothing_is_lost_over_many_kills(home: str) -> None:
    stored: list[tuple[int, int, str]] = []
    for number in range(20):
        with running(home) as (process, url):
            crowd = Crowd(url)
            crowd.wait_for(20 * number)
            process.kill()
            process.wait(30)
            crowd.join()
            stored += crowd.stored
    with tidelog.open(home) as opened:
        found = {
            (partition, event.offset): event.id or (event.value or b"").decode()
            for partition in range(2)
            for event in opened.read("t", partition)
        }
    for partition, offset, name in stored:
        assert found[partition, offset] == name
