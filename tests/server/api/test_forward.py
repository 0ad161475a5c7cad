"""``serve --forward``: a success means that Kinesis or Kafka has acknowledged the events."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.kafka.test_sink import Target
from tests.connectors.kinesis.test_source import Stream
from tests.connectors.test_forward import Target as FakeTarget
from tests.servers.base import free_port
from tests.servers.kafka import Kafka
from tests.servers.moto import KEYS, Moto
from tests.support.serving import error, serving
from tidelog import Forwarder
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.model.token import Grant
from tidelog.server.api.pixel_event import GIF
from tidelog.server.http import limits
from tidelog.server.options import ServeOptions
from tidelog.settings import Settings

pytestmark = pytest.mark.server


def home_at(folder: Path) -> Any:
    settings = Settings(str(folder / "o"), str(folder / "c.sqlite"))
    return create_home(settings, world=World(environ=KEYS))[0]


def records(stream: Stream) -> list[tuple[str, bytes]]:
    """What is in a stream of one shard."""
    (shard,) = stream.client.list_shards(StreamName=stream.name)["Shards"]
    iterator = stream.client.get_shard_iterator(
        StreamName=stream.name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    found = stream.client.get_records(ShardIterator=iterator)["Records"]
    return [(each["PartitionKey"], each["Data"]) for each in found]


def test_pixels_and_posts_reach_kinesis_with_the_rights_of_a_topic(
    tmp_path: Path, moto_server: Moto
) -> None:
    stream = Stream(moto_server.endpoint)
    with (
        home_at(tmp_path) as home,
        serving(
            tmp_path, home=home, forward=(f"clicks={stream.url()}",), topic_default="clicks"
        ) as served,
    ):
        pixel = served.client.get("/track.gif?page=/home&key=u-1")
        assert (pixel.status_code, pixel.content) == (200, GIF)
        assert "tidelog-position" not in pixel.headers
        assert served.client.get("/track/clicks.gif?key=u-2&ack=0").status_code == 200
        posted = served.post([{"value": "a", "key": "u-3"}, {"value": "b", "id": "e1"}], "clicks")
        assert posted.status_code == 201, posted.text
        assert posted.json() == {"topic": "clicks", "positions": [], "forwarded": 2}
        assert [key for key, _ in records(stream)] == ["u-1", "u-2", "u-3", "e1"]
        assert json.loads(records(stream)[0][1])["params"] == {"page": "/home"}
        large = served.post({"value": "x" * (1 << 20)}, "clicks")
        assert (large.status_code, "in a record" in error(large)["message"]) == (400, True)
        again = served.post({"value": "c"}, "clicks", idempotency_key="k")
        assert (again.status_code, "is forwarded" in error(again)["message"]) == (400, True)
        assert served.client.get("/topics/clicks").status_code == 404
        assert 'tidelog_buffered_bytes{topic="clicks"} 0.0' in served.client.get("/metrics").text
        assert served.post({"value": "c"}, "clicks").status_code == 201, "it goes on"
        stream.client.delete_stream(StreamName=stream.name)
        gone = served.post({"value": "d"}, "clicks")
        assert gone.status_code == 504, "it may have been there"
        assert "send them again" in error(gone)["message"]
        gone = served.post({"value": "d"}, "clicks")
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
        assert stream.name not in gone.text


def test_kafka_gets_ids_keys_times_and_headers(tmp_path: Path, kafka_server: Kafka) -> None:
    target = Target(kafka_server, partitions=1, **{"max.message.bytes": "10000"})
    with serving(tmp_path, forward=(f"clicks={target.url()}",)) as served:
        event = {"value": "a", "key": "k", "id": "e1", "timestamp": "2026-11-15T10:00:00Z"}
        assert served.post([event, {"value": "b"}], "clicks").json()["forwarded"] == 2
        large = served.client.post(
            "/topics/clicks/events", content=random.Random(7).randbytes(50_000)
        )
        assert large.status_code == 400, large.text
        assert served.post({"value": "c"}, "clicks").status_code == 201, "it goes on"
        far = served.post({"value": "x", "timestamp": "9999-01-01T00:00:00Z"}, "clicks")
        assert (far.status_code, "does not accept the time" in error(far)["message"]) == (400, True)
    first, *rest = target.messages(0)
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"k", b"a", 1794736800000)
    assert first.headers() == [("tidelog-id", b"e1")]
    assert [each.value() for each in rest] == [b"b", b"c"]


def test_target_that_is_away_is_503_and_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FORWARD_S", 60.0)
    url = f"kinesis://clicks?region=us-east-1&endpoint_url=http://127.0.0.1:{free_port()}"
    with home_at(tmp_path) as home:
        home.create_topic("t")
        _, one = home.tokens.create([Grant("append", "clicks")])
        _, other = home.tokens.create([Grant("append", "t")])
        with serving(tmp_path, home=home, forward=(f"clicks={url}",)) as served:
            assert served.post({"value": "a"}, "clicks").status_code == 401
            assert (
                served.post({"value": "a"}, "clicks", authorization=bearer(other)).status_code
                == 403
            )
            for _ in range(2):
                gone = served.post({"value": "a"}, "clicks", authorization=bearer(one))
                assert gone.status_code == 503
                assert int(gone.headers["retry-after"]) >= 1
                assert "nothing was sent" in error(gone)["message"]
                assert "127.0.0.1" not in gone.text
            stored = served.post({"value": "a"}, authorization=bearer(other))
            assert stored.status_code == 201, "topics are served"


def test_targets_that_hang_delay_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_S", 0.2)
    monkeypatch.setattr(limits, "FORWARD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, home_at(tmp_path) as home:
        home.create_topic("t")
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        url = f"kinesis://clicks?region=us-east-1&endpoint_url={endpoint}"
        with serving(tmp_path, home=home, forward=(f"a={url}", f"b={url}")) as served:
            assert served.post({"value": "x"}).status_code == 201
            late = served.post({"value": "x"}, "a")
            assert (late.status_code, "nothing was sent" in error(late)["message"]) == (503, True)
            assert served.client.get("/track/b.gif?ack=0").status_code == 200
        silent.settimeout(60)
        tries = [silent.accept()[0] for _ in range(2)]
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # the first attempt of each still hangs
            silent.accept()
        for each in tries:
            each.close()


def test_lost_event_that_no_request_waits_for_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = FakeTarget()
    monkeypatch.setattr(
        "tidelog.server.api.forward.open_forwarder",
        lambda url, environ: Forwarder(url, target.open),
    )
    with serving(tmp_path, forward=("a=kinesis://clicks",)) as served:
        target.fails = UnavailableError("no \x1b[2J reply")
        assert served.client.get("/track/a.gif?ack=0").status_code == 200
    said = capfd.readouterr().err
    assert "some events may be there" in said
    assert r"no \x1b[2J reply" in said, "it does not steer a terminal"


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_forwards_that_cannot_be_are_refused(tmp_path: Path, moto_server: Moto) -> None:
    stream = Stream(moto_server.endpoint)
    for wrong in (("clicks",), ("a=kinesis://x", "a=kinesis://y"), ("a b=kinesis://x",)):
        with pytest.raises(InvalidError):
            ServeOptions(forward=wrong)
    with home_at(tmp_path) as home:
        home.create_topic("t")
        with (
            pytest.raises(InvalidError, match="a topic has this name"),
            serving(tmp_path, home=home, forward=(f"t={stream.url()}",)),
        ):
            pass
        missing = stream.url().replace(stream.name, "missing")
        with (
            pytest.raises(NotFoundError, match="create it"),
            serving(tmp_path, home=home, forward=(f"u={missing}",)),
        ):
            pass
