"""What strays show about the catalog: a possible loss, or a proven one.

A row lists every object that a partition no longer needs (``unused_objects``). A **stray** is an
object that fewer partitions name or list than it has events of. Either the others never committed
it, or the catalog has lost that commit: it was damaged, or restored from an older copy. Then the
object is the only copy of acknowledged events. One lost commit looks like a producer that died
before its commit. The contents of strays prove more, without any clock:

- A segment carries the next offset of each of its partitions as its appender knew it, and the run
  before that offset, whichever producer committed it. Three things **prove** that the catalog had
  this commit and lost it: a higher number than the head's; another object at the offset of that
  run; an object of that run which exists, and which the partition neither names nor lists. No
  compile, trim or later commit hides that.
- A copy of a staged segment carries none of this. Its driver puts a witness after its commits
  (``log.producer.staged``). If the witness says that a partition has committed the segment,
  and the partition neither names nor lists it, that is a proof.
- A journal lists the segments that its offsets came from. Offsets above the head's, or from other
  segments than those of the partition's rows, are a proof (see Origins). No compile or later commit
  hides that.
- The key of an update's value contains the newest amendment before it, and the key of a journal the
  epoch of its compiler and its first offset. A number above that of the head or of the ``compile``
  row is a proof. So is a generation above the registry's. None of these ever shrinks.
- Any other stray is a **possible loss**. It is kept for a week from when a sweep notes it
  (``strays``).

A segment of several partitions is a stray for those that neither name nor list it, even if others
name it: the catalog may have been copied between two of its commits. A flush in progress looks the
same until a sweep has raised the floor above it.

No proof depends on dates. The price: if a delayed request stores an object again after a sweep has
deleted it, a stray that was uploaded after that object's commit looks like a proof. That takes a
request that is delayed for longer than the grace period, and a producer that died. The sweep then
refuses, and a person accepts the loss.

Strays are compared with rows that are read after the listing, so nothing in progress counts as
proof. An object that was deleted before its rows were read proves nothing: a sweep deletes objects
before the rows that list them. A person may accept a loss; the row ``accepted`` keeps the date up
to which that holds.

**Origins.** Every offset belongs to one event for good, and each journal lists the segments that
its offsets came from. Compiles carry these lists over. A journal may list other segments than the
partition's rows, or reach past the partition's end. Either proves that the catalog had these
commits and lost them. No later commit or compile hides that. Trimmed offsets have no rows, and
prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tidelog.catalog.update import Decision, Rows, update
from tidelog.codec.journal_file import read_sources
from tidelog.codec.segment import read_known
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.staged import lost_partition
from tidelog.log.topics import find_topic, read_head
from tidelog.log.unused_objects import origin_of, read_unused
from tidelog.model import layout
from tidelog.model.topic import (
    AppenderView,
    Head,
    HeldRow,
    JournalOrigin,
    LossAccepted,
    Run,
    Topic,
    decode_row,
    encode_row,
)
from tidelog.store.base import ObjectInfo, object_exists

__all__ = [
    "LossProof",
    "Losses",
    "accept_losses",
    "accepted_until_ms",
    "find_losses",
    "generation_of",
    "newer_than",
    "raise_doubts",
    "remedy_for_lost",
]


def contradiction(context: Context, topic: Topic, partition: int, info: ObjectInfo) -> str | None:
    """Returns how a journal that no row names contradicts the catalog; None if it does not.

    A journal that does not decode proves nothing, nor do rows whose objects are missing or damaged.
    """
    try:
        sources = _sources_of(context, info.key, info.size)
    except (CorruptError, NotFoundError):
        return None
    if not sources:
        return None
    head, _ = read_head(context, topic, partition)
    end = max(each.base + each.count for each in sources)
    if end > head.next:
        return (
            f"holds events of partition {partition} up to offset {end}, the catalog has them up to "
            f"{head.next}"
        )
    with contextlib.suppress(CorruptError, NotFoundError):  # trimmed since, or rows are lost
        for known in _read_origins(
            context, topic, partition, max(sources[0].base, head.start), end
        ):
            at = _first_difference(sources, known)
            if at is not None:
                return f"has another event at offset {at} of partition {partition} than the catalog"
    return None


def _read_origins(
    context: Context, topic: Topic, partition: int, start: int, end: int
) -> Iterator[Sequence[JournalOrigin]]:
    """Yields, for each row that holds offsets of ``[start, end)``, where they came from."""
    reader = Reader(context, topic, partition)
    at = start
    while at < end:
        runs = reader.runs(at)
        if not runs:
            return
        for run in runs:
            if run.base < end:
                parts = (each.between(start, end) for each in _sources_of_row(context, run))
                yield [part for part in parts if part is not None]
        at = runs[-1].end


def _sources_of_row(context: Context, run: Run) -> Sequence[JournalOrigin]:
    if run.journal is None:
        return [JournalOrigin(run.base, run.count, origin_of(run.object)[0], 0)]
    try:
        return _sources_of(context, run.object, run.byte_end)
    except (CorruptError, NotFoundError):
        return []


def _sources_of(context: Context, key: str, size: int) -> list[JournalOrigin]:
    return read_sources(partial(context.store.get, key), size, f"journal `{key}`")


def _first_difference(ones: Sequence[JournalOrigin], others: Sequence[JournalOrigin]) -> int | None:
    """Returns the first offset that differs between two lists; None if there is none."""
    found = [
        max(one.base, other.base)
        for one in ones
        for other in others
        if _differ(one.between(other.base, other.base + other.count), other)
    ]
    return min(found, default=None)


def _differ(part: JournalOrigin | None, other: JournalOrigin) -> bool:
    return part is not None and part != other.between(part.base, part.base + part.count)


# The end of a segment; for most, it contains the footer and what the appender knew.
_TAIL_BYTES = 64 << 10


def remedy_for_lost(topic: str) -> str:
    """Returns what to do about lost commits; advice that keeps the events comes first."""
    return (
        "restore a newer copy of the catalog, or append their events again with `tidelog topic "
        f"recover {topic}`; only if you can do without them, `tidelog sweep --accept-loss {topic}` "
        "deletes them"
    )


@dataclass(frozen=True, slots=True)
class LossProof:
    """An object that proves that the catalog has lost commits, and how."""

    info: ObjectInfo
    what: str


@dataclass(slots=True)
class Losses:
    """The strays of a topic, by what they show."""

    proofs: list[LossProof] = field(default_factory=list)
    doubts: list[ObjectInfo] = field(default_factory=list)  # possible losses
    committed: list[AppenderView] = field(default_factory=list)  # runs that strays name
    compiling: list[ObjectInfo] = field(default_factory=list)  # perhaps, by the current compiler

    @property
    def newest_ms(self) -> int:
        """Returns the newest date of all these objects; 0 if there are none."""
        infos = [*(proof.info for proof in self.proofs), *self.doubts]
        return max((info.modified_ms for info in infos), default=0)


def newer_than(context: Context, topic: Topic) -> list[ObjectInfo]:
    """Returns objects of a higher generation than the registry's, with one listing per folder."""
    found = [
        info
        for folder in (layout.segments, layout.amendments)
        for info in context.store.list(
            folder(topic.incarnation), f"{folder(topic.incarnation)}{topic.generation:010}0"
        )
        if generation_of(info.key) > topic.generation
    ]
    if found:
        now = find_topic(context, topic.name)  # another sweep may have raised it since
        if now.incarnation != topic.incarnation:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: open it again, or create it")
        found = [info for info in found if generation_of(info.key) > now.generation]
    return found


