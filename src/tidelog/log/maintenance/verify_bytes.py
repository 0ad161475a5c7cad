"""Verifies the bytes that a run or a journal names, and collects what a verification finds.

Reads only. Runs in threads of a pool, or ahead in tasks: then the runs of all partitions are read
first (:func:`read_ahead`), and one without a problem is not read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import problem_of_text
from tidelog.codec.journal_file import JournalFile
from tidelog.codec.numbers import numbers_of
from tidelog.codec.segment import IdIndex, decode_index, hash_ids, read_index, read_piece
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.partition_reader import Reader
from tidelog.model import layout
from tidelog.model.topic import Head, Run, Topic, decode_row
from tidelog.store import shared_store
from tidelog.store.base import ObjectInfo, Store, check_key

__all__ = ["FINDINGS_MAX", "Finding", "Severity", "VerifyTally", "problem_of_object", "read_ahead"]


Severity = Literal["error", "warning", "note"]

# The limit for each severity. All findings are counted, and the report says how many were cut. An
# error or a warning may name the only copy of events, which a person needs to know before accepting
# its loss.
FINDINGS_MAX: dict[Severity, int] = {"error": 100_000, "warning": 100_000, "note": 1_000}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that a person may want to know."""

    severity: Severity
    where: str
    what: str


@dataclass
class VerifyTally:
    """Builds the report."""

    context: Context
    topic: Topic
    objects: dict[str, ObjectInfo]  # of the topic, as first listed
    progress: Callable[[int], None] | None
    named: set[str] = field(default_factory=set)  # objects
    healthy: set[Run] = field(default_factory=set)  # that tasks have read
    uses: dict[int, set[str]] = field(default_factory=dict)  # objects each partition names or lists
    nexts: dict[int, int] = field(default_factory=dict)  # of each partition, when it was read
    starts: dict[int, int] = field(default_factory=dict)  # the same
    floor: int = 0  # the highest of all heads
    runs: int = 0
    journals: int = 0
    events: int = 0
    bytes: int = 0
    amendments: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[Severity, int] = field(
        default_factory=lambda: {"error": 0, "warning": 0, "note": 0}
    )

    def add(self, severity: Severity, where: str, what: str) -> None:
        """Adds a finding."""
        self.counts[severity] += 1
        if self.counts[severity] <= FINDINGS_MAX[severity]:
            self.findings.append(Finding(severity, where, what))

    @property
    def cut(self) -> dict[Severity, int]:
        """Returns how many findings of each severity were counted but not kept; omits zeros."""
        over = {each: count - FINDINGS_MAX[each] for each, count in self.counts.items()}
        return {each: count for each, count in over.items() if count > 0}

    def name(self, partition: int, key: str) -> None:
        """Notes that a row of a partition names an object."""
        self.named.add(key)
        self.uses.setdefault(partition, set()).add(key)

    def list_unused(self, partition: int, keys: Iterable[str]) -> None:
        """Notes that a row of a partition lists objects as unused."""
        self.uses.setdefault(partition, set()).update(keys)

    def owns(self, key: str) -> bool:
        """Returns whether a key can be that of an object of the topic."""
        try:
            check_key(key)
        except InvalidError:
            return False
        return key.startswith(f"topics/{self.topic.incarnation}/")

    def size_of(self, key: str) -> int:
        """Returns the size of an object, even if it is newer than the listing.

        ``NotFoundError``.
        """
        info = self.objects.get(key)
        return self.context.store.head(key).size if info is None else info.size


_RESTORE = "keep the object, and restore it from a copy"


def problem_of_object(tally: VerifyTally, run: Run) -> str | None:
    """Returns the first problem of the object that a run names."""
    what = f"object `{run.object}`"
    if not tally.owns(run.object):
        return f"{what}: is not of this topic"
    try:
        return problem_of_bytes(tally.context.store, run, tally.size_of(run.object))
    except NotFoundError:
        return f"{what}: is missing: {_without_copy(tally.topic.name, run)}"
    except CorruptError as exc:
        return str(exc)
    except pa.ArrowException as exc:
        return f"{what}: does not decode ({exc}): {_RESTORE}"


def problem_of_bytes(store: Store, run: Run, size: int) -> str | None:
    """Returns the first problem of the bytes that a run names in an object of this size.

    Needs only the store. Raises ``NotFoundError``, ``CorruptError``, and errors of Arrow.
    """
    what = f"object `{run.object}`"
    if not 0 <= run.byte_start < run.byte_end <= size:
        return _wrong_size(what, size, run)
    look = _problem_of_piece if run.journal is None else _problem_of_journal
    return look(store, run, what, size)


def _without_copy(topic: str, run: Run) -> str:
    """Returns what to do about a missing object, also where no copy of it is left."""
    return (
        f"restore it from a copy; if there is none, `tidelog trim {topic} --offset P:{run.end}` "
        "deletes these and all earlier events of partition P, and then `tidelog topic recover "
        f"{topic} --include-trimmed` appends those that objects unknown to the catalog still hold"
    )


def _wrong_size(what: str, size: int, run: Run) -> str:
    said = f"{run.byte_start} to {run.byte_end}"
    return f"{what}: has {size} bytes, the row says {said}: {_RESTORE}"


