"""Records of playbacks in the home's audit, by which proofs find the copies that they made.

A playback without a name leaves no other record. An address of another system may hold a secret, so
only its scheme is recorded; a topic is recorded by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import read_actions, record_action
from tidelog.errors import InvalidError
from tidelog.playback.request import PlaybackRequest

__all__ = ["PlayedTopic", "played_topics", "record_playback"]

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


def played_topics(context: Context) -> Iterator[PlayedTopic]:
    """Yields which topics were played into which, each pair once."""
    known = set()
    for action in read_actions(context):
        if action.op == _OP and _TARGET in action.note:
            target = action.note.rpartition(_TARGET)[2].partition("?")[0]
            played = PlayedTopic(action.what.removeprefix(_SOURCE), target)
            if played not in known:
                known.add(played)
                yield played
