"""Events of the lot under way are deleted or updated between a death and the resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import tidelog
from tests.support.fake_transactions import FakeBroker, FakeTransactions
from tests.support.playback_stage import T0
from tidelog import Event, Home
from tidelog.connectors.http import HttpPlaybackSink
from tidelog.connectors.kafka.client import TopicRules
from tidelog.connectors.kafka.sink import KafkaPlaybackSink
from tidelog.connectors.sink import PlaybackSink, SinkContext
from tidelog.errors import AlreadyExistsError
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model.address import parse_address
from tidelog.model.event import to_iso
from tidelog.playback.play import Playback, PlaybackOptions, run_named
from tidelog.playback.request import PlaybackRequest, pinned_playback
from tidelog.playback.session import NamedPlayback

EVENTS = 20
LOT = 10
URLS = {"kafka": "kafka://127.0.0.1:1/out", "http": "http://127.0.0.1:1/topics/out/events"}


class Died(BaseException):
    """The process was killed."""


class Sink:
    """Where the playback goes, and when its process dies: after how many steps in all."""

    def __init__(self, home: Home, kind: str, dies_after: int) -> None:
        self._home = home
        self.kind = kind
        self.left = dies_after
        self.broker = FakeBroker()

    def open(self, setting: SinkContext) -> PlaybackSink:
        if self.kind == "kafka":
            steps: Any = FakeTransactions(self.broker, 3, self.step)
            return KafkaPlaybackSink(steps, keep_partition=False, rules=TopicRules())
        sink = HttpPlaybackSink(parse_address(URLS["http"]), setting)
        sink._post = self.post  # type: ignore[method-assign]
        return sink

    def post(self, body: bytes, key: str) -> None:
        """What a server of Tidelog does."""
        self.step("before")
        events = [Event(line, id=None) for line in body.splitlines()]
        append_once(self._home.context, self._home.topic("out"), key, events)
        self.step("after")

    def step(self, _: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Died

    def ids(self) -> Counter[str]:
        if self.kind == "kafka":
            return Counter(row["id"] for row in self.broker.records)
        lines = [event.value or b"" for event in self._home.read("out")]
        return Counter(line.split(b'"id":"')[1].split(b'"')[0].decode() for line in lines)


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 1)
        opened.create_topic("out", 1)
        opened.append(
            "t", [Event(b"%d" % n, id=f"e{n}", timestamp=T0 + n // 3) for n in range(EVENTS)]
        )
        yield opened


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for sink in (KafkaPlaybackSink, HttpPlaybackSink):
        monkeypatch.setattr(sink, "lot_events", LOT)


def drive(home: Home, sink: Sink) -> None:
    asked = PlaybackRequest("t", URLS[sink.kind], to_iso(T0), to_iso(T0 + 1_000))
    topic, pinned = pinned_playback(home.context, "p", asked)
    named = NamedPlayback(home.context, "p", pinned.generation)
    named._can_take = lambda state, version: True  # type: ignore[method-assign]
    assert named.take()
    if named.state.finished_ms:
        return
    setting = SinkContext.of_named(home.context, {}, named, pinned)
    run_named(
        Playback(home.context, topic, pinned.pin, None, PlaybackOptions()),
        named,
        lambda: sink.open(setting),
    )


@pytest.mark.parametrize("change", ["delete", "delete all", "update", "nothing"])
@pytest.mark.parametrize("dies_after", range(1, 5))
@pytest.mark.parametrize("kind", ["kafka", "http"])
def test_resume_skips_nothing_and_ends(home: Home, kind: str, dies_after: int, change: str) -> None:
    sink = Sink(home, kind, dies_after)
    with pytest.raises(Died):
        drive(home, sink)
    changed: set[str] = set()
    if change.startswith("delete"):
        changed = {f"e{n}" for n in (range(LOT) if change == "delete all" else (1, 3, 12))}
        home.delete("t", sorted(changed))
    elif change == "update":
        changed = {"e1", "e12"}
        for each in sorted(changed):
            home.update("t", each, b"x" * 50)
    sink.left = 0  # lives from here on
    drive(home, sink)
    found = sink.ids()
    kept = {f"e{n}" for n in range(EVENTS)} - (changed if change != "update" else set())
    assert kept <= set(found), f"skipped: {sorted(kept - set(found))}"
    twice = {each for each, count in found.items() if count > 1}
    assert kind == "http" or not twice, f"twice: {sorted(twice)}"
    assert change != "nothing" or not twice, "a server knows the same request again"


def test_a_key_with_other_events_is_refused_by_servers(home: Home) -> None:
    """Why the key of a lot names its contents."""
    topic = home.topic("out")
    append_once(home.context, topic, "key", [Event(b"a"), Event(b"b")])
    with pytest.raises(AlreadyExistsError):
        append_once(home.context, topic, "key", [Event(b"b")])
