"""Bugs that flash-flood 0.4.3 has, one by one: here each of them is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tidelog import Event
from tidelog.errors import AlreadyExistsError, NotFoundError
from tidelog.home import Home, World, create_home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.settings import Settings

T0 = 1_700_000_000_000


@pytest.fixture
def home() -> Iterator[Home]:
    settings = Settings("memory:", "memory:")
    with create_home(settings, world=World(environ={}))[0] as found:
        found.create_topic("t", 2)
        yield found


def compile_all(home: Home) -> None:
    compile_topic(home.context, home.topic("t"), CompilePolicy.everything())


def put(home: Home, value: bytes, event_id: str, at_ms: int) -> None:
    home.append("t", [Event(value, id=event_id, timestamp=at_ms)], if_absent=True)


def replayed(
    home: Home, start: int | str = "earliest", end: int | str = "latest"
) -> list[tuple[str | None, bytes | None]]:
    return [(event.id, event.value) for event in home.playback("t", start, end)]


@pytest.mark.parametrize("compiled", [False, True])
def test_1_a_replay_that_begins_within_a_journal_gives_each_event_its_own_bytes(
    home: Home, compiled: bool
) -> None:
    for number in range(20):
        put(home, b"value %d" % number, f"id-{number}", T0 + number)
    if compiled:
        compile_all(home)
    for start in range(20):
        expected = [(f"id-{n}", b"value %d" % n) for n in range(start, 20)]
        assert replayed(home, T0 + start) == expected
    assert replayed(home, T0 + 5, T0 + 8) == [(f"id-{n}", b"value %d" % n) for n in (5, 6, 7)]


def test_2_of_two_updates_the_second_stays_however_often_is_compiled(home: Home) -> None:
    put(home, b"first", "x", T0)
    compile_all(home)
    home.update("t", "x", b"second")
    home.update("t", "x", b"third")
    for _ in range(3):
        assert home.get("t", "x").value == b"third"
        assert replayed(home) == [("x", b"third")]
        compile_all(home)
        home.sweep(0)
    home.update("t", "x", b"fourth")
    compile_all(home)
    compile_all(home)
    assert replayed(home) == [("x", b"fourth")]


@pytest.mark.parametrize("compiled", [False, True])
def test_3_an_id_is_not_the_beginning_of_another(home: Home, compiled: bool) -> None:
    put(home, b"long", "abcd", T0)
    if compiled:
        compile_all(home)
    with pytest.raises(NotFoundError):
        home.get("t", "abc")
    put(home, b"short", "abc", T0 + 1)
    assert home.get("t", "abc").value == b"short"
    assert home.get("t", "abcd").value == b"long"
    home.delete("t", "abc")
    assert home.get("t", "abcd").value == b"long"


@pytest.mark.parametrize("compiled", [False, True])
def test_4_all_events_of_equal_time_are_replayed_and_compiled(home: Home, compiled: bool) -> None:
    for number in range(7):
        put(home, b"%d" % number, str(number), T0)
    if compiled:
        compile_all(home)
    assert sorted(replayed(home)) == [(str(n), b"%d" % n) for n in range(7)]
    assert sorted(replayed(home, T0, T0 + 1)) == sorted(replayed(home))
    assert replayed(home, T0 + 1) == []
    assert replayed(home, T0 - 1, T0) == []


def test_5_a_late_event_comes_in_the_place_of_its_time(home: Home) -> None:
    for number in (0, 10, 20):
        put(home, b"x", str(number), T0 + number)
    compile_all(home)
    put(home, b"late", "5", T0 + 5)
    assert [each for each, _ in replayed(home)] == ["0", "5", "10", "20"]
    compile_all(home)
    put(home, b"later", "15", T0 + 15)
    assert [each for each, _ in replayed(home)] == ["0", "5", "10", "15", "20"]
    assert [each for each, _ in replayed(home, T0 + 5, T0 + 20)] == ["5", "10", "15"]


@pytest.mark.parametrize("compiled", [False, True])
def test_6_events_without_bytes_are_events(home: Home, compiled: bool) -> None:
    put(home, b"", "empty", T0)
    put(home, b"some", "some", T0 + 1)
    if compiled:
        compile_all(home)
    assert home.get("t", "empty").value == b""
    assert replayed(home) == [("empty", b""), ("some", b"some")]
    home.update("t", "some", b"")
    assert home.get("t", "some").value == b""
    compile_all(home)
    assert replayed(home) == [("empty", b""), ("some", b"")]


def test_7_who_puts_the_same_id_at_the_same_time_puts_it_once(home: Home) -> None:
    outcomes: list[str] = []
    begin = threading.Barrier(6)

    def run(number: int) -> None:
        begin.wait()
        try:
            put(home, b"%d" % number, "same", T0 + number)
            outcomes.append("stored")
        except AlreadyExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 5 + ["stored"]
    assert len(replayed(home)) == 1


def test_7_updates_compiles_and_puts_at_once_lose_nothing_and_double_nothing(home: Home) -> None:
    for number in range(40):
        put(home, b"old", f"id-{number}", T0 + number)
    failed: list[BaseException] = []

    def guarded(run: object) -> None:
        try:
            run()  # type: ignore[operator]
        except BaseException as exc:  # noqa: BLE001 - raised by the test
            failed.append(exc)

    def update() -> None:
        for number in range(0, 40, 2):
            home.update("t", f"id-{number}", b"new")

    def delete() -> None:
        home.delete("t", [f"id-{number}" for number in range(1, 40, 4)])

    def compact() -> None:
        for _ in range(6):
            compile_all(home)
            home.sweep(0)

    def append() -> None:
        for number in range(40, 60):
            put(home, b"late", f"id-{number}", T0 + number)

    threads = [
        threading.Thread(target=guarded, args=(run,)) for run in (update, delete, compact, append)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    expected = {
        f"id-{n}": b"late" if n >= 40 else b"new" if n % 2 == 0 else b"old" for n in range(60)
    }
    for number in range(1, 40, 4):
        del expected[f"id-{number}"]
    for _ in range(2):
        found = replayed(home)
        assert dict(found) == expected
        assert len(found) == len(expected)
        compile_all(home)


def test_7_an_update_of_something_that_is_gone_blocks_nobody(home: Home) -> None:
    put(home, b"1", "one", T0)
    put(home, b"2", "two", T0 + 1)
    home.update("t", "one", b"new")
    home.delete("t", "one")
    compile_all(home)
    home.sweep(0)
    with pytest.raises(NotFoundError):
        home.update("t", "one", b"newer")
    home.update("t", "two", b"newer")
    compile_all(home)
    assert replayed(home) == [("two", b"newer")]


def test_8_a_deleted_id_that_is_put_again_is_not_touched_by_the_old_delete(home: Home) -> None:
    put(home, b"old", "x", T0)
    with pytest.raises(AlreadyExistsError):
        put(home, b"too early", "x", T0)
    home.delete("t", "x")
    assert replayed(home) == []
    put(home, b"new", "x", T0 + 1)
    for _ in range(2):
        assert home.get("t", "x").value == b"new"
        assert replayed(home) == [("x", b"new")]
        compile_all(home)
        home.sweep(0)


def test_9_pages_of_journals_lose_nothing_that_shares_a_time(home: Home) -> None:
    for _ in range(5):
        home.append("t", [Event(b"x", timestamp=T0)], partition=0)
    listed = list(home.journals("t", T0, T0 + 1))
    assert [(each.base, each.end) for each in listed] == [(n, n + 1) for n in range(5)]
    assert list(home.journals("t", T0 + 1)) == []


def test_there_is_no_need_to_wait_for_anything_before_a_change_is_seen(home: Home) -> None:
    """flash-flood shows an update only after somebody has applied it."""
    put(home, b"old", "x", T0)
    home.update("t", "x", b"new")
    assert home.get("t", "x").value == b"new"
    home.delete("t", "x")
    assert replayed(home) == []
    with pytest.raises(NotFoundError):
        home.get("t", "x")


def test_ids_may_hold_what_it_uses_between_the_parts_of_its_names(home: Home) -> None:
    put(home, b"v", "a--b", T0)
    assert home.get("t", "a--b").value == b"v"
