"""Requests that are under way when their token is revoked, and what servers do again and again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.support.serving import Served, error, read_answer, serving, status
from tests.support.visits import Browser, forms_of
from tests.support.waiting import until
from tidelog import Event, Home, UnavailableError
from tidelog.coordination.tokens import create_token, list_tokens, revoke_token
from tidelog.model.token import Token
from tidelog.server.app import OPERATIONS
from tidelog.server.console.site import PLACES
from tidelog.server.http import limits
from tidelog.server.http.usage import ClientUsage

FORM = "application/x-www-form-urlencoded"


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def refused(served: Served, text: str) -> bool:
    return served.client.get("/topics", headers=bearer(text)).status_code == 401


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.05)
    monkeypatch.setattr("tidelog.server.app._TICK_S", 0.05)


@pytest.fixture
def made() -> list[tuple[Token, str]]:
    return []


@pytest.mark.usefixtures("quick")
def test_a_body_that_ends_after_its_token_was_revoked_changes_nothing(
    tmp_path: Path, made: list[tuple[Token, str]]
) -> None:
    def first(home: Home) -> None:
        home.append("t", [Event(b"kept", id="x")])
        made.append(home.tokens.create(["admin"]))

    with serving(tmp_path, first=first) as served:
        token, text = made[0]
        with Browser(served, text) as browser:
            (mark,) = {
                form.fields["form_mark"]
                for form in forms_of(browser.get("/console/tokens"))
                if form.action == "/console/tokens"
            }
            cookie = "; ".join(f"{name}={value}" for name, value in browser.client.cookies.items())
        page = {"cookie": cookie, "origin": served.url, "content-type": FORM}
        fields = {"form_mark": mark, "admin": "1", "name": "new", "sure": "1", "value": "v"}
        asked = [
            (place.path, "POST", urlencode(fields), page)
            for place in PLACES
            if place.method == "POST" and place.right is not None
        ]
        body = '{"query": "select 1"}'
        kind = {"content-type": "application/json"}
        asked += [
            (each.path, each.method, body, {**bearer(text), **(kind if each.name == "sql" else {})})
            for each in OPERATIONS
            if each.method in ("POST", "PUT")
        ]
        halves = [_send_half(served, *each) for each in asked]
        revoke_token(served.home.context, token.id)
        until(lambda: refused(served, text))
        for raw, (path, _, rest, _) in zip(halves, asked, strict=True):
            with raw:
                raw.sendall(rest[1:].encode())
                assert status(read_answer(raw)) == 401, path
        assert [event.value for event in served.home.read("t", 0)] == [b"kept"]
        assert [topic.name for topic in served.home.topics()] == ["t"]
        assert list_tokens(served.home.context) == []


def _send_half(
    served: Served, path: str, method: str, body: str, headers: dict[str, str]
) -> socket.socket:
    """Sends a request but the end of its body, and waits until the server has let it in."""
    path = path.replace("{topic}", "t").replace("{id}", "x").replace("{partition}", "0")
    path = path.replace("{offset}", "0").replace("{name}", "n")
    assert "{" not in path, "give its parameter here"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    lines += f"host: {served.address[0]}:{served.address[1]}\r\nexpect: 100-continue\r\n"
    raw = socket.create_connection(served.address, timeout=60)
    raw.sendall(f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n".encode())
    assert status(raw.recv(65_536)) == 100, "it is let in, and its body is wanted"
    raw.sendall(body[:1].encode())
    return raw


@pytest.mark.usefixtures("quick")
def test_a_change_that_waits_for_a_thread_while_its_token_is_revoked_is_refused(
    tmp_path: Path, made: list[tuple[Token, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = ("plain", "keyed", "absent", "large", "pixel", "unconfirmed", "t")

    def first(home: Home) -> None:
        for name in topics:
            if name != "t":  # which every served home has
                home.create_topic(name)
            home.append(name, [Event(b"kept", id="x")])
        made.append(home.tokens.create(["admin"]))

    body = "content-length: 1\r\n\r\nx"
    absent, lines = "tidelog-if-absent: true\r\ntidelog-id: y\r\n", '{"value":1}\n' * 300
    large = f"content-type: application/x-ndjson\r\ncontent-length: {len(lines)}\r\n\r\n"
    asked = [
        f"POST /topics/plain/events HTTP/1.1\r\n{body}",
        f"POST /topics/keyed/events HTTP/1.1\r\nidempotency-key: k\r\n{body}",
        f"POST /topics/absent/events HTTP/1.1\r\n{absent}{body}",
        f"POST /topics/large/events HTTP/1.1\r\n{large}{lines}",
        "GET /track/pixel.gif HTTP/1.1\r\n\r\n",
        "GET /track/unconfirmed.gif?ack=0 HTTP/1.1\r\n\r\n",
        f"PUT /topics/t/ids/x HTTP/1.1\r\n{body}",
        "DELETE /topics/t/ids/x HTTP/1.1\r\n\r\n",
    ]
    waiting, hold = [], threading.Event()
    real = limits._Turns.enter

    async def enter(self: limits._Turns) -> None:
        waiting.append(self)
        while not hold.is_set():
            await asyncio.sleep(0.01)
        await real(self)

    with serving(tmp_path, first=first) as served, contextlib.ExitStack() as stack:
        token, text = made[0]
        own = f"HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {text}"
        monkeypatch.setattr(limits._Turns, "enter", enter)
        sent = []
        for each in asked:
            sent.append(stack.enter_context(socket.create_connection(served.address, timeout=60)))
            sent[-1].sendall(each.replace("HTTP/1.1", own, 1).encode())
        until(lambda: len(waiting) == len(asked))
        revoke_token(served.home.context, token.id)
        metrics = httpx.Request("GET", f"{served.url}/metrics", headers=bearer(text))
        until(lambda: served.client.send(metrics).status_code == 401)
        hold.set()
        found = [status(read_answer(raw)) for raw in sent]
        assert found == [401] * len(asked)
        for name in topics:
            assert served.values(name) == [b"kept"]


@pytest.mark.usefixtures("quick")
def test_a_read_that_ends_after_its_token_was_revoked_is_refused(
    tmp_path: Path, made: list[tuple[Token, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, first=lambda home: made.append(home.tokens.create(["read"]))) as served:
        token, text = made[0]
        reached, hold = threading.Event(), threading.Event()
        real = served.home.lag

        def lag(name: str) -> object:
            reached.set()
            assert hold.wait(60)
            return real(name)

        monkeypatch.setattr(served.home, "lag", lag)
        answers: list[httpx.Response] = []

        def ask_slowly() -> None:
            answers.append(served.client.get("/topics/t/consumers", headers=bearer(text)))

        asking = threading.Thread(target=ask_slowly)
        asking.start()
        assert reached.wait(60)
        revoke_token(served.home.context, token.id)
        until(lambda: refused(served, text))
        hold.set()
        asking.join()
        assert answers[0].status_code == 401


def test_unknown_tokens_of_one_address_do_not_keep_a_new_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.http.auth._AT_MOST_EVERY_S", 2.0)

    def first(home: Home) -> None:
        home.tokens.create(["read"])

    head = "GET /topics HTTP/1.1\r\nhost: x\r\nx-forwarded-for: {}\r\n"
    ask = head + "authorization: Bearer {}\r\n\r\n"
    with (
        serving(tmp_path, first=first, behind_proxy=True) as served,
        contextlib.ExitStack() as all_,
    ):
        refused(served, "tidelog_000000000000_" + "0" * 64)  # the next read is some seconds away
        for number in range(110):
            raw = all_.enter_context(socket.create_connection(served.address, timeout=60))
            raw.sendall(ask.format("9.9.9.9", f"tidelog_{number:012x}_{number:064x}").encode())
        _, text = create_token(served.home.context, ["read"])
        raw = all_.enter_context(socket.create_connection(served.address, timeout=60))
        raw.sendall(ask.format("8.8.8.8", text).encode())
        assert status(read_answer(raw)) == 200


@pytest.mark.usefixtures("quick")
def test_tokens_are_revoked_while_the_use_of_others_is_stored(
    tmp_path: Path, made: list[tuple[Token, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, hold = threading.Event(), threading.Event()

    def store(*given: object) -> None:
        reached.set()
        assert hold.wait(60), "thousands of rows, or a slow catalog"

    monkeypatch.setattr(ClientUsage, "store", store)
    monkeypatch.setattr("tidelog.server.app.USAGE_S", 0.0)
    with serving(tmp_path, first=lambda home: made.append(home.tokens.create(["read"]))) as served:
        try:
            assert reached.wait(60)
            token, text = made[0]
            assert not refused(served, text)
            revoke_token(served.home.context, token.id)
            until(lambda: refused(served, text))
        finally:
            hold.set()


@pytest.mark.usefixtures("quick")
def test_an_append_is_given_up_while_the_tokens_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, hold = threading.Event(), threading.Event()

    def wait(*given: object) -> None:
        reached.set()
        assert hold.wait(60)
        raise UnavailableError("home: does not answer")

    with serving(tmp_path) as served:
        served.post({"value": "before"})
        monkeypatch.setattr("tidelog.server.app.read_tokens", wait)
        monkeypatch.setattr(limits, "ANSWER_S", 0.2)
        try:
            assert reached.wait(60)
            monkeypatch.setattr(served.home.context.store, "put", wait)
            answer = served.post({"value": "slow"})
            assert not hold.is_set()
            assert (answer.status_code, error(answer)["kind"]) == (504, "unknown_outcome")
        finally:
            hold.set()


class FullDisk:
    """A standard error on a disk that has no room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass


def test_tokens_are_read_on_after_an_error_that_cannot_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, first=lambda home: made.append(home.tokens.create(["read"]))) as served:
        shown = {"authorization": f"Bearer {made[0][1]}"}
        scan, failed = served.home.context.catalog.scan, threading.Event()

        def fail(*given: Any, **named: Any) -> Any:
            failed.set()
            raise UnavailableError("catalog: does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", FullDisk())
            patch.setattr(served.home.context.catalog, "scan", fail)
            assert failed.wait(60)
            answer = served.client.get("/topics", headers=shown)
            assert answer.status_code == 503
            assert answer.headers["x-request-id"]
            patch.setattr(served.home.context.catalog, "scan", scan)
            served.home.tokens.revoke(made[0][0].id)
            until(lambda: served.client.get("/topics", headers=shown).status_code == 401)
