"""What is done to topics, archives, pumps and consumers leaves the same record from everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog import AlreadyExistsError, Event, Home, InvalidError, ToOffsets, create_home
from tidelog.settings import load_settings

AT_MS = 1_794_657_600_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as home:
        home.create_topic("orders", who="anna")
        home.append("orders", [Event(b'{"at": %d}' % (AT_MS + each)) for each in range(4)])
        yield home


def recorded(home: Home) -> Counter[tuple[str, str, str]]:
    """What the audit has; records of the same millisecond come in any order."""
    actions = list(home.actions())
    assert {each.who for each in actions} == {"anna"}
    found = Counter((each.op, each.what, each.note) for each in actions)
    return found - Counter([("topic create", "topic orders", "")])


def test_each_change_of_a_topic_is_recorded_with_its_author(home: Home) -> None:
    assert [(each.op, each.what) for each in home.actions()] == [("topic create", "topic orders")]
    home.change_topic("orders", notify=["https://example.com/woken"], who="anna")
    home.trim("orders", ToOffsets({0: 2}), who="anna")
    home.delete_topic("orders", who="anna")
    assert recorded(home) == Counter(
        [
            ("topic change", "topic orders", ""),
            ("topic trim", "topic orders", "0 to 2"),
            ("topic delete", "topic orders", ""),
        ]
    )


def test_each_change_of_an_archive_is_recorded_with_its_author(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:orders", parser="json:at", who="anna")
    archive.run()
    archive.backfill(granularity="hour", who="anna")
    archive.promote(who="anna")
    archive.rollback(who="anna")
    archive.drop(2, who="anna")
    archive.redo(dates=["2026-11-14"], who="anna")
    archive.drop(3, who="anna")
    archive.replay(who="anna")
    archive.tables.register("delta", who="anna")
    archive.tables.register()  # up to date
    archive.tables.forget("delta", who="anna")
    archive.finalize("0s")
    home.create_topic("again", who="anna")
    archive.restore(to="topic:again", who="anna")
    archive.seek("latest", who="anna")
    archive.delete(who="anna")
    assert recorded(home) == Counter(
        [
            ("archive create", "archive daily", ""),
            ("archive backfill", "archive daily", ""),
            ("archive promote", "archive daily", ""),
            ("archive rollback", "archive daily", ""),
            ("archive drop", "archive daily", "generation 2"),
            ("archive redo", "archive daily", ""),
            ("archive drop", "archive daily", "generation 3"),
            ("archive replay", "archive daily", ""),
            ("archive register", "archive daily", "delta"),
            ("archive forget table", "archive daily", "delta"),
            ("topic create", "topic again", ""),
            ("archive restore", "archive daily", "to topic:again"),
            ("archive seek", "daily: orders/0", "from 4 to 4"),
            ("archive delete", "archive daily", ""),
        ]
    )


def test_consumers_and_pumps_are_recorded_with_their_author(home: Home) -> None:
    with home.consumer("orders", name="billing") as consumer:
        consumer.poll()
    home.consumers("orders").get("billing").seek("latest", who="anna")
    home.delete_consumer("orders", "billing", who="anna")
    home.create_topic("copies", who="anna")
    for _ in range(2):  # the second call finds the pump, and creates nothing
        pump = home.pumps.create("copy", source="topic:orders", topic="copies", who="anna")
    pump.delete(who="anna")
    to = f"topic:copies ({home.topic('copies').incarnation})"
    for _ in range(2):
        stream = home.stream("topic:orders")
        stream.run(len, name="count", batch=True, until_caught_up=True, who="anna")
    home.pumps.get("count").delete(who="anna")
    assert recorded(home) == Counter(
        [
            ("cursor move", "consumer billing of orders/0", "to latest"),
            ("consumer delete", "consumer billing of orders", ""),
            ("topic create", "topic copies", ""),
            ("pump create", "pump copy", "into topic copies"),
            ("pump delete", "pump copy", f"of topic:orders, to {to}"),
            ("stream create", "stream count", "of topic:orders"),
            ("stream delete", "stream count", "of topic:orders, to handler:"),
        ]
    )


def test_what_changes_nothing_leaves_no_record(home: Home) -> None:
    with pytest.raises(AlreadyExistsError):
        home.create_topic("orders", who="anna")
    home.trim("orders", ToOffsets({0: 0}), who="anna")
    archive = home.archives.create("daily", source="topic:orders", who="anna")
    with pytest.raises(AlreadyExistsError):
        home.archives.create("daily", source="topic:orders", who="anna")
    with pytest.raises(InvalidError):
        home.delete_topic("orders", who="anna")  # the archive has not read it
    archive.run()
    assert recorded(home) == Counter([("archive create", "archive daily", "")])
