"""Rows that say who holds something: written whatever replies get lost, beaten, and watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.errors import (
    ConflictError,
    FencedError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.base import Log
from tidelog.log.outcome import Sent

__all__ = ["Silence", "beating", "put_held", "write_held", "write_repeatedly"]

_ATTEMPTS = 20  # of one write whose replies get lost


def put_held(
    log: Log, where: str, row: str, value: bytes, version: str | None, what: str
) -> str | None:
    """Write a row as :func:`write_held` does, by itself."""
    return write_held(log, where, what, Put(row, value, version or ABSENT))


def write_held(log: Log, where: str, what: str, held: Put, *others: Change) -> str | None:
    """Write a row by the version that we know; its new version, or None: somebody else was first.

    Only this write carries its id, so a row that has it is ours. ``UnavailableError`` when nothing
    was written, ``UnknownOutcomeError`` when a reply was lost and no row shows what became of the
    write.
    """
    write_id = log.ids.new()
    sent = Sent()
    log = sent.noting(log)
    with sent.told(what, "try again"):
        for attempt in range(_ATTEMPTS):
            try:
                log.catalog.write(where, held, *others, write_id=write_id)
            except ConflictError:
                return None
            except UnknownOutcomeError:
                found = log.catalog.get(where, held.row)
                if found is None or found.version not in (held.expect, write_id):
                    return None
                if found.version != write_id:
                    log.clock.sleep(0.01 * attempt)
                    continue
            return write_id
        raise UnavailableError("replies keep getting lost")


def write_repeatedly(log: Log, where: str, *changes: Change) -> str:
    """Send a write again, under the same id, while replies get lost; its id, the rows' version.

    It may also land later than this returns, once more. So give expectations that then fail, or
    changes that do no harm at any later time. ``UnknownOutcomeError`` when replies keep getting
    lost, or one was and then nothing can be reached.
    """
    write_id = log.ids.new()
    delays = log.backoff.delays_s(log.random)
    sent = Sent()
    log = sent.noting(log)
    with sent.told(f"write to `{where}`", "try again"):
        while True:
            try:
                log.catalog.write(where, *changes, write_id=write_id)
                return write_id
            except UnknownOutcomeError:
                delay_s = next(delays, None)
                if delay_s is None:
                    raise
                log.clock.sleep(delay_s)


class Silence:
    """Watches a row whose owner may be dead, by this process's own monotonic clock."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._seen: tuple[str, float] = ("", 0.0)  # the row's version, and since when

    def is_over(self, mark: str, version: str) -> bool:
        """Whether the owner is known to have ended, or was silent for the time to live."""
        if self._log.processes.is_dead(mark):
            return True
        now_s = self._log.clock.monotonic_s()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > self._log.settings.lease_ttl_ms / 1000


@contextmanager
def beating(log: Log, beat: Callable[[], None]) -> Iterator[threading.Event]:
    """Heartbeats in a thread of their own while the body runs; the event is set by ``FencedError``.

    Another error is passed over: the next beat may come through, and if none does, whoever holds
    the row is fenced at its next write.
    """
    lost, ended = threading.Event(), threading.Event()

    def run() -> None:
        while not ended.wait(log.settings.lease_ttl_ms / 3000):
            try:
                beat()
            except FencedError:
                lost.set()
                return
            except Exception:  # noqa: BLE001, S112 - a driver's own error must not end the beats
                continue

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        ended.set()
        thread.join()
