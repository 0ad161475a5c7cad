"""Records in the home's audit what a pump or restore copied, when it is deleted.

A proof finds the target of a deleted pipeline by its producers there. They go with the target, and
archives of the target may stay: then only this record says where their events came from.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.context import Context
from tidelog.coordination.audit import Action, record_action
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline

__all__ = ["DeletedCopy", "deleted_copy", "record_deletion"]

_OPS = ("pump delete", "restore delete")
_SOURCE = "of "
_TARGET = ", to topic:"


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
    if action.op not in _OPS or _TARGET not in action.note:
        return None
    source, _, target = action.note.removeprefix(_SOURCE).partition(_TARGET)
    scheme, _, path = source.partition(":")
    name, _, incarnation = target.removesuffix(")").partition(" (")
    return DeletedCopy((scheme, path), name, incarnation)
