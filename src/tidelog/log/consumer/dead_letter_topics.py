"""Records in the home's audit which topics get dead letters of handlers; proofs search these.

A dead letter is a whole event. So an event that is erased from its topic must go from the topic of
dead letters too. A process writes the record before its first dead letter, and again before one on
a later day, since it does not know whether a catalog was restored. Sweeps keep the last of equal
records.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import DEAD_LETTERS, Action, record_action
from tidelog.model.address import recorded_name

__all__ = ["DeadLetterRecorder", "DeadLetterTopic", "dead_letter_topic"]

_TARGET = ", to topic:"
_AGAIN_S = 86_400.0


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
        self._note = f"of {handler}{_TARGET}{target}"
        self._at_s: float | None = None

    def __call__(self) -> None:
        """Records it, unless this process did so in the last day; call it before each move."""
        now_s = self._context.clock.monotonic_s()
        if self._at_s is None or now_s - self._at_s >= _AGAIN_S:
            record_action(self._context, DEAD_LETTERS, self._what, self._note)
            self._at_s = now_s


def dead_letter_topic(action: Action) -> DeadLetterTopic | None:
    """Returns what a record of the audit says about dead letters; None for other records."""
    if action.op != DEAD_LETTERS or _TARGET not in action.note:
        return None
    handler, _, target = action.note.rpartition(_TARGET)
    scheme, _, path = action.what.partition(":")
    return DeadLetterTopic((scheme, path), target, handler.removeprefix("of "))
