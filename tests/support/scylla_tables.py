"""Pumps of a played change log, here or in processes that die: ``python -m`` this module.

Arguments: config of the home, pipeline, time in ms, shard, shards, last call. The clock of the
source stands at that time. With a last call the process dies by SIGKILL right after it; else it
follows until it is killed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.support.named_pipelines import open_named
from tests.support.pipeline_kill import Killer
from tidelog.clock import Clock
from tidelog.connectors.scylla.source import open_scylla
from tidelog.context import Context
from tidelog.home import Home, open_home
from tidelog.model.address import parse_address
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.registry import find_pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import FakeClock


def opened_pipeline(home: Home, name: str, clock: Clock) -> Pipeline:
    """A pipeline of the home, whose source has a clock of the test's."""
    named = find_pipeline(home.context, name)

    @contextlib.contextmanager
    def open_context() -> Iterator[Context]:
        yield home.context

    source = open_scylla(
        parse_address(named.source), environ={}, open_context=open_context, clock=clock
    )
    return replace(open_named(home.context, named, LocalWorkers()), source=source)


def drain(home: Home, name: str, clock: Clock) -> int:
    """Bring all that is there at the clock's time; how many changes."""
    return Driver(home.context, opened_pipeline(home, name, clock), DriverOptions()).run()


def main(config: str, name: str, time_ms: int, last: int, follow: int) -> None:
    killer = Killer()
    killer.last = last
    with open_home(config) as home:
        home.context = replace(
            home.context,
            store=FaultyStore(home.context.store, killer),
            catalog=FaultyCatalog(home.context.catalog, killer, home.context.clock),
        )
        pipeline = opened_pipeline(home, name, FakeClock(time_ms))
        policy = FilePolicy(max_bytes=1_000, max_age_ms=1)
        how = DriverOptions(follow=bool(follow), policy=policy)
        Driver(home.context, pipeline, how).run()
    print(killer.calls)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
