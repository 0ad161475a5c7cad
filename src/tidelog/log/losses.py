"""What objects that no row names say about the catalog: garbage, a possible loss, or a proven one.

A catalog that was damaged, or restored from an older copy, has lost commits. Then the objects of
these commits are the only copy of acknowledged events, and look like garbage. What they carry tells
them apart, without any clock:

- a segment carries the next offset of each of its partitions, as its appender knew it, and the
  appender's own last run there; an update's value has the newest amendment before it in its key.
  A number above that of the head, or another run at that offset, **proves** that the catalog went
  back. So do a generation above the registry's, and a journal's epoch above the ``compile`` row's:
  none of these ever shrinks
- a segment which the rows rule out as committed (no run was compiled or trimmed since, or the
  partition ends before its last event) was never committed: its producer died, or the catalog lost
  exactly this commit. It is a **possible loss** while the newest object that a row names is not
  newer by the grace. The same goes for a value after which nothing was amended
- all else was committed once, and is garbage now

What was found is compared with rows that are read after the listing, so nothing that is under way
counts as proof. A person may accept a loss; the row ``accepted`` remembers up to which date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tidelog.codec.segment import read_known
from tidelog.errors import CorruptError, NotFoundError, UnavailableError
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.hold import put_held
from tidelog.log.topics import find_topic, read_head
from tidelog.model import layout
from tidelog.model.run import Head, HeldRow, Known, LossAccepted, Run, decode_row, encode_row
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["Losses", "Proof", "accept_losses", "accepted_until_ms", "find_losses", "newer_than"]

_TAIL_BYTES = 64 << 10  # of a segment: what its appender knew and the footer, of most
_SAMPLES = 200  # segments that are looked into although newer commits make a loss unlikely


@dataclass(frozen=True, slots=True)
class Proof:
    """An object that shows that the catalog has lost commits, and how."""

    info: ObjectInfo
    what: str


@dataclass(slots=True)
class Losses:
    """What was found."""

    proofs: list[Proof] = field(default_factory=list)
    doubts: list[ObjectInfo] = field(default_factory=list)  # possible losses

    @property
    def newest_ms(self) -> int:
        """The newest date of all these objects; 0 for none."""
        infos = [*(proof.info for proof in self.proofs), *self.doubts]
        return max((info.modified_ms for info in infos), default=0)


def newer_than(log: Log, topic: Topic) -> list[ObjectInfo]:
    """Objects of a higher generation than the registry knows; one listing for each folder."""
    found = [
        info
        for folder in (layout.segments, layout.amendments)
        for info in log.store.list(
            folder(topic.incarnation), f"{folder(topic.incarnation)}{topic.generation:010}0"
        )
        if _generation(info.key) > topic.generation
    ]
    if found:
        now = find_topic(log, topic.name)  # another sweep may have raised it since
        if now.incarnation != topic.incarnation:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: open it again, or create it")
        found = [info for info in found if _generation(info.key) > now.generation]
    return found


def find_losses(
    log: Log,
    topic: Topic,
    unnamed: Sequence[ObjectInfo],
    may_doubt: Callable[[ObjectInfo], bool],
    samples: int = _SAMPLES,
) -> Losses:
    """Look at objects that no row names.

    ``may_doubt`` says whether one that was never committed is a possible loss, by its date. Of the
    other segments only a sample is read, for proofs.
    """
    check = _Check(log, topic)
    segments = []
    for info in unnamed:
        if info.key.startswith(layout.segments(topic.incarnation)):
            segments.append(info)
        elif info.key.startswith(layout.amendments(topic.incarnation)):
            check.add_value(info, may_doubt(info))
        elif info.key.startswith(layout.journals(topic.incarnation)):
            check.add_journal(info)
    others = []
    for info in segments:
        if may_doubt(info):
            check.add_segment(info, True)
        else:
            others.append(info)
    for info in others[:: max(1, -(-len(others) // samples))]:
        check.add_segment(info, False)
    return check.found


def accepted_until_ms(log: Log, topic: Topic) -> int:
    """Objects that the store dates up to here are garbage, whatever they prove; -1 for none."""
    row = log.catalog.get(layout.topic_partition(topic.incarnation, 0), layout.ACCEPTED_ROW)
    if row is None:
        return -1
    what = f"row `{layout.ACCEPTED_ROW}` of `{topic.name}/0`"
    return decode_row(row.value, LossAccepted, what).until_ms


def accept_losses(log: Log, topic: Topic, until_ms: int) -> None:
    """Remember that a person accepts the loss of objects up to a date."""
    where, what = layout.topic_partition(topic.incarnation, 0), f"topic `{topic.name}`"
    for delay_s in RACE.delays_s(log.random):
        row = log.catalog.get(where, layout.ACCEPTED_ROW)
        found = None if row is None else decode_row(row.value, LossAccepted, what)
        if found is not None and found.until_ms >= until_ms:
            return
        value = encode_row(LossAccepted(log.clock.now_ms(), until_ms))
        version = None if row is None else row.version
        if put_held(log, where, layout.ACCEPTED_ROW, value, version, what) is not None:
            return
        log.clock.sleep(delay_s)
    raise UnavailableError(f"{what}: too many sweeps at once: sweep again")


class _Check:
    """One look at a topic's objects, with rows that are read when they are first needed."""

    def __init__(self, log: Log, topic: Topic) -> None:
        self._log = log
        self._topic = topic
        self._heads: dict[int, Head] = {}
        self._epochs: dict[int, int] = {}
        self.found = Losses()

    def add_segment(self, info: ObjectInfo, may_doubt: bool) -> None:
        """``may_doubt``: it is also looked at as a possible loss."""
        try:
            known = _known(self._log, info)
        except NotFoundError:
            return  # another sweep has deleted it meanwhile
        except CorruptError:
            known = None
        what = None if known is None else self._first_proof(known)
        if what is not None:
            self.found.proofs.append(Proof(info, what))
        elif may_doubt and (known is None or not all(map(self._may_be_gone, known))):
            self.found.doubts.append(info)

    def add_value(self, info: ObjectInfo, may_doubt: bool) -> None:
        try:
            partition, sequence = layout.amendment_place(info.key)
        except ValueError:
            return  # not ours
        if not 0 <= partition < self._topic.partitions:
            return
        amendments = self._head(partition).amendments
        if sequence > amendments:
            what = (
                f"was stored after amendment {sequence} of partition {partition}, of which the "
                f"catalog knows {amendments}"
            )
            self.found.proofs.append(Proof(info, what))
        elif sequence == amendments and may_doubt:
            self.found.doubts.append(info)

    def add_journal(self, info: ObjectInfo) -> None:
        try:
            partition, epoch = layout.journal_place(info.key)
        except ValueError:
            return  # not ours
        if 0 <= partition < self._topic.partitions and epoch > self._epoch(partition):
            what = (
                f"was compiled under epoch {epoch} of partition {partition}, the catalog is at "
                f"{self._epoch(partition)}"
            )
            self.found.proofs.append(Proof(info, what))

    def _first_proof(self, known: Iterable[Known]) -> str | None:
        return next((what for each in known if (what := self._proof(each)) is not None), None)

    def _proof(self, known: Known) -> str | None:
        """How a segment shows that the catalog went back; None if it does not."""
        if not 0 <= known.partition < self._topic.partitions:
            return None
        head = self._head(known.partition)
        where = f"partition {known.partition}"
        if known.next > head.next:
            return (
                f"was stored when {where} had events up to offset {known.next}, the catalog has "
                f"them up to {head.next}"
            )
        if known.base < max(head.start, head.journaled):
            return None
        partition = layout.topic_partition(self._topic.incarnation, known.partition)
        row = self._log.catalog.get(partition, layout.run_row(known.base))
        if (
            row is not None
            and decode_row(row.value, Run, f"row `{row.row}`").object == known.object
        ):
            return None
        head, _ = read_head(self._log, self._topic, known.partition)
        self._heads[known.partition] = head
        if known.base < max(head.start, head.journaled):
            return None  # trimmed or compiled meanwhile
        return (
            f"was stored after offset {known.base} of {where} was given to `{known.object}`, and "
            "the catalog has given it to another object"
        )

    def _may_be_gone(self, known: Known) -> bool:
        """Whether it may have been committed, and compiled or trimmed since."""
        if not 0 <= known.partition < self._topic.partitions:
            return False
        head = self._head(known.partition)
        is_removed = known.next < max(head.start, head.journaled)
        return is_removed and known.next + known.count <= head.next

    def _head(self, partition: int) -> Head:
        if partition not in self._heads:
            self._heads[partition] = read_head(self._log, self._topic, partition)[0]
        return self._heads[partition]

    def _epoch(self, partition: int) -> int:
        if partition not in self._epochs:
            where = layout.topic_partition(self._topic.incarnation, partition)
            row = self._log.catalog.get(where, layout.COMPILE_ROW)
            what = f"compile row of `{self._topic.name}/{partition}`"
            self._epochs[partition] = decode_row(row.value, HeldRow, what).epoch if row else 0
        return self._epochs[partition]


def _known(log: Log, info: ObjectInfo) -> list[Known]:
    """What a segment carries. ``CorruptError``, ``NotFoundError``."""
    what = f"segment `{info.key}`"
    start = max(0, info.size - _TAIL_BYTES)
    try:
        return read_known(log.store.get(info.key, start, info.size), what)
    except CorruptError:
        if not start:
            raise
    return read_known(log.store.get(info.key, 0, info.size), what)


def _generation(key: str) -> int:
    """The generation of a segment or a value; -1 for a name that is not ours."""
    try:
        return layout.segment_generation(key)
    except ValueError:
        return -1
