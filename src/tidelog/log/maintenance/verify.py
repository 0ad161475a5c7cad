"""Verifying a topic: every layer is read and held against the others.

It changes nothing, runs beside everything else, and collects what it finds instead of raising: an
*error* is damage that a person must look at, a *warning* may be, a *note* is not. What looks like
damage is read once more before it is reported, as it may have been trimmed or compiled meanwhile.

The layers: the objects of the topic are listed; then, for each partition, the head, the rows of
producers, the amendments with their values, the rows of journals and runs, which must tile from the
start to the next offset, the bytes of each of them with their checksums, counts, offsets, times and
id indexes, and the slot rows, which must be those of journals and runs; last, the objects that no
row names. Rows that trims and compiles left behind are no damage.

An object that no row needs is a note where rows list it as unused: a sweep deletes it. A stray,
which fewer partitions name or list than it has events of, is an error where it proves that the
catalog has lost commits, and a warning where it may be a loss (``losses``). A producer that is at
work, or died between upload and commit, leaves the same behind, so this alone is a warning. It ends
when a sweep deletes the object, a week after it has noted it, or when a person accepts it. What a
person has accepted is a note.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.maintenance.findings import Finding, Severity, VerifyTally
from tidelog.log.maintenance.losses import (
    LossProof,
    accepted_until_ms,
    find_losses,
    raise_doubts,
    remedy_for_lost,
)
from tidelog.log.maintenance.unused import Uses, is_shared, read_unused
from tidelog.log.maintenance.verify_partition import PartitionCheck
from tidelog.log.topics import find_topic
from tidelog.model import layout
from tidelog.model.partition_rows import Amendment, Run, decode_fields
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

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
    warnings: int = 0
    possible_losses: int = 0  # orphans that may be the only copy of events
    proven_losses: int = 0  # orphans that prove that the catalog has lost commits
    findings_cut: dict[Severity, int] = field(default_factory=dict)  # that `findings` leaves out


def verify_topic(
    context: Context,
    topic: Topic,
    pool: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read everything that belongs to a topic; what was found.

    ``progress`` is called after each run with the bytes that were read. ``NotFoundError`` when the
    topic is deleted, ``UnavailableError`` as usual.
    """
    listed = context.store.list(f"topics/{topic.incarnation}/")  # before the rows that name them
    tally = VerifyTally(context, topic, {info.key: info for info in listed}, progress)
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
    """The objects that no row names, and those that too few partitions name or list.

    Also no row that was committed since its partition was read.
    """
    apart = (
        layout.sinks(tally.topic.incarnation, "")[:-1],  # named by manifests, not by runs
        layout.witnesses(tally.topic.incarnation),  # no events
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
    """Note what was committed, amended or compiled since a partition was read, in order of keys."""
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
    """Those that fewer partitions name or list than they are for."""
    uses = Uses(info.key for info in orphans)
    for partition, keys in tally.uses.items():
        uses.add(partition, keys, tally.starts.get(partition, sys.maxsize))
    return [info for info in orphans if not uses.is_settled(info.key)]


def _check_orphans(
    tally: VerifyTally, orphans: list[ObjectInfo], torn: list[ObjectInfo], generation: int
) -> tuple[int, int]:
    """How many objects prove a loss, and how many may be one; reports each."""
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
            tally.add("error", where, f"{proofs[info.key]}, and {_unnamed(tally, info)}: {lost}")
            continue
        if info.key in doubts and not is_accepted:
            doubted += 1
            what = (
                f"{info.size} bytes, {_unnamed(tally, info)} or says that it is not needed: a "
                "producer is at work or died before its commit, or the catalog has lost this "
                "commit; sweeps keep it for a week: if the catalog was restored from a copy, "
                f"{remedy_for_lost(tally.topic.name)}"
            )
            tally.add("warning", where, what)
            continue
        if info.key not in tally.named:
            tally.add("note", where, f"no row needs it, {info.size} bytes: a sweep decides")
    return proven, doubted


def _unnamed(tally: VerifyTally, info: ObjectInfo) -> str:
    return f"{'not every partition' if info.key in tally.named else 'no row'} names it"


def _is_above(key: str, generation: int) -> bool:
    """Whether a segment or a value has a higher generation; False for a name that is not ours."""
    if key.split("/")[2] not in ("segments", "amendments"):
        return False
    try:
        return layout.segment_generation(key) > generation
    except ValueError:
        return False


def _check_registry(tally: VerifyTally) -> int:
    """The topic is still there, and no head has a floor that its producers could never reach.

    Its generation; a very high one where that cannot be read.
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
