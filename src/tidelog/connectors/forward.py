"""Sends events to Kafka or Kinesis as they come, without a topic in between.

A call returns when the target has acknowledged its events, so no home stores them. Calls that come
at the same time share a lot: one thread puts a lot after another, in the order of the calls. What
waits is bounded in bytes, and in time by each caller.

- Events arrive at least once. After an unknown outcome the caller sends them again.
- An event that the target refuses, such as one that is too large, fails its own call alone. What
  the target is known to refuse never joins a lot. After another refusal the calls of the lot are
  put one by one, except events that were acknowledged.
- While the target is away, calls fail at once, until the time of the next attempt.

Ids, keys, times, types and headers are kept as by a playback to the same target. So Kafka has all
of them, and Kinesis has the key, or the id if there is no key, as the partition key.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLongError
from types import TracebackType

from tidelog.clock import Clock, RandomIds, SystemClock
from tidelog.codec.event_batch import one_batch, table_of, with_position
from tidelog.connectors.sink import ForwardSink, Lot, SinkContext, lots_of, open_forward_sink
from tidelog.errors import (
    InvalidError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.model.address import parse_address
from tidelog.model.event import Event, check_event

__all__ = ["Forwarder", "open_forwarder"]

_SCHEMES = ("kafka", "kinesis")
_BUFFER_BYTES = 64 << 20  # of calls that wait
_CALL_BYTES = 2_000  # of a call in memory besides its events, such as its future and its locks
_EVENT_BYTES = 200  # of an event in memory besides its own, at most
_KNOWN_S = 60.0  # while the settings of a target count; then it decides, and is asked again
_RETRY_S = (1.0, 30.0)  # after which an absent target is tried again: at first, and at most
_TIMEOUT_S = 30.0


def open_forwarder(url: str, *, environ: Mapping[str, str] | None = None) -> Forwarder:
    """Returns a forwarder to ``kafka://host:9092/TOPIC`` or ``kinesis://STREAM?region=…``.

    Needs no home. ``environ`` has the credentials, by default those of the process. Raises
    ``InvalidError`` for another address; the target itself is reached by the first call.

    >>> with tidelog.open_forwarder("kinesis://clicks?region=eu-west-1") as forwarder:
    ...     forwarder.url
    'kinesis://clicks?region=eu-west-1'
    """
    given = os.environ if environ is None else environ  # noqa: TID251 - here the world comes in
    if parse_address(url).scheme not in _SCHEMES:
        raise InvalidError(
            f"forward to `{url}`: give kafka://host:9092/TOPIC or kinesis://STREAM?region=…"
        )
    setting = SinkContext(given, f"forward-{RandomIds().new()}", is_brief=True)
    return Forwarder(url, lambda: open_forward_sink(url, setting))


class _ForwardCall:
    """The events of one caller."""

    __slots__ = ("events", "future", "sent", "size")

    def __init__(self, events: Sequence[Event], size: int) -> None:
        self.events = events
        self.size = size
        self.sent = 0  # events that are acknowledged, from the first
        self.future: Future[int] = Future()


class Forwarder:
    """Sends events to one target, from any number of threads."""

    def __init__(
        self,
        url: str,
        open_sink: Callable[[], ForwardSink],
        *,
        clock: Clock | None = None,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self.url = url
        self._open_sink = open_sink
        self._clock = clock or SystemClock()
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_ForwardCall] = deque()
        self._live: set[_ForwardCall] = set()  # that the thread is not done with
        self._bytes = 0  # of these calls
        self._sink: ForwardSink | None = None
        self._known: tuple[ForwardSink | None, float] = (None, 0.0)  # to check events by, until
        self._number = 0  # of the next event; never that of an event that may be there
        self._failures = 0  # of opening the target, since it last worked
        self._away: tuple[float, str] = (0.0, "")  # until when, and why
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def waiting_bytes(self) -> int:
        """The size of the events that the target has not acknowledged.

        >>> forwarder.waiting_bytes
        0
        """
        return self._bytes

    def connect(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Reaches the target now. Raises ``NotFoundError`` or ``InvalidError`` if there is none.

        A target that does not answer is tried again by the first call, which also waits for an
        attempt that takes longer than ``timeout_s``.

        >>> forwarder.connect()
        """
        with contextlib.suppress(UnavailableError, TooLongError):
            self.connect_soon().result(timeout_s)

    def connect_soon(self) -> Future[int]:
        """Begins to reach the target, and returns a future that is done when it is reached.

        Its error is the target's own: ``UnavailableError`` if it does not answer.

        >>> forwarder.connect_soon().result(10)
        0
        """
        call = _ForwardCall((), 0)
        with self._changed:
            self._enter(call)
        return call.future

    def send(self, events: Sequence[Event], *, timeout_s: float = _TIMEOUT_S) -> int:
        """Sends events and returns how many, once the target has acknowledged all of them.

        Raises ``UnavailableError`` if none was sent, ``UnknownOutcomeError`` if some may be there,
        and ``InvalidError`` for an event that the target refuses.

        >>> forwarder.send([tidelog.Event(b"clicked"), tidelog.Event(b"bought")])
        2
        """
        call = self.send_soon(events)
        try:
            return call.result(timeout_s)
        except TooLongError:
            raise self.late_error(call, timeout_s) from None

    def send_soon(self, events: Sequence[Event]) -> Future[int]:
        """Begins to send events, and returns a future of their number. Raises like :meth:`send`.

        A future that is cancelled in time is never sent.

        >>> forwarder.send_soon([tidelog.Event(b"clicked")]).result(10)
        1
        """
        size = sum(check_event(event, sys.maxsize) + _EVENT_BYTES for event in events)
        call = _ForwardCall(list(events), size + _CALL_BYTES)
        self._check(events)
        if not events:
            call.future.set_result(0)
            return call.future
        with self._changed:
            if self._is_closed:
                raise InvalidError(f"forward to `{self.url}`: is closed: open another one")
            until_s, why = self._away
            left_s = until_s - self._clock.monotonic_s()
            if left_s > 0:
                raise self._unavailable(why, left_s)
            if self._bytes and self._bytes + call.size > self._buffer_bytes:
                raise self._unavailable("more events are on their way than it holds", 1.0)
            self._enter(call)
        return call.future

    def _enter(self, call: _ForwardCall) -> None:
        """Gives a call to the thread. The caller holds the lock."""
        self._bytes += call.size
        self._live.add(call)
        self._waiting.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidelog-forward", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _check(self, events: Sequence[Event]) -> None:
        """Raises ``InvalidError`` for an event that the target refuses by what is known of it."""
        sink, until_s = self._known
        if sink is not None and self._clock.monotonic_s() < until_s:
            now_ms = self._clock.now_ms()
            for event in events:
                sink.check(event, now_ms)

    def late_error(self, call: Future[int], timeout_s: float) -> TidelogError:
        """Returns the error of a call that took too long, which is never sent from now on.

        >>> late = forwarder.send_soon([tidelog.Event(b"clicked")])
        >>> isinstance(forwarder.late_error(late, timeout_s=10), tidelog.TidelogError)
        True
        """
        what = f"is not acknowledged after {timeout_s:g} s"
        if call.cancel():
            return self._unavailable(what, 1.0)
        return self._unknown(what)

    def close(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Sends what waits, and closes. Raises ``UnknownOutcomeError`` if that takes too long.

        Does not wait for a target that hangs while no call needs it.

        >>> forwarder.close()
        """
        until_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_idle, timeout_s):
                raise self._unknown(f"is not closed after {timeout_s:g} s")
            hangs = bool(self._live)
        if self._thread is not None and not hangs:
            self._thread.join(max(0.0, until_s - self._clock.monotonic_s()))

    def _is_idle(self) -> bool:
        """Returns whether no caller waits for the target any more."""
        return all(call.future.done() or not call.events for call in self._live)

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Forwarder({self.url!r})"

    # The thread.

    def _run(self) -> None:
        while calls := self._next():
            self._put(calls)
            self._done(calls)
        self._drop_sink(failed=False)

    def _next(self) -> list[_ForwardCall]:
        """Returns calls for a lot; none when this is closed."""
        sink = self._sink
        events_max = sink.lot_events if sink is not None else 1
        bytes_max = (sink.lot_bytes if sink is not None else None) or self._buffer_bytes
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            calls: list[_ForwardCall] = []
            events = size = 0
            while self._waiting:
                first = self._waiting[0]
                events, size = events + len(first.events), size + first.size
                if calls and (events > events_max or size > bytes_max):
                    break
                calls.append(self._waiting.popleft())
            return calls

    def _done(self, calls: Sequence[_ForwardCall]) -> None:
        with self._changed:
            self._bytes -= sum(each.size for each in calls)
            self._live.difference_update(calls)
            self._changed.notify_all()

    def _opened(self, calls: Sequence[_ForwardCall]) -> ForwardSink | None:
        """Returns the open target. Without one, these calls and all that wait have failed."""
        until_s, why = self._away
        left_s = until_s - self._clock.monotonic_s()
        try:
            if left_s > 0:  # since a call of the same lot
                raise self._unavailable(why, left_s)
            sink = self._sink or self._open()
        except Exception as exc:  # noqa: BLE001 - callers wait for an answer
            cause = unexpected(f"forward to `{self.url}`", exc)
            error = self._is_away(cause) if left_s <= 0 else cause
            with self._changed:
                late, self._waiting = list(self._waiting), deque()
            for each in _begun([*calls, *late]):
                each.future.set_exception(error if each.events else cause)
            self._done(late)
            return None
        self._failures = 0
        return sink

    def _open(self) -> ForwardSink:
        sink = self._sink = self._open_sink()
        self._known = (sink, self._clock.monotonic_s() + _KNOWN_S)
        return sink

    def _is_away(self, error: TidelogError) -> TidelogError:
        """Notes that the target cannot be opened; returns the error for callers."""
        first_s, most_s = _RETRY_S
        wait_s = min(most_s, first_s * 2**self._failures)
        self._failures += 1
        self._away = (self._clock.monotonic_s() + wait_s, str(error))
        return self._unavailable(str(error), wait_s)

    def _put(self, calls: Sequence[_ForwardCall]) -> None:
        """Puts calls as one lot, or one by one if the target refuses an event among them."""
        sink = self._opened(calls)
        calls = _begun(calls) if sink is not None else []
        for call in calls:
            if not call.events:
                call.future.set_result(0)
        calls = [call for call in calls if call.events]
        if sink is None or not calls:
            return
        try:
            events = [event for call in calls for event in call.events[call.sent :]]
            batch = one_batch(table_of(events, self._clock.now_ms()))
            for part in lots_of(with_position(batch, "", 0, 0), sink):
                number, self._number = self._number, self._number + part.num_rows
                sink.put(Lot(number, part))
                _acknowledge(calls, part.num_rows)
        except Exception as exc:  # noqa: BLE001 - as above
            self._drop_sink(failed=True)  # a client may be unusable after any error
            error = unexpected(f"forward to `{self.url}`", exc)
            left = [call for call in calls if call.sent < len(call.events)]
            is_refused = isinstance(error, InvalidError) and "refused" in error.context
            if is_refused and len(left) > 1:
                for call in left:
                    self._put([call])
                return
            for call in left:
                call.future.set_exception(
                    _refusal(error, call.sent) if is_refused else self._unknown(str(error))
                )

    def _drop_sink(self, failed: bool) -> None:
        """Closes the target, which is opened again when it is needed."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):  # all that was acknowledged is there
                sink.close(failed)

    def _unavailable(self, why: str, wait_s: float) -> UnavailableError:
        return UnavailableError(
            f"forward to `{self.url}`: {why}: nothing was sent: try again",
            forward=self.url,
            retry_after_s=max(1, round(wait_s)),
        )

    def _unknown(self, why: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"forward to `{self.url}`: {why}: some events may be there: send them again",
            forward=self.url,
        )


def _begun(calls: Sequence[_ForwardCall]) -> list[_ForwardCall]:
    """Returns the calls that were not cancelled, which can no longer be."""
    return [c for c in calls if c.future.running() or c.future.set_running_or_notify_cancel()]


def _acknowledge(calls: Sequence[_ForwardCall], events: int) -> None:
    """Notes that the target has this number of events more, and completes calls."""
    for call in calls:
        more = min(events, len(call.events) - call.sent)
        if more:
            call.sent, events = call.sent + more, events - more
            if call.sent == len(call.events):
                call.future.set_result(call.sent)


def _refusal(error: TidelogError, sent: int) -> TidelogError:
    """Returns the error of a call whose event is refused, perhaps after others of it were sent."""
    if not sent:
        return error
    text = f"{error.message}: the first {sent} events of this call are there already"
    return InvalidError(text, **error.context, sent=sent)
