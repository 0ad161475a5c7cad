"""Sample traffic, and how it is reported."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_run import Run, run_here
from tests.support.serving import Served, serving
from tidelog.api.load_test import Latencies, LoadPlan, LoadReport, run_load
from tidelog.clock import SystemClock
from tidelog.errors import InvalidError, UnavailableError


@pytest.fixture
def tidelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Run:
    return run_here(monkeypatch, capsysbinary, tmp_path)


class CountingClock(SystemClock):
    """Time goes by looks at the clock, of which a request has one or two, however slow it is."""

    def __init__(self, looks_per_s: int) -> None:
        self._looks_per_s = looks_per_s
        self._looks = 0

    def monotonic_s(self) -> float:
        self._looks += 1
        return self._looks / self._looks_per_s


def load(url: str, clock: SystemClock | None = None, **plan: Any) -> LoadReport:
    given = {"seconds": 1.0, "connections": 4, **plan}
    return run_load(LoadPlan(url, **given), clock or SystemClock(), random.Random(1))


def test_what_was_answered_is_stored(served: Served) -> None:
    report = load(served.url, CountingClock(100), topic="t")
    assert report.errors == {}
    assert report.answered == len(served.values()) > 4
    assert report.seconds >= 1
    assert 0 < report.latencies.quantile(0.5) <= report.latencies.quantile(0.99)
    assert report.latencies.quantile(1.0) == pytest.approx(report.latencies.most_s, rel=0.03)
    event = next(served.home.read("t"))
    claps = json.loads(event.value or b"")
    assert claps["MessageType"] == "Claps"
    assert event.key == f"Claps-{claps['MemberId']}-{claps['PostId']}".encode()


def test_a_rate_is_kept_and_pixels_are_sent(served: Served) -> None:
    for seconds in (1.5, 15, 45):  # longer where the machine is too slow for that
        report = load(served.url, topic="t", rate=40, pixel=True, seconds=seconds)
        assert report.answered + report.errors.total() == 40 * seconds
        if report.answered > 10:
            break
    assert report.answered > 10
    assert json.loads(served.values()[0] or b"")["params"]["type"] == "Claps"
    for path, pixel in (("/track/t.gif", True), ("/topics/t/events", False)):
        assert load(served.url + path, seconds=0.3, pixel=pixel).answered


def test_a_server_that_falls_behind_is_seen() -> None:
    """It answers one request in 0.1 s: at 50/s, most are late or are not sent in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(65_536):
                    stop.wait(0.1)
                    connection.sendall(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = load(url, topic="t", rate=50, connections=1, seconds=1.5)
        thread.join(30)
    assert report.answered < 25
    assert report.errors["not sent in time"] == 75 - report.answered
    assert report.latencies.most_s > 0.5, "counted from when it was due"


def test_errors_are_counted_by_what_they_are(tmp_path: Path) -> None:
    with serving(tmp_path, rate=5.0) as served:
        report = load(served.url, CountingClock(500), topic="t")
        assert report.errors["429"] > 0
        assert load(served.url, topic="none", seconds=0.2).errors.keys() <= {"404", "429"}
    with pytest.raises(UnavailableError, match="start the server"):
        load(served.url, topic="t")


def test_connections_that_break_are_made_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        stop = threading.Event()

        def slam() -> None:
            while not stop.is_set():
                try:
                    listener.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=slam)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = load(url, CountingClock(20), topic="t")
        stop.set()
        thread.join()
    assert report.answered == 0
    assert report.errors.total() > 4


@pytest.mark.parametrize(
    ("url", "plan"),
    [
        ("127.0.0.1:8480", {"topic": "t"}),
        ("ftp://host", {"topic": "t"}),
        ("http://host:99999", {"topic": "t"}),
        ("http://host", {}),
        ("http://host", {"topic": "../x"}),
        ("http://host/topics/t/events?x=1", {}),
        ("http://host/a b", {}),
        ("http://host/topics/t/events", {"pixel": True}),
        ("http://host", {"topic": "t", "token": "a\r\nb: c"}),
        ("http://host", {"topic": "t", "connections": 0}),
        ("http://host", {"topic": "t", "rate": -1.0}),
        ("http://host", {"topic": "t", "seconds": 0.0}),
    ],
)
def test_bad_plans_are_refused(url: str, plan: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        load(url, **plan)


def test_latencies_are_kept_within_two_percent() -> None:
    latencies = Latencies()
    for number in range(1, 10_001):
        latencies.add(number / 1_000)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert latencies.quantile(share) == pytest.approx(share * 10, rel=0.03)
    assert latencies.quantile(1.0) == 10
    assert len(latencies.buckets) < 700
    assert Latencies().quantile(0.5) == 0
    latencies.add(0.0)


def test_the_command_shows_latency_and_errors(tidelog: Run, tmp_path: Path) -> None:
    tokens: list[str] = []
    with serving(
        tmp_path, first=lambda home: tokens.append(home.tokens.create(["append"])[1])
    ) as served:
        args = ("load", served.url, "--topic", "t", "--for", "500ms", "--connections", "2")
        args += ("--rate", "10")  # which a machine under load can keep, too
        refused = tidelog(*args, "--json")
        assert refused.code == 1
        assert refused.rows()[0]["errors"].keys() == {"401"}
        assert "give --token" in refused.err
        (tmp_path / "token").write_text(tokens[0] + "\n")
        done = tidelog(*args, "--token", "@token", "--json")
        assert done.code == 0
        row = done.rows()[0]
        assert row["requests"] > 0
        assert row["errors"] == {}
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
        shown = tidelog(*args, "--token", tokens[0], "--pixel").out.decode()
        assert "p99_ms" in shown
        assert "none" in shown
        assert tidelog(*args, "--token", "@missing").code == 1


@pytest.mark.parametrize(("answered", "refused", "code"), [(9, 3, 0), (3, 9, 1), (5, 5, 1)])
def test_the_command_fails_when_most_requests_do(
    answered: int, refused: int, code: int, tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_refused(*given: object) -> LoadReport:
        return LoadReport(1.0, answered, Counter({"401": refused}))

    monkeypatch.setattr("tidelog.cli.commands.serve.load_test", half_refused)
    done = tidelog("load", "http://127.0.0.1:1", "--topic", "t")
    assert done.code == code
    told = f"{refused} of {answered + refused} requests" in done.err and "--token" in done.err
    assert told == bool(code)
