"""The server in front of a home on S3 and DynamoDB."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.serving import serving
from tidelog.home import create_home
from tidelog.server.http import health
from tidelog.settings import Settings

pytestmark = pytest.mark.server


def test_events_go_in_and_out_and_repeats_are_known(
    s3_server: S3, dynamodb_server: DynamoDb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_READY_S", 60.0)  # a stall is not what this is about
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    settings = Settings(
        f"s3://{s3_server.fresh_bucket()}?endpoint={s3_server.endpoint}&region={s3_server.region}",
        f"dynamodb://serve{time.monotonic_ns()}?endpoint={dynamodb_server.endpoint}"
        "&region=us-east-1",
    )
    with create_home(settings)[0] as home:
        home.create_topic("t", 3)
        with serving(tmp_path, home=home) as served:
            with ThreadPoolExecutor(20) as pool:
                answers = list(
                    pool.map(lambda n: served.post({"value": str(n), "key": str(n)}), range(60))
                )
            assert [answer.status_code for answer in answers] == [201] * 60
            body = [{"value": "a", "key": "1"}, {"value": "b", "key": "2"}]
            first = served.post(body, idempotency_key="k").json()
            assert served.post(body, idempotency_key="k").json() == first
            values = [
                event["value"] for p in range(3) for event in served.events(partition=p)["events"]
            ]
            assert sorted(values) == sorted([*map(str, range(60)), "a", "b"])
            ranged = served.client.get("/topics/t/events?limit=1000").json()["events"]
            assert len(ranged) == 62
            assert served.client.get("/readyz").status_code == 200
