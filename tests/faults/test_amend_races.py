"""Amendments of several lots against others: a delete is final, and no older value comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.test_amend_faults import amender, filled, values
from tests.support.compiled_journals import Press
from tidelog import Event
from tidelog.catalog.base import Catalog, Change, Put, Row
from tidelog.context import Context
from tidelog.errors import NotFoundError, UnknownOutcomeError
from tidelog.home import Home, World, create_home
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.model.topic import Topic
from tidelog.settings import Settings

COUNT = 60  # three lots
ROUNDS = 12


class Between:
    """A catalog that does something beside one amender's writes of lots."""

    def __init__(self, inner: Catalog, number: int, how: str, act: Callable[[], None]) -> None:
        self.inner = inner
        self.url = inner.url
        self._number = number  # of the lot, from 1 on
        self._how = how
        self._act = act
        self._lots = 0
        self._late: Callable[[], None] | None = None

    def get(self, partition: str, row: str) -> Row | None:
        found = self.inner.get(partition, row)
        if row.startswith("amend/") or row == "head":
            late, self._late = self._late, None
            if late is not None:
                late()
                self._act()
        return found

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        return self.inner.scan(partition, start, end, limit, reverse)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        def send() -> None:
            self.inner.write(partition, *changes, write_id=write_id)

        self._lots += any(isinstance(c, Put) and c.row.startswith("amend/") for c in changes)
        if self._lots != self._number:
            send()
            return
        self._number = 0
        if self._how == "before":  # the head is another one than the write expects
            self._act()
            send()
        elif self._how == "after":  # between this lot and the next
            send()
            self._act()
        elif self._how == "lost reply":
            send()
            self._act()
            raise UnknownOutcomeError("the reply was lost")
        elif self._how == "lost request":
            self._act()
            raise UnknownOutcomeError("the request was lost")
        else:  # it lands after the first look whether it did
            self._late = send
            raise UnknownOutcomeError("the request is late")

    def close(self) -> None:
        """Nothing to release."""


def context_of(press: Press, number: int, how: str, act: Callable[[], None]) -> Context:
    return replace(press.context, catalog=Between(press.catalog, number, how, act))


def names(first: int = 0, end: int = COUNT) -> list[str]:
    return [f"0-{number}" for number in range(first, end)]


HOWS = ["before", "after", "lost reply", "lost request", "late"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("lot", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_deleted_event_of_a_later_lot_stays_deleted(how: str, lot: int, compiled: bool) -> None:
    """A delete of events of every lot comes between two of an update's writes."""
    press = Press()
    topic = filled(press, COUNT, partitions=1)
    gone = names()[::7]

    def act() -> None:
        amender(press.context, topic).delete(gone)
        if compiled:
            press.compile(topic)
            sweep_home(press.context, 0)

    is_unclear = compiled and how in ("lost reply", "lost request", "late")
    with contextlib.suppress(*[UnknownOutcomeError] if is_unclear else []):
        update(press, topic, how, lot, act)
    left = values(press.context, topic)
    assert not set(gone) & set(left), "a delete is final"
    press.compile(topic)
    assert not set(gone) & set(values(press.context, topic))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("lot", [1, 2, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_newer_value_is_not_replaced_by_an_older_one(how: str, lot: int, compiled: bool) -> None:
    """Another process gives events a newer value once it sees the one of this update."""
    press = Press()
    topic = filled(press, COUNT, partitions=1)
    newer: set[str] = set()

    def act() -> None:
        if compiled:
            press.compile(topic)
        found = values(press.context, topic)
        newer.update(str(each) for each, value in found.items() if value == b"first")
        amender(press.context, topic).update(dict.fromkeys(newer, b"second"))

    update(press, topic, how, lot, act)
    left = values(press.context, topic)
    assert newer or lot == 1
    assert {each for each, value in left.items() if value == b"second"} == newer
    assert {left[each] for each in set(names()) - newer} <= {b"first"}


def update(press: Press, topic: Topic, how: str, lot: int, act: Callable[[], None]) -> None:
    context = context_of(press, lot, how, act)
    writer = amender(context, topic)
    new: dict[str, bytes | None] = dict.fromkeys(names(), b"first")
    writer.update(new)


def test_lost_reply_that_compile_and_sweep_made_unknowable_is_reported() -> None:
    press = Press()
    topic = filled(press, 8, partitions=1)

    def act() -> None:
        amender(press.context, topic).update({"0-1": b"second"})
        press.compile(topic)
        press.clock.advance(10)
        sweep_home(press.context, 0)

    with pytest.raises(UnknownOutcomeError, match="read the events, then decide"):
        amender(context_of(press, 1, "lost reply", act), topic).update({"0-1": b"first"})
    assert values(press.context, topic)["0-1"] == b"second"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as found:
        yield found


def test_threads_that_update_and_delete_leave_deleted_events_deleted(home: Home) -> None:
    ids = [f"e{number}" for number in range(200)]
    for number in range(ROUNDS):
        name = f"t{number}"
        home.create_topic(name)
        home.append(name, [Event(b"old", id=each) for each in ids])
        deleted: list[str] = []

        def delete(name: str = name, deleted: list[str] = deleted) -> None:
            for each in reversed(ids[::4]):
                home.delete(name, [each])
                deleted.append(each)

        def update(name: str = name) -> None:
            home.update_many(name, dict.fromkeys(ids, b"new"))

        run(delete, update)
        assert len(deleted) == 50
        for each in deleted:
            with pytest.raises(NotFoundError):
                home.get(name, each)


def test_threads_that_update_and_compile_bring_no_older_value_back(home: Home) -> None:
    ids = [f"e{number}" for number in range(200)]
    for number in range(ROUNDS):
        name = f"t{number}"
        home.create_topic(name)
        for at in range(0, 200, 50):
            home.append(name, [Event(b"old", id=each) for each in ids[at : at + 50]])
        ended = threading.Event()
        newer: list[str] = []

        def first(name: str = name, ended: threading.Event = ended) -> None:
            try:
                home.update_many(name, dict.fromkeys(ids, b"first"))
            finally:
                ended.set()

        def second(
            name: str = name, ended: threading.Event = ended, newer: list[str] = newer
        ) -> None:
            for each in ids[::10]:
                while home.get(name, each).value == b"old" and not ended.is_set():
                    pass
                home.update(name, each, b"second")
                newer.append(each)

        def compact(name: str = name, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                home.compile(name)
                home.append(name, [Event(b"more")])

        run(first, second, compact)
        assert {home.get(name, each).value for each in newer} == {b"second"}


def run(*calls: Callable[[], None]) -> None:
    """Run calls side by side; the first error of any of them is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()
