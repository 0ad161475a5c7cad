"""The contracts on the backends of one machine: a folder and a SQLite file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.homes import a_catalog, a_store
from tidelog.catalog.base import Catalog
from tidelog.store.base import Store
from tidelog.testing.catalog_contract import CatalogContract
from tidelog.testing.store_contract import StoreContract


class TestSqliteCatalog(CatalogContract):
    deleted_rows = 20_000  # 200,000 take ten seconds to make: see the long test below

    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Iterator[Catalog]:
        catalog = a_catalog(f"sqlite://{tmp_path}/catalog.sqlite", create=True)
        yield catalog
        catalog.close()

    def opener(self, catalog: Catalog) -> Callable[[], Catalog]:
        return functools.partial(a_catalog, catalog.url)

    @pytest.mark.long
    def test_a_scan_beyond_or_across_200_000_deleted_rows(
        self, catalog: Catalog, partition: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self, "deleted_rows", 200_000)
        self.test_a_scan_beyond_or_across_deleted_rows_neither_slows_nor_fails(catalog, partition)


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        yield a_store(str(tmp_path / "objects"))
