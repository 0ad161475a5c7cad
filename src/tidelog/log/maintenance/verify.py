"""Verifies a topic: reads every layer and checks it against the others.

It changes nothing, can run at any time, and collects findings instead of raising. An *error* is
damage that a person must look at, a *warning* may be damage, a *note* is not. What looks like
damage is read once more before it is reported, since it may have been trimmed or compiled in the
meantime.

The layers:

- the objects of the topic are listed first
- for each partition: the head; the rows of producers; the amendments with their values; the rows of
  journals and runs, which must cover every offset from the start to the next; the bytes of each of
  them, with checksums, counts, offsets, times and id indexes; and the slot rows, which must match
  the journals and runs
- last, the objects that no row names

Rows that trims and compiles left behind are not damage.

An object that no row needs is a note if rows list it as unused: a sweep deletes it. A stray, which
fewer partitions name or list than it has events of, is an error if it proves that the catalog has
lost commits, and a warning if it may be a loss (``lost_commits``). A producer that is still
working, or that died between upload and commit, leaves the same behind, so this alone is a warning.
The warning ends when a sweep deletes the object, a week after noting it, or when a person accepts
the loss. What a person has accepted is a note.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.maintenance.lost_commits import (
    LossProof,
    accepted_until_ms,
    find_losses,
    raise_doubts,
    remedy_for_lost,
)
from tidelog.log.maintenance.verify_bytes import Finding, Severity, VerifyTally, read_ahead
from tidelog.log.maintenance.verify_partition import PartitionCheck
from tidelog.log.topics import find_topic
from tidelog.log.unused_objects import ObjectUses, is_shared, read_unused
from tidelog.model import layout
from tidelog.model.topic import Amendment, Run, Topic, decode_fields
from tidelog.store.base import ObjectInfo

__all__ = ["VerifyReport", "verify_topic"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was found. Runs, events and bytes are those that are readable.

    Runs include journals.
    """

    topic: str
    partitions: int
    runs: int
    events: int
    bytes: int
    objects: int
    orphans: int  # objects that no row names, or not yet
    orphan_bytes: int
    errors: int
    notes: int
    findings: tuple[Finding, ...]  # the first ones of each severity
    journals: int = 0
    amendments: int = 0  # not trimmed
    warnings: int = 0
    possible_losses: int = 0  # orphans that may be the only copy of events
    proven_losses: int = 0  # orphans that prove that the catalog has lost commits
    # How many `findings` leaves out.
    findings_cut: dict[Severity, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Returns whether no error was found; warnings and notes do not count."""
        return not self.errors


def verify_topic(
    context: Context,
    topic: Topic,
    pool: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Reads everything that belongs to a topic; returns what was found.

    Calls ``progress`` with the bytes read after each run. Raises ``NotFoundError`` if the topic is
    deleted, and ``UnavailableError``.
    """
    listed = context.store.list(f"topics/{topic.incarnation}/")  # before the rows that name them
    tally = VerifyTally(context, topic, {info.key: info for info in listed}, progress)
    read_ahead(tally)
    for partition in range(topic.partitions):
        PartitionCheck(tally, partition, pool).run()
    generation = _check_registry(tally)
    orphans, torn = _orphans(tally)
    proven, doubted = _check_orphans(tally, orphans, torn, generation)
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
        findings_cut=tally.cut,
    )


def _orphans(tally: VerifyTally) -> tuple[list[ObjectInfo], list[ObjectInfo]]:
    """Returns the objects that no row names, and those that too few partitions name or list.

    Also checks rows that were committed after their partition was read.
    """
    apart = (
        layout.sinks(tally.topic.incarnation, "")[:-1],  # manifests name them, not runs
        layout.witnesses(tally.topic.incarnation),  # without events
    )

    def unnamed() -> list[ObjectInfo]:
        return [
            info
            for key, info in tally.objects.items()
            if key not in tally.named and not key.startswith(apart)
        ]

    def torn() -> list[ObjectInfo]:
        shared = [
            info for key, info in tally.objects.items() if key in tally.named and is_shared(key)
        ]
        return _strays(tally, shared)

    if unnamed() or torn():
        for partition, after in tally.nexts.items():
            _name_late(tally, partition, after)
    return unnamed(), torn()


