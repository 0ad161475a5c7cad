"""Requests that are too large, malformed, slow or cut off: refused, and without a trace."""

from __future__ import annotations

import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.serving import Served, ask, error, read_answer, serving, status
from tidelog import Event
from tidelog.server.http import limits

POST = b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience for half a second."""
    for name in ("HEAD_S", "BODY_S", "WRITE_S"):
        monkeypatch.setattr(limits, name, 0.5)


def alive(served: Served) -> bool:
    return served.client.get("/healthz").status_code == 200


def test_a_body_beyond_the_limit_is_413_however_it_comes(tmp_path: Path) -> None:
    with serving(tmp_path, body_bytes_max=100_000) as served:
        answer = served.client.post("/topics/t/events", content=b"x" * 100_001)
        assert (answer.status_code, error(answer)["kind"]) == (413, "too_large")
        pieces = (b"x" * 1_000 for _ in range(200))
        assert served.client.post("/topics/t/events", content=pieces).status_code == 413
        promised = POST + b"content-length: 999999999999999999\r\n\r\n"
        assert status(ask(served.address, promised)) == 413
        assert served.values() == []
        assert served.client.post("/topics/t/events", content=b"x" * 100_000).status_code == 201
        pieces = (b"y" * 1_000 for _ in range(100))
        assert served.client.post("/topics/t/events", content=pieces).status_code == 201
        assert served.values() == [b"x" * 100_000, b"y" * 100_000]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / FTP/1.0\r\n\r\n",
        b"HELLO\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT localhost:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        POST + b"content-length: -3\r\n\r\nabc",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        POST + b"tidelog-key: a\nb: c\r\ncontent-length: 1\r\n\r\nx",
        POST + b"tidelog-id: a\x00b\r\ncontent-length: 1\r\n\r\nx",
    ],
    ids=[
        "TLS",
        "HTTP/2",
        "FTP",
        "no HTTP",
        "NUL in path",
        "no colon",
        "no ASCII",
        "CONNECT",
        "URL",
        "two lengths",
        "negative",
        "smuggled",
        "no chunk",
        "bare newline",
        "NUL in header",
    ],
)
def test_malformed_requests_are_refused(served: Served, data: bytes) -> None:
    answer = ask(served.address, data)
    assert status(answer) in (400, 404), answer
    assert b"connection: close" in answer or status(answer) == 404
    assert served.values() == []
    assert alive(served)


def test_a_refusal_of_head_has_no_body(served: Served) -> None:
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(b"HEAD /healthz#x HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert status(answer) == 400
    assert answer.endswith(b"\r\n\r\n")


def test_a_newline_in_a_header_adds_no_header_to_the_answer(served: Served) -> None:
    injected = b"GET /track/t.gif?a=%0d%0aset-cookie:%20x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = ask(served.address, injected)
    assert status(answer) == 200
    assert b"set-cookie" not in answer.lower()


def test_heads_beyond_the_limit_are_431(served: Served) -> None:
    long = b"x" * (limits.HEAD_BYTES_MAX + 1)
    many = b"".join(b"h%d: x\r\n" % n for n in range(limits.HEADERS_MAX + 1))
    for request in (
        b"GET /track/t.gif?a=" + long + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        GET + b"a: " + long + b"\r\n\r\n",
        GET + many + b"\r\n",
        GET + b"a: " + long * 20,  # without an end
        GET + b"a: " + long * 2 + b"\r\n\r\n",  # longer than what is read at once
        GET + b"a: " + long * 3 + b"\r\n\r\n",
    ):
        answer = ask(served.address, request)
        assert status(answer) == 431, answer[:200]
    assert status(ask(served.address, GET + many[: -len(many) // 2] + b"\r\n")) in (200, 400)
    large = b"x" * 60_000  # a body that comes with its head in one piece is no head
    whole = POST + b"content-length: %d\r\n\r\n" % len(large) + large
    assert status(ask(served.address, whole)) == 201
    assert served.values() == [large]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"GET",
        GET + b"x-slow: 1\r\n",
        POST + b"content-length: 10\r\n\r\n12345",
        POST + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
    ],
    ids=["nothing", "a newline", "a method", "no end of headers", "half a body", "half a chunk"],
)
def test_who_does_not_send_on_is_let_go(served: Served, data: bytes) -> None:
    began = time.monotonic()
    answer = ask(served.address, data)
    assert time.monotonic() - began < 20
    assert status(answer) == 408
    assert served.values() == []


def trickle(address: tuple[str, int], data: bytes) -> int:
    """How many bytes were taken, one after another, before the connection was closed."""
    with socket.create_connection(address, timeout=30) as raw:
        for sent, byte in enumerate(data):
            try:
                raw.sendall(bytes([byte]))
            except OSError:
                return sent
            time.sleep(0.05)
    return len(data)


@pytest.mark.usefixtures("hasty")
def test_trickling_does_not_help(served: Served) -> None:
    """A byte now and then is no progress: the whole head has its time, and so has the body."""
    for data in (GET + b"x: y\r\n" * 50, POST + b"content-length: 1000\r\n\r\n" + b"x" * 1_000):
        assert trickle(served.address, data) < len(data)
    assert served.values() == []


def test_an_idle_second_request_is_let_go_too(
    served: Served, request: pytest.FixtureRequest
) -> None:
    with socket.create_connection(served.address, timeout=60) as raw:
        raw.sendall(GET + b"\r\n")
        assert status(read_answer(raw)) == 200
        request.getfixturevalue("hasty")
        raw.sendall(b"\r\n")  # what keeps a connection busy, but is no request
        assert status(read_answer(raw)) == 408


@pytest.mark.usefixtures("hasty")
def test_who_takes_no_answer_is_let_go(served: Served) -> None:
    from tidelog import Event

    served.home.append("t", [Event(b"x" * 900_000) for _ in range(30)])
    with socket.create_connection(served.address, timeout=60) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        raw.sendall(b"GET /topics/t/tail?from=earliest HTTP/1.1\r\nhost: localhost\r\n\r\n")
        deadline = time.monotonic() + 60
        while "tidelog_waiting 0.0" not in served.client.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_request_that_is_cut_off_leaves_no_trace(served: Served) -> None:
    for data in (POST + b"content-length: 10\r\n\r\n12345", GET[:-2], POST):
        assert status(ask(served.address, data, half_close=True)) == 0
    with socket.create_connection(served.address) as raw:
        raw.sendall(POST + b"content-length: 10\r\n\r\n12345")
    time.sleep(0.2)
    assert served.values() == []
    assert alive(served)


def test_whole_requests_are_answered_though_the_client_sends_no_more(served: Served) -> None:
    answer = ask(served.address, POST + b"content-length: 2\r\n\r\nhi", half_close=True)
    assert status(answer) == 201
    assert served.values() == [b"hi"]
    assert served.post({"id": "i", "value": "old"}).status_code == 201
    for line, body in ((b"PUT", b"new"), (b"GET", b""), (b"DELETE", b"")):
        head = b"%s /topics/t/ids/i HTTP/1.1\r\nhost: localhost\r\n" % line
        asked = head + b"content-length: %d\r\n\r\n%s" % (len(body), body)
        assert status(ask(served.address, asked, half_close=True)) == 200, line
    waits = GET.replace(b"/healthz", b"/topics/t/tail") + b"\r\n"
    assert b"error" not in ask(served.address, waits, half_close=True)  # it ends


BAD_CHUNK = POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\nZZ\r\n"


@pytest.mark.parametrize(
    "last", [b"GARBAGE\r\n\r\n", GET[:-2], POST + b"content-length: 9\r\n\r\nab", BAD_CHUNK]
)
def test_requests_before_a_bad_one_are_answered_though_the_client_sends_no_more(
    served: Served, last: bytes
) -> None:
    ways = [(b"content-length: 200000\r\n\r\n", b"x" * 200_000)]
    ways += [(b"content-length: 1\r\n\r\n", b"%d" % number) for number in range(5)]
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(b"".join(POST + head + body for head, body in ways) + last)
        raw.shutdown(socket.SHUT_WR)
        found = b""
        while piece := raw.recv(65_536):
            found += piece
    assert found.count(b"HTTP/1.1 201") == len(ways), found
    assert served.values() == [body for _, body in ways]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("last", "refusal"), [(BAD_CHUNK, 400), (POST + b"content-length: 9\r\n\r\nab", 408)]
)
def test_a_bad_body_is_refused_after_the_answers_before_it(
    served: Served, last: bytes, refusal: int
) -> None:
    waits = GET.replace(b"/healthz", b"/topics/t/partitions/0/events?wait=1") + b"\r\n"
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(waits + GET + b"\r\n" + last)
        found = b""
        while piece := raw.recv(65_536):
            found += piece
    statuses = [int(each[:3]) for each in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, refusal], "in the order of the requests"
    assert served.values() == []


HASH = GET.replace(b"/healthz", b"/topics#x") + b"\r\n"


@pytest.mark.parametrize(("first", "statuses"), [(b"", [400]), (GET + b"\r\n", [200, 400])])
def test_nothing_after_a_refused_request_is_read(
    served: Served, first: bytes, statuses: list[int]
) -> None:
    served.home.append("t", [Event(b"kept", id="x")])
    erase = b"DELETE /topics/t/ids/x HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(first + HASH + erase + POST + b"content-length: 1\r\n\r\nx")
        found = b""
        while piece := raw.recv(65_536):
            found += piece
    assert [int(each[:3]) for each in found.split(b"HTTP/1.1 ")[1:]] == statuses
    page = served.client.get("/metrics").text
    assert "tidelog_requests_in_flight 1.0" in page, "this one"
    assert 'operation="delete"' not in page
    assert served.values() == [b"kept"]


@pytest.mark.parametrize(
    ("size", "headers", "refusal"),
    [(9_000_000, {}, 413), (4_000_000, {"connection": "close", "if-match": "x"}, 400)],
)
def test_clients_that_send_all_before_they_read_see_why_they_are_refused(
    served: Served, size: int, headers: dict[str, str], refusal: int
) -> None:
    for _ in range(3):
        client = HTTPConnection(*served.address, timeout=60)
        client.request("POST", "/topics/t/events", b"x" * size, headers)
        assert client.getresponse().status == refusal
        client.close()
    assert served.values() == []


def test_http_1_0_gets_no_chunks(served: Served) -> None:
    served.home.append("t", [Event(b"here")])
    asked = b"GET /topics/t/tail?from=earliest HTTP/1.0\r\n\r\n"
    with socket.create_connection(served.address, timeout=60) as raw:
        raw.sendall(asked)
        found = b""
        while b"here" not in found:
            found += raw.recv(65_536)
        served.stop()
        while piece := raw.recv(65_536):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"retry: 1000\nid: 0:0\n\nid: 0:1\ndata: {")
    assert body.endswith(b"}\n\n")


@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.parametrize("framing", [b"content-length: %d\r\n\r\n%s", CHUNKED])
def test_requests_one_after_another_on_a_connection_are_answered_in_order(
    served: Served, framing: bytes, size: int
) -> None:
    two = b"".join(POST + framing % (size, letter * size) for letter in (b"a", b"b"))
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(two + GET + b"connection: close\r\n\r\n")
        found = b""
        while piece := raw.recv(65_536):
            found += piece
    assert found.count(b"HTTP/1.1 201") == 2
    assert found.count(b'"status":"ok"') == 1
    assert served.values() == [b"a" * size, b"b" * size]


def test_expect_continue_is_answered(served: Served) -> None:
    with socket.create_connection(served.address, timeout=30) as raw:
        raw.sendall(POST + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert raw.recv(1_000).startswith(b"HTTP/1.1 100")
        raw.sendall(b"hi")
        assert status(read_answer(raw)) == 201


def test_more_connections_than_the_limit_are_refused_politely(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 5)
    monkeypatch.setattr(limits, "CLIENT_SHARE", 0.1)
    raws = [socket.create_connection(served.address, timeout=30) for _ in range(12)]
    try:
        raws[-1].sendall(GET.replace(b"/healthz", b"/topics") + b"\r\n")
        answer = read_answer(raws[-1])
        assert status(answer) == 503
        assert b"retry-after" in answer
    finally:
        for raw in raws:
            raw.close()
    deadline = time.monotonic() + 60
    while status(ask(served.address, GET + b"\r\n")) != 200:
        assert time.monotonic() < deadline


def test_more_tails_than_the_limit_are_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.api.read.TAILS_MAX", 1)
    with served.client.stream("GET", "/topics/t/tail") as answer:
        lines = answer.iter_lines()  # kept, as httpx closes the stream with it
        next(lines)
        full = served.client.get("/topics/t/tail")
        assert (full.status_code, full.headers["retry-after"]) == (503, "5")
        full = served.client.get("/topics/t/partitions/0/events?wait=1")
        assert full.status_code == 503


def test_other_paths_methods_and_upgrades_are_refused(served: Served) -> None:
    for path in (
        "/none",
        "/topics/",
        "/topics//events",
        "/topics/a/b/events",
        "/..%2f..%2fetc/passwd",
    ):
        assert served.client.get(path).status_code in (400, 404)
        assert served.client.post(path).status_code in (400, 404, 405)
    wrong = served.client.delete("/topics/t")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert error(wrong)["kind"] == "method_not_allowed"
    assert served.client.head("/topics/t").status_code == 200
    for path in ("/topics/t/tail", "/track/t.gif"):
        assert served.client.head(path).status_code == 405
    upgrade = GET + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    assert status(ask(served.address, upgrade)) in (200, 400)
    assert served.values() == []


def test_hostile_clients_do_not_hold_up_others(served: Served) -> None:
    """Many half-open requests at once, while others are served."""
    raws = []
    for _ in range(200):
        raw = socket.create_connection(served.address, timeout=30)
        raw.sendall(POST + b"content-length: 1000000\r\n\r\nx")
        raws.append(raw)
    try:
        began = time.monotonic()
        threads = [threading.Thread(target=served.post, args=({"value": "x"},)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 30
        assert len(served.values()) == 20
    finally:
        for raw in raws:
            raw.close()
