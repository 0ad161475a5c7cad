"""Watchers of a row that is beaten: none looks twice without a beat between its looks.

Who beats its row keeps it; that is what such tests prove. Where owner and watcher share a machine,
a stall longer than the time to live would let the watcher look again before the owner's thread has
beaten once, and take the row, as it may. So a look waits for the beat. An owner that does not beat
fails the test after ``SECONDS_MAX``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from tidelog.context import Context
from tidelog.coordination.ownership import Membership, Ownership
from tidelog.model import layout

SECONDS_MAX = 60


def await_beat(context: Context, where: str, row: str, seen: str) -> None:
    """Until a row has another version than its watcher saw last; at once where it saw none."""
    deadline_s = time.monotonic() + SECONDS_MAX
    while (found := context.catalog.get(where, row)) is not None and found.version == seen:
        assert time.monotonic() < deadline_s, f"nobody beats `{row}`"
        time.sleep(0.005)


class Refused:
    """How often watchers found that another one has the row."""

    count = 0


@contextlib.contextmanager
def beaten_between_takes() -> Iterator[Refused]:
    """While the body runs, each ``Ownership.try_take`` waits for a beat since its last one."""
    real, refused = Ownership.try_take, Refused()

    def try_take(holding: Ownership) -> bool:
        seen = holding._silence._seen[0]
        await_beat(holding._context, holding._where, holding._row, seen)
        taken = real(holding)
        refused.count += not taken
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ownership, "try_take", try_take)
        yield refused


@contextlib.contextmanager
def beaten_between_looks(member: Membership) -> Iterator[None]:
    """While the body runs, others find out who is alive only after a beat of this member."""
    real, row = Membership.alive, layout.member_row(member.id)

    def alive(watcher: Membership) -> list[str]:
        if watcher is not member:
            await_beat(
                watcher._context, watcher._members, row, watcher._seen.get(row, ("", 0.0))[0]
            )
        return real(watcher)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "alive", alive)
        yield
