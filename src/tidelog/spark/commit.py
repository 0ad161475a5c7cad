"""Commits a Spark write on the driver: staged segments become runs of the topic, once.

A batch of a named sink has six steps:

1. tasks stage segments in the folder of the batch    → crash: objects that no row names
2. before the first batch, record the topic in the
   registry                                           → crash: the same, and a row that says so
3. put a manifest that names the staged segments      → crash: the same
4. change the sink's row from the last batch to this
   one, with the manifest: now the content is decided → crash: the next process resumes at step 5
5. copy each staged segment to the topic's segments,
   in its current generation, and commit its pieces,
   guarded by the sink's producer rows; then put a
   witness for it (``log.witnesses``)                 → crash: some runs; the next one skips these
6. mark the sink's row as done; then delete what is
   staged for this batch and earlier ones             → crash: the batch, perhaps with leftovers

A repeated batch finds its number in the sink's row. If that is done, it does nothing. If it is
decided, it resumes with the manifest of the first attempt. The row also has the number of events
and a digest of them (``codec.event_batch``). A repeat that differs may hold events that are not
stored, for example after a checkpoint was set back by one batch, and is refused; ``acceptRepeat``
declares that it is the same batch. Spark repeats only its last batch; an older one is refused.

The row is deleted with its topic. So before the first batch, a row in the registry records which
query writes to which topic with that name. A query that finds another topic is refused: its topic
was deleted and created again, and what the query had stored is deleted.

Two drivers may do this at once. The row changes by its version, so one manifest counts. Both then
commit the same pieces with the same sequences, and a piece that the producer's row already shows is
skipped. So no driver must be fenced. The row is never older than a decided batch, so a stalled
driver cannot decide an old batch again, and a manifest can be deleted when its batch is done.

Events that were erased from the topic are skipped at step 5, unless they are newer
(``log.copying``). The row counts them, and a warning is logged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Change, Check, Put
from tidelog.codec.event_batch import Contents
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.ledger import Copier, append_staged
from tidelog.log.maintenance.leftovers import SinkState, are_young, read_swept
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted, open_json, seal_json
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.producer_names import sink_producer
from tidelog.model.topic import Topic
from tidelog.store.base import put_fresh

__all__ = [
    "Batch",
    "BatchManifest",
    "SinkTarget",
    "SparkSink",
    "check_not_swept",
    "report_left_out",
]

_logger = logging.getLogger("tidelog.spark")
_ORDINAL = 1 << 32  # sequences of one batch in one partition


class SinkTarget(Persisted, frozen=True):
    """The registry's row of a sink: which topic a query writes to."""

    query: str
    incarnation: str  # of the topic


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to store."""

    query: str | None  # "" for batch writes, None if unknown
    number: int
    staged: tuple[StagedSegment, ...]
    contents: Contents


class BatchManifest(Persisted, frozen=True):
    """The content of one batch."""

    batch: int
    segments: tuple[StagedSegment, ...]
    format: int = layout.FORMAT


class SparkSink:
    """A named sink of one topic; with a pool it copies in parallel, otherwise without threads."""

    def __init__(
        self, context: Context, topic: Topic, name: str, pool: Executor | None = None
    ) -> None:
        self._context = context
        self._topic = topic
        self._name = name
        self._pool = pool
        self._where = layout.topic_partition(topic.incarnation, 0)

    def commit(self, batch: Batch, accept_repeat: int | None = None) -> None:
        """Makes a batch part of the topic, unless it already is.

        Raises ``InvalidError`` if the sink belongs to another query, is past this batch, or has
        stored other events under its number. With ``accept_repeat`` the batch with that number
        counts as stored.
        """
        number = batch.number
        for attempt in range(limits.COMMIT_ATTEMPTS):
            state, version = self._read()
            if state is not None and version is not None:
                self._check_query(state, batch.query)
                if not state.done:
                    self._finish(state, version)
                    continue
                if number == state.batch:
                    if batch.staged and number != accept_repeat:
                        self._check_repeat(state, batch)
                    self._remove_staged(number)
                    return
            if not batch.staged:
                return
            if state is not None and number < state.batch:
                raise InvalidError(
                    f"{self._what}: batch {number} comes after batch {state.batch}, which is "
                    "stored: another driver runs the same query, or its checkpoint was set back: "
                    "stop this one, or choose another sink name if all is to be stored anew"
                )
            if state is None and batch.query and not self._note_target(batch.query):
                continue
            wanted = SinkState(batch.query or "", number, 0, "", contents=batch.contents)
            self._decide(state, version, wanted, batch.staged)
            self._context.clock.sleep(self._context.random.uniform(0, min(0.2, 0.001 * attempt)))
        raise UnavailableError(f"{self._what}: others keep changing it: try again")

    def _decide(
        self,
        before: SinkState | None,
        version: str | None,
        wanted: SinkState,
        staged: tuple[StagedSegment, ...],
    ) -> None:
        """Steps 3 and 4. The row shows afterwards whether they succeeded."""
        _check_count(staged)
        swept = check_not_swept(self._context, self._topic, staged)
        manifest_id = self._context.ids.new()
        incarnation, batch = self._topic.incarnation, wanted.batch
        key = layout.sink_manifest(incarnation, self._name, batch, manifest_id)
        put_fresh(self._context.store, key, seal_json(BatchManifest(batch, staged)))
        ordinal = 0 if before is None else before.ordinal + 1
        left_out = 0 if before is None else before.left_out
        state = msgspec.structs.replace(wanted, ordinal=ordinal, manifest=key, left_out=left_out)
        guard: tuple[Change, ...] = (Check(layout.STAGED_ROW, swept or ABSENT),)
        if version is None:  # ABSENT alone could become true again later
            _, head_version = read_head(self._context, self._topic, 0)
            guard = (*guard, Check("head", head_version))
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            self._write(state, version, *guard)

    def _finish(self, state: SinkState, version: str) -> None:
        """Steps 5 and 6 for a decided batch."""
        try:
            manifest = self._manifest(state)
            producer = Copier(self._context, self._topic, sink_producer(self._name))
            first = state.ordinal * _ORDINAL
            left_out = append_staged(producer, manifest.segments, first, self._pool)
        except NotFoundError as exc:
            if self._read()[1] != version:
                return  # another driver finished it and deleted what was staged
            raise CorruptError(
                f"{self._what}: batch {state.batch} is decided, but something of it is gone "
                f"({exc}): restore it from a copy, and start the query again"
            ) from exc
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            done = msgspec.structs.replace(state, done=True, left_out=state.left_out + left_out)
            self._write(done, version)
            report_left_out(self._topic, left_out)
            self._remove_staged(state.batch)

    def _manifest(self, state: SinkState) -> BatchManifest:
        data = self._context.store.get(state.manifest)
        return open_json(data, BatchManifest, f"manifest `{state.manifest}`")

    def _read(self) -> tuple[SinkState, str] | tuple[None, None]:
        row = self._context.catalog.get(self._where, layout.sink_row(self._name))
        if row is None:
            return None, None
        return decode_row(row.value, SinkState, self._what), row.version

    def _write(self, state: SinkState, version: str | None, *guard: Change) -> None:
        change = Put(layout.sink_row(self._name), encode_row(state), expect=version or ABSENT)
        self._context.catalog.write(self._where, change, *guard, write_id=self._context.ids.new())

    def _check_query(self, state: SinkState, query: str | None) -> None:
        if query is not None and state.query != query:
            raise InvalidError(
                f"{self._what}: belongs to {_query_name(state.query)}, which wrote up to batch "
                f"{state.batch}; this is {_query_name(query)}: bring its checkpoint back, or "
                "choose another sink name if everything is to be stored anew",
            )

    def _check_repeat(self, state: SinkState, batch: Batch) -> None:
        """Raises for a repeat of the last batch that may hold events which are not stored."""
        if state.contents.differs(batch.contents):
            raise InvalidError(
                f"{self._what}: batch {state.batch} is stored with {state.contents.events} events, "
                f"and comes again with {batch.contents.events}, which are others: the checkpoint "
                "was set back, or the query computes other rows each time: bring the checkpoint "
                "back, or store the batch again under another sink name; if none of its events is "
                f"new, set option acceptRepeat to {state.batch}"
            )

    def _note_target(self, query: str) -> bool:
        """Step 2. Returns whether it is recorded.

        ``InvalidError`` if the query had another topic.
        """
        name = layout.sink_target_row(self._topic.name, self._name)
        row = self._context.catalog.get(layout.REGISTRY, name)
        found = decode_row(row.value, SinkTarget, self._what) if row else None
        wanted = SinkTarget(query, self._topic.incarnation)
        if found == wanted:
            return True
        if found is not None and found.query == query:
            raise InvalidError(
                f"{self._what}: the topic was deleted and made again since query {query} wrote to "
                "it, and what it had stored is deleted: start the query with a new checkpoint to "
                "store everything again, or choose another sink name to continue"
            )
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            change = Put(name, encode_row(wanted), row.version if row else ABSENT)
            self._context.catalog.write(layout.REGISTRY, change, write_id=self._context.ids.new())
            return True
        return False

    def _remove_staged(self, batch: int) -> None:
        """Deletes what any driver staged for batches up to this one."""
        keys = []
        with contextlib.suppress(UnavailableError):  # the next batch deletes it too
            for info in self._context.store.list(layout.sinks(self._topic.incarnation, self._name)):
                if layout.sink_batch(info.key) > batch:
                    break
                keys.append(info.key)
            self._context.store.delete(keys)

    @property
    def _what(self) -> str:
        return f"sink `{self._name}` of topic `{self._topic.name}`"


def report_left_out(topic: Topic, left_out: int) -> None:
    """Logs how many events a write skipped because they were erased."""
    if left_out:
        _logger.warning(
            "topic `%s`: %d events were left out: they were erased from the topic, and are not "
            "newer than that",
            topic.name,
            left_out,
        )


def check_not_swept(context: Context, topic: Topic, staged: Sequence[StagedSegment]) -> str | None:
    """Returns the version of the ``staged`` row. ``UnavailableError`` if segments may be swept."""
    found, version = read_swept(context, topic)
    older = [each.key for each in staged if layout.sink_generation(each.key) < found.swept]
    if older and not are_young(context, older):
        raise UnavailableError(
            f"write to topic `{topic.name}`: it took longer than a day, and a sweep has deleted "
            "what it had staged: nothing was stored: write again, in smaller parts"
        )
    return version


def _check_count(segments: Sequence[StagedSegment]) -> None:
    """Raises for a batch whose sequences would overlap those of the next."""
    events = sum(piece.count for staged in segments for piece in staged.pieces)
    if events >= _ORDINAL:
        raise InvalidError(f"write: {events} events in one batch: give fewer than {_ORDINAL}")


def _query_name(query: str) -> str:
    return f"query {query}" if query else "batch writes"
