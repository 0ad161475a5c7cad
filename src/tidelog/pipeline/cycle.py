"""The cycle of every pipeline: from the ends of the source to commits, exactly once.

Each source partition goes through these steps. Every write expects its ``head``:

0. list: put a new partition into the pipeline's list before
   it has a ``head``; those that existed at the pipeline's
   creation are there, with their ends                    → crash: a name without rows
1. claim: put this driver as the owner into the ``head``,
   with the next epoch, if the partition is free or its
   owner is dead (``coordination.ownership``)              → crash: taken over after the time to
                                                             live
   a file's new name is put there too, without a range     → crash: the next driver finds it too
2. finish an existing ``intent``: with a manifest go to step 6, without one to step 4
   before a range, files of ranges that a restored catalog lost are set aside (``forgotten_ranges``)
3. intend: put an ``intent`` with start, limit and cuts    → crash: the next driver does the range
4. do: a task for each part of the range reads it and
   stages its files (``ranges``); it reads only the incarnation in the intent, which it
   checks after reading, and skips what was erased
   (``archive.erased_events``)                             → crash: staged files without a name
5. record: put a manifest object, and its key into the
   ``intent``: now the content is decided; where more
   waits, with the range to read next (``ranges``)         → crash: the next driver does step 6
6. publish: copy each staged file to its final name; what
   is read ahead is staged meanwhile                       → crash: the next driver copies the rest
7. commit, in one write: ``commit`` row, ``head`` to the
   end, no ``intent``, or that of what is read ahead; then
   delete the staged files                                 → crash: staged files without a name
8. release, between ranges or at the end of a run: put
   the ``head`` without an owner                            → free: any driver claims it

After step 4, a range that is deleted, or is empty and ends where it began, is withdrawn: the
``intent`` is deleted and the driver plans again. If the sink refuses a record, the ``intent`` ends
before it, and that range is done. What is after a part that failed or ended early is discarded.

A source partition that was deleted and created again is another sequence of events. Its range is
withdrawn, and the partition is an error until a person accepts that it ends there: one write puts
``ended`` and a gap into the ``head``, and deletes the ``intent``. Other partitions continue.

A driver that lost a partition fails there at its next write, because the head has another version
and a higher epoch. It drops that partition and keeps the others. Its late copies are those that the
manifest decided, so they do no harm. A missing staged file is damage only while the head is still
its own: otherwise another driver published it, or skipped erased events, and deleted it. After a
lost reply the rows show what happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import msgspec

from tidelog.catalog.base import ABSENT, Change, Check, Delete, Put
from tidelog.catalog.update import attempts
from tidelog.connectors.sink import FileSink
from tidelog.connectors.source import Bounds, SourcePartition, SourceRange, TrackingSource
from tidelog.context import Context
from tidelog.coordination.commits import load_manifest
from tidelog.coordination.ownership import put_held
from tidelog.coordination.pipeline_rows import ReplayPosition, list_partitions, replay_pipeline
from tidelog.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.model import layout
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Aside, Begin, Intent, ListedPartition, Manifest, Progress
from tidelog.model.times import Backoff
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.forgotten_ranges import NAMES_CHARS, SettingAside, manifests_since
from tidelog.pipeline.gaps import (
    TopicHeads,
    begun_head,
    check_gaps,
    committed_head,
    ended_head,
    is_topic_remade,
    lost_before,
    remade_bounds,
    span_to_read,
    vanished_head,
)
from tidelog.pipeline.manifest import commit_of, is_idle, manifest_of, missing_from
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import (
    FindNext,
    RangeAhead,
    RangeRounds,
    Results,
    check_plan,
    choose_cuts,
    discard_staged,
    end_before,
    intend_next,
    plan_tasks,
    read_no_more,
)
from tidelog.pipeline.source_state import (
    ClaimedError,
    SourceState,
    claim_failed_error,
    claimed_elsewhere_error,
    claimed_head,
    closed_error,
    explained,
    frozen_error,
)
from tidelog.pipeline.tasks import Task, TaskOutput
from tidelog.store.base import put_same

__all__ = ["Cycle"]

_CLAIM_RETRIES = Backoff(attempts=16, base_ms=5, max_ms=1_000)  # 5 to 10 s, per source partition


class Cycle:
    """The work of a driver on source partitions that it owns, each under the epoch of its head.

    ``may_claim`` returns whether a partition of this owner may be claimed; by default any may.
    """

    def __init__(
        self,
        context: Context,
        pipeline: Pipeline,
        owner: str,
        accept_loss: bool = False,
        may_claim: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._owner = owner
        self._accept_loss = accept_loss
        self._may_claim = may_claim
        self._states: dict[SourcePartition, SourceState] = {}
        self._stale: set[SourcePartition] = set()
        self._maybe_claimed: set[SourcePartition] = set()  # they may be ours: a reply was lost
        self._looked: set[SourcePartition] = set()  # for ranges that the catalog lost
        self._heads = TopicHeads(context, pipeline.id)

    def claim(
        self,
        partition: SourcePartition,
        begin: Begin,
        incarnation: str = "",
        note: bytes = b"",
        list_new: Callable[[SourcePartition], None] | None = None,
    ) -> bool:
        """Steps 0 and 1. Returns whether the partition is new; a new one begins at ``begin``.

        ``note`` identifies the partition for its source until a range of it is committed; a source
        that recognizes partitions by what was read gives its own step 0 (``list_new``).
        ``incarnation`` is stored unless one is known: a partition that was created again is another
        sequence of events, and no range of it is read. Raises ``ClaimedError`` if a living driver
        has it, ``FencedError`` if it is closed, and ``UnavailableError`` if replies stay lost or
        conflicts persist.
        """
        where = layout.pipeline_partition(self._pipeline.id, partition.text)
        busy = claim_failed_error(self._pipeline.name, partition.text)
        for _ in attempts(self._context, busy, _CLAIM_RETRIES):
            row = self._context.catalog.get(where, "head")
            found = None
            if row is not None:
                found = decode_row(row.value, Progress, f"head of `{partition.text}`")
                if found.closed:
                    raise closed_error(self._pipeline.name, partition.text)
                if not self._may_claim(found.owner):
                    self._drop(partition)
                    raise claimed_elsewhere_error(self._pipeline.name, partition.text, found)
            new = Progress(begin.position, 0, 0, incarnation=incarnation, begin=begin, note=note)
            head = claimed_head(found, new, self._owner, self._states.get(partition))
            change = Put("head", encode_row(head), expect=ABSENT if row is None else row.version)
            unchecked = self._unchecked_manifests(partition, 0 if found is None else found.looked)
            write_id = self._context.ids.new()
            with contextlib.suppress(ConflictError, UnknownOutcomeError):
                if row is None:
                    (list_new or self._list)(partition)
                # After the list: a promote that began since has read it. After the head: its
                # position may come from the source that its generation has since it was promoted.
                self._pipeline.gate()
                self._maybe_claimed.add(partition)
                self._context.catalog.write(where, change, write_id=write_id)
                state = SourceState(partition, where, head, write_id, unchecked=unchecked)
                self._states[partition] = state
                self._stale.add(partition)  # until its intent is known too
                self._maybe_claimed.discard(partition)
                state.read_intent(self._context.catalog)
                self._stale.discard(partition)
                return row is None
        raise busy

    def claim_known(self, partition: SourcePartition) -> None:
        """Does step 1 for a partition that has a head: it begins where that says."""
        self.claim(partition, Begin("", "earliest"))

    def is_ready(self, partition: SourcePartition) -> bool:
        """Returns whether this driver has it and knows its rows."""
        return partition in self._states and partition not in self._stale

    def is_ended(self, partition: SourcePartition) -> bool:
        """Returns whether a person ended a claimed partition."""
        return bool(self._states[partition].head.ended)

    def partitions(self) -> list[SourcePartition]:
        """Returns all partitions that this driver has claimed (``has_claimed``)."""
        return list(self._states)

    def has_claimed(self, partition: SourcePartition) -> bool:
        """Returns whether this driver has claimed it, even if its rows must be read again."""
        return partition in self._states

    def has_range(self, partition: SourcePartition) -> bool:
        """Returns whether a claimed partition has a range in progress, or may have one."""
        return partition in self._stale or self._states[partition].intent is not None

    def maybe_claimed(self) -> list[SourcePartition]:
        """Returns partitions that may be this driver's, since a reply was lost."""
        return sorted(self._maybe_claimed - self._states.keys())

    def release(self, partition: SourcePartition) -> None:
        """Step 8. Keeps the partition if that may have failed; another driver may have it."""
        where = layout.pipeline_partition(self._pipeline.id, partition.text)
        what, row = f"head of `{partition.text}`", self._context.catalog.get(where, "head")
        head = decode_row(row.value, Progress, what) if row is not None else None
        if row is not None and head is not None and head.owner == self._owner:
            self._stale.add(partition)  # unless this succeeds
            if head.frozen:  # a promote changes it: its driver claims it again, or is fenced
                raise frozen_error(self._pipeline.name, partition.text)
            free = encode_row(msgspec.structs.replace(head, owner=""))
            if put_held(self._context, where, "head", free, row.version, what) is None:
                raise UnavailableError(f"{what}: another process changes it: try again")
        self._drop(partition)

    def _drop(self, partition: SourcePartition) -> None:
        """Forgets a partition that is not this driver's any more."""
        self._states.pop(partition, None)
        for each in (self._stale, self._looked, self._maybe_claimed):
            each.discard(partition)

    def heads(self) -> dict[SourcePartition, Progress]:
        """Returns the heads of this driver's partitions, as it knows them."""
        return {each: state.head for each, state in self._states.items() if self.is_ready(each)}

    def position(self, partition: SourcePartition) -> str:
        """Returns the committed position of a claimed partition."""
        return self._states[partition].head.position

    def left_to_read(self, partition: SourcePartition, held: Bounds) -> tuple[str, Bounds]:
        """Returns where the next range of a claimed partition begins, and up to where it may go."""
        head = self._states[partition].head
        return span_to_read(head, held) if self._pipeline.goes_back else (head.position, held)

    def run(
        self,
        limits: Mapping[SourcePartition, str],
        bounds: Mapping[SourcePartition, Bounds],
        parts: Mapping[SourcePartition, int] | None = None,
        find_next: FindNext = read_no_more,
        on_round: Callable[[CycleReport], None] = lambda _: None,
        drivers: int = 1,
    ) -> CycleReport:
        """Steps 2 to 7 for all claimed partitions with an intent or a limit to read to.

        ``parts`` says into about how many tasks to cut a range. ``on_round`` gets what was done, a
        range of each partition at most, while the next ones are read. ``drivers`` share the rate.
        """
        whole, report = CycleReport(), CycleReport()
        self._heads.forget()
        tasks: list[Task] = []
        for state in list(self._states.values()):
            if state.partition in self._stale or state.head.ended:
                continue
            with self._contain_errors(state, report):
                if state.intent is None or not state.intent.manifest:
                    held = bounds.get(state.partition)
                    if held and self._end_if_recreated(state, held, state.partition in limits):
                        report.ended.add(state.partition)
                        continue
                    self._set_aside(state, report)
                if state.intent is None and state.partition in limits:
                    held, count = bounds[state.partition], (parts or {}).get(state.partition, 1)
                    self._intend(state, limits[state.partition], held, count)
                if state.intent is not None and state.intent.manifest:
                    self._finish(state, self._manifest(state.intent.manifest), report)
                elif state.intent is not None:
                    tasks += self._tasks(state, state.intent, report)
        with RangeRounds(self._pipeline, drivers) as reading:
            results: Results | None = reading.run(tasks)
            while results is not None:
                self._round(reading, results, report, find_next)
                on_round(report)
                whole.add(report)
                report, results = CycleReport(), reading.next_results()
        return whole

    def _round(
        self, reading: RangeRounds, results: Results, report: CycleReport, find_next: FindNext
    ) -> None:
        """Steps 4 to 7 of ranges that were read. Starts reading ahead."""
        ahead: list[RangeAhead] = []
        while tasks := self._settle_results(results, report, find_next, ahead):
            results = reading.run(tasks)
        reading.start([task for each in ahead for task in each.tasks])
        for each in ahead:
            with self._contain_errors(each.state, report):
                self._finish(each.state, each.manifest, report, has_next=True)

    def _settle_results(
        self, results: Results, report: CycleReport, find_next: FindNext, ahead: list[RangeAhead]
    ) -> list[Task]:
        """Runs steps 4 to 7. Stops after step 5 if the next range is read ahead.

        Returns tasks for the part before records that the sink refused.
        """
        shorter: list[Task] = []
        for partition, result in results:
            state = self._states.get(partition)
            if state is None:  # another driver has it
                continue
            if state.intent is None or state.intent.manifest:  # the range before it failed
                discard_staged(self._pipeline, partition, (*result.files, *result.unused))
                continue
            with self._contain_errors(state, report):
                if result.produced is None and result.error is not None:
                    shorter += self._shorten_range(state, result.error, report)
                elif result.produced is not None and is_idle(state.intent, result.produced):
                    self._withdraw(state)
                elif result.produced is not None:
                    is_last = result.error is not None or partition in report.errors
                    after = read_no_more if is_last or state.goes_back else find_next
                    manifest = self._record(state, result.produced, after)
                    if tasks := self._tasks_ahead(state, manifest):
                        ahead.append(RangeAhead(state, manifest, tasks))
                    else:
                        self._finish(state, manifest, report)
                discard_staged(self._pipeline, partition, result.unused)
                if result.error is not None:
                    self._fail(state, result.error, report)
        return shorter

    def _unchecked_manifests(self, partition: SourcePartition, epoch: int) -> Sequence[str]:
        """In step 1: returns manifests that a restored catalog may have lost, once each."""
        if partition in self._looked or not isinstance(self._pipeline.sink, FileSink):
            return ()
        return manifests_since(self._context, self._pipeline.id, partition.text, epoch)

    def _set_aside(self, state: SourceState, report: CycleReport) -> None:
        """Before step 3: sets files of forgotten ranges aside (``forgotten_ranges``)."""
        sink, partition = self._pipeline.sink, state.partition.text
        if state.unchecked and isinstance(sink, FileSink):
            work = SettingAside(self._context, self._pipeline.id, partition, sink)
            decide, replays = partial(self._commit_aside, state), partial(self._beside, state)
            report.aside += work.run(state.unchecked, state.head, decide, replays)
        state.unchecked, epoch = (), state.head.epoch
        state.head = msgspec.structs.replace(state.head, looked=epoch)  # at the next write
        self._looked.add(state.partition)

    def _commit_aside(self, state: SourceState, rows: Sequence[Put]) -> None:
        """Commits that ranges are set aside: no later file can have one of their names."""
        head = msgspec.structs.replace(state.head, names=self._context.ids.new()[:NAMES_CHARS])
        change = Put("head", encode_row(head), expect=state.head_version)
        state.head_version, state.head = self._write(state, change, *rows), head

    def _beside(self, state: SourceState) -> list[Aside]:
        """Sets aside what replays of dead letters lost: steps a and b of ``forgotten_ranges``."""
        self._commit_aside(state, ())
        pipeline = replace(self._pipeline, id=replay_pipeline(self._pipeline.id))
        other, report = Cycle(self._context, pipeline, self._owner), CycleReport()
        try:
            other.claim(state.partition, Begin(ReplayPosition().text, "earliest"))
            found = other._states[state.partition]
            if found.intent is not None and found.intent.manifest:
                other._finish(found, self._manifest(found.intent.manifest), report)
            other._set_aside(found, report)
            other.release(state.partition)
        except ClaimedError as exc:  # by a replay that began just now; our partition is still ours
            raise claim_failed_error(
                f"{pipeline.name}, dead letters", state.partition.text
            ) from exc
        return report.aside

    def _list(self, partition: SourcePartition) -> None:
        """Step 0, so that the partition stays known after its source deletes it."""
        listed = ListedPartition(partition.text, seen_ms=self._context.clock.now_ms())
        list_partitions(self._context, self._pipeline.id, [listed])

    def _end_if_recreated(self, state: SourceState, held: Bounds, is_due: bool) -> bool:
        """Ends a recreated partition, or begins one whose topic was not read; returns whether."""
        source, now_ms = self._pipeline.source, self._context.clock.now_ms()
        now = remade_bounds(state.partition, state.head, held, source, self._accept_loss)
        ends = bool(state.head.totals.commits)
        if not ends and (is_due or now is not None):
            own = [each for each in self._states.values() if self.is_ready(each.partition)]
            others = self._heads.with_events(state.partition, (now or held).incarnation, own)
            ends = is_topic_remade(state, now or held, others, source, self._accept_loss)
            now = now or (held if ends else None)
        if now is not None:
            head = ended_head(state.partition, state.head, source, now_ms)
            self._accept(state, head if ends else begun_head(state.head, now, now_ms))
        return now is not None

    def renew(self, partition: SourcePartition, note: bytes) -> None:
        """Stores what now identifies a claimed partition for its source, without a range."""
        state = self._states[partition]
        head = msgspec.structs.replace(state.head, note=note)
        try:
            change = Put("head", encode_row(head), expect=state.head_version)
            state.head_version, state.head = self._write(state, change), head
        except FencedError:  # the next claim shows which driver has it
            self._stale.add(partition)

    def accept_vanished(self, partition: SourcePartition, end: str) -> None:
        """Records that a claimed partition vanished early, after finishing a decided range."""
        state = self._states[partition]
        if state.intent is None or not state.intent.manifest:
            self._accept(state, vanished_head(state.head, end, self._context.clock.now_ms()))

    def _accept(self, state: SourceState, head: Progress) -> None:
        """Puts the head with what a person accepted, and deletes an undecided intent."""
        check_gaps(state.partition, head, ())
        changes: list[Change] = [Put("head", encode_row(head), expect=state.head_version)]
        if state.intent is not None:
            changes.append(Delete("intent", expect=state.intent_version))
        state.head_version = self._write(state, *changes)
        state.head, state.intent, state.intent_version = head, None, ""

    def _intend(self, state: SourceState, limit: str, bounds: Bounds, parts: int) -> None:
        """Step 3."""
        source, (start, _) = self._pipeline.source, self.left_to_read(state.partition, bounds)
        lost = lost_before(state.partition, state.head, bounds, source, self._accept_loss)
        if not source.before(start, limit):
            return
        first = lost[-1].end if lost else start
        intent = Intent(
            start,
            limit,
            lost,
            began_ms=self._context.clock.now_ms(),
            incarnation=bounds.incarnation or state.head.incarnation,
            cuts=choose_cuts(source, SourceRange(state.partition, first, limit), parts),
        )
        self._put_intent(state, intent)

    def _tasks(self, state: SourceState, intent: Intent, report: CycleReport) -> list[Task]:
        """Step 4, as a task for each part."""
        try:
            return plan_tasks(self._pipeline, state, intent, state.head.ordinal, self._context.ids)
        except NotFoundError:
            self._withdraw(state)
            report.withdrawn.add(state.partition)
            raise

    def _tasks_ahead(self, state: SourceState, manifest: Manifest) -> list[Task]:
        """Step 4 of what is read ahead; nothing if it fails: the plan after a commit shows why."""
        ahead = state.intent.ahead if state.intent is not None else None
        ordinal, ids = manifest.ordinal + manifest.read, self._context.ids
        with contextlib.suppress(TidelogError):
            return plan_tasks(self._pipeline, state, ahead, ordinal, ids) if ahead else []
        return []

    def _shorten_range(
        self, state: SourceState, error: TidelogError, report: CycleReport
    ) -> list[Task]:
        """In step 4: ends a range before a record that the sink refused, if anything is there.

        The record is in the first part: a refusal in a later one ends the range before that part.
        """
        source, reader = self._pipeline.source, state.reader
        limit = end_before(source, reader.range, error) if reader is not None else None
        if limit is None or state.intent is None:
            return []
        shorter = msgspec.structs.replace(state.intent, limit=limit, cuts=())
        return self._tasks(state, self._put_intent(state, shorter), report)

    def _fail(self, state: SourceState, error: TidelogError, report: CycleReport) -> NoReturn:
        """Raises the error of a range that could not be read, or not to its end.

        If parts before the failed one are committed, the rest is planned again.
        """
        is_committed = state.partition in report.committed and state.intent is None
        if isinstance(error, NotFoundError) and not is_committed:
            self._withdraw(state)
        if isinstance(error, NotFoundError) or is_committed:
            report.withdrawn.add(state.partition)
        if isinstance(error, CorruptError) and state.reader is not None:
            check_plan(self._pipeline.source, state.reader)
        raise error

    def _withdraw(self, state: SourceState) -> None:
        """Deletes an intent: nothing was decided, so the next one may differ."""
        # The head gets a new version: no repeated packet of step 3 brings the intent back.
        head = Put("head", encode_row(state.head), expect=state.head_version)
        gone = Delete("intent", expect=state.intent_version)
        state.head_version = self._write(state, head, gone)
        state.intent, state.intent_version = None, ""

    def _record(
        self, state: SourceState, produced: TaskOutput, find_next: FindNext = read_no_more
    ) -> Manifest:
        """Step 5."""
        intent, source = state.intent, self._pipeline.source
        if intent is None:
            raise claimed_elsewhere_error(self._pipeline.name, state.partition.text)
        missing = missing_from(source, state, intent, produced)
        check_gaps(state.partition, state.head, missing.gaps)
        manifest = manifest_of(self._pipeline.id, state, intent, produced, missing)
        name = self._context.ids.new()
        key = layout.manifest(self._pipeline.id, state.head.epoch, state.partition.text, name)
        put_same(self._context.store, key, seal_json(manifest))
        wanted, now_ms = find_next(state.partition, manifest.end), self._context.clock.now_ms()
        ahead = intend_next(source, intent, manifest, wanted, now_ms) if wanted else None
        self._put_intent(state, msgspec.structs.replace(intent, manifest=key, ahead=ahead))
        return manifest

    def _finish(
        self, state: SourceState, manifest: Manifest, report: CycleReport, has_next: bool = False
    ) -> None:
        """Steps 6 and 7. Without ``has_next``, no task reads ahead, and no next range begins."""
        partition, events = manifest.partition, manifest.read
        with self._context.spans.span("tidelog.publish", partition=partition, events=events):
            left_out = self._publish(state, manifest)
        manifest = msgspec.structs.replace(manifest, left_out=manifest.left_out + left_out)
        intent = state.intent
        if intent is None:
            raise claimed_elsewhere_error(self._pipeline.name, state.partition.text)
        done = commit_of(intent, manifest, self._context.clock.now_ms())
        note = manifest.note if isinstance(self._pipeline.source, TrackingSource) else b""
        head = committed_head(state.head, manifest, done, note)
        then, version = intent.ahead if has_next else None, state.intent_version
        write_id = self._write(
            state,
            Put(layout.commit_row(manifest.ordinal, manifest.start), encode_row(done)),
            Put("head", encode_row(head), expect=state.head_version),
            Put("intent", encode_row(then), version) if then else Delete("intent", version),
        )
        state.head, state.head_version = head, write_id
        state.intent, state.intent_version = then, write_id if then else ""
        report.committed[state.partition] = manifest
        self._pipeline.sink.discard(manifest)

    def _publish(self, state: SourceState, manifest: Manifest) -> int:
        """Step 6. Returns how many events were skipped because they were erased from the target.

        If another driver has the partition, it published the range or skipped it, and deleted the
        staged files. Then a sink that misses files or is ahead is not damaged.
        """
        try:
            return self._pipeline.sink.publish(manifest)
        except (CorruptError, InvalidError) as exc:
            row = self._context.catalog.get(state.where, "head")
            if row is None or row.version != state.head_version:
                raise claimed_elsewhere_error(self._pipeline.name, state.partition.text) from exc
            raise

    def _put_intent(self, state: SourceState, intent: Intent) -> Intent:
        """Stores an intent in place of the known one, under the known head, and returns it."""
        put = Put("intent", encode_row(intent), expect=state.intent_version or ABSENT)
        self._write(state, put, Check("head", state.head_version))
        state.read_intent(self._context.catalog)
        return intent

    def _write(self, state: SourceState, *changes: Change) -> str:
        """Writes conditionally. Raises ``FencedError`` if another driver has the partition."""
        write_id = self._context.ids.new()
        try:
            self._context.catalog.write(state.where, *changes, write_id=write_id)
        except ConflictError as exc:
            raise claimed_elsewhere_error(self._pipeline.name, state.partition.text) from exc
        return write_id

    def _manifest(self, key: str) -> Manifest:
        return load_manifest(self._context.store, key)

    @contextlib.contextmanager
    def _contain_errors(self, state: SourceState, report: CycleReport) -> Iterator[None]:
        """Reports any exception of one partition, without stopping the others.

        The known rows of that partition may be wrong after that, so it must be claimed again.
        """
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
            what = f"source partition `{state.partition.text}`"
            error = explained(self._context, self._pipeline.name, state, unexpected(what, exc))
            if isinstance(error, ClaimedError):
                self._drop(state.partition)
                report.claimed_elsewhere.add(state.partition)
            else:
                report.errors[state.partition] = error
                self._stale.add(state.partition)
