"""The status of an archive: progress, lag, drivers, and what is wrong with it.

Reads three rows per source partition and the ends of its source. The head has the totals of all
commits, so a million of them cost no more than one.

Lag in seconds is the age of the oldest waiting event. No row has that, so it is estimated from the
last committed event, which is hardly younger than the next. If that was more than a minute ago, the
partition may have been quiet since: then the next event is read from the source, and its time
counts. If the source cannot be reached, the first estimate stays, which is too high rather than too
low.

``troubles`` lists what is wrong and what to do about it, one line each. It is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tidelog.archive.account import read_account
from tidelog.concurrency import Pool
from tidelog.connectors.by_url import no_source, source_at, store_at
from tidelog.connectors.source import (
    Bounds,
    SkippingSource,
    Source,
    SourcePartition,
    SourceRange,
    bounds_apart,
    waits,
)
from tidelog.connectors.topic.source import TopicSource
from tidelog.context import Context
from tidelog.coordination.ownership import read_members
from tidelog.coordination.pipeline_rows import (
    is_detached,
    is_outside,
    read_partitions,
    read_progress,
    replay_effect,
    replay_pipeline,
)
from tidelog.errors import NotFoundError, TidelogError, unexpected
from tidelog.log.status import DeletedTopic
from tidelog.model import layout
from tidelog.model.archive import Account, Archive
from tidelog.model.pipeline import (
    Aside,
    DriverFailure,
    Intent,
    Progress,
    Totals,
    by_cause,
    joined_names,
    offsets_between,
    same_in,
    without_name,
)
from tidelog.model.times import rough_text
from tidelog.model.topic import decode_row
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.gaps import RemadeError, remade_bounds, source_is_behind
from tidelog.pipeline.source_partitions import track
from tidelog.store.base import lost_remedy

__all__ = [
    "ArchiveStatus",
    "Limits",
    "PartitionStatus",
    "WaitingTimes",
    "lag_limit_ms",
    "read_status",
    "troubles",
]

_AT_ONCE = 8  # source partitions to read in parallel; each is a round trip or two
_NEAR_MS = 60_000  # below this, the last committed event is a good enough estimate
_BEATS_MISSED_MS = 5_000  # how late a heartbeat may be, in addition to its time to live


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The progress of an archive in one source partition."""

    partition: str
    position: str
    end: str | None  # None: the source does not say, or no longer has this partition
    lag: int | None  # waiting events, if the source can count them
    lag_s: float | None  # age of the oldest of them; 0 if none waits
    events: int
    files_written: int  # so far, of dead letters too, and those that were replaced since
    bytes_written: int
    dead: int  # letters that no replay has placed yet
    totals: Totals  # of commits, without replays
    intent_ms: int | None  # since when a range is in progress
    lost_to: str  # the source lost everything before this, and we had not read it
    unread: int = 0  # events of a topic that was deleted before they were archived
    failure: DriverFailure | None = None  # why its driver fails there now
    remade: str = ""  # why the source partition is not the archived one any more
    ended: str = ""  # why a person ended it
    ahead: int = 0  # offsets that its source, an archive, must reach before anything is read
    account: Account | None = None  # of every offset from the begin; None: it has not begun

    @property
    def waits(self) -> bool:
        """Returns whether events wait, if the source knows; offsets without events do not count."""
        if self.remade or self.ended:
            return False  # those do not belong to this archive
        return self.end is not None and self.lag != 0 and self.lag_s != 0

    @property
    def stuck(self) -> bool:
        """Returns whether there is an intent: a range is in progress, or its driver died."""
        return self.intent_ms is not None

    @property
    def last_commit_ms(self) -> int | None:
        """Returns when the last range was committed; None if none was."""
        return self.totals.committed_ms or None


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """The status of one generation of an archive."""

    archive: Archive
    generation: int
    read_ms: int
    drivers: int  # that are alive
    silent: int  # that neither signed off nor sent a heartbeat for a while
    source_error: str  # why the source did not respond
    partitions: tuple[PartitionStatus, ...]
    aside: tuple[Aside, ...] = ()  # ranges that a restored catalog had lost
    failure: DriverFailure | None = None  # why its driver cannot reach the source
    left_out: Mapping[str, str] = field(default_factory=dict)  # what it does not read, and why
    deleted: str = ""  # the topic it reads, if that was deleted
    detached: bool = False  # its folder belongs to the home that this one was copied from
    copy_of: str = ""  # location of the original, if this home is a copy that may not write
    lost: bool = False  # its outside folder has no mark: deleted or not mounted

    @property
    def lag(self) -> int | None:
        """Returns how many events wait in total, if the source can count them."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if len(known) == len(self.partitions) else None

    @property
    def lag_s(self) -> float | None:
        """Returns the age of the oldest event that waits anywhere."""
        return max((each.lag_s for each in self.partitions if each.lag_s is not None), default=None)


@dataclass(slots=True)
class WaitingTimes:
    """Caches the times of waiting events, so that they are read once."""

    known_ms: dict[tuple[str, str, str], int | None] = field(default_factory=dict)

    def time_ms(self, pipeline: str, source: Source, range: SourceRange) -> int | None:
        """Returns the time of the first event of a range; None if unknown."""
        key = (pipeline, range.partition.text, range.start)
        if key not in self.known_ms:
            self.forget(pipeline, range.partition.text)
            self.known_ms[key] = _first_time_ms(source, range)
        return self.known_ms[key]

    def forget(self, pipeline: str, partition: str) -> None:
        for key in [key for key in self.known_ms if key[:2] == (pipeline, partition)]:
            self.known_ms.pop(key, None)


def read_status(
    context: Context,
    archive: Archive,
    generation: int | None = None,
    waiting: WaitingTimes | None = None,
) -> ArchiveStatus:
    """Returns the status of a generation; by default the live one.

    If the source cannot be reached, ``source_error`` says so, and everything else is there.
    """
    number = archive.generation if generation is None else generation
    pipeline = archive.pipeline(number)
    url = archive.format_of(number).source if number != archive.generation else ""
    now_ms = context.clock.now_ms()
    if archive.ended is not None:
        return _read_ended(context, archive, number)
    source = source_at(context, url or archive.source)
    track(context, pipeline, source)
    bounds, error = _ends(source)
    names = {partition.text for partition in bounds} | set(read_partitions(context, pipeline))
    deleted = _deleted(context, pipeline, source, names, bounds)
    names |= {f"{name}/{each}" for name, gone in deleted.items() for each in range(len(gone.ends))}
    failures = read_failures(context, pipeline)
    names |= failures.keys() - {""}
    look = _StatusLook(
        context, pipeline, source, waiting or WaitingTimes(), now_ms, deleted, failures
    )
    drivers, silent = _drivers(context, pipeline, now_ms)
    with Pool(_AT_ONCE) as pool:
        each = pool.map(lambda name: look.at(SourcePartition.named(name), bounds), sorted(names))
        partitions = tuple(each)
    aside = [*read_aside(context, pipeline), *read_aside(context, replay_pipeline(pipeline))]
    aside.sort(key=lambda each: (each.at_ms, each.partition, each.start))
    return ArchiveStatus(
        archive,
        number,
        now_ms,
        drivers,
        silent,
        error,
        partitions,
        tuple(aside),
        failures.get(""),
        source.left_out() if isinstance(source, SkippingSource) else {},
        next(iter(deleted), "") if not bounds else "",
        is_detached(context, archive),
        context.identity.copy_of if is_outside(context, archive) else "",
        _is_lost(context, archive),
    )


def _is_lost(context: Context, archive: Archive) -> bool:
    """Returns whether an outside folder is gone; False if its store does not respond."""
    if not is_outside(context, archive) or not context.identity.owns(archive.home):
        return False
    try:
        store_at(context, archive.store).head(archive.owner)
    except NotFoundError:
        return True
    except TidelogError:
        pass
    return False


def _read_ended(context: Context, archive: Archive, generation: int) -> ArchiveStatus:
    """Returns how an archive was when it ended: its source is not read, and nothing waits."""
    pipeline, now_ms = archive.pipeline(generation), context.clock.now_ms()
    look = _StatusLook(context, pipeline, no_source(context), WaitingTimes(), now_ms, {}, {})
    names = map(SourcePartition.named, read_partitions(context, pipeline))
    drivers, _ = _drivers(context, pipeline, now_ms)
    partitions = tuple(look.at(each, {}) for each in names)
    aside = tuple(read_aside(context, pipeline))
    lost = _is_lost(context, archive)
    return ArchiveStatus(archive, generation, now_ms, drivers, 0, "", partitions, aside, lost=lost)


@dataclass(frozen=True, slots=True)
class _StatusLook:
    """What is needed to look at one source partition after another."""

    context: Context
    pipeline: str
    source: Source
    waiting: WaitingTimes
    now_ms: int
    deleted: dict[str, DeletedTopic]  # the source's topic, by name, if it was deleted
    failures: Mapping[str, DriverFailure]

    def at(
        self, partition: SourcePartition, bounds: dict[SourcePartition, Bounds]
    ) -> PartitionStatus:
        where = layout.pipeline_partition(self.pipeline, partition.text)
        catalog, held = self.context.catalog, bounds.get(partition)
        row, under_way = catalog.get(where, "head"), catalog.get(where, "intent")
        head = Progress(held.first if held else "", 0, 0)
        begun = None
        if row is not None:
            begun = decode_row(row.value, Progress, f"head of `{partition.text}`")
        if begun is not None and begun.position:
            head = begun
        intent_ms = None
        if under_way is not None:
            what = f"intent of `{partition.text}`"
            intent_ms = decode_row(under_way.value, Intent, what).began_ms
        account = read_account(self.context, self.pipeline, partition.text)
        replays = replay_effect(self.context, self.pipeline, partition.text)
        failure = self.failures.get(partition.text)
        if failure is not None and failure.at_ms < head.totals.committed_ms:
            failure = None  # it has committed since, but the row could not be deleted
        lost = held is not None and self.source.before(head.position, held.first)
        return PartitionStatus(
            partition=partition.text,
            position=head.position,
            end=held.end if held else None,
            lag=self.source.count(head.position, held.end) if held else None,
            lag_s=self._lag_s(partition, head, held) if held else None,
            events=head.ordinal,
            files_written=head.totals.files + replays.files,
            bytes_written=head.totals.bytes + replays.bytes,
            dead=0 if account is None else account.dead,
            totals=head.totals,
            intent_ms=intent_ms,
            lost_to=held.first if held and lost else "",
            unread=self._unread(partition, head),
            failure=failure,
            remade=self._remade(partition, head, held),
            ended=head.ended,
            ahead=self._ahead(head, held),
            account=account,
        )

    def _remade(self, partition: SourcePartition, head: Progress, held: Bounds | None) -> str:
        """Returns what a driver would report for a source partition that was created again."""
        if held is None or head.ended or not head.epoch:
            return ""
        try:
            remade_bounds(partition, head, held, self.source, accept_loss=False)
        except RemadeError as exc:
            return str(exc)
        except TidelogError:
            return ""  # it can no longer be read
        return ""

    def _ahead(self, head: Progress, held: Bounds | None) -> int:
        """Returns by how many offsets an archive is ahead of its source, another archive."""
        with contextlib.suppress(TidelogError):
            if held is not None and source_is_behind(head, held, self.source):
                return offsets_between(held.end, head.position) or 1
        return 0

    def _unread(self, partition: SourcePartition, head: Progress) -> int:
        gone, number = self.deleted.get(partition.topic), partition.number_in(partition.topic)
        if gone is None or number is None or not head.is_of(gone.incarnation) or head.ended:
            return 0  # if it ended, a person accepted that, and the gap is recorded
        return gone.unread(number, head.position)

    def _lag_s(self, partition: SourcePartition, head: Progress, held: Bounds) -> float | None:
        if not self._waits(SourceRange(partition, head.position, held.end)):
            self.waiting.forget(self.pipeline, partition.text)
            return 0.0
        since_ms = head.totals.event_ms
        if self.now_ms - since_ms > _NEAR_MS:
            behind = self.source.before(head.position, held.first)
            start = held.first if behind else head.position
            rest = SourceRange(partition, start, held.end)
            next_ms = self.waiting.time_ms(self.pipeline, self.source, rest)
            since_ms = since_ms if next_ms is None else next_ms
        return max(0, self.now_ms - since_ms) / 1000 if since_ms >= 0 else None

    def _waits(self, range: SourceRange) -> bool:
        try:
            return waits(self.source, range)
        except TidelogError:
            return True  # as far as known


def _ends(source: Source) -> tuple[dict[SourcePartition, Bounds], str]:
    """Returns what source partitions hold, and why some or all could not be reached."""
    errors: dict[SourcePartition, TidelogError] = {}
    try:
        found = bounds_apart(source, source.partitions(), errors)
    except Exception as exc:  # noqa: BLE001 - a source that is broken in its own way is shown too
        return {}, str(unexpected("source", exc))
    return found, str(next(iter(errors.values()))) if errors else ""


def _deleted(
    context: Context,
    pipeline: str,
    source: Source,
    names: set[str],
    bounds: dict[SourcePartition, Bounds],
) -> dict[str, DeletedTopic]:
    """Returns the topic that an archive read from, by name, if it was deleted."""
    if not isinstance(source, TopicSource):
        return {}
    now = {each.incarnation for each in bounds.values()}
    heads = (read_progress(context, pipeline, name) for name in sorted(names))
    begun = next((head.incarnation for head in heads if head and head.incarnation), "")
    if begun in now or (bounds and not begun):
        return {}
    if begun:
        found = DeletedTopic.read(context, begun)
    else:
        found = DeletedTopic.named(context, source.topic)
    return {source.topic: found} if found else {}


def _first_time_ms(source: Source, range: SourceRange) -> int | None:
    """Returns the time of a range's first event, from the source itself."""
    one = SourceRange(range.partition, range.start, source.cut(range.start, range.limit, 1))
    try:
        for chunk in source.read(one):
            if chunk.batch.num_rows:
                return int(chunk.batch.column("timestamp")[0].value)
    except Exception:  # noqa: BLE001 - the caller falls back on what the rows say
        return None
    return None


