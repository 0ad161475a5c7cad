"""Commits a segment to the partitions of a topic. Starts no threads; see ``producer``.

An append has five steps. What a crash after each one leaves:

    1. collect events                                 → nothing
    2. encode one segment for all partitions touched  → nothing
    3. upload it under a new id, in the topic's
       current generation, with what the heads say    → a stray, kept for a week; never a hole
    4. one conditional write for each partition:
       ``head`` from n to n+k, which names the run;
       the ``run``; its ``slot`` rows; and the
       ``producer`` row                               → the events, in the partitions written
    5. acknowledge with positions                     → the same

After a conflict, the appender plans the write again from the rows that the conflict returned,
without a read, and retries at once. It waits only after a second conflict in a row: after a wait
the rows it knows are stale, so the conflict that follows is expected. The segment stays the same
unless a sweep has raised the floor above its generation. Then the appender uploads it again.

A segment that is stored more than once (uploaded again, or copied from staging) could be committed
by another process too: a recovery appends the events of an object that no row names
(``journal.recover``). So the commit of such a copy also creates the producer row that a recovery
would use, and expects that it does not exist. If it exists, the events are already in the topic,
and the commit only records their sequences.

A segment that this process will never commit to a partition is listed there as unused, by the next
commit or by a separate write, so that a sweep need not keep it as a possible loss.

A lost reply is settled by what only this write stores: its own id, which the producer's row keeps
with the batch, and the run that names its segment. Sequence and offset prove nothing: another
process with the same name may have stored its own events under the same sequence at the same
offset. If neither the row nor the run shows the write, and the head or the row has changed, the
write can never land, since it expects versions that never recur. If reading back fails too, or the
run was trimmed or compiled since, the appender raises ``UnknownOutcomeError``. ``UnavailableError``
always means that nothing was committed, even if an upload failed.

Every commit checks the epoch of the producer row that it expects. A newer epoch fences the
appender, for every partition and for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidelog.catalog.base import ABSENT, Check, Delete, Put, Row
from tidelog.catalog.update import RACE, Decision, Rows, attempts, rounds, update
from tidelog.codec.segment import Segment
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    InternalError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.producer.append_plan import (
    ALL_SEQUENCES,
    AppendPlan,
    Committer,
    ExpectedRows,
    PartitionWrite,
    StoredSegment,
    claim_copy,
    plan_append,
    recent_batches,
    recovery_of,
    sent_batch,
)
from tidelog.log.producer.staged import staged_origin
from tidelog.log.topics import find_topic, head_of, open_head, read_head
from tidelog.log.unused_objects import list_apart, list_unused
from tidelog.model import layout, limits
from tidelog.model.topic import (
    AppenderView,
    Head,
    Piece,
    ProducerState,
    Run,
    Topic,
    decode_row,
    encode_row,
    writer_name,
)
from tidelog.store.base import copy_fresh, put_fresh

__all__ = ["Appender"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """A partition's head, and our row there with our epoch, each with its version."""

    head: tuple[Head, str]
    state: tuple[ProducerState, str]


