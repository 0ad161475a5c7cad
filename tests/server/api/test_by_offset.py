"""Reading over HTTP: pages, long polls, and tails that can be resumed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidelog
from tests.support.compiled_logs import Bench
from tests.support.serving import Served, error, serving
from tidelog import Event
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.server.api import read
from tidelog.server.http import limits


def fill(served: Served, count: int, topic: str = "t") -> None:
    served.home.append(topic, [Event(b"%d" % n) for n in range(count)])


def wait_until(served: Served, metric: str) -> None:
    deadline = time.monotonic() + 60
    while metric not in served.client.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_topics_are_listed_and_shown(served: Served) -> None:
    served.home.create_topic("other", 3)
    fill(served, 5)
    listed = served.client.get("/topics").json()["topics"]
    assert [(each["name"], each["partitions"]) for each in listed] == [("other", 3), ("t", 1)]
    shown = served.client.get("/topics/t").json()
    assert shown["per_partition"] == [{"partition": 0, "start": 0, "next": 5}]
    assert error(served.client.get("/topics/none"))["kind"] == "not_found"
    assert served.client.get("/topics/none").status_code == 404


def test_consumers_are_listed_with_their_lag(served: Served) -> None:
    assert served.client.get("/topics/t/consumers").json() == {"topic": "t", "consumers": []}
    fill(served, 5)
    with served.home.consumer("t", "billing") as consumer:
        consumer.poll(max_events=2)
        consumer.commit()
        owned = served.client.get("/topics/t/consumers").json()["consumers"][0]
        assert owned["partitions"][0]["owner"], "the member that has the lease"
    assert served.client.get("/topics/t/consumers").json()["consumers"] == [
        {
            "name": "billing",
            "lag": 3,
            "partitions": [{"partition": 0, "cursor": 2, "end": 5, "lag": 3, "owner": None}],
        }
    ]
    assert served.client.get("/topics/none/consumers").status_code == 404


def test_the_reference_of_the_api_is_a_page(served: Served) -> None:
    page = served.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for path in served.client.get("/openapi.json").json()["paths"]:
        assert f" {path}</code>" in page.text
    assert "{&#34;value&#34;: {&#34;price&#34;: 3}" in page.text  # an event, as one sends it
    assert "{&#34;query&#34;: &#34;select count(*) as n from orders&#34;}" in page.text
    assert "Scope: <code>--append</code>" in page.text
    assert "(1 to 10000, default: 100)" in page.text
    assert "`" not in page.text.partition("<main")[2]
    assert page.text.count("Too many requests") == 1  # what all can return is there once


def test_pages_lead_from_one_to_the_next(served: Served) -> None:
    fill(served, 25)
    seen: list[str] = []
    url = "/topics/t/partitions/0/events?limit=10"
    for wanted in (10, 10, 5, 0):
        answer = served.client.get(url)
        page = answer.json()
        assert len(page["events"]) == wanted
        assert (page["start"], page["end"]) == (0, 25)
        assert answer.headers["tidelog-next-offset"] == str(page["next"])
        seen += [each["value"] for each in page["events"]]
        found = re.fullmatch(r'<(.*)>; rel="next"', answer.headers["link"])
        assert found
        url = found[1]
    assert seen == [str(n) for n in range(25)]
    lines = served.client.get(
        "/topics/t/partitions/0/events?offset=20", headers={"accept": "application/x-ndjson"}
    )
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line)["offset"] for line in lines.text.splitlines()] == [*range(20, 25)]


def test_events_read_back_as_they_were_sent(served: Served) -> None:
    event = Event(b"\xff", b"\xfe", "id", 5, "type", (("h", b"\xfd"),))
    served.home.append("t", [event])
    shown = served.events()["events"][0]
    assert shown == {
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:00.005Z",
        "id": "id",
        "key": {"base64": "/g=="},
        "value": {"base64": "/w=="},
        "type": "type",
        "headers": [["h", {"base64": "/Q=="}]],
    }


def test_earliest_latest_and_what_is_not_there(served: Served) -> None:
    fill(served, 10)
    assert served.events(offset="latest")["events"] == []
    assert served.events(offset="latest")["next"] == 10
    assert served.events(offset="earliest", limit=1)["next"] == 1
    beyond = served.client.get("/topics/t/partitions/0/events?offset=11")
    assert (beyond.status_code, error(beyond)["context"]["end"]) == (404, 10)
    for path in ("/topics/t/partitions/1/events", "/topics/t/tail?partition=1"):
        assert served.client.get(path).status_code == 404
    served.home.trim("t", ToOffsets({0: 4}))
    gone = served.client.get("/topics/t/partitions/0/events?offset=3")
    assert (gone.status_code, error(gone)["context"]) == (410, {"offset": 3, "start": 4})
    assert served.events()["events"][0]["offset"] == 4


@pytest.mark.parametrize(
    "path",
    [
        "/topics/t/partitions/x/events",
        "/topics/t/partitions/-1/events",
        "/topics/t/partitions/99999999999999999999/events",
        "/topics/t/partitions/0/events?offset=-1",
        "/topics/t/partitions/0/events?offset=x",
        "/topics/t/partitions/0/events?offset=9223372036854775808",
        "/topics/t/partitions/0/events?limit=0",
        "/topics/t/partitions/0/events?limit=10001",
        "/topics/t/partitions/0/events?wait=31",
        "/topics/t/partitions/0/events?wait=nan",
        "/topics/t/partitions/0/events?wait=-1",
        "/topics/t/partitions/0/events?ofset=1",
        "/topics/t/partitions/0/events?offset=1&offset=2",
        "/topics?x=1",
        "/topics/t/tail?from=x",
    ],
)
def test_bad_queries_are_refused(served: Served, path: str) -> None:
    answer = served.client.get(path)
    assert answer.status_code == 400, answer.text
    assert error(answer)["kind"] == "invalid"


def test_large_events_make_short_pages(served: Served) -> None:
    served.home.append("t", [Event(b"x" * 900_000) for _ in range(12)])
    offset, pages = 0, 0
    while offset < 12:
        page = served.events(offset=offset, limit=12)
        assert 1 <= len(page["events"]) <= 6
        offset, pages = page["next"], pages + 1
    assert pages >= 2


def test_a_long_poll_ends_at_once_when_something_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_FIRST_S", "_LONGEST_S"):  # by themselves they look again in an hour
        monkeypatch.setattr(read, pause, 3_600.0)
    monkeypatch.setattr(limits, "WAIT_S_MAX", 3_600.0)
    real, looked, came = read.Waiter.wait, list[read.Waiter](), list[Any]()

    async def wait(waiter: read.Waiter, most_s: float) -> bool:
        looked.append(waiter)
        return await real(waiter, most_s)

    monkeypatch.setattr(read.Waiter, "wait", wait)
    assert served.events(wait=0)["events"] == []

    def poll() -> None:
        with httpx.Client(base_url=served.url, timeout=120) as client:
            came.append(client.get("/topics/t/partitions/0/events?offset=latest&wait=3600").json())

    polls = [threading.Thread(target=poll) for _ in range(10)]
    for each in polls:
        each.start()
    wait_until(served, "tidelog_waiting 10.0")
    deadline = time.monotonic() + 60
    while len(looked) < 10:  # all have found nothing before it comes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.post({"value": "news"})
    for each in polls:
        each.join(120)
    assert len(came) == 10
    for page in came:
        assert [event["value"] for event in page["events"]] == ["news"], "they were woken"


def test_a_long_poll_sees_what_other_processes_commit_and_ends_in_time(served: Served) -> None:
    began = time.monotonic()
    page = served.events(offset=0, wait=0.3)
    assert page["events"] == []
    assert 0.3 <= time.monotonic() - began < 60
    with tidelog.open(served.home.config) as elsewhere:
        timer = threading.Timer(0.3, elsewhere.append, ("t", [Event(b"far")]))
        timer.start()
        page = served.events(offset=0, wait=30)
        timer.join()
    assert [event["value"] for event in page["events"]] == ["far"]


def frames(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream: their ids and what they hold."""
    found: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
            continue
        if "data" in found:
            yield found.get("id", found.get("event", "")), json.loads(found["data"])
        found = {}


