"""Names of producers: users cannot open those that Tidelog's own producers have."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidelog
from tests.support.ranges import batch_of, stage
from tidelog import Event
from tidelog.connectors.by_url import sink_at
from tidelog.errors import InvalidError
from tidelog.home import create_home
from tidelog.model import layout
from tidelog.model import topic as producers
from tidelog.settings import Settings

OWN = [
    producers.unnamed_producer("0" * 32),
    producers.once_producer("0" * 64),
    producers.pipeline_producer("pump", "from/0"),
    producers.pipeline_producer("~playback-1", "windows"),
    producers.playback_producer("p"),
    producers.sink_producer("s"),
]


@pytest.mark.parametrize("name", [*OWN, "", "x" * 201, "\ud800"])
def test_reserved_and_malformed_names_are_refused(name: str) -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t")
        with pytest.raises(InvalidError, match="producer name"):
            home.producer("t", name)


def test_own_names_are_all_different() -> None:
    pairs = [("a", "b.x/0"), ("a.b", "x/0"), ("a-b", "x/0"), ("a", "b:x/0")]
    names = [producers.pipeline_producer(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert len(set(OWN)) == len(OWN)


def test_name_that_looks_like_a_hash_has_a_row_of_its_own() -> None:
    long = "é" * 400
    hashed = layout.producer_row(long).removeprefix("producer/")
    assert hashed.startswith("sha256:")
    assert layout.producer_row(hashed) != layout.producer_row(long)


@pytest.mark.parametrize("name", ["pipe.from/0", "pipe:from/0", "pipe"])
def test_producer_of_a_user_takes_nothing_from_a_pipeline(tmp_path: Path, name: str) -> None:
    """The pipeline takes what its producer's row shows for stored, and skips it."""
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("t")
        with home.producer("t", name) as producer:
            for _ in range(3):
                producer.send(b"user").result()
        sink = sink_at(home.context, "topic:t")
        sink.publish(stage(sink, [batch_of([Event(b"pumped")] * 3)]))
        found = [event.value for event in home.read("t")]
    assert found == [b"user"] * 3 + [b"pumped"] * 3
