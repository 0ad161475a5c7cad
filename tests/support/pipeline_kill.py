"""Drivers and Spark workers that die by SIGKILL: after a call, or where a token says so."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.codec.parsers import FolderPaths, FolderSettings, open_parser
from tidelog.connectors.archive import sink as files
from tidelog.home import open_home
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.base import Store
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore

T = TypeVar("T")

TOKENS = "TIDELOGTEST_KILL_TOKENS"  # a folder: who removes a file from it must die


class Killer(Faults):
    """Kills this process right after the effect of one call, before anybody hears of it."""

    last = 0

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        self.calls += 1
        try:
            return effect()
        finally:  # an error is an effect too: what was looked for is not there
            if self.calls == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


class KillingParser:
    """``json:at``, but a worker that finds a token takes it and dies."""

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._real = open_parser("json:at", settings)

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        if TOKENS in os.environ:
            for token in sorted(Path(os.environ[TOKENS]).iterdir()):
                try:
                    token.unlink()
                except FileNotFoundError:
                    continue  # another worker has it
                os.kill(os.getpid(), signal.SIGKILL)
        return self._real.lay_out(batch)


def drive(config: str, name: str, last: int) -> None:
    """One driver in this process, which dies after its call number ``last``."""
    killer = Killer()
    killer.last = last
    real = files.open_store_here

    def deadly(url: str) -> Store:
        return FaultyStore(real(url), killer)

    files.open_store_here = deadly  # type: ignore[assignment]
    with open_home(config) as home:
        home.context = replace(
            home.context,
            store=FaultyStore(home.context.store, killer),
            catalog=FaultyCatalog(home.context.catalog, killer, home.context.clock),
        )
        archive = find_archive(home.context, name)
        pipeline = open_pipeline(home.context, archive, LocalWorkers())
        Driver(home.context, pipeline, DriverOptions(policy=FilePolicy(max_bytes=200_000))).run()
    print(killer.calls)


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2], int(sys.argv[3]))
