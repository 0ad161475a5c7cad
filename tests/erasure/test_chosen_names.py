"""A proof lists names that people chose and that have an erased id or key in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive
from tidelog import Event, Home
from tidelog.catalog.base import Put
from tidelog.coordination.audit import record_action
from tidelog.erasure.proof import Proof
from tidelog.model import layout

KEY = b"device-7"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        made.append("t", [Event(b"v", key=KEY, id=f"{n}") for n in range(3)])
        yield made


def erase(home: Home) -> Proof:
    proof = home.erase("t", key=KEY)
    assert proof.verdict == "erased"
    names = [each for each in proof.out_of_reach if "in its name" in each]
    assert not any("device-7" in each for each in names)
    return proof


def listed(proof: Proof) -> list[str]:
    return [each.partition(":")[0] for each in proof.out_of_reach]


def test_names_without_the_key_are_not_listed(home: Home) -> None:
    for name in ("device-70", "my-device-7", "7", "other"):
        with home.producer("t", name=name) as producer:
            producer.send(b"v").result()
        with home.consumer("t", name=name) as consumer:
            consumer.poll(timeout_s=0)
    assert erase(home).out_of_reach == []


@pytest.mark.parametrize("name", ["device-7", "ü device-7 of ann", "z/device-7"])
def test_producer_and_consumer_named_by_a_key_are_listed(home: Home, name: str) -> None:
    with home.producer("t", name=name) as producer:
        producer.send(b"v", key=KEY).result()
        producer.send(b"v", key=b"other").result()
    if name == "device-7":  # consumers have names without blanks and slashes
        with home.consumer("t", name=name) as consumer:
            consumer.poll(timeout_s=0)
        home.consumers("t").get(name).delete(force=True)
    found = erase(home).out_of_reach
    shown = name.replace("device-7", "[erased]")
    assert found[0] == (
        f"producer `{shown}` of topic `t`: has one of them in its name: rows keep it until the "
        "topic is deleted, and segments until they are compiled"
    )
    if name == "device-7":
        assert found[1] == (
            "consumer `[erased]` of topic `t`: has one of them in its name: rows keep it until "
            "the topic is deleted, also after `tidelog consumer delete`"
        )
        assert found[2].startswith("audit of the home: 1 record has one of them in a name")
    home.compile("t")
    home.sweep(0)
    store = home.store
    assert not [info.key for info in store.list("") if b"device-7" in store.get(info.key)]


def test_names_in_copies_are_listed_too(home: Home) -> None:
    home.create_topic("copy", 1)
    pump = home.pumps.create("p", source="topic:t", topic="copy")
    pump.run()
    with home.producer("copy", name="device-7") as producer:
        producer.send(b"v").result()
    home.erase("copy", key=KEY)
    assert "producer `[erased]` of topic `copy`" in listed(erase(home))


def test_names_of_everything_in_the_registry_are_listed(home: Home) -> None:
    home.create_topic("device-7", 1)
    an_archive(home, name="device-7")
    home.archives.get("device-7").delete(files=True)
    an_archive(home, name="device-7")
    home.pumps.create("device-7", source="topic:t", topic="device-7")
    home.playback("t", to="topic:device-7", name="device-7")
    home.tokens.create(["read"], label="tablet, device-7")
    registry, query = layout.REGISTRY, layout.sink_target_row("t", "device-7")
    home.context.catalog.write(registry, Put(query, b"{}"), write_id="w1")
    home.erase("device-7", key=KEY)
    found = listed(erase(home))
    assert found[:3] == ["topic `[erased]`", "archive `[erased]`", "deleted archive `[erased]`"]
    assert found[3:5] == ["pipeline `[erased]`", "playback `[erased]`"]
    assert found[5].endswith("with label `tablet, [erased]`")
    assert found[6:] == [
        "Spark query `[erased]` of topic `t`",
        "producer `",  # `:playback:[erased]` of topic `[erased]`
        "audit of the home",
    ]


def test_records_of_the_homes_audit_are_counted(home: Home) -> None:
    for _ in range(2):
        record_action(home.context, "read", "topic device-7", "peek, 1 request", "ann")
    (found,) = erase(home).out_of_reach
    assert found.startswith("audit of the home: 2 records have one of them in a name: ")


def test_proof_of_an_archive_lists_names_too(home: Home) -> None:
    an_archive(home, name="daily")
    home.archives.get("daily").run()
    home.delete_topic("t")
    home.create_topic("device-7", 1)
    proof = home.archives.get("daily").erase(key=KEY, prove=True)
    assert "topic `[erased]`" in listed(proof)
