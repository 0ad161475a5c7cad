"""Uploads flushes in parallel and commits them in order.

A pool of threads encodes and uploads flushes. Each flush commits after the ones that started before
it. The bytes on their way are limited. A flush that fails also fails those behind it, so that
events stay in order within a partition. For a named producer the queue then stays failed, since
later sequences must not overtake lost ones.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import wait

from tidelog.codec.partitioner import KeylessTurns
from tidelog.codec.segment import encode_segment
from tidelog.concurrency import Pool, ProcessGuard, RefusingLock
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    InvalidError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.producer.flush import Flush, FlushFailures, FlushPart
from tidelog.model.topic import Piece, Topic

__all__ = ["UPLOADS", "FlushQueue"]

UPLOADS = 4  # flushes on their way at a time
_FULL_TIMEOUT_S = 60.0  # how long a full buffer may block


class FlushQueue:
    """The flushes of one producer on their way. Its lock also guards the producer's buffer."""

    def __init__(self, context: Context, topic: Topic, appender: Appender, named: bool) -> None:
        self._context = context
        self._topic = topic
        self._appender = appender
        self._named = named
        self.lock = threading.RLock()
        self.state = threading.Condition(self.lock)
        self.guard = ProcessGuard(f"producer of `{topic.name}`", self._leave_to_parent)
        self.closed = False
        self.under_way: dict[int, Flush] = {}
        self.held_bytes = 0  # on their way
        self.keyless = KeylessTurns(topic.partitions, context.random.randrange(topic.partitions))
        self._next = 0  # the number of the next flush
        self._turn = 0
        self._failed_until = 0  # flushes with a lower number fail with the one before them
        self._cause: BaseException | None = None
        self._failures = FlushFailures()
        self._pool = Pool(UPLOADS, "tidelog-upload")
        self._committers: Pool | None = None

    def start(self, flush: Flush) -> None:
        """Starts a flush on its way. The lock must be held.

        A signal handler may raise in the middle of it. Later flushes wait for this one's turn, so
        once it has a number it is submitted in any case, perhaps twice; it runs once.
        """
        flush.number = self._next
        self.under_way[flush.number] = flush
        self.held_bytes += flush.size
        self._next += 1
        try:
            self._pool.submit(self._run, flush)
        except BaseException:
            self._pool.submit(self._run, flush)
            raise

    def wait_for_room(self, size: int) -> None:
        """Waits for room, with the lock held; raises ``UnavailableError`` after a timeout."""

        def usable() -> bool:
            room = self._context.log_settings.buffer_bytes - self.held_bytes
            return self.closed or size <= room or self.held_bytes == 0

        if not usable() and not self.state.wait_for(usable, _FULL_TIMEOUT_S):
            raise UnavailableError(
                f"producer of `{self._topic.name}`: its buffer of "
                f"{self._context.log_settings.buffer_bytes} bytes stayed full for "
                f"{_FULL_TIMEOUT_S} s: the store or catalog is too slow, try again"
            )
        if self.closed:
            raise InvalidError(f"producer of `{self._topic.name}`: is closed: open another")
        if self._named and self._cause is not None:
            raise self._behind(self._cause)

    def close(self) -> None:
        """Ends the threads after everything on its way."""
        self._pool.shutdown(wait=True)
        if self._committers is not None:
            self._committers.shutdown(wait=True)
        with contextlib.suppress(TidelogError):  # a sweep keeps what is not listed for a week
            self._appender.list_abandoned()

    def raise_unreported(self) -> None:
        """Raises the first failure that this thread may not know about (``FlushFailures``)."""
        with self.lock:
            error = self._failures.due()
        if error is not None:
            raise error

    def _leave_to_parent(self) -> None:
        """In a forked child: leaves what is buffered and on its way to the parent."""
        refusing = RefusingLock(self.guard)
        self.lock = self.state = refusing  # type: ignore[assignment]

    def _run(self, flush: Flush) -> None:
        """Runs one flush, in a thread of the pool; does nothing for one that has begun."""
        if not flush.begin():
            return
        with self._context.spans.span(
            "tidelog.append", flush.links, topic=self._topic.name, events=len(flush)
        ):
            self._upload_and_commit(flush)

    def _upload_and_commit(self, flush: Flush) -> None:
        """Prepares a flush, waits for its turn, and commits it."""
        spans = self._context.spans
        error: BaseException | None = None
        parts: list[FlushPart] = []
        stored: StoredSegment | None = None
        try:
            parts = flush.parts(self.keyless.next, self._named)
            known = self._appender.known([part.partition for part in parts])
            segment = encode_segment([(part.partition, part.table) for part in parts], known)
            with spans.span("tidelog.upload", bytes=len(segment.data)):
                stored = self._appender.upload(segment)
        except BaseException as exc:  # noqa: BLE001 - raised in the callers that wait
            error = exc
        with self.lock:
            self.state.wait_for(lambda: self._turn == flush.number)
            behind = self._cause if self._is_behind(flush) else None
        try:
            if error is None and behind is None and stored is not None:
                with spans.span("tidelog.commit", partitions=len(parts)):
                    self._commit(flush, parts, stored)
        except BaseException as exc:  # noqa: BLE001 - raised in the callers that wait
            error = exc
        try:
            if stored is not None and (error is not None or behind is not None):
                self._abandon(flush, parts, stored)
        finally:  # else all later flushes would wait for their turn forever
            self._finish(flush, error, behind)

    def _abandon(self, flush: Flush, parts: list[FlushPart], stored: StoredSegment) -> None:
        """Notes which parts of a failed flush will never be committed, so that they get listed."""
        placed = flush.positions().offsets
        unknown = flush.unknown_rows()
        for part in parts:
            if (placed[part.rows] < 0).all() and not unknown[part.rows].any():
                self._appender.abandon(part.partition, stored)

    def _commit(self, flush: Flush, parts: list[FlushPart], stored: StoredSegment) -> None:
        def commit(part: FlushPart, piece: Piece, stored: StoredSegment) -> StoredSegment:
            try:
                base, moved = self._commit_part(flush, part, piece, stored)
            except BaseException as exc:
                known = isinstance(exc, TidelogError) and not isinstance(exc, UnknownOutcomeError)
                if not (known or flush.is_refused):  # an error of another kind occurs anywhere
                    flush.note_unknown(part, exc)
                raise
            flush.note_stored(part, base)
            return moved

        pairs = list(zip(parts, stored.segment.pieces, strict=True))
        if len(pairs) == 1 or self._context.commits_at_once == 1:
            for part, piece in pairs:
                stored = commit(part, piece, stored)
            return
        if self._committers is None:
            self._committers = Pool(self._context.commits_at_once, "tidelog-commit")
        # Wait for all parts before the flush ends: the next flush must not overtake one of them.
        commits = [self._committers.submit(commit, *pair, stored) for pair in pairs]
        wait(commits)
        failures = [exc for done in commits if (exc := done.exception()) is not None]
        if failures:
            raise flush.unknown_error() or failures[0]

    def _commit_part(
        self, flush: Flush, part: FlushPart, piece: Piece, stored: StoredSegment
    ) -> tuple[int, StoredSegment]:
        if flush.find_end is not None:
            return self._appender.commit_at(stored, piece, flush.ask_end)
        return self._appender.commit(
            stored, piece, part.sequences, flush.expected_offset, mark=part.mark
        )

    def _finish(
        self, flush: Flush, error: BaseException | None, behind: BaseException | None
    ) -> None:
        """Wakes the callers that wait. Only a flush's own failure fails those behind it."""
        with self.lock:
            self._turn += 1
            self.held_bytes -= flush.size
            del self.under_way[flush.number]
            refused = flush.is_refused or (
                flush.expected_offset is not None and isinstance(error, ConflictError)
            )
            if behind is not None:
                error = self._behind(behind)
            elif error is not None and not refused:
                self._cause = error
                last = max(flush.number, *self.under_way, -1)
                self._failed_until = max(self._failed_until, last + 1)
            self._keep_failure(flush, error)
            flush.finish(error)
            self.state.notify_all()

    def _keep_failure(self, flush: Flush, error: BaseException | None) -> None:
        """Records a failure before callers wake up. A failed ``append`` raises its own error."""
        if error is not None and flush.pending:
            self._failures.add(flush.track_failure(error))

    def _is_behind(self, flush: Flush) -> bool:
        return self._cause is not None and (self._named or flush.number < self._failed_until)

    def _behind(self, cause: BaseException) -> UnavailableError:
        error = UnavailableError(
            f"producer of `{self._topic.name}`: an earlier flush failed ({cause}): "
            + ("open the producer again" if self._named else "send these events again")
        )
        error.__cause__ = cause
        return error
