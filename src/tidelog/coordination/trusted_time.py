"""How old something is, when the clocks of hosts disagree.

Ages decide what a sweep may delete, so no single wrong clock may make things look old. The time of
a sweep is the earlier of this machine's time and the store's, which dates an object that the sweep
puts; a folder has no time of its own. Ages in a topic's rows are also compared with the newest time
in the topic. A time that is far in the future comes from a wrong clock, and is ignored.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from tidelog.catalog.update import attempts
from tidelog.clock import SystemClock
from tidelog.context import Context
from tidelog.errors import NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.times import Backoff
from tidelog.store.base import Store

__all__ = [
    "FUTURE_MS",
    "ClockTimes",
    "clock_ahead_ms",
    "has_own_clock",
    "is_old",
    "latest_now_ms",
    "read_times",
    "trusted_now_ms",
]

FUTURE_MS = 24 * 3_600_000  # a time further in the future comes from a wrong clock
_TRIES = Backoff(5, base_ms=1, max_ms=100)  # to read the store's time
_LEFT_MS = 3_600_000  # probes that a sweep left when it died are deleted after this


class ClockTimes(NamedTuple):
    """The current time, by several clocks."""

    earlier_ms: int  # of this machine's time and the store's
    later_ms: int
    store_ms: int


def read_times(context: Context) -> ClockTimes:
    """Returns this machine's time and the store's."""
    now_ms, store_ms = context.clock.now_ms(), store_now_ms(context)
    return ClockTimes(min(now_ms, store_ms), max(now_ms, store_ms), store_ms)


def trusted_now_ms(context: Context) -> int:
    """Returns the earlier of this machine's time and the store's."""
    return read_times(context).earlier_ms


def latest_now_ms(context: Context) -> int:
    """Returns the later of this machine's time and the store's, unless that is too far ahead.

    For what applies up to now: a machine that is behind must not leave out the last minutes.
    """
    now_ms, store_ms = context.clock.now_ms(), store_now_ms(context)
    return store_ms if 0 < store_ms - now_ms <= FUTURE_MS else now_ms


def clock_ahead_ms(context: Context, trusted_ms: int) -> int:
    """Returns how far this machine's clock is ahead of a time that was trusted a moment ago."""
    return max(0, context.clock.now_ms() - trusted_ms)


def has_own_clock(store: Store) -> bool:
    """Returns whether a store dates objects by another clock than this machine's; a folder does
    not.

    Without one, a machine whose clock jumps finds no second time that disagrees.
    """
    return not store.url.startswith("file:")


def is_old(now_ms: int, then_ms: int, grace_ms: int) -> bool:
    """Returns whether a grace period has passed; also for a time too far in the future.

    Only for what could be deleted at once without a loss, where the grace period is a courtesy.
    """
    return now_ms - then_ms >= grace_ms or then_ms - now_ms > FUTURE_MS


def store_now_ms(context: Context) -> int:
    """Returns the time by which the store dates an object that is put now.

    A folder dates objects by this machine's clock, so nothing is put into it: a sweep must work
    where the disk is full. Raises ``InvalidError`` all the same if the folder is read-only.
    """
    if not has_own_clock(context.store):
        now_ms = max(context.clock.now_ms(), SystemClock().now_ms())  # which dates the files
        _delete_probes(context, now_ms)
        return now_ms
    unreadable = UnavailableError("the store's time cannot be read: try again")
    for _ in attempts(context, unreadable, _TRIES):
        key = layout.probe(context.ids.new())
        with contextlib.suppress(UnknownOutcomeError):
            context.store.put(key, b"")
        try:
            found = context.store.head(key).modified_ms
        except NotFoundError:  # a lost put, or another sweep with a wrong clock deleted it
            continue
        _delete_probes(context, found, key)
        return found
    raise unreadable


def _delete_probes(context: Context, now_ms: int, *keys: str) -> None:
    """Deletes these probes, and those that a process left when it died."""
    infos = context.store.list(layout.probe(""))
    left = [info.key for info in infos if now_ms - info.modified_ms > _LEFT_MS]
    context.store.delete([*keys, *left])
