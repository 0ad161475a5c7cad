"""Runs a handler over a consumer's events, with retries, filters and dead letters.

A handler gets one event at a time, or lists of them. Partitions may be handled in parallel, each in
order. The cursor moves past an event only when it was handled, skipped, or stored as a dead letter.
A handler that fails under ``stop`` leaves it where it was.

Options choose which events the handler gets, by type and by share, and delay events until they are
old enough. A share is one of n consumers that each handle a part of the events, with a cursor of
its own, for handlers that must run in parallel on keys of one partition. Members of one consumer
share partitions instead, and need no share.

**Fate.** A consumer delivers an event at least once. So a handler must have the same effect however
often it gets an event, and wherever it failed before. A :class:`Fate` makes a handler fail at
random, before, in the middle of and after its work. Run a handler under one to test that::

    fate = Fate(seed=7)

    def handle(event: Event) -> None:
        first_half(event)
        fate.maybe_fail()              # may fail here
        second_half(event)

    consumer.run(fate.with_failures(handle), on_error="stop", retries=50, retry_base_ms=1)

Every failure is a :class:`FateError`. A seed gives the same failures again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from tidelog.clock import Clock
from tidelog.concurrency import Pool
from tidelog.errors import FencedError, InvalidError
from tidelog.model import limits
from tidelog.model.event import Event, Headers
from tidelog.model.times import Backoff

if TYPE_CHECKING:
    from tidelog.log.consumer.consumer import Consumer

__all__ = [
    "Append",
    "Fate",
    "FateError",
    "Handler",
    "HandlerOptions",
    "HandlerSettings",
    "HandlerStopped",
    "KnownSince",
    "ReadOnceResult",
    "Share",
    "dead_letter_of",
    "dead_letter_to",
    "run",
    "try_handler",
    "until_young",
]

_WAIT_S = 1.0  # of a poll
_CAUGHT_UP_FIRST_S = 0.05  # the first poll before it checks whether all is handled; doubles
_REASON_BYTES = 4_000  # limit of the error text in a dead letter
_HEADERS = ("tidelog-position", "tidelog-consumer", "tidelog-error")  # of a dead letter


Append = Callable[[str, list[Event]], object]
"""Appends events to a topic: where dead letters go."""

Handler = Callable[[Event], object] | Callable[[list[Event]], object]
"""Handles an event, or with ``batch`` a list of them."""


class HandlerStopped(BaseException):
    """The run was stopped while an event was being retried."""


class ReadOnceResult(TypedDict):
    """What a one-shot read of a partition did."""

    events_read: int
    done: bool  # nothing is left to read
    busy: bool  # another reader has the partition


class HandlerSettings(TypedDict, total=False):
    """How a consumer runs its handler; the fields of :class:`HandlerOptions`."""

    on_error: Literal["stop", "skip", "dead-letter"]
    retries: int
    retry_base_ms: int
    batch: bool
    max_events: int
    workers: int
    until_caught_up: bool
    types: Collection[str] | None
    share: Share | None
    lag_ms: int
    stop: threading.Event


@dataclass
class HandlerOptions:
    """How a consumer runs its handler."""

    on_error: Literal["stop", "skip", "dead-letter"] = "stop"
    retries: int = 3  # after the first failure, with growing waits
    retry_base_ms: int = 100
    batch: bool = False  # whether the handler takes lists; dead letters lack messages of errors
    max_events: int = 500  # per poll, and so per list
    workers: int = 1  # partitions handled in parallel
    until_caught_up: bool = False  # end when everything in the topic was handled
    types: Collection[str] | None = None  # only events of these types; others are skipped
    share: Share | None = None  # only events of this share
    lag_ms: int = 0  # events younger than this wait, and no event waits longer than this
    dead_letter: Callable[[list[Event], BaseException], object] | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip", "dead-letter"):
            raise InvalidError(f"on_error is `{self.on_error}`: give stop, skip or dead-letter")
        if (self.on_error == "dead-letter") != (self.dead_letter is not None):
            raise InvalidError("on_error dead-letter and dead_letter belong together: give both")
        if min(self.workers, self.max_events) < 1 or self.retries < 0:
            raise InvalidError("workers and max_events must be 1 or more, and retries 0 or more")
        if isinstance(self.types, str) or self.lag_ms < 0:
            raise InvalidError("types must be a list of types, and lag_ms 0 or more")

    def wants(self, event: Event) -> bool:
        """Returns whether the handler gets an event."""
        of_type = self.types is None or event.type in self.types
        return of_type and (self.share is None or self.share.has(event))


def run(
    consumer: Consumer,
    handler: Handler,
    how: HandlerOptions,
    all_or_nothing: Callable[[], contextlib.AbstractContextManager[None]],
) -> int:
    """Polls, handles and commits until stopped; returns how many events were handled.

    A poll comes again if the block ``all_or_nothing`` around it raises. The handlers' own errors
    are raised after it.
    """
    handled = 0
    wait_s = first_s = _CAUGHT_UP_FIRST_S if how.until_caught_up else _WAIT_S
    seen = KnownSince(consumer.context.clock, how.lag_ms / 1000)
    with Pool(how.workers, "tidelog-handler") as pool:
        while not how.stop.is_set():
            with all_or_nothing():  # a signal handler may raise before all is handled
                polled = events = consumer.poll(how.max_events, wait_s)
                wait_s = first_s if polled else min(_WAIT_S, 2 * wait_s)
                if polled and how.lag_ms:
                    seen.note(polled)
                    old_ms = consumer.context.clock.now_ms() - how.lag_ms
                    events, wait_s = until_young(polled, old_ms, consumer.rewind, seen.is_enough)
                    how.stop.wait(min(wait_s, how.lag_ms / 1000))
                groups = [list(each) for _, each in groupby(events, lambda event: event.partition)]
                work = [pool.submit(_handle, consumer, handler, how, group) for group in groups]
                done = [each.result() for each in work]
            failures = [error for _, error in done if error is not None]
            handled += sum(count for count, _ in done)
            # Another member may have a partition now. Without events, cursors pass erased ones.
            with contextlib.suppress(FencedError):
                consumer.commit()
            if failures:
                raise failures[0]
            # Each check of the lag reads every partition, so the waits between them grow.
            if not polled and how.until_caught_up and consumer.caught_up():
                break
    return handled


def dead_letter_to(
    append: Append | None, topic: str, consumer: str, record: Callable[[], None]
) -> Callable[[list[Event], BaseException], object]:
    """Returns what puts events that a handler failed on into a topic, with the reason.

    ``record`` is called before each call that does so, so that proofs know the topic.
    """

    def bury(events: list[Event], error: BaseException) -> object:
        if append is None:
            raise InvalidError("dead letters: this consumer cannot append: open it from a home")
        record()
        return append(
            topic, [dead_letter_of(each, error, consumer, len(events)) for each in events]
        )

    return bury


def dead_letter_of(event: Event, error: BaseException, consumer: str, among: int = 1) -> Event:
    """Returns the event with headers that record its position, the consumer, and the error.

    The message of an error may quote an event. The one of a batch may quote another event, and
    would stay here when that one is erased. So of a batch only the kind of error is recorded.

    The headers fit into the room that is reserved for Tidelog's own additions, so an event at every
    limit can become a dead letter too. A dead letter of a dead letter keeps earlier headers while
    there is room.
    """
    said = f"{error}" if among == 1 else f"in a batch of {among:,} events"
    reason = f"{type(error).__name__}: {said}"
    values = (str(event.position).encode(), consumer.encode(), _cut(reason))
    headers: Headers = event.headers
    if len(headers) + len(_HEADERS) > limits.HEADERS_MAX + limits.OWN_HEADERS_MAX:
        headers = tuple(header for header in headers if header[0] not in _HEADERS)
    headers = (*headers, *zip(_HEADERS, values, strict=True))
    return Event(event.value, event.key, event.id, event.timestamp, event.type, headers)


def _cut(text: str) -> bytes:
    """Returns the start of a text as UTF-8, without a broken character at the end."""
    data = text.encode("utf-8", "replace")[:_REASON_BYTES]
    return data.decode("utf-8", "ignore").encode()


def _handle(
    consumer: Consumer, handler: Callable[[Any], object], how: HandlerOptions, events: list[Event]
) -> tuple[int, BaseException | None]:
    """Handles one partition's events in order; returns how many succeeded, and what stopped it."""
    events = [event for event in events if how.wants(event)]
    if not events:
        return 0, None
    units = [events] if how.batch else [[event] for event in events]
    for number, unit in enumerate(units):
        consumer.touch()
        try:
            error = try_handler(handler, how, unit, consumer.context.random)
            if error is not None and how.on_error == "dead-letter" and how.dead_letter is not None:
                how.dead_letter(unit, error)
                error = None
            if error is None or how.on_error == "skip":
                continue
        except BaseException as exc:  # noqa: BLE001 - raised by run, when the rest is committed
            error = None if isinstance(exc, HandlerStopped) else exc
        consumer.rewind(unit[0].partition or 0, unit[0].offset or 0)
        return (0 if how.batch else number), error
    return len(events), None


