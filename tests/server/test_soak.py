"""A server among bad clients for minutes: nothing acknowledged is lost, and good clients notice
little.

First good clients are alone, which gives their latency in quiet. Then come slow clients, idle
tails, clients that leave in the middle, requests without a token, restarts, some by SIGKILL, and
rotations of the good clients' own tokens. ``TIDELOGTEST_SOAK_S`` says for how long.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_processes import running
from tidelog import Home
from tidelog.coordination.tokens import rotate_token
from tidelog.home import create_home, open_home
from tidelog.model.token import Token
from tidelog.settings import Settings

SECONDS = float(os.environ.get("TIDELOGTEST_SOAK_S", "600"))
QUIET_SHARE = 0.2  # of the time, before bad clients come
RESTARTS = 6
GOOD, SLOW, TAILS = 4, 60, 80
PAUSE_S = 0.05  # between two requests of a good client
ROTATE_S = 5.0
MEMORY_MAX = 500 << 20  # bytes of the server
SLOWER_MAX = 3.0  # times, of the 99th percentile of good clients
AROUND_RESTART_S = 3.0  # in which a request may wait for the server to be there


class Soak:
    """A server at one port, its clients, and what they saw."""

    def __init__(self, home: Home) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.stored: dict[tuple[int, int], bytes] = {}  # what was acknowledged, by its position
        self.took: list[tuple[float, float]] = []  # when good requests began, and their seconds
        self.failed = 0
        self.restarts: list[tuple[float, float]] = []  # from the signal until it listens again
        self.memory = 0
        self.errors: list[BaseException] = []
        self.tokens: list[tuple[Token, str]] = [home.tokens.create(["append"]) for _ in range(GOOD)]
        self.leaked = home.tokens.create(["append"])[1]
        self.reader = home.tokens.create(["read"])[1]
        self.process: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.ExitStack()

    # The server.

    def start(self) -> None:
        self._stack.close()
        args = ("--port", str(self.port))
        self.process, _ = self._stack.enter_context(running(self.home.config, *args))

    def restart(self, number: int) -> None:
        assert self.process is not None
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
        self.process.wait(60)
        self.start()
        self.restarts.append((began_s, time.monotonic()))

    def close(self) -> None:
        self._stack.close()

    def watch_memory(self) -> None:
        while not self.stop.wait(0.5):
            with contextlib.suppress(OSError, IndexError, AttributeError):
                status = Path(f"/proc/{self.process.pid}/status").read_text()  # type: ignore[union-attr]
                found = int(status.partition("VmRSS:")[2].split()[0]) << 10
                self.memory = max(self.memory, found)

    # Good clients.

    def send(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for count in itertools.count():
                if self.stop.wait(PAUSE_S):
                    return
                value = b"%d-%d" % (number, count)
                headers = {"authorization": f"Bearer {self.tokens[number][1]}"}
                began_s = time.monotonic()
                try:
                    answer = client.post("/topics/t/events", content=value, headers=headers)
                except httpx.TransportError:
                    self.failed += 1
                    time.sleep(0.1)
                    continue
                if answer.status_code != 201:
                    assert answer.status_code in (503, 504), (answer.status_code, answer.text)
                    self.failed += 1
                    continue
                (at,) = answer.json()["positions"]
                with self.lock:
                    self.stored[at["partition"], at["offset"]] = value
                    self.took.append((began_s, time.monotonic() - began_s))

    def rotate(self) -> None:
        for number in itertools.cycle(range(GOOD)):
            if self.stop.wait(ROTATE_S):
                return
            old = self.tokens[number][0]
            self.tokens[number] = rotate_token(self.home.context, old.id, 20_000)

    @contextlib.contextmanager
    def running(self, *work: Callable[[], None]) -> Iterator[None]:
        def run(each: Callable[[], None]) -> None:
            try:
                each()
            except BaseException as exc:  # noqa: BLE001 - raised by the test
                self.errors.append(exc)

        threads = [threading.Thread(target=run, args=(each,)) for each in work]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
            self.stop.clear()

    @contextlib.contextmanager
    def bad_clients(self) -> Iterator[Any]:
        """Bad clients, and how many connections they have made."""
        spawn = multiprocessing.get_context("spawn")
        count = spawn.Value("q", 0)
        work = BadClients(self.port, self.leaked, self.reader, count)
        process = spawn.Process(target=work)
        process.start()
        try:
            yield count
        finally:
            process.kill()
            process.join()

    def good(self) -> list[Callable[[], None]]:
        return [lambda number=number: self.send(number) for number in range(GOOD)]  # type: ignore[misc]

    def p99_s(self) -> float:
        """Of the good requests so far that no restart delayed."""
        found = sorted(
            took_s
            for began_s, took_s in self.took
            if not any(a - took_s <= began_s <= b + AROUND_RESTART_S for a, b in self.restarts)
        )
        return found[len(found) * 99 // 100]


class BadClients:
    """Clients that no server should mind, in a process of their own, until it is ended."""

    def __init__(self, port: int, append: str, read: str, count: Any) -> None:
        self._port = port
        self._append, self._read = append.encode(), read.encode()
        self._count = count  # of connections

    def __call__(self) -> None:
        threads = [threading.Thread(target=each) for each in (self.trickle, self.tail, self.leave)]
        for thread in threads:
            thread.start()

    def connect(self) -> socket.socket:
        with self._count.get_lock():
            self._count.value += 1
        return socket.create_connection(("127.0.0.1", self._port), timeout=10)

    def trickle(self) -> None:
        """Send heads and bodies byte by byte, and nothing at all."""
        starts = (
            b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\nx: ",
            b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n"
            b"content-length: 8000000\r\n\r\n" % self._append,
            b"",
        )
        open_ones: list[socket.socket] = []
        while True:
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                if len(open_ones) < SLOW:
                    open_ones.append(self.connect())
                    open_ones[-1].sendall(random.choice(starts))
            for raw in list(open_ones):
                try:
                    if random.random() < 0.1:
                        raw.sendall(b"a")
                except OSError:
                    open_ones.remove(raw)
                    raw.close()

    def tail(self) -> None:
        """Open streams, and take no event of them."""
        asked = b"GET /topics/t/tail HTTP/1.1\r\nhost: localhost\r\n"
        asked += b"authorization: Bearer %s\r\n\r\n" % self._read
        open_ones: list[socket.socket] = []
        while True:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if len(open_ones) >= TAILS:
                    open_ones.pop(0).close()
                open_ones.append(self.connect())
                open_ones[-1].sendall(asked)

    def leave(self) -> None:
        """Leave in the middle of a request, and show no token."""
        whole = b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\n"
        whole += b"content-length: 5\r\n\r\nhello"
        while True:
            time.sleep(0.02)
            with contextlib.suppress(OSError), self.connect() as raw:
                raw.sendall(whole[: random.randint(1, len(whole))])
                if random.random() < 0.3:
                    raw.recv(1_000)


@pytest.mark.long
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_good_clients_lose_nothing_among_bad_ones(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("t", 2)
        soak = Soak(home)
        try:
            soak.start()
            with soak.running(*soak.good(), soak.watch_memory):
                time.sleep(SECONDS * QUIET_SHARE)
            quiet_s, calm = soak.p99_s(), len(soak.took)
            soak.took.clear()
            with (
                soak.bad_clients() as bad,
                soak.running(*soak.good(), soak.rotate, soak.watch_memory),
            ):
                for number in range(RESTARTS):
                    time.sleep(SECONDS * (1 - QUIET_SHARE) / (RESTARTS + 1))
                    soak.restart(number)
                time.sleep(SECONDS * (1 - QUIET_SHARE) / (RESTARTS + 1))
            busy_s, count = soak.p99_s(), len(soak.took)
        finally:
            soak.close()
        config = home.config
    print(
        f"{SECONDS:g} s: {calm} good requests in quiet (p99 {quiet_s * 1000:.1f} ms), {count} "
        f"among {bad.value} bad clients (p99 {busy_s * 1000:.1f} ms), {len(soak.restarts)} "
        f"restarts, {soak.failed} failed, server at most {soak.memory >> 20} MiB"
    )
    assert not soak.errors, soak.errors
    with open_home(config) as home:
        found = {
            (partition, event.offset): event.value
            for partition in range(2)
            for event in home.read("t", partition)
        }
    lost = {at for at, value in soak.stored.items() if found.get(at) != value}
    assert not lost, f"{len(lost)} of {len(soak.stored)} acknowledged events are lost"
    assert count > 0
    assert soak.memory < MEMORY_MAX
    assert busy_s <= SLOWER_MAX * quiet_s
