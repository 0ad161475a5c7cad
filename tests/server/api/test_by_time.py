"""Events by time over HTTP: order, pages, and what happens to the topic between them."""

from __future__ import annotations

import base64
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.serving import Served, error, serving
from tidelog import Event
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.playback.pages import RangeCursor

SECOND = 1_000
FIRST_MS = 1_794_736_800_000  # 2026-11-15T10:00:00Z


def fill(served: Served, count: int = 300, seed: int = 1) -> list[tuple[int, str]]:
    """Events out of order, several at one time; what a range of all must give."""
    source = random.Random(seed)
    wanted = []
    for first in range(0, count, 50):
        events = []
        for number in range(first, first + 50):
            time_ms = FIRST_MS + source.randrange(60) * SECOND
            events.append(Event(str(number).encode(), b"k%d" % (number % 7), timestamp=time_ms))
        positions = served.home.append("t", events)
        wanted += [
            ((e.timestamp, at.partition, at.offset), (e.value or b"").decode())
            for e, at in zip(events, positions, strict=True)
        ]
    return sorted(wanted)  # type: ignore[arg-type,return-value]


def walk(served: Served, query: str) -> tuple[list[dict[str, Any]], int]:
    """All events of a range, by following links; and how many pages that took."""
    url = f"/topics/t/events?{query}"
    seen: list[dict[str, Any]] = []
    pages = 0
    while True:
        answer = served.client.get(url)
        assert answer.status_code == 200, answer.text
        seen += answer.json()["events"]
        pages += 1
        found = re.fullmatch(r'<(.*)>; rel="next"', answer.headers.get("link", ""))
        assert bool(found) == (answer.json()["next"] is not None)
        if not found:
            return seen, pages
        url = found[1]


def test_a_range_comes_by_time_page_by_page(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=3) as served:
        wanted = fill(served)
        for limit, pages in ((7, 43), (100, 3), (10_000, 1)):
            query = f"start=2026-11-15T10:00:00Z&end=2026-11-15T10:01:00Z&limit={limit}"
            seen, taken = walk(served, query)
            assert [event["value"] for event in seen] == [value for _, value in wanted]
            assert taken == pages
        seen, _ = walk(served, "start=2026-11-15T10:00:10.000Z&end=2026-11-15T10:00:20Z&limit=9")
        assert [event["value"] for event in seen] == [
            value
            for (time_ms, *_), value in wanted  # type: ignore[misc]
            if FIRST_MS + 10 * SECOND <= time_ms < FIRST_MS + 20 * SECOND
        ]


def test_what_is_appended_meanwhile_is_not_part_of_it(served: Served) -> None:
    wanted = fill(served, 100)
    path = "/topics/t/events?start=2026-11-15T10:00:00Z&end=2026-11-15T10:02:00Z&limit=40"
    first = served.client.get(path)
    served.home.append("t", [Event(b"late", timestamp=FIRST_MS + 59 * SECOND + 999)])
    seen = first.json()["events"]
    cursor = first.json()["next"]
    while cursor:
        page = served.client.get(f"/topics/t/events?cursor={cursor}&limit=40").json()
        seen, cursor = seen + page["events"], page["next"]
    assert [event["value"] for event in seen] == [value for _, value in wanted]


def test_the_default_is_the_last_fifteen_minutes(served: Served) -> None:
    served.post({"value": "now"})
    now = served.home.context.clock.now_ms()
    served.home.append("t", [Event(b"old", timestamp=now - 16 * 60_000)])
    assert [event["value"] for event in walk(served, "")[0]] == ["now"]
    assert [event["value"] for event in walk(served, "start=-1h")[0]] == ["old", "now"]
    lines = served.client.get(
        "/topics/t/events?start=-1h", headers={"accept": "application/x-ndjson"}
    )
    assert len(lines.text.splitlines()) == 2
    assert walk(served, "start=2020-01-01&end=2020-01-01") == ([], 1)


def test_a_trim_or_a_new_topic_between_pages_is_told(served: Served) -> None:
    fill(served, 100)
    path = "/topics/t/events?start=2026-11-15T10:00:00Z&end=2026-11-15T10:02:00Z&limit=10"
    cursor = served.client.get(path).json()["next"]
    following = f"/topics/t/events?cursor={cursor}"
    assert served.client.get(following).status_code == 200
    served.home.trim("t", ToOffsets({0: 50}))
    gone = served.client.get(following)
    assert (gone.status_code, error(gone)["context"]["start"]) == (410, 50)
    assert len(walk(served, path.partition("?")[2])[0]) == 50
    served.home.delete_topic("t")
    served.home.create_topic("t")
    assert served.client.get(following).status_code == 404


def test_large_events_make_short_pages(served: Served) -> None:
    large = [Event(b"x" * 900_000, timestamp=FIRST_MS + n) for n in range(12)]
    served.home.append("t", large)
    seen, pages = walk(served, "start=2026-11-15T10:00:00Z&end=2026-11-15T11:00:00Z&limit=12")
    assert [event["offset"] for event in seen] == list(range(12))
    assert pages >= 2


@pytest.mark.parametrize(
    "query",
    [
        "start=never",
        "start=2026-11-15T10:00:00Z&end=2026-11-15T09:00:00Z",
        "cursor=x&start=-1h",
        "cursor=!!",
        "cursor=",
        "cursor=" + "A" * 20_000,
        "cursor=gqA",
        "limit=0",
        "begin=-1h",
    ],
)
def test_bad_queries_are_refused(served: Served, query: str) -> None:
    answer = served.client.get(f"/topics/t/events?{query}")
    assert answer.status_code == 400
    assert error(answer)["kind"] == "invalid"


def test_forged_cursors_are_refused(served: Served) -> None:
    fill(served, 50)
    path = "/topics/t/events?start=2026-11-15T10:00:00Z&end=2026-11-15T10:02:00Z&limit=10"
    text = served.client.get(path).json()["next"]
    good = RangeCursor.of_text(text)
    assert RangeCursor.of_text(good.text()) == good
    for forged in (
        {"ends": (10**9,)},
        {"ends": (-1,)},
        {"starts": (5, 6)},
        {"starts": (-5,)},
        {"starts": ()},
        {"ends": (1, 2)},
        {"incarnation": "../../etc"},
        {"start_ms": -1},
        {"start_ms": good.end_ms, "end_ms": good.start_ms},
        {"start_ms": FIRST_MS + 59 * SECOND},
        {"end_ms": 10**17},
    ):
        bad = msgspec.structs.replace(good, **forged).text()
        answer = served.client.get(f"/topics/t/events?cursor={bad}")
        assert answer.status_code in (400, 404), forged
    source = random.Random(7)
    for _ in range(200):
        packed = bytearray(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        packed[source.randrange(len(packed))] = source.randrange(256)
        bad = base64.urlsafe_b64encode(packed).rstrip(b"=").decode()
        answer = served.client.get(f"/topics/t/events?cursor={bad}")
        assert answer.status_code in (200, 400, 404, 410), answer.text


def test_a_topic_of_very_many_partitions_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=101) as served:
        for path in ("/topics/t/events", "/topics/t/tail"):
            assert "101 partitions" in error(served.client.get(path))["message"]
        assert served.client.get("/topics/t/partitions/100/events").status_code == 200
