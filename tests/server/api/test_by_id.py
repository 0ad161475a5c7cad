"""Events by their ids over HTTP, and the list of journals that others read by."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.serving import Served, ask, serving, status
from tidelog import Event, ToOffsets
from tidelog.home import Home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.model.limits import ID_BYTES_MAX
from tidelog.model.token import Token

T0 = 1_700_000_000_000


def path(event_id: str, topic: str = "t") -> str:
    return f"/topics/{topic}/ids/{quote(event_id, safe='')}"


def test_delete_reaches_events_that_only_an_archive_holds(served: Served) -> None:
    served.home.append("t", [Event(b'{"at": 1700000000}', id=f"e{n}") for n in range(3)])
    archive = served.home.archives.create("daily", source="topic:t", parser="json:at")
    archive.run()
    served.home.trim("t", ToOffsets({0: 3}))
    assert served.client.delete(path("e1")).json()["deleted"] == 1
    served.home.maintain(grace="0s")
    assert [each for batch in archive.read() for each in batch["id"].to_pylist()] == ["e0", "e2"]
    assert served.client.delete(path("e1")).status_code == 404


def test_an_event_is_found_updated_and_deleted_by_its_id(served: Served) -> None:
    served.home.append("t", [Event(b"one", b"k", "a/b c", T0, "made"), Event(b"two", id="2")])
    found = served.client.get(path("a/b c")).json()
    assert (found["value"], found["key"], found["id"], found["type"]) == (
        "one",
        "k",
        "a/b c",
        "made",
    )
    done = served.client.put(path("a/b c"), content=b"\xff\x00", params={"why": "typo"})
    assert (done.status_code, done.json()) == (200, {"topic": "t", "id": "a/b c", "bytes": 2})
    assert served.client.get(path("a/b c")).json()["value"] == {"base64": "/wA="}
    gone = served.client.delete(path("a/b c"), params={"why": "asked for"})
    assert gone.json() == {"topic": "t", "id": "a/b c", "deleted": 1}
    for method in ("GET", "PUT", "DELETE"):
        missing = served.client.request(method, path("a/b c"), content=b"x")
        assert missing.status_code == 404, method
        assert missing.json()["error"]["kind"] == "not_found"
    assert served.values() == [b"two"]
    update, delete = served.home.audit("t")
    assert (update.why, update.who, delete.why) == ("typo", "127.0.0.1", "asked for")


def test_an_update_with_an_event_around_its_value_is_refused(served: Served) -> None:
    """Appends have one, so that a client may send it here too, and would store it as the value."""
    served.home.append("t", [Event(b"old", id="a")])
    as_json = {"content-type": "application/json; charset=utf-8"}
    sent = b'{"value": {"price": 3}, "id": "a"}'
    refused = served.client.put(path("a"), content=sent, headers=as_json)
    assert refused.status_code == 400
    assert "send the value without the event around it" in refused.json()["error"]["message"]
    assert served.values() == [b"old"]
    for value in (b'{"price": 3}', b'{"value": 3, "price": 4}', b"[1", b"7"):
        assert served.client.put(path("a"), content=value, headers=as_json).status_code == 200
        assert served.values() == [value]
    raw = {"content-type": "application/octet-stream"}
    assert served.client.put(path("a"), content=sent, headers=raw).status_code == 200
    assert served.values() == [sent]


def test_what_is_wrong_is_refused(served: Served) -> None:
    served.home.append("t", [Event(b"one", id="1")])
    assert served.client.get("/topics/t/ids/").status_code == 400
    assert served.client.get(path("1", "nowhere")).status_code == 404
    assert served.client.get(path("1"), params={"x": "y"}).status_code == 400
    assert served.client.put(path("1"), content=b"x" * (2 << 20)).status_code == 413
    too_long = served.client.put(path("1"), content=b"x", params={"why": "x" * 3_000})
    assert too_long.status_code == 400
    assert served.client.post(path("1")).status_code == 405
    for head in (b"content-length: 0", b"content-type: text/plain", b"transfer-encoding: chunked"):
        sent = b"PUT /topics/t/ids/1 HTTP/1.1\r\nhost: localhost\r\n%s\r\n\r\n" % head
        sent += b"0\r\n\r\n" if b"chunked" in head else b""
        assert status(ask(served.address, sent)) == 400, head
    assert served.values() == [b"one"]


def test_the_longest_ids_are_read_updated_and_erased(served: Served) -> None:
    longest = "\u65e5" * (ID_BYTES_MAX // 3)  # nine bytes each in a URL
    assert served.post({"value": "x", "id": longest}).status_code == 201
    assert served.client.get(path(longest)).json()["id"] == longest
    assert served.client.put(path(longest), content=b"y").json()["bytes"] == 1
    assert served.client.delete(path(longest)).json()["deleted"] == 1
    assert served.values() == []


def test_each_needs_its_right_and_the_audit_names_the_token(tmp_path: Path) -> None:
    tokens: list[tuple[Token, str]] = []

    def first(home: Home) -> None:
        home.append("t", [Event(b"one", id="1")])
        tokens.extend(home.tokens.create((scope,)) for scope in ("read", "amend"))

    with serving(tmp_path, first=first) as served:
        reader, writer = tokens
        served.client.headers["authorization"] = f"Bearer {reader[1]}"
        assert served.client.get(path("1")).status_code == 200
        assert served.client.put(path("1"), content=b"x").status_code == 403
        assert served.client.delete(path("1")).status_code == 403
        served.client.headers["authorization"] = f"Bearer {writer[1]}"
        assert served.client.get(path("1")).status_code == 403
        assert served.client.get("/topics/t/journals").status_code == 403
        assert served.client.put(path("1"), content=b"x").status_code == 200
        assert [each.who for each in served.home.audit("t")] == [f"token {writer[0].id}"]
        with httpx.Client(base_url=served.url, timeout=60) as nobody:
            assert nobody.delete(path("1")).status_code == 401


def test_events_are_appended_only_where_their_ids_are_new(served: Served) -> None:
    first = served.post(
        [{"value": "1", "id": "a"}, {"value": "2", "id": "b"}], tidelog_if_absent="true"
    )
    assert first.status_code == 201
    again = served.post(
        [{"value": "3", "id": "c"}, {"value": "4", "id": "b"}], tidelog_if_absent="true"
    )
    assert again.status_code == 409
    assert again.json()["error"]["context"]["ids"] == ["b"]
    assert served.post({"value": "5"}, tidelog_if_absent="true").status_code == 400
    assert served.post({"value": "5", "id": "z"}, tidelog_if_absent="no").status_code == 400
    both = {"tidelog_if_absent": "true", "idempotency_key": "k"}
    assert served.post({"value": "5", "id": "z"}, **both).status_code == 400
    assert served.values() == [b"1", b"2"]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_others_read_a_topic_by_its_list_of_journals(served: Served, limit: int) -> None:
    home = served.home
    for number in range(6):
        home.append(
            "t", [Event(b"%d" % n, id=str(n), timestamp=T0 + n) for n in (number, number + 10)]
        )
        if number == 3:
            compile_topic(home.context, home.topic("t"), CompilePolicy.everything())
    home.delete("t", ["0", "5"])
    home.update("t", "14", b"other")
    entries, url = [], f"/topics/t/journals?presign=1h&limit={limit}"
    while url:
        answer = served.client.get(url)
        assert answer.status_code == 200, answer.text
        entries += answer.json()["journals"]
        url = answer.links.get("next", {}).get("url", "")
    assert [each["format"] for each in entries] == ["parquet", "arrow", "arrow"]
    found: dict[int, bytes] = {}
    amended: set[int] = set()
    for entry in entries:
        data = Path(entry["url"].removeprefix("file://")).read_bytes()
        own = data[entry["byte_start"] : entry["byte_end"]]
        if entry["format"] == "parquet":
            table = pq.read_table(pa.BufferReader(own))
            offsets = table.column("offset").to_pylist()
        else:
            first, last = entry["schema"]
            table = pa.ipc.open_stream(data[first:last] + own).read_all()
            offsets = list(range(entry["base"], entry["end"]))
        amended |= set(entry["deleted"]) | set(entry["updated"])
        found |= dict(zip(offsets, table.column("value").to_pylist(), strict=True))
    right = {event.offset: event.value for event in home.read("t")}
    assert {offset: value for offset, value in found.items() if offset not in amended} == {
        offset: value for offset, value in right.items() if offset not in amended
    }
    assert len(amended) == 3
    assert len(found) == 12


def test_a_page_after_a_compile_says_where_it_goes_on(served: Served) -> None:
    home = served.home
    for number in range(6):
        home.append("t", [Event(b"%d" % number)] * 2)
    first = served.client.get("/topics/t/journals?limit=2")
    compile_topic(home.context, home.topic("t"), CompilePolicy.everything())
    rest = served.client.get(first.links["next"]["url"])
    entries = first.json()["journals"] + rest.json()["journals"]
    assert [(each["base"], each["start"], each["end"]) for each in entries] == [
        (0, 0, 2),
        (2, 2, 4),
        (0, 4, 12),
    ]


def test_journals_are_listed_by_time_and_without_urls_unless_asked(served: Served) -> None:
    for at in (0, 10, 20):
        served.home.append("t", [Event(b"x", timestamp=T0 + 1000 * at)])
    listed = served.client.get(
        "/topics/t/journals",
        params={"start": "2023-11-14T22:13:25Z", "end": "2023-11-14T22:13:40Z"},
    ).json()
    assert [each["base"] for each in listed["journals"]] == [1]
    assert listed["journals"][0]["url"] is None
    assert listed["next"] is None
    for wrong in ("presign=8d", "presign=0s", "cursor=1.2", "cursor=1.2.3.4&start=-1h", "limit=0"):
        assert served.client.get(f"/topics/t/journals?{wrong}").status_code == 400, wrong


def legal_ids() -> st.SearchStrategy[str]:
    hard = st.sampled_from(
        ["\n", "\r", "\0", "/", " ", "..", "%", "%0A", "a", "\ufffd", "\u2028", "é"]
    )
    pieces = st.one_of(hard, st.characters(exclude_categories=("Cs",)))
    return st.lists(pieces, min_size=1, max_size=6).map("".join)


def test_a_path_reaches_the_event_of_its_id_and_no_other(served: Served) -> None:
    """Also where ids differ by a newline at their end alone."""

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(legal_ids())
    @example("a\n")
    @example("a\nb")
    @example("\n")
    @example("a\ufffd")
    def check(event_id: str) -> None:
        others = {event_id + "\n", event_id.strip(), event_id.rstrip("\n"), "a"} - {event_id, ""}
        topic = f"t{len(served.home.topics())}"
        served.home.create_topic(topic, 1)
        served.home.append(topic, [Event(each.encode(), id=each) for each in (event_id, *others)])
        where = path(event_id, topic).replace(".", "%2E")  # a client folds the folder `..` itself
        assert served.client.get(where).json()["id"] == event_id
        assert served.client.put(where, content=b"new").json()["id"] == event_id
        assert served.home.get(topic, event_id).value == b"new"
        assert served.client.delete(where).json()["id"] == event_id
        left = {(each.id, each.value) for each in served.home.read(topic)}
        assert left == {(each, each.encode()) for each in others}
        assert served.client.delete(where).status_code == 404

    check()


def test_path_that_is_not_text_reaches_nothing(served: Served) -> None:
    served.home.append("t", [Event(b"x", id="a\ufffd")])
    for method in ("GET", "PUT", "DELETE"):
        answer = served.client.request(method, "/topics/t/ids/a%FF")
        assert answer.status_code == 400
        assert "UTF-8" in answer.json()["error"]["message"]
    for other in ("/topics/t%0A", "/topics/t/journals%0A", "/console/topics/t%0A", "/metrics%0A"):
        assert served.client.get(other).status_code in (400, 404), other
    assert served.values() == [b"x"]


@pytest.mark.parametrize("query", [b"why=%FF", b"why=%C3", b"why=ok&%FF=1"])
def test_a_query_that_is_not_encoded_utf8_changes_nothing(served: Served, query: bytes) -> None:
    """Its text would be stored as another one."""
    served.home.append("t", [Event(b"v", id="e")])
    request = b"DELETE /topics/t/ids/e?" + query + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = ask(served.address, request)
    assert status(answer) == 400
    assert b"query: is not UTF-8 with percent-encoding" in answer
    assert served.values() == [b"v"]
    assert served.client.delete("/topics/t/ids/e", params={"why": "é"}).status_code == 200
    assert [record.why for record in served.home.audit("t")] == ["é"]


def test_ids_of_dots_need_their_dots_encoded(served: Served) -> None:
    """Clients take `.` and `..` out of a path before they send it."""
    for name in (".", "..", "a/../b"):
        served.home.append("t", [Event(name.encode(), id=name)])
        path = quote(name, safe="").replace(".", "%2E")
        request = f"GET /topics/t/ids/{path} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        answer = ask(served.address, request.encode())
        assert status(answer) == 200
        assert f'"id":"{name}"'.encode() in answer


def test_a_line_break_in_a_parameter_breaks_no_answer(served: Served) -> None:
    for number in range(3):
        served.home.append("t", [Event(b"v", id=str(number))])
    for text in ("1h%0d%0a", "1h%0d%0aset-cookie:%20x=1", "%0a1h"):
        answer = served.client.get(f"/topics/t/journals?limit=1&presign={text}")
        assert answer.status_code in (200, 400), answer.text
        assert "set-cookie" not in answer.headers


def test_presigned_urls_are_bound(served: Served) -> None:
    long = served.client.get("/topics/t/journals?presign=2h")
    assert long.status_code == 400
    assert "outlive" in long.json()["error"]["message"]


def test_nesting_in_a_field_that_is_ignored_is_refused(served: Served) -> None:
    deep = b"[" * 5_000 + b"]" * 5_000
    for name in (b"topic", b"value", b"headers", b"more"):
        body = b'{"value":"x","%s":%s}' % (name, deep)
        for sent in (body, b"[%s]" % body):
            typed = {"content-type": "application/json"}
            answer = served.client.post("/topics/t/events", content=sent, headers=typed)
            assert answer.status_code == 400, (name, answer.text)
