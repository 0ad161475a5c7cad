"""Deletes events from a topic, and from archives and objects that alone still hold them.

A delete first amends the topic: no reader that starts later sees the events (``journal.amend``). It
then searches the topic's archives for what the topic has trimmed (``erasure.from_archives``).
``erase_strays`` also finds what only objects hold that no row names. Maintenance removes the bytes
later; ``maintenance.purge`` does so at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tidelog.archive.derived_archives import Origin
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites
from tidelog.erasure.from_archives import DELETE_AGAIN, TopicPlaces, erase_found, erase_trimmed
from tidelog.erasure.proof_scope import TopicScope
from tidelog.erasure.redaction import redact_reasons
from tidelog.erasure.search import matcher_of, search_strays
from tidelog.journal.amend import Amender, AmendResult
from tidelog.journal.lookup import can_be_id

__all__ = ["DeleteResult", "delete_events", "delete_key", "erase_strays"]


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What a delete found, in the topic and in its archives."""

    events: int = 0  # of the topic
    archived: int = 0  # that only archives held
    strays: int = 0  # that objects held which no row names, and which a recovery would append
    missing: tuple[str, ...] = ()  # ids without any event
    unseen: tuple[str, ...] = ()  # files of archives without ids or keys to search for

    @property
    def is_clean(self) -> bool:
        """Returns whether everything that was given was found, and every file could be searched."""
        found = self.events or self.archived or self.strays
        return bool(found) and not self.missing and not self.unseen


def delete_events(context: Context, amender: Amender, ids: Collection[str]) -> DeleteResult:
    """Permanently deletes all events with one of these ids, also those that only archives hold.

    Ids that no topic accepts, such as an empty one, are searched in archives, whose dead letters
    may have them.
    """
    topic = amender.topic
    sought = matcher_of(ids, None)  # raises for what nothing can hold before anything is deleted
    wanted = [each for each in ids if can_be_id(each)]
    odd = tuple(each for each in ids if not can_be_id(each))
    amended = AmendResult(missing=odd)
    if wanted:
        held = amender.delete(wanted)
        amended = AmendResult(held.events, (*held.missing, *odd))
    events = amended.events
    with _after(topic.name, amended) as sent:
        trimmed = erase_trimmed(context, topic, amender.why, ids)
        sent.any |= bool(trimmed.events)
        if trimmed.found and wanted:  # a restore may have copied them before the ledger had them
            events += amender.delete(wanted).events
        redact_reasons(context, TopicScope(context, topic).owners(), sought.deletions)
    missing = tuple(each for each in amended.missing if each not in trimmed.ids)
    return DeleteResult(events, trimmed.events, missing=missing, unseen=trimmed.unseen)


def delete_key(
    context: Context,
    amender: Amender,
    key: bytes,
    progress: Callable[[int], None] = lambda done: None,
) -> DeleteResult:
    """Permanently deletes all events with this key, also those that only archives hold."""
    topic = amender.topic
    amended = amender.delete_key(key, progress)
    events = amended.events
    with _after(topic.name, amended) as sent:
        trimmed = erase_trimmed(context, topic, amender.why, key=key)
        sent.any |= bool(trimmed.events)
        if trimmed.found:  # as above
            events += amender.delete_key(key, progress).events
        sought = matcher_of((), key)
        redact_reasons(context, TopicScope(context, topic).owners(), sought.deletions)
    return DeleteResult(events, trimmed.events, unseen=trimmed.unseen)


@contextmanager
def _after(topic: str, amended: AmendResult) -> Iterator[SentWrites]:
    """Runs what follows a delete in the topic; its errors never say that nothing was stored."""
    sent = SentWrites()
    sent.any = bool(amended.events)
    with sent.unknown_if_any(f"delete in `{topic}`", DELETE_AGAIN):
        yield sent


def erase_strays(
    context: Context,
    amender: Amender,
    deleted: DeleteResult,
    ids: Collection[str],
    keys: Collection[bytes],
) -> DeleteResult:
    """Erases what only objects hold that no row names, under ids or keys that were deleted.

    A delete looks at the topic and its archives. A restored catalog has lost the events that were
    appended since its copy, and a producer that died has left what it did not commit. So a recovery
    would append such an event after it was deleted. The ledger keeps it from that; the recovery or
    a sweep deletes the object. Returns ``deleted`` with what was found.
    """
    topic, found_ids, strays, events = amender.topic, set[str](), 0, deleted.events
    searches: list[tuple[Collection[str], bytes | None]] = [((), each) for each in keys]
    if ids:
        searches.append((ids, None))
    sent = SentWrites()
    with sent.unknown_if_any(f"delete in `{topic.name}`", DELETE_AGAIN):
        for some, key in searches:
            found = search_strays(context, topic, matcher_of(some, key))
            for partition, here in found.items():
                origin = Origin(f"{topic.name}/{partition}", topic.incarnation)
                places = {(origin, offset): each for offset, each in here.items()}
                at = TopicPlaces({origin: partition})
                erase_found(sent.tracked(context), topic, amender.why, places, at, key)
                strays += len(here)
                found_ids |= {each.id for each in here.values() if each.id is not None}
            if any(found.values()):  # a recovery may have appended them before the ledger had them
                events += _delete_again(amender, found_ids & set(some), key)
    missing = tuple(each for each in deleted.missing if each not in found_ids)
    return replace(deleted, events=events, strays=strays, missing=missing)


def _delete_again(amender: Amender, ids: Collection[str], key: bytes | None) -> int:
    if key is not None:
        return amender.delete_key(key, lambda _: None).events
    return amender.delete([each for each in ids if can_be_id(each)]).events
