"""Functions that bring events into topics: records of Kinesis, and pixels; and playback."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.servers.moto import Moto
from tests.support.kinesis_aggregator import aggregated
from tidelog import Event, Home
from tidelog.aws import pixel_handler, playback_handler, pump_handler
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import create_home
from tidelog.server.api.pixel_event import GIF
from tidelog.settings import load_settings

ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/orders"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0]
    found.create_topic("orders", 2)
    return found


def record(data: bytes, sequence: int, key: str = "k", arn: str = ARN) -> dict[str, Any]:
    """As AWS documents what an event source of Kinesis gives to a function."""
    return {
        "kinesis": {
            "kinesisSchemaVersion": "1.0",
            "partitionKey": key,
            "sequenceNumber": str(sequence),
            "data": base64.b64encode(data).decode(),
            "approximateArrivalTimestamp": 1545084650.987,
        },
        "eventSource": "aws:kinesis",
        "eventVersion": "1.0",
        "eventID": f"shardId-000000000006:{sequence}",
        "eventName": "aws:kinesis:record",
        "invokeIdentityArn": "arn:aws:iam::123456789012:role/lambda-role",
        "awsRegion": "us-east-1",
        "eventSourceARN": arn,
    }


def stored(home: Home) -> list[Event]:
    return [event for number in (0, 1) for event in home.read("orders", number)]


def test_batch_that_is_given_again_is_stored_once(home: Home) -> None:
    handle = pump_handler("orders", home=home.config)
    batch = {"Records": [record(b"%d" % n, 100 + n, f"k{n}") for n in range(5)]}
    assert handle(batch, None) == {"topic": "orders", "events": 5}
    assert handle(batch, None) == {"topic": "orders", "events": 5}
    more = {"Records": [record(b"5", 105)]}
    handle(more, None)
    found = sorted(stored(home), key=lambda event: event.value or b"")
    assert [event.value for event in found] == [b"%d" % n for n in range(6)]
    assert [event.key for event in found] == [b"k0", b"k1", b"k2", b"k3", b"k4", b"k"]
    assert {event.timestamp for event in found} == {1545084650987}
    assert found[0].headers == (("kinesis.sequence", b"100"),)
    assert handle({"Records": []}, None)["events"] == 0


def test_records_that_were_put_together_are_taken_apart(home: Home) -> None:
    handle = pump_handler("orders", home=home.config)
    packed = aggregated([("a", b"one"), ("b", b"two")])
    assert handle({"Records": [record(packed, 7)]}, None)["events"] == 2
    assert {event.value for event in stored(home)} == {b"one", b"two"}


def test_largest_record_that_kinesis_accepts_by_default_is_stored(home: Home) -> None:
    key = "k" * 256
    data = bytes((1 << 20) - len(key))  # the headers that we add come on top
    pump_handler("orders", home=home.config)({"Records": [record(data, 1, key)]}, None)
    assert [event.value for event in stored(home)] == [data]


@pytest.mark.parametrize("event", [{}, {"Records": [{"Sns": {}}]}, {"Records": 1}])
def test_other_events_are_refused(home: Home, event: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match="pump function"):
        pump_handler("orders", home=home.config)(event, None)
    bad = record(b"", 1)
    bad["kinesis"]["data"] = "!"
    with pytest.raises(InvalidError, match="pump function"):
        pump_handler("orders", home=home.config)({"Records": [bad]}, None)
    bad = record(b"", 1)
    bad["kinesis"]["approximateArrivalTimestamp"] = float("inf")
    with pytest.raises(InvalidError, match="pump function"):
        pump_handler("orders", home=home.config)({"Records": [bad]}, None)
    with pytest.raises(NotFoundError):
        pump_handler("others", home=home.config)({"Records": [record(b"", 1)]}, None)


@pytest.mark.server
def test_ids_are_those_of_a_pump(
    home: Home, moto_server: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    name, region = f"s{time.monotonic_ns()}", moto_server.region
    client = boto3.client("kinesis", endpoint_url=moto_server.endpoint, region_name=region)
    client.create_stream(StreamName=name, ShardCount=1)
    put = client.put_record(StreamName=name, Data=b"x", PartitionKey="k")
    arn = client.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    client.close()
    source = f"kinesis://{name}?endpoint_url={moto_server.endpoint}&region={region}"
    home.create_topic("pumped")
    assert home.pumps.create("p", source=source, topic="pumped").run().events == 1
    given = record(b"x", int(put["SequenceNumber"]), arn=arn)
    given["eventID"] = f"{put['ShardId']}:{put['SequenceNumber']}"
    pump_handler("orders", home=home.config)({"Records": [given]}, None)
    [pumped], [here] = list(home.read("pumped")), stored(home)
    assert (here.id, here.key, here.value) == (pumped.id, pumped.key, pumped.value)
    assert here.headers == pumped.headers


def request(path: str, query: str = "", method: str = "GET") -> dict[str, Any]:
    """As AWS documents what an HTTP API gives to a function, in version 2.0."""
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": query,
        "headers": {"user-agent": "browser", "x-campaign": "autumn", "Authorization": "secret"},
        "requestContext": {
            "accountId": "123456789012",
            "http": {"method": method, "path": path, "sourceIp": "192.0.2.1"},
        },
        "isBase64Encoded": False,
    }


def test_pixel_is_an_image_and_an_event(home: Home) -> None:
    handle = pixel_handler(
        ["orders"], keep_headers=["X-Campaign"], keep_request=True, home=home.config
    )
    for path in ("/track.gif", "/track/orders.gif"):
        answer = handle(request(path, "page=%2Fhome&key=k"), None)
        assert answer["statusCode"] == 200
        assert base64.b64decode(answer["body"]) == GIF
        assert answer["headers"]["content-type"] == "image/gif"
        assert answer["headers"]["tidelog-position"].startswith("orders/")
    event = stored(home)[0]
    assert json.loads(event.value or b"") == {
        "params": {"page": "/home"},
        "headers": {"user-agent": "browser", "x-campaign": "autumn"},
        "method": "GET",
        "path": "/track.gif",
        "address": "192.0.2.1",
    }
    assert event.key == b"k"


def test_text_that_is_not_unicode_is_kept(home: Home) -> None:
    handle = pixel_handler(["orders"], home=home.config)
    given = {
        **request("/track.gif", "page=\ud800"),
        "headers": {"user-agent": "\ud800", "\ud800": ""},
    }
    assert handle(given, None)["statusCode"] == 200
    found = json.loads(stored(home)[0].value or b"")
    assert found["params"]["page"] == found["headers"]["user-agent"] == {"base64": "7aCA"}


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (request("/track/others.gif"), 404),
        (request("/track.gif", "topic=others"), 404),
        (request("/track/orders.gif", "topic=orders"), 404),
        (request("/"), 404),
        (request("/track.gif", method="POST"), 404),
        (request("/track.gif", "id=mine"), 403),
        (request("/track.gif", "=x"), 400),
        (request("/track.gif", "ack=2"), 400),
        (request("/track.gif", "t=9999-12-31T00:00:00Z"), 400),
        ({"requestContext": None}, 404),
        ({}, 404),
    ],
)
def test_other_requests_are_refused(home: Home, given: dict[str, Any], status: int) -> None:
    answer = pixel_handler(["orders"], home=home.config)(given, None)
    assert answer["statusCode"] == status
    assert "error" in json.loads(answer["body"])
    assert stored(home) == []
    with pytest.raises(InvalidError):
        pixel_handler([])


def test_playback_takes_its_parameters_and_tells_of_slots(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    start = 1_794_657_600_000
    times = [start, start + 1, start + 2_500]
    home.append("orders", [Event(b"x", timestamp=each) for each in times], partition=0)
    home.create_topic("again")
    handle = playback_handler("orders", "topic:again", home=home.config)
    asked = {"start": start, "end": start + 2_000}
    assert handle(asked, None) == {"events": 2, "slots": 1, "finished": True}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("[2]")
    assert lines[-1] == "Success"
    assert len(list(home.read("again"))) == 2
    for wrong in ({"begin": 1}, {"start": 1.5}):
        with pytest.raises(InvalidError, match="playback function"):
            handle(wrong, None)
    with pytest.raises(InvalidError, match="give both"):
        playback_handler(home=home.config)({}, None)