def test_a_tail_gives_what_comes_and_goes_on_after_the_last_id(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=3) as served:
        served.home.append("t", [Event(b"old", b"k%d" % n) for n in range(6)])
        with served.client.stream("GET", "/topics/t/tail") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            served.home.append("t", [Event(b"a%d" % n, b"k%d" % n) for n in range(20)])
            coming = frames(answer)
            seen = [next(coming) for _ in range(7)]
        last = seen[-1][0]
        served.home.append("t", [Event(b"b%d" % n, b"k%d" % n) for n in range(20)])
        with served.client.stream("GET", "/topics/t/tail", headers={"last-event-id": last}) as more:
            coming = frames(more)
            seen += [next(coming) for _ in range(33)]
        values = [event["value"] for _, event in seen]
        assert sorted(values) == sorted(f"{x}{n}" for x in "ab" for n in range(20))
        for partition in range(3):
            offsets = [event["offset"] for _, event in seen if event["partition"] == partition]
            assert offsets == sorted(offsets), "in order, and none twice"


def test_a_tail_that_breaks_before_its_first_event_goes_on_where_it_began(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=2) as served:
        served.home.append("t", [Event(b"old", b"k%d" % n) for n in range(6)])
        with served.client.stream("GET", "/topics/t/tail") as answer:
            began = next(line for line in answer.iter_lines() if line.startswith("id: "))
        served.home.append("t", [Event(b"missed", b"k%d" % n) for n in range(6)])
        last = {"last-event-id": began.removeprefix("id: ")}
        with served.client.stream("GET", "/topics/t/tail", headers=last) as more:
            coming = frames(more)
            assert [next(coming)[1]["value"] for _ in range(6)] == ["missed"] * 6