def _drivers(context: Context, pipeline: str, now_ms: int) -> tuple[int, int]:
    """Returns how many drivers are alive, and how many are silent."""
    limit_ms = context.log_settings.lease_ttl_ms + _BEATS_MISSED_MS
    is_dead: Callable[[str], bool] = context.processes.is_dead
    members = read_members(context, layout.pipeline_members(pipeline)).values()
    alive = [
        each for each in members if now_ms - each.seen_ms <= limit_ms and not is_dead(each.mark)
    ]
    return len(alive), len(members) - len(alive)


_SLACK_MS = 300_000  # how long a cycle may take, in addition to the policy's wait


@dataclass(frozen=True, slots=True)
class Limits:
    """What still counts as healthy."""

    max_lag: int | None = None  # events; None: as many as arrive within the time below
    max_lag_ms: int | None = None  # None: twice the archive's max_age, plus five minutes
    max_intent_ms: int = 900_000  # a range of one cycle takes seconds to minutes
    max_dead: int = 0
    since_ms: int = 86_400_000  # older dead letters and losses are known by now
    driver: bool = True  # whether one must run while events wait


def lag_limit_ms(archive: Archive) -> int:
    """Returns how long an event may wait before something must be wrong."""
    return 2 * archive.max_age_ms + _SLACK_MS


