"""``UnavailableError`` is raised only when nothing of a call was stored, wherever it is cut off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.catalog.base import Change, Row
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import complete_erasures, erase_archived, finish_archive
from tidelog.errors import UnavailableError, UnknownOutcomeError
from tidelog.home import open_home
from tidelog.log.consumer.leases import Leases
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout


class Net:
    """The way to a catalog: it breaks at a call, before the call or after it, and stays so."""

    def __init__(self, inner: Any, breaks_at: int, loses_reply: bool) -> None:
        self.inner = inner
        self._left = breaks_at
        self._loses_reply = loses_reply
        self.landed = 0
        self.recorded = 0

    @property
    def url(self) -> str:
        return str(self.inner.url)

    def get(self, partition: str, row: str) -> Row | None:
        self._pass()
        found: Row | None = self.inner.get(partition, row)
        return found

    def scan(self, *args: Any, **how: Any) -> Iterator[Row]:
        self._pass()
        return iter(list(self.inner.scan(*args, **how)))

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._loses_reply):
            raise UnavailableError("catalog: no answer: try again")
        self.inner.write(partition, *changes, write_id=write_id)
        if partition == layout.HOME_AUDIT:
            self.recorded += 1  # who asks: it is written before anything is done
        else:
            self.landed += 1
        if self._left == 0:
            raise UnknownOutcomeError("catalog: the reply was lost: read it back")

    def close(self) -> None:
        self.inner.close()

    @property
    def is_broken(self) -> bool:
        return self._left <= 0

    def _pass(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise UnavailableError("catalog: no answer: try again")


Call = Callable[[Home, int], object]


@contextlib.contextmanager
def through(home: Home, net: Net) -> Iterator[None]:
    catalog: Any = home.catalog
    assert isinstance(catalog, CheckedCatalog)
    catalog.inner = net
    try:
        yield
    finally:
        catalog.inner = net.inner


def cut_off_everywhere(home: Home, call: Call, before: Callable[[], object]) -> None:
    """Do a call again and again, cut off one step later each time, until it is not cut off."""
    for loses_reply in (False, True):
        for number in range(1, 200):
            before()
            net = Net(home.catalog.inner, number, loses_reply)  # type: ignore[attr-defined]
            error: Exception | None = None
            with through(home, net):
                try:
                    call(home, number + 200 * loses_reply)
                except (UnavailableError, UnknownOutcomeError) as exc:
                    error = exc
            if not net.is_broken:
                break
            told = None if error is None else type(error)
            lost = net.landed and error is not None
            expected = {UnknownOutcomeError} if lost else {UnavailableError}
            if not net.landed and net.recorded:
                expected.add(UnknownOutcomeError)  # of the record alone
            assert error is None or told in expected, (number, loses_reply, error)
        else:
            raise AssertionError("the call never ends")
        assert number > 3


def _event(number: int) -> Event:
    return Event(b"old", b"k%d" % number, f"id-{number}")


CALLS: dict[str, Call] = {
    "update": lambda home, n: home.update("t", f"id-{n}", b"new"),
    "large update": lambda home, n: home.update("t", f"id-{n}", b"x" * 20_000),
    "delete": lambda home, n: home.delete("t", [f"id-{n}", f"id-{n + 400}"]),
    "delete by key": lambda home, n: home.delete_key("t", b"k%d" % n),
    "trim": lambda home, n: home.trim("t", ToOffsets({0: n, 1: n})),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_that_is_cut_off_says_whether_something_was_stored(name: str) -> None:
    with open_home("memory:") as home:
        home.create_topic("t", 2)
        for partition in (0, 1):
            first = 400 * partition
            home.append("t", [_event(n) for n in range(first, first + 400)], partition=partition)
        cut_off_everywhere(home, CALLS[name], lambda: None)


def test_update_in_lots_that_is_cut_off_says_that_something_was_stored() -> None:
    """Two lots of ids, of which the first one lands."""
    with open_home("memory:") as home:
        home.create_topic("t")
        home.append("t", [_event(n) for n in range(1_100)])
        done = len(list(home.audit("t")))
        values: dict[str, bytes | None] = {f"id-{n}": b"new" for n in range(1_100)}
        for number in range(1, 400, 7):
            net = Net(home.catalog.inner, number, False)  # type: ignore[attr-defined]
            with (
                through(home, net),
                pytest.raises((UnavailableError, UnknownOutcomeError)) as told,
            ):
                home.update_many("t", values)
            assert (told.type is UnknownOutcomeError) == bool(net.landed)
            records = list(home.audit("t"))[done:]
            done += len(records)
            if len(records) == 2:
                break
        assert home.get("t", "id-0").value == b"new"


@pytest.mark.parametrize("by_key", [False, True])
def test_delete_from_archives_that_is_cut_off_says_whether_something_was_stored(
    tmp_path: Path, by_key: bool
) -> None:
    """Half of the events are in the topic, and all in an archive."""
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [_event(n) for n in range(400)])
        home.append("t", [_event(n) for n in range(400)])
        drive(home, an_archive(home, "daily"))
        home.trim("t", ToOffsets({0: 400}))
        why = home.reason("asked for", "ada")

        def call(home: Home, n: int) -> object:
            if by_key:
                return delete_key(home.context, home.amender("t", why), b"k%d" % n)
            return delete_events(home.context, home.amender("t", why), [f"id-{n}"])

        cut_off_everywhere(home, call, lambda: complete_erasures(home.context, home.topic("t")))


def test_erase_from_an_archive_that_is_cut_off_says_whether_something_was_stored(
    tmp_path: Path,
) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [_event(n) for n in range(400)])
        archive = an_archive(home, "daily")
        drive(home, archive)
        home.delete_topic("t")
        why = home.reason("asked for", "ada")

        def call(home: Home, n: int) -> object:
            return erase_archived(home.context, archive, why, [f"id-{n}"])

        cut_off_everywhere(home, call, lambda: finish_archive(home.context, archive))


def test_commit_whose_reply_is_lost_before_an_outage_is_not_called_unavailable() -> None:
    with open_home("memory:") as home:
        home.create_topic("t")
        home.append("t", [_event(0)])
        member = Leases(home.context, home.topic("t"), "c", "earliest")
        member.join()
        assert member.acquire_share(member.alive()) == [0]
        for loses_reply, expected in ((False, UnavailableError), (True, UnknownOutcomeError)):
            net = Net(home.catalog.inner, 1, loses_reply)  # type: ignore[attr-defined]
            with through(home, net), pytest.raises(expected):
                member.commit(0, 1)
            assert net.landed == loses_reply


def test_commit_of_several_partitions_of_which_one_fails_is_not_called_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_home("memory:") as home:
        home.create_topic("t", 2)
        for partition in (0, 1):
            home.append("t", [_event(0)], partition=partition)
        commit = Leases.commit

        def fails(self: Leases, partition: int, *args: Any, **how: Any) -> None:
            if len(moved) == 1:
                raise UnavailableError("catalog: no answer: try again")
            commit(self, partition, *args, **how)
            moved.append(partition)

        moved: list[int] = []
        monkeypatch.setattr(Leases, "commit", fails)
        with home.consumer("t", "c", start="earliest") as consumer:
            seen = 0
            while seen < 2:
                seen += len(consumer.poll(10, 1))
            with pytest.raises(UnknownOutcomeError, match="commit again"):
                consumer.commit()
            moved.append(-1)
            consumer.commit()
        assert sorted(moved) == [-1, 0, 1]