def test_a_tail_from_the_beginning_of_one_partition(served: Served) -> None:
    fill(served, 1_200)
    with served.client.stream("GET", "/topics/t/tail?partition=0&from=earliest") as answer:
        coming = frames(answer)
        assert [next(coming)[1]["offset"] for _ in range(1_200)] == list(range(1_200))
        served.post({"value": "live"})
        assert next(coming) == ("0:1201", served.events(offset=1_200)["events"][0])
    bad = served.client.get("/topics/t/tail", headers={"last-event-id": "../x"})
    assert bad.status_code == 400
    assert served.client.get("/topics/t/tail?from=9999").status_code == 404


def test_pages_pass_over_what_was_erased(served: Served) -> None:
    fill(served, 1_000)
    bench = Bench(served.home.context, served.home.topic("t"))
    bench.delete(1, *range(4, 990))
    bench.compile(0, 1_000)
    bench.delete(993)
    url = "/topics/t/partitions/0/events?limit=4"
    offsets, nexts = [], []
    while True:
        page = served.client.get(url).json()
        offsets.append([event["offset"] for event in page["events"]])
        nexts.append(page["next"])
        url = f"/topics/t/partitions/0/events?limit=4&offset={page['next']}"
        if page["next"] == 1_000:
            break
    assert offsets == [[0, 2, 3, 990], [991, 992, 994, 995], [996, 997, 998, 999]]
    assert nexts == [991, 996, 1_000]


def test_a_long_poll_and_a_tail_pass_over_what_was_erased(served: Served) -> None:
    fill(served, 10)
    bench = Bench(served.home.context, served.home.topic("t"))
    bench.delete(*range(5, 10))
    threading.Timer(0.5, served.home.append, ("t", [Event(b"new")])).start()
    page = served.client.get("/topics/t/partitions/0/events?offset=5&wait=30").json()
    assert [event["offset"] for event in page["events"]] == [10]
    with served.client.stream("GET", "/topics/t/tail?partition=0&from=earliest") as answer:
        coming = frames(answer)
        found = [next(coming) for _ in range(6)]
    assert [name for name, _ in found] == ["0:1", "0:2", "0:3", "0:4", "0:5", "0:11"]
    assert [event["offset"] for _, event in found] == [0, 1, 2, 3, 4, 10]


def test_tail_that_starts_after_a_delete_joins_no_older_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tidelog.server.api.tail as tail

    served.post([{"value": "deleted", "id": "a"}, {"value": "kept", "id": "b"}])
    read, began, release = tail.read_page, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        page = read(*given)
        if given[-1] > 1 and not began.is_set():
            began.set()
            assert release.wait(60)
        return page

    monkeypatch.setattr(tail, "read_page", slow)
    earliest = {"params": {"from": "earliest"}, "timeout": 30}
    with served.client.stream("GET", "/topics/t/tail", **earliest):
        try:
            assert began.wait(60)
            assert served.client.delete("/topics/t/ids/a").status_code == 200
            with served.client.stream("GET", "/topics/t/tail", **earliest) as later:
                data = (line for line in later.iter_lines() if line.startswith("data"))
                assert '"kept"' in next(data)
        finally:
            release.set()


def test_a_tail_of_a_topic_that_is_deleted_ends_with_an_error(served: Served) -> None:
    with served.client.stream("GET", "/topics/t/tail") as answer:
        threading.Timer(0.2, served.home.delete_topic, ("t",)).start()
        assert [(name, event["error"]["kind"]) for name, event in frames(answer)] == [
            ("error", "not_found")
        ]


def test_tails_that_went_away_are_forgotten(served: Served) -> None:
    for _ in range(5):
        with served.client.stream("GET", "/topics/t/tail") as answer:
            next(answer.iter_lines())
    wait_until(served, "tidelog_waiting 0.0")
