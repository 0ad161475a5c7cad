"""Handles of archives, pumps, playbacks and consumers, beyond what their examples show."""

from __future__ import annotations

import ast
import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tidelog
from tests.support.all_times import ALL_TIMES
from tidelog import (
    AlreadyExistsError,
    BeforeTime,
    DeleteResult,
    Event,
    Home,
    InvalidError,
    NotFoundError,
    Proof,
    ToOffsets,
    create_home,
)
from tidelog.settings import load_settings

AT_MS = 1_794_657_600_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as home:
        home.create_topic("orders", 2)
        values = [b'{"at": %d}' % (AT_MS + number) for number in range(10)]
        events = [
            Event(value, key=b"k%d" % (number % 3), id=f"o{number}", timestamp=AT_MS + number)
            for number, value in enumerate(values)
        ]
        home.append("orders", events)
        yield home


def test_handle_of_a_deleted_archive_never_works_on_another_one(home: Home) -> None:
    old = home.archives.create("daily", source="topic:orders")
    old.delete(files=True)
    with pytest.raises(NotFoundError):
        old.run()
    new = home.archives.create("daily", source="topic:orders")
    new.run()
    with pytest.raises(NotFoundError, match="made again"):
        old.status()
    with pytest.raises(NotFoundError, match="made again"):
        old.delete(files=True)
    assert new.verify(deep=True).events == 10


def test_misspelled_archive_gets_the_nearest_name(home: Home) -> None:
    home.archives.create("daily", source="topic:orders")
    with pytest.raises(NotFoundError, match=r"`dayly`: not found \(did you mean `daily`\?\)"):
        home.archives.get("dayly")


def test_kind_follows_from_the_parser(home: Home) -> None:
    assert home.archives.create("raw", source="topic:orders").info.kind == "backup"
    daily = home.archives.create("daily", source="topic:orders", parser="json:at")
    assert daily.info.kind == "partition"
    with pytest.raises(AlreadyExistsError):
        home.archives.create("daily", source="topic:orders", parser="json:at")
    with pytest.raises(InvalidError, match="contradict"):
        home.archives.create("other", source="topic:orders", kind="backup", parser="json:at")


def test_run_that_follows_resumes_with_the_promoted_generation(home: Home) -> None:
    archive = home.archives.create(
        "daily", source="topic:orders", parser="json:at", max_age="100ms"
    )
    archive.run()
    stop, promoted, began = threading.Event(), threading.Event(), threading.Event()
    running = threading.Thread(
        target=archive.run,
        kwargs={
            "follow": True,
            "stop": stop,
            "on_look": lambda _: began.set(),
            "on_promote": lambda _: promoted.set(),
        },
    )
    running.start()
    try:
        assert began.wait(30)
        other = home.archives.get("daily")
        assert other.backfill(granularity="hour").generation == 2
        assert other.promote().generation == 2
        home.append("orders", [Event(b'{"at": %d}' % AT_MS)])  # the old driver is fenced by it
        assert promoted.wait(30)
        assert other.flush() == []
    finally:
        stop.set()
        running.join()
    assert home.archives.get("daily").verify(deep=True).events == 11


def test_settings_that_a_backfill_does_not_name_stay(home: Home) -> None:
    archive = home.archives.create(
        "daily", source="topic:orders", parser="json:at", format="jsonlines", mode="events"
    )
    archive.run()
    archive.backfill(granularity="hour")
    made = archive.reload().format_of(2)
    assert (made.format, made.format_settings) == ("jsonlines", {"mode": "events"})
    assert made.layout == {"granularity": "hour"}


def test_pump_with_other_settings_is_refused(home: Home) -> None:
    home.create_topic("copies", 2)
    home.pumps.create("copy", source="topic:orders", topic="copies").run()
    with pytest.raises(InvalidError, match="was begun with fields"):
        home.pumps.create("copy", source="topic:orders", topic="copies", id_field="at")
    assert home.pumps.get("copy").run().events == 0
    assert home.pumps.get("copy").status().events == 10


