"""A server in a thread of the test's own process, on a free port of loopback, and raw sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tidelog.backends import Telemetry
from tidelog.errors import TidelogError
from tidelog.home import Home, World, create_home
from tidelog.server.options import ServeOptions
from tidelog.server.run import serve
from tidelog.settings import Settings


@dataclass(frozen=True)
class Served:
    """A server that runs, its home, and a client."""

    url: str
    home: Home
    client: httpx.Client
    stop: Callable[[], None]  # asks it to; leaving the context waits for it

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def values(self, topic: str = "t", partition: int = 0) -> list[bytes | None]:
        """What the topic holds, past the server."""
        return [event.value for event in self.home.read(topic, partition)]

    def events(self, topic: str = "t", partition: int = 0, **params: Any) -> dict[str, Any]:
        """A page of events, by the server."""
        path = f"/topics/{topic}/partitions/{partition}/events"
        answer = self.client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        page: dict[str, Any] = answer.json()
        return page

    def post(self, event: Any, topic: str = "t", **headers: str) -> httpx.Response:
        """An event or several as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"/topics/{topic}/events", json=event, headers=named)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    partitions: int = 1,
    telemetry: Telemetry | None = None,
    home: Home | None = None,
    settings: dict[str, Any] | None = None,
    first: Callable[[Home], object] = lambda home: None,
    **options: Any,
) -> Iterator[Served]:
    """A home with a topic ``t`` and what ``first`` makes, and a server in front of it."""
    world = World(environ={}, **({"spans": telemetry} if telemetry else {}))
    with contextlib.ExitStack() as stack:
        if home is None:
            given = Settings(str(folder / "o"), str(folder / "c.sqlite"), **(settings or {}))
            home = stack.enter_context(create_home(given, world=world)[0])
            home.create_topic("t", partitions)
            first(home)
        stop, listening = threading.Event(), threading.Event()
        found: list[str] = []
        failed: list[BaseException] = []

        def note(url: str, is_open: bool) -> None:
            found.append(url)
            listening.set()

        def run() -> None:
            try:
                serve(home, ServeOptions(**{"port": 0, **options}), note, stop)
            except BaseException as exc:  # noqa: BLE001 - raised by the test
                failed.append(exc)
            finally:
                listening.set()

        thread = threading.Thread(target=run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        assert listening.wait(60)
        if failed:
            raise failed[0]
        with httpx.Client(base_url=found[0], timeout=60) as client:
            yield Served(found[0], home, client, stop.set)
    if failed:
        raise failed[0]


def ask(address: tuple[str, int], data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes as they are, and read until the server closes or answers in full."""
    with socket.create_connection(address, timeout=30) as raw:
        raw.sendall(data)
        if half_close:
            raw.shutdown(socket.SHUT_WR)
        return read_answer(raw)


def read_answer(raw: socket.socket) -> bytes:
    """One whole answer, or what came before the end."""
    found = b""
    while True:
        try:
            piece = raw.recv(65_536)
        except ConnectionResetError:
            return found
        if not piece:
            return found
        found += piece
        head, _, body = found.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            name, _, value = line.partition(b": ")
            if name == b"content-length" and len(body) >= int(value):
                return found


def status(answer: bytes) -> int:
    """Of an answer as it came; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def error(answer: httpx.Response) -> dict[str, Any]:
    """What an error says; checks its one shape."""
    shown = answer.json()
    assert set(shown) == {"error"}
    assert set(shown["error"]) == {"kind", "message", "context"}
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = json.loads(answer.content)["error"]
    return found


__all__ = ["Served", "TidelogError", "ask", "error", "read_answer", "serving", "status"]