def try_handler(
    handler: Callable[[Any], object], how: HandlerOptions, unit: list[Event], rng: random.Random
) -> BaseException | None:
    """Calls a handler until it succeeds; returns its last error if it never does.

    Raises ``HandlerStopped`` if the run is stopped between two attempts.
    """
    argument = unit if how.batch else unit[0]
    backoff = Backoff(how.retries + 1, how.retry_base_ms, max(how.retry_base_ms, 30_000))
    delays = backoff.delays_s(rng)
    while True:
        try:
            handler(argument)
        except Exception as exc:
            delay_s = next(delays, None)
            if delay_s is None:
                return exc
            if how.stop.wait(delay_s):
                raise HandlerStopped from exc  # not a failure: the event comes again
        else:
            return None


_FNV_BASE = 0x811C9DC5
_FNV_PRIME = 0x01000193
_WAIT_S_MAX = 1.0  # other partitions may have older ones by then


@dataclass(frozen=True, slots=True)
class Share:
    """Share ``number`` of ``of``, from 0: the events whose hash falls into it."""

    number: int
    of: int
    by: Literal["key", "id", "type"] = "key"

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise InvalidError(f"share {self.number} of {self.of}: give 0 to {self.of - 1}")
        if self.by not in ("key", "id", "type"):
            raise InvalidError(f"share by `{self.by}`: give key, id or type")

    def has(self, event: Event) -> bool:
        """Returns whether an event is in this share.

        One without key, id and type is in the first.

        >>> tidelog.Share(0, 1).has(tidelog.Event(b"a", key=b"k"))
        True
        """
        value = getattr(event, self.by)
        if value is None:
            return self.number == 0
        return fnv1(value if isinstance(value, bytes) else value.encode()) % self.of == self.number

    def name(self, base: str) -> str:
        """Returns the name of this share's consumer, so that each has a cursor: ``base_1_of_3``.

        >>> tidelog.Share(0, 3).name("base")
        'base_1_of_3'
        """
        return f"{base}_{self.number + 1}_of_{self.of}"


