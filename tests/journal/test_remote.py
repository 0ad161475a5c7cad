"""Journals on S3 and DynamoDB: amendments over a network, and readers who know only URLs."""

from __future__ import annotations

import os
import time

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.all_times import ALL_TIMES
from tidelog import Event
from tidelog.errors import NotFoundError
from tidelog.home import create_home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.settings import Settings

pytestmark = pytest.mark.server

T0 = 1_700_000_000_000


def test_events_are_found_amended_compiled_and_read_by_urls(
    s3_server: S3, dynamodb_server: DynamoDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    assert os.environ["AWS_ACCESS_KEY_ID"]
    settings = Settings(
        f"s3://{s3_server.fresh_bucket()}?endpoint={s3_server.endpoint}&region={s3_server.region}",
        f"dynamodb://ids{time.monotonic_ns()}?endpoint={dynamodb_server.endpoint}&region=us-east-1",
    )
    with create_home(settings)[0] as home:
        home.create_topic("t", 2)
        events = [Event(b"%d" % n, b"%d" % n, f"id-{n}", T0 + n) for n in range(40)]
        for first in range(0, 40, 10):
            home.append("t", events[first : first + 10])
        done = home.update_many("t", {f"id-{n}": b"new" * 5_000 for n in range(0, 40, 3)})
        assert done.events == 14
        home.delete("t", ["id-1", "id-2"])
        expected = {f"id-{n}": b"new" * 5_000 if n % 3 == 0 else b"%d" % n for n in range(40)}
        del expected["id-1"], expected["id-2"]
        for _ in range(2):
            assert {event.id: event.value for event in home.playback("t", *ALL_TIMES)} == expected
            assert home.get("t", "id-3").value == b"new" * 5_000
            with pytest.raises(NotFoundError):
                home.get("t", "id-1")
            compile_topic(home.context, home.topic("t"), CompilePolicy.everything())
            home.sweep(0)
        found = {}
        for entry in home.journals("t", presign="10m"):
            assert entry.url is not None
            span = f"bytes={entry.byte_start}-{entry.byte_end - 1}"
            answer = httpx.get(entry.url, headers={"range": span})
            assert answer.status_code in (200, 206)
            table = pq.read_table(pa.BufferReader(answer.content))
            found |= dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))
            assert (entry.deleted, entry.updated) == ((), ())
        assert found == expected
