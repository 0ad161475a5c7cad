"""What Tidelog adds to an event has room of its own: an event at every limit goes everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.named_pipelines import create_pipeline
from tidelog import Event, Home
from tidelog.codec.event_batch import check_events, one_batch, table_of, with_position
from tidelog.codec.fields import NOT_EXTRACTED_HEADER, FieldPaths, FieldTaker
from tidelog.connectors.sink import Lot
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.errors import InvalidError
from tidelog.home import World, create_home, open_home
from tidelog.log.consumer.handler import dead_letter_of
from tidelog.model import limits
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

_MOST = 200_000  # event_bytes_max in these tests
_MANY = (("", None),) * limits.HEADERS_MAX
_JSON = b'{"id": "%s", "key": "%s"}'


def _settings(path: Path, most: int) -> Settings:
    return Settings(str(path / "o"), str(path / "c.sqlite"), event_bytes_max=most, lease_ttl_ms=500)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(_settings(tmp_path, _MOST), world=World(environ={}))[0] as made:
        for topic in ("from", "to", "dead"):
            made.create_topic(topic)
        yield made


def _largest(event: Event) -> Event:
    """The event with a value that makes it as large as it may be."""
    headers = sum(len(n) + len(v or b"") + limits.HEADER_OVERHEAD_BYTES for n, v in event.headers)
    rest = headers + len(event.key or b"") + len(event.id or "") + len(event.type or "")
    value = (event.value or b"").ljust(_MOST - rest)
    return msgspec.structs.replace(event, value=value)


def _limits() -> dict[str, Event]:
    longest = b"i" * limits.ID_BYTES_MAX
    return {
        "largest": _largest(Event(b"", b"k", "a", 1)),
        "largest JSON with the longest id": _largest(Event(_JSON % (longest, b"k"), None, None, 1)),
        "most headers": Event(b"{}", None, "b", 1, None, _MANY),
        "most headers and largest": _largest(Event(b"{}", None, "c", 1, None, _MANY)),
        "null header value": Event(b"[]", None, "d", 1, None, (("h", None), ("h", b""))),
        "key larger than the room": _largest(Event(_JSON % (b"e", b"k" * 90_000), None, "e", 1)),
    }


def _boom(event: Event) -> None:
    raise RuntimeError("日" * 10_000)


def _pump(home: Home, wanted: PumpOptions) -> int:
    return Driver(
        home.context, open_pump(home.context, wanted, LocalWorkers(2)), DriverOptions()
    ).run()


def test_events_at_every_limit_become_dead_letters_which_are_pumped_and_played(home: Home) -> None:
    events = list(_limits().values())
    home.append("from", events)
    with home.consumer("from", "c" * limits.CONSUMER_NAME_MAX) as consumer:
        handled = consumer.run(
            _boom, on_error="dead-letter", dead_letter="dead", retries=0, until_caught_up=True
        )
    assert handled == len(events)
    letters = list(home.read("dead"))
    assert [each.value for each in letters] == [each.value for each in events]
    for letter, event in zip(letters, events, strict=True):
        assert letter.headers[:-3] == event.headers
        assert (letter.key, letter.id, letter.type) == (event.key, event.id, event.type)
        names = ["tidelog-position", "tidelog-consumer", "tidelog-error"]
        assert [name for name, _ in letter.headers[-3:]] == names
    assert _pump(home, PumpOptions("topic:dead", "to", fields=FieldPaths(id="id"))) == len(events)
    assert sorted(e.value or b"" for e in home.read("to")) == sorted(e.value or b"" for e in events)
    home.create_topic("played")
    sink = TopicPlaybackSink(home.context, home.topic("played"), None, keep_partition=False)
    sink.put(Lot(0, with_position(one_batch(table_of(letters, 1)), "dead", 0, 0)))
    sink.close()
    assert len(list(home.read("played"))) == len(events)


@pytest.mark.parametrize("name", _limits())
def test_dead_letter_of_dead_letters_can_be_stored(name: str) -> None:
    first = _limits()[name]
    event = first
    for _ in range(10):
        read = Event(event.value, event.key, event.id, 1, None, event.headers, "t" * 200, 9_999, 7)
        event = dead_letter_of(read, RuntimeError("日" * 10_000), "日" * 200)
        check_events(table_of([event], 1), limits.EVENT_BYTES_CEILING, own=True)
        assert event.headers[: len(first.headers)] == first.headers


def test_events_at_every_limit_are_pumped_with_fields(home: Home) -> None:
    events = _limits()
    home.append("from", [Event(b"before", timestamp=0), *events.values()])
    fields = FieldPaths(id="id", key="key")
    assert _pump(home, PumpOptions("topic:from", "to", fields=fields)) == len(events) + 1
    found = {each.value: each for each in home.read("to")}
    longest = found[events.pop("largest JSON with the longest id").value]
    assert (longest.id, longest.key) == ("i" * limits.ID_BYTES_MAX, b"k")
    for event in events.values():
        pumped = found[event.value]
        assert pumped.headers[:-1] == event.headers
        assert pumped.headers[-1][0] == NOT_EXTRACTED_HEADER
        assert (pumped.id, pumped.key) == (event.id, event.key)


@pytest.mark.parametrize("name", _limits())
def test_fields_of_an_event_from_outside_have_room_on_top_of_its_limit(name: str) -> None:
    event = _limits()[name]
    batch = with_position(one_batch(table_of([event], 1)), "t", 0, 0)
    taken = FieldTaker(FieldPaths(id="id", key="key", type="type"), _MOST).take(batch)
    check_events(taken, _MOST, own=True)


def test_lower_limit_does_not_stop_copies_of_what_was_accepted(home: Home, tmp_path: Path) -> None:
    home.append("from", [Event(b"x" * 100_000)])
    with open_home(home.config, world=World(environ={})) as lower:
        settings = dataclasses.replace(lower.context.log_settings, event_bytes_max=1_000)
        object.__setattr__(
            lower.context, "log_settings", settings
        )  # as after a restart with a lower one
        with pytest.raises(InvalidError, match="at most 1000"):
            lower.append("to", [Event(b"x" * 1_001)])
        assert _pump(lower, PumpOptions("topic:from", "to")) == 1
        with lower.consumer("from", "c") as consumer:
            consumer.run(
                _boom, on_error="dead-letter", dead_letter="dead", retries=0, until_caught_up=True
            )
        assert len(list(lower.read("dead"))) == 1


def test_reason_is_cut_at_a_whole_character() -> None:
    event = Event(b"x", topic="t", partition=0, offset=5)
    for length in range(1_998, 2_003):
        letter = dead_letter_of(event, ValueError("a" * length + "日" * 2_000), "c")
        said = letter.headers[-1][1] or b""
        assert len(said) <= 4_000
        said.decode()


def test_record_over_the_limit_is_named_with_its_place(home: Home, tmp_path: Path) -> None:
    lines = [b"a", b"b" * 300_000, b"c"]
    (tmp_path / "in.txt").write_bytes(b"\n".join(lines) + b"\n")
    wanted = PumpOptions(f"file://{tmp_path}/in.txt?format=lines", "to")
    with pytest.raises(InvalidError, match=r"offset 1: event: has 300000 bytes, at most 200000"):
        _pump(home, wanted)


def test_pump_of_what_it_writes_is_refused(home: Home) -> None:
    home.append("from", [Event(b"x", timestamp=1)])
    with pytest.raises(InvalidError, match="never ends"):
        open_pump(home.context, PumpOptions("topic:from", "from"), LocalWorkers())
    with pytest.raises(InvalidError, match="never ends"):
        create_pipeline(home.context, "loop", "topic:from", "topic:from?partition=same")
    assert len(list(home.read("from"))) == 1
