"""What a forked child inherits is the parent's: the child is refused, and writes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tidelog.concurrency import ProcessGuard
from tidelog.coordination.ownership import Ownership
from tidelog.errors import InvalidError
from tidelog.home import Home, create_home, open_home
from tidelog.log.consumer.leases import read_lease
from tidelog.log.producer.producer import Producer
from tidelog.model import layout
from tidelog.model.topic import HeldRow, decode_row
from tidelog.settings import load_settings

_DONE, _REFUSED, _OTHER = 0, 3, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home, _ = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))
    home.create_topic("t")
    home.close()
    return tmp_path / "home"


def in_child(call: Callable[[], object]) -> int:
    """What became of a call in a forked child."""
    child = os.fork()
    if child == 0:
        code = _OTHER
        try:
            call()
            code = _DONE
        except InvalidError as exc:
            code = _REFUSED if "opened in another process" in str(exc) else _OTHER
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def values(home: Home) -> list[bytes | None]:
    return [event.value for event in home.read("t")]


@pytest.mark.parametrize("name", [None, "named"])
def test_child_that_ends_inside_with_commits_nothing(folder: Path, name: str | None) -> None:
    with open_home(folder) as home:
        unhurried = replace(
            home.context, log_settings=replace(home.context.log_settings, linger_ms=600_000)
        )
        with Producer(unhurried, home.topic("t"), name) as producer:
            producer.send(b"buffered")
            status = in_child(lambda: producer.__exit__(None, None, None))
        assert status == _DONE
        assert values(home) == [b"buffered"]


def test_child_is_refused_by_each_call_of_a_producer(folder: Path) -> None:
    with open_home(folder) as home, home.producer("t") as producer:
        producer.send(b"first")  # the open flush has room for more
        calls: list[Callable[[], object]] = [
            lambda: producer.send(b"plain"),
            lambda: producer.send(b"keyed", b"k"),
            lambda: producer.append([]),
            producer.flush,
            producer.close,
        ]
        assert [in_child(call) for call in calls] == [_REFUSED] * len(calls)
        producer.flush()
        assert values(home) == [b"first"]


def test_child_is_refused_while_another_thread_holds_the_lock(folder: Path) -> None:
    with open_home(folder) as home, home.producer("t") as producer:
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with producer._queue.lock:
                held.set()
                free.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            assert in_child(lambda: producer.send(b"x")) == _REFUSED
        finally:
            free.set()
            thread.join()


def test_child_leaves_leases_and_cursor_of_a_consumer_alone(folder: Path) -> None:
    with open_home(folder) as home:
        home.producer("t").send(b"1").result()
        with home.consumer("t", "c") as consumer:
            assert consumer.poll(timeout_s=30.0)
            before = read_lease(home.context, home.topic("t"), "c", 0)
            calls: list[Callable[[], object]] = [
                consumer.commit,
                consumer.poll,
                consumer.close,
                lambda: consumer.seek(0, 0),
                lambda: consumer.read_once(0),
            ]
            assert [in_child(call) for call in calls] == [_REFUSED] * len(calls)
            assert in_child(lambda: consumer.__exit__(None, None, None)) == _DONE
            after = read_lease(home.context, home.topic("t"), "c", 0)
            assert before is not None
            assert after is not None
            assert (after[0].owner, after[0].cursor) == (before[0].owner, 0)
            consumer.commit()


def test_child_leaves_a_held_row_alone(folder: Path) -> None:
    with open_home(folder) as home:
        holding = Ownership(home.context, layout.SCRIBE, layout.SCRIBE_LEASE, "the scribe's lease")
        assert holding.take()
        assert in_child(holding.release) == _DONE
        assert in_child(holding.beat) == _REFUSED
        assert in_child(holding.check) == _REFUSED
        row = home.catalog.get(layout.SCRIBE, layout.SCRIBE_LEASE)
        assert row is not None
        assert decode_row(row.value, HeldRow, "row").owner
        holding.release()


def test_guard_is_marked_in_children_and_grandchildren_only() -> None:
    guard = ProcessGuard("thing")
    guard.check()
    assert in_child(guard.check) == _REFUSED
    assert in_child(lambda: os._exit(in_child(guard.check))) == _REFUSED
    guard.check()