class Appender:
    """One producer's commits to one topic. Calls for one partition must not overlap."""

    needs_offsets = True  # whether callers use the offset that a commit returns

    def __init__(
        self, context: Context, topic: Topic, producer: str, epoch: int = 0, *, once: bool = False
    ) -> None:
        self._context = context
        self._topic = topic
        self._producer = producer
        self.writer = writer_name(producer)  # the name in segments
        self._epoch = epoch
        self._once = once  # one commit for each partition, by any process
        self._heads: dict[int, tuple[Head, str]] = {}
        self._states: dict[int, tuple[ProducerState, str | None]] = {}
        self._abandoned: dict[int, tuple[str, ...]] = {}  # segments that a partition never gets
        # Partitions whose producer row was put while the head stayed. A packet repeated late
        # may put it again, so ``close`` leaves these rows to the sweep.
        self._noted: set[int] = set()
        self._fenced_by = -1  # the newest epoch seen of another process

    @property
    def topic(self) -> Topic:
        """Returns the topic as last read."""
        return self._topic

    def open_named(self) -> dict[int, ProducerState]:
        """Raises the epoch in every partition, which fences older processes.

        Returns what the older processes had sent, by partition.
        """
        found = [self._read_state(p)[0].epoch for p in range(self._topic.partitions)]
        self._epoch = max(found) + 1
        partition = 0
        while partition < self._topic.partitions:
            taken = self._raise_epoch(partition)
            if taken is None:
                partition += 1
            else:  # another process opens it too: use a higher epoch everywhere
                self._epoch, partition = taken + 1, 0
        return {partition: state for partition, (state, _) in self._states.items()}

    def last_sequence(self, partition: int) -> int:
        """Returns the highest sequence that this producer has stored in a partition; -1 if none."""
        return self._state(partition)[0].last

    def known(self, partitions: Sequence[int]) -> dict[int, AppenderView]:
        """Returns what this process knows about partitions, to store with a segment for them.

        Reads heads that it does not know yet, which saves the commits that read.
        """
        found = {}
        for partition in partitions:
            at = self._heads.get(partition)  # a commit in another thread may drop it
            if at is None:
                at = read_head(self._context, self._topic, partition)
                self._heads.setdefault(partition, at)  # a commit may know a newer one by now
            head = at[0]
            found[partition] = AppenderView(
                0, 0, head.next, head.last_base, head.last_object, self.writer
            )
        return found

    def upload(self, segment: Segment) -> StoredSegment:
        """Step 3. Raises ``UnavailableError`` for any failure: no row names the object yet."""
        return self._upload(segment, self._context.ids.new(), "")

    def copy_staged(self, staged: str, pieces: tuple[Piece, ...]) -> StoredSegment:
        """Step 3 for a segment in staging: copies it. Raises ``NotFoundError`` if it is missing.

        All copies of one staged segment have the same id, in every process.
        """
        origin = staged_origin(staged)
        key, generation = self._key(origin, len(pieces), self._context.ids.new())
        copy_fresh(self._context.store, staged, key)
        return StoredSegment(Segment(b"", pieces), key, generation, staged, is_copy=True)

    def _upload(self, segment: Segment, segment_id: str, copy_id: str) -> StoredSegment:
        key, generation = self._key(segment_id, len(segment.pieces), copy_id)
        put_fresh(self._context.store, key, segment.data)
        return StoredSegment(segment, key, generation)

    def abandon(self, partition: int, stored: StoredSegment) -> None:
        """Notes that a partition never gets this segment; the next commit there lists it as unused.

        Call it only if no commit was tried or the commit stored nothing.
        """
        known = self._abandoned.get(partition, ())  # up to the limit of one row
        self._abandoned[partition] = (*known, stored.key)[: limits.STRAYS_AT_ONCE]

    def list_abandoned(self) -> None:
        """Lists as unused what no commit has listed yet.

        Best effort: a sweep keeps an unlisted object for a week.
        """
        for partition, keys in list(self._abandoned.items()):
            if list_apart(self._context, self._topic, partition, keys):
                del self._abandoned[partition]

    def commit(
        self,
        stored: StoredSegment,
        piece: Piece,
        sequences: Sequence[int] | None = None,
        expected_offset: int | None = None,
        *,
        mark: bytes = b"",
    ) -> tuple[int, StoredSegment]:
        """Step 4 for one partition: returns the first offset, and the segment, which may have
        moved.

        The producer's row keeps ``mark`` with the last of the sequences.

        Raises ``ConflictError`` if ``expected_offset`` is not the next one, ``FencedError`` if a
        newer process uses this producer's name, ``NotFoundError`` if the topic was deleted, and
        ``AlreadyExistsError`` if another process has stored these sequences. With these errors and
        with ``UnavailableError``, nothing was stored. Raises ``UnknownOutcomeError`` if a reply was
        lost and reading back did not settle it.
        """
        if expected_offset is not None:
            at = self._heads.get(piece.partition)
            if at is not None and at[0].next != expected_offset:
                self._heads.pop(piece.partition, None)  # others may have appended since
        is_stale = True  # our copy of the rows, which others may have changed
        busy = self._busy(piece.partition)
        delays_s = RACE.delays_s(self._context.random)
        for _ in rounds(RACE.attempts, busy):
            delay_s = next(delays_s, 0.0)
            self._check_fence(piece.partition)
            head, head_version = self._head(piece.partition)
            last = self.last_sequence(piece.partition)
            if sequences is not None and (sequences[0] <= last or (self._once and last >= 0)):
                raise AlreadyExistsError(
                    f"producer `{self._producer}` on `{self._topic.name}/{piece.partition}`: "
                    f"sequence {sequences[0]} is stored already: continue after {last}"
                )
            self.check_head(piece.partition, head)
            if expected_offset not in (None, head.next):
                raise ConflictError(
                    f"partition `{self._topic.name}/{piece.partition}`: append at offset "
                    f"{expected_offset} conflicts, next is {head.next}: "
                    f"read from {head.next} and retry",
                    next=head.next,
                )
            if stored.generation < head.floor:
                stored = self._upload_again(stored, head.floor)
            if stored.is_copy:
                base = self._recovered_at(stored, piece, sequences, head_version, mark)
                if base is not None:
                    return base, stored
            plan = self._plan(PartitionWrite(stored, piece, sequences, mark), head, head_version)
            if self._write(piece.partition, plan):
                self._abandoned.pop(piece.partition, None)
                which = self._topic.incarnation
                self._context.wakeups.committed(which, piece.partition, plan.head.next)
                return plan.batch.base, stored
            is_stale = self._wait_to_repeat(delay_s, is_stale)
        raise busy

    def commit_at(
        self, stored: StoredSegment, piece: Piece, find_end: Callable[[], int]
    ) -> tuple[int, StoredSegment]:
        """Commits at the offset that ``find_end`` returns; asks it again after each conflict.

        ``find_end`` may raise to refuse the events. All attempts use one segment: if the catalog
        loses the commit, a recovery finds these events once.
        """
        busy = self._busy(piece.partition)
        for _ in attempts(self._context, busy):
            end = find_end()
            with contextlib.suppress(ConflictError):
                return self.commit(stored, piece, expected_offset=end)
        raise busy

    def _wait_to_repeat(self, delay_s: float, was_stale: bool) -> bool:
        """Waits after every second conflict; returns whether our copy of the rows is stale now.

        The rows that a conflict returns after a wait are used at once. Waiting first would let a
        busy writer change them again, each time, until all attempts are used up.
        """
        if not was_stale:
            self._context.clock.sleep(delay_s)
        return not was_stale

    def check_head(self, partition: int, head: Head) -> None:
        """Raises if the head does not allow commits: ``NotFoundError`` if the topic was deleted."""
        if head.closed:
            raise self._deleted_error()

    def close(self) -> None:
        """Deletes the rows of an unnamed producer. Best effort: sweeps delete old ones too."""
        for partition, (_, version) in self._states.items():
            if version is not None and partition not in self._noted:
                self._remove_state(partition, version)
        self._states.clear()

    def _plan(self, wanted: PartitionWrite, head: Head, head_version: str) -> AppendPlan:
        partition = wanted.piece.partition
        seen = ExpectedRows(head, head_version, *self._state(partition))
        by = Committer(
            self._producer,
            self._epoch,
            self._topic.slot_ms,
            now_ms=self._context.clock.now_ms(),
            write_id=self._context.ids.new(),
        )
        listed = list_unused(by.write_id, self._unused(partition))
        claimed = self._claim(wanted.stored, partition, by.now_ms)
        return plan_append(wanted, seen, by, [*listed, *claimed])

    def _claim(self, stored: StoredSegment, partition: int, now_ms: int) -> list[Put]:
        return claim_copy(stored, partition, now_ms)

    def _unused(self, partition: int) -> Sequence[str]:
        """Returns the objects that the next commit to a partition lists as unused."""
        return self._abandoned.get(partition, ())

    def _recovered_at(
        self,
        stored: StoredSegment,
        piece: Piece,
        sequences: Sequence[int] | None,
        head_version: str,
        mark: bytes,
    ) -> int | None:
        """Returns the first offset of a piece that a recovery has appended; None if none has.

        In the first case it also records the sequences in the producer's row, so that a retry finds
        them stored. Raises ``AlreadyExistsError`` if another copy is committed, and
        ``UnknownOutcomeError`` if the recovery left out events, so that the offsets of the others
        are unknown.
        """
        where = layout.topic_partition(self._topic.incarnation, piece.partition)
        name = layout.producer_row(recovery_of(stored, piece.partition))
        row = self._context.catalog.get(where, name)
        if row is None:
            return None
        what = f"segment `{stored.key}` on `{self._topic.name}/{piece.partition}`"
        found = decode_row(row.value, ProducerState, what)
        if found.last == ALL_SEQUENCES:
            raise AlreadyExistsError(f"{what}: another copy of it is committed: use that one")
        base = next((each.base for each in found.recent), 0)
        if self.needs_offsets and [each.count for each in found.recent] != [piece.count]:
            raise self._unknown(piece.partition, "a recovery has appended a part of it")
        ours: set[str] = set()
        unknown = self._unknown(piece.partition, "a recovery has appended it")
        for number in attempts(self._context, unknown):
            if number:
                self._forget(piece.partition)
                head, head_version = self._head(piece.partition)
                self.check_head(piece.partition, head)
            state, version = self._state(piece.partition)
            if ours.intersection(each.write for each in state.recent):
                return base
            self._check_fence(piece.partition)
            write_id, now_ms = self._context.ids.new(), self._context.clock.now_ms()
            batch = sent_batch(base, piece.count, sequences, state.last + 1, write_id)
            recent = recent_batches(state.recent, batch)
            new = ProducerState(self._epoch, batch.sequences()[-1], recent, now_ms, mark=mark)
            own = layout.producer_row(self._producer)
            change = Put(own, encode_row(new), expect=version or ABSENT)
            ours.add(write_id)
            self._noted.add(piece.partition)
            guard = Check("head", head_version)
            with contextlib.suppress(ConflictError, UnknownOutcomeError):
                self._context.catalog.write(where, change, guard, write_id=write_id)
                self._states[piece.partition] = (new, write_id)
                return base
        raise unknown

    def _write(self, partition: int, plan: AppendPlan) -> bool:
        """Returns whether the plan was written; False if it never will be: plan again."""
        where = layout.topic_partition(self._topic.incarnation, partition)
        lost = False  # after a lost reply, a later answer may be about our own write
        unknown = self._unknown(partition, "replies keep getting lost")
        for _ in attempts(self._context, unknown):
            try:
                self._context.catalog.write(where, *plan.changes, write_id=plan.write_id)
            except ConflictError as exc:
                if not lost:
                    self._learn(partition, exc.rows)
                    self._check_fence(partition)
                    return False
            except UnknownOutcomeError:
                lost = True
            except TidelogError:  # out of reach, or refused: only this attempt was
                if not lost:
                    raise
            else:
                self._heads[partition] = (plan.head, plan.write_id)
                self._states[partition] = (plan.state, plan.write_id)
                return True
            landed = self._settled(partition, plan)
            if landed is not None:
                return landed
        raise unknown

    def _learn(self, partition: int, rows: Mapping[str, Row | None]) -> None:
        """Takes over the head and the producer's row that a conflict returned.

        A row that the conflict does not mention is as we know it. If it mentions neither, both are
        read again.
        """
        ours = layout.producer_row(self._producer)
        if "head" not in rows and ours not in rows:
            self._forget(partition)
        if "head" in rows:
            self._heads.pop(partition, None)  # if there is no row, reading it raises the reason
            head = rows["head"]
            if head is not None:
                self._heads[partition] = head_of(self._topic, partition, head)
        if ours in rows:
            self._states[partition] = self._state_of(rows[ours])

    def _settled(self, partition: int, plan: AppendPlan) -> bool | None:
        """Returns :meth:`_landed`; raises ``UnknownOutcomeError`` if it cannot read the rows."""
        try:
            return self._landed(partition, plan)
        except (FencedError, NotFoundError, UnknownOutcomeError):
            raise
        except TidelogError as exc:
            raise self._unknown(partition, str(exc)) from exc

    def _landed(self, partition: int, plan: AppendPlan) -> bool | None:
        """After a lost reply: True if the write landed, False if it never will, None to send it
        again.

        Raises ``FencedError`` if it never will because a newer process uses the name.
        """
        self._forget(partition)
        head, head_version = self._head(partition)  # before the producer's row, on purpose
        state, state_version = self._state(partition)
        if state.has_write(plan.write_id):
            return True
        same_state = state_version == plan.state_version
        if head_version == plan.head_version and same_state and not head.closed:
            return None
        # If our row is unchanged, the write did not land: it would have changed that row too.
        unchanged = same_state and state_version is not None
        if not unchanged and self._is_ours(partition, plan.run, head):
            return True
        self._check_fence(partition)
        return False

    def _is_ours(self, partition: int, run: Run, head: Head) -> bool:
        """Returns whether a run names our segment, although the producer's row does not show the
        write.

        A sweep may have deleted the row, or later batches may have pushed ours out of it.
        """
        if run.base < max(head.start, head.journaled):
            how = "trimmed" if run.base < head.start else "compiled"
            raise self._unknown(partition, f"what is at offset {run.base} was {how} since")
        where = layout.topic_partition(self._topic.incarnation, partition)
        row = self._context.catalog.get(where, layout.run_row(run.base))
        if row is None:
            return False
        found = decode_row(row.value, Run, f"a run of `{self._topic.name}/{partition}`")
        return (found.object, found.byte_start) == (run.object, run.byte_start)

    def _head(self, partition: int) -> tuple[Head, str]:
        if partition not in self._heads:
            self._heads[partition] = read_head(self._context, self._topic, partition)
        return self._heads[partition]

    def _state(self, partition: int) -> tuple[ProducerState, str | None]:
        if partition not in self._states:
            self._states[partition] = self._read_state(partition)
        return self._states[partition]

    def _read_state(self, partition: int) -> tuple[ProducerState, str | None]:
        where = layout.topic_partition(self._topic.incarnation, partition)
        return self._state_of(self._context.catalog.get(where, layout.producer_row(self._producer)))

    def _state_of(self, row: Row | None) -> tuple[ProducerState, str | None]:
        if row is None:
            return ProducerState(self._epoch), None
        return decode_row(row.value, ProducerState, f"producer `{self._producer}`"), row.version

    def _forget(self, partition: int) -> None:
        self._heads.pop(partition, None)
        self._states.pop(partition, None)

    def _check_fence(self, partition: int) -> None:
        """Raises ``FencedError`` if a newer process uses the name, here or in another partition."""
        state, _ = self._state(partition)
        self._fenced_by = max(self._fenced_by, state.epoch)
        if self._fenced_by > self._epoch:
            raise FencedError(
                f"producer `{self._producer}` on `{self._topic.name}/{partition}`: opened "
                f"elsewhere (epoch {self._fenced_by}), ours was epoch {self._epoch}: "
                "stop this process",
                producer=self._producer,
            )

    def _raise_epoch(self, partition: int) -> int | None:
        """Writes our epoch into a partition; returns None.

        If another process has an epoch at least as high, returns that instead.
        """
        where = layout.topic_partition(self._topic.incarnation, partition)
        row = layout.producer_row(self._producer)

        def decide(rows: Rows) -> Decision[int | _Opened]:
            head = open_head(self._context, self._topic, partition, rows["head"])
            state, version = self._state_of(rows[row])
            if version is not None and state.epoch >= self._epoch:
                return Decision(state.epoch)
            now_ms = self._context.clock.now_ms()
            mine = msgspec.structs.replace(state, epoch=self._epoch, seen_ms=now_ms, silent_ms=0)
            # A new row also expects the head, since ABSENT alone could become true again later.
            guard = () if version else (rows.check("head"),)
            changes = (rows.put(row, encode_row(mine)), *guard)
            return Decision(_Opened(head, (mine, rows.write_id)), changes)

        what = f"producer `{self._producer}` on `{self._topic.name}/{partition}`"
        found = update(self._context, where, ["head", row], decide, what)
        if isinstance(found, int):
            return found
        self._heads[partition], self._states[partition] = found.head, found.state
        return None

    def _upload_again(self, stored: StoredSegment, floor: int) -> StoredSegment:
        """Stores a segment again, since a sweep has raised the floor above its generation."""
        topic = find_topic(self._context, self._topic.name)
        if topic.incarnation != self._topic.incarnation:
            raise self._deleted_error()
        if topic.generation < floor:
            raise InternalError(
                f"topic `{topic.name}`: a head has floor {floor}, the registry generation "
                f"{topic.generation}"
            )
        self._topic = topic
        if stored.staged is not None:
            return self.copy_staged(stored.staged, stored.segment.pieces)
        origin, _ = layout.segment_origin(stored.key)
        again = self._upload(stored.segment, origin, self._context.ids.new())
        return dataclasses.replace(again, is_copy=True)

    def _key(self, segment_id: str, partitions: int, copy_id: str) -> tuple[str, int]:
        generation = self._topic.generation  # read once: another thread may see a newer one
        key = layout.segment(self._topic.incarnation, generation, segment_id, partitions, copy_id)
        return key, generation

    def _remove_state(self, partition: int, version: str) -> None:
        where = layout.topic_partition(self._topic.incarnation, partition)
        change = Delete(layout.producer_row(self._producer), expect=version)
        try:
            self._context.catalog.write(where, change, write_id=self._context.ids.new())
        except (ConflictError, UnknownOutcomeError, UnavailableError):
            return  # the row is a few bytes, and a sweep deletes old ones

    def _busy(self, partition: int) -> UnavailableError:
        where = f"partition `{self._topic.name}/{partition}`"
        return UnavailableError(f"{where}: too many writers at once: try again")

    def _unknown(self, partition: int, why: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"partition `{self._topic.name}/{partition}`: the reply to an append was lost, and "
            f"reading back does not show whether it is stored ({why}): read the topic's end, "
            "then decide"
        )

    def _deleted_error(self) -> NotFoundError:
        return NotFoundError(f"topic `{self._topic.name}`: was deleted: nothing was appended")
