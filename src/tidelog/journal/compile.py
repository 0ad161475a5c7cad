"""Compile: many runs become one journal, with amendments applied; offsets stay as they were.

For one partition, in six steps; anybody may die, run twice or sweep between any two of them:

1. take the partition's ``compile`` row: owner, epoch + 1
2. plan: read the head, then amendments, then rows; choose neighbours by policy, from the oldest on;
   list the journals that will be made as unused
3. read them, encode journals, and upload each under the epoch
4. swap: in one write the head (``journaled``, ``compiled`` + 1), the journal and its slot rows; it
   deletes the rows of journals that it replaces, lists these as unused, and deletes the row of
   step 2; it expects the head and the ``compile`` row (``journal.swap``)
5. delete the rows of runs below ``journaled``, with their slot rows; list their objects as unused
6. release the ``compile`` row

| dies after | what is there                          | who repairs it                          |
|------------|----------------------------------------|-----------------------------------------|
| 1, 2       | an owner that is silent                | the next compile, after the time to     |
|            |                                        | live; at once on the same host          |
| 3          | the same; journals that no row needs   | the next sweep                          |
| 4          | the journal; rows of runs that no      | the next compile, trim or sweep does    |
|            | reader counts                          | step 5                                  |
| 5, partly  | the same, fewer                        | the same                                |
| 5          | an owner that is silent                | as after 1                              |
| 6          | nothing but the journal                | nobody needs to                         |

The runs' objects go with a sweep. A sweep raises the epoch of a partition that is being compiled:
the swap then fails, the row is taken anew and the journal is copied under the new epoch, or made
again. Amendments that come after step 2 stay pending: the journal's row says up to which sequence
it has them. Readers in the middle of old runs go on: what they hold is as good as before, and when
an object is gone they read the catalog again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace

from tidelog.catalog.base import Check
from tidelog.errors import CorruptError, FencedError, NotFoundError, UnavailableError
from tidelog.journal.make import Made, Pages, Work, make_journals
from tidelog.journal.plan import Marks, Plan, make_plan, read_marks
from tidelog.journal.policy import Group, Policy
from tidelog.journal.swap import Swap
from tidelog.log.amended import Amendments, pending
from tidelog.log.base import Log
from tidelog.log.holding import Holding
from tidelog.log.leftovers import remove_shadowed
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.run import Head
from tidelog.model.topic import Topic

__all__ = [
    "CompileReport",
    "Compiling",
    "Planned",
    "compile_partition",
    "compile_topic",
    "waiting_bytes",
]

_IN_VAIN_MAX = 10  # groups one after another that others changed under our hands

GoOn = Callable[[], bool]
"""Asked between swaps; what is left when it says no is done by whoever comes next."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What was compiled."""

    partitions: int = 0  # in which there was something to do
    busy: int = 0  # of them, that another process compiles
    journals: int = 0  # that were made
    runs: int = 0  # that they took the place of, journals included
    events: int = 0  # in the new journals
    amendments: int = 0  # that were applied
    bytes_before: int = 0  # of what was replaced, in the store
    bytes_after: int = 0

    def __add__(self, other: CompileReport) -> CompileReport:
        names = [field.name for field in fields(self)]
        return CompileReport(**{n: getattr(self, n) + getattr(other, n) for n in names})


@dataclass(frozen=True, slots=True)
class Planned:
    """A group to make journals of, as the partition was when it was planned."""

    work: Work
    head: Head
    compiled: int  # what the swap expects
    amendments: Amendments | None = None  # all of the partition, where the plan has read them


