"""Headers that a request has twice: refused where one value counts, joined where many do."""

from __future__ import annotations

import contextlib
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
