"""Names of producers: those that users give, and those that are Tidelog's own.

A producer's row decides which events count as stored, so two writers that share a name by accident
lose events. Each kind of writer therefore has a prefix of its own, which no other name begins with:

- ``~<id>``: without a name; a sweep removes the row when it is old
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
    """Refuse a user's name that is not valid, or that Tidelog's own producers may have."""
    check_utf8("producer name", name)
    if not 1 <= len(name) <= limits.PRODUCER_NAME_MAX or name.startswith((UNNAMED, _OWN)):
        raise InvalidError(
            f"producer name `{name[:80]}`: give 1 to {limits.PRODUCER_NAME_MAX} characters, "
            f"the first not `{UNNAMED}` or `{_OWN}`"
        )


def unnamed_producer(fresh_id: str) -> str:
    """Of a producer without a name."""
    return f"{UNNAMED}{fresh_id}"


def once_producer(digest: str) -> str:
    """Of a request with an idempotency key that has this hash."""
    return f"{UNNAMED}once-{digest}"


def recovery_id(origin: str, partition: int) -> str:
    """Of segments with the events that an object, or a copy of it, has for a partition."""
    return hashlib.sha256(f"{origin}/{partition}".encode()).hexdigest()[:32]


def recovery_producer(origin: str, partition: int) -> str:
    """Of a recovery of these events; a commit of a copy of the object creates its row too."""
    return once_producer(recovery_id(origin, partition))


def pipeline_producer(pipeline: str, source_partition: str) -> str:
    """Of a pipeline's source partition; one that runs once has a name that begins with ``~``.

    A pipeline's name holds no ``:``, so the two parts cannot run into each other.
    """
    name = f"{pipeline}:{source_partition}"
    return name if pipeline.startswith(UNNAMED) else f"{_OWN}pipeline:{name}"


def playback_producer(name: str) -> str:
    """Of a playback with a name, in one generation."""
    return f"{_OWN}playback:{name}"


def sink_producer(name: str) -> str:
    """Of a sink that a Spark writer gave a name."""
    return f"{_OWN}sink:{name}"


def writer_name(producer: str) -> str:
    """What a segment says of its producer: the name of one that resumes, else an empty text."""
    return "" if producer.startswith(UNNAMED) else producer


def pipeline_of(writer: str) -> str | None:
    """The pipeline whose producer it is; None for another writer."""
    own = f"{_OWN}pipeline:"
    return writer.removeprefix(own).partition(":")[0] if writer.startswith(own) else None


def writer_words(writer: str) -> str:
    """A named writer in a message: what it is, and what a user calls it."""
    if not writer.startswith(_OWN):
        return f"producer `{writer}`"
    kind, _, name = writer.removeprefix(_OWN).partition(":")
    return f"Spark sink `{name}`" if kind == "sink" else f"{kind} `{name}`"
