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

from tests.pipeline.killing import Killer
from tidelog.clock import Clock
from tidelog.home import Home, open_home
from tidelog.log.base import Log
from tidelog.model.address import parse_address
from tidelog.pipeline.base import Pipeline
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.policy import Policy
from tidelog.pipeline.registry import find_pipeline, open_named
from tidelog.pipeline.workers import LocalWorkers
from tidelog.sources.scylla import open_scylla
from tidelog.testing.clock import FakeClock
from tidelog.testing.faults import FaultyCatalog, FaultyStore


def opened_pipeline(home: Home, name: str, clock: Clock) -> Pipeline:
    """A pipeline of the home, whose source has a clock of the test's."""
    named = find_pipeline(home, name)

    @contextlib.contextmanager
    def open_log() -> Iterator[Log]:
        yield home.log

    source = open_scylla(parse_address(named.source), environ={}, open_log=open_log, clock=clock)
    return replace(open_named(home, named, LocalWorkers()), source=source)


def drain(home: Home, name: str, clock: Clock) -> int:
    """Bring all that is there at the clock's time; how many changes."""
    return Driver(home.log, opened_pipeline(home, name, clock), Driving()).run()


def main(config: str, name: str, time_ms: int, shard: int, shards: int, last: int) -> None:
    killer = Killer()
    killer.last = last
    with open_home(config) as home:
        home.log = replace(
            home.log,
            store=FaultyStore(home.log.store, killer),
            catalog=FaultyCatalog(home.log.catalog, killer, home.log.clock),
        )
        pipeline = opened_pipeline(home, name, FakeClock(time_ms))
        policy = Policy(max_bytes=1_000, max_age_ms=1)
        how = Driving(follow=not last, policy=policy, shard=shard, shards=shards)
        Driver(home.log, pipeline, how).run()
    print(killer.calls)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
