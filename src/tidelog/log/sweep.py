"""Sweeping: what nobody refers to any more is deleted. No threads and no locks here.

For each topic that is ready:

1. its segment generation is raised in the registry row, by a conditional write: from here on
   segments are uploaded under the new one
2. the floor is raised to that generation in every ``head``, by conditional writes: a commit that
   was under way fails, and no segment of an older generation can be committed any more
3. all references are read: every run row of every partition; a row of an unknown kind, or one that
   does not decode, makes the sweep refuse this topic
4. rows that trims left behind are deleted
5. segments below the floor that no row names are deleted, if they are older than the grace
6. rows of unnamed producers that were not seen for a week are deleted

Then, for topics that are no more:

7. the incarnations that have objects are listed
8. the registry is read, after that: objects appear only once a topic is ready, so an incarnation
   that has objects and no row was deleted, and its heads are closed for good
9. its objects are deleted, if they are older than the grace

| dies after | what is on disk                          | who repairs it                          |
|------------|------------------------------------------|-----------------------------------------|
| 1          | a new generation; all else as it was     | nobody needs to                         |
| 2, partly  | some heads refuse older segments         | producers upload anew where they must   |
| 2, 3       | the same in every head                   | the same                                |
| 4, 5, 6    | fewer rows, fewer objects                | the next sweep goes on                  |
| 7, 8, 9    | the same                                 | the next sweep goes on                  |

Why nothing is lost: a run of an old generation was committed before its head's floor was raised,
and then step 3 sees its row, or its commit expects a version of the head that never comes again.
This holds however long a producer stalls and however many sweeps run at once, whatever the clocks
say; the grace only spares objects that somebody may still look for. A floor is at most the
generation in the registry, since step 1 goes before step 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from tidelog.catalog.base import Delete, Put, Row
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.base import Log
from tidelog.log.topics import list_topics
from tidelog.log.trim import RACE, raise_head, remove_trimmed
from tidelog.model import layout
from tidelog.model.run import Head, ProducerState, Run, decode_row, encode_row
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["PRODUCER_EXPIRES_MS", "Refused", "SweepReport", "sweep_home"]

PRODUCER_EXPIRES_MS = 7 * 24 * 3600 * 1000  # an unnamed producer that was silent so long is gone
_DELETES_AT_ONCE = 1_000  # objects; what S3 takes in one request
_TOPICS = "topics/"
_INCARNATION = re.compile(r"[0-9a-f]{32}")
# Whether rows of a kind name segments. What a sink has staged is its own, and no sweep looks there.
_REFERRING = {
    "amend": False,
    "compile": False,
    "head": False,
    "journal": False,
    "producer": False,
    "run": True,
    "sink": False,
    "slot": False,
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A topic that was left alone, and why."""

    topic: str
    error: TidelogError


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found and did."""

    topics: int = 0  # that were swept to the end
    objects_seen: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0  # would have been deleted but for the grace
    runs_removed: int = 0  # rows that trims had left behind
    producers_removed: int = 0  # rows of unnamed producers
    refused: tuple[Refused, ...] = ()


@dataclass(slots=True)
class _Tally:
    """The report in the making."""

    topics: int = 0
    objects_seen: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0
    runs_removed: int = 0
    producers_removed: int = 0
    refused: list[Refused] = field(default_factory=list)

    def report(self) -> SweepReport:
        values = {name: getattr(self, name) for name in self.__slots__}
        return SweepReport(**values | {"refused": tuple(self.refused)})


@dataclass(slots=True)
class _Rows:
    """What the rows of a topic say."""

    objects: set[str] = field(default_factory=set)  # that a run names
    starts: dict[int, int] = field(default_factory=dict)  # of partitions with rows below them
    expired: list[tuple[int, Row]] = field(default_factory=list)  # producers, by partition


class _UnknownRowError(InvalidError):
    """A row whose references nobody here can tell."""


def sweep_home(log: Log, grace_ms: int) -> SweepReport:
    """Delete what is not referred to and older than the grace, in all topics.

    Safe at any time, beside producers, trims and other sweeps. ``InvalidError`` for a negative
    grace; a topic that cannot be swept is reported, and the others are.
    """
    if grace_ms < 0:
        raise InvalidError(f"sweep: a grace of {grace_ms} ms: give 0 or more")
    tally = _Tally()
    for name in [topic.name for topic in list_topics(log)]:
        try:
            _sweep_topic(log, name, grace_ms, tally)
        except NotFoundError:
            continue  # deleted meanwhile; what it left is found by its incarnation
        except (CorruptError, _UnknownRowError) as exc:
            tally.refused.append(Refused(name, exc))
    _sweep_deleted(log, grace_ms, tally)
    return tally.report()


def _sweep_topic(log: Log, name: str, grace_ms: int, tally: _Tally) -> None:
    topic = _raise_generation(log, name)
    if topic is None:
        return
    floor = topic.generation
    heads = {p: _raise_floor(log, topic, p, floor) for p in range(topic.partitions)}
    rows = _Rows()
    for partition, head in heads.items():
        _read_rows(log, topic, partition, head, rows)
    for partition, start in rows.starts.items():
        tally.runs_removed += remove_trimmed(log, topic, partition, start).runs
    segments = _seen(log, layout.segments(topic.incarnation), tally)
    garbage = (
        info
        for info in segments
        if _generation(info.key, floor) < floor and info.key not in rows.objects
    )
    _delete_old(log, garbage, grace_ms, tally)
    for partition, row in rows.expired:
        tally.producers_removed += _remove_producer(log, topic, partition, row)
    tally.topics += 1


def _raise_generation(log: Log, name: str) -> Topic | None:
    """Step 1: the topic with its new generation; None when it is not ready.

    After a conflict or a lost reply it is enough that the generation has grown, be it by this
    sweep or by another one.
    """
    before: Topic | None = None
    for delay_s in RACE.delays_s(log.random):
        row = log.catalog.get(layout.REGISTRY, layout.topic_row(name))
        if row is None:
            return None
        topic = decode_row(row.value, Topic, f"registry row `{row.row}`")
        if topic.state != "ready":
            return None  # no objects yet, or `topic delete` removes them
        if before is not None and _has_grown(before, topic):
            return topic
        before = topic
        raised = msgspec.structs.replace(topic, generation=topic.generation + 1)
        try:
            change = Put(row.row, encode_row(raised), expect=row.version)
            log.catalog.write(layout.REGISTRY, change, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            log.clock.sleep(delay_s)
        else:
            return raised
    raise UnavailableError(f"topic `{name}`: too many writers at once: sweep again")


def _has_grown(before: Topic, now: Topic) -> bool:
    return now.incarnation == before.incarnation and now.generation > before.generation


def _raise_floor(log: Log, topic: Topic, partition: int, floor: int) -> Head:
    """Step 2, for one partition: its head, which refuses older segments from now on."""

    def raised(head: Head) -> Head:
        return msgspec.structs.replace(head, floor=max(head.floor, floor))

    return raise_head(log, topic, partition, raised)[1]


def _read_rows(log: Log, topic: Topic, partition: int, head: Head, rows: _Rows) -> None:
    """Step 3, for one partition. Slot rows are passed over: there are many, and they name none."""
    where = layout.topic_partition(topic.incarnation, partition)
    now_ms = log.clock.now_ms()
    for part in (("", "slot/"), ("slot0", None)):
        for row in log.catalog.scan(where, *part):
            what = f"row `{row.row}` of `{topic.name}/{partition}`"
            if _refers(row, what):
                run = decode_row(row.value, Run, what)
                if run.end > head.start:
                    rows.objects.add(run.object)
                else:
                    rows.starts[partition] = head.start
            elif now_ms - _seen_ms(row, what, now_ms) > PRODUCER_EXPIRES_MS:
                rows.expired.append((partition, row))


def _refers(row: Row, what: str) -> bool:
    """Whether a row of this kind names an object; refused when nobody here can tell."""
    kind = row.row.partition("/")[0]
    if kind not in _REFERRING or kind not in layout.TOPIC_ROW_KINDS:
        raise _UnknownRowError(
            f"{what}: is of a kind that this version does not know, so it cannot tell what is "
            "referred to: sweep with the version that wrote it"
        )
    return _REFERRING[kind]


def _seen_ms(row: Row, what: str, otherwise_ms: int) -> int:
    """When an unnamed producer last wrote its row; other rows do not expire."""
    if not row.row.startswith(layout.producer_row("~")):
        return otherwise_ms
    return decode_row(row.value, ProducerState, what).seen_ms


def _generation(key: str, unknown: int) -> int:
    """The generation of a segment; ``unknown`` for a name that is not ours."""
    try:
        return layout.segment_generation(key)
    except ValueError:
        return unknown


def _seen(log: Log, prefix: str, tally: _Tally) -> Iterator[ObjectInfo]:
    for info in log.store.list(prefix):
        tally.objects_seen += 1
        yield info


def _delete_old(log: Log, garbage: Iterable[ObjectInfo], grace_ms: int, tally: _Tally) -> None:
    """Steps 5 and 9: delete what is older than the grace, in batches."""
    batch: list[ObjectInfo] = []

    def delete() -> None:
        if batch:
            log.store.delete([info.key for info in batch])
            tally.objects_deleted += len(batch)
            tally.bytes_deleted += sum(info.size for info in batch)
            batch.clear()

    for info in garbage:
        if log.clock.now_ms() - info.modified_ms < grace_ms:
            tally.objects_young += 1
            continue
        batch.append(info)
        if len(batch) == _DELETES_AT_ONCE:
            delete()
    delete()


def _remove_producer(log: Log, topic: Topic, partition: int, row: Row) -> bool:
    """Step 6, for one row: whether it went. One that has changed belongs to a living producer."""
    where = layout.topic_partition(topic.incarnation, partition)
    try:
        log.catalog.write(where, Delete(row.row, expect=row.version), write_id=log.ids.new())
    except (ConflictError, UnknownOutcomeError):
        return False  # if the row is still there, the next sweep meets it again
    return True


def _sweep_deleted(log: Log, grace_ms: int, tally: _Tally) -> None:
    """Steps 7 to 9."""
    stored = list(_incarnations(log))
    known = {topic.incarnation for topic in list_topics(log)}  # read after the listing, on purpose
    for incarnation in stored:
        if incarnation not in known:
            objects = _seen(log, f"{_TOPICS}{incarnation}/", tally)
            _delete_old(log, objects, grace_ms, tally)


def _incarnations(log: Log) -> Iterator[str]:
    """The incarnations that have objects: one listing for each, from its end to the next one."""
    after = ""
    while (info := next(iter(log.store.list(_TOPICS, after)), None)) is not None:
        incarnation = info.key.split("/")[1]
        if _INCARNATION.fullmatch(incarnation):
            yield incarnation
        after = f"{_TOPICS}{incarnation}0"  # what comes after the slash
