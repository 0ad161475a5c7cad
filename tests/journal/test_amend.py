"""Lookup, update and delete by id: seen at once by every way of reading, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.all_times import ALL_TIMES
from tidelog import Event
from tidelog.coordination.audit import id_hash
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.home import Home, World, create_home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.partition_reader import Reader
from tidelog.model.limits import ID_BYTES_MAX
from tidelog.settings import Settings

T0 = 1_700_000_000_000


@pytest.fixture
def home() -> Iterator[Home]:
    settings = Settings("memory:", "memory:")
    with create_home(settings, world=World(environ={"USER": "ada"}))[0] as found:
        found.create_topic("t", 3)
        yield found


def compile_all(home: Home, topic: str = "t") -> None:
    compile_topic(home.context, home.topic(topic), CompilePolicy.everything())


def fill(home: Home, count: int = 30, topic: str = "t") -> None:
    events = [
        Event(b"v%d" % n, b"k%d" % (n % 4), f"id-{n}", T0 + n, "made", (("h", b"x"),))
        for n in range(count)
    ]
    for first in range(0, count, 10):
        home.append(topic, events[first : first + 10])


def everything(home: Home, topic: str = "t") -> dict[str | None, bytes | None]:
    found = {}
    for partition in range(home.topic(topic).partitions):
        for event in home.read(topic, partition):
            found[event.id] = event.value
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_an_event_is_found_by_its_id_with_all_that_it_has(home: Home, compiled: bool) -> None:
    fill(home)
    if compiled:
        compile_all(home)
    event = home.get("t", "id-17")
    assert (event.value, event.key, event.timestamp) == (b"v17", b"k1", T0 + 17)
    assert (event.type, event.headers, event.topic) == ("made", (("h", b"x"),), "t")
    stored = list(home.read("t", event.partition or 0, event.offset or 0, (event.offset or 0) + 1))
    assert stored == [event]


@pytest.mark.parametrize("wrong", ["id-1x", "id", "id-", "ID-1", "id-1 ", "id-30"])
def test_only_the_exact_id_is_found(home: Home, wrong: str) -> None:
    fill(home)
    with pytest.raises(NotFoundError, match="has no event with id"):
        home.get("t", wrong)


@pytest.mark.parametrize(
    "event_id",
    [
        " ",
        "a--b",
        "a/b",
        "\n",
        "%00",
        "é",
        "\U0001f30a",
        "x" * ID_BYTES_MAX,
        "'; drop table rows; --",
        ".",
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_any_id_is_allowed(home: Home, event_id: str, compiled: bool) -> None:
    home.append("t", [Event(b"one", id=event_id), Event(b"other", id="other")])
    if compiled:
        compile_all(home)
    assert home.get("t", event_id).value == b"one"
    home.update("t", event_id, b"two", why="mend")
    assert home.get("t", event_id).value == b"two"
    home.delete("t", event_id)
    with pytest.raises(NotFoundError):
        home.get("t", event_id)
    assert home.get("t", "other").value == b"other"


@pytest.mark.parametrize("wrong", ["", "\ud800", "x" * (ID_BYTES_MAX + 1), 7, None, b"x"])
def test_what_cannot_be_an_id_is_refused(home: Home, wrong: str) -> None:
    with pytest.raises(InvalidError):
        home.get("t", wrong)
    if isinstance(wrong, str) and wrong != "\ud800":  # only a dead letter of an archive may have it
        assert home.delete("t", [wrong]).missing == (wrong,)
        return
    with pytest.raises(InvalidError):
        home.delete("t", [wrong])


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_updates_and_deletes_are_seen_by_every_way_of_reading(home: Home, when: str) -> None:
    fill(home)
    if when == "before":
        compile_all(home)
    home.update("t", "id-3", b"new")
    home.update("t", "id-4", None)
    home.update("t", "id-5", b"", why="empty")
    home.update("t", "id-6", b"x" * 100_000)
    if when == "between":
        compile_all(home)
    home.delete("t", ["id-7", "id-8"], why="asked for")
    home.update("t", "id-3", b"newer")
    if when == "after":
        compile_all(home)
    expected: dict[str | None, bytes | None] = {f"id-{n}": b"v%d" % n for n in range(30)}
    expected |= {"id-3": b"newer", "id-4": None, "id-5": b"", "id-6": b"x" * 100_000}
    del expected["id-7"], expected["id-8"]
    assert everything(home) == expected
    replayed = list(home.playback("t", *ALL_TIMES))
    assert {event.id: event.value for event in replayed} == expected
    assert [event.timestamp for event in replayed] == sorted(e.timestamp for e in replayed)  # type: ignore[type-var]
    with home.consumer("t", "c") as consumer:
        assert {event.id: event.value for event in consumer.poll(100)} == expected
    for each, value in expected.items():
        assert home.get("t", each or "").value == value
    for gone in ("id-7", "id-8"):
        with pytest.raises(NotFoundError):
            home.get("t", gone)


def test_an_update_of_what_is_not_there_is_a_clear_error(home: Home) -> None:
    fill(home)
    for gone in ("nowhere", "id-2"):
        if gone == "id-2":
            home.delete("t", gone)
        with pytest.raises(NotFoundError, match="nothing was updated"):
            home.update("t", gone, b"x")
        with pytest.raises(NotFoundError, match="nothing was deleted"):
            home.delete("t", gone)
    result = home.update_many("t", {"id-1": b"1", "nowhere": b"x", "id-2": b"y"})
    assert (result.events, result.missing) == (1, ("nowhere", "id-2"))
    deleted = home.delete("t", ["id-1", "nowhere", "id-1"])
    assert (deleted.events, deleted.missing) == (1, ("nowhere",))


def test_of_several_events_with_an_id_all_are_amended_and_the_newest_is_got(home: Home) -> None:
    home.append("t", [Event(b"old", b"a", "twice", T0)])
    home.append("t", [Event(b"new", b"a", "twice", T0 - 5)])
    assert home.get("t", "twice").value == b"new"
    home.append("t", [Event(b"elsewhere", b"b", "twice", T0 + 5)])
    assert home.get("t", "twice").value == b"elsewhere"
    compile_all(home)
    assert home.get("t", "twice").value == b"elsewhere"
    home.update("t", "twice", b"same")
    assert [event.value for event in home.playback("t", *ALL_TIMES)] == [b"same"] * 3
    assert home.delete("t", "twice").events == 3
    assert list(home.playback("t", *ALL_TIMES)) == []


def test_a_deleted_id_that_is_appended_anew_is_a_new_event(home: Home) -> None:
    home.append("t", [Event(b"old", id="x")])
    home.delete("t", "x")
    home.append("t", [Event(b"new", id="x")])
    assert home.get("t", "x").value == b"new"
    compile_all(home)
    home.sweep(0)
    assert home.get("t", "x").value == b"new"
    assert list(everything(home).values()) == [b"new"]


def test_a_key_with_all_its_events_goes_with_and_without_ids(home: Home) -> None:
    fill(home)
    home.append("t", [Event(b"no id", b"k2"), Event(b"none")])
    compile_all(home)
    home.append("t", [Event(b"late", b"k2", "late"), Event(b"other", b"k22", "o")])
    home.delete("t", "id-2")
    home.append("t", [Event(b"elsewhere", b"k2", "e")], partition=0)
    seen: list[int] = []
    deleted = home.delete_key("t", b"k2", why="asked for", who="bob", progress=seen.append)
    left = everything(home)
    assert deleted.events == len([n for n in range(30) if n % 4 == 2 and n != 2]) + 3
    assert all(n % 4 != 2 for n in (int(i[3:]) for i in left if i and i.startswith("id-")))
    assert set(left) >= {None, "o"}
    assert "late" not in left
    assert "e" not in left
    assert sum(seen) > 0
    assert home.delete_key("t", b"k2").events == 0
    record = [each for each in home.audit("t") if each.who == "bob"][-1]
    assert record.key.startswith("sha256:")
    assert "k2" not in str(record).replace("id-", "")


def test_key_is_not_deleted_past_an_object_that_is_missing(home: Home) -> None:
    home.append("t", [Event(b"x", b"k")], partition=0)
    [run] = Reader(home.context, home.topic("t"), 0).runs(0)
    home.store.delete([run.object])
    with pytest.raises(CorruptError, match=r"is gone, but partition `t/0` has its offsets 0 to 1"):
        home.delete_key("t", b"k")


def test_every_amendment_leaves_a_record_without_bytes(home: Home) -> None:
    fill(home)
    home.update("t", "id-1", b"secret", why="typo")
    home.delete("t", ["id-2", "id-3"], who="bob", why="asked for")
    update, delete = home.audit("t")
    assert (update.op, update.why, update.state) == ("update", "typo", "done")
    assert update.who.startswith("ada@")
    assert (delete.op, delete.who, delete.why, delete.state) == (
        "delete",
        "bob",
        "asked for",
        "done",
    )
    assert [each.id for each in delete.events] == [id_hash("id-2"), id_hash("id-3")]
    assert [each.id for each in home.audit("t", event_id="id-3")] == [delete.id]
    assert list(home.audit("t", event_id="id-30")) == []
    event = home.get("t", "id-1")
    assert [(e.partition, e.offset) for e in update.events] == [(event.partition, event.offset)]
    assert "secret" not in str([update, delete])
    assert list(home.audit("t", since="9999-01-01")) == []


def test_who_and_why_have_limits(home: Home) -> None:
    fill(home)
    with pytest.raises(InvalidError, match="who"):
        home.delete("t", "id-1", who="")
    with pytest.raises(InvalidError, match="why"):
        home.delete("t", "id-1", why="x" * 10_000)
    with pytest.raises(InvalidError, match="bytes"):
        home.update("t", "id-1", b"x" * (2 << 20))
    with pytest.raises(InvalidError):
        home.update("t", "id-1", "text")  # type: ignore[arg-type]
    assert everything(home)["id-1"] == b"v1"


def test_trimmed_events_are_not_found(home: Home) -> None:
    from tidelog.log.maintenance.trim import ToOffsets

    home.create_topic("one")
    for number in range(10):
        home.append("one", [Event(b"v", id=str(number))])
    assert home.get("one", "3").offset == 3
    home.trim("one", ToOffsets({0: 5}))
    for number in range(5):
        with pytest.raises(NotFoundError):
            home.get("one", str(number))
    assert home.get("one", "7").offset == 7
    home.sweep(0)
    assert home.get("one", "5").offset == 5
    assert home.delete("one", ["4", "5"]).missing == ("4",)


def test_a_topic_that_was_made_anew_knows_nothing_of_the_old_one(home: Home) -> None:
    fill(home)
    assert home.get("t", "id-1")
    home.delete_topic("t")
    with pytest.raises(NotFoundError, match="topic `t`"):
        home.get("t", "id-1")
    home.create_topic("t", 2)
    with pytest.raises(NotFoundError, match="has no event"):
        home.get("t", "id-1")