class Compiling:
    """One process's compile of one partition, step by step."""

    def __init__(self, log: Log, topic: Topic, partition: int, policy: Policy) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition
        self._policy = policy
        self._marks: Marks | None = None
        self._swapped = 0  # since the plan was made
        self._journaled = 0  # up to where journals are known to stand
        where = layout.topic_partition(topic.incarnation, partition)
        what = f"the compiler of `{topic.name}/{partition}`"
        self.holding = Holding(log, where, layout.COMPILE_ROW, what, self._guard)
        self._swap = Swap(log, topic, partition, self.holding)

    def plan(self) -> Plan:
        """Step 2. What comes after the first plan is left to the next compile."""
        head, _ = read_head(self._log, self._topic, self._partition)
        amendments = None
        if self._marks is None:
            self._marks, amendments = read_marks(self._log, self._topic, self._partition, head)
        self._swapped = 0
        self._journaled = max(self._journaled, head.journaled)
        place = self._topic, self._partition
        plan = make_plan(self._log, place, head, self._policy, self._marks)
        return replace(plan, amendments=amendments, sequence=head.amendments)

    def prepare(self, plan: Plan, group: Group) -> Planned:
        """The work of a group, as of now; those before it in the plan may be swapped already.

        Its journals are listed as unused until the swap: should this process die, they are garbage.
        ``FencedError`` when another process compiles the partition by now.
        """
        head, _ = read_head(self._log, self._topic, self._partition)
        work_id = self._log.ids.new()
        epoch = self._swap.list_work(work_id)
        work = Work(
            topic=self._topic,
            partition=self._partition,
            epoch=epoch,
            id=work_id,
            group=group,
            start=head.start,
            applied=head.amendments,
            max_raw_bytes=self._policy.max_raw_bytes,
        )
        known = plan.amendments if plan.sequence == head.amendments else None
        return Planned(work, head, plan.compiled, known)

    def is_stale(self, planned: Planned) -> bool:
        """Whether somebody else has swapped since the plan was made."""
        return planned.head.compiled != planned.compiled + self._swapped

    def check_lost(self, planned: Planned, lost: NotFoundError) -> None:
        """Whether an object of a group could go, since rows have changed; raises if not."""
        head, _ = read_head(self._log, self._topic, self._partition)
        before, key = planned.head, lost.context.get("key")
        same = (before.compiled, before.start, before.amendments) == (
            head.compiled,
            head.start,
            head.amendments,
        )
        if key is not None and same:
            raise CorruptError(
                f"object `{key}`: is gone, but partition `{self._topic.name}/{self._partition}` "
                "has events there: restore it from a copy, and run `tidelog verify`"
            ) from lost

    def pages(self, planned: Planned) -> Pages:
        """The amendments of a group, page by page; not read again where the plan has them all."""
        end = planned.work.group.end
        if planned.amendments is not None:
            known = planned.amendments.between(planned.work.group.base, end)
            return lambda _: known

        def page(at: int) -> Amendments:
            return pending(self._log, self._topic, self._partition, planned.head, at, end)

        return page

    def swap(self, planned: Planned, made: Made) -> CompileReport | None:
        """Step 4; None: rows have changed, so plan anew."""
        group = planned.work.group
        compiled = planned.compiled + self._swapped
        if not self._swap.run(group, made.journals, compiled, planned.head):
            return None
        self._swapped += 1
        self._journaled = max(self._journaled, group.end)
        return CompileReport(
            journals=len(made.journals),
            runs=len(group.rows),
            events=sum(run.events for run in made.journals),
            amendments=made.amendments,
            bytes_before=group.bytes,
            bytes_after=sum(run.byte_end for run in made.journals),
        )

    def clean(self) -> None:
        """Step 5."""
        remove_shadowed(self._log, self._topic, self._partition, self._journaled)

    def _guard(self) -> tuple[Check, ...]:
        """A ``compile`` row is made only where there is a topic."""
        head, version = read_head(self._log, self._topic, self._partition)
        if head.closed:
            raise NotFoundError(f"topic `{self._topic.name}`: was deleted: nothing was compiled")
        return (Check("head", version),)


def compile_topic(
    log: Log,
    topic: Topic,
    policy: Policy,
    pool: Executor | None = None,
    go_on: GoOn = _always,
    on_swap: Callable[[CompileReport], None] = lambda _: None,
) -> CompileReport:
    """Compile all partitions of a topic, one after another; ``pool`` fetches ahead.

    Idempotent, and safe at any time beside anything. ``NotFoundError`` when the topic was deleted.
    """
    total = CompileReport()
    for partition in range(topic.partitions):
        if not go_on():
            break
        for done in compile_partition(log, topic, partition, policy, pool, go_on):
            on_swap(done)
            total += done
    return total


def waiting_bytes(log: Log, topic: Topic, policy: Policy) -> int:
    """What a compile would replace, in the store; more may come of it when journals are merged."""
    plans = (Compiling(log, topic, each, policy).plan() for each in range(topic.partitions))
    return sum(group.bytes for plan in plans for group in plan.groups)


def compile_partition(
    log: Log,
    topic: Topic,
    partition: int,
    policy: Policy,
    pool: Executor | None = None,
    go_on: GoOn = _always,
) -> Iterator[CompileReport]:
    """What each swap did, as it is done; nothing where there is nothing to do."""
    compiling = Compiling(log, topic, partition, policy)
    plan = compiling.plan()
    if not plan.groups:
        compiling.clean()
        return
    if not compiling.holding.take():
        yield CompileReport(partitions=1, busy=1)
        return
    try:
        with compiling.holding.beating():
            yield CompileReport(partitions=1)
            yield from _swaps(log, compiling, plan, pool, go_on)
    except FencedError:
        yield CompileReport(busy=1)
    finally:
        compiling.holding.release()


def _swaps(
    log: Log, compiling: Compiling, plan: Plan, pool: Executor | None, go_on: GoOn
) -> Iterator[CompileReport]:
    in_vain = 0
    while plan.groups and go_on():
        for group in plan.groups:
            if not go_on():
                break
            done = _compile_group(log, compiling, compiling.prepare(plan, group), pool)
            if done is None:
                in_vain += 1
                break
            in_vain = 0
            yield done
        compiling.clean()
        if plan.is_whole and not in_vain:
            return
        if in_vain > _IN_VAIN_MAX:
            raise UnavailableError("compile: others keep changing the same rows: compile again")
        plan = compiling.plan()


def _compile_group(
    log: Log, compiling: Compiling, planned: Planned, pool: Executor | None
) -> CompileReport | None:
    if compiling.is_stale(planned):  # the one who compiled before us has done it
        return None
    try:
        made = make_journals(log.store, log.ids, planned.work, compiling.pages(planned), pool)
    except NotFoundError as exc:
        compiling.check_lost(planned, exc)
        return None
    return compiling.swap(planned, made)