def troubles(status: ArchiveStatus, limits: Limits) -> list[str]:
    """Returns what is wrong; empty for a healthy archive."""
    if status.lost:
        archive = status.archive
        what = f"archive `{archive.name}` in `{archive.place}`"
        return [f"{what}: {lost_remedy(archive.owner, archive.name)}"]
    if status.archive.ended is not None:
        return list(_of_ended(status.archive))
    if status.detached or status.copy_of:
        return [_of_copied(status)]
    return [*_of_archive(status, limits), *_of_partitions(status, limits)]


def _of_ended(archive: Archive) -> Iterator[str]:
    ended, name = archive.ended, archive.name
    if ended is not None and ended.removing:
        yield (
            f"archive `{name}`: its files are not all deleted: run `tidelog archive delete {name} "
            "--delete-files`"
        )
    elif ended is not None and not ended.settled:
        yield f"archive `{name}`: its end is not complete: run `tidelog archive delete {name}`"


def _of_copied(status: ArchiveStatus) -> str:
    archive = status.archive
    what = f"archive `{archive.name}` in `{archive.place}`"
    if status.copy_of:
        return (
            f"{what}: takes no events in this home, which is a copy of `{status.copy_of}`: run "
            "`tidelog home adopt`, or `tidelog home adopt --moved` if the original is gone"
        )
    return (
        f"{what}: takes no events here, its folder belongs to home `{archive.home}`, which this "
        f"one was copied from: end it here with `tidelog archive delete {archive.name}`, and "
        "create another archive, in a folder of its own, to continue"
    )


