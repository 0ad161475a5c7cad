"""Secor's design objectives, one after the other, on Kafka."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.servers.kafka import Kafka
from tests.support.archive_look import AT, AT_OR_WHEN, FIRST_S
from tests.support.cli_run import run_here
from tests.support.waiting import until
from tidelog import Home, Limits
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=2_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        yield made


def values(batches: Iterator[pa.RecordBatch]) -> Counter[bytes]:
    return Counter(value for batch in batches for value in batch.column("value").to_pylist())


@pytest.mark.server
def test_steps_of_secor(
    home: Home,
    kafka_server: Kafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    run = run_here(monkeypatch, capsysbinary, tmp_path)
    prefix = f"clicks-{uuid.uuid4().hex[:8]}"
    producer, sent = kafka_server.producer(), Counter[bytes]()

    def produce(topic: str, *messages: bytes) -> None:
        for number, message in enumerate(messages):
            producer.produce(topic, message, partition=number % 2)
            sent[message] += 1
        producer.flush()

    def click(number: int, field: str = "at") -> bytes:
        return json.dumps({field: FIRST_S + number % 2 * 86_400, "n": number}).encode()

    kafka_server.create_topic(f"{prefix}-a", 2)
    produce(f"{prefix}-a", *(click(number) for number in range(10)))
    source = f"kafka://{kafka_server.bootstrap}/^{prefix}-.*"
    # Two groups of consumers: a verbatim backup, and files by the date of the message.
    raw = home.archives.create("raw", source=source, max_age="1s")
    daily = home.archives.create("daily", source=source, parser=AT, max_age="1s")
    # Low delay, and topics that appear while it runs: each message is in a file within seconds.
    stop = threading.Event()
    follower = threading.Thread(target=raw.run, kwargs={"follow": True, "stop": stop}, daemon=True)
    follower.start()
    try:
        until(lambda: values(raw.read()) == sent)
        kafka_server.create_topic(f"{prefix}-b", 2)
        produce(f"{prefix}-b", *(click(number) for number in range(10, 14)))
        until(lambda: values(raw.read()) == sent, 120)
    finally:
        stop.set()
        follower.join(60)
    # Upgrade: the next process goes on where the last one stopped.
    produce(f"{prefix}-a", click(14))
    assert raw.run().events == 1
    assert values(raw.read()) == sent
    # Files: topic, date, then generation, partition and first offset.
    daily.run()
    names = {file.path.split("/", 3)[-1] for file in daily.files()}
    assert f"{prefix}-a/dt=2026-11-15/1_0_{0:020}.parquet" in names
    assert run("--home", home.config, "archive", "cat", "daily").out.count(b"\n") == 15
    # Misformatted messages are kept, and alert.
    produce(f"{prefix}-b", click(15, "when"))
    assert daily.run().dead == 1
    assert any("dead letter" in each for each in daily.check(Limits(driver=False)))
    # Protection against bad code: another parser beside the live files, compared, and undone.
    daily.backfill(parser=AT_OR_WHEN)
    daily.promote()
    assert values(daily.read()) == sent
    assert daily.rollback().generation == 1
    daily.replay(parser=AT_OR_WHEN)
    assert values(daily.read()) == sent
    # The files of one date are written again, and the others are copied.
    daily.redo(dates=["2026-11-15"], parser=AT_OR_WHEN)
    assert daily.promote().generation == 3
    assert values(daily.read()) == sent
    # Offsets that are moved by hand leave a trace, and none is archived twice.
    with pytest.raises(InvalidError, match="holds each event once"):
        daily.seek("earliest")
    produce(f"{prefix}-a", click(16))
    daily.seek("latest", f"{prefix}-a/0", why="a load test")
    assert daily.run().events == 0
    accounts = [each.account for each in daily.status().partitions]
    assert [gap.reason for each in accounts if each for gap in each.gaps] == ["seek"]
    # The verifier counts every offset, and the finalizer marks what is complete.
    assert daily.verify(deep=True, source=True).problem_count == 0
    assert raw.run().events == 2
    assert raw.verify(deep=True, source=True).problem_count == 0
    done = daily.finalize("0s")
    assert not done.errors
    assert {notice.event for notice in done.notices} <= {"final"}
