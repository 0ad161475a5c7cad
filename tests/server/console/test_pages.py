"""The console's pages: what a person sees of topics, events and consumers, and can do with them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests.support.serving import Served
from tests.support.visits import Browser, forms_of, text_of
from tidelog import Event, Home, UnavailableError

START_MS = 1_763_200_000_000


def fill_home(home: Home) -> None:
    home.create_topic("orders", 3)
    events = [
        Event(
            b'{"order": %d, "city": "Bern"}' % number,
            key=b"customer-%d" % (number % 7),
            id=f"order-{number}",
            timestamp=START_MS + number * 1_000,
            type="placed",
        )
        for number in range(300)
    ]
    home.append("orders", events)
    with home.consumer("orders", "billing") as consumer:
        consumer.poll(50)
        consumer.commit()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of this little ends by itself, also on a machine that stalls."""
    monkeypatch.setattr("tidelog.server.console.events._SEARCH_S", 60.0)
    monkeypatch.setattr("tidelog.server.console.journals._LOOK_S", 60.0)


def eventually(page: Callable[[], str], *wanted: str) -> str:
    """A page once it says all of that; figures take a moment."""
    deadline = time.monotonic() + 60
    while True:
        found = page()
        if all(each in text_of(found) for each in wanted):
            return found
        assert time.monotonic() < deadline, (wanted, text_of(found))
        time.sleep(0.1)


def test_the_overview_tells_of_all(browser: Browser) -> None:
    page = eventually(lambda: browser.get("/"), "300 events", "of 1 consumer", "of all topics")
    said = text_of(page)
    assert "consumer billing of orders : 250 events wait, and no member is alive" in said
    assert "<code>billing</code>" in page
    assert "`" not in said
    assert "store" in said
    assert "healthy" in said


def test_topics_are_listed_with_consumers_searched_and_ordered(
    served: Served, browser: Browser
) -> None:
    for number in range(60):
        served.home.create_topic(f"many-{number:02}")
    page = eventually(lambda: browser.get("/console/topics?q=orders"), "billing 250")
    assert "many-00" not in page
    page = eventually(lambda: browser.get("/console/topics"), "62 in all")
    assert "many-00" in page
    assert "orders" not in text_of(page).replace("topic create orders", "")
    second = browser.get("/console/topics?page=2")
    assert "orders" in second
    assert "many-00" not in second
    by_events = browser.get("/console/topics?order=events")
    assert by_events.index("/console/topics/orders") < by_events.index("/console/topics/many-00")
    assert "No topic has" in text_of(browser.get("/console/topics?q=nothing"))
    browser.get("/console/topics?order=size", 400)


def test_a_topic_shows_its_partitions_and_consumers(served: Served, browser: Browser) -> None:
    page = eventually(lambda: browser.get("/console/topics/orders"), "300 in 3 partitions")
    states = served.home.partitions("orders")
    for state in states:
        assert f"{state.events}" in text_of(page)
    eventually(lambda: browser.get("/console/topics/orders"), "3 runs", "billing")
    missing = browser.get("/console/topics/nothing", 404)
    assert "<title>Not found · Tidelog</title>" in missing
    assert "<h1>Not found</h1>" in missing


def test_the_timeline_counts_exactly_where_few_events_are(browser: Browser) -> None:
    found = browser.client.get("/console/topics/orders/timeline").json()
    assert (found["exact"], found["whole"]) == (True, True)
    assert sum(found["counts"]) == 300
    assert found["first"] == START_MS
    assert found["last"] == START_MS + 299_000
    narrow = {"start": START_MS + 10_000, "end": START_MS + 20_000}
    found = browser.client.get("/console/topics/orders/timeline", params=narrow).json()
    inside = [
        count
        for at, count in enumerate(found["counts"])
        if narrow["start"] <= found["start"] + at * found["width"] < narrow["end"]
    ]
    assert sum(inside) == 10
    empty = {"start": 0, "end": 1000}
    assert not any(
        browser.client.get("/console/topics/orders/timeline", params=empty).json()["counts"]
    )
    backwards = browser.client.get("/console/topics/orders/timeline?start=9&end=3")
    assert backwards.status_code == 400
    assert browser.client.get("/console/topics/t/timeline").json()["first"] is None


