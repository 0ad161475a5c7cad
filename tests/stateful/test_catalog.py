"""Catalogs against a dictionary."""

from __future__ import annotations

import shutil
import tempfile

from hypothesis import settings

from tests.support.homes import a_catalog
from tidelog.catalog.base import Catalog
from tidelog.catalog.memory import MemoryCatalog
from tidelog.testing.stateful import CatalogMachine

SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)


class MemoryMachine(CatalogMachine):
    def make(self) -> Catalog:
        return MemoryCatalog()


class SqliteMachine(CatalogMachine):
    def make(self) -> Catalog:
        self.folder = tempfile.mkdtemp()
        return a_catalog(f"sqlite://{self.folder}/catalog.sqlite", create=True)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder, ignore_errors=True)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = SETTINGS
TestSqlite = SqliteMachine.TestCase
TestSqlite.settings = settings(SETTINGS, max_examples=25)
