"""Bugs planted into copies and proofs that look for them, and into accounts of archives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tidelog.archive.derived_archives import archives_of
from tidelog.connectors.topic import sink as topic_sink
from tidelog.coordination import audit
from tidelog.erasure import proof_scope, redaction, topic_copies
from tidelog.erasure.archive_scope import ArchiveScope
from tidelog.erasure.proof_scope import TopicScope
from tidelog.erasure.topic_copies import Copies, TopicCopy
from tidelog.log.ledger import ErasedIds
from tidelog.log.producer.append import Appender
from tidelog.log.topics import list_topics
from tidelog.maintenance import pipeline_sweep
from tidelog.pipeline import manifest

__all__ = [
    "audit_forgets_copies",
    "copies_have_no_numbers",
    "deletes_of_a_copy_hide_its_events",
    "erased_offsets_were_never_there",
    "original_dates_retimed_copies",
    "proof_passes_over_copies",
    "proof_passes_over_others",
    "proof_stops_at_deleted_copies",
    "reasons_of_dead_deletes_stay",
    "restored_archives_are_not_listed",
    "staged_for_deleted_topics_stays",
]

Patch = pytest.MonkeyPatch


def proof_passes_over_copies(patch: Patch) -> None:
    """A proof does not search topics that events were copied into."""
    patch.setattr(TopicScope, "copies", lambda scope: Copies())


def proof_passes_over_others(patch: Patch) -> None:
    """A proof for an archive does not search other archives of its topic."""
    patch.setattr(ArchiveScope, "_is_same", lambda scope, archive: False)


def proof_stops_at_deleted_copies(patch: Patch) -> None:
    """A proof does not follow what was made of a copy that is deleted now."""
    steps = topic_copies._steps

    def to_topics_that_are_there(context: Any, origin: Any, playbacks: Any) -> Iterator[Any]:
        ready = {each.incarnation for each in list_topics(context) if each.state == "ready"}
        every = steps(context, origin, playbacks)
        return (each for each in every if not each.target or each.target in ready)

    patch.setattr(topic_copies, "_steps", to_topics_that_are_there)


def restored_archives_are_not_listed(patch: Patch) -> None:
    """A proof takes an archive for its topic's own if that has the name of the archive's source."""

    def by_name(context: Any, topic: Any) -> list[Any]:
        return list({archive.name: archive for archive, _ in archives_of(context, topic)}.values())

    patch.setattr(proof_scope, "archives_with", by_name)


def audit_forgets_copies(patch: Patch) -> None:
    """A sweep deletes all old records of the audit, also those of dead letters."""
    patch.setattr(audit, "_COPIES", frozenset())


def deletes_of_a_copy_hide_its_events(patch: Patch) -> None:
    """An event in a copy is a new one above offsets that were deleted there, whatever its time."""
    patch.setattr(ErasedIds, "covers", lambda ledger, column, value, time_ms: True)


def original_dates_retimed_copies(patch: Patch) -> None:
    """An event in a copy is a new one after its original's delete, whatever set its time."""
    patch.setattr(TopicCopy, "is_retimed", property(lambda copy: False))


def reasons_of_dead_deletes_stay(patch: Patch) -> None:
    """An erasure replaces ids only in the reasons of records that are done."""
    real = redaction.replace_texts

    def of_done_ones(context: Any, topic: Any, record: Any, replaced: Any) -> None:
        if record.state == "done":
            real(context, topic, record, replaced)

    patch.setattr(redaction, "replace_texts", of_done_ones)


def staged_for_deleted_topics_stays(patch: Patch) -> None:
    """A sweep keeps what a pipeline has staged for a topic that was deleted."""
    patch.setattr(pipeline_sweep, "is_target_deleted", lambda *_: False)


def erased_offsets_were_never_there(patch: Patch) -> None:
    """A range takes the word of its source, which counts offsets that were erased as absent."""
    patch.setattr(manifest, "_with_erased", lambda missing, *_: missing)


def copies_have_no_numbers(patch: Patch) -> None:
    """A pump and a restore append what is staged, whether or not it was appended before."""
    append = topic_sink.append_staged

    def anyhow(producer: Any, segments: Any, ordinal: int = 0, pool: Any = None) -> int:
        producer = type(producer)(
            producer._context, producer.topic, f"~{producer._context.ids.new()}"
        )
        return append(producer, segments, ordinal, pool)

    patch.setattr(topic_sink, "append_staged", anyhow)
    patch.setattr(Appender, "_claim", lambda *_: [])  # what a copy of a segment is known by
    patch.setattr(Appender, "_recovered_at", lambda *_: None)
