"""The scribe: compiles all topics of a home in the background, a turn at a time.

1. issue: the ticket of this stretch of time, if nobody has (``journal.tickets``)
2. take the ``lease`` row, if a ticket waits and no living scribe has it
3. the turn: compile topic after topic, from where the last turn left, then sweep, until all is done
   or the time is over; it is left between two swaps only
4. remove the ticket, and note where the next turn begins, by the lease
5. release the lease

| dies after | what is there                      | who repairs it                               |
|------------|------------------------------------|----------------------------------------------|
| 1          | a ticket                           | any scribe has the turn                      |
| 2, 3       | a ticket, an owner that is silent, | another scribe, after the time to live, at   |
|            | and what was swapped               | once on the same host: it has the turn again |
| 4          | an owner that is silent            | the same                                     |
| 5          | nothing                            | nobody needs to                              |

Nothing rests on there being one: a scribe that was taken for dead does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from tidelog.errors import (
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    contained,
)
from tidelog.journal.compile import CompileReport, compile_partition
from tidelog.journal.policy import Policy
from tidelog.journal.tickets import Place, Rate, Tickets
from tidelog.log.base import Log
from tidelog.log.holding import Holding
from tidelog.log.sweep import SweepReport, sweep_home
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.event import to_iso
from tidelog.model.times import duration_text
from tidelog.model.topic import Topic

__all__ = ["Scribe", "Scribing", "Trouble", "Turn"]

_LOOKS = 3  # within a stretch, and within the time to live of another scribe
_LOOK_S_MAX = 5.0
_SKEW_MS = 60_000  # by which clocks of hosts may differ without a report


@dataclass(frozen=True, slots=True)
class Scribing:
    """How a scribe works; plain values."""

    rate: Rate = field(default_factory=Rate)
    policy: Policy = field(default_factory=Policy)
    budget_ms: int = 300_000  # of one turn; the swap under way is finished
    grace_ms: int | None = 3_600_000  # of its sweeps; None: it does not sweep
    sweep_every_ms: int = 3_600_000

    def __post_init__(self) -> None:
        for name in ("budget_ms", "grace_ms", "sweep_every_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidError(f"scribe: {name} is {value}: give 0 or more")


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
    finished: bool  # False: the time was over, or it was stopped; the next one goes on
    topics: int  # that it came to
    compiled: CompileReport
    swept: SweepReport | None = None
    troubles: tuple[Trouble, ...] = ()
    erased: int = 0  # events that were taken out of files of archives
    waiting: int = 0  # tickets that are left
    dropped: int = 0  # tickets, since the home has a scribe
    turns: int = 0  # the same


class Scribe:
    """One scribe of a home. ``pool`` fetches ahead."""

    def __init__(
        self,
        log: Log,
        how: Scribing | None = None,
        pool: Executor | None = None,
        stopped: Callable[[], bool] = lambda: False,
        after: Callable[[Turn], Turn] = lambda turn: turn,
    ) -> None:
        """``after`` does what a turn does beside topics, and returns the turn with that."""
        self._after = after
        self._log = log
        self._how = how or Scribing()
        self._pool = pool
        self._stopped = stopped
        self._tickets = Tickets(log, self._how.rate)
        self._holding = Holding(log, layout.SCRIBE, layout.SCRIBE_LEASE, "the scribe's lease")

    def tick(self) -> Turn | None:
        """One turn, if a ticket waits and no other scribe is at work."""
        if not self._tickets.issue().tickets or not self._holding.try_take():
            return None
        try:
            tickets = self._tickets.issue().tickets  # another scribe may have had the turn since
            turn = self._turn(tickets[0]) if tickets else None
        finally:
            self._holding.release()
        return None if turn is None else self._after(turn)

    def once(self) -> Turn | None:
        """One turn now, for cron or a function; None while another scribe is at work."""
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
        """Turn after turn, until ``stopped``; ``wait`` returns after so many seconds, or sooner.

        An error that may pass, such as a catalog that is out of reach, is told, and the turn is
        tried again.
        """
        shorter_ms = min(self._how.rate.every_ms, self._log.settings.lease_ttl_ms)
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
        clock = self._log.clock
        began_ms, began_s = clock.now_ms(), clock.monotonic_s()
        queue, _ = self._tickets.read()
        with self._holding.beating() as lost:
            work = _Work(self._log, self._how, self._pool, lambda: lost.is_set() or self._stopped())
            place = work.compile(queue.place)
            swept_ms = queue.swept_ms
            if place == Place() and self._sweeps(swept_ms) and work.go_on():
                if self._is_ahead(swept_ms):
                    work.note(_wrong_clock(swept_ms, clock.now_ms()))
                work.sweep()
                swept_ms = clock.now_ms()
        turn = work.turn(began_ms, clock.monotonic_s() - began_s, place == Place())
        if self._holding.is_ours():
            self._tickets.done(ticket, place, swept_ms, self._holding.check())
        after, _ = self._tickets.read()
        return replace(turn, waiting=len(after.tickets), dropped=after.dropped, turns=after.turns)

    def _sweeps(self, swept_ms: int) -> bool:
        if self._how.grace_ms is None:
            return False
        waited_ms = self._log.clock.now_ms() - swept_ms
        return waited_ms >= self._how.sweep_every_ms or self._is_ahead(swept_ms)

    def _is_ahead(self, swept_ms: int) -> bool:
        """Whether the last sweep is dated so far ahead that its clock or ours was wrong."""
        return swept_ms - self._log.clock.now_ms() > max(self._how.sweep_every_ms, _SKEW_MS)


class _Work:
    """One turn under way."""

    def __init__(
        self, log: Log, how: Scribing, pool: Executor | None, stopped: Callable[[], bool]
    ) -> None:
        self._log = log
        self._how = how
        self._pool = pool
        self._stopped = stopped
        self._ends_s = log.clock.monotonic_s() + how.budget_ms / 1000
        self._compiled = CompileReport()
        self._swept: SweepReport | None = None
        self._topics: set[str] = set()
        self._troubles: list[Trouble] = []

    def go_on(self) -> bool:
        """Whether there is time left."""
        return not self._stopped() and self._log.clock.monotonic_s() < self._ends_s

    def compile(self, start: Place) -> Place:
        """All partitions, from a place on and around; where the next turn begins.

        A partition that had a whole turn and is not done waits until the others had theirs.
        """
        places = list(self._places(start))
        for number, (topic, place) in enumerate(places):
            if not self.go_on():
                return place
            self._compile(topic, place.partition)
            if not self.go_on():
                following = places[(number + 1) % len(places)][1]
                return following if number == 0 else place
        return Place()

    def sweep(self) -> None:
        """Delete what nobody refers to."""
        with contained("sweep", self.note):
            self._swept = sweep_home(self._log, self._how.grace_ms or 0)
            self._troubles += [Trouble(each.topic, each.error) for each in self._swept.refused]
            self._troubles += [Trouble("", each) for each in self._swept.unlisted]

    def note(self, error: TidelogError) -> None:
        """Report something that concerns no topic."""
        self._troubles.append(Trouble("", error))

    def turn(self, began_ms: int, seconds: float, finished: bool) -> Turn:
        """What was done."""
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
            if not isinstance(error, NotFoundError):  # else it was deleted meanwhile
                self._troubles.append(Trouble(topic.name, error))

        with contained(f"topic `{topic.name}`: partition {partition}", note):
            for done in compile_partition(
                self._log, topic, partition, policy, self._pool, self.go_on
            ):
                self._compiled += done

    def _places(self, start: Place) -> Iterator[tuple[Topic, Place]]:
        topics = [topic for topic in list_topics(self._log) if topic.state == "ready"]
        found = [
            (topic, Place(topic.name, partition))
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
