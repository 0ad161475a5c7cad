"""Records of playbacks in the home's audit, by which proofs find the copies that they made.

A playback without a name leaves no other record. An address of another system may hold a secret, so
only its scheme is recorded; a topic is recorded by name.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import Action, record_action
from tidelog.errors import InvalidError
from tidelog.playback.request import PlaybackRequest

__all__ = ["PlayedTopic", "played_topic", "record_playback"]

_OP = "playback"
_SOURCE = "topic "
_TARGET = ", to topic:"


class PlayedTopic(NamedTuple):
    """The names of two topics, one of which was played into the other."""

    source: str
    target: str


def record_playback(context: Context, asked: PlaybackRequest, who: str) -> None:
    """Puts a playback into the home's audit.

    A home that cannot be written to, such as a read-only copy, is played without a record.
    """
    scheme, _, rest = asked.sink.partition(":")
    to = asked.sink if scheme == "topic" else f"{scheme}:" if rest else "a sink"
    note = f"{asked.start or 'the first'} to {asked.end or 'now'}, to {to}"
    with contextlib.suppress(InvalidError):
        record_action(context, _OP, f"{_SOURCE}{asked.topic}", note, who)


def played_topic(action: Action) -> PlayedTopic | None:
    """Returns what a record of the audit says about a playback; None for other records."""
    if action.op != _OP or _TARGET not in action.note:
        return None
    target = action.note.rpartition(_TARGET)[2].partition("?")[0]
    return PlayedTopic(action.what.removeprefix(_SOURCE), target)
