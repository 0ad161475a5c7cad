"""Verifying a topic: every layer is read and held against the others.

It changes nothing, runs beside everything else, and collects what it finds instead of raising: an
*error* is damage that a person must look at, a *note* is not. What looks like damage is read once
more before it is told, as it may have been trimmed or compiled meanwhile.

The layers: the objects of the topic are listed; then, for each partition, the head, the rows of
producers, the amendments with their values, the rows of journals and runs, which must tile from the
start to the next offset, the bytes of each of them with their checksums, counts, offsets, times and
id indexes, and the slot rows, which must be those of journals and runs; last, the objects that no
row names. Rows that trims and compiles left behind are no damage.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.findings import Finding, Severity, Tally
from tidelog.log.topics import find_topic
from tidelog.log.verify_partition import PartitionCheck
from tidelog.model import layout
from tidelog.model.topic import Topic

__all__ = ["Finding", "Severity", "VerifyReport", "verify_topic"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was found. Runs, events and bytes are those that can be read.

    Journals are counted among the runs too.
    """

    topic: str
    partitions: int
    runs: int
    events: int
    bytes: int
    objects: int
    orphans: int  # objects that no row names, or names yet
    orphan_bytes: int
    errors: int
    notes: int
    findings: tuple[Finding, ...]  # the first ones of each severity
    journals: int = 0
    amendments: int = 0  # that are not trimmed


def verify_topic(
    log: Log,
    topic: Topic,
    pool: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read everything that belongs to a topic; what was found.

    ``progress`` is called after each run with the bytes that were read. ``NotFoundError`` when the
    topic is deleted, ``UnavailableError`` as usual.
    """
    listed = log.store.list(f"topics/{topic.incarnation}/")  # before the rows that name them
    tally = Tally(log, topic, {info.key: info.size for info in listed}, progress)
    for partition in range(topic.partitions):
        PartitionCheck(tally, partition, pool).run()
    _check_registry(tally)
    staged = layout.sinks(topic.incarnation, "")[:-1]  # named by manifests, not by runs
    orphans = {
        key: size
        for key, size in tally.sizes.items()
        if key not in tally.named and not key.startswith(staged)
    }
    for key, size in orphans.items():
        tally.add("note", f"object `{key}`", f"no run names it, {size} bytes: a sweep decides")
    return VerifyReport(
        topic=topic.name,
        partitions=topic.partitions,
        runs=tally.runs,
        events=tally.events,
        bytes=tally.bytes,
        objects=len(tally.sizes),
        orphans=len(orphans),
        orphan_bytes=sum(orphans.values()),
        errors=tally.counts["error"],
        notes=tally.counts["note"],
        findings=tuple(tally.findings),
        journals=tally.journals,
        amendments=tally.amendments,
    )


def _check_registry(tally: Tally) -> None:
    """The topic is still there, and no head has a floor that its producers could never reach."""
    name = tally.topic.name
    try:
        now = find_topic(tally.log, name)
    except CorruptError as exc:
        tally.add("error", f"registry row of `{name}`", str(exc))
        return
    if now.incarnation != tally.topic.incarnation:
        raise NotFoundError(f"topic `{name}`: was deleted and made again: verify it again")
    if tally.floor > now.generation:
        tally.add(
            "error",
            f"registry row of `{name}`",
            f"generation {now.generation}, but a head has floor {tally.floor}: nothing can be "
            "appended there",
        )
