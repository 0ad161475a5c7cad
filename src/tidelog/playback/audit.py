"""Records of playbacks in the home's audit, by which proofs find the copies that they made.

A playback without a name leaves no other record, so sweeps keep it. It names topics, files and
streams. An address of HTTP may hold a secret, so only its scheme is recorded.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import PLAYBACK, Action, record_action
from tidelog.errors import InvalidError
from tidelog.model.address import recorded_name
from tidelog.playback.request import PlaybackRequest

__all__ = ["PlayedTopic", "played_topic", "record_playback"]

_SOURCE = "topic "
_TARGET = ", to "


class PlayedTopic(NamedTuple):
    """The name of a topic, and what it was played into."""

    source: str
    sink: str  # such as topic:NAME; only the scheme of one that may hold a secret


def record_playback(context: Context, asked: PlaybackRequest, who: str) -> None:
    """Puts a playback into the home's audit.

    A home that cannot be written to, such as a read-only copy, is played without a record.
    """
    is_kept = bool(asked.sink.partition(":")[2])  # not so of what is printed, or of a function
    to = recorded_name(asked.sink) if is_kept else "a sink"
    note = f"{asked.start or 'the first'} to {asked.end or 'now'}{_TARGET}{to}"
    with contextlib.suppress(InvalidError):
        record_action(context, PLAYBACK, f"{_SOURCE}{asked.topic}", note, who)


def played_topic(action: Action) -> PlayedTopic | None:
    """Returns what a record of the audit says about a playback; None for other records."""
    sink = action.note.partition(_TARGET)[2]
    if action.op != PLAYBACK or ":" not in sink:
        return None
    return PlayedTopic(action.what.removeprefix(_SOURCE), sink)