def test_unknown_options_are_refused(home: Home) -> None:
    home.create_topic("copies", 2)
    archive = home.archives.create("daily", source="topic:orders")
    pump = home.pumps.create("copy", source="topic:orders", topic="copies")
    calls: dict[str, Callable[[], object]] = {
        "granularity": lambda: home.archives.create("a", source="topic:orders", granularty="hour"),  # type: ignore[call-arg]
        "accept_loss": lambda: archive.run(accept_los=True),  # type: ignore[call-arg]
        "parser": lambda: archive.replay(parse="json:at"),  # type: ignore[call-arg]
        "rate": lambda: archive.restore("topic:copies", rates=1),  # type: ignore[call-arg]
        "format": lambda: archive.backfill(frmat="avro"),  # type: ignore[call-arg]
        "id_field": lambda: home.pumps.create(source="topic:orders", topic="copies", idfield="x"),  # type: ignore[call-arg]
        "max_age": lambda: pump.run(maxage="1s"),  # type: ignore[call-arg]
        "batch": lambda: home.stream("topic:orders").run(len, name="s", bacth=True),  # type: ignore[call-arg]
        "if_absent": lambda: home.append_lines("orders", io.BytesIO(b"x\n"), ifabsent=True),  # type: ignore[call-arg]
        "incarnation": lambda: home.erase("orders", ids=["o1"], incarnaton="x"),  # type: ignore[call-arg]
        "on_swap": lambda: home.compile_all(onswap=print),  # type: ignore[call-arg]
        "as_of": lambda: home.playback("orders", to="topic:copies", asof="x"),  # type: ignore[call-overload]
    }
    for name, call in calls.items():
        with pytest.raises(InvalidError, match=f"did you mean `{name}`"):
            call()
    assert home.get("orders", "o1") is not None
    assert [each.name for each in home.archives.list()] == ["daily"]


