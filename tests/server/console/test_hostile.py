"""What events and names may hold: markup, what is no text, and far too much of it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.server.console.test_session import check_own
from tests.support.serving import Served
from tests.support.visits import Browser, text_of
from tidelog import Event, Home
from tidelog.server.console.format import Bytes, ago, duration, one_line, rate, short, size, visible

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}${7*7}</pre></bdi>"
HOSTILE = [
    MARKUP.encode(),
    b"\xff\xfe\x00\x80 no text",
    "\u202eevil\u2066\u200b\ufeff\x00\x07\x1b[31m\x85".encode(),
    b"x" * (1 << 20),
    b'{"a": "' + b"\xff" + b'"}',
    b"[" * 5_000 + b"]" * 5_000,
    b'{"n": 1.00000000000000000000000001, "n": 2, "big": 123456789012345678901234567890}',
    "\U0001d518\u0645\u0631\u05e9\u05dc \u202e \U0001f30a".encode(),
    b"",
]
NAME = "<img src=x onerror=alert(1)>\u202e.. &x=1#?%2e"


def fill_home(home: Home) -> None:
    home.append("t", [Event(value, timestamp=1_000) for value in HOSTILE])
    home.append("t", [Event(None, timestamp=1_000)])
    home.append(
        "t",
        [Event(b"v", key=MARKUP.encode(), id=MARKUP, type=MARKUP, headers=((MARKUP, b"<h>\xff"),))],
    )
    for name in (NAME, "..", "ü" * 200):
        with home.consumer("t", name) as consumer:
            consumer.poll(1)
            consumer.commit()


def check(page: str) -> None:
    """Nothing of an event became markup, and nothing in it turns the line around."""
    check_own(page)
    for raw in ("<script>alert", "<img src=x"):
        assert raw not in page
    shown = re.sub(r'value="[^"]*"', "", page)  # a field holds what was typed
    for raw in ("\u202e", "\u2066", "\x00", "\x07", "\x1b", "\x85"):
        assert raw not in shown
    assert "{49}" not in page.replace("$", "")  # no template was run
    assert "49$" not in page


def test_lists_and_pages_of_events_escape_them(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/t/events?limit=100")
    check(page)
    assert "&lt;script&gt;alert(1)" in page
    assert "1.0 MiB" in page
    assert "tombstone" in page
    assert len(page) < 60_000
    for offset in range(11):
        for view in ("", "?view=text", "?view=hex", "?view=json"):
            page = browser.get(f"/console/topics/t/events/0/{offset}{view}")
            check(page)
            assert len(page) < 600_000
        value = browser.client.get(f"/console/topics/t/events/0/{offset}/value")
        event = next(iter(served.home.read("t", 0, offset)))
        assert value.content == (event.value or b"")
        assert value.headers["content-disposition"].startswith("attachment")
    numbers = browser.get("/console/topics/t/events/0/6")
    assert "1.00000000000000000000000001" in numbers  # as it was written
    assert "123456789012345678901234567890" in numbers


def test_searches_take_hostile_text(browser: Browser) -> None:
    for text in (MARKUP, NAME, "\u202e", "%", "\\", "(?i", "ü" * 1000):
        for field in ("contains", "key", "id", "start", "offset", "partition", "cursor"):
            by = (
                field
                if field in ("key", "id")
                else "time"
                if field in ("start", "cursor")
                else "offset"
            )
            params = {"by": by, field: text}
            answer = browser.client.get("/console/topics/t/events", params=params)
            assert answer.status_code in (200, 400), (params, text_of(answer.text))
            check(answer.text)
    found = browser.client.get("/console/topics/t/events", params={"by": "key", "key": MARKUP})
    assert "1 event " in text_of(found.text)
    found = browser.client.get("/console/topics/t/events", params={"contains": "onerror=alert(2)"})
    assert "2 events" in text_of(found.text)
    too_long = browser.client.get("/console/topics/t/events", params={"contains": "x" * 5_000})
    assert too_long.status_code == 400
    for path in ("/console/topics", "/console/consumers"):
        check(browser.client.get(path, params={"q": MARKUP}).text)
    check(browser.client.get("/console/" + "%3Cscript%3Ealert(1)%3C/script%3E").text)


def test_times_that_are_no_numbers_are_refused(browser: Browser) -> None:
    for text in ("²", "①", "\u0661", "1\u0301", "9" * 16):
        answer = browser.client.get("/console/topics/t/timeline", params={"start": text})
        assert answer.status_code == 400, answer.text


def test_names_of_consumers_may_be_anything(served: Served, browser: Browser) -> None:
    page = browser.get("/console/consumers")
    check(page)
    check(browser.get("/"))
    check(browser.get("/console/topics"))
    for name in (NAME, "..", "ü" * 200):
        answer = browser.client.get("/console/consumer", params={"topic": "t", "name": name})
        assert answer.status_code == 200
        check(answer.text)
        asked = browser.send(answer.text, "/console/consumer/move", where="latest")
        check(asked.text)
        done = browser.send(asked.text, "/console/consumer/move")
        assert done.status_code == 200
        check(done.text)
    assert all(lag.events == 0 for lag in served.home.lag("t"))


def test_labels_of_tokens_are_escaped(browser: Browser) -> None:
    page = browser.get("/console/tokens")
    made = browser.send(page, "/console/tokens", label=MARKUP, admin="1")
    check(made.text)
    text = made.text.split('id="token"')[1].split(">")[1].split("<")[0]
    browser.login(text)
    check(browser.get("/console/tokens"))
    refused = browser.send(browser.get("/console/tokens"), "/console/tokens", label="\u202e")
    assert refused.status_code == 400
    check(refused.text)


@given(st.binary(max_size=300))
def test_any_value_has_all_its_views(data: bytes) -> None:
    value = Bytes(data)
    for text in (value.text, value.hex, value.json or "", one_line(data)):
        assert text == visible(text)
        text.encode()
    assert value.best in ("json", "text", "hex")
    assert bytes.fromhex("".join(line[10:58] for line in value.hex.splitlines())) == data


@given(st.text(max_size=100))
def test_any_text_becomes_visible(text: str) -> None:
    shown = visible(text)
    assert visible(shown) == shown
    shown.encode()
    assert "\n" not in one_line(text.encode("utf-8", "replace"))


def test_figures_read_well() -> None:
    assert [short(n) for n in (0, 999, 9_999, 12_345, 1_500_000, 2.5e9)] == [
        *("0", "999", "9,999", "12.3 k", "1.5 M", "2.5 G")
    ]
    assert [size(n) for n in (0, 1023, 1024, 1 << 20, 5 << 40)] == [
        *("0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 TiB")
    ]
    assert [duration(n) for n in (0, 45_000, 120_000, 7_200_000, 864_000_000)] == [
        *("0 s", "45 s", "2 min", "2 h", "10 d")
    ]
    assert [ago(n, 100_000) for n in (0, 99_000, 40_000, 160_000)] == [
        *("never", "just now", "60 s ago", "in 60 s")
    ]
    assert [rate(n) for n in (None, 0, 0.25, 40)] == ["—", "0", "0.25", "40"]
