"""What catalogs behind a network are tested for beside the catalog's contract."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tidelog.catalog.base import ABSENT, Catalog, Check, Delete, Put
from tidelog.clock import RandomIds
from tidelog.errors import ConflictError, UnavailableError
from tidelog.testing.catalog_contract import CatalogContract

T = TypeVar("T")


class RemoteCatalogContract(CatalogContract):
    """The contract, a fork, and which row a conflict names."""

    closes_in_child = False  # whether a forked child must close what it has used

    def test_it_is_usable_after_a_fork(self, catalog: Catalog, partition: str) -> None:
        catalog.write(partition, Put("parent", b"1"), write_id="w1")
        child = multiprocessing.get_context("fork").Process(
            target=_write_in_child, args=(catalog, partition, self.closes_in_child)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        catalog.write(partition, Put("parent", b"2", expect="w1"), write_id="w3")
        assert [row.version for row in catalog.scan(partition)] == ["w2", "w3"]

    def check_conflicts(self, catalog: Catalog, partition: str, *before: Check) -> None:
        """A conflict names its row; ``before`` stands in front of the last one, and holds."""
        catalog.write(partition, Put("a", b"1"), Put("b", b"1"), write_id="w1")
        with pytest.raises(ConflictError, match=r"row `b` .*expected no row, found version w1"):
            catalog.write(partition, Check("a", "w1"), Put("b", b"", ABSENT), write_id="w2")
        with pytest.raises(
            ConflictError, match=r"row `a` .*expected version old, found version w1"
        ):
            catalog.write(partition, Delete("a", expect="old"), write_id="w3")
        with pytest.raises(ConflictError, match=r"row `c` .*expected version old, found no row"):
            catalog.write(partition, *before, Check("c", "old"), write_id="w4")


def _write_in_child(catalog: Catalog, partition: str, closes: bool) -> None:
    if catalog.get(partition, "parent") is None:
        raise AssertionError("the child does not see the parent's row")
    catalog.write(partition, Put("child", b"1"), write_id="w2")
    if closes:
        catalog.close()


def opened(open_: Callable[[], T]) -> T:
    """What is opened in the end, where a client waits less long than a busy server may take."""
    end = time.monotonic() + 60
    while True:
        try:
            return open_()
        except UnavailableError:
            if time.monotonic() > end:
                raise


def race_creators(create: Callable[[], Catalog]) -> None:
    """Four make one table at once: all succeed, and share it."""
    barrier = threading.Barrier(4)
    ids = RandomIds()

    def race(_: int) -> Catalog:
        barrier.wait()
        return create()

    with ThreadPoolExecutor(4) as pool:
        catalogs = list(pool.map(race, range(4)))
    for number, catalog in enumerate(catalogs):
        catalog.write("p", Put(f"r{number}", b""), write_id=ids.new())
    assert len(list(catalogs[0].scan("p"))) == 4
    for catalog in catalogs:
        catalog.close()
