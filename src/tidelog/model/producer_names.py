"""Names of producers: those that users give, and Tidelog's own.

A producer's row decides which events count as stored, so two writers that share a name by accident
lose events. So each kind of writer has its own prefix, which no other name begins with:

- ``~<id>``: without a name; a sweep deletes the row when it is old
- ``~once-<hash>``: a request with an idempotency key, or a recovery of one object's events
- ``:pipeline:<pipeline>:<source partition>``, ``:playback:<name>``, ``:sink:<name>``: kept for good
- anything else: a name that a user gave
"""

from __future__ import annotations

import hashlib

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.event import check_utf8

__all__ = [
    "UNNAMED",
    "check_producer_name",
    "once_producer",
    "pipeline_of",
    "pipeline_producer",
    "playback_producer",
    "recovery_id",
    "recovery_producer",
    "sink_producer",
    "unnamed_producer",
    "writer_name",
    "writer_words",
]

UNNAMED = "~"
_OWN = ":"


def check_producer_name(name: str) -> None:
    """Raises ``InvalidError`` for a user's name that is invalid or reserved for Tidelog."""
    check_utf8("producer name", name)
    if not 1 <= len(name) <= limits.PRODUCER_NAME_MAX or name.startswith((UNNAMED, _OWN)):
        raise InvalidError(
            f"producer name `{name[:80]}`: give 1 to {limits.PRODUCER_NAME_MAX} characters, "
            f"the first not `{UNNAMED}` or `{_OWN}`"
        )


def unnamed_producer(fresh_id: str) -> str:
    """Returns the name of a producer without a user's name."""
    return f"{UNNAMED}{fresh_id}"


def once_producer(digest: str) -> str:
    """Returns the name for a request with an idempotency key that has this hash."""
    return f"{UNNAMED}once-{digest}"


def recovery_id(origin: str, partition: int) -> str:
    """Returns the id of segments with an object's events for a partition, in a recovery."""
    return hashlib.sha256(f"{origin}/{partition}".encode()).hexdigest()[:32]


def recovery_producer(origin: str, partition: int) -> str:
    """Returns the name for a recovery of these events; the commit of a copy creates its row too."""
    return once_producer(recovery_id(origin, partition))


def pipeline_producer(pipeline: str, source_partition: str) -> str:
    """Returns the name for a pipeline's source partition.

    A pipeline that runs once has a name that begins with ``~``. A pipeline's name contains no
    ``:``, so the two parts are unambiguous.
    """
    name = f"{pipeline}:{source_partition}"
    return name if pipeline.startswith(UNNAMED) else f"{_OWN}pipeline:{name}"


def playback_producer(name: str) -> str:
    """Returns the name for one generation of a named playback."""
    return f"{_OWN}playback:{name}"


def sink_producer(name: str) -> str:
    """Returns the name for a named sink of a Spark writer."""
    return f"{_OWN}sink:{name}"


def writer_name(producer: str) -> str:
    """Returns the producer name in a segment: that of a writer that resumes, otherwise empty."""
    return "" if producer.startswith(UNNAMED) else producer


def pipeline_of(writer: str) -> str | None:
    """Returns the pipeline of a writer; None for another kind of writer."""
    own = f"{_OWN}pipeline:"
    return writer.removeprefix(own).partition(":")[0] if writer.startswith(own) else None


def writer_words(writer: str) -> str:
    """Returns a named writer in words: its kind, and the name that a user knows."""
    if not writer.startswith(_OWN):
        return f"producer `{writer}`"
    kind, _, name = writer.removeprefix(_OWN).partition(":")
    return f"Spark sink `{name}`" if kind == "sink" else f"{kind} `{name}`"