def _problem_of_piece(store: Store, run: Run, what: str, size: int) -> str | None:
    if run.ids_end and not run.byte_end <= run.ids_start < run.ids_end <= size:
        return f"{what}: its id index cannot be from {run.ids_start} to {run.ids_end}"
    data = store.get(run.object, run.byte_start, max(run.byte_end, run.ids_end))
    piece = data[: run.byte_end - run.byte_start]
    batches = list(read_piece(piece, run.crc, run.count, what))
    index = None
    if run.ids_end:
        index = read_index(data[run.ids_start - run.byte_start :], what)
    ids = pa.chunked_array([batch.column("id") for batch in batches], pa.string())
    return (
        _problem_of_times(batches, run)
        or _problem_of_texts(batches, run, what)
        or _problem_of_ids(index, [ids], what)
    )


def _problem_of_journal(store: Store, run: Run, what: str, size: int) -> str | None:
    if (run.byte_start, run.byte_end) != (0, size):
        return _wrong_size(what, size, run)
    data = store.get(run.object)
    found = crc32c.crc32c(data)
    if found != run.crc:
        return f"{what}: expected crc32c {run.crc:08x}, found {found:08x}: {_RESTORE}"
    file = JournalFile(lambda start, end: data[start:end], run, what)
    batches = [file.read(group) for group in file.groups]
    at = run.base
    for batch in batches:
        offsets = numbers_of(batch.column("offset"))
        if not _rise(offsets, at, run.end):
            return f"{what}: its offsets do not rise from {run.base} to {run.end}"
        at = int(offsets[-1]) + 1
    rows = sum(batch.num_rows for batch in batches)
    if rows != run.events:
        return f"{what}: holds {rows} events, its row says {run.events}: keep both"
    index = None
    if run.ids_end:
        index = decode_index(data[run.ids_start : run.ids_end], what)
    ids = [batch.column("id") for batch in batches]
    return (
        _problem_of_times(batches, run)
        or _problem_of_texts(batches, run, what)
        or _problem_of_ids(index, ids, what)
    )


def _rise(offsets: npt.NDArray[np.int64], start: int, end: int) -> bool:
    """Returns whether there are offsets, all ascending, and within ``[start, end)``."""
    if not len(offsets) or offsets[0] < start or offsets[-1] >= end:
        return False
    return bool((offsets[1:] > offsets[:-1]).all())


def _problem_of_times(batches: Sequence[pa.RecordBatch], run: Run) -> str | None:
    times = [pc.min_max(batch.column("timestamp").cast(pa.int64())) for batch in batches]
    first_ms = min((each["min"].as_py() for each in times), default=0)
    last_ms = max((each["max"].as_py() for each in times), default=0)
    if (first_ms, last_ms) == (run.first_ms, run.last_ms):
        return None
    return (
        f"object `{run.object}`: holds times {first_ms} to {last_ms}, "
        f"the row says {run.first_ms} to {run.last_ms}"
    )


def _problem_of_texts(batches: Sequence[pa.RecordBatch], run: Run, what: str) -> str | None:
    """Returns the first event whose text does not decode: no reader gets past it."""
    at = run.base
    for batch in batches:
        for row in range(batch.num_rows) if problem_of_text(batch) else ():
            problem = problem_of_text(batch.slice(row, 1))
            if problem is not None:
                has_offsets = "offset" in batch.schema.names
                offset = batch.column("offset")[row].as_py() if has_offsets else at + row
                return f"{what}: offset {offset}: {problem}"
        at += batch.num_rows
    return None


def _problem_of_ids(
    index: IdIndex | None, blocks: Sequence[pa.Array | pa.ChunkedArray], what: str
) -> str | None:
    """Returns a problem unless the index has exactly the ids of each block."""
    halves = [np.sort((hash_ids(ids) >> np.uint64(32)).astype(np.uint32)) for ids in blocks]
    found = () if index is None else index.blocks
    if index is None:
        halves = [each for each in halves if len(each)]
    if len(found) == len(halves) and all(map(np.array_equal, found, halves)):
        return None
    return f"{what}: its id index is not that of its events: a lookup by id misses some"


@dataclass(frozen=True, slots=True)
class _RunBytes:
    """A run, to read anywhere; pickles."""

    store: str  # URL
    run: Run
    size: int  # of its object

    @property
    def read(self) -> int:
        return self.run.byte_end - self.run.byte_start


def read_ahead(tally: VerifyTally) -> None:
    """Lets tasks read the runs of all partitions, if there is a runner, and notes healthy ones."""
    runner = tally.context.tasks
    if runner is None:
        return
    work = (each for number in range(tally.topic.partitions) for each in _runs(tally, number))
    title = f"verify topic {tally.topic.name}"
    for each, is_healthy in runner.run(title, _is_healthy, work, lambda item: item.read):
        if is_healthy:
            tally.healthy.add(each.run)
            if tally.progress is not None:
                tally.progress(each.read)


def _runs(tally: VerifyTally, partition: int) -> Iterator[_RunBytes]:
    """Yields the live runs of a partition whose objects are there, up to the first damaged row."""
    where = layout.topic_partition(tally.topic.incarnation, partition)
    with contextlib.suppress(CorruptError, NotFoundError):  # found again, and reported, by the scan
        row = tally.context.catalog.get(where, "head")
        at = 0 if row is None else decode_row(row.value, Head, "head").start
        reader = Reader(tally.context, tally.topic, partition)
        while row is not None and (runs := reader.runs(at)):
            for run in runs:
                if tally.owns(run.object):
                    yield _RunBytes(tally.context.store.url, run, tally.size_of(run.object))
            at = runs[-1].end


def _is_healthy(work: _RunBytes) -> bool:
    return problem_of_bytes(shared_store(work.store), work.run, work.size) is None
