"""Verifying a topic: every layer is read and held against the others.

It changes nothing, runs beside everything else, and collects what it finds instead of raising: an
*error* is damage that a person must look at, a *warning* may be, a *note* is not. What looks like
damage is read once more before it is told, as it may have been trimmed or compiled meanwhile.

The layers: the objects of the topic are listed; then, for each partition, the head, the rows of
producers, the amendments with their values, the rows of journals and runs, which must tile from the
start to the next offset, the bytes of each of them with their checksums, counts, offsets, times and
id indexes, and the slot rows, which must be those of journals and runs; last, the objects that no
row names. Rows that trims and compiles left behind are no damage.

An object that no row names is an error where it proves that the catalog has lost commits, and part
of a warning where it may be a loss (``losses``). A producer that died between upload and commit
leaves the same behind, so this alone is no error: it ends when something newer is committed, or
when a person accepts it. What a person has accepted is a note.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.findings import Finding, Severity, Tally
from tidelog.log.losses import accepted_until_ms, find_losses
from tidelog.log.topics import find_topic
from tidelog.log.verify_partition import PartitionCheck
from tidelog.model import layout
from tidelog.model.run import Run, decode_fields
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["Finding", "Severity", "VerifyReport", "verify_topic"]

_GRACE_MS = 3_600_000  # a commit that is newer by this rules out a possible loss, as for sweeps


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
    warnings: int = 0
    possible_losses: int = 0  # orphans that may be the only copy of events
    proven_losses: int = 0  # orphans that prove that the catalog has lost commits


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
    tally = Tally(log, topic, {info.key: info for info in listed}, progress)
    for partition in range(topic.partitions):
        PartitionCheck(tally, partition, pool).run()
    generation = _check_registry(tally)
    orphans = _orphans(tally)
    proven, doubted = _check_orphans(tally, orphans, generation)
    return VerifyReport(
        topic=topic.name,
        partitions=topic.partitions,
        runs=tally.runs,
        events=tally.events,
        bytes=tally.bytes,
        objects=len(tally.objects),
        orphans=len(orphans),
        orphan_bytes=sum(info.size for info in orphans),
        errors=tally.counts["error"],
        notes=tally.counts["note"],
        findings=tuple(tally.findings),
        journals=tally.journals,
        amendments=tally.amendments,
        warnings=tally.counts["warning"],
        possible_losses=doubted,
        proven_losses=proven,
    )


def _orphans(tally: Tally) -> list[ObjectInfo]:
    """The objects that no row names, also none that was committed since its partition was read."""
    staged = layout.sinks(tally.topic.incarnation, "")[:-1]  # named by manifests, not by runs

    def unnamed() -> list[ObjectInfo]:
        return [
            info
            for key, info in tally.objects.items()
            if key not in tally.named and not key.startswith(staged)
        ]

    if unnamed():
        for partition, after in tally.nexts.items():
            where = layout.topic_partition(tally.topic.incarnation, partition)
            for row in tally.log.catalog.scan(where, layout.run_row(after), "run0"):
                with contextlib.suppress(CorruptError):
                    tally.named.add(decode_fields(row.value, Run, row.row).object)
    return unnamed()


def _check_orphans(tally: Tally, orphans: list[ObjectInfo], generation: int) -> tuple[int, int]:
    """How many objects prove a loss, and how many may be one; both are told."""
    named = (info.modified_ms for key, info in tally.objects.items() if key in tally.named)
    newest_ms = max(named, default=0)
    try:
        losses = find_losses(
            tally.log,
            tally.topic,
            orphans,
            lambda info: info.modified_ms > newest_ms - _GRACE_MS,
            samples=max(1, len(orphans)),
        )
        until_ms = accepted_until_ms(tally.log, tally.topic)
    except CorruptError as exc:
        tally.add("error", f"topic `{tally.topic.name}`", str(exc))
        return 0, 0
    what = f"has a generation above {generation}, which is the registry's"
    newer = {info.key: what for info in orphans if _is_above(info.key, generation)}
    proofs = {proof.info.key: proof.what for proof in losses.proofs} | newer
    doubts = {info.key for info in losses.doubts} - proofs.keys()
    proven = doubted = 0
    for info in orphans:
        where = f"object `{info.key}`"
        is_accepted = info.modified_ms <= until_ms
        if info.key in proofs and not is_accepted:
            proven += 1
            lost = "no row names it: the catalog has lost commits: restore it, or accept the loss"
            tally.add("error", where, f"{proofs[info.key]}, and {lost}")
            continue
        doubted += info.key in doubts and not is_accepted
        tally.add("note", where, f"no run names it, {info.size} bytes: a sweep decides")
    if doubted:
        tally.add(
            "warning",
            f"topic `{tally.topic.name}`",
            f"{doubted} objects were uploaded after the newest commit: a producer is at work or "
            "died, or the catalog lost commits: sweeps keep them until a newer commit is an hour "
            f"old, or until `tidelog sweep --accept-loss {tally.topic.name}`",
        )
    return proven, doubted


def _is_above(key: str, generation: int) -> bool:
    """Whether a segment or a value has a higher generation; False for a name that is not ours."""
    if key.split("/")[2] not in ("segments", "amendments"):
        return False
    try:
        return layout.segment_generation(key) > generation
    except ValueError:
        return False


def _check_registry(tally: Tally) -> int:
    """The topic is still there, and no head has a floor that its producers could never reach.

    Its generation; a very high one where that cannot be read.
    """
    name = tally.topic.name
    try:
        now = find_topic(tally.log, name)
    except CorruptError as exc:
        tally.add("error", f"registry row of `{name}`", str(exc))
        return sys.maxsize
    if now.incarnation != tally.topic.incarnation:
        raise NotFoundError(f"topic `{name}`: was deleted and made again: verify it again")
    if tally.floor > now.generation:
        tally.add(
            "error",
            f"registry row of `{name}`",
            f"generation {now.generation}, but a head has floor {tally.floor}: nothing can be "
            "appended there",
        )
    return now.generation
