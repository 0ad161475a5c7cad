"""What each scope allows, for every route there is, and what never opens a closed server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Served, ask, error, serving, status
from tests.support.visits import Browser, forms_of
from tests.support.waiting import until
from tidelog import Event, Home, InvalidError
from tidelog.coordination.tokens import (
    KnownTokens,
    create_token,
    list_tokens,
    revoke_token,
    rotate_token,
)
from tidelog.model.token import SCOPES, Grant, Scope, Token
from tidelog.server.app import OPERATIONS
from tidelog.server.console.site import PLACES
from tidelog.server.http import auth

ANY = "anybody"
OF_API: dict[str, tuple[Scope, ...] | str] = {  # which scopes let a request in; all others: 403
    "append": ("append", "admin"),
    "track": ("pixel", "append", "admin"),
    "track_topic": ("pixel", "append", "admin"),
    "topics": ("read", "admin"),
    "topic": ("read", "admin"),
    "consumers": ("read", "admin"),
    "events": ("read", "admin"),
    "range": ("read", "admin"),
    "tail": ("read", "admin"),
    "get": ("read", "admin"),
    "update": ("amend", "admin"),
    "delete": ("erase", "admin"),
    "journals": ("read", "admin"),
    "sql": ("read", "admin"),
    "metrics": ("read", "admin"),
    "health": ANY,
    "ready": ANY,
    "openapi": ANY,
    "docs": ANY,
}
OF_HOME = {"topics", "sql", "metrics"}  # name no topic
OF_CONSOLE: dict[str, str] = {  # beside read for all topics, which every session needs
    "overview": "read",
    "start": ANY,
    "topics": "read",
    "topic": "read",
    "topic_form": "read",
    "make_topic": "admin",
    "produce_form": "read",
    "produce": "append",
    "correct_form": "read",
    "correct": "amend",
    "timeline": "read",
    "play": "admin",
    "events": "read",
    "tail": "read",
    "event": "read",
    "value": "read",
    "consumers": "read",
    "consumer": "read",
    "move": "admin",
    "archives": "read",
    "archive": "read",
    "files": "read",
    "dead": "read",
    "act": "admin",
    "pump": "read",
    "sql": "read",
    "query": "read",
    "journals": "read",
    "journal": "read",
    "erase": "erase",
    "proof": "read",
    "prove": "erase",
    "jobs": "read",
    "stop": "admin",
    "forget": "admin",
    "tokens": "read",
    "create": "admin",
    "revoke": "admin",
    "login": ANY,
    "logout": ANY,
    "static": ANY,
}
FILLED = {"topic": "t", "partition": "0", "offset": "0", "name": "none", "file": "console.css"}


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def fill(path: str) -> str:
    for name, value in {**FILLED, "id": "1", "job": "none"}.items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path, "give FILLED a value for it"
    return path


@dataclass
class World:
    """A closed server, and tokens by what they may."""

    served: Served
    tokens: dict[str, dict[Scope, str]]

    def ask(self, name: str, text: str | None) -> int:
        """The status of an operation's request; the tail is left after its head."""
        operation = next(each for each in OPERATIONS if each.name == name)
        headers = bearer(text) if text is not None else {}
        params = {"topic": "t"} if name == "track" else {}
        body: dict[str, Any] = {"content": b"v"} if operation.method in ("POST", "PUT") else {}
        path = fill(operation.path)
        client = self.served.client
        with client.stream(
            operation.method, path, headers=headers, params=params, **body
        ) as answer:
            return answer.status_code


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("tidelog.server.http.auth._AT_MOST_EVERY_S", 0.02)
    tokens: dict[str, dict[Scope, str]] = {
        kind: {} for kind in ("good", "own topic", "other topic", "revoked", "expired")
    }

    def first(home: Home) -> None:
        context = home.context
        home.create_topic("other")
        home.append("t", [Event(b"v", id=str(n)) for n in range(3)])
        with home.consumer("t", "c") as consumer:
            consumer.poll()
            consumer.commit()
        for scope in SCOPES:
            tokens["good"][scope] = create_token(context, [scope])[1]
            tokens["own topic"][scope] = create_token(context, [Grant(scope, "t")])[1]
            tokens["other topic"][scope] = create_token(context, [Grant(scope, "o*")])[1]
            soon_ms = context.clock.now_ms() + 60
            tokens["expired"][scope] = create_token(context, [scope], "", soon_ms)[1]
            gone, tokens["revoked"][scope] = create_token(context, [scope])
            revoke_token(context, gone.id)
        context.clock.sleep(0.1)

    with serving(tmp_path, first=first) as served:
        yield World(served, tokens)


