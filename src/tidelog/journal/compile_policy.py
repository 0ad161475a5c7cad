"""Chooses which neighboring rows of a partition become one journal. Pure: rows in, groups out.

Runs are grouped from the oldest on, as many as fit into one journal. The last group waits until it
has enough events or bytes, or is old enough. Journals are rewritten when amendments wait for them,
when several small neighbors make a better one, or, if the policy says so, when the partition's
start lies inside one: the new one leaves out the trimmed events. A merge never rewrites a journal
for less than its own size, so an event is rewritten only a few times, however small the first
journals were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidelog.errors import InvalidError
from tidelog.model.partition_rows import Run

__all__ = [
    "JOURNALS_AT_ONCE",
    "RUNS_AT_ONCE",
    "Candidate",
    "CompileGroup",
    "CompilePolicy",
    "choose_groups",
]

JOURNALS_AT_ONCE = 6  # per swap: each has up to three rows, and a write has a limit
RUNS_AT_ONCE = 10_000  # rows of one group, which are held in memory
_MERGE_MIN = 4  # neighbors that make a merge worthwhile
_NEVER = 1 << 62  # events or bytes
_SMALL = 4  # a journal is small if this many fit into one


@dataclass(frozen=True, slots=True)
class CompilePolicy:
    """When something is compiled, and how large journals get."""

    min_events: int = 10_000  # that wait in runs
    min_bytes: int = 8 << 20  # the same, in the store
    older_than_ms: int | None = 3_600_000  # fewer are compiled if the oldest waits this long
    min_amendments: int = 1_000  # that wait for one journal
    amended_before_ms: int | None = 86_400_000  # fewer are applied if one waits this long
    min_trimmed: int | None = None  # offsets below the start in one journal; None: they stay
    max_events: int = 1_000_000  # of one journal
    max_bytes: int = 32 << 20  # of one journal, in the store: what one amendment rewrites
    max_raw_bytes: int = 512 << 20  # of one journal, before compression

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < (0 if name.endswith("_ms") else 1):
                raise InvalidError(f"compile: {name} is {value}: give more than that")

    @classmethod
    def everything(cls) -> CompilePolicy:
        """Returns a policy that compiles all runs, every amendment, and every trimmed event."""
        return cls(min_events=1, min_amendments=1, min_trimmed=1)

    @classmethod
    def trimmed(cls) -> CompilePolicy:
        """Returns a policy that removes trimmed events, and compiles what fills a journal."""
        return cls(
            min_events=_NEVER,
            min_bytes=_NEVER,
            older_than_ms=None,
            min_amendments=_NEVER,
            amended_before_ms=None,
            min_trimmed=1,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run or a journal, and the amendments that wait for it."""

    run: Run
    amendments: int = 0
    amended_ms: int | None = None  # when the oldest of them was made
    trimmed: int = 0  # offsets below the partition's start whose events it still contains