def find_losses(
    context: Context, topic: Topic, strays: Sequence[ObjectInfo], accepted_ms: int = -1
) -> Losses:
    """Checks every stray: what it proves, or that it is a possible loss.

    Objects that a person has accepted, by the store's dates, do not count as proof.
    """
    check = _Check(context, topic, accepted_ms)
    for info in strays:
        if info.key.startswith(layout.segments(topic.incarnation)):
            check.add_segment(info)
        elif info.key.startswith(layout.amendments(topic.incarnation)):
            check.add_value(info)
        elif info.key.startswith(layout.journals(topic.incarnation)):
            check.add_journal(info)
    return check.finish()


def raise_doubts(losses: Losses, accepted_ms: int) -> Losses:
    """Returns losses in which, if there is any proof, every possible loss of the topic is one too.

    An object that another stray names as committed is lost itself. If the catalog was restored to
    an earlier state, any other stray may be a commit that it lost.
    """
    proven = [proof for proof in losses.proofs if proof.info.modified_ms > accepted_ms]
    if not proven:
        return losses
    committed = {each.object: each for each in losses.committed}
    proofs = list(losses.proofs)
    for info in [*losses.doubts, *losses.compiling]:
        each = committed.get(info.key)
        if each is not None:
            what = f"was committed at offset {each.base} of partition {each.partition}"
        else:
            what = f"may hold such events, since `{proven[0].info.key}` shows a loss"
        proofs.append(LossProof(info, what))
    return Losses(proofs)


