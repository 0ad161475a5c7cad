"""The console's forms: create a topic, append an event, correct one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, serving
from tests.support.visits import Browser, forms_of, tags_of, text_of
from tidelog import Event, Home, UnknownOutcomeError
from tidelog.model.token import Grant

PRODUCE = "/console/topics/orders/produce"
CORRECT = "/console/topics/orders/events/0/0/correct"


def fill_home(home: Home) -> None:
    home.create_topic("orders")
    events = [
        Event(b'{"amount": 12, "user": {"id": "u-7"}}', key=b"k", id="o-1", timestamp=1_000),
        Event(b'{"amount": 7, "user": {"id": "u-8"}}', timestamp=2_000),
        Event(b"\xff\xfe", id="binary", timestamp=3_000),
    ]
    home.append("orders", events)


def wrong_fields(page: str) -> set[str]:
    """The fields that a page marks as wrong, each with an error that it refers to."""
    tags = tags_of(page)
    ids = {given.get("id") for _, given in tags}
    wrong = [given for _, given in tags if given.get("aria-invalid") == "true"]
    for given in wrong:
        assert f"{given['name']}-error" in (given.get("aria-describedby") or "").split()
        assert f"{given['name']}-error" in ids
    return {given["name"] or "" for given in wrong}


def test_a_topic_is_created_once_its_fields_are_right(served: Served, browser: Browser) -> None:
    page = browser.get("/console/create-topic")
    action = "/console/create-topic"
    answer = browser.send(page, action, name="a b", partitions="0", slot="soon")
    assert answer.status_code == 400
    assert wrong_fields(answer.text) == {"name", "partitions", "slot"}
    assert 'value="a b"' in answer.text, "what was typed stays"
    answer = browser.send(page, action, name="orders", partitions="2")
    assert (answer.status_code, wrong_fields(answer.text)) == (409, {"name"})
    answer = browser.send(page, action, name="clicks", partitions="2", slot="1m")
    assert answer.headers["location"] == "/console/topics/clicks"
    made = served.home.topic("clicks")
    assert (made.partitions, made.slot_ms) == (2, 60_000)
    assert [each.what for each in served.home.actions() if each.op == "topic create"][-1] == (
        "topic clicks"
    )


def test_an_event_is_seen_before_it_is_appended_and_appended_once(
    served: Served, browser: Browser
) -> None:
    fields = {
        "value": '{"amount":\r\n 3, "note": "<b>"}',
        "key": "k",
        "id": "o-9",
        "type": "placed",
        "time": "2026-11-15T10:00:00Z",
        "headers": "trace: 17\r\nfrom: console",
    }
    page = browser.send(browser.get(PRODUCE), PRODUCE, **fields).text
    assert "This event will be appended" in text_of(page)
    assert "<b>" not in page
    assert len(served.values("orders")) == 3, "not yet"
    first = browser.send(page, PRODUCE)
    again = browser.send(page, PRODUCE)
    assert first.headers["location"] == again.headers["location"]
    event = served.home.get("orders", "o-9")
    assert event.value == b'{"amount":\n 3, "note": "<b>"}'
    assert (event.key, event.type, event.timestamp) == (b"k", "placed", 1_794_736_800_000)
    assert event.headers == (("trace", b"17"), ("from", b"console"))
    assert len(served.values("orders")) == 4
    assert "This event was appended" in text_of(browser.get(first.headers["location"]))


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("text", " a ", b" a "),
        ("base64", "//4=", b"\xff\xfe"),
        ("none", "", None),
        ("text", "", b""),
    ],
)
def test_values_are_text_base64_or_tombstones(
    served: Served, browser: Browser, kind: str, value: str, stored: bytes | None
) -> None:
    page = browser.send(browser.get(PRODUCE), PRODUCE, kind=kind, value=value).text
    assert browser.send(page, PRODUCE).status_code == 303
    assert served.values("orders")[-1] == stored


def test_each_wrong_field_of_an_event_has_its_error(served: Served, browser: Browser) -> None:
    page = browser.get(PRODUCE)
    answer = browser.send(page, PRODUCE, value="{oops", time="noon", headers="no colon")
    assert wrong_fields(answer.text) == {"value", "time", "headers"}
    assert wrong_fields(browser.send(page, PRODUCE, value="").text) == {"value"}
    answer = browser.send(page, PRODUCE, kind="base64", value="***")
    assert wrong_fields(answer.text) == {"value"}
    answer = browser.send(page, PRODUCE, value="1", id="x" * 9_000)
    assert (answer.status_code, wrong_fields(answer.text)) == (400, {"id"})
    assert len(served.values("orders")) == 3


def test_a_correction_shows_the_change_and_replaces_what_was_shown(
    served: Served, browser: Browser
) -> None:
    page = browser.get(CORRECT)
    answer = browser.send(page, CORRECT)
    assert wrong_fields(answer.text) == {"why"}
    assert wrong_fields(browser.send(page, CORRECT, why="same").text) == {"value"}
    changed = '{"amount": 13, "user": {"id": "u-7"}}'
    page = browser.send(page, CORRECT, value=changed, why="wrong price").text
    assert "<del>-   &#34;amount&#34;: 12,</del>" in page
    assert "<ins>+   &#34;amount&#34;: 13,</ins>" in page
    assert json.loads(served.values("orders")[0] or b"")["amount"] == 12
    served.home.update("orders", "o-1", b'{"amount": 20}')
    overtaken = browser.send(page, CORRECT)
    assert overtaken.status_code == 409
    assert "was changed since you looked" in text_of(overtaken.text)
    done = browser.send(overtaken.text, CORRECT)
    assert done.status_code == 303
    assert served.home.get("orders", "o-1").value == changed.encode()
    assert [each.why for each in served.home.audit("orders")][-1] == "wrong price"
    assert "This event was corrected" in text_of(browser.get(done.headers["location"]))


def test_change_is_found_by_whole_lines(served: Served, browser: Browser) -> None:
    """To look for what is alike inside of lines takes minutes for values that are made for it."""
    served.home.update("orders", "o-1", b"price: 1\nshare: 2\nend")
    page = browser.get(CORRECT)
    value = "price: 3\nshare: 4\nend"
    page = browser.send(page, CORRECT, kind="text", value=value, why="w").text
    shown = text_of(page)
    lines = ("- price: 1", "- share: 2", "+ price: 3", "+ share: 4", "end")
    places = [shown.index(line) for line in lines]
    assert places == sorted(places)


def test_values_that_a_form_cannot_show_are_corrected_as_base64(
    served: Served, browser: Browser
) -> None:
    path = CORRECT.replace("/0/0/", "/0/2/")
    page = browser.get(path)
    assert "//4=" in page
    page = browser.send(page, path, value="//8=", why="bits").text
    assert browser.send(page, path).status_code == 303
    assert served.home.get("orders", "binary").value == b"\xff\xff"
    assert "has no id" in text_of(browser.get(CORRECT.replace("/0/0/", "/0/1/")))


def test_events_are_filtered_by_fields(browser: Browser) -> None:
    path = "/console/topics/orders/events"
    for by in ("newest", "offset&partition=0", "time&start=1970-01-01"):
        said = text_of(browser.get(f"{path}?by={by}&where=amount+%3E+10"))
        assert "1 event " in said, by
        assert "u-7" in said
        assert "u-8" not in said
    assert "u-8" in text_of(browser.get(f"{path}?where=user.id+%3D+u-8+and+amount+%3C+10"))
    page = browser.get(f"{path}?where=amount+above+10", 400)
    assert "is not a condition" in text_of(page)
    assert 'aria-invalid="true"' in page


@pytest.mark.parametrize(
    ("page", "action", "typed"),
    [
        ("/console/topics/orders/journals", "/console/topics/orders/erase", {"ids": "a\n b"}),
        (
            "/console/topics/orders/journals",
            "/console/topics/orders/erase",
            {"ids": "a", "key": "k", "why": "request 7"},
        ),
        (
            "/console/topics/orders",
            "/console/topics/orders/playback",
            {"start": "soon", "end": "-1h", "target": "again", "speed": "10"},
        ),
        (
            "/console/consumer?topic=orders&name=billing",
            "/console/consumer/move",
            {"partition": "7", "where": "at", "to": "someday"},
        ),
        (
            "/console/tokens",
            "/console/tokens",
            {"label": "mine", "append": "1", "topics": "orders", "expires": "soon"},
        ),
        ("/console/sql", "/console/sql", {"q": "selec 1"}),
        ("/console/sql", "/console/sql", {"q": "select " + "1 + " * 1_500 + "1"}),
    ],
    ids=["no reason", "ids and key", "playback", "cursor", "token", "sql", "long sql"],
)
def test_a_form_that_fails_keeps_what_was_typed(
    served: Served, browser: Browser, page: str, action: str, typed: dict[str, str]
) -> None:
    with served.home.consumer("orders", name="billing") as consumer:
        consumer.poll()
        consumer.commit()
    shown = browser.get(page)
    failed = browser.send(shown, action, **typed)
    assert 400 <= failed.status_code < 500, text_of(failed.text)
    assert 'role="alert"' in failed.text
    (form,) = [each for each in forms_of(failed.text) if each.action == action]
    assert {name: form.fields.get(name) for name in typed} == typed
    assert form.fields["form_mark"], "and it can be sent again"


def test_an_append_whose_outcome_is_unknown_is_sent_again_once(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = browser.send(browser.get(PRODUCE), PRODUCE, value='{"n": 1}', id="new")
    append = served.home.append_once

    def lose_reply(*given: Any) -> Any:
        append(*given)
        raise UnknownOutcomeError("append: no reply")

    monkeypatch.setattr(served.home, "append_once", lose_reply)
    failed = browser.send(seen.text, PRODUCE)
    assert failed.status_code >= 500
    assert 'role="alert"' in failed.text
    monkeypatch.undo()
    again = browser.send(failed.text, PRODUCE)
    assert "n" in text_of(again.text)
    done = browser.send(again.text, PRODUCE)
    where = "/console/topics/orders/events/0/3?appended=1"
    assert done.headers["location"] == where, "it was appended before, and only once"


def test_scopes_of_one_topic_reach_no_other(tmp_path: Path) -> None:
    grants = ["read", Grant("append", "orders"), Grant("amend", "t")]
    made: list[str] = []

    def first(home: Home) -> None:
        fill_home(home)
        made.append(home.tokens.create(grants)[1])  # type: ignore[arg-type]

    with serving(tmp_path, first=first) as served, Browser(served, made[0]) as browser:
        page = browser.get(PRODUCE)
        assert browser.send(page, PRODUCE, value="1").status_code == 200
        mark = page.split('name="form_mark" value="')[1].split('"')[0]
        for path in (CORRECT, "/console/topics/t/produce", "/console/create-topic"):
            assert browser.post(path, {"form_mark": mark, "value": "1"}).status_code == 403, path
        assert "log in with a token" in text_of(browser.get(CORRECT))
        assert "log in with a token" in text_of(browser.get("/console/create-topic"))
        assert "Correct …" not in browser.get("/console/topics/orders/events/0/0")