def test_every_route_is_in_the_table() -> None:
    assert set(OF_API) == {operation.name for operation in OPERATIONS}
    assert set(OF_CONSOLE) == {place.name for place in PLACES}


@pytest.mark.parametrize("name", OF_API)
def test_every_scope_at_every_operation(world: World, name: str) -> None:
    allowed = OF_API[name]
    if allowed == ANY:
        assert world.ask(name, None) == 200
        return
    assert world.ask(name, None) == 401
    for scope in SCOPES:
        for kind in ("revoked", "expired"):
            assert world.ask(name, world.tokens[kind][scope]) == 401, (kind, scope)
        lists = name in ("topics", "sql") and scope in allowed  # it has only the token's own topics
        done = {"append": 201, "sql": 415}.get(name, 200)  # 415: let in, and then not JSON
        other = done if lists else 403
        assert world.ask(name, world.tokens["other topic"][scope]) == other, scope
        own = scope in allowed and name != "metrics"
        for kind, may in (("good", scope in allowed), ("own topic", own)):
            found = world.ask(name, world.tokens[kind][scope])
            if name == "delete" and may:
                assert found in (200, 404), (kind, scope)  # the first one has deleted it
                world.served.home.append("t", [Event(b"v", id="1")])
                continue
            assert found == (done if may else 403), (kind, scope)


def test_every_scope_at_every_place_of_the_console(world: World) -> None:
    served = world.served
    before = len(list_tokens(served.home.context))
    for kind in ("own topic", "other topic", "revoked", "expired"):
        for scope in SCOPES:
            with Browser(served) as browser:
                refused = 403 if kind in ("own topic", "other topic") else 401
                answer = browser.login(world.tokens[kind][scope])
                assert answer.status_code == refused, (kind, scope)
                assert "set-cookie" not in answer.headers
    for scope in SCOPES:
        if scope in ("read", "admin"):
            continue
        with Browser(served) as browser:
            assert browser.login(world.tokens["good"][scope]).status_code == 403, scope
    for scopes in (("read",), ("read", "erase"), ("read", "append", "amend"), ("admin",)):
        text = create_token(served.home.context, scopes)[1]  # type: ignore[arg-type]
        before += 1
        with Browser(served, text) as browser:
            check_places(browser, set(scopes))
    assert len(list_tokens(served.home.context)) == before


def check_places(browser: Browser, scopes: set[str]) -> None:
    import hmac

    session = browser.client.cookies["tidelog_console"]
    mark = hmac.new(session.encode(), b"tidelog console form", "sha256").hexdigest()
    for place in PLACES:
        wanted = OF_CONSOLE[place.name]
        assert place.right == (None if wanted == ANY else wanted), place
        if wanted == ANY or place.name == "tail":
            continue
        path = fill(place.path)
        if place.method == "GET":
            path += "?topic=t&name=c" if place.name == "consumer" else ""
            assert browser.client.get(path).status_code in (200, 404), place
            continue
        may = "admin" in scopes or wanted in scopes
        found = browser.post(path, {"form_mark": mark}).status_code  # fields are missing: 400
        assert (found != 403) == may, (place, scopes, found)
        assert found in (400, 403, 404), (place, found)


def test_a_list_of_topics_has_only_those_that_a_token_reads(world: World) -> None:
    def names(text: str) -> list[str]:
        answer = world.served.client.get("/topics", headers=bearer(text))
        return [topic["name"] for topic in answer.json()["topics"]]

    assert sorted(names(world.tokens["good"]["read"])) == ["other", "t"]
    assert names(world.tokens["own topic"]["read"]) == ["t"]
    assert names(world.tokens["other topic"]["admin"]) == ["other"]


def test_no_path_stands_for_any_topic_of_a_token(world: World) -> None:
    """The list of topics needs the right for one topic; a path cannot ask for that."""
    text = world.tokens["own topic"]["admin"]
    for method, path in (
        ("GET", "/topics/*"),
        ("GET", "/topics/%2F"),
        ("POST", "/topics/*/events"),
    ):
        found = world.served.client.request(method, path, headers=bearer(text)).status_code
        assert found in (403, 404), path


