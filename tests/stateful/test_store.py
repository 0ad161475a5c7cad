"""Stores against a dictionary."""

from __future__ import annotations

import shutil
import tempfile

from hypothesis import settings

from tests.support.homes import a_store
from tidelog.store.base import Store
from tidelog.store.wrappers import CachedStore
from tidelog.testing.stateful import StoreMachine

SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)


class MemoryMachine(StoreMachine):
    def make(self) -> Store:
        return CachedStore(a_store("memory:"), 30)


class LocalMachine(StoreMachine):
    def make(self) -> Store:
        self.folder = tempfile.mkdtemp()
        return a_store(f"{self.folder}/objects")

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = SETTINGS
TestLocal = LocalMachine.TestCase
TestLocal.settings = settings(SETTINGS, max_examples=25)
