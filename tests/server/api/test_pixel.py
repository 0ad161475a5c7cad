"""The pixel: a request becomes an event, whatever its query holds."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.serving import Served, ask, error, serving, status
from tidelog.coordination.tokens import create_token
from tidelog.errors import InvalidError
from tidelog.model.event import Event
from tidelog.server.api.pixel_event import GIF, event_of_query, parse_query
from tidelog.server.options import ServeOptions


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), topic_default="t") as found:
        yield found


def last(served: Served) -> tuple[Event, Any]:
    """The newest event, and its value."""
    event = list(served.home.read("t"))[-1]
    return event, json.loads(event.value or b"null")


def test_a_pixel_is_an_image_that_nobody_keeps_and_an_event(shared: Served) -> None:
    agent = {"user-agent": "browser", "referer": "http://page", "accept-language": "de", "x": "y"}
    query = "page=/home&a=1&a=2&id=e1&key=k&t=2026-11-15T10:00:00Z&empty="
    answer = shared.client.get(f"/track.gif?{query}", headers=agent)
    assert answer.status_code == 200
    assert answer.content == GIF
    assert answer.headers["content-type"] == "image/gif"
    assert "no-store" in answer.headers["cache-control"]
    assert answer.headers["access-control-allow-origin"] == "*"
    event, value = last(shared)
    assert answer.headers["tidelog-position"] == f"t/0/{event.offset}"
    assert value == {
        "params": {"page": "/home", "a": ["1", "2"], "empty": ""},
        "headers": {"user-agent": "browser", "referer": "http://page", "accept-language": "de"},
    }
    assert (event.id, event.key, event.timestamp) == ("e1", b"k", 1794736800000)


def test_operator_chooses_which_headers_and_whether_method_and_path_are_kept(
    tmp_path: Path,
) -> None:
    names = ("X-Campaign", "DNT", "user-agent")
    with serving(tmp_path, keep_headers=names, keep_request=True) as served:
        sent = {"user-agent": "browser", "x-campaign": "autumn", "x-other": "y"}
        assert served.client.get("/track/t.gif?a=1", headers=sent).status_code == 200
        assert last(served)[1] == {
            "params": {"a": "1"},
            "headers": {"user-agent": "browser", "x-campaign": "autumn"},
            "method": "GET",
            "path": "/track/t.gif",
        }
    for name in ("Authorization", "proxy-authorization", "a b", ""):
        with pytest.raises(InvalidError, match="credential"):
            ServeOptions(keep_headers=(name,))


@pytest.mark.parametrize("path", ["/track.gif?topic=t&a=1", "/track/t.gif?a=1", "/track.gif?a=1"])
def test_the_topic_stands_in_the_query_in_the_path_or_nowhere(shared: Served, path: str) -> None:
    assert shared.client.get(path).status_code == 200
    assert last(shared)[1]["params"] == {"a": "1"}


@pytest.mark.parametrize("query", ["=x", "a=1&=x", "ack=2&a=1", "ack=", "ack=0&ack=1", "ack=%ff"])
def test_parameter_that_means_nothing_is_refused(shared: Served, query: str) -> None:
    before = shared.values()
    answer = shared.client.get(f"/track/t.gif?{query}")
    assert (answer.status_code, error(answer)["kind"]) == (400, "invalid")
    assert shared.values() == before


@pytest.mark.parametrize("query", ["", "&&a=1&", "ack=1&a=1", "a"])
def test_empty_parts_of_a_query_mean_nothing(shared: Served, query: str) -> None:
    assert shared.client.get(f"/track/t.gif?{query}").status_code == 200


def test_the_gif_is_one(shared: Served) -> None:
    assert GIF[:6] == b"GIF89a"
    assert GIF[6:10] == b"\x01\x00\x01\x00", "one by one pixel"
    assert GIF[-1:] == b"\x3b"


def test_without_ack_it_is_answered_before_it_is_durable_and_is_stored_all_the_same(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, settings={"linger_ms": 3_600_000}) as served:
        for _ in range(3):
            answer = served.client.get("/track/t.gif?ack=0&a=1")
            assert answer.status_code == 200
            assert "tidelog-position" not in answer.headers
            assert served.values() == []
    from tidelog import open as open_home

    with open_home(served.home.config) as home:
        assert len(list(home.read("t"))) == 3, "a stop flushes what is buffered"


@pytest.mark.parametrize(
    "query",
    [
        "t=never",
        "id=",
        "id=1&id=2",
        "key=1&key=2",
        "t=99999999999999999",
        "topic=..%2f",
        "&".join("a" * 201),
    ],
    ids=["time", "empty id", "two ids", "two keys", "far time", "topic", "many"],
)
def test_bad_queries_are_refused(shared: Served, query: str) -> None:
    before = len(shared.values())
    answer = shared.client.get(f"/track.gif?{query}")
    assert answer.status_code == 400
    assert error(answer)["kind"] == "invalid"
    assert len(shared.values()) == before


def test_bytes_that_are_not_utf8_are_kept_as_they_are(shared: Served) -> None:
    """Neither parameters, nor headers, nor the key: U+FFFD would stand for them all."""
    request = (
        b"GET /track.gif?a=%FFx+y&a=ok&b=%FE&c=%EF%BF%BD&key=%80 HTTP/1.1\r\n"
        b"host: localhost\r\nuser-agent: caf\xe9\r\n\r\n"
    )
    assert status(ask(shared.address, request)) == 200
    event, value = last(shared)
    assert event.key == b"\x80"
    assert value["params"] == {
        "a": [{"base64": b64(b"\xffx y")}, "ok"],
        "b": {"base64": b64(b"\xfe")},
        "c": "\ufffd",
    }
    assert value["headers"] == {"user-agent": {"base64": b64(b"caf\xe9")}}


@pytest.mark.parametrize("query", [b"%FF=1", b"id=%FF", b"t=%FF", b"topic=%FF"])
def test_names_and_ids_that_are_not_utf8_are_refused(shared: Served, query: bytes) -> None:
    before = len(shared.values())
    request = b"GET /track.gif?" + query + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = ask(shared.address, request)
    assert status(answer) == 400
    assert b"UTF-8" in answer
    assert len(shared.values()) == before


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_pixel_without_a_topic_says_so(served: Served) -> None:
    answer = served.client.get("/track.gif?a=1")
    assert answer.status_code == 400
    assert "topic" in error(answer)["message"]
    assert served.client.get("/track/t.gif?topic=t").status_code == 400
    assert served.client.get("/track.gif?topic=unknown").status_code == 404
    assert served.client.get("/trackx.gif?topic=t").status_code == 404
    assert served.client.get("/track/a/t.gif").status_code == 404
    for method in ("HEAD", "POST", "DELETE", "OPTIONS"):
        answer = served.client.request(method, "/track.gif?topic=t")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert served.values() == []


def test_an_event_beyond_the_limit_is_413(tmp_path: Path) -> None:
    with serving(tmp_path, settings={"event_bytes_max": 500}) as served:
        assert served.client.get(f"/track/t.gif?a={'x' * 600}").status_code == 413
        assert served.client.get(f"/track/t.gif?ack=0&a={'x' * 600}").status_code == 413
        assert served.values() == []


def test_the_address_is_kept_behind_a_proxy_only(served: Served, tmp_path: Path) -> None:
    forged = {"x-forwarded-for": "1.2.3.4, 5.6.7.8"}
    served.client.get("/track/t.gif")
    assert "address" not in last(served)[1]
    create_token(served.home.context, ["pixel"])
    public = {"behind_proxy": True, "public_pixels": ("t",)}
    with serving(tmp_path, home=served.home, **public) as proxied:
        proxied.client.get("/track/t.gif", headers=forged)
        assert last(proxied)[1]["address"] == "5.6.7.8", "what the nearest proxy saw"


names = st.text(min_size=1, max_size=20)
queries = st.lists(st.tuples(names, st.text(max_size=50)), max_size=20)


@given(pairs=queries)
def test_every_query_that_a_browser_makes_comes_back(pairs: list[tuple[str, str]]) -> None:
    own = {"topic", "id", "key", "t", "token", "ack"}
    pairs = [(name, value) for name, value in pairs if name not in own]
    query = "&".join(f"{quote_plus(name)}={quote_plus(value)}" for name, value in pairs)
    value = json.loads(event_of_query(parse_query(query.encode()), {}, None).value or b"")
    for name, found in value["params"].items():
        wanted = [each for key, each in pairs if key == name]
        assert (found if isinstance(found, list) else [found]) == wanted
    assert set(value["params"]) == {name for name, _ in pairs}


@settings(max_examples=150, deadline=None)
@given(query=st.binary(max_size=200).filter(lambda q: not set(q) & set(b" \r\n\x00#?")))
def test_no_query_makes_the_server_fail(shared: Served, query: bytes) -> None:
    """Bytes as they are, over a socket: an event, or a refusal."""
    before = len(shared.values())
    request = b"GET /track.gif?" + query + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    found = status(ask(shared.address, request))
    assert found in (200, 400, 404, 413)
    assert len(shared.values()) == before + (found == 200)


@settings(max_examples=100, deadline=None)
@given(
    params=st.dictionaries(
        st.sampled_from(["topic", "id", "key", "t", "ack", "token", "x"]), st.text(max_size=30)
    ),
    agent=st.binary(max_size=40)
    .filter(lambda value: not set(value) & set(bytes(range(32)) + b"\x7f"))
    .map(bytes.strip),
)
def test_no_parameter_of_ours_makes_the_server_fail(
    shared: Served, params: dict[str, str], agent: bytes
) -> None:
    answer = shared.client.get("/track.gif", params=params, headers={b"user-agent": agent})
    assert answer.status_code in (200, 400, 404)


def test_ab_and_wrk_send_requests_like_these(shared: Served) -> None:
    """HTTP/1.0 with keep-alive, as ``ab -k`` does; and several at once on one connection."""
    old = b"GET /track.gif HTTP/1.0\r\nConnection: Keep-Alive\r\nHost: 127.0.0.1\r\n\r\n"
    assert status(ask(shared.address, old)) == 200
    with httpx.Client(base_url=shared.url, timeout=60) as client:
        assert [client.get("/track.gif").status_code for _ in range(5)] == [200] * 5