def test_a_pixel_token_appends_to_its_topic_without_ids_and_nothing_else(world: World) -> None:
    text = world.tokens["own topic"]["pixel"]
    get = world.served.client.get
    assert get(f"/track/t.gif?token={text}&a=1").status_code == 200
    assert get("/track/t.gif?a=1", headers=bearer(text)).status_code == 200
    assert get(f"/track/other.gif?token={text}").status_code == 403
    for more in ({}, bearer(text)):
        chosen = get(f"/track/t.gif?token={text}&id=1", headers=more)
        assert (chosen.status_code, error(chosen)["kind"]) == (403, "forbidden")
    ahead = get(f"/track/t.gif?token={text}&t=9999-12-31T00:00:00Z")
    assert ahead.status_code == 400, "a trim by time would end there"
    assert "a day ahead" in error(ahead)["message"]
    producer = world.tokens["good"]["append"]
    assert get("/track/t.gif?t=9999-12-31T00:00:00Z", headers=bearer(producer)).status_code == 200
    assert get("/track/t.gif?id=mine", headers=bearer(producer)).status_code == 200
    for more in ({}, {"authorization": "Basic eDp5"}):
        shown = get(f"/track/t.gif?token={producer}", headers=more)
        assert shown.status_code == 403, "not in a query"
    assert world.served.home.get("t", "1").value == b"v"


PROXIES = (
    b"X-Forwarded-For: 203.0.113.9\r\n",
    b"X-Forwarded-Proto: https\r\n",
    b"X-Forwarded-Host: log.example\r\n",
    b"X-Real-IP: 203.0.113.9\r\n",
    b"Forwarded: for=203.0.113.9\r\n",
    b"Via: 1.1 proxy\r\n",
    b"X-Forwarded-Scheme: https\r\n",
    b"X-Original-Host: log.example\r\n",
    b"X-Envoy-External-Address: 203.0.113.9\r\n",
    b"CF-Ray: 7d0f2c\r\n",
    b"CDN-Loop: cloud\r\n",
)


@pytest.mark.parametrize("header", PROXIES, ids=lambda header: header.split(b":")[0].decode())
def test_an_open_server_takes_nothing_through_a_proxy(served: Served, header: bytes) -> None:
    host = b"Host: 127.0.0.1:%d\r\n" % served.address[1]  # nginx's default: the upstream's own
    for first in (b"POST /topics/t/events", b"DELETE /topics/t/ids/1", b"GET /topics", b"GET /"):
        sent = first + b" HTTP/1.1\r\n" + host + header + b"Content-Length: 0\r\n\r\n"
        assert status(ask(served.address, sent)) == 403
    assert served.values() == []


def test_an_open_server_takes_nothing_from_nginx_as_it_is_by_default(served: Served) -> None:
    sent = b"POST /topics/t/events HTTP/1.0\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n"
    sent = sent % served.address[1] + b"Content-Length: 1\r\n\r\nx"
    assert status(ask(served.address, sent)) == 403
    assert served.values() == []


def test_a_server_behind_a_proxy_is_never_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="token create"), serving(tmp_path, behind_proxy=True):
        pass


def test_revoking_the_last_token_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.05)
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, first=lambda home: keep(home, made)) as served:
        token, text = made[-1]
        assert served.client.get("/topics", headers=bearer(text)).status_code == 200
        revoke_token(served.home.context, token.id)
        until = time.monotonic() + 60
        while served.client.get("/topics", headers=bearer(text)).status_code == 200:
            assert time.monotonic() < until
        for _ in range(5):
            time.sleep(0.2)
            assert served.client.get("/topics").status_code == 401
            assert served.post({"value": "x"}).status_code == 401
        with serving(tmp_path / "c", home=served.home) as again:  # a new process knows it too
            assert again.client.get("/topics").status_code == 401
            _, other = create_token(served.home.context, ["read"])
            until = time.monotonic() + 60
            while again.client.get("/topics", headers=bearer(other)).status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.1)


def keep(home: Home, made: list[tuple[Token, str]]) -> None:
    made.append(home.tokens.create(["admin"]))


@pytest.mark.parametrize("how", ["revoke", "expire"])
@pytest.mark.parametrize("where", ["api", "console"])
def test_tails_end_with_their_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, where: str
) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.05)
    monkeypatch.setattr("tidelog.server.app._TICK_S", 0.05)
    made: list[tuple[Token, str]] = []

    def first(home: Home) -> None:
        soon_ms = home.context.clock.now_ms() + 3_000
        made.append(create_token(home.context, ["read"], "", soon_ms if how == "expire" else None))

    with serving(tmp_path, first=first) as served, httpx.Client(timeout=60) as client:
        token, text = made[0]
        with Browser(served, text if where == "console" else "") as browser:
            path, shown = "/topics/t/tail", bearer(text)
            if where == "console":
                path, shown = "/console/topics/t/tail", {}
                client.cookies = browser.client.cookies
            with client.stream("GET", f"{served.url}{path}", headers=shown) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                assert next(lines).startswith("retry")
                if how == "revoke":
                    revoke_token(served.home.context, token.id)
                rest = list(lines)  # ends
        assert "event: error" in rest
        assert any('"unauthorized"' in line for line in rest)


