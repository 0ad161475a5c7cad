"""The contracts on the backends in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidelog.catalog.base import Catalog
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import SystemClock
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.testing.catalog_contract import CatalogContract
from tidelog.testing.store_contract import StoreContract


class TestMemoryCatalog(CatalogContract):
    @pytest.fixture
    def catalog(self) -> Iterator[Catalog]:
        yield MemoryCatalog()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield MemoryStore(SystemClock())
