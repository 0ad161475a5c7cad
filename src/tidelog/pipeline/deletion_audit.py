"""Records in the home's audit what a pump or restore copied, when it is deleted.

A proof finds the target of a deleted pipeline by its producers there. They go with the target, and
archives of the target may stay: then only this record says where their events came from. Nor do
producers say whether copies have other ids or keys, and a sink outside of the home has none.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import PIPELINE_DELETES, Action, record_action
from tidelog.model.address import recorded_name
from tidelog.model.pipeline import NamedPipeline

__all__ = ["DeletedCopy", "deleted_copy", "record_deletion"]

_SOURCE = "of "
_TARGET = ", to "
_RENAMED = ", with another "


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
