"""Pumps: any source into a topic, each event once, whatever dies."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.kafka import Kafka
from tidelog import Event, Home
from tidelog.codec.fields import NOT_EXTRACTED_HEADER, FieldPaths
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

KILLS = 8


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("from", 3)
        made.create_topic("to", 2)
        yield made


def pump(home: Home, wanted: PumpOptions) -> int:
    return Driver(
        home.context, open_pump(home.context, wanted, LocalWorkers(2)), DriverOptions()
    ).run()


def events_in(home: Home, topic: str) -> list[Event]:
    count = len(home.partitions(topic))
    return [event for partition in range(count) for event in home.read(topic, partition)]


def test_a_topic_into_a_topic_keeps_everything_but_the_place(home: Home) -> None:
    sent = [
        Event(None, b"k", "id-1", 5, "made", (("h", b"1"), ("h", b""))),
        Event(b"", None, None, 6),
        Event(b"\xff", b"", "id-2", 7),
    ]
    home.append("from", sent, partition=1)
    assert pump(home, PumpOptions("topic:from", "to")) == 3
    assert pump(home, PumpOptions("topic:from", "to")) == 0, "a second run finds nothing to do"
    found = sorted(events_in(home, "to"), key=lambda event: event.timestamp or 0)  # type: ignore[arg-type,return-value]
    for one, other in zip(sent, found, strict=True):
        for name in ("value", "key", "id", "timestamp", "type", "headers"):
            assert getattr(one, name) == getattr(other, name)


def test_fields_of_json_become_the_events_own(home: Home) -> None:
    good = b'{"user": 7, "order": "o-1", "kind": "made", "at": "2026-11-15T10:00:00Z"}'
    home.append("from", [Event(good), Event(b"rubbish", b"old")])
    fields = FieldPaths("user", "order", "kind", "at")
    assert pump(home, PumpOptions("topic:from", "to", fields=fields)) == 2
    by_value = {event.value: event for event in events_in(home, "to")}
    assert (by_value[good].key, by_value[good].id) == (b"7", "o-1")
    assert (by_value[good].type, by_value[good].timestamp) == ("made", 1_794_736_800_000)
    assert by_value[good].partition == home.partition_for("to", b"7")
    kept = by_value[b"rubbish"]
    assert kept.key == b"old"
    assert kept.headers[0][0] == NOT_EXTRACTED_HEADER


def test_settings_of_a_pump_do_not_change_under_its_name(home: Home) -> None:
    home.append("from", [Event(b"x")])
    pump(home, PumpOptions("topic:from", "to", "mine"))
    for other in (
        PumpOptions("topic:from", "to", "mine", FieldPaths(key="a")),
        PumpOptions("topic:to", "to", "mine"),
        PumpOptions("topic:from", "to", "mine", partition="same"),
    ):
        with pytest.raises(InvalidError):
            open_pump(home.context, other, LocalWorkers())
    home.delete_topic("to")
    with pytest.raises(NotFoundError):
        open_pump(home.context, PumpOptions("topic:from", "to", "mine"), LocalWorkers())
    home.create_topic("to", 2)
    with pytest.raises(InvalidError, match="deleted and made again"):
        open_pump(home.context, PumpOptions("topic:from", "to", "mine"), LocalWorkers())
    assert pump(home, PumpOptions("topic:from", "to", "another")) == 1


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (PumpOptions("topic:nope", "to"), "not found"),
        (PumpOptions("topic:from", "nope"), "not found"),
        (PumpOptions("kafkaa://x/y", "to"), "did you mean `kafka`"),
        (PumpOptions("topic:from", "to", fields=FieldPaths(key="a..b")), "empty"),
        (PumpOptions("topic:from", "to", "a/b"), "name"),
        (PumpOptions("topic:from", "to", partition="same"), "partitions"),
    ],
)
def test_bad_settings_make_nothing(home: Home, wanted: PumpOptions, message: str) -> None:
    with pytest.raises((InvalidError, NotFoundError), match=message):
        pump(home, wanted)
    assert events_in(home, "to") == []


def kill_pumps(home: Home, source: str) -> None:
    """Two pumps at once, killed again and again; then one that finishes."""
    main = "from tidelog.cli.main import run; run()"
    command = [sys.executable, "-c", main, "--home", home.config, "pump", source, "--topic", "to"]
    chance = random.Random(6)
    for _ in range(KILLS // 2):
        pumps = [
            subprocess.Popen(
                [*command, "--no-spark", "--max-bytes", "20000"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]
        time.sleep(1.2 + chance.random() * 1.5)
        for each in pumps:
            each.kill()
            each.wait()
    done = subprocess.run([*command, "--no-spark", "--json"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["topic"] == "to"


def numbers(home: Home) -> dict[bytes | None, list[int]]:
    """What each key's events say, in the order of the topic."""
    found: dict[bytes | None, list[int]] = {}
    for event in events_in(home, "to"):
        found.setdefault(event.key, []).append(int(event.value or b"-1"))
    return found


def check_once_and_in_order(home: Home, count: int) -> None:
    by_key = numbers(home)
    assert Counter(n for each in by_key.values() for n in each) == Counter(range(count))
    assert [key for key, each in by_key.items() if each != sorted(each)] == []


@pytest.mark.long
def test_pumps_that_are_killed_store_each_event_once_and_in_order(home: Home) -> None:
    for first in range(0, 20_000, 500):
        batch = [Event(b"%d" % n, key=b"%d" % (n % 40)) for n in range(first, first + 500)]
        home.append("from", batch)
    kill_pumps(home, "topic:from")
    check_once_and_in_order(home, 20_000)


@pytest.mark.server
@pytest.mark.long
def test_kafka_is_pumped_once_over_kills(home: Home, kafka_server: Kafka) -> None:
    name = f"pumped-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, 3)
    producer = kafka_server.producer()
    for n in range(20_000):
        producer.produce(name, b"%d" % n, key=b"%d" % (n % 40))
    producer.flush()
    kill_pumps(home, f"kafka://{kafka_server.bootstrap}/{name}")
    check_once_and_in_order(home, 20_000)
