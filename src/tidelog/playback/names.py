"""Playbacks by their names: begun, found, listed and forgotten.

A name is in the registry so that it can be listed; what counts are the rows of the playback itself.

1. begin: the name into the registry          → a name without a pin, which is not listed
2. begin: the rows ``pin`` and ``state``      → a playback that nobody drives
3. forget: take it, then step 6 of ``named``  → a name without a pin, which is not listed
4. forget: the name out of the registry, by the version that it had before step 3

Who begins writes the registry's row after a look at ``state``, whose version the pin expects. So a
name that is begun while it is forgotten has a newer row than the one that step 4 would remove.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.playback import Pinned, PlaybackState, check_playback_name
from tidelog.model.run import decode_row, encode_row
from tidelog.playback.named import NamedPlayback

__all__ = ["KnownPlayback", "find_playback", "forget_playback", "list_playbacks", "start_playback"]

_ATTEMPTS = 20  # of one write whose replies get lost


@dataclass(frozen=True, slots=True)
class KnownPlayback:
    """A playback as it stands now."""

    name: str
    pinned: Pinned
    state: PlaybackState
    is_played: bool  # by a process that is not known to be dead


def find_playback(log: Log, name: str) -> Pinned | None:
    """What a playback of this name was told, or None where there is none."""
    check_playback_name(name)
    row = log.catalog.get(layout.playback_partition(name), layout.PLAYBACK_PIN)
    return decode_row(row.value, Pinned, f"playback `{name}`") if row else None


def start_playback(log: Log, name: str, wanted: Pinned) -> Pinned:
    """Steps 1 and 2; of two at once, what the first one was told."""
    check_playback_name(name)
    where = layout.playback_partition(name)
    for attempt in range(_ATTEMPTS):
        row = log.catalog.get(where, layout.PLAYBACK_STATE)
        before = _state(name, row)
        state = PlaybackState(generation=before.generation)
        pinned = msgspec.structs.replace(wanted, generation=before.generation)
        known = Put(layout.playback_row(name), name.encode())
        changes = (
            Put(layout.PLAYBACK_PIN, encode_row(pinned), ABSENT),
            Put(layout.PLAYBACK_STATE, encode_row(state), row.version if row else ABSENT),
        )
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(layout.REGISTRY, known, write_id=log.ids.new())
            log.catalog.write(where, *changes, write_id=log.ids.new())
        found = find_playback(log, name)
        if found is not None:
            return found
        log.clock.sleep(0.01 * attempt)
    raise UnavailableError(f"playback `{name}`: replies keep getting lost: try again")


def list_playbacks(log: Log) -> Iterator[KnownPlayback]:
    """All that have names, by name, also those that are finished."""
    for row in log.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        name = row.value.decode()
        pinned = find_playback(log, name)
        if pinned is None:
            continue
        found = log.catalog.get(layout.playback_partition(name), layout.PLAYBACK_STATE)
        state = _state(name, found)
        is_played = bool(state.owner) and not log.processes.is_dead(state.mark)
        yield KnownPlayback(name, pinned, state, is_played)


def forget_playback(log: Log, name: str) -> None:
    """Steps 3 and 4; what it has played stays where it is. ``NotFoundError``.

    ``InvalidError`` while a process plays it; one that is only silent is waited for.
    """
    known = log.catalog.get(layout.REGISTRY, layout.playback_row(name))
    pinned = find_playback(log, name)
    if pinned is None:
        raise NotFoundError(f"playback `{name}`: not found: nothing to forget")
    named = NamedPlayback(log, name, pinned.generation)
    deadline_s = log.clock.monotonic_s() + 1.5 * log.settings.lease_ttl_ms / 1000
    if not named.take(lambda: log.clock.monotonic_s() > deadline_s):
        raise InvalidError(
            f"playback `{name}`: a process plays it: stop that one, and forget it then"
        )
    named.forget()
    if known is not None:
        gone = Delete(known.row, known.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # it is only for listing
            log.catalog.write(layout.REGISTRY, gone, write_id=log.ids.new())


def _state(name: str, row: Row | None) -> PlaybackState:
    return decode_row(row.value, PlaybackState, f"playback `{name}`") if row else PlaybackState()