def test_tails_of_an_open_server_end_when_it_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.05)
    with served.client.stream("GET", "/topics/t/tail") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry")
        create_token(served.home.context, ["read"])
        assert "event: error" in list(lines)


def test_a_slow_read_of_tokens_brings_no_revoked_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read begins before the revocation and ends after another that began after it."""
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 1_000.0)
    monkeypatch.setattr(auth, "_AT_MOST_EVERY_S", 0.0)
    made: list[tuple[Token, str]] = []
    hold, reached = threading.Event(), threading.Event()
    slow: list[bool] = []

    def first(home: Home) -> None:
        made.extend(home.tokens.create(["read"]) for _ in range(2))

    import tidelog.server.app as app

    real = app.read_tokens

    def read(context: Any) -> KnownTokens:
        found = real(context)
        if slow:
            slow.clear()
            reached.set()
            assert hold.wait(60)
        return found

    monkeypatch.setattr(app, "read_tokens", read)
    with serving(tmp_path, first=first) as served:
        (gone, text), (_, kept) = made
        slow.append(True)
        forged = f"tidelog_{0:012x}_{0:064x}"
        unknown = [
            threading.Thread(target=lambda: served.client.get("/topics", headers=bearer(forged)))
            for _ in range(2)
        ]
        unknown[0].start()
        assert reached.wait(60)
        revoke_token(served.home.context, gone.id)
        unknown[1].start()
        time.sleep(0.3)
        hold.set()
        for thread in unknown:
            thread.join()
        assert served.client.get("/topics", headers=bearer(text)).status_code == 401
        assert served.client.get("/topics", headers=bearer(kept)).status_code == 200


def test_a_rotated_token_works_beside_the_old_one_until_the_overlap_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.05)
    monkeypatch.setattr("tidelog.server.app._TICK_S", 0.05)
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, first=lambda home: keep(home, made)) as served:
        old, text = made[0]

        def answered(text: str) -> int:
            return served.client.get("/topics", headers=bearer(text)).status_code

        new, other = rotate_token(served.home.context, old.id, 600_000)
        assert (new.grants, new.label, new.expires_ms) == (old.grants, old.label, None)
        assert answered(other) == 200
        assert answered(text) == 200
        _, third = rotate_token(served.home.context, new.id, 500)
        until(lambda: answered(other) == 401)
        assert answered(text) == 200, "its own overlap has not ended"
        assert answered(third) == 200


def test_sessions_end_when_they_are_logged_out_unused_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, first=lambda home: keep(home, made)) as served:
        with Browser(served, made[0][1]) as browser:
            session = browser.client.cookies["tidelog_console"]
            browser.post("/console/logout", {"x": "1"})
            browser.client.cookies.set("tidelog_console", session)
            browser.get("/", 401)
        for limit in ("SESSION_S", "SESSION_IDLE_S"):
            with Browser(served, made[0][1]) as browser, monkeypatch.context() as patch:
                assert forms_of(browser.get("/console/tokens"))
                patch.setattr(f"tidelog.server.console.session.{limit}", 0.0)
                time.sleep(0.01)
                browser.get("/", 401)


def test_idempotency_keys_belong_to_their_token(tmp_path: Path) -> None:
    texts: list[str] = []

    def first(home: Home) -> None:
        texts.extend(home.tokens.create(["append"])[1] for _ in range(2))

    with serving(tmp_path, first=first) as served:
        one, other = texts
        event = {"value": "x"}
        before = served.post(event, **bearer(one), idempotency_key="k")
        assert served.post(event, **bearer(one), idempotency_key="k").json() == before.json()
        apart = served.post(event, **bearer(other), idempotency_key="k")
        assert apart.status_code == 201
        assert apart.json() != before.json()
        assert served.values() == [b"x", b"x"]


def test_an_idempotency_key_is_refused_for_other_events_in_any_partition(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=8) as served:
        first = served.post({"value": "x", "key": "a"}, idempotency_key="k")
        for key in "abcdefgh":
            other = served.post({"value": "y", "key": key}, idempotency_key="k")
            assert other.status_code == 409, key
        again = served.post({"value": "x", "key": "a"}, idempotency_key="k")
        assert again.json() == first.json()
        assert sum(len(served.values("t", partition)) for partition in range(8)) == 1
