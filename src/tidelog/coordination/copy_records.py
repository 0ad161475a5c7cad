"""Records in the home's audit of events that were copied into a topic; proofs find copies by them.

Events get into another topic by a playback, a pump, a restore, or as dead letters of a handler. An
event that is erased from its topic must go from the copies too, and some of them leave no other
record. The kinds:

- A *playback*, before it begins: one without a name leaves no other record.
- A *deleted* pump or restore. A proof finds the target of a deleted pipeline by its producers
  there. They go with the target, and archives of the target may stay: then only this record says
  where their events came from.
- *Dead letters*. A dead letter is a whole event. A process writes the record before its first dead
  letter, and again before one on a later day: the sweep deletes old records.

An address of another system may hold a secret, so only its scheme is recorded.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import Action, record_action
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline

__all__ = [
    "DeadLetterRecorder",
    "DeadLetterTopic",
    "DeletedCopy",
    "PlayedTopic",
    "dead_letter_topic",
    "deleted_copy",
    "played_topic",
    "record_deletion",
    "record_playback",
]

_PLAYBACK = "playback"
_DELETIONS = ("pump delete", "restore delete")
_DEAD_LETTERS = "dead letters"
_TOPIC = "topic "
_SOURCE = "of "
_TARGET = ", to topic:"
_AGAIN_S = 86_400.0


class PlayedTopic(NamedTuple):
    """The names of two topics, one of which was played into the other."""

    source: str
    target: str


def record_playback(context: Context, topic: str, span: str, sink: str, who: str) -> None:
    """Puts a playback into the home's audit.

    A home that cannot be written to, such as a read-only copy, is played without a record.
    """
    scheme, _, rest = sink.partition(":")
    to = sink if scheme == "topic" else f"{scheme}:" if rest else "a sink"
    with contextlib.suppress(InvalidError):
        record_action(context, _PLAYBACK, f"{_TOPIC}{topic}", f"{span}, to {to}", who)


def played_topic(action: Action) -> PlayedTopic | None:
    """Returns what a record of the audit says about a playback; None for other records."""
    if action.op != _PLAYBACK or _TARGET not in action.note:
        return None
    target = action.note.rpartition(_TARGET)[2].partition("?")[0]
    return PlayedTopic(action.what.removeprefix(_TOPIC), target)


class DeletedCopy(NamedTuple):
    """What a pipeline read, and the name of the topic that it wrote to."""

    source: tuple[str, str]  # scheme and path; without a path if it is outside of the home
    target: str
    incarnation: str  # of that topic: another one with its name has none of these events


def record_deletion(context: Context, pipeline: NamedPipeline, kind: str, who: str) -> None:
    """Puts the deletion of a pipeline into the audit; call it before."""
    source, sink = parse_address(pipeline.source), parse_address(pipeline.sink)
    note = ""
    if sink.scheme == "topic":
        is_inside = source.scheme in ("topic", "archive")  # an address outside may hold a secret
        note = f"{_SOURCE}{source.scheme}:{source.path if is_inside else ''}{_TARGET}{sink.path}"
        note += f" ({pipeline.target})"
    record_action(context, f"{kind} delete", f"{kind} {pipeline.name}", note, who)


def deleted_copy(action: Action) -> DeletedCopy | None:
    """Returns what a record of the audit says about a deleted pipeline; None for other records."""
    if action.op not in _DELETIONS or _TARGET not in action.note:
        return None
    source, _, target = action.note.removeprefix(_SOURCE).partition(_TARGET)
    scheme, _, path = source.partition(":")
    name, _, incarnation = target.removesuffix(")").partition(" (")
    return DeletedCopy((scheme, path), name, incarnation)


class DeadLetterTopic(NamedTuple):
    """What a handler read, and the name of the topic that got what it failed on."""

    source: tuple[str, str]  # scheme and path; without a path if it is outside of the home
    target: str
    handler: str  # such as "consumer `billing`"


class DeadLetterRecorder:
    """Puts into the audit that a handler of a source moves events to a topic; once a day."""

    def __init__(self, context: Context, source: str, target: str, handler: str) -> None:
        address = parse_address(source)
        path = address.path if address.scheme in ("topic", "archive") else ""
        self._context = context
        self._what = f"{address.scheme}:{path}"
        self._note = f"{_SOURCE}{handler}{_TARGET}{target}"
        self._at_s: float | None = None

    def __call__(self) -> None:
        """Records it, unless this process did so in the last day; call it before each move."""
        now_s = self._context.clock.monotonic_s()
        if self._at_s is None or now_s - self._at_s >= _AGAIN_S:
            record_action(self._context, _DEAD_LETTERS, self._what, self._note)
            self._at_s = now_s


def dead_letter_topic(action: Action) -> DeadLetterTopic | None:
    """Returns what a record of the audit says about dead letters; None for other records."""
    if action.op != _DEAD_LETTERS or _TARGET not in action.note:
        return None
    handler, _, target = action.note.rpartition(_TARGET)
    scheme, _, path = action.what.partition(":")
    return DeadLetterTopic((scheme, path), target, handler.removeprefix(_SOURCE))
