"""Nothing holds the event loop: the largest bodies, pages and streams leave it to other requests.

Each step of the loop is measured by the processor time of its thread, so other work on the machine
does not count. The goal is 10 ms; the test allows twice that, for slow machines.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from tests.connectors.test_forward import Target
from tests.support.serving import Served, serving
from tidelog import Forwarder
from tidelog.playback import pages
from tidelog.server.api import read

EVENTS = 250_000
LAST = b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
STEP_S_MAX = 0.02
ROUNDS = 3  # of which one must be within the bound: a step that is slow is so each time


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each step, of a loop of Python's own, which can be measured."""
    found: list[float] = []
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        found.append(time.thread_time() - began_s)

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    monkeypatch.setattr("tidelog.server.run.uvloop.new_event_loop", asyncio.new_event_loop)
    return found


def test_no_request_holds_the_loop(tmp_path: Path, steps: list[float]) -> None:
    lines = b'{"value":"x"}\n' * EVENTS
    typed = {"content-type": "application/x-ndjson"}
    with serving(tmp_path, partitions=2) as served:

        def post(body: bytes, status: int) -> None:
            answer = served.client.post("/topics/t/events", content=body, headers=typed)
            assert answer.status_code == status

        work: dict[str, Callable[[], object]] = {
            "events": lambda: post(lines, 201),
            "a bad last event": lambda: post(lines[: 14 * 150_000] + b"x", 400),
            "empty lines": lambda: post(b"\n" * 8_000_000, 400),
            "a page": lambda: served.events(limit=10_000),
            "a page of the console": lambda: served.client.get("/console/topics/t/events"),
            "a stream": lambda: follow(served, 1_000),
        }
        steps.clear()
        for name, each in work.items():
            for _ in range(ROUNDS):
                each()
                longest_s = max(steps)
                steps.clear()
                if longest_s <= STEP_S_MAX:
                    break
            print(f"{name}: {longest_s * 1000:.1f} ms")
            assert longest_s <= STEP_S_MAX, name


def test_no_update_holds_the_loop(tmp_path: Path, steps: list[float]) -> None:
    """Its body may look like an event, whose parts would take long to make and to free."""
    typed = {"content-type": "application/json"}
    position = b'{"value":1,"topic":[%s[]]}' % (b"[]," * 330_000)
    headers = b'{"value":1,"headers":[%s["",""]]}' % (b'["",""],' * 120_000)
    with serving(tmp_path) as served:
        served.post({"value": "x", "id": "a"})
        for body, status in ((position, 400), (headers, 200)):
            for _ in range(ROUNDS):
                steps.clear()
                answer = served.client.put("/topics/t/ids/a", content=body, headers=typed)
                assert answer.status_code == status
                if max(steps) <= STEP_S_MAX:
                    break
            print(f"an update: {max(steps) * 1000:.1f} ms")
            assert max(steps) <= STEP_S_MAX


def test_no_forwarded_body_holds_the_loop(
    tmp_path: Path, steps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while its events enter the buffer, nor when they are freed."""
    target, count = Target(), 60_000
    monkeypatch.setattr(target, "lot_events", count)
    monkeypatch.setattr(
        "tidelog.server.api.forward.open_forwarder",
        lambda url, environ: Forwarder(url, target.open),
    )
    typed = {"content-type": "application/x-ndjson"}
    with serving(tmp_path, forward=("f=kinesis://clicks",)) as served:
        for _ in range(ROUNDS):
            steps.clear()
            answer = served.client.post(
                "/topics/f/events", content=b'{"value":"x"}\n' * count, headers=typed
            )
            assert answer.json()["forwarded"] == count
            if max(steps) <= STEP_S_MAX:
                break
        print(f"a forwarded body: {max(steps) * 1000:.1f} ms")
        assert max(steps) <= STEP_S_MAX


def test_pages_become_json_one_at_a_time_and_away_from_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many threads that all want to run would leave the loop hardly any time."""
    now, most, threads = 0, 0, set()
    render, join = pages.batch_lines, read._with_events

    def rendered(batch: pa.RecordBatch) -> bytes:
        nonlocal now, most
        now += 1
        most = max(most, now)
        threading.Event().wait(0.01)  # so that others would begin
        now -= 1
        return render(batch)

    def joined(front: bytes, lines: bytes) -> bytes:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return join(front, lines)

    with serving(tmp_path) as served, ThreadPoolExecutor(8) as pool:
        served.post([{"value": "x"}, {"value": "y"}])
        monkeypatch.setattr(pages, "batch_lines", rendered)
        monkeypatch.setattr(read, "_with_events", joined)
        for path in ("/topics/t/partitions/0/events", "/topics/t/events?start=-1h"):
            for answer in pool.map(served.client.get, [path] * 16):
                assert [each["value"] for each in answer.json()["events"]] == ["x", "y"]
    assert (most, threads) == (1, {"tidelog-serve"})


def test_requests_in_one_piece_do_not_hold_the_loop(tmp_path: Path, steps: list[float]) -> None:
    """All are answered, in order, a few parsed at a time."""
    count = 8_000
    one = b"GET /none HTTP/1.1\r\nhost: a\r\n\r\n"
    with serving(tmp_path) as served:
        served.client.get("/healthz")
        for _ in range(ROUNDS):
            steps.clear()
            with socket.create_connection(served.address, timeout=60) as raw:
                sender = threading.Thread(target=raw.sendall, args=(one * count + LAST,))
                sender.start()
                answers = b"".join(iter(lambda: raw.recv(1 << 20), b""))
                sender.join()
            assert answers.count(b"HTTP/1.1 404") == count
            assert answers.endswith(b'"status":"ok"}')
            if max(steps) <= STEP_S_MAX:
                break
        print(f"{count} requests in one piece: {max(steps) * 1000:.1f} ms")
        assert max(steps) <= STEP_S_MAX


def test_the_first_use_of_a_page_does_not_hold_the_loop(tmp_path: Path, steps: list[float]) -> None:
    """Its template is compiled then."""
    with serving(tmp_path) as served:
        served.client.get("/healthz")
        for path in ("/console/topics/t/events", "/console/tokens", "/console/nowhere"):
            steps.clear()
            served.client.get(path)
            assert max(steps) <= STEP_S_MAX, path


def follow(served: Served, events: int) -> None:
    with served.client.stream("GET", "/topics/t/tail?from=earliest") as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data"))
        for _ in range(events):
            next(lines)
