"""Appending over HTTP: what a body may be, what is answered, and what is refused."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Served, error, serving
from tests.support.waiting import until
from tidelog import Event
from tidelog.errors import TidelogError
from tidelog.log.producer.producer import Producer
from tidelog.server.api import open_topics
from tidelog.server.api.ingest import Headers, Ingest
from tidelog.server.http import limits
from tidelog.server.http.limits import ServerThreads

JSON_TYPE = {"content-type": "application/json"}
LINES = "application/x-ndjson"


def test_one_event_is_answered_with_its_position_and_is_there(served: Served) -> None:
    for number in range(3):
        answer = served.post({"value": f"v{number}"})
        assert answer.status_code == 201
        wanted = {"topic": "t", "positions": [{"partition": 0, "offset": number}]}
        assert answer.json() == wanted
    assert served.values() == [b"v0", b"v1", b"v2"]


def test_an_event_keeps_all_its_fields(served: Served) -> None:
    raw = bytes(range(256))
    event = {
        "timestamp": "2026-11-15T10:00:00.123Z",
        "id": "e-1",
        "key": "customer-7",
        "value": {"base64": base64.b64encode(raw).decode()},
        "type": "order",
        "headers": [["a", "1"], ["a", {"base64": "/w=="}]],
    }
    assert served.post(event).status_code == 201
    stored = next(served.home.read("t"))
    assert stored == Event(
        value=raw,
        key=b"customer-7",
        id="e-1",
        timestamp=1794736800123,
        type="order",
        headers=(("a", b"1"), ("a", b"\xff")),
        topic="t",
        partition=0,
        offset=0,
    )
    page = served.events()["events"]
    assert served.post(page).status_code == 201, "what was read can be sent again"
    again = list(served.home.read("t"))
    assert [each.value for each in again] == [raw, raw]
    assert served.post({"value": None}).status_code == 201
    assert served.values()[-1] is None, "a tombstone"


def test_arrays_and_lines_are_many_events_in_their_order(served: Served) -> None:
    many = [{"value": str(number)} for number in range(500)]
    answer = served.post(many)
    assert [each["offset"] for each in answer.json()["positions"]] == list(range(500))
    lines = b"\n".join(json.dumps(each).encode() for each in many) + b"\r\n\n"
    answer = served.client.post(
        "/topics/t/events", content=lines, headers={"content-type": LINES + "; charset=utf-8"}
    )
    assert answer.status_code == 201
    assert served.values() == [str(number).encode() for number in range(500)] * 2


def test_raw_bytes_take_the_rest_from_headers(served: Served) -> None:
    raw = b"\x00\xff not JSON\n"
    headers = {
        "content-type": "application/octet-stream",
        "tidelog-key": "k",
        "tidelog-id": "ä".encode(),
        "tidelog-time": "2026-11-15T10:00:00Z",
        "tidelog-type": "blob",
    }
    assert served.client.post("/topics/t/events", content=raw, headers=headers).status_code == 201
    stored = next(served.home.read("t"))
    assert (stored.value, stored.key, stored.id, stored.type) == (raw, b"k", "ä", "blob")
    assert stored.timestamp == 1794736800000
    served.client.post("/topics/t/events", content=b"")
    served.client.post("/topics/t/events", content=b"x", headers={"tidelog-time": "12"})
    assert [each.timestamp for each in served.home.read("t", 0, 2)] == [12]
    assert served.values()[1] == b"", "an empty value is a value"


def test_keys_decide_the_partition_and_keyless_ones_share_a_flush(tmp_path: Path) -> None:
    with serving(tmp_path, partitions=4) as served:
        events = [{"value": str(n), "key": f"k{n}"} for n in range(50)]
        positions = served.post(events).json()["positions"]
        for number, position in enumerate(positions):
            key = f"k{number}".encode()
            assert position["partition"] == served.home.partition_for("t", key)


def test_a_large_body_goes_by_a_thread_and_a_flush_after_another(served: Served) -> None:
    events = [{"value": "x" * 10_000 + str(number)} for number in range(600)]
    answer = served.post(events)
    assert [each["offset"] for each in answer.json()["positions"]] == list(range(600))
    assert served.values()[599] == b"x" * 10_000 + b"599"


def test_a_body_of_many_bytes_is_parsed_apart_however_few_its_events(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[int] = []
    real = ServerThreads.run_large

    async def note(self: ServerThreads, *given: Any) -> Any:
        apart.append(len(given[-1]))
        return await real(self, *given)

    monkeypatch.setattr(ServerThreads, "run_large", note)
    body = b'{"value":"x"' + b" " * 2_000_000 + b"}"
    typed = {"content-type": "application/x-ndjson"}
    assert served.client.post("/topics/t/events", content=body, headers=typed).status_code == 201
    assert apart == [len(body)]


def test_many_requests_at_once_are_each_told_their_own_position(served: Served) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: served.post({"value": str(n)}), range(400)))
    offsets = [each.json()["positions"][0]["offset"] for each in answers]
    assert sorted(offsets) == list(range(400))
    stored = served.values()
    assert [stored[offset] for offset in offsets] == [str(n).encode() for n in range(400)]


def test_requests_that_come_while_the_store_is_slow_share_a_flush(served: Served) -> None:
    before = served.home.meter.verbs["put"].requests
    _, release = hold_puts(served)
    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(served.post, {"value": "x" * 1_000}) for _ in range(60)]
        until(lambda: buffered(served) >= 60_000)
        release.set()
        assert {each.result().status_code for each in waiting} == {201}
    assert len(served.values()) == 60
    assert served.home.meter.verbs["put"].requests - before < 10


BAD: list[tuple[str, bytes, dict[str, str], int]] = [
    ("no JSON", b"{", {}, 400),
    ("a deep array", b"[" * 100_000, {}, 400),
    ("a deep array in an array", b"[" + b"[" * 100_000 + b"]" * 100_001, {}, 400),
    ("a deep object", b'{"value":' * 100_000, {}, 400),
    ("a deep line", b'{"value":' + b"[" * 60_000, {"content-type": LINES}, 400),
    ("cut UTF-8", b'{"value": "\xc3', {}, 400),
    ("a number", b"7", {}, 400),
    ("nothing", b"", {}, 400),
    ("no value", b'{"key": "k"}', {}, 400),
    ("an unknown field", b'{"value": "x", "nme": 1}', {}, 400),
    ("a key that is an object", b'{"value": {"a": 1}, "key": {"a": 1}}', {}, 400),
    ("half a surrogate pair in an object", b'{"value": {"a": "\\ud800"}}', {}, 400),
    ("an empty array", b"[]", {}, 400),
    ("one bad of two", b'[{"value": "good"}, {"value": 1, "key": 1}]', {}, 400),
    ("an empty id at the end", b'[{"value": "good"}, {"value": "x", "id": ""}]', {}, 400),
    ("a time before 1970", b'{"value": "x", "timestamp": "1969-12-31T23:59:59Z"}', {}, 400),
    ("no time", b'{"value": "x", "timestamp": "yesterday"}', {}, 400),
    ("half a surrogate pair", b'{"value": "\\ud800"}', {}, 400),
    ("no base64", b'{"value": {"base64": "*"}}', {}, 400),
    ("a form", b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("no lines", b"\n\n", {"content-type": LINES}, 400),
    ("a bad line", b'{"value": "good"}\n{"value"', {"content-type": LINES}, 400),
    ("no time in a header", b"x", {"content-type": "text/plain", "tidelog-time": "x"}, 400),
    ("an empty id in a header", b"x", {"content-type": "text/plain", "tidelog-id": ""}, 400),
    ("an empty idempotency key", b'{"value": "x"}', {"idempotency-key": ""}, 400),
    ("a long idempotency key", b'{"value": "x"}', {"idempotency-key": "k" * 256}, 400),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), settings={"event_bytes_max": 1_000}) as found:
        yield found


@pytest.mark.parametrize(
    ("body", "headers", "wanted"), [each[1:] for each in BAD], ids=[each[0] for each in BAD]
)
def test_bad_bodies_are_refused_whole(
    shared: Served, body: bytes, headers: dict[str, str], wanted: int
) -> None:
    sent = {"content-type": "application/json", **headers}
    answer = shared.client.post("/topics/t/events", content=body, headers=sent)
    assert answer.status_code == wanted, answer.text
    assert error(answer)["message"]
    assert shared.values() == [], "no event of a refused body is stored"


def test_an_event_beyond_the_limit_is_413(shared: Served) -> None:
    for body in ({"value": "x" * 1_001}, [{"value": "x"}, {"value": "x" * 990, "key": "k" * 11}]):
        answer = shared.post(body)
        assert answer.status_code == 413
        assert error(answer)["context"]["bytes_max"] == 1_000
    assert shared.values() == []


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc", "a%00b", "-x", "%20", "t%0d%0aset-cookie:x", "ü", "x" * 201],
)
@pytest.mark.parametrize("way", ["POST /topics/{}/events", "GET /topics/{}", "GET /track/{}.gif"])
def test_topic_names_that_are_none_reach_nothing(shared: Served, way: str, name: str) -> None:
    method, _, path = way.partition(" ")
    folder = Path(shared.home.store.url.removeprefix("file://"))
    before = sorted(folder.rglob("*"))
    answer = shared.client.request(method, path.format(name), content=b"x" * (method == "POST"))
    is_console = answer.request.url.path == "/"  # the client has made that of `..` by itself
    assert answer.status_code in ((200,) if is_console else (400, 404)), answer.text
    assert "set-cookie" not in answer.headers
    assert sorted(folder.rglob("*")) == before


def test_an_unknown_topic_is_404_and_is_taken_once_it_is_made(served: Served) -> None:
    assert served.post({"value": "x"}, topic="new").status_code == 404
    served.home.create_topic("new")
    assert served.post({"value": "x"}, topic="new").status_code == 201


@pytest.mark.parametrize("once", [{}, {"idempotency_key": "k"}], ids=["plain", "once"])
def test_a_topic_that_is_made_again_is_written_to_at_once(
    served: Served, once: dict[str, str]
) -> None:
    assert served.post({"value": "old"}, **once).status_code == 201
    served.home.delete_topic("t")
    assert served.post({"value": "x"}, **once).status_code == 404
    served.home.create_topic("t", 2)
    assert served.post({"value": "new"}, **once).status_code == 201
    assert served.values("t", 0) + served.values("t", 1) == [b"new"]


def test_a_repeat_with_the_same_key_gets_the_first_positions(served: Served) -> None:
    body = [{"value": "a"}, {"value": "b"}]
    first = served.post(body, idempotency_key="order-1")
    assert first.status_code == 201
    for _ in range(3):
        again = served.post(body, idempotency_key="order-1")
        assert (again.status_code, again.json()) == (201, first.json())
    assert served.post({"value": "c"}, idempotency_key="order-2").status_code == 201
    assert served.values() == [b"a", b"b", b"c"]
    other = served.post({"value": "z"}, idempotency_key="order-1")
    assert other.status_code == 409
    assert error(other)["kind"] == "already_exists"


def test_a_repeat_is_known_to_other_processes_and_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as one, serving(tmp_path, home=one.home) as two:
        first = one.post({"value": "a"}, idempotency_key="k")
        assert two.post({"value": "a"}, idempotency_key="k").json() == first.json()
        config = one.home.config
    from tidelog import open as open_home

    with open_home(config) as home, serving(tmp_path, home=home) as later:
        assert later.post({"value": "a"}, idempotency_key="k").json() == first.json()
        assert later.values() == [b"a"]


def test_repeats_at_the_same_time_store_one(served: Served) -> None:
    start = threading.Barrier(8)

    def post(_: int) -> Any:
        start.wait()
        return served.post([{"value": "a"}, {"value": "b"}], idempotency_key="k").json()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert served.values() == [b"a", b"b"]


def buffered(served: Served) -> float:
    """Bytes on their way, as the metrics tell."""
    found = re.search(
        r'^tidelog_buffered_bytes{topic="t"} (.*)$', served.client.get("/metrics").text, re.M
    )
    return float(found[1]) if found else 0.0


def hold_puts(served: Served) -> tuple[threading.Event, threading.Event]:
    """Let puts into the store wait: one event tells that one does, the other lets them go on."""
    held, release = threading.Event(), threading.Event()
    store: Any = served.home.context.store
    put = store.put

    def slow(key: str, data: bytes) -> str:
        held.set()
        release.wait(120)
        return str(put(key, data))

    store.put = slow
    return held, release


def test_a_full_buffer_is_503_with_retry_after_and_blocks_nobody(tmp_path: Path) -> None:
    small = {"buffer_bytes": 300_000, "segment_bytes": 100_000, "event_bytes_max": 200_000}
    with serving(tmp_path, settings=small, body_bytes_max=300_000) as served:
        served.post({"value": "warm"})
        held, release = hold_puts(served)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(served.post, {"value": "x" * 140_000}) for _ in range(2)]
            assert held.wait(60)
            until(lambda: buffered(served) >= 280_000)
            full = served.post({"value": "y" * 140_000})
            assert full.status_code == 503
            assert int(full.headers["retry-after"]) >= 1
            assert error(full)["kind"] == "unavailable"
            assert served.client.get("/healthz").status_code == 200
            release.set()
            assert [each.result().status_code for each in waiting] == [201, 201]
        assert len(served.values()) == 3, "what was refused is not stored"


def test_values_may_be_json_and_are_stored_as_they_are_written(served: Served) -> None:
    bodies = [b'{"amount": 12.50, "b":  [1, {"base64": "x"}]}', b"[1,2]", b"12.0", b"true", b"{}"]
    for body in bodies:
        sent = b'{"value": %s, "id": "o-1", "timestamp": 5.0}' % body
        answer = served.client.post("/topics/t/events", content=sent, headers=JSON_TYPE)
        assert answer.status_code == 201, answer.text
    assert served.values() == bodies
    assert served.client.post("/topics/t/events", json=[{"value": {"n": n}} for n in (1, 2)])
    assert served.values()[-2:] == [b'{"n":1}', b'{"n":2}']
    event = next(served.home.read("t"))
    assert (event.id, event.timestamp) == ("o-1", 5)
    bare = served.client.post("/topics/t/events", json={"amount": 12})
    assert bare.json()["error"]["message"].startswith("body: is not an event as JSON: ")
    assert 'unknown field `amount`: give {"value": …}' in bare.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b'{"value": ', 'give {"value": …}, with key,'),
        (b'"x"', 'give {"value": …}, with key,'),
        (b'[{"value": 1}', "give a list of events"),
        (b'{"value": 1, "key": 7}', 'give text, or {"base64": …}'),
        (b'{"value": 1, "id": 7}', "`$.id`: give text"),
        (b'{"value": 1, "timestamp": []}', "give ISO 8601, or milliseconds since 1970"),
        (b'{"value": 1, "headers": {"a": "b"}}', "give a list of [name, value]"),
    ],
)
def test_every_wrong_body_is_answered_with_what_to_send(
    served: Served, body: bytes, hint: str
) -> None:
    answer = served.client.post("/topics/t/events", content=body, headers=JSON_TYPE)
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]


def test_a_form_is_refused_with_the_header_to_send(served: Served) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # of curl, if it is not told
    answer = served.client.post("/topics/t/events", content=b"{}", headers=form)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"].startswith("header content-type: is `application/x-w")


def test_headers_of_a_raw_value_are_refused_beside_json(served: Served) -> None:
    """They would be ignored: the event would have no id."""
    for name in ("Tidelog-Id", "Tidelog-Key", "Tidelog-Time", "Tidelog-Type"):
        refused = served.post({"value": "x"}, **{name: "1"})
        assert refused.status_code == 400
        assert name.lower() in refused.json()["error"]["message"]
    assert served.values() == []


@pytest.mark.parametrize("text", ["\\ud800", "\\udc00", "\\ud800\\u0041"])
def test_half_a_surrogate_pair_in_an_array_is_named(served: Served, text: str) -> None:
    headers = {"content-type": "application/json"}
    body = f'[{{"value": "a"}}, {{"value": "{text}"}}]'
    answer = served.client.post("/topics/t/events", content=body, headers=headers)
    assert answer.status_code == 400
    assert "body: is not JSON: a lone surrogate is not valid Unicode" in error(answer)["message"]
    assert served.values() == []


def test_a_whole_number_may_be_written_with_a_point(served: Served) -> None:
    assert served.post({"value": "x", "timestamp": 5.0}).status_code == 201
    assert [event.timestamp for event in served.home.read("t")] == [5]
    for wrong in (5.5, 1e300, -1.0):
        assert served.post({"value": "x", "timestamp": wrong}).status_code == 400, wrong


def test_topic_stays_open_while_a_large_body_is_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a server that writes to very many topics refuses it: its producer is closed."""
    monkeypatch.setattr(limits, "PRODUCERS_MAX", 1)
    served.home.create_topic("other")
    closed = threading.Event()
    parse, close = Ingest._events, open_topics.close_quietly

    def close_and_tell(producer: Producer) -> TidelogError | None:
        error = close(producer)
        closed.set()
        return error

    def parse_slowly(self: Ingest, headers: Headers, body: bytes) -> list[Event]:
        if len(body) > 100_000:
            answer = httpx.post(f"{served.url}/topics/other/events", content=b"x", timeout=60)
            assert answer.status_code == 201
            closed.wait(0.3)
        return parse(self, headers, body)

    monkeypatch.setattr(Ingest, "_events", parse_slowly)
    monkeypatch.setattr(open_topics, "close_quietly", close_and_tell)
    answer = served.client.post("/topics/t/events", content=b"x" * 100_001)
    assert answer.status_code == 201, answer.text
    assert closed.wait(60), "it is closed once it is not needed"