@dataclass(frozen=True, slots=True)
class CompileGroup:
    """Neighboring rows, journals before runs, that one swap replaces."""

    rows: tuple[Run, ...]

    @property
    def base(self) -> int:
        """Returns the first offset that it covers."""
        return self.rows[0].base

    @property
    def end(self) -> int:
        """Returns the offset after its last."""
        return self.rows[-1].end

    @property
    def journals(self) -> tuple[Run, ...]:
        """Returns those of its rows that are journals."""
        return tuple(row for row in self.rows if row.journal is not None)

    @property
    def bytes(self) -> int:
        """Returns the size of its rows in the store."""
        return sum(row.byte_end - row.byte_start for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Neighbors that stay together."""

    candidates: tuple[Candidate, ...]

    @property
    def events(self) -> int:
        return sum(each.run.events for each in self.candidates)

    @property
    def bytes(self) -> int:
        return sum(each.run.byte_end - each.run.byte_start for each in self.candidates)

    @property
    def raw_bytes(self) -> int:
        return sum(each.run.raw_bytes for each in self.candidates)


def choose_groups(
    journals: Sequence[Candidate], runs: Sequence[Candidate], policy: CompilePolicy, now_ms: int
) -> list[CompileGroup]:
    """Returns what to compile now, from the oldest on; no row is in two groups.

    ``runs`` may be the first of many, and all of them follow the journals.
    """
    ready = _ready(list(_fill_groups(runs, policy)), policy, now_ms)
    parts = [_Neighbours((each,)) for each in journals] + ready[:1]
    groups = [*_merge_groups(parts, len(journals), policy, now_ms), *ready[1:]]
    return [CompileGroup(tuple(each.run for each in part.candidates)) for part in groups]


def _fill_groups(runs: Sequence[Candidate], policy: CompilePolicy) -> Iterator[_Neighbours]:
    """Yields runs in groups that each fill a journal; the last one may be small."""
    waiting: list[Candidate] = []
    events = size = raw = 0
    for each in runs:
        run = each.run
        run_bytes = run.byte_end - run.byte_start
        is_full = (
            events + run.events > policy.max_events
            or size + run_bytes > policy.max_bytes
            or raw + run.raw_bytes > policy.max_raw_bytes
            or len(waiting) >= RUNS_AT_ONCE
        )
        if waiting and is_full:
            yield _Neighbours(tuple(waiting))
            waiting, events, size, raw = [], 0, 0, 0
        waiting.append(each)
        events, size, raw = events + run.events, size + run_bytes, raw + run.raw_bytes
    if waiting:
        yield _Neighbours(tuple(waiting))


def _ready(parts: list[_Neighbours], policy: CompilePolicy, now_ms: int) -> list[_Neighbours]:
    """Returns all except the last, which waits until it is worth a journal."""
    if not parts:
        return []
    last = parts[-1]
    oldest_ms = min(each.run.committed_ms for each in last.candidates)
    is_due = (
        last.events >= policy.min_events
        or last.bytes >= policy.min_bytes
        or _is_over(policy.older_than_ms, oldest_ms, now_ms)
        or _is_amended(last, policy, now_ms)
    )
    return parts if is_due else parts[:-1]


def _is_amended(part: _Neighbours, policy: CompilePolicy, now_ms: int) -> bool:
    if sum(each.amendments for each in part.candidates) >= policy.min_amendments:
        return True
    times = [each.amended_ms for each in part.candidates if each.amended_ms is not None]
    return bool(times) and _is_over(policy.amended_before_ms, min(times), now_ms)


def _is_over(wait_ms: int | None, since_ms: int, now_ms: int) -> bool:
    """Returns whether a wait is over; also one that a clock which was far ahead has begun.

    Otherwise a delete by a machine whose clock is a year ahead would be carried out in a year.
    """
    return wait_ms is not None and abs(now_ms - since_ms) >= wait_ms


def _is_cut(part: _Neighbours, policy: CompilePolicy) -> bool:
    """Returns whether enough of it was trimmed to rewrite it; else its bytes stay for long."""
    trimmed = sum(each.trimmed for each in part.candidates)
    return policy.min_trimmed is not None and trimmed >= policy.min_trimmed


def _merge_groups(
    parts: list[_Neighbours], journals: int, policy: CompilePolicy, now_ms: int
) -> Iterator[_Neighbours]:
    """Yields journals to rewrite, alone or with neighbors, and everything after them."""
    at = 0
    while at < len(parts):
        window = _window(parts[at:], policy)
        if len(window) >= _MERGE_MIN and _is_worth(window):
            yield _Neighbours(tuple(each for part in window for each in part.candidates))
            at += len(window)
            continue
        if at >= journals or _is_amended(parts[at], policy, now_ms) or _is_cut(parts[at], policy):
            yield parts[at]
        at += 1


def _window(parts: list[_Neighbours], policy: CompilePolicy) -> list[_Neighbours]:
    """Returns the first small neighbors that fit into one journal together."""
    window: list[_Neighbours] = []
    events = size = raw = rows = 0
    for part in parts[:JOURNALS_AT_ONCE]:
        events, size, raw = events + part.events, size + part.bytes, raw + part.raw_bytes
        rows += len(part.candidates)
        is_small = (
            part.events * _SMALL <= policy.max_events
            and part.bytes * _SMALL <= policy.max_bytes
            and part.raw_bytes * _SMALL <= policy.max_raw_bytes
        )
        fits = (
            events <= policy.max_events
            and size <= policy.max_bytes
            and raw <= policy.max_raw_bytes
            and rows <= RUNS_AT_ONCE
        )
        if not (is_small and fits):
            break
        window.append(part)
    return window


def _is_worth(window: Sequence[_Neighbours]) -> bool:
    sizes = [part.bytes for part in window]
    return 2 * max(sizes) <= sum(sizes)