def _name_late(tally: VerifyTally, partition: int, after: int) -> None:
    """Notes what was committed, amended or compiled after a partition was read, in key order."""
    where = layout.topic_partition(tally.topic.incarnation, partition)
    kinds: tuple[tuple[str, str, type[Amendment | Run]], ...] = (
        ("amend/", "amend0", Amendment),
        ("journal/", "journal0", Run),
        (layout.run_row(after), "run0", Run),
    )
    for first, end, kind in kinds:
        for row in tally.context.catalog.scan(where, first, end):
            with contextlib.suppress(CorruptError):
                key = decode_fields(row.value, kind, row.row).object
                if key is not None:
                    tally.name(partition, key)
    with contextlib.suppress(CorruptError):
        for listed in read_unused(tally.context, tally.topic, partition):
            tally.list_unused(partition, listed.objects)


def _strays(tally: VerifyTally, orphans: list[ObjectInfo]) -> list[ObjectInfo]:
    """Returns the objects that fewer partitions name or list than they have events of."""
    uses = ObjectUses(info.key for info in orphans)
    for partition, keys in tally.uses.items():
        uses.add(partition, keys, tally.starts.get(partition, sys.maxsize))
    return [info for info in orphans if not uses.is_settled(info.key)]


def _check_orphans(
    tally: VerifyTally, orphans: list[ObjectInfo], torn: list[ObjectInfo], generation: int
) -> tuple[int, int]:
    """Reports each object; returns how many prove a loss, and how many may be one."""
    strays = [*_strays(tally, orphans), *torn]
    try:
        until_ms = accepted_until_ms(tally.context, tally.topic)
        losses = find_losses(tally.context, tally.topic, strays, until_ms)
    except CorruptError as exc:
        tally.add("error", f"topic `{tally.topic.name}`", str(exc))
        return 0, 0
    what = f"has a generation above {generation}, which is the registry's"
    newer = {info.key: what for info in orphans if _is_above(info.key, generation)}
    losses.proofs += [LossProof(info, what) for info in orphans if info.key in newer]
    losses = raise_doubts(losses, until_ms)
    proofs = {proof.info.key: proof.what for proof in losses.proofs} | newer
    doubts = {info.key for info in losses.doubts} - proofs.keys()
    proven = doubted = 0
    for info in [*orphans, *torn]:
        where = f"object `{info.key}`"
        is_accepted = info.modified_ms <= until_ms
        if info.key in proofs and not is_accepted:
            proven += 1
            lost = f"the catalog has lost commits: {remedy_for_lost(tally.topic.name)}"
            tally.add("error", where, f"{proofs[info.key]}, and {_missing(tally, info)}: {lost}")
            continue
        if info.key in doubts and not is_accepted:
            doubted += 1
            what = (
                f"{info.size} bytes, {_missing(tally, info)} or says that it is not needed: a "
                "producer is at work or died before its commit, or the catalog has lost this "
                "commit; sweeps keep it for a week: if the catalog was restored from a copy, "
                f"{remedy_for_lost(tally.topic.name)}"
            )
            tally.add("warning", where, what)
            continue
        if info.key not in tally.named:
            what = f"no row needs it, {info.size} bytes: `tidelog sweep` deletes it once it is old"
            tally.add("note", where, what)
    return proven, doubted


def _missing(tally: VerifyTally, info: ObjectInfo) -> str:
    return f"{'not every partition' if info.key in tally.named else 'no row'} names it"


def _is_above(key: str, generation: int) -> bool:
    """Returns whether a segment or value has a higher generation; False for a foreign name."""
    if key.split("/")[2] not in ("segments", "amendments"):
        return False
    try:
        return layout.segment_generation(key) > generation
    except ValueError:
        return False


def _check_registry(tally: VerifyTally) -> int:
    """Checks that the topic exists, and that no head has a floor its producers could never reach.

    Returns its generation; a very high one if it cannot be read.
    """
    name = tally.topic.name
    try:
        now = find_topic(tally.context, name)
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
