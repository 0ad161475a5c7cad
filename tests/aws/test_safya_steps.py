"""Safya's README, step by step: on S3 and DynamoDB, with the function that is notified."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

import tidelog
from tests.deploy.template import read_template
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.cli_run import run_here
from tests.support.lambda_endpoint import lambda_endpoint
from tests.support.waiting import until
from tidelog.aws import consumer_handler


@pytest.mark.server
def test_steps_of_safya(
    s3_server: S3,
    dynamodb_server: DynamoDb,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    run = run_here(monkeypatch, capsysbinary, tmp_path)
    # Deployment: the stack has a bucket, a table, and an output with the config string.
    bucket, table = s3_server.fresh_bucket("safya"), f"safya-{uuid.uuid4().hex[:8]}"
    config = read_template()["Outputs"]["ConfigString"]["Value"]["Sub"]
    store = f"s3://{bucket}/events?endpoint={s3_server.endpoint}&region={s3_server.region}"
    catalog = f"dynamodb://{table}?endpoint={dynamodb_server.endpoint}&region=us-east-1"
    shape = "tidelog:?store=s3://${Bucket}/${Prefix}%3Fregion%3D${AWS::Region}&catalog="
    assert config.startswith(shape)  # here the servers are on this machine
    config = f"tidelog:?store={quote(store, safe=':/')}&catalog={quote(catalog, safe=':/')}"
    assert run("init", "--store", store, "--catalog", catalog, "--create-catalog").code == 0
    handled: list[tidelog.Event] = []
    consume = consumer_handler(handled.append, "billing", max_events=20, home=config)
    with lambda_endpoint(consume) as endpoint:
        create = ["topic", "create", "events", "--partitions", "10", "--notify", endpoint.target]
        assert run("--home", config, *create).code == 0
        # Producing events: new Safya({config}).writeEvent(key, data).
        with tidelog.open(config) as home:
            position = home.append("events", [tidelog.Event(bytes(range(256)), b"device-7")])[0]
            # Consuming events: getPartitionId({partitionKey}), then readEvents({partitionId}).
            partition = home.partition_for("events", b"device-7")
            digest = int.from_bytes(hashlib.sha256(b"device-7").digest(), "big")
            assert position.partition == partition == digest % 10
            reader = home.consumer("events", "by-hand")
            seen: list[tidelog.Event] = []
            assert reader.read_once(partition, handler=seen.append)["done"]
            assert [event.value for event in seen] == [bytes(range(256))]
            # The notification calls a consumer; one that has not caught up causes another one.
            more = [tidelog.Event(b"%d" % n, b"device-7") for n in range(49)]
            home.append("events", more)
            until(lambda: len(handled) == 50)
        until(lambda: endpoint.results[-1]["partitions"][0]["done"])
    calls = [each["partitions"][0] for each in endpoint.results]
    assert max(call["events_read"] for call in calls) <= 20
    assert any(call["notified_again"] for call in calls)
    assert [event.offset for event in handled] == list(range(50))  # in order, none twice
    lag = run("--home", config, "lag", "events", "--json").out.decode()
    assert '"billing"' in lag
    sent = run("--home", config, "topic", "notify", "events", "--partition", str(partition))
    assert sent.code == 1  # nobody is at the address of the function any more
