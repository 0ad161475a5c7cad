"""Sinks by their addresses; everything that is wrong with one is told before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog import Home
from tidelog.connectors.by_url import sink_at
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 3)
        yield made


BAD = {
    "an unknown scheme": ("topik:t", "unknown scheme `topik` .did you mean `topic`"),
    "no scheme": ("t", "has no scheme"),
    "a source that is no sink": ("archive:daily", "give one of kafka, kinesis, topic"),
    "slashes": ("topic://t", "give topic:NAME, without slashes"),
    "no topic": ("topic:", "topic name ``"),
    "a topic's unknown option": ("topic:t?partitions=same", "did you mean `partition`"),
    "an unknown way to place events": ("topic:t?partition=random", "give key or same"),
    "the same in Kafka": ("kafka://h/t?partition=random", "give key or same"),
    "no broker": ("kafka:///t", "a broker is missing"),
    "no topic of Kafka": ("kafka://h", "is not a valid topic"),
    "a pattern": ("kafka://h/^t.*", "is not a valid topic: give one after the brokers"),
    "an unknown property": ("kafka://h/t?lingerr.ms=5", "lingerr.ms"),
    "a property of ours": ("kafka://h/t?transactional.id=x", "may not set `transactional.id`"),
    "what breaks the order": ("kafka://h/t?max.in.flight=9", "the order of events must stay"),
    "acknowledged by one": ("kafka://h/t?acks=1", "may not set `acks`"),
    "a secret": ("kafka://h/t?sasl.password=x", "looks like a secret"),
    "a secret of another kind": ("kafka://h/t?ssl.key.pem=x", "TIDELOG_KAFKA_SSL_KEY_PEM"),
    "a value out of range": ("kafka://h/t?linger.ms=-5", "linger.ms"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_an_address_is_told(home: Home, case: str) -> None:
    url, message = BAD[case]
    with pytest.raises(InvalidError, match=message):
        sink_at(home.context, url)


def test_a_topic_that_is_not_there(home: Home) -> None:
    with pytest.raises(NotFoundError, match=r"topic `nope`: not found.*or create it with"):
        sink_at(home.context, "topic:nope")


def test_sinks_tell_their_addresses_and_targets(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=key")
    assert (sink.url, sink.incarnation) == ("topic:t", home.topic("t").incarnation)