def test_bodies_that_are_sent_at_once_share_the_room_of_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second one would keep a thread until the store has taken the first."""
    reached, hold = threading.Event(), threading.Event()
    real = Producer.send

    def send(self: Producer, *given: Any, **fields: Any) -> Any:
        reached.set()
        assert hold.wait(60)
        return real(self, *given, **fields)

    small = {"buffer_bytes": 300_000, "segment_bytes": 100_000, "event_bytes_max": 200_000}
    with serving(tmp_path, settings=small, body_bytes_max=300_000) as served:
        body = [{"value": "x" * 300}] * 400  # a body that a thread sends
        monkeypatch.setattr(Producer, "send", send)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(served.post, body)
            try:
                assert reached.wait(60)
                second = served.post(body)
            finally:
                hold.set()
            assert (second.status_code, error(second)["kind"]) == (503, "unavailable")
            assert second.headers["retry-after"] == "1"
            assert first.result().status_code == 201
        assert served.post(body).status_code == 201, "the room is free again"
        assert len(served.values()) == 800


def test_invalid_event_is_named_by_a_number_from_one(served: Served) -> None:
    body = b'{"value": "a"}\n\n{"valeu": "b"}\n'
    typed = {"content-type": LINES}
    error = served.client.post("/topics/t/events", content=body, headers=typed).json()["error"]
    assert (error["message"].partition(":")[0], error["context"]["line"]) == ("line 3", 3)
    array = b'[{"value": "a"}, {"valeu": "b"}]'
    typed = {"content-type": "application/json"}
    error = served.client.post("/topics/t/events", content=array, headers=typed).json()["error"]
    assert (error["message"].partition(":")[0], error["context"]["event"]) == ("event 2", 2)
    assert served.values() == []


def test_unknown_topic_names_the_route_that_lists_topics(served: Served) -> None:
    answer = served.client.post("/topics/none/events", json={"value": "a"})
    assert answer.status_code == 404
    assert "see `GET /topics`" in answer.json()["error"]["message"]