def test_every_function_with_open_options_checks_them() -> None:
    for path in Path(tidelog.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.args.kwarg is None:
                continue
            note, body = node.args.kwarg.annotation, ast.unparse(node.body)  # type: ignore[arg-type]
            if note is None or "Unpack[" not in ast.unparse(note) or body.strip() == "...":
                continue
            passed = f"**{node.args.kwarg.arg})" in body  # to a function or a class that checks
            assert passed or "check_options(" in body, f"{path.name}: {node.name}"
            if node.args.kwonlyargs and "check_options(" in body and "others=" not in body:
                assert f", self.{node.name})" in body, f"{path.name}: {node.name}"


def test_mistyped_name_of_an_argument_is_found_too(home: Home) -> None:
    """Not only one of the options behind ``**``."""
    archive = home.archives.create("by-time", source="topic:orders", parser="timestamp")
    with pytest.raises(InvalidError, match=r"unknown option `date` \(did you mean `dates`\?\)"):
        archive.redo(date="2026-11-15")  # type: ignore[call-arg]


def test_wrong_types_get_one_clear_sentence(home: Home) -> None:
    with home.consumer("orders", name="billing") as consumer:
        consumer.poll()
    billing = home.consumers("orders").get("billing")
    calls: dict[str, Callable[[], object]] = {
        "topic name: is int: give text": lambda: home.create_topic(5),  # type: ignore[arg-type]
        "sql: query is int: give text": lambda: home.sql(5),  # type: ignore[arg-type]
        "append: got bytes: give a list": lambda: home.append("orders", b"x"),  # type: ignore[arg-type]
        "append: got str: give a list": lambda: home.append("orders", "x"),  # type: ignore[arg-type]
        "has no partition 9: give 0 to 1": lambda: list(home.read("orders", 9)),
        "seek: to is dict: give earliest": lambda: billing.seek({}),  # type: ignore[arg-type]
        "or earliest, latest or an offset": lambda: billing.seek("nowhere"),
    }
    for says, call in calls.items():
        with pytest.raises(InvalidError, match=re.escape(says)):
            call()


@pytest.mark.parametrize("time_ms", [-(2**62), -1, 2**62])
def test_playback_from_a_time_that_no_event_has_is_refused(home: Home, time_ms: int) -> None:
    for times in ((time_ms, None), (0, time_ms)):
        with pytest.raises(InvalidError, match="the years 1970 to 9999"):
            home.playback("orders", *times, to="topic:copies")


def test_playback_resumes_by_its_name(home: Home) -> None:
    home.create_topic("copies", 2)
    stop = threading.Event()
    stop.set()
    times = {"start": AT_MS, "end": AT_MS + 100}
    first = home.playback("orders", **times, to="topic:copies", name="drill", stop=stop)
    assert not first.finished
    assert [each.name for each in home.playbacks.list()] == ["drill"]
    second = home.playback("orders", **times, to="topic:copies", name="drill")
    assert second.finished
    assert first.events + second.events == 10
    third = home.playback("orders", **times, to="topic:copies", name="drill")
    assert (third.events, third.before is not None) == (0, True)
    assert sorted(event.id or "" for event in home.playback("copies", *ALL_TIMES)) == [
        f"o{n}" for n in range(10)
    ]
    home.playbacks.forget("drill")
    with pytest.raises(InvalidError, match="give to"):
        home.playback("orders", name="drill")  # type: ignore[call-overload]


def test_seek_moves_the_cursors_of_all_partitions(home: Home) -> None:
    with home.consumer("orders", "billing") as consumer:
        consumer.run(lambda event: None, until_caught_up=True)
    billing = home.consumers("orders").get("billing")
    assert billing.behind() == 0
    assert sum(move.again for move in billing.seek("earliest")) == 10
    assert billing.behind() == 10
    billing.delete()
    with pytest.raises(NotFoundError):
        billing.seek("latest")
    assert home.consumers("orders").list() == []


def test_consumer_iterates_and_commits_each_batch(home: Home) -> None:
    with home.consumer("orders", "billing") as consumer:
        seen = []
        for event in consumer:
            seen.append(event.id)
            if len(seen) == 10:
                break
    assert sorted(seen) == [f"o{n}" for n in range(10)]
    # The last batch was not finished, so it comes again.
    assert home.consumers("orders").get("billing").behind() > 0


def test_erase_reaches_archives_and_returns_a_proof(home: Home) -> None:
    archive = home.archives.create("raw", source="topic:orders", format="jsonlines", mode="events")
    archive.run()
    deleted = home.delete("orders", ["o3"], why="request 1")
    assert isinstance(deleted, DeleteResult)
    assert not home.prove_erased("orders", ids=["o3"]).is_erased
    proof = home.erase("orders", key=b"k1", why="request 2")
    assert isinstance(proof, Proof)
    assert proof.is_erased
    assert home.prove_erased("orders", ids=["o3"]).is_erased
    left = sum(batch.num_rows for batch in archive.read())
    assert left == sum(1 for n in range(10) if n % 3 != 1 and n != 3)
    with pytest.raises(InvalidError, match="ids or a key"):
        home.erase("orders", ids=["o5"], key=b"k1")
    with pytest.raises(NotFoundError):
        home.erase("orders", ids=["o5"], incarnation="another")


def test_maintenance_compiles_and_one_process_at_a_time_does_it(home: Home) -> None:
    turn = home.maintain(policy=None, grace="0s")
    assert turn is not None
    assert turn.succeeded
    assert turn.topics == 1


def test_trim_takes_a_time_as_text(home: Home) -> None:
    done = home.trim("orders", "2020-01-01")
    assert [each.new_start for each in done] == [0, 0]
    home.trim("orders", BeforeTime(AT_MS + 1_000))
    assert sum(state.events for state in home.partitions("orders")) == 0


def test_delete_reaches_events_that_only_an_archive_holds(home: Home) -> None:
    home.archives.create("raw", source="topic:orders").run()
    ends = {state.partition: state.next for state in home.partitions("orders")}
    home.trim("orders", ToOffsets(ends))
    assert home.delete("orders", "o4").archived == 1
    assert home.delete_key("orders", b"k0").archived == 4  # o0, o3, o6 and o9
    home.purge("orders")
    assert home.prove_erased("orders", ids=["o4"], keys=[b"k0"]).is_clean
    with pytest.raises(NotFoundError, match="nothing was deleted"):
        home.delete("orders", "o99")
    assert home.delete("orders", []) == DeleteResult()


def test_proof_of_an_erasure_says_what_was_deleted(home: Home) -> None:
    proof = home.erase("orders", ids=["o1", "o99"])
    assert proof.is_erased
    assert proof.deleted == DeleteResult(events=1, missing=("o99",))
    assert not proof.deleted.is_clean


def test_consumer_starts_where_the_command_can(home: Home) -> None:
    def first(name: str, start: str | int) -> int:
        with home.consumer("orders", name, start) as consumer:
            return len(consumer.poll())

    assert first("by-text", "0") == first("by-number", 0) == 10
    assert first("by-time", "-15m") == len(list(home.playback("orders", "-15m", "latest")))
    with pytest.raises(InvalidError):
        home.consumer("orders", "wrong", "yesterday")


def test_home_is_created_by_its_path(tmp_path: Path) -> None:
    for where in (tmp_path / "new", str(tmp_path / "new")):
        made, is_new = create_home(where)
        with made:
            assert is_new == isinstance(where, Path)


@pytest.mark.parametrize("part", ["archives", "pumps", "tokens", "playbacks"])
def test_parts_of_a_home_are_refused_after_its_end_and_in_a_forked_child(part: str) -> None:
    home = tidelog.open("memory:")
    assert getattr(home, part).list() == []
    home._process, pid = -1, home._process
    with pytest.raises(InvalidError, match="another process"):
        getattr(home, part)
    home._process = pid
    home.close()
    with pytest.raises(InvalidError, match="is closed"):
        getattr(home, part)


def test_seek_that_one_partition_refuses_moves_no_cursor() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t", 2)
        for partition, count in ((0, 10), (1, 2)):
            home.append("t", [Event(b"")] * count, partition=partition)
        home.consumers("t").drain("c", lambda events: None)
        consumer = home.consumers("t").get("c")
        with pytest.raises(InvalidError, match="offset 5 is outside"):
            consumer.seek(5)
        assert [each.cursor for each in consumer.lag()] == [10, 2]
