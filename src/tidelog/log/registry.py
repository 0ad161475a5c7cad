"""Making and removing names, so that no delayed repeat can bring a removed one back.

The registry's ``changes`` row is expected and raised whenever a name is made or removed. ``ABSENT``
alone could come true twice: a repeated packet of an old creation would then find no row again.
"""

from __future__ import annotations

from tidelog.catalog.base import ABSENT, Delete, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.model import layout

__all__ = ["change_registry"]


def change_registry(log: Log, wanted: Put | Delete, *also: Put) -> None:
    """Make or remove a name; done too when another process did the same at the same time.

    Rows that ``also`` puts are written with it.
    """
    delays = log.backoff.delays_s(log.random)
    while True:
        counted = log.catalog.get(layout.REGISTRY, layout.REGISTRY_CHANGES)
        count = int(counted.value) + 1 if counted else 1
        version = counted.version if counted else ABSENT
        counter = Put(layout.REGISTRY_CHANGES, str(count).encode(), expect=version)
        try:
            log.catalog.write(layout.REGISTRY, counter, wanted, *also, write_id=log.ids.new())
            return
        except (ConflictError, UnknownOutcomeError):
            row = log.catalog.get(layout.REGISTRY, wanted.row)
            if (row is None) == isinstance(wanted, Delete):
                return
        delay_s = next(delays, None)
        if delay_s is None:
            raise UnavailableError(f"registry row `{wanted.row}`: too many writers: try again")
        log.clock.sleep(delay_s)