def accepted_until_ms(context: Context, topic: Topic) -> int:
    """Returns the store date up to which objects are garbage, whatever they prove; -1 if none."""
    row = context.catalog.get(layout.topic_partition(topic.incarnation, 0), layout.ACCEPTED_ROW)
    if row is None:
        return -1
    what = f"row `{layout.ACCEPTED_ROW}` of `{topic.name}/0`"
    return decode_row(row.value, LossAccepted, what).until_ms


def accept_losses(context: Context, topic: Topic, until_ms: int) -> None:
    """Records that a person accepts the loss of objects up to a date.

    Never pass a date in the future: objects of that time would be deleted unseen.
    """
    where, what = layout.topic_partition(topic.incarnation, 0), f"topic `{topic.name}`"

    def decide(rows: Rows) -> Decision[None]:
        row = rows[layout.ACCEPTED_ROW]
        found = None if row is None else decode_row(row.value, LossAccepted, what)
        if found is not None and found.until_ms >= until_ms:
            return Decision(None)
        value = encode_row(LossAccepted(context.clock.now_ms(), until_ms))
        return Decision(None, [rows.put(layout.ACCEPTED_ROW, value)])

    update(context, where, [layout.ACCEPTED_ROW], decide, what)


class _Check:
    """Checks a topic's strays, with rows that are read when they are first needed."""

    def __init__(self, context: Context, topic: Topic, accepted_ms: int) -> None:
        self._context = context
        self._topic = topic
        self._accepted_ms = accepted_ms
        self._heads: dict[int, Head] = {}
        self._compilers: dict[int, HeldRow] = {}
        # Strays whose run has no row. Whether its object is listed as unused is checked last.
        self._named: list[tuple[ObjectInfo, AppenderView]] = []
        self._found = Losses()

    def add_segment(self, info: ObjectInfo) -> None:
        try:
            known = _read_views(self._context, info)
        except NotFoundError:
            return  # another sweep has deleted it in the meantime
        except CorruptError:
            known = []
        self._found.committed += [each for each in known if each.object]
        what = self._first_proof(known) or self._witness_proof(info)
        if what is not None:
            self._found.proofs.append(LossProof(info, what))
            return
        self._found.doubts.append(info)
        self._named += [(info, each) for each in known if self._may_prove(each)]

    def add_value(self, info: ObjectInfo) -> None:
        try:
            partition, sequence = layout.amendment_place(info.key)
        except ValueError:
            return  # not ours
        if not 0 <= partition < self._topic.partitions or not object_exists(
            self._context.store, info.key
        ):
            return
        amendments = self._head(partition).amendments
        if sequence > amendments:
            what = (
                f"was stored after amendment {sequence} of partition {partition}, of which the "
                f"catalog knows {amendments}"
            )
            self._found.proofs.append(LossProof(info, what))
        else:
            self._found.doubts.append(info)

    def add_journal(self, info: ObjectInfo) -> None:
        try:
            partition, epoch = layout.journal_place(info.key)
            base = layout.journal_base(info.key)
        except ValueError:
            return  # not ours
        if not 0 <= partition < self._topic.partitions or not object_exists(
            self._context.store, info.key
        ):
            return
        compiler = self._compiler(partition)
        end = self._head(partition).next
        if base >= end:
            what = (
                f"holds events of partition {partition} from offset {base}, the catalog has them "
                f"up to {end}"
            )
            self._found.proofs.append(LossProof(info, what))
        elif (found := contradiction(self._context, self._topic, partition, info)) is not None:
            self._found.proofs.append(LossProof(info, found))
        elif epoch > compiler.epoch:
            what = (
                f"was compiled under epoch {epoch} of partition {partition}, the catalog is at "
                f"{compiler.epoch}"
            )
            self._found.proofs.append(LossProof(info, what))
        elif epoch < compiler.epoch or not compiler.owner:
            self._found.doubts.append(info)
        else:  # if the catalog was restored, an owner of the same epoch may have lost it
            self._found.compiling.append(info)

    def finish(self) -> Losses:
        """Adds the proofs that need rows which are read after all strays; returns the losses."""
        listed: dict[int, set[str]] = {}
        proven: set[str] = set()
        for info, known in self._named:
            if known.partition not in listed:
                rows = read_unused(self._context, self._topic, known.partition)
                listed[known.partition] = {key for row in rows for key in row.objects}
            if info.key not in proven and self._is_lost(known, listed[known.partition], info):
                proven.add(info.key)
                what = (
                    f"was stored after `{known.object}` was committed at offset {known.base} of "
                    f"partition {known.partition}, and the catalog does not know that object"
                )
                self._found.proofs.append(LossProof(info, what))
        self._found.doubts = [info for info in self._found.doubts if info.key not in proven]
        return self._found

    def _first_proof(self, known: Iterable[AppenderView]) -> str | None:
        return next((what for each in known if (what := self._proof(each)) is not None), None)

    def _proof(self, known: AppenderView) -> str | None:
        """Returns how a segment proves that the catalog lost commits; None if it does not."""
        if not 0 <= known.partition < self._topic.partitions:
            return None
        head = self._head(known.partition)
        where = f"partition {known.partition}"
        if known.next > head.next:
            return (
                f"was stored when {where} had events up to offset {known.next}, the catalog has "
                f"them up to {head.next}"
            )
        row = self._run(known)
        if row is None or row.object == known.object:
            return None
        return (
            f"was stored after offset {known.base} of {where} was given to `{known.object}`, and "
            "the catalog has given it to another object"
        )

    def _witness_proof(self, info: ObjectInfo) -> str | None:
        """Returns how a witness proves that the catalog lost a commit of a staged segment."""
        partition = lost_partition(self._context, self._topic, info)
        if partition is None:
            return None
        return f"was committed to partition {partition}, and the catalog does not know of it"

    def _may_prove(self, known: AppenderView) -> bool:
        """Returns whether it names a run without a row, so that its object must be listed or
        deleted.
        """
        is_here = 0 <= known.partition < self._topic.partitions
        return is_here and known.base >= 0 and self._run(known) is None

    def _run(self, known: AppenderView) -> Run | None:
        """Returns the run at the offset that a segment names, by the current rows."""
        if known.base < 0:
            return None
        partition = layout.topic_partition(self._topic.incarnation, known.partition)
        row = self._context.catalog.get(partition, layout.run_row(known.base))
        return None if row is None else decode_row(row.value, Run, f"row `{row.row}`")

    def _is_lost(self, known: AppenderView, listed: Collection[str], stray: ObjectInfo) -> bool:
        """Returns whether the object of a run exists, and the partition no longer knows it.

        Dates do not count: a restored store has others, and clocks can be set back. So an object
        that a request stored again, after a sweep had deleted it, looks the same.
        """
        if known.object in listed or known.object == stray.key:
            return False
        try:
            return self._accepted_ms < self._context.store.head(known.object).modified_ms
        except NotFoundError:
            return False

    def _head(self, partition: int) -> Head:
        if partition not in self._heads:
            self._heads[partition] = read_head(self._context, self._topic, partition)[0]
        return self._heads[partition]

    def _compiler(self, partition: int) -> HeldRow:
        if partition not in self._compilers:
            where = layout.topic_partition(self._topic.incarnation, partition)
            row = self._context.catalog.get(where, layout.COMPILE_ROW)
            what = f"compile row of `{self._topic.name}/{partition}`"
            found = HeldRow("", 0) if row is None else decode_row(row.value, HeldRow, what)
            self._compilers[partition] = found
        return self._compilers[partition]


def _read_views(context: Context, info: ObjectInfo) -> list[AppenderView]:
    """Returns what a segment carries. Raises ``CorruptError`` and ``NotFoundError``."""
    what = f"segment `{info.key}`"
    start = max(0, info.size - _TAIL_BYTES)
    context.store.head(info.key)  # a cached object may be deleted
    try:
        return read_known(context.store.get(info.key, start, info.size), what)
    except CorruptError:
        if not start:
            raise
    return read_known(context.store.get(info.key, 0, info.size), what)


def generation_of(key: str) -> int:
    """Returns the segment generation of a segment or a value; -1 for a name that is not ours."""
    try:
        return layout.segment_generation(key)
    except ValueError:
        return -1
