"""Records in the home's audit of events that were copied into a topic; proofs find copies by them.

Events get into another topic by a playback, a pump, a restore, or as dead letters of a handler. An
event that is erased from its topic must go from the copies too, and some of them leave no other
record. The kinds:

- A *playback*, before it begins: one without a name leaves no other record.
- A *deleted* pump or restore. A proof finds the target of a deleted pipeline by its producers
  there. They go with the target, and archives of the target may stay: then only this record says
  where their events came from. Nor do producers say whether copies have other ids or keys, and a
  sink outside of the home has none.
- *Dead letters*. A dead letter is a whole event. A process writes the record before its first dead
  letter, and again before one on a later day, as it does not know if a catalog was restored.

Sweeps keep the last of equal records. They name topics, files and streams. An address of HTTP may
hold a secret, so only its scheme is recorded.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import (
    DEAD_LETTERS,
    PIPELINE_DELETES,
    PLAYBACK,
    Action,
    record_action,
)
from tidelog.errors import InvalidError
from tidelog.model.address import recorded_name
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

_TOPIC = "topic "
_SOURCE = "of "
_TARGET = ", to "
_DEAD_LETTER_TARGET = ", to topic:"
_RENAMED = ", with another "
_AGAIN_S = 86_400.0


class PlayedTopic(NamedTuple):
    """The name of a topic, and what it was played into."""

    source: str
    sink: str  # such as topic:NAME; only the scheme of one that may hold a secret


def record_playback(context: Context, topic: str, span: str, sink: str, who: str) -> None:
    """Puts a playback into the home's audit.

    A home that cannot be written to, such as a read-only copy, is played without a record.
    """
    is_kept = bool(sink.partition(":")[2])  # not so of what is printed, or of a function
    to = recorded_name(sink) if is_kept else "a sink"
    with contextlib.suppress(InvalidError):
        record_action(context, PLAYBACK, f"{_TOPIC}{topic}", f"{span}{_TARGET}{to}", who)


def played_topic(action: Action) -> PlayedTopic | None:
    """Returns what a record of the audit says about a playback; None for other records."""
    sink = action.note.partition(_TARGET)[2]
    if action.op != PLAYBACK or ":" not in sink:
        return None
    return PlayedTopic(action.what.removeprefix(_TOPIC), sink)


class DeletedCopy(NamedTuple):
    """What a pipeline read, and what it wrote to."""

    source: tuple[str, str]  # scheme and name; without a name if that may hold a secret
    sink: str  # such as topic:NAME
    incarnation: str  # of that topic: another one with its name has none of these events
    renamed: frozenset[str]  # what its copies have other ones of: id, key


def record_deletion(context: Context, pipeline: NamedPipeline, kind: str, who: str) -> None:
    """Puts the deletion of a pipeline into the audit; call it before."""
    note = f"{_SOURCE}{recorded_name(pipeline.source)}{_TARGET}{recorded_name(pipeline.sink)}"
    if pipeline.target:
        note += f" ({pipeline.target})"
    if pipeline.renames:
        note += f"{_RENAMED}{' and '.join(sorted(pipeline.renames))}"
    record_action(context, f"{kind} delete", f"{kind} {pipeline.name}", note, who)


def deleted_copy(action: Action) -> DeletedCopy | None:
    """Returns what a record of the audit says about a deleted pipeline; None for other records."""
    if action.op not in PIPELINE_DELETES or _TARGET not in action.note:
        return None
    source, _, target = action.note.removeprefix(_SOURCE).rpartition(_TARGET)
    scheme, _, name = source.partition(":")
    place, _, renamed = target.partition(_RENAMED)
    sink, _, incarnation = place.removesuffix(")").partition(" (")
    renames = frozenset(filter(None, renamed.split(" and ")))
    return DeletedCopy((scheme, name), sink, incarnation, renames)


class DeadLetterTopic(NamedTuple):
    """What a handler read, and the name of the topic that got what it failed on."""

    source: tuple[str, str]  # scheme and name; without a name if that may hold a secret
    target: str
    handler: str  # such as "consumer `billing`"


class DeadLetterRecorder:
    """Puts into the audit that a handler of a source moves events to a topic; once a day."""

    def __init__(self, context: Context, source: str, target: str, handler: str) -> None:
        self._context = context
        self._what = recorded_name(source)
        self._note = f"{_SOURCE}{handler}{_DEAD_LETTER_TARGET}{target}"
        self._at_s: float | None = None

    def __call__(self) -> None:
        """Records it, unless this process did so in the last day; call it before each move."""
        now_s = self._context.clock.monotonic_s()
        if self._at_s is None or now_s - self._at_s >= _AGAIN_S:
            record_action(self._context, DEAD_LETTERS, self._what, self._note)
            self._at_s = now_s


def dead_letter_topic(action: Action) -> DeadLetterTopic | None:
    """Returns what a record of the audit says about dead letters; None for other records."""
    if action.op != DEAD_LETTERS or _DEAD_LETTER_TARGET not in action.note:
        return None
    handler, _, target = action.note.rpartition(_DEAD_LETTER_TARGET)
    scheme, _, path = action.what.partition(":")
    return DeadLetterTopic((scheme, path), target, handler.removeprefix(_SOURCE))
