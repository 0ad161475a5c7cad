"""The scribe: compiles all topics of a home in the background, a turn at a time.

1. Add the ticket of this interval, if no other scribe has.
2. Take the ``lease`` row if a ticket waits and no living scribe has the lease.
3. Run the turn: compile topic after topic, from where the last turn ended, then sweep, until all is
   done or the time is over. A turn stops only between two swaps.
4. Remove the ticket, and record where the next turn begins; expects the lease.
5. Release the lease.

| crash after | what it leaves                     | repair                                       |
|-------------|------------------------------------|----------------------------------------------|
| 1           | a ticket                           | any scribe runs the turn                     |
| 2, 3        | a ticket, a silent owner,          | another scribe repeats the turn after the    |
|             | and what was swapped               | time to live; at once on the same host       |
| 4           | a silent owner                     | the same                                     |
| 5           | nothing                            | none needed                                  |

Safety does not depend on there being one scribe: one that was wrongly considered dead does no harm.

A ticket is added every N minutes, and tickets older than M minutes are dropped. All scribes of a
home share one row. The first one to look in an interval of N minutes adds its ticket, by the row's
version. So each interval has one ticket, however many scribes look. At most M/N tickets wait. A
ticket is removed when its turn ends: if a scribe dies, the next one finds its ticket.

:class:`ScribeMetrics` exports what this process has done, and what waits, for Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace

import msgspec

from tidelog.catalog.base import Check, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.ownership import Ownership
from tidelog.errors import (
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    contained,
)
from tidelog.journal.compile import CompileReport, compile_partition
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.compile_tasks import compile_by_tasks
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.topics import list_topics
from tidelog.model import defaults, layout
from tidelog.model.decoding import Persisted
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms, duration_text
from tidelog.model.topic import Topic, decode_row, encode_row

__all__ = [
    "Queue",
    "Rate",
    "Scribe",
    "ScribeMetrics",
    "ScribeOptions",
    "Tickets",
    "Trouble",
    "Turn",
    "TurnPosition",
]

_QUEUE = "the scribe's queue"
_WAITING_MAX = 1_000  # tickets; the row has a limit


@dataclass(frozen=True, slots=True)
class Rate:
    """When tickets are added and dropped."""

    every_ms: int = duration_ms(defaults.SCRIBE_EVERY)
    discard_ms: int = duration_ms(defaults.SCRIBE_DISCARD)

    def __post_init__(self) -> None:
        if self.every_ms < 1:
            raise InvalidError(f"scribe: a turn every {self.every_ms}ms: give 1ms or more")
        if not self.every_ms < self.discard_ms <= self.every_ms * _WAITING_MAX:
            raise InvalidError(
                f"scribe: a ticket every {duration_text(self.every_ms)}, dropped after "
                f"{duration_text(self.discard_ms)}: drop it after more than "
                f"{duration_text(self.every_ms)} and at most "
                f"{duration_text(self.every_ms * _WAITING_MAX)}"
            )


class TurnPosition(Persisted, frozen=True):
    """A partition of a topic at which a turn begins or ended."""

    topic: str = ""  # the name; empty: the first
    partition: int = 0


class Queue(Persisted, frozen=True):
    """The row that scribes share."""

    issued_ms: int = 0  # the latest interval with a ticket
    tickets: tuple[int, ...] = ()  # those that wait, by their interval, oldest first
    dropped: int = 0  # so far
    turns: int = 0  # so far
    place: TurnPosition = TurnPosition()  # where the next turn begins
    swept_ms: int = 0  # when a sweep last ended, by that scribe's clock


class Tickets:
    """One scribe's view of the queue."""

    def __init__(self, context: Context, rate: Rate) -> None:
        self._context = context
        self._rate = rate

    def issue(self) -> Queue:
        """Adds the ticket of this interval if there is none, drops old ones; returns the queue."""

        def decide(rows: Rows) -> Decision[Queue]:
            queue, _ = _queue_of(rows[layout.SCRIBE_QUEUE])
            wanted = self._with_ticket(queue)
            put = rows.put(layout.SCRIBE_QUEUE, encode_row(wanted))
            return Decision(wanted, [] if wanted == queue else [put])

        return update(self._context, layout.SCRIBE, [layout.SCRIBE_QUEUE], decide, _QUEUE)

    def read(self) -> tuple[Queue, str | None]:
        """Returns the queue and its version; an empty queue if it was never written."""
        return _queue_of(self._context.catalog.get(layout.SCRIBE, layout.SCRIBE_QUEUE))

    def done(self, ticket: int | None, place: TurnPosition, swept_ms: int, held: Check) -> bool:
        """Removes the ticket of a finished turn. Returns False if the lease is no longer ours."""

        def decide(rows: Rows) -> Decision[bool]:
            if rows.expect(held.row) != held.expect:
                return Decision(False)
            queue, _ = _queue_of(rows[layout.SCRIBE_QUEUE])
            wanted = msgspec.structs.replace(
                queue,
                tickets=tuple(each for each in queue.tickets if each != ticket),
                turns=queue.turns + 1,
                place=place,
                swept_ms=swept_ms,  # not the later one, which a wrong clock may have written
            )
            return Decision(True, [rows.put(layout.SCRIBE_QUEUE, encode_row(wanted)), held])

        rows = [layout.SCRIBE_QUEUE, held.row]
        return update(self._context, layout.SCRIBE, rows, decide, _QUEUE)

    def _with_ticket(self, queue: Queue) -> Queue:
        now_ms = self._context.clock.now_ms()
        stretch = now_ms // self._rate.every_ms * self._rate.every_ms
        waiting = queue.tickets
        # An interval in the future comes from a clock that was wrong.
        if stretch > queue.issued_ms or queue.issued_ms > stretch + self._rate.every_ms:
            waiting = (*waiting, stretch)
            queue = msgspec.structs.replace(queue, issued_ms=stretch)
        kept = tuple(each for each in waiting if now_ms - each < self._rate.discard_ms)
        dropped = queue.dropped + len(waiting) - len(kept)
        return msgspec.structs.replace(queue, tickets=kept[-_WAITING_MAX:], dropped=dropped)