def test_events_by_offset_with_their_neighbours(browser: Browser) -> None:
    page = browser.get("/console/topics/orders/events?by=offset&partition=1&offset=10&limit=20")
    assert ">1/10</a>" in page
    assert ">1/29</a>" in page
    assert ">1/30</a>" not in page
    assert "offset=30" in page  # the next page
    assert "offset=0" in page  # the one before
    newest = browser.get("/console/topics/orders/events?partition=1&limit=20")
    assert "20 events" in text_of(newest)
    assert 'rel="next"' not in newest
    for wrong in ("partition=7", "offset=-1", "partition=x", "limit=5000", "by=luck"):
        assert browser.client.get(f"/console/topics/orders/events?{wrong}").status_code in (
            400,
            404,
        )


def test_events_by_time_in_pages(browser: Browser) -> None:
    start, end = "2025-11-15T09:46:50Z", "2025-11-15T09:48:20Z"  # 10 s to 100 s after the first
    path = f"/console/topics/orders/events?by=time&start={start}&end={end}&limit=50"
    page = browser.get(path)
    assert "2025-11-15T09:46:50.000Z" in page
    assert "50 events" in text_of(page)
    (link,) = [part.split('"')[0] for part in page.split('rel="next" href="')[1:]]
    second = browser.get(link.replace("&amp;", "&"))
    assert "40 events" in text_of(second)
    assert "2025-11-15T09:48:19.000Z" in second
    assert 'rel="next"' not in second
    trouble = browser.get("/console/topics/orders/events?by=time&start=yesterday", 400)
    assert "is not ISO 8601" in text_of(trouble)
    browser.get("/console/topics/orders/events?by=time&cursor=forged", 400)


def test_events_by_key_and_by_id_and_by_what_they_contain(browser: Browser) -> None:
    page = browser.get("/console/topics/orders/events?by=key&key=customer-3")
    assert "43 events" in text_of(page)
    assert "customer-4" not in page
    found = browser.get("/console/topics/orders/events?by=id&id=order-250")
    assert "1 event " in text_of(found)
    assert "order-250" in found
    nothing = browser.get("/console/topics/orders/events?by=id&id=order-1000")
    assert "no event has this id" in text_of(nothing)
    page = browser.get("/console/topics/orders/events?partition=1&contains=CITY&limit=20")
    assert "20 events" in text_of(page)  # in large letters or small ones
    page = browser.get("/console/topics/orders/events?by=time&start=2025-11-15&contains=%3A+299%2C")
    assert "1 event " in text_of(page)
    none = browser.get("/console/topics/orders/events?by=offset&partition=0&contains=nowhere")
    assert "None of those that were looked at fits" in text_of(none)
    browser.get("/console/topics/orders/events?by=key", 400)


def test_older_events_follow_the_newest_page_by_page(browser: Browser, served: Served) -> None:
    """Nothing is left out and nothing comes twice, also where events came late."""
    home = served.home
    home.create_topic("late", partitions=3)
    times = [1_700_000_000_000 + 1000 * ((n * 7) % 90) for n in range(90)]
    for n, time_ms in enumerate(times):
        home.append("late", [Event(b'{"n": %d}' % n, timestamp=time_ms)], partition=n % 3)
    for more, expected in (("", 90), ("&where=n+%3E%3D+30", 60), ("&contains=nowhere", 0)):
        seen: list[str] = []
        link = f"/console/topics/late/events?limit=20{more}"
        pages = 0
        while link:
            page = browser.get(link)
            seen += re.findall(r">(\d/\d+)</a>", page)
            found = re.search(r'rel="next" href="([^"]+)"', page)
            link = found[1].replace("&amp;", "&") if found else ""
            pages += 1
        assert pages <= 6
        assert len(seen) == len(set(seen)) == expected
    newest = browser.get("/console/topics/late/events?limit=20")
    shown = re.findall(r'<time datetime="([^"]+)"', newest)
    assert shown == sorted(shown, reverse=True)
    assert "Older" in text_of(newest)
    browser.get("/console/topics/late/events?before=x", 400)