def _of_archive(status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    name = f"archive `{status.archive.name}`"
    if status.deleted:
        yield (
            f"{name}: its topic `{status.deleted}` was deleted: end the archive with `tidelog "
            f"archive delete {status.archive.name}`, its files stay; or create the topic again"
        )
    elif status.source_error:
        yield f"{name}: its source cannot be reached: {status.source_error}"
    failure = status.failure
    if failure is not None and status.drivers:
        since_s = (status.read_ms - failure.since_ms) / 1000
        for_ = rough_text(since_s)
        yield f"{name}: its driver has not reached the source for {for_}: {failure.message}"
    if status.silent:
        yield (
            f"{name}: {status.silent} of its drivers died or cannot reach the catalog: "
            f"look at its process, and start it again with `tidelog archive run "
            f"{status.archive.name} --follow`"
        )
    waiting = sum(each.waits for each in status.partitions)
    if limits.driver and waiting and not status.drivers:
        yield (
            f"{name}: events wait in {waiting} source partition{'' if waiting == 1 else 's'}, and "
            f"no driver is running: start `tidelog archive run {status.archive.name} --follow`"
        )


def _of_partitions(status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    """Yields a line for each problem; source partitions that have the same one share it."""
    found = [
        (each.partition, problem)
        for each in status.partitions
        for problem in _of_partition(each, status, limits)
    ]
    for partition, problem, others in by_cause(found):
        what = f"archive `{status.archive.name}`, source partition `{partition}`"
        yield f"{what}: {problem}{same_in(others)}"
    yield from _of_dead(status, limits)


def _of_dead(status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    """Yields one line for the dead letters of all source partitions that have too many."""
    name, limit = status.archive.name, limits.max_dead
    found = [
        each
        for each in status.partitions
        if each.dead > limit and status.read_ms - each.totals.dead_ms <= limits.since_ms
    ]
    if found:
        dead = sum(each.dead for each in found)
        several = len(found) > 1
        yield (
            f"archive `{name}`: {dead} dead letter{'' if dead == 1 else 's'} (limit {limit}"
            f"{' in each source partition' if several else ''}) in "
            f"{joined_names([each.partition for each in found])}: list them with `tidelog archive "
            f"dead {name}`, retry them with `tidelog archive dead {name} --replay` (--parser uses "
            f"another parser), or tolerate them with `tidelog archive status {name} --check "
            f"--max-dead {max(each.dead for each in found)}`"
            f"{', the most in one of them' if several else ''}"
        )


def _of_partition(each: PartitionStatus, status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    now_ms, archive = status.read_ms, status.archive
    if each.failure is not None:
        since_s = (now_ms - each.failure.since_ms) / 1000
        tries = "1 attempt" if each.failure.attempts == 1 else f"{each.failure.attempts} attempts"
        why = without_name(each.partition, each.failure.message)
        yield f"has failed for {rough_text(since_s)}, {tries}: {why}"
    if each.lost_to:
        yield (
            f"the source holds nothing before {each.lost_to}, archived is up to {each.position}: "
            f"run `tidelog archive run {archive.name} --accept-loss` to record that and continue"
        )
    if each.remade:
        yield (
            f"{each.remade.partition(': ')[2]} (`tidelog archive run {archive.name} "
            f"--accept-loss`); or end it with `tidelog archive delete {archive.name}`"
        )
    if each.unread:
        yield (
            f"its topic was deleted, and up to {each.unread} of its events were not archived: they "
            "are lost, unless a copy of the home has them: end the archive with `tidelog archive "
            f"delete {archive.name}`, or create the topic again and run `tidelog archive run "
            f"{archive.name} --accept-loss` to record that"
        )
    if each.account is not None and not each.account.adds_up:
        yield (
            f"does not add up: {each.account.problem}: run `tidelog archive verify {archive.name}`"
        )
    if limits.max_lag is not None and (each.lag or 0) > limits.max_lag:
        yield (
            f"{each.lag} events wait (limit {limits.max_lag}): run `tidelog archive run "
            f"{archive.name}`, with more workers or drivers if one runs"
        )
    given_ms = limits.max_lag_ms
    lag_max_s = (lag_limit_ms(archive) if given_ms is None else given_ms) / 1000
    if (each.lag_s or 0) > lag_max_s:
        yield (
            f"the oldest event that waits is {rough_text(each.lag_s or 0)} old (limit "
            f"{rough_text(lag_max_s)}): "
            f"run `tidelog archive run {archive.name}`; if a driver runs, look at its output, and "
            "add workers or drivers"
        )
    if each.intent_ms is not None and now_ms - each.intent_ms > limits.max_intent_ms:
        yield (
            f"a range is in progress for {rough_text((now_ms - each.intent_ms) / 1000)}: "
            "look at the driver's output; the next driver finishes it: run `tidelog archive run "
            f"{archive.name}`"
        )
    if each.totals.lost and now_ms - each.totals.lost_ms <= limits.since_ms:
        ranges = "1 range was" if each.totals.lost == 1 else f"{each.totals.lost} ranges were"
        yield (
            f"{ranges} lost by the source, which was accepted: lengthen its "
            f"retention; `tidelog archive status {archive.name} --check --since 0s` leaves out "
            "what is known"
        )
