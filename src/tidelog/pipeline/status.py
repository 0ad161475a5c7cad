"""How an archive does: how far it has come, what waits, and whether anybody works on it.

Read from three rows for each source partition and from the ends of its source: the head keeps what
all commits come to, so that a million of them cost no more than one.

Lag in seconds is the age of the oldest event that waits. Nobody keeps that, so it is told from the
last event that is committed, which is hardly younger than the next. Where that was more than a
minute ago, the partition may as well have been quiet since: then the next event is read from the
source, and its time counts. A source that cannot be reached leaves the first answer, which is too
much rather than too little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tidelog.errors import NotFoundError, TidelogError, unexpected
from tidelog.home import Home
from tidelog.log.archives import is_detached, is_outside, read_partitions, read_progress
from tidelog.log.readers import DeletedTopic
from tidelog.log.replays import replay_effect, replay_pipeline
from tidelog.model import layout
from tidelog.model.account import Account
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Aside, Failure, Intent, Progress, Totals
from tidelog.model.run import HeldRow, decode_row
from tidelog.pipeline.account import read_account
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.forgotten import read_aside
from tidelog.pipeline.listing import track
from tidelog.pipeline.losses import RemadeError, remade_bounds
from tidelog.pipeline.places import no_source, source_at, store_at
from tidelog.sources.base import (
    Bounds,
    LeavingOut,
    Range,
    Source,
    SourcePartition,
    bounds_apart,
    waits,
)
from tidelog.sources.topic import TopicSource

__all__ = ["ArchiveStatus", "PartitionStatus", "Waiting", "read_status"]

_AT_ONCE = 8  # source partitions read side by side; each is a round trip or two
_NEAR_MS = 60_000  # below this the last committed event tells well enough how old the next one is
_BEATS_MISSED_MS = 5_000  # how late a driver's heartbeat may be, beside its time to live


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How far an archive has come in one source partition."""

    partition: str
    position: str
    end: str | None  # None: the source does not tell, or no longer has this partition
    lag: int | None  # events that wait, where the source can tell
    lag_s: float | None  # age of the oldest of them; 0 when none waits
    events: int
    files: int
    bytes: int
    dead: int  # letters that no replay has placed yet
    totals: Totals  # of commits, without replays
    intent_ms: int | None  # since when a range is under way
    lost_to: str  # the source holds nothing before this, and we had not come so far
    unread: int = 0  # events of a topic that was deleted before they were archived
    failure: Failure | None = None  # why its driver fails there now
    remade: str = ""  # why the source partition is another one now than was archived
    ended: str = ""  # why nothing more is read of it, as a person decided
    account: Account | None = None  # of every offset from the begin on; None: it has not begun

    @property
    def waits(self) -> bool:
        """Whether events wait, as far as the source tells; offsets without events do not."""
        if self.remade or self.ended:
            return False  # those are not of this archive
        return self.end is not None and self.lag != 0 and self.lag_s != 0

    @property
    def stuck(self) -> bool:
        """An intent is there: a range is under way, or its driver died."""
        return self.intent_ms is not None

    @property
    def last_commit_ms(self) -> int | None:
        return self.totals.committed_ms or None


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """How one generation of an archive does."""

    archive: Archive
    generation: int
    read_ms: int
    drivers: int  # that are alive
    silent: int  # that have neither said goodbye nor anything else for a while
    source_error: str  # why the source told nothing
    partitions: tuple[PartitionStatus, ...]
    aside: tuple[Aside, ...] = ()  # ranges that a restored catalog had forgotten
    failure: Failure | None = None  # why its driver cannot reach the source
    left_out: Mapping[str, str] = field(default_factory=dict)  # what of the source is not read: why
    deleted: str = ""  # the topic that it reads, if that was deleted and is not there
    detached: bool = False  # its folder belongs to the home that this one was copied from
    copy_of: str = ""  # where the home was made, if it is a copy that may not write to the folder
    lost: bool = False  # its folder outside has no mark: it is gone, or not mounted

    @property
    def lag(self) -> int | None:
        """Events that wait in all, where the source can tell."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if len(known) == len(self.partitions) else None

    @property
    def lag_s(self) -> float | None:
        """Age of the oldest event that waits anywhere."""
        return max((each.lag_s for each in self.partitions if each.lag_s is not None), default=None)


@dataclass(slots=True)
class Waiting:
    """Times of events that were read because they wait; kept, they are read once."""

    known_ms: dict[tuple[str, str, str], int | None] = field(default_factory=dict)

    def time_ms(self, pipeline: str, source: Source, range: Range) -> int | None:
        """When the first event of a range happened; None where that cannot be told."""
        key = (pipeline, range.partition.text, range.start)
        if key not in self.known_ms:
            self.forget(pipeline, range.partition.text)
            self.known_ms[key] = _first_time_ms(source, range)
        return self.known_ms[key]

    def forget(self, pipeline: str, partition: str) -> None:
        for key in [key for key in self.known_ms if key[:2] == (pipeline, partition)]:
            self.known_ms.pop(key, None)


def read_status(
    home: Home, archive: Archive, generation: int | None = None, waiting: Waiting | None = None
) -> ArchiveStatus:
    """How a generation does, the promoted one by default.

    A source that cannot be reached is told in ``source_error``; all else is there nevertheless.
    """
    number = archive.generation if generation is None else generation
    pipeline = archive.pipeline(number)
    url = archive.making(number).source if number != archive.generation else ""
    now_ms = home.log.clock.now_ms()
    if archive.ended is not None:
        return _read_ended(home, archive, number)
    source = source_at(home, url or archive.source)
    track(home.log, pipeline, source)
    bounds, error = _ends(source)
    names = {partition.text for partition in bounds} | set(read_partitions(home.log, pipeline))
    deleted = _deleted(home, pipeline, source, names, bounds)
    names |= {f"{name}/{each}" for name, gone in deleted.items() for each in range(len(gone.ends))}
    failures = read_failures(home.log, pipeline)
    names |= failures.keys() - {""}
    look = _Look(home, pipeline, source, waiting or Waiting(), now_ms, deleted, failures)
    drivers, silent = _drivers(home, pipeline, now_ms)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        each = pool.map(lambda name: look.at(SourcePartition.named(name), bounds), sorted(names))
        partitions = tuple(each)
    aside = [*read_aside(home.log, pipeline), *read_aside(home.log, replay_pipeline(pipeline))]
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
        source.left_out() if isinstance(source, LeavingOut) else {},
        next(iter(deleted), "") if not bounds else "",
        is_detached(home.log, archive),
        home.log.standing.copy_of if is_outside(home.log, archive) else "",
        _is_lost(home, archive),
    )


def _is_lost(home: Home, archive: Archive) -> bool:
    """Whether the folder of an archive outside is gone; False where its store does not answer."""
    if not is_outside(home.log, archive) or not home.log.standing.owns(archive.home):
        return False
    try:
        store_at(home, archive.store).head(archive.owner)
    except NotFoundError:
        return True
    except TidelogError:
        pass
    return False


def _read_ended(home: Home, archive: Archive, generation: int) -> ArchiveStatus:
    """How an archive was when it ended: its source is not asked, and nothing waits for it."""
    pipeline, now_ms = archive.pipeline(generation), home.log.clock.now_ms()
    look = _Look(home, pipeline, no_source(home), Waiting(), now_ms, {}, {})
    names = map(SourcePartition.named, read_partitions(home.log, pipeline))
    drivers, _ = _drivers(home, pipeline, now_ms)
    partitions = tuple(look.at(each, {}) for each in names)
    aside = tuple(read_aside(home.log, pipeline))
    lost = _is_lost(home, archive)
    return ArchiveStatus(archive, generation, now_ms, drivers, 0, "", partitions, aside, lost=lost)


@dataclass(frozen=True, slots=True)
class _Look:
    """What is needed to look at one source partition after another."""

    home: Home
    pipeline: str
    source: Source
    waiting: Waiting
    now_ms: int
    deleted: dict[str, DeletedTopic]  # the source's topic, by name, if it was deleted
    failures: Mapping[str, Failure]

    def at(
        self, partition: SourcePartition, bounds: dict[SourcePartition, Bounds]
    ) -> PartitionStatus:
        where = layout.pipeline_partition(self.pipeline, partition.text)
        catalog, held = self.home.log.catalog, bounds.get(partition)
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
        account = read_account(self.home.log, self.pipeline, partition.text)
        replays = replay_effect(self.home.log, self.pipeline, partition.text)
        failure = self.failures.get(partition.text)
        if failure is not None and failure.at_ms < head.totals.committed_ms:
            failure = None  # it has committed since, and the row could not be removed
        lost = held is not None and self.source.before(head.position, held.first)
        return PartitionStatus(
            partition=partition.text,
            position=head.position,
            end=held.end if held else None,
            lag=self.source.count(head.position, held.end) if held else None,
            lag_s=self._lag_s(partition, head, held) if held else None,
            events=head.ordinal,
            files=head.totals.files + replays.files,
            bytes=head.totals.bytes + replays.bytes,
            dead=0 if account is None else account.dead,
            totals=head.totals,
            intent_ms=intent_ms,
            lost_to=held.first if held and lost else "",
            unread=self._unread(partition, head),
            failure=failure,
            remade=self._remade(partition, head, held),
            ended=head.ended,
            account=account,
        )

    def _remade(self, partition: SourcePartition, head: Progress, held: Bounds | None) -> str:
        """What a driver would say of a source partition that was deleted and made again."""
        if held is None or head.ended or not head.epoch:
            return ""
        try:
            remade_bounds(partition, head, held, self.source, accept_loss=False)
        except RemadeError as exc:
            return str(exc)
        except TidelogError:
            return ""  # it cannot be asked any more
        return ""

    def _unread(self, partition: SourcePartition, head: Progress) -> int:
        gone, number = self.deleted.get(partition.topic), partition.number_in(partition.topic)
        if gone is None or number is None or not head.is_of(gone.incarnation) or head.ended:
            return 0  # where it has ended, a person has accepted it, and the gap is recorded
        return gone.unread(number, head.position)

    def _lag_s(self, partition: SourcePartition, head: Progress, held: Bounds) -> float | None:
        if not self._waits(Range(partition, head.position, held.end)):
            self.waiting.forget(self.pipeline, partition.text)
            return 0.0
        since_ms = head.totals.event_ms
        if self.now_ms - since_ms > _NEAR_MS:
            behind = self.source.before(head.position, held.first)
            start = held.first if behind else head.position
            rest = Range(partition, start, held.end)
            next_ms = self.waiting.time_ms(self.pipeline, self.source, rest)
            since_ms = since_ms if next_ms is None else next_ms
        return max(0, self.now_ms - since_ms) / 1000 if since_ms >= 0 else None

    def _waits(self, range: Range) -> bool:
        try:
            return waits(self.source, range)
        except TidelogError:
            return True  # as far as is known


def _ends(source: Source) -> tuple[dict[SourcePartition, Bounds], str]:
    """What source partitions hold, and why some or all could not be reached."""
    errors: dict[SourcePartition, TidelogError] = {}
    try:
        found = bounds_apart(source, source.partitions(), errors)
    except Exception as exc:  # noqa: BLE001 - a source that is broken in its own way is shown too
        return {}, str(unexpected("source", exc))
    return found, str(next(iter(errors.values()))) if errors else ""


def _deleted(
    home: Home,
    pipeline: str,
    source: Source,
    names: set[str],
    bounds: dict[SourcePartition, Bounds],
) -> dict[str, DeletedTopic]:
    """The topic that an archive has read from, by name, where that one was deleted."""
    if not isinstance(source, TopicSource):
        return {}
    now = {each.incarnation for each in bounds.values()}
    heads = (read_progress(home.log, pipeline, name) for name in sorted(names))
    begun = next((head.incarnation for head in heads if head and head.incarnation), "")
    if begun in now or (bounds and not begun):
        return {}
    if begun:
        found = DeletedTopic.read(home.log, begun)
    else:
        found = DeletedTopic.named(home.log, source.topic)
    return {source.topic: found} if found else {}


def _first_time_ms(source: Source, range: Range) -> int | None:
    """The time of a range's first event, from the source itself."""
    one = Range(range.partition, range.start, source.cut(range.start, range.limit, 1))
    try:
        for chunk in source.read(one):
            if chunk.batch.num_rows:
                return int(chunk.batch.column("timestamp")[0].value)
    except Exception:  # noqa: BLE001 - the caller falls back on what the rows say
        return None
    return None


def _drivers(home: Home, pipeline: str, now_ms: int) -> tuple[int, int]:
    """How many drivers are alive, and how many are silent."""
    limit_ms = home.log.settings.lease_ttl_ms + _BEATS_MISSED_MS
    is_dead: Callable[[str], bool] = home.log.processes.is_dead
    leases: Sequence[HeldRow] = [
        decode_row(row.value, HeldRow, f"shard `{row.row}`")
        for row in home.log.catalog.scan(layout.pipeline_shards(pipeline), "shard/", "shard0")
    ]
    owned = [lease for lease in leases if lease.owner]
    alive = [
        lease for lease in owned if now_ms - lease.beat_ms <= limit_ms and not is_dead(lease.mark)
    ]
    return len(alive), len(owned) - len(alive)
