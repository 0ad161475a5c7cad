"""Headers that contradict each other, or that the server cannot honor; and where requests end."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.support.serving import Served, ask, error, read_answer, serving, status
from tidelog.server.http.request import SINGLE, headers_of

RAW = ("Content-Type", "application/octet-stream")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.mark.parametrize(
    "headers",
    [
        [RAW, ("Tidelog-Key", "a"), ("Tidelog-Key", "b")],
        [RAW, ("Tidelog-Id", "a"), ("Tidelog-Id", "b")],
        [RAW, ("Tidelog-Time", "1"), ("tidelog-time", "2")],
        [RAW, ("Tidelog-Type", "a"), ("Tidelog-Type", "a")],
        [("Content-Type", "application/json"), RAW],
        [RAW, ("Idempotency-Key", "a"), ("Idempotency-Key", "b")],
        [RAW, ("Tidelog-If-Absent", "a"), ("Tidelog-If-Absent", "b")],
        [RAW, ("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
    ],
)
def test_append_with_contradicting_headers_is_refused(
    shared: Served, headers: list[tuple[str, str]]
) -> None:
    before = shared.values()
    sent = shared.client.build_request("POST", "/topics/t/events", content=b'{"value":"x"}')
    sent.headers = httpx.Headers([*sent.headers.multi_items(), *headers])
    answer = shared.client.send(sent)
    assert (answer.status_code, error(answer)["kind"]) == (400, "invalid")
    assert "2 times: give it once" in answer.text
    assert shared.values() == before


def test_pixel_with_two_referers_is_refused(shared: Served) -> None:
    answer = shared.client.get("/track/t.gif?a=1", headers=[("Referer", "a"), ("Referer", "b")])
    assert (answer.status_code, error(answer)["kind"]) == (400, "invalid")


def test_values_of_a_list_are_joined(shared: Served) -> None:
    pairs = [(b"accept", b"a"), (b"host", b"h"), (b"accept", b"b"), (b"x-forwarded-for", b"1")]
    wanted = {b"accept": b"a, b", b"host": b"h", b"x-forwarded-for": b"1"}
    assert headers_of(pairs) == wanted
    headers = [("Accept-Language", "de"), ("Accept-Language", "en")]
    assert shared.client.get("/track/t.gif?a=1", headers=headers).status_code == 200
    assert b'"accept-language":"de, en"' in (shared.values()[-1] or b"")


def test_single_names_are_lower_case() -> None:
    assert all(name == name.lower() for name in SINGLE)


HEAD = b"POST /topics/t/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"


def test_headers_after_a_body_are_ignored_and_bounded(shared: Served) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    answer = ask(shared.address, chunked + b"Tidelog-Id: chosen\r\n\r\n")
    assert status(answer) == 201
    assert list(shared.home.read("t", 0))[-1].id is None
    with socket.create_connection(shared.address, timeout=30) as raw:
        raw.sendall(chunked + b"X: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                raw.sendall(b"y" * 1_000)
        answer = read_answer(raw)
    assert (status(answer), shared.values()[-1]) in ((431, b"hello"), (0, b"hello"))


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_body_is_not_lost_to_a_wish_for_another_protocol(shared: Served, protocol: bytes) -> None:
    before = shared.values()
    upgrade = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
    answer = ask(shared.address, HEAD + upgrade + b"Content-Length: 5\r\n\r\nhello")
    assert (status(answer), shared.values()) == (400, before)
    answer = ask(
        shared.address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n"
    )
    assert (status(answer), b"connection: close" in answer) == (200, True)


@pytest.mark.parametrize(
    ("later", "refusal"),
    [
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 100_000, b"431"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGARBAGE\r\n\r\n", b"200 400"),
    ],
    ids=["malformed", "large", "coding", "third"],
)
def test_append_has_its_own_answer_whatever_follows(
    shared: Served, later: bytes, refusal: bytes
) -> None:
    before = shared.values()
    with socket.create_connection(shared.address, timeout=30) as raw, contextlib.ExitStack() as end:
        end.enter_context(contextlib.suppress(ConnectionError))
        raw.sendall(HEAD + b"Content-Length: 5\r\n\r\nhello" + later)
        found = b""
        while piece := raw.recv(65_536):
            found += piece
    assert b" ".join(re.findall(rb"HTTP/1.1 (\d+)", found)) == b"201 " + refusal
    assert shared.values() == [*before, b"hello"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        HEAD.replace(b"/1.1", b"/1.0")
        + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        HEAD.replace(b"/1.1", b"/2.0") + b"Content-Length: 5\r\n\r\nhello",
        HEAD.replace(b"/1.1", b"/1.0") + b"\r\nhello",
        HEAD + b"\r\n",
        HEAD + b"If-None-Match: *\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Range: bytes 0-4/9\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /track/t.gif?x=1\r\n\r\n",
    ],
)
def test_body_that_cannot_be_known_is_refused(shared: Served, request_bytes: bytes) -> None:
    before = shared.values()
    assert (status(ask(shared.address, request_bytes)), shared.values()) == (400, before)


def test_changes_on_a_condition_are_refused(shared: Served) -> None:
    shared.post({"value": "first", "id": "c"})
    for method, name in (("PUT", "If-Match"), ("DELETE", "If-Unmodified-Since")):
        answer = shared.client.request(method, "/topics/t/ids/c", headers={name: "x"}, content=b"y")
        assert (answer.status_code, f"`{name}`" in error(answer)["message"]) == (400, True)
    assert shared.client.get("/topics/t/ids/c").json()["value"] == "first"


def test_an_id_with_a_hash_sign_never_changes_another_event(shared: Served) -> None:
    """What follows a `#` is dropped by the parser, so the rest would be another id."""
    for given in ("order", "order#17"):
        shared.post({"value": "first", "id": given})
    for method in (b"DELETE", b"PUT", b"GET"):
        asked = b" /topics/t/ids/order#17 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"
        answer = ask(shared.address, method + asked)
        assert (status(answer), b"%23" in answer) == (400, True)
    for given in ("order", "order%2317"):
        assert shared.client.get(f"/topics/t/ids/{given}").json()["value"] == "first"


def test_host_of_an_absolute_url_counts(shared: Served) -> None:
    asked = b"GET http://%s/topics HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert status(ask(shared.address, asked % (b"localhost", b"elsewhere.example"))) == 200
    assert status(ask(shared.address, asked % (b"elsewhere.example", b"localhost"))) == 403
    assert status(ask(shared.address, asked % (b"a:b@localhost", b"localhost"))) == 400


def test_client_of_http_1_0_is_not_told_to_continue(shared: Served) -> None:
    expects = b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello"
    assert status(ask(shared.address, HEAD.replace(b"/1.1", b"/1.0") + expects)) == 201