def fnv1(data: bytes) -> int:
    """Returns the 32-bit FNV-1 hash, by which reflex divides events."""
    found = _FNV_BASE
    for byte in data:
        found = (found * _FNV_PRIME & 0xFFFFFFFF) ^ byte
    return found


class KnownSince:
    """Since when this process knows the events of each partition, by the monotonic clock.

    An event with a correct time is old enough as soon as it is known for the lag. So one that is
    dated ahead, even by years, need not wait longer either.
    """

    def __init__(self, clock: Clock, lag_s: float) -> None:
        self._clock = clock
        self._lag_s = lag_s
        self._known: dict[int | None, tuple[int, float]] = {}  # up to which offset, since when

    def note(self, events: Sequence[Event]) -> None:
        """Notes polled events; those that were polled before stay known since then."""
        now_s = self._clock.monotonic_s()
        for partition, group in groupby(events, lambda event: event.partition):
            offsets = [event.offset or 0 for event in group]
            if offsets[0] >= self._known.get(partition, (0, 0.0))[0]:
                self._known[partition] = offsets[-1] + 1, now_s

    def is_enough(self, event: Event) -> bool:
        """Returns whether an event is known for the lag."""
        end, since_s = self._known[event.partition]
        is_known = (event.offset or 0) < end
        return is_known and self._clock.monotonic_s() - since_s >= self._lag_s


def until_young(
    events: Sequence[Event],
    old_ms: int,
    rewind: Callable[[int, int], None],
    is_enough: Callable[[Event], bool] = lambda _: False,
) -> tuple[list[Event], float]:
    """Returns the events up to the first of each partition that is too young; rewinds to the rest.

    ``is_enough`` returns whether an event has waited long enough, whatever its time is. If no event
    is old enough, also returns how many seconds to wait.
    """
    young: dict[int, int] = {}
    old: list[Event] = []
    for event in events:
        partition, time_ms = event.partition or 0, event.timestamp
        if partition in young:
            continue
        if isinstance(time_ms, int) and time_ms > old_ms and not is_enough(event):
            young[partition] = time_ms
            rewind(partition, event.offset or 0)
        else:
            old.append(event)
    if old or not young:
        return old, 0.0
    return old, min(_WAIT_S_MAX, (min(young.values()) - old_ms) / 1000)


T = TypeVar("T")


class FateError(Exception):
    """Nothing is wrong: the handler must bear that it was broken off here."""


class Fate:
    """Decides, by chance, what fails; counts it by place, for tests that want all places."""

    def __init__(self, seed: int = 0, rate: float = 0.1) -> None:
        if not 0 <= rate < 1:
            raise InvalidError(f"fate: its rate is {rate}: give a share from 0 to below 1")
        self._random = random.Random(seed)
        self._rate = rate
        self.failed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def maybe_fail(self, place: str = "middle") -> None:
        """Goes on, or fails with ``FateError``.

        >>> tidelog.Fate(rate=0.0).maybe_fail()
        """
        if self._random.random() < self._rate:
            self.failed[place] += 1
            raise FateError(f"fate: failed {place}")
        self.passed[place] += 1

    def with_failures(self, handler: Callable[[T], object]) -> Callable[[T], object]:
        """Returns the handler, failing before it begins and after it is done.

        >>> tidelog.Fate(rate=0.0).with_failures(len)([1, 2])
        2
        """

        def failing(argument: T) -> object:
            self.maybe_fail("before")
            result = handler(argument)
            self.maybe_fail("after")
            return result

        return failing
