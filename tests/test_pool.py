"""Work that a pool is given is done once, also where no thread can be started for it."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from tidelog.concurrency import Pool


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_pool_without_a_thread_does_its_work_in_that_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Pool(2) as pool:
        assert pool.submit(threading.get_ident).result(0) == threading.get_ident()
        assert list(pool.map(str, [1, 2])) == ["1", "2"]
        failed = pool.submit(int, "x")
        assert isinstance(failed.exception(0), ValueError)


def test_work_is_done_once_where_a_running_thread_takes_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []
    began, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        goes_on.wait(10)

    with Pool(2) as pool:
        first = pool.submit(block)
        assert began.wait(10)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        others = [pool.submit(done.append, number) for number in range(20)]
        goes_on.set()
        wait([first, *others], 10)
    assert sorted(done) == list(range(20))


def test_pool_that_was_shut_down_takes_no_work() -> None:
    with Pool(1) as pool:
        assert pool.submit(int, "1").result(10) == 1
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(int, "1")


def test_cancelled_work_is_not_done() -> None:
    done: list[int] = []
    goes_on = threading.Event()
    with Pool(1) as pool:
        pool.submit(goes_on.wait, 10)
        second = pool.submit(done.append, 1)
        assert second.cancel()
        goes_on.set()
    assert done == []
