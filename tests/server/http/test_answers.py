"""What every answer has, what the access log has of it, and bodies that were compressed."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.serving import Served, ask, error, read_answer, serving, status
from tests.support.waiting import until
from tidelog import InvalidError
from tidelog.cli.commands.serve import serve
from tidelog.cli.commands.up import _FLAGS, _PASSED, _REPEATED, _of_server, up
from tidelog.clock import SystemClock
from tidelog.errors import UnavailableError
from tidelog.server.http.logs import AccessLog, ErrorLog

PATHS = (
    "/topics",
    "/topics/none",
    "/nowhere",
    "/track/t.gif",
    "/healthz",
    "/",
    "/console/static/x",
)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def test_every_answer_has_an_id_and_forbids_guesses(served: Served) -> None:
    ids = set()
    for path in PATHS:
        answer = served.client.get(path)
        ids.add(answer.headers["x-request-id"])
        assert answer.headers["x-content-type-options"] == "nosniff", path
        wanted = "cross-origin" if path.startswith("/track") else "same-origin"
        assert answer.headers["cross-origin-resource-policy"] == wanted, path
    refused = ask(served.address, b"GARBAGE\r\n\r\n")  # without the app
    assert b"\r\nx-content-type-options: nosniff\r\n" in refused
    ids.add(refused.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode())
    assert len(ids - {""}) == len(PATHS) + 1
    forged = served.client.get("/topics", headers={"x-request-id": "mine"})
    assert forged.headers["x-request-id"] != "mine", "only a proxy may choose"


def test_the_access_log_has_each_request_and_no_token(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    texts: list[str] = []

    def first(home: object) -> None:
        texts.extend(home.tokens.create([scope])[1] for scope in ("read", "pixel"))  # type: ignore[attr-defined]

    with serving(tmp_path, first=first, behind_proxy=True, access_log=str(log)) as served:
        read, pixel = texts
        headers = {"authorization": f"Bearer {read}", "x-forwarded-for": "1.1.1.1, 9.9.9.9"}
        served.client.get("/topics", headers={**headers, "x-request-id": "from-proxy-1"})
        served.client.get(f"/track/t.gif?token={pixel}&a=1")
        served.client.get("/topics/%1b%5b2J%0a")
        served.client.get("/topics", headers={"x-request-id": "bad id!"})
        served.client.get("/%C2%9B2J%E2%80%AE%7F%F3%A0%80%81")
        for method in ("GET", "PATCH"):
            served.client.request(method, "/topics/t/ids/person%40example")
        for path in (
            *(b"//topics/t/ids/person", b"/v1/topics/t/IDs/person", b"/t/ids;person"),
            *(b"/topics/t/id/person", b"/topics/t/events/person", b"/console/topics/t/ids/person"),
            *(b"/console/topic/t/person", b"/track/t/person.gif", b"/topics/t/events"),
        ):
            ask(served.address, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    text = log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert read not in text
    assert pixel not in text
    assert text.replace("\n", "").isprintable(), "what a terminal would obey"
    assert "person" not in text, "an id may be personal data, and outlive its erasure here"
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["status"] for row in rows] == [
        *(200, 200, 401, 401, 404, 401, 405),
        *([404] * 8),
        401,
    ]
    assert rows[4]["path"] == "/\x9b2J\u202e\x7f\U000e0001"
    assert [row["path"] for row in rows[5:7]] == ["/topics/t/ids/*"] * 2
    assert [row["path"] for row in rows[8:]] == [
        *("/v1/topics/t/IDs/*", "/t/ids*", "/topics/t/*", "/topics/t/*"),
        *("/console/topics/t/ids/*", "/console/topic/t/*", "/track/t/*", "/topics/t/events"),
    ]
    assert rows[0]["id"] == "from-proxy-1"
    assert rows[0]["client"] == "9.9.9.9"
    assert rows[0]["token"] == read.split("_")[1]
    assert rows[1]["operation"] == "track"
    assert rows[3]["id"] != "bad id!"
    assert all(row["ms"] >= 0 for row in rows)


def test_refusals_have_the_proxys_id_and_a_line_in_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    texts: list[str] = []

    def first(home: object) -> None:
        texts.append(home.tokens.create(["admin"])[1])  # type: ignore[attr-defined]

    def asked(line: str, name: str, *more: str) -> bytes:
        lines = [f"{line} HTTP/1.1", "Host: x", f"X-Request-Id: {name}", *more]
        return "\r\n".join([*lines, f"Authorization: Bearer {texts[0]}", "", ""]).encode()

    with serving(tmp_path, first=first, behind_proxy=True, access_log=str(log)) as served:
        append, chunked = "POST /topics/t/events", "Transfer-Encoding: chunked"
        for sent in (
            asked("GET http://me:pw@x/topics/t/%69ds/person?q=person#1", "before-app"),
            asked(append, "in-app", chunked) + b"Z\r\n",
            asked("GET /healthz", "ok") + asked(append, "later", chunked) + b"Z\r\n",
        ):
            with socket.create_connection(served.address, timeout=30) as raw:
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                found = b""
                while piece := raw.recv(65_536):
                    found += piece
            ids = re.findall(rb"x-request-id: (\S+)", found)
            assert ids == re.findall(rb"X-Request-Id: (\S+)", sent)
        page = served.client.get("/metrics", headers={"authorization": f"Bearer {texts[0]}"})
        assert 'tidelog_requests_total{operation="none",status="400"} 2.0' in page.text
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(row["id"], row["status"], row["path"]) for row in rows[:-1]} == {
        ("before-app", 400, "/topics/t/ids/*"),
        ("in-app", 400, "/topics/t/events"),
        ("ok", 200, "/healthz"),
        ("later", 400, "/topics/t/events"),
    }


def test_a_full_disk_leaves_no_half_of_a_line_in_the_access_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real, full = tmp_path / "access.log", os.write, threading.Event()

    def write(file: int, data: bytes) -> int:
        if not full.is_set():
            return real(file, data)
        if len(data) <= 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:-50])

    monkeypatch.setattr(os, "write", write)
    access = AccessLog(str(log), SystemClock())
    rest = {"client": "me", "token": None, "method": "GET", "status": 200, "ms": 1.0}

    def note(*ids: str) -> None:
        for each in ids:
            access.note(id=each, path="/topics", operation="topics", **rest)

    note("1")
    until(lambda: log.stat().st_size > 0)
    full.set()
    for number in range(3):  # each write counts its own lines, and those before it
        dropped = access._dropped
        note(*(f"{number} {each}" for each in "abc"))
        until(lambda dropped=dropped: access._dropped > dropped and not access._lines)  # type: ignore[misc]
    full.clear()
    note("5")
    access.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    given = {f"{number} {each}" for number in range(3) for each in "abc"}
    lost = given - {row["id"] for row in rows}
    assert len(lost) >= 3
    assert sum(row.get("dropped", 0) for row in rows) == len(lost)


def test_an_access_log_goes_on_after_standard_error_was_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        is_full = True
        text = ""

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    full = Full()
    log = AccessLog("-", SystemClock())
    fields = {"operation": "get", "status": 200}
    monkeypatch.setattr(sys, "stderr", full)
    log.note(path="/lost", **fields)
    until(lambda: log._dropped == 1)
    full.is_full = False
    log.note(path="/kept", **fields)
    until(lambda: "/kept" in full.text)
    log.close()
    assert json.loads(full.text)["dropped"] == 1


@contextlib.contextmanager
def unread_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes standard error a pipe that is full, as nothing reads it. Gives its other end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4_096)
    os.set_blocking(writer, True)
    with open(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        try:
            yield reader
        finally:
            drained(reader)  # so that what waits can end
    os.close(reader)


def drained(reader: int) -> bytes:
    """All that is in a pipe now."""
    os.set_blocking(reader, False)
    found = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            found += os.read(reader, 65_536)
    return found


def test_no_error_waits_for_a_standard_error_that_nothing_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = ErrorLog(SystemClock())

    def add(message: str) -> None:
        thread = threading.Thread(target=log.add, args=(UnavailableError(message),), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for the reader"

    with unread_pipe(monkeypatch) as reader:
        add("lost")
        drained(reader)
        add("x" * 10_000)
        add("kept")
        long, kept = drained(reader).decode().splitlines()
    assert long.startswith("error: unavailable: xxx")
    assert len(long) < 4_096, "what a pipe takes at once"
    assert kept.startswith("error: unavailable: kept")


def test_an_access_log_drops_lines_for_a_standard_error_that_nothing_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidelog.server.http.logs._ROOM_S", 0.1)
    fields = {"operation": "get", "status": 200}
    with unread_pipe(monkeypatch) as reader:
        log = AccessLog("-", SystemClock())
        log.note(path="/lost", **fields)
        until(lambda: log._dropped == 1, seconds=20)
        drained(reader)
        log.note(path="/kept/" + "\U000e0001" * 500, **fields)
        log.close()
        rows = drained(reader).splitlines()
    row = json.loads(next(each for each in rows if b"/kept" in each))
    assert row["dropped"] == 1
    assert max(map(len, rows)) < 4_096


def test_an_access_log_goes_on_after_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "access.log"
    log = AccessLog(str(file), SystemClock())
    fields = {"operation": "get", "status": 200}
    real_line, real_write, failed = log._line, os.write, threading.Event()

    def write(to: int, data: bytes) -> int:
        if not failed.is_set():
            failed.set()
            raise MemoryError
        return real_write(to, data)

    def line(given: dict[str, Any], dropped: int) -> bytes:
        if given["path"] == "/lost":
            raise MemoryError
        return real_line(given, dropped)

    monkeypatch.setattr(log, "_line", line)
    monkeypatch.setattr(os, "write", write)
    log.note(path="/lost", **fields)
    log.note(path="/refused", **fields)
    assert failed.wait(60)
    log.note(path="/kept", **fields)
    until(lambda: "/kept" in file.read_text())
    log.close()
    assert json.loads(file.read_text())["dropped"] == 2


def test_an_access_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidError, match="access log"),
        serving(tmp_path, access_log=str(tmp_path / "none" / "x.log")),
    ):
        pass


def test_compressed_bodies_are_inflated_up_to_the_bound(tmp_path: Path) -> None:
    with serving(tmp_path, body_bytes_max=200_000) as served:
        post = served.client.post
        for name, packed in (("gzip", gzip.compress), ("GZIP", gzip.compress), ("zstd", zstd)):
            typed = {"content-encoding": name, "content-type": "application/json"}
            body = packed(b'{"value":"hello"}')
            assert post("/topics/t/events", content=body, headers=typed).status_code == 201
            bomb = post("/topics/t/events", content=packed(b"x" * 50_000_000), headers=typed)
            assert (bomb.status_code, error(bomb)["kind"]) == (413, "too_large")
            for broken in (body[:-9], b"plain", b""):
                answer = post("/topics/t/events", content=broken, headers=typed)
                assert answer.status_code == 400, (name, broken)
        two = gzip.compress(b'{"val') + gzip.compress(b'ue":"hello"}')
        typed = {"content-encoding": "gzip", "content-type": "application/json"}
        assert post("/topics/t/events", content=two, headers=typed).status_code == 201
        many = gzip.compress(b"") * 11_000 + gzip.compress(b'{"value":"hello"}')  # 220 kB at most
        with serving(tmp_path / "large", body_bytes_max=1_000_000) as large:
            answer = large.client.post("/topics/t/events", content=many, headers=typed)
            assert answer.status_code == 400, "each empty member costs time"
        for name in ("br", "deflate", "gzip, gzip", "x"):
            answer = post("/topics/t/events", content=b"x", headers={"content-encoding": name})
            assert answer.status_code == 415, name
        assert served.values() == [b"hello"] * 4
        served.home.append("t", [tidelog_event()])
        put = served.client.put
        packed = gzip.compress(b"new")
        changed = put("/topics/t/ids/1", content=packed, headers={"content-encoding": "gzip"})
        assert changed.status_code == 200
        assert served.home.get("t", "1").value == b"new"


def tidelog_event() -> object:
    from tidelog import Event

    return Event(b"old", id="1")


def test_http_1_1_needs_one_host(served: Served) -> None:
    assert status(ask(served.address, b"GET /topics HTTP/1.1\r\n\r\n")) == 400
    two = b"GET /topics HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n"
    assert status(ask(served.address, two)) == 400
    assert status(ask(served.address, b"GET /topics HTTP/1.0\r\n\r\n")) == 200
    for host in (
        b"local host",
        b"localhost/x",
        b"localhost:80:80",
        b"[::1",
        b"a@localhost",
        b"\xff",
    ):
        sent = b"GET /healthz HTTP/1.1\r\nhost: %s\r\n\r\n" % host
        assert status(ask(served.address, sent)) == 400, host
    for host in (b"localhost", b"127.0.0.1:80", b"[::1]:80", b"log.example", b""):
        sent = b"GET /healthz HTTP/1.1\r\nhost: %s\r\n\r\n" % host
        assert status(ask(served.address, sent)) == 200, host


def test_http_1_0_keeps_a_connection_that_both_sides_want_to_keep(served: Served) -> None:
    """As `ab -k` does."""
    kept = b"GET /healthz HTTP/1.0\r\nconnection: Keep-Alive\r\n\r\n"
    with socket.create_connection(served.address, timeout=60) as raw:
        for _ in range(3):
            raw.sendall(kept)
            answer = read_answer(raw)
            assert status(answer) == 200
            assert b"connection: keep-alive\r\n" in answer
        raw.sendall(kept.replace(b"Keep-Alive", b"close"))
        assert b"connection: close\r\n" in read_answer(raw)
        assert raw.recv(1) == b""
    answer = ask(served.address, kept.replace(b"connection: Keep-Alive\r\n", b""))
    assert b"connection: close\r\n" in answer
    with socket.create_connection(served.address, timeout=60) as raw:  # its length is not known
        raw.sendall(kept.replace(b"/healthz", b"/topics/t/tail"))
        assert b"connection: close\r\n" in raw.recv(65_536)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/topics/t/partitions/0/events", "GET, HEAD"),
        ("POST", "/topics/t/ids/a/events", "DELETE, GET, HEAD, PUT"),
        ("POST", "/topics", "GET, HEAD"),
        ("PUT", "/topics/t/events", "GET, HEAD, POST"),
        ("HEAD", "/topics/t/tail", "GET"),
        ("HEAD", "/track.gif", "GET"),
        ("POST", "/track/t.gif", "GET"),
        ("DELETE", "/healthz", "GET, HEAD"),
        ("OPTIONS", "/openapi.json", "GET, HEAD"),
        ("PUT", "/console/tokens", "GET, HEAD, POST"),
        ("GET", "/console/login", "POST"),
    ],
)
def test_another_method_is_405_with_those_that_are_allowed(
    served: Served, method: str, path: str, allow: str
) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (405, allow)


def test_unknown_paths_are_404_with_any_method(served: Served) -> None:
    for path in ("/topics/a/b/events", "/track/a/b.gif", "/tracks.gif", "/x", "/topics/"):
        for method in ("GET", "POST", "PUT"):
            assert served.client.request(method, path).status_code == 404, (method, path)


def test_up_passes_the_options_of_the_server_on() -> None:
    given = {
        **dict.fromkeys(_FLAGS, True),
        **dict.fromkeys(_REPEATED, ("a", "b")),
        **dict.fromkeys(_PASSED, "x"),
        "rate": 5.0,
        "tls_key": None,
    }
    passed = _of_server(given)
    assert passed[:2] == ["--behind-proxy", "--audit-reads"]
    pixels = passed.index("--public-pixel")
    assert passed[pixels : pixels + 4] == ["--public-pixel", "a", "--public-pixel", "b"]
    assert passed[passed.index("--rate") + 1] == "5.0"
    assert "--tls-key" not in passed
    named = {f"--{name.replace('_', '-')}" for name in (*_FLAGS, *_REPEATED, *_PASSED)}
    of_server = {option for each in serve.params for option in each.opts}
    assert of_server - {"--host", "--port", "--json"} <= named, "`up` does not pass it on"
    assert named <= {option for each in up.params for option in each.opts}