def test_a_search_that_takes_long_goes_on_where_it_was(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.console.events._SEARCH_S", 0.0)
    seen, path = 0, "/console/topics/orders/events?by=key&key=customer-3&limit=10"
    for _ in range(50):
        page = browser.get(path)
        seen += page.count('<td data-label="time"><time ')
        if 'rel="next"' not in page:
            break
        path = page.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    assert seen == 43


def test_one_event_in_its_views_and_as_a_file(served: Served, browser: Browser) -> None:
    (event,) = [e for e in served.home.read("orders", 0) if e.offset == 5]
    path = "/console/topics/orders/events/0/5"
    page = browser.get(path)
    assert event.id is not None
    assert event.id in page
    name, text = (f'<span class="j-{kind}">&#34;' for kind in ("name", "text"))
    assert f"{name}city&#34;</span>: {text}Bern&#34;</span>" in page
    hexadecimal = browser.get(f"{path}?view=hex")
    assert "00000000  7b 22 6f 72 64 65 72 22" in hexadecimal
    assert "&#34;order&#34;" in browser.get(f"{path}?view=text")
    file = browser.client.get(f"{path}/value")
    assert file.content == event.value
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["content-disposition"] == 'attachment; filename="orders-0-5.bin"'
    browser.get("/console/topics/orders/events/0/100000", 404)
    browser.get("/console/topics/orders/events/0/x", 400)
    browser.get("/console/topics/orders/events/9/0", 404)
    browser.get(f"{path}?view=dance", 400)


def test_a_page_of_events_can_be_downloaded(browser: Browser) -> None:
    path = "/console/topics/orders/events?by=key&key=customer-3&download=1"
    answer = browser.client.get(path)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert len(answer.text.splitlines()) == 43


def test_the_tail_comes_as_events_come(served: Served, browser: Browser) -> None:
    with browser.client.stream("GET", "/console/topics/t/tail?from=latest") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-security-policy" in stream.headers
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        served.home.append("t", [Event(b"fresh")])
        assert any('"value":"fresh"' in line for line in lines if line.startswith("data"))


def test_a_consumer_with_its_cursors(browser: Browser) -> None:
    page = eventually(lambda: browser.get("/console/consumers"), "billing", "250")
    assert "/console/consumer?topic=orders&amp;name=billing" in page
    page = browser.get("/console/consumer?topic=orders&name=billing")
    assert "No member has joined" in text_of(page)
    browser.get("/console/consumer?topic=orders&name=nobody", 404)
    assert "None has" in text_of(browser.get("/console/consumers?q=zzz"))


def cursors(served: Served) -> dict[int, int | None]:
    return {lag.partition: lag.cursor for lag in served.home.lag("orders")}


def test_a_cursor_is_moved_after_a_look_at_what_that_does(served: Served, browser: Browser) -> None:
    before = cursors(served)
    (handled,) = [partition for partition, cursor in before.items() if cursor]
    page = browser.get("/console/consumer?topic=orders&name=billing")
    asked = browser.send(page, "/console/consumer/move", where="earliest", partition=str(handled))
    assert asked.status_code == 200
    assert "50 events will be handled again" in text_of(asked.text)
    assert cursors(served) == before  # nothing is done by looking
    done = browser.send(asked.text, "/console/consumer/move")
    assert "The cursors of 1 partitions were moved" in text_of(done.text)
    assert cursors(served)[handled] == 0
    skip = browser.send(page, "/console/consumer/move", where="latest", partition="all")
    assert "events will be skipped" in text_of(skip.text)
    assert browser.send(skip.text, "/console/consumer/move").status_code == 200
    assert all(lag.events == 0 for lag in served.home.lag("orders"))
    by_time = browser.send(page, "/console/consumer/move", to="2025-11-15T09:47:40Z", where="at")
    assert browser.send(by_time.text, "/console/consumer/move").status_code == 200
    with served.home.consumer("orders", "billing") as consumer:
        again = consumer.poll(1000)
    assert min(event.timestamp for event in again) == START_MS + 60_000  # type: ignore[type-var]
    many = "9" * 5_000
    for wrong in ({"to": "99999"}, {"to": ""}, {"to": "soon"}, {"partition": "8"}, {"to": many}):
        refused = browser.send(page, "/console/consumer/move", **{"where": "at", **wrong})
        assert refused.status_code in (400, 404)
    for wrong in ({"to": f"-{many}s"}, {"partition": many}):
        refused = browser.send(page, "/console/consumer/move", **{"where": "at", **wrong})
        assert refused.status_code == 400
    for forged in (f"{many}:0:", f"0:{many}:", "0:x:", "x"):  # as no page gives them
        refused = browser.send(asked.text, "/console/consumer/move", moves=forged)
        assert refused.status_code == 400


def test_a_move_that_was_overtaken_changes_nothing(served: Served, browser: Browser) -> None:
    page = browser.get("/console/consumer?topic=orders&name=billing")
    asked = browser.send(page, "/console/consumer/move", where="earliest", partition="all")
    with served.home.consumer("orders", "billing") as consumer:
        consumer.poll(1000)
        consumer.commit()
    before = cursors(served)
    done = browser.send(asked.text, "/console/consumer/move")
    assert done.status_code == 409
    assert "the consumer was faster" in text_of(done.text)
    assert cursors(served) == before


def test_a_member_that_is_fenced_goes_on_from_the_new_cursor(
    served: Served, browser: Browser
) -> None:
    with served.home.consumer("orders", "live") as consumer:
        assert consumer.poll(1000)
        consumer.commit()
        page = eventually(
            lambda: browser.get("/console/consumer?topic=orders&name=live"),
            "alive",
            "1 has joined",
        )
        asked = browser.send(page, "/console/consumer/move", where="earliest", partition="all")
        assert "It loses its lease" in text_of(asked.text)
        assert browser.send(asked.text, "/console/consumer/move").status_code == 200
        deadline = time.monotonic() + 30
        again: list[Event] = []
        while len(again) < 300 and time.monotonic() < deadline:
            again += consumer.poll(1000)
        assert len(again) == 300


def test_a_playback_into_another_topic(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/orders")
    action = "/console/topics/orders/playback"
    times = {"start": "2025-11-15T09:46:50Z", "end": "2025-11-15T09:47:00Z"}
    asked = browser.send(page, action, target="t", speed="10", **times)
    assert "Appends about 10 events (" in text_of(asked.text)
    assert "At 10 times the original speed it takes about 1 s." in text_of(asked.text)
    assert served.home.jobs.list() == [], "it is only a preview"
    begun = browser.send(asked.text, action)
    assert (begun.status_code, begun.headers["location"]) == (303, "/console/jobs")
    eventually(lambda: browser.get("/console/jobs"), "done", "10 events played")
    assert len(served.values("t")) == 10
    for wrong in ({"target": "orders"}, {"target": "none"}, {"target": "../x"}, {"speed": "fast"}):
        assert browser.send(page, action, **{"target": "t", **wrong}).status_code in (400, 404)


def test_a_job_can_be_stopped(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/orders")
    browser.send(page, "/console/topics/orders/playback", target="t", speed="1", sure="1")
    running = browser.get("/console/jobs")
    stopped = browser.send(running, "/console/jobs/stop")
    assert stopped.status_code == 303
    eventually(lambda: browser.get("/console/jobs"), "stopped")
    assert len(served.values("t")) < 300
    assert not [form for form in forms_of(browser.get("/console/jobs")) if "stop" in form.action]


def test_what_is_not_there_is_told_as_a_page(browser: Browser) -> None:
    for path in ("/console/", "/console/nothing", "/console/topics/a/b/c"):
        assert "not found" in text_of(browser.get(path, 404))
    wrong = browser.client.post("/console/topics")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert browser.client.get("/console/static/../site.py").status_code == 404
    assert browser.client.get("/console/static/nothing.css").status_code == 404
    assert browser.client.head("/").status_code == 200


def test_figures_are_old_and_said_to_be_while_the_catalog_is_away(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: browser.get("/"), "300 events")

    def gone(*given: object, **more: object) -> None:
        raise UnavailableError("catalog: does not answer: try again")

    for call in ("get", "scan"):
        monkeypatch.setattr(served.home.catalog, call, gone)
    page = eventually(lambda: browser.get("/"), "the catalog cannot be read")
    assert "300 events" in text_of(page)
    assert browser.client.get("/console/topics/orders").status_code == 503
    assert browser.client.get("/console/topics/orders/timeline").status_code == 503
    monkeypatch.undo()
    page = eventually(lambda: browser.get("/"), "300 events", "healthy")
    assert "cannot be read" not in page
