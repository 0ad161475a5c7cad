"""Bugs planted into what a promote asks of dropped events, and into what erasures leave out."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.archive import erased_events
from tidelog.archive.coverage import DroppedEvents
from tidelog.archive.erased_events import _FoundDeletions
from tidelog.erasure import delete_archived
from tidelog.journal.amend import Amender

__all__ = [
    "delete_lists_generations_once",
    "delete_names_starts_where_it_found_events",
    "deletes_count_up_to_a_time",
    "dropped_events_excuse_lost_ones",
    "erased_keys_count_where_they_were_found",
    "erasure_searches_once",
]

Patch = pytest.MonkeyPatch


def dropped_events_excuse_lost_ones(patch: Patch) -> None:
    """A range that has dropped as many events as it lacks has dropped those."""
    patch.setattr(DroppedEvents, "are_all_of", lambda *_: True)


def deletes_count_up_to_a_time(patch: Patch) -> None:
    """A delete from a topic counts for all events of its ids or its key up to its time."""

    def enter(self: Any, record: Any, events: Any) -> None:
        is_copied = bool(record.sources)  # into the audit of an archive
        named = [each for each in events if is_copied or each.offset < 0]
        self.enter(record, list(events) if record.key else named)

    patch.setattr(_FoundDeletions, "enter_unplaced", enter)


def delete_lists_generations_once(patch: Patch) -> None:
    """A delete does not search a generation that has begun since it listed the archives."""

    def listed_before(context: Any, topic: Any, first: Any) -> list[Any]:
        states = ((each, each[0].state_of(each[1])) for each in first)
        built = [each for each, state in states if state == "building"]
        return [each for each in built if delete_archived._is_from_outside(*each)]

    patch.setattr(delete_archived, "_built_from_outside", listed_before)


def delete_names_starts_where_it_found_events(patch: Patch) -> None:
    """A delete records the first offsets of those partitions only in which it found an event."""

    def of_some(self: Amender, heads: Any) -> tuple[int, ...]:
        numbers = range(self.topic.partitions)
        return tuple(heads[each][0].start if each in heads else 0 for each in numbers)

    patch.setattr(Amender, "_starts", of_some)


def erasure_searches_once(patch: Patch) -> None:
    """An erasure does not look again for what came between its search and its record."""

    def once(first: Any, look_again: Any, record: Any) -> dict[Any, Any]:
        record(first)
        return dict(first)

    patch.setattr(delete_archived, "_record_all", once)


def erased_keys_count_where_they_were_found(patch: Patch) -> None:
    """A range leaves out events of an erased key only in source partitions that had one."""

    def is_elsewhere(own: Any, origins: Any) -> bool:
        return not any(each.may_be(own) for each in origins)

    patch.setattr(erased_events, "_is_created_again", is_elsewhere)