def _queue_of(row: Row | None) -> tuple[Queue, str | None]:
    if row is None:
        return Queue(), None
    return decode_row(row.value, Queue, _QUEUE), row.version


_LOOKS = 3  # per interval, and per time to live of another scribe
_LOOK_S_MAX = 5.0
_OVERDUE_MS = 3_600_000  # after this time without one, a sweep does not wait for a turn with time
_SKEW_MS = 60_000  # clocks of hosts may differ by this much without a report


@dataclass(frozen=True, slots=True)
class ScribeOptions:
    """How a scribe works, as plain values."""

    rate: Rate = field(default_factory=Rate)
    policy: CompilePolicy = field(default_factory=CompilePolicy)
    budget_ms: int = duration_ms(defaults.SCRIBE_BUDGET)  # of one turn; a running swap is finished
    grace_ms: int | None = duration_ms(defaults.SWEEP_GRACE)  # of its sweeps; None: no sweeps
    sweep_every_ms: int = duration_ms(defaults.SWEEP_EVERY)
    max_amendments: int | None = None  # of one turn; the swap that reaches it is the last

    def __post_init__(self) -> None:
        for name in ("budget_ms", "grace_ms", "sweep_every_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidError(f"scribe: {name} is {value}: give 0 or more")
        if self.max_amendments is not None and self.max_amendments < 1:
            raise InvalidError(f"scribe: max_amendments is {self.max_amendments}: give 1 or more")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong in a turn, and with which topic; the others were compiled."""

    topic: str
    error: TidelogError


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did."""

    began_ms: int
    seconds: float
    finished: bool  # False: time was over, or it was stopped; the next one resumes
    topics: int  # that it reached
    compiled: CompileReport
    swept: SweepReport | None = None
    troubles: tuple[Trouble, ...] = ()
    erased: int = 0  # events deleted from files of archives
    waiting: int = 0  # remaining tickets
    dropped: int = 0  # tickets, since the home has a scribe
    turns: int = 0  # the same

    @property
    def succeeded(self) -> bool:
        """Returns whether it has done everything that there was to do."""
        well = self.finished and not self.troubles
        return well and (self.swept is None or not self.swept.refused)


class Scribe:
    """One scribe of a home. With a ``pool`` it fetches ahead."""

    def __init__(
        self,
        context: Context,
        how: ScribeOptions | None = None,
        pool: Executor | None = None,
        stopped: Callable[[], bool] = lambda: False,
        after: Callable[[Turn], Turn] = lambda turn: turn,
    ) -> None:
        """``after`` does what a turn does besides topics, and returns the turn with its results."""
        self._after = after
        self._context = context
        self._how = how or ScribeOptions()
        self._pool = pool
        self._stopped = stopped
        self._tickets = Tickets(context, self._how.rate)
        self._holding = Ownership(context, layout.SCRIBE, layout.SCRIBE_LEASE, "the scribe's lease")

    def tick(self) -> Turn | None:
        """Runs one turn if a ticket waits and no other scribe is working; None otherwise.

        >>> home.scribe().tick().finished
        True
        """
        if not self._tickets.issue().tickets or not self._holding.try_take():
            return None
        try:
            tickets = self._tickets.issue().tickets  # another scribe may have run the turn since
            turn = self._turn(tickets[0]) if tickets else None
        finally:
            self._holding.release()
        return None if turn is None else self._after(turn)

    def once(self) -> Turn | None:
        """Runs one turn now, for cron or a function; None if another scribe is working.

        >>> home.scribe().once().succeeded
        True
        """
        if not self._holding.take():
            return None
        try:
            turn = self._turn(next(iter(self._tickets.issue().tickets), None))
        finally:
            self._holding.release()
        return self._after(turn)

    def run(
        self,
        wait: Callable[[float], object],
        on_turn: Callable[[Turn], None],
        on_error: Callable[[TidelogError], None],
    ) -> None:
        """Runs turn after turn until ``stopped``; ``wait`` returns after a number of seconds, or
        sooner.

        Reports a temporary error, such as an unreachable catalog, and tries the turn again.

        >>> import threading
        >>> stop = threading.Event()
        >>> scribe = home.scribe(stopped=stop.is_set)
        >>> scribe.run(stop.wait, on_turn=lambda turn: stop.set(), on_error=print)
        """
        shorter_ms = min(self._how.rate.every_ms, self._context.log_settings.lease_ttl_ms)
        look_s = min(_LOOK_S_MAX, shorter_ms / 1000 / _LOOKS)
        while not self._stopped():
            try:
                turn = self.tick()
            except (InvalidError, CorruptError, InternalError):
                raise
            except TidelogError as exc:
                on_error(exc)
                turn = None
            if turn is not None:
                on_turn(turn)
            else:
                wait(look_s)

    def _turn(self, ticket: int | None) -> Turn:
        clock = self._context.clock
        began_ms, began_s = clock.now_ms(), clock.monotonic_s()
        queue, _ = self._tickets.read()
        with self._holding.beating() as lost:
            work = _TurnWork(
                self._context, self._how, self._pool, lambda: lost.is_set() or self._stopped()
            )
            place = work.compile(queue.place)
            # A home that was never swept counts from its first turn.
            swept_ms = queue.swept_ms or (0 if work.has_time() else began_ms)
            if self._sweeps(swept_ms) and (work.has_time() or self._is_overdue(swept_ms, work)):
                if self._is_ahead(swept_ms):
                    work.note(_wrong_clock(swept_ms, clock.now_ms()))
                work.sweep()
                swept_ms = clock.now_ms()
        turn = work.turn(began_ms, clock.monotonic_s() - began_s, place == TurnPosition())
        if self._holding.is_ours():
            self._tickets.done(ticket, place, swept_ms, self._holding.check())
        after, _ = self._tickets.read()
        return replace(turn, waiting=len(after.tickets), dropped=after.dropped, turns=after.turns)

    def _sweeps(self, swept_ms: int) -> bool:
        if self._how.grace_ms is None:
            return False
        waited_ms = self._context.clock.now_ms() - swept_ms
        return waited_ms >= self._how.sweep_every_ms or self._is_ahead(swept_ms)

    def _is_overdue(self, swept_ms: int, work: _TurnWork) -> bool:
        """Returns whether to sweep after the time limit, since turns that reach it never would."""
        waited_ms = self._context.clock.now_ms() - swept_ms
        longest_ms = max(2 * self._how.sweep_every_ms, _OVERDUE_MS)
        return not work.is_stopped() and (waited_ms >= longest_ms or self._is_ahead(swept_ms))

    def _is_ahead(self, swept_ms: int) -> bool:
        """Returns whether the last sweep is so far in the future that a clock was wrong."""
        return swept_ms - self._context.clock.now_ms() > max(self._how.sweep_every_ms, _SKEW_MS)


class _TurnWork:
    """One turn in progress."""

    def __init__(
        self,
        context: Context,
        how: ScribeOptions,
        pool: Executor | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._context = context
        self._how = how
        self._pool = pool
        self._stopped = stopped
        self._ends_s = context.clock.monotonic_s() + how.budget_ms / 1000
        self._compiled = CompileReport()
        self._swept: SweepReport | None = None
        self._topics: set[str] = set()
        self._whole: set[str] = set()  # topics that tasks have compiled
        self._troubles: list[Trouble] = []

    def go_on(self) -> bool:
        """Returns whether there is time left, and room for amendments."""
        most = self._how.max_amendments
        return (most is None or self._compiled.amendments < most) and self.has_time()

    def has_time(self) -> bool:
        return not self._stopped() and self._context.clock.monotonic_s() < self._ends_s

    def is_stopped(self) -> bool:
        """Returns whether it was stopped, or another scribe has taken over."""
        return self._stopped()

    def compile(self, start: TurnPosition) -> TurnPosition:
        """Compiles all partitions once, starting at ``start``; returns where the next turn begins.

        A partition that took a whole turn and is not done waits until the others had theirs.
        """
        places = list(self._places(start))
        for number, (topic, place) in enumerate(places):
            if not self.go_on():
                return place
            self._compile(topic, place.partition)
            if not self.go_on():
                following = places[(number + 1) % len(places)][1]
                return following if number == 0 else place
        return TurnPosition()

    def sweep(self) -> None:
        """Deletes what nothing refers to."""
        with contained("sweep", self.note):
            self._swept = sweep_home(self._context, self._how.grace_ms or 0)
            self._troubles += [Trouble(each.topic, each.error) for each in self._swept.refused]
            self._troubles += [Trouble("", each) for each in self._swept.unlisted]

    def note(self, error: TidelogError) -> None:
        """Reports an error that concerns no topic."""
        self._troubles.append(Trouble("", error))

    def turn(self, began_ms: int, seconds: float, finished: bool) -> Turn:
        """Returns what was done."""
        return Turn(
            began_ms=began_ms,
            seconds=round(seconds, 3),
            finished=finished,
            topics=len(self._topics),
            compiled=self._compiled,
            swept=self._swept,
            troubles=tuple(self._troubles),
        )

    def _compile(self, topic: Topic, partition: int) -> None:
        self._topics.add(topic.name)
        policy = self._how.policy

        def note(error: TidelogError) -> None:
            if not isinstance(error, NotFoundError):  # otherwise it was deleted in the meantime
                self._troubles.append(Trouble(topic.name, error))

        runner = self._context.tasks
        if runner is not None:
            if topic.incarnation not in self._whole:  # with all its partitions
                self._whole.add(topic.incarnation)
                with contained(f"topic `{topic.name}`", note):
                    before = self._compiled
                    self._compiled = before + compile_by_tasks(
                        self._context, runner, [topic], policy, self.go_on, self._add
                    )
            return
        with contained(f"topic `{topic.name}`: partition {partition}", note):
            for done in compile_partition(
                self._context, topic, partition, policy, self._pool, self.go_on
            ):
                self._add(done)

    def _add(self, done: CompileReport) -> None:
        self._compiled += done

    def _places(self, start: TurnPosition) -> Iterator[tuple[Topic, TurnPosition]]:
        topics = [topic for topic in list_topics(self._context) if topic.state == "ready"]
        found = [
            (topic, TurnPosition(topic.name, partition))
            for topic in topics
            for partition in range(topic.partitions)
        ]
        first = (start.topic, start.partition)
        yield from (each for each in found if (each[1].topic, each[1].partition) >= first)
        yield from (each for each in found if (each[1].topic, each[1].partition) < first)


def _wrong_clock(swept_ms: int, now_ms: int) -> InvalidError:
    ahead = duration_text((swept_ms - now_ms) // 60_000 * 60_000)
    return InvalidError(
        f"scribe: the last sweep is dated {to_iso(swept_ms)}, {ahead} ahead of this machine's "
        "clock: swept again; check the clocks of the machines that run scribes"
    )


@dataclass(slots=True)
class ScribeMetrics:
    """Counts of one process; all are counters except the last three."""

    turns: int = 0
    turns_unfinished: int = 0
    turn_seconds: float = 0.0
    journals: int = 0
    runs: int = 0
    events: int = 0
    amendments: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    objects_swept: int = 0
    bytes_swept: int = 0
    stores_unlisted: int = 0
    errors: int = 0
    tickets_dropped: int = 0
    tickets_waiting: int = 0
    last_turn_timestamp_seconds: float = 0.0

    def add(self, turn: Turn) -> None:
        """Adds a finished turn."""
        done = turn.compiled
        self.turns += 1
        self.turns_unfinished += not turn.finished
        self.turn_seconds += turn.seconds
        self.journals += done.journals
        self.runs += done.runs
        self.events += done.events
        self.amendments += done.amendments
        self.bytes_read += done.bytes_before
        self.bytes_written += done.bytes_after
        if turn.swept is not None:
            self.objects_swept += turn.swept.objects_deleted
            self.bytes_swept += turn.swept.bytes_deleted
            self.stores_unlisted = len(turn.swept.unlisted)
        self.errors += len(turn.troubles)
        self.tickets_dropped = turn.dropped
        self.tickets_waiting = turn.waiting
        self.last_turn_timestamp_seconds = turn.began_ms / 1000 + turn.seconds

    def text(self) -> str:
        """Returns the text in Prometheus' exposition format."""
        lines = []
        for each in fields(self):
            is_counter = each.name not in _GAUGES
            name = f"tidelog_scribe_{each.name}" + ("_total" if is_counter else "")
            lines += [
                f"# HELP {name} {_HELP[each.name]}.",
                f"# TYPE {name} {'counter' if is_counter else 'gauge'}",
                f"{name} {getattr(self, each.name)}",
            ]
        return "".join(f"{line}\n" for line in lines)


_GAUGES = ("stores_unlisted", "tickets_waiting", "last_turn_timestamp_seconds")
_HELP = {
    "turns": "Turns of this scribe",
    "turns_unfinished": "Turns whose time was over before all was done",
    "turn_seconds": "How long turns took",
    "journals": "Journals that were made",
    "runs": "Runs and journals that they took the place of",
    "events": "Events in the journals that were made",
    "amendments": "Updates and deletes that were applied",
    "bytes_read": "Bytes of what was replaced",
    "bytes_written": "Bytes of the journals that were made",
    "objects_swept": "Objects that its sweeps deleted",
    "bytes_swept": "Bytes of these objects",
    "stores_unlisted": "Stores whose unfinished uploads the last sweep could not list or remove",
    "errors": "Topics that could not be compiled or swept, turn by turn",
    "tickets_dropped": "Tickets of the home that were too old when a scribe looked",
    "tickets_waiting": "Tickets of the home that wait for a turn",
    "last_turn_timestamp_seconds": "When the last turn of this scribe ended",
}
