"""Who may see and change what in the console: tried for every address that there is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.serving import Served, ask, serving, status
from tests.support.visits import Browser, forms_of, tags_of, text_of
from tidelog import Event, Home, UnavailableError
from tidelog.coordination.tokens import create_token, list_tokens
from tidelog.server.app import OPERATIONS
from tidelog.server.console import session
from tidelog.server.console.site import PLACES, Route

SECRET = b"the-secret-of-an-event"
FILLED = {
    "topic": "t",
    "partition": "0",
    "offset": "0",
    "name": "none",
    "file": "console.css",
    "job": "none",
}
READS = [place for place in PLACES if place.right == "read"]
WRITES = [place for place in PLACES if place.right in ("admin", "erase")]


@dataclass
class Guarded:
    """A server that asks for tokens, and one of each kind."""

    served: Served
    reads: str
    writes: str
    both: str


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """As if others could reach it, without letting them."""
    texts: dict[str, str] = {}

    def first(home: Home) -> None:
        home.append("t", [Event(SECRET, key=b"k")])
        with home.consumer("t", "c") as consumer:
            consumer.poll()
            consumer.commit()
        texts["reads"] = create_token(home.context, ["read"], "reader")[1]
        texts["writes"] = create_token(home.context, ["append", "amend", "erase"], "writer")[1]
        texts["both"] = create_token(home.context, ["admin"], "owner")[1]

    monkeypatch.setattr("tidelog.server.options._is_loopback", lambda host: False)
    with serving(tmp_path, first=first) as found:
        yield Guarded(found, **texts)


def path_of(place: Route) -> str:
    """An address of the place, with names that are there."""
    path = place.path
    for name, value in FILLED.items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path, "give FILLED a value for it"
    return path + ("?topic=t&name=c" if place.name == "consumer" else "")


def state(served: Served) -> tuple[object, ...]:
    """All that a form could change."""
    return (
        [token.id for token in list_tokens(served.home.context)],
        [(lag.cursor, lag.owner) for lag in served.home.lag("t")],
        served.values(),
        [topic.name for topic in served.home.topics()],
    )


def test_each_place_says_who_may() -> None:
    posts = [place for place in PLACES if place.method == "POST"]
    assert {place.right for place in posts} == {"admin", "amend", "append", "erase", "read", None}
    assert [place.name for place in posts if place.right == "read"] == ["query"], "changes nothing"
    assert all(place.right == "read" for place in PLACES if place.method == "GET" and place.right)
    open_to_all = {place.name for place in PLACES if place.right is None}
    assert open_to_all == {"start", "login", "logout", "static"}
    assert not {place.path for place in PLACES} & {operation.path for operation in OPERATIONS}


def test_without_a_token_nothing_can_be_read(guarded: Guarded) -> None:
    for place in READS:
        for headers in ({}, {"cookie": "tidelog_console=forged"}, {"cookie": "x=1"}):
            answer = guarded.served.client.get(path_of(place), headers=headers)
            assert answer.status_code == 401, place
            assert answer.headers["www-authenticate"] == "Bearer"
            assert SECRET.decode() not in answer.text
            assert "Consumers" not in answer.text
    page = guarded.served.client.get("/console/topics/t").text
    assert [form.action for form in forms_of(page)] == ["/console/login"]
    assert guarded.served.client.get("/", params={"token": guarded.both}).status_code == 401
    bearer = {"authorization": f"Bearer {guarded.both}"}  # that is for the interface, not for pages
    assert guarded.served.client.get("/", headers=bearer).status_code == 401


def test_form_of_a_stranger_is_refused_before_it_is_read(guarded: Guarded) -> None:
    head = (
        "POST /console/tokens HTTP/1.1\r\nHost: x\r\nSec-Fetch-Site: same-origin\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 200000\r\n\r\n"
    )
    assert status(ask(guarded.served.address, head.encode())) == 401


def test_without_a_token_nothing_can_be_changed(guarded: Guarded) -> None:
    before = state(guarded.served)
    with Browser(guarded.served) as browser:
        for place in WRITES:
            fields = {"topic": "t", "name": "c", "where": "earliest", "form_mark": ""}
            answer = browser.post(path_of(place), fields)
            assert answer.status_code == 401, place
    assert state(guarded.served) == before


def test_a_read_token_sees_all_and_changes_nothing(guarded: Guarded) -> None:
    before = state(guarded.served)
    with Browser(guarded.served, guarded.reads) as browser:
        marks = set()
        for place in READS:
            if place.name == "tail":
                continue
            answer = browser.client.get(path_of(place))
            assert answer.status_code == (404 if "none" in path_of(place) else 200), place
            sent = [form for form in forms_of(answer.text) if form.method == "post"]
            if place.path == "/console/sql":
                sent = [form for form in sent if form.action != "/console/sql"]
            marks |= {form.fields["form_mark"] for form in sent if "form_mark" in form.fields}
            assert {form.action for form in sent} <= {"/console/logout"}, place
        assert marks == set()  # no form, so no mark; and with the right one it is refused too
        with Browser(guarded.served, guarded.both) as other:
            mark = forms_of(other.get("/console/tokens"))[-1].fields["form_mark"]
        for place in WRITES:
            fields = {"topic": "t", "name": "c", "where": "earliest", "read": "1"}
            answer = browser.post(path_of(place), {**fields, "form_mark": mark})
            assert answer.status_code == 403, place
    assert state(guarded.served) == before


def test_a_read_token_with_its_own_mark_is_refused_too(guarded: Guarded) -> None:
    import hmac

    before = state(guarded.served)
    with Browser(guarded.served, guarded.reads) as browser:
        session = browser.client.cookies["tidelog_console"]
        mark = hmac.new(session.encode(), b"tidelog console form", "sha256").hexdigest()
        for place in WRITES:
            answer = browser.post(path_of(place), {"read": "1", "form_mark": mark})
            assert answer.status_code == 403, place
            assert "may not change this" in text_of(answer.text)
    assert state(guarded.served) == before


def test_a_write_token_alone_does_not_get_in(guarded: Guarded) -> None:
    with Browser(guarded.served) as browser:
        assert browser.login(guarded.writes).status_code == 403
        for text in (guarded.writes, guarded.both):  # a token is no session
            browser.client.cookies.set("tidelog_console", text)
            for place in READS:
                assert browser.client.get(path_of(place)).status_code == 401, place
            for place in WRITES:
                assert browser.post(path_of(place), {"read": "1"}).status_code == 401, place


def test_both_rights_together_may_change(guarded: Guarded) -> None:
    with Browser(guarded.served, guarded.both) as browser:
        page = browser.get("/console/tokens")
        made = browser.send(page, "/console/tokens", label="new one")
        assert made.status_code == 200
        assert "new one" in [token.label for token in list_tokens(guarded.served.home.context)]
        text = made.text.split('id="token"')[1].split(">")[1].split("<")[0]
        with Browser(guarded.served, text) as other:
            assert "reader" in other.get("/console/tokens")
        assert "tidelog_" not in browser.get("/console/tokens")  # it is never shown again
        assert browser.send(page, "/console/tokens", read="", label="x").status_code == 400


def test_the_cookie_is_for_this_site_and_not_for_scripts(guarded: Guarded) -> None:
    with Browser(guarded.served) as browser:
        answer = browser.login(f" {guarded.both} ")
        cookie = answer.headers["set-cookie"]
        assert guarded.both not in cookie
        assert re.match(r"tidelog_console=[0-9a-f]{64}; ", cookie)
        assert "; HttpOnly" in cookie
        assert "; SameSite=Strict" in cookie
        assert "; Path=/" in cookie
        assert answer.headers["location"] == "/"
        assert "set-cookie" not in browser.login("wrong").headers
        for elsewhere in (
            "https://evil.example/",
            "//evil.example/",
            "/\\evil.example",
            "/console/\r\nx: y",
            "javascript:1",
        ):
            fields = {"token": guarded.both, "next": elsewhere}
            assert browser.post("/console/login", fields).headers["location"] == "/"
        fields = {"token": guarded.both, "next": "/console/topics?q=a"}
        assert browser.post("/console/login", fields).headers["location"] == "/console/topics?q=a"
        assert browser.client.get("/console").headers["location"] == "/"
        gone = browser.post("/console/logout", {"x": "1"})
        assert "Max-Age=0" in gone.headers["set-cookie"]
        assert browser.client.get("/").status_code == 401


def test_tail_ends_with_its_session(guarded: Guarded) -> None:
    with Browser(guarded.served, guarded.reads) as browser:
        with browser.client.stream("GET", "/console/topics/t/tail") as tail:
            lines = tail.iter_lines()
            assert next(lines).startswith("retry")
            assert browser.post("/console/logout", {"x": ""}).status_code == 303
            guarded.served.home.append("t", [Event(SECRET)])
            found = next(line for line in lines if line.startswith("data"))
            assert "this session has ended" in found
        assert browser.client.get("/console/topics/t/tail").status_code == 401


def test_many_logins_of_one_token_end_no_session_of_another(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_SESSIONS_MAX", 3)
    monkeypatch.setattr(session, "_TOKEN_SESSIONS_MAX", 2)
    with contextlib.ExitStack() as stack:
        owner, first, second, third = (
            stack.enter_context(Browser(guarded.served)) for _ in range(4)
        )
        owner.login(guarded.both)
        first.login(guarded.reads)
        second.login(guarded.reads)
        assert first.client.get("/").status_code == 200  # so the second is unused for longest
        third.login(guarded.reads)
        found = [each.client.get("/").status_code for each in (owner, first, second, third)]
        assert found == [200, 200, 401, 200]


def test_a_revoked_token_is_out_at_once(guarded: Guarded) -> None:
    reader = next(t for t in list_tokens(guarded.served.home.context) if t.label == "reader")
    with (
        Browser(guarded.served, guarded.both) as browser,
        Browser(guarded.served, guarded.reads) as other,
    ):
        other.get("/")
        page = browser.get("/console/tokens")
        asked = browser.post("/console/tokens/revoke", {**mark_of(page), "id": reader.id})
        assert "are refused within seconds" in text_of(asked.text)
        other.get("/")
        done = browser.send(asked.text, "/console/tokens/revoke")
        assert "is revoked" in text_of(done.text)
        other.get("/", 401)


def test_a_new_token_is_shown_though_the_tokens_cannot_be_read_again(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(context: object) -> None:
        raise UnavailableError("catalog: does not answer")

    with Browser(guarded.served, guarded.both) as browser:
        page = browser.get("/console/tokens")
        monkeypatch.setattr("tidelog.server.app.read_tokens", read)
        made = browser.send(page, "/console/tokens", label="new", read="1")
        assert made.status_code == 200
        assert re.search(r"tidelog_[0-9a-f]{12}_[0-9a-f]{64}", made.text), "there is no other copy"


def test_without_any_token_left_nobody_gets_in(guarded: Guarded) -> None:
    own = next(t for t in list_tokens(guarded.served.home.context) if t.label == "owner")
    with Browser(guarded.served, guarded.both) as browser:
        page = browser.get("/console/tokens")
        for token in list_tokens(guarded.served.home.context):
            if token.id != own.id:
                fields = {**mark_of(page), "id": token.id, "sure": "1"}
                assert browser.post("/console/tokens/revoke", fields).status_code == 200
        asked = browser.post("/console/tokens/revoke", {**mark_of(page), "id": own.id})
        said = text_of(asked.text)
        assert "you are logged out" in said
        assert "every request is refused" in said
        assert browser.send(asked.text, "/console/tokens/revoke").status_code == 200
        browser.get("/", 401)
    assert guarded.served.client.get("/topics").status_code == 401


def mark_of(page: str) -> dict[str, str]:
    marks = [form.fields["form_mark"] for form in forms_of(page) if "form_mark" in form.fields]
    return {"form_mark": marks[0]}


def test_forms_of_other_sites_are_refused(guarded: Guarded) -> None:
    before = state(guarded.served)
    with Browser(guarded.served, guarded.both) as browser:
        mark = mark_of(browser.get("/console/tokens"))
        for place in (each for each in PLACES if each.method == "POST"):
            path = path_of(place)
            fields = {"read": "1", "token": guarded.both, "topic": "t", "name": "c", **mark}
            evil = {"origin": "https://evil.example"}
            for headers in (
                {**evil, "sec_fetch_site": "cross-site"},
                {"sec_fetch_site": "same-site"},
                {"sec_fetch_site": "none"},
                {"origin": "null"},
                evil,
            ):
                assert browser.post(path, fields, **headers).status_code == 403, (place, headers)
            plain = browser.client.post(path, data=fields)
            assert plain.status_code == 403, "neither header: no browser of today"
            typed = {"origin": browser.origin, "content-type": "text/plain"}
            sent = browser.client.post(path, content=b"read=1", headers=typed)
            assert sent.status_code == 415
            if place.right is not None:
                for wrong in ({}, {"form_mark": "0" * 64}, {"form_mark": "ü"}):
                    without = {"read": "1", "topic": "t", "name": "c", **wrong}
                    assert browser.post(path, without).status_code == 403, place
    assert state(guarded.served) == before


def test_marks_differ_from_session_to_session(guarded: Guarded) -> None:
    with Browser(guarded.served, guarded.both) as browser:
        first = mark_of(browser.get("/console/tokens"))
        made = browser.send(browser.get("/console/tokens"), "/console/tokens", admin="1")
        text = made.text.split('id="token"')[1].split(">")[1].split("<")[0]
        with Browser(guarded.served, text) as other:
            assert mark_of(other.get("/console/tokens")) != first
            refused = other.post("/console/tokens", {"read": "1", **first})
            assert refused.status_code == 403


def test_every_answer_forbids_what_is_not_ours(guarded: Guarded) -> None:
    with Browser(guarded.served, guarded.both) as browser:
        for place in PLACES:
            if place.method == "POST" or place.name == "tail":
                continue
            answer = browser.client.get(path_of(place))
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            if place.kind == "page" and answer.headers.get("content-type", "").startswith(
                "text/html"
            ):
                check_own(answer.text)
        answer = browser.client.post("/console/nothing")
        assert "content-security-policy" in answer.headers


def check_own(page: str) -> None:
    """A page has no script of its own in it, and loads nothing from elsewhere."""
    for tag, attributes in tags_of(page):
        assert not [name for name in attributes if name.startswith("on")], tag
        assert "style" not in attributes, tag
        for name in ("src", "href", "action", "data-from"):
            value = attributes.get(name)
            assert value is None or value.startswith(("/", "#")), (tag, value)
            assert not (value or "").startswith("//")
        if tag == "script":
            assert (attributes["src"] or "").startswith("/console/static/")
    assert "<style" not in page


def test_on_loopback_without_tokens_only_this_machine_gets_in(tmp_path: Path) -> None:
    with serving(tmp_path) as served, Browser(served) as browser:
        page = browser.get("/console/tokens")
        for place in READS:
            for headers in ({"host": "evil.example"}, {"host": "127.0.0.1.evil.example:80"}):
                answer = served.client.get(path_of(place), headers=headers)
                assert answer.status_code == 403, place
                assert "Tokens" not in text_of(answer.text).replace("tokens", "")
        for place in WRITES:
            led_here = {"host": "evil.example", "origin": "http://evil.example"}
            answer = browser.post(path_of(place), mark_of(page), **led_here)
            assert answer.status_code == 403, place
        made = browser.send(page, "/console/tokens", label="the first", admin="1")
        assert "From now on this server requires a token from every client" in text_of(made.text)
        browser.get("/", 401)


def test_forms_are_bounded(guarded: Guarded) -> None:
    with Browser(guarded.served, guarded.both) as browser:
        mark = mark_of(browser.get("/console/tokens"))
        assert browser.post("/console/tokens", {**mark, "label": "x" * 300_000}).status_code == 413
        assert browser.post("/console/tokens", {**mark, "label": "x" * 5_000}).status_code == 400
        many = {f"f{number}": "" for number in range(5_000)}
        assert browser.post("/console/tokens", {**mark, **many}).status_code == 400
        typed = {"origin": browser.origin, "content-type": "application/x-www-form-urlencoded"}
        sent = browser.client.post("/console/tokens", content=b"label=%ff\xff", headers=typed)
        assert sent.status_code in (400, 403)


def test_the_key_of_a_produced_event_belongs_to_its_token(guarded: Guarded) -> None:
    produce, places = "/console/topics/t/produce", []
    other = create_token(guarded.served.home.context, ["admin"])[1]
    once = ""
    for text in (guarded.both, other):
        with Browser(guarded.served, text) as browser:
            page = browser.send(browser.get(produce), produce, value="1").text
            [form] = [each for each in forms_of(page) if "once" in each.fields]
            once = once or form.fields["once"]
            for _ in range(2):
                answer = browser.post(produce, {**form.fields, "once": once})
                places.append(answer.headers["location"])
    assert [place.split("?")[0].rpartition("/")[2] for place in places] == ["1", "1", "2", "2"]
