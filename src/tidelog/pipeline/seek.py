"""Moves the position of a pipeline in a source partition, by a person's decision.

The steps, for each source partition. Every write expects the ``head``:

1. record who moves what, in the home's audit              → crash: a record without a move
2. settle the range in progress: commit a decided one,
   withdraw any other                                      → crash: as after any range
3. forward: put a manifest without files, whose gap has the
   reason ``seek``                                         → crash: an object for the sweep
4. in one write: a ``commit`` row of that gap, ``head`` at
   its end                                                 → the gap is part of the account

So a skip is a committed range like any other, and everything that reads commits, counts offsets or
compares generations knows it. Moving back over such a gap deletes its ``commit`` row and the gap.
The same holds for a range of a chain that is only a gap of the archive that it reads.
Moving back over events that were read is refused: an archive holds each event once. A pump or a
stream may read them again if its caller says so; then the head alone moves.

An archive does not move back below what a reader of it has read or intends to read: that reader
continues where it is, and would miss what the archive reads then. A reader puts its ``intent``
before it looks at the archive's commits. So the readers are checked before the move, and again
after it: one that looked before the move shows its intent or head by then, and the archive moves
forward again. One that looks after the move finds that its range is not there.

A driver at work fails at its next write, because the head has another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from tidelog.catalog.base import ABSENT, Change, Check, Delete, Put
from tidelog.catalog.update import attempts
from tidelog.connectors.by_url import pipelines_behind
from tidelog.connectors.source import (
    Bounds,
    ProbingSource,
    Source,
    SourcePartition,
    TimedSource,
    TrackingSource,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.audit import ARCHIVE_SEEK, PUMP_SEEK, record_action
from tidelog.coordination.commits import load_manifest
from tidelog.coordination.pipeline_rows import (
    list_archives,
    list_pipelines,
    read_archive,
    read_intent,
    read_progress,
)
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnknownOutcomeError,
    raise_first,
)
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import (
    Begin,
    Commit,
    Gap,
    Manifest,
    Progress,
    joined_gaps,
    offsets_between,
)
from tidelog.model.times import Backoff
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.gaps import REMADE_REMEDY, check_gaps
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.source_state import SourceState
from tidelog.store.base import put_same

__all__ = ["PositionMove", "SeekOptions", "plan_seek", "seek"]

_COMMITS = Backoff(10, base_ms=100, max_ms=200)  # while a driver keeps committing


@dataclass(frozen=True, slots=True)
class PositionMove:
    """Where a pipeline's position in one source partition is, and where it goes."""

    partition: str
    position: str | None  # None: the pipeline has not begun there
    to: str
    skipped: int | None  # events or offsets that it will not read; None: unknown
    again: int | None  # those that it has read before and will read again; None: unknown
    begin: str | None = None  # where the pipeline begins, if the move leads to before that


@dataclass(frozen=True, slots=True)
class SeekOptions:
    """Where to move, and what the caller accepts."""

    to: str  # earliest, latest, or a position as the status shows it
    partition: str | None = None  # of the source; None: all
    again: bool = False  # read events a second time
    is_archive: bool = False  # which never holds an event twice
    why: str = ""  # for the audit
    who: str = ""  # for the audit; user@host by default


def plan_seek(context: Context, pipeline: Pipeline, wanted: SeekOptions) -> list[PositionMove]:
    """Returns what a seek would do, without doing it.

    Raises ``InvalidError`` for a position that the source does not have, and for sources whose
    positions mean nothing by themselves. Raises ``NotFoundError`` for an unknown partition.
    """
    targets = _targets(context, pipeline, wanted)
    return [_plan(context, pipeline, target, wanted) for target in targets]


def seek(context: Context, pipeline: Pipeline, wanted: SeekOptions) -> list[PositionMove]:
    """Moves positions. Returns where they were and are.

    Raises ``InvalidError`` for events that would be read twice and may not be, for an archive whose
    readers would miss events, and for a partition that was made again. Raises ``ConflictError`` if
    a driver keeps committing.
    """
    targets = _targets(context, pipeline, wanted)
    for target in targets:
        plan = _plan(context, pipeline, target, wanted)
        _check_again(pipeline, wanted, plan)
        _check_readers(context, pipeline, wanted, plan)
    work = _Seek(context, pipeline, owner="")
    moves = []
    for partition, held, to in targets:
        plan = _plan(context, pipeline, (partition, held, to), wanted)
        note = f"from {plan.position or 'nothing'} to {to}" + (f": {wanted.why}" * bool(wanted.why))
        kind = ARCHIVE_SEEK if wanted.is_archive else PUMP_SEEK
        record_action(context, kind, f"{pipeline.name}: {partition.text}", note, wanted.who)
        moves.append(work.move(partition, held, to, wanted))
    return moves


_Target = tuple[SourcePartition, Bounds, str]


def _targets(context: Context, pipeline: Pipeline, wanted: SeekOptions) -> list[_Target]:
    """Returns the source partitions to move, with their bounds and the new positions."""
    source, name = pipeline.source, pipeline.name
    if isinstance(source, TrackingSource):
        raise InvalidError(
            f"seek of `{name}`: rows of `{source.url}` have no positions that can be chosen: "
            "create another archive or pump for what you want to read"
        )
    _check_followers(context, pipeline, source)
    chosen = source.partitions()
    if wanted.partition is not None:
        chosen = [each for each in chosen if wanted.partition in (each.text, each.name)]
        if not chosen:
            raise NotFoundError(
                f"seek of `{name}`: its source has no partition `{wanted.partition}`: fix its name"
            )
    errors: dict[SourcePartition, TidelogError] = {}
    found = bounds_apart(source, chosen, errors)
    raise_first(errors.values())
    return [(each, found[each], _position(pipeline, each, found[each], wanted)) for each in chosen]


def _check_followers(context: Context, pipeline: Pipeline, source: Source) -> None:
    """Raises if a sweep goes by what this pipeline has committed, or this one is a sweep."""
    sources = [(each.name, each.source) for each in list_pipelines(context)]
    sources += [(each.name, each.source) for each in list_archives(context)]
    names = [name for name, url in sources if pipeline.name in pipelines_behind(url)]
    if names or pipelines_behind(source.url):
        who = f"`{names[0]}` adds what it missed" if names else "it adds what others missed"
        raise InvalidError(
            f"seek of `{pipeline.name}`: {who}, by what was committed: create a new pump instead"
        )


def _position(
    pipeline: Pipeline, partition: SourcePartition, held: Bounds, wanted: SeekOptions
) -> str:
    source, to = pipeline.source, wanted.to
    if to == "earliest":
        return held.first
    last = source.cut(held.end, held.end, 0)
    if to == "latest":
        return last
    if _ends_at_times(source):
        source.before(to, held.end)  # raises for what is not a position
        return to
    if offsets_between(held.first, held.end) is not None and offsets_between("0", to) is None:
        raise InvalidError(f"seek to `{to}`: give earliest, latest, or an offset")
    if source.before(to, held.first) or source.before(last, to):
        raise InvalidError(
            f"seek in `{partition.text}`: {to} is outside of [{held.first}, {last}]: "
            "give a position inside"
        )
    return to


def _plan(
    context: Context, pipeline: Pipeline, target: _Target, wanted: SeekOptions
) -> PositionMove:
    source, (partition, held, to) = pipeline.source, target
    head = read_progress(context, pipeline.id, partition.text)
    if head is None:
        return PositionMove(partition.text, None, to, 0, 0)
    _check_open(pipeline, partition, head)
    if not head.is_of(held.incarnation):
        # One without commits may begin again.
        do = REMADE_REMEDY if head.totals.commits else "run it once with --accept-loss, then seek"
        raise InvalidError(
            f"seek of `{pipeline.name}`: `{partition.text}` was deleted and made again since it "
            f"was read, so its positions mean other events: {do}"
        )
    at = head.position
    if _ends_at_times(source):
        if wanted.to == "earliest":
            return PositionMove(partition.text, at, to, 0, 0 if _has_read_nothing(head) else None)
        if wanted.to != "latest":
            raise InvalidError(
                f"seek of `{pipeline.name}`: positions of `{partition.text}` have no known order: "
                "give earliest or latest, or create another archive or pump that begins there"
            )
        skips_some = source.before(at, held.end)
        return PositionMove(partition.text, at, to if skips_some else at, None, 0)
    if source.before(at, to):
        return PositionMove(partition.text, at, to, source.count(at, to), 0)
    if not source.before(to, at):
        return PositionMove(partition.text, at, at, 0, 0)
    skips = _Skips(context, pipeline, partition, head)
    back, read = skips.start_after(to), _first_read(source, head, to)
    again = source.count(read, back) if source.before(read, back) else 0
    if again == 0 and wanted.is_archive and source.before(read, back):
        again = offsets_between(read, back)  # without events, but in a range that has some
    return PositionMove(partition.text, at, to, 0, again, None if read == to else read)


def _check_open(pipeline: Pipeline, partition: SourcePartition, head: Progress) -> None:
    """Raises if nothing more is read from a source partition, as a person has accepted."""
    if head.closed or head.ended:
        raise InvalidError(
            f"seek of `{pipeline.name}`: `{partition.text}` has ended, nothing more is read: "
            "create a new archive or pump for what is there now"
        )


def _first_read(source: Source, head: Progress, to: str) -> str:
    """Returns the first position from ``to`` on that may have been read: none before the begin."""
    if head.begin is None or not source.before(to, head.begin.position):
        return to
    return head.begin.position


def _has_read_nothing(head: Progress) -> bool:
    """Returns whether a pipeline is where it began, without a range since."""
    begin = head.begin
    return begin is not None and head.position == begin.position and not head.totals.commits


def _ends_at_times(source: Source) -> bool:
    """Returns whether its ends are times and other positions are not, so these do not compare."""
    return isinstance(source, ProbingSource) and not isinstance(source, TimedSource)


def _is_back(source: Source, move: PositionMove) -> bool:
    """Returns whether a move leads to an earlier position."""
    if move.position is None or _ends_at_times(source):
        return move.skipped is not None
    return source.before(move.to, move.position)


def _check_again(pipeline: Pipeline, wanted: SeekOptions, plan: PositionMove) -> None:
    if plan.again == 0 or (wanted.again and not wanted.is_archive):
        return
    many = "" if plan.again is None else f" {plan.again}"
    if wanted.is_archive and plan.begin is not None:
        raise InvalidError(
            f"archive `{pipeline.name}`: {plan.partition}: begins at {plan.begin}, has{many} "
            f"offsets from there on, and holds each event once: {_earlier(pipeline)}"
        )
    if wanted.is_archive:
        raise InvalidError(
            f"archive `{pipeline.name}`: {plan.partition}: from {plan.to} on it has{many} offsets "
            "already, and holds each event once: write its files again with "
            f"`tidelog archive redo {pipeline.name} --partition {plan.partition}`"
        )
    raise InvalidError(
        f"pump `{pipeline.name}`: {plan.partition}: would bring{many} events from "
        f"{plan.begin or plan.to} on a second time: say so with --again (again=True)"
    )


def _earlier(pipeline: Pipeline) -> str:
    """Returns how an archive gets what comes before its begin."""
    command = f"tidelog archive backfill {pipeline.name} --start earliest"
    return f"read what comes before with `{command}`"


def _check_readers(
    context: Context, pipeline: Pipeline, wanted: SeekOptions, move: PositionMove
) -> None:
    """Raises ``InvalidError`` if a reader of the archive is past the position it moves back to."""
    before = pipeline.source.before
    if not wanted.is_archive or not _is_back(pipeline.source, move):
        return
    for who, remedy, reader in _readers(context, pipeline, move):
        head = read_progress(context, reader, move.partition)
        intent = read_intent(context, reader, move.partition)
        if head is None or head.closed or head.ended:
            continue
        reached = head.position
        if intent is not None and before(reached, intent.reach):  # else it has gone back
            reached = intent.reach
        if before(move.to, reached):
            filled = f"write what was skipped with `tidelog archive backfill {pipeline.name}`"
            advice = f"{remedy}, or {filled}" if move.begin is None else _earlier(pipeline)
            raise InvalidError(
                f"archive `{pipeline.name}`: {move.partition}: {who} has read it up to {reached}, "
                f"and would miss what comes from {move.to} on: {advice}"
            )


def _readers(
    context: Context, pipeline: Pipeline, move: PositionMove
) -> Iterator[tuple[str, str, str]]:
    """Yields the pipelines that read an archive's pipeline: name, remedy, and id."""
    archive = read_archive(context, pipeline.name)

    def reads(url: str) -> bool:
        address = parse_address(url)
        if (address.scheme, address.path) != ("archive", archive.name):
            return False
        given = address.options.get("generation")
        return given is None or archive.pipeline(int(given)) == pipeline.id

    where = f"{move.to} --partition {move.partition}"
    for other in list_archives(context):
        for generation, written_as in other.formats.items() if other.ended is None else ():
            # One that is built from something else reads on from the archive's source.
            if any(map(reads, {written_as.source, other.source} - {""})):
                remedy = f"move that one first with `tidelog archive seek {other.name} {where}`"
                yield f"archive `{other.name}`", remedy, other.pipeline(generation)
    for each in list_pipelines(context):
        if reads(each.source):
            remedy = f"move that one first with `tidelog pipeline seek {each.name} {where} --again`"
            if each.name.startswith("restore."):
                remedy = (
                    f"forget that restore with `tidelog pipeline delete {each.name}` and restore "
                    "into another topic"
                )
            yield f"pipeline `{each.name}`", remedy, each.incarnation


_UNDONE = ("seek", "upstream", "files")  # reasons of gaps that a move back can undo


class _Skips:
    """The gaps at the end of what a pipeline has read that can be undone, newest first."""

    def __init__(
        self, context: Context, pipeline: Pipeline, partition: SourcePartition, head: Progress
    ) -> None:
        self._context = context
        self._source = pipeline.source
        self._where = layout.pipeline_partition(pipeline.id, partition.text)
        self._head = head

    def start_after(self, to: str) -> str:
        """Returns the first position after which nothing was read, up to which ``to`` may move."""
        at = self._head.position
        while self._source.before(to, at) and (found := self.ending_at(at)) is not None:
            at = found[1].start
        return at

    def ending_at(self, end: str) -> tuple[str, Gap] | None:
        """Returns the gap that ends at a position, and the row of its range, which has no more."""
        rows = self._context.catalog.scan(
            self._where,
            layout.commit_row(self._head.ordinal, ""),
            layout.commit_row(self._head.ordinal + 1, ""),
        )
        for row in rows:
            commit = decode_row(row.value, Commit, f"commit `{row.row}`")
            if commit.end == end and commit.start != end and not (commit.events or commit.ranges):
                manifest = load_manifest(self._context.store, commit.manifest)
                if _is_gap(manifest):
                    return row.row, manifest.lost[0]
        return None


def _is_gap(manifest: Manifest) -> bool:
    """Returns whether a range has read nothing, and is one gap that can be undone."""
    others = manifest.read or manifest.files or manifest.deleted or manifest.absent
    gaps = [(gap.start, gap.end) for gap in manifest.lost if gap.reason in _UNDONE]
    return not others and gaps == [(manifest.start, manifest.end)] and len(manifest.lost) == 1


class _Seek(Cycle):
    """Changes heads that no range changes meanwhile."""

    def move(
        self, partition: SourcePartition, held: Bounds, to: str, wanted: SeekOptions
    ) -> PositionMove:
        """Moves one position, after settling the range in progress."""
        first: PositionMove | None = None
        busy = ConflictError(
            f"seek of `{self._pipeline.name}`: `{partition.text}` keeps being committed: stop its "
            "driver, then seek again"
        )
        for _ in attempts(self._context, busy, _COMMITS):
            plan = _plan(self._context, self._pipeline, (partition, held, to), wanted)
            _check_again(self._pipeline, wanted, plan)
            _check_readers(self._context, self._pipeline, wanted, plan)
            first = first or plan
            try:
                self._move(partition, held, plan)
            except (ConflictError, FencedError, UnknownOutcomeError):
                continue
            done = first if plan.position == plan.to else plan
            self._check_moved(partition, held, done, wanted)
            return done
        raise busy

    def _check_moved(
        self, partition: SourcePartition, held: Bounds, move: PositionMove, wanted: SeekOptions
    ) -> None:
        """Moves forward again, and raises, if a reader went further during the move back."""
        try:
            _check_readers(self._context, self._pipeline, wanted, move)
        except InvalidError:
            forward = replace(move, position=move.to, to=move.position or move.to)
            self._move(partition, held, forward)
            raise

    def _move(self, partition: SourcePartition, held: Bounds, plan: PositionMove) -> None:
        """Raises ``ConflictError`` if the head is not as planned, or changes meanwhile."""
        where = layout.pipeline_partition(self._pipeline.id, partition.text)
        row = self._context.catalog.get(where, "head")
        if row is None or plan.position is None:
            self._begin(partition, held, plan, where)
            return
        head = decode_row(row.value, Progress, f"head of `{partition.text}`")
        if head.frozen:  # by a promote that may be over, as for a driver that claims it
            self._pipeline.gate()
            head = msgspec.structs.replace(head, frozen="")
        _check_open(self._pipeline, partition, head)
        state = SourceState(partition, where, head, row.version)
        state.read_intent(self._context.catalog)
        if state.intent is not None and state.intent.manifest:
            self._finish(state, self._manifest(state.intent.manifest), CycleReport())
        elif state.intent is not None:
            self._withdraw(state)
        if state.head.position != plan.position:
            raise ConflictError(f"source partition `{partition.text}`: has moved")
        source = self._pipeline.source
        if _is_back(source, plan):
            self._back(state, plan.to)
        elif _ends_at_times(source) and plan.to != plan.position:
            self._skip(state, plan.to)
        if not _ends_at_times(source) and source.before(state.head.position, plan.to):
            self._skip(state, plan.to)

    def _begin(
        self, partition: SourcePartition, held: Bounds, plan: PositionMove, where: str
    ) -> None:
        """Lets a partition that no driver has begun begin at a position."""
        begin = Begin(plan.to, "explicit", self._context.clock.now_ms())
        head = Progress(plan.to, 0, 0, incarnation=held.incarnation, begin=begin)
        self._list(partition)
        self._pipeline.gate()
        put = Put("head", encode_row(head), expect=ABSENT)
        self._context.catalog.write(where, put, write_id=self._context.ids.new())

    def _skip(self, state: SourceState, to: str) -> None:
        """Steps 3 and 4."""
        head, partition = state.head, state.partition
        gap = Gap(head.position, to, "seek", offsets_between(head.position, to) or 0)
        check_gaps(partition, head, (gap,))
        manifest = Manifest(
            pipeline=self._pipeline.id,
            partition=partition.text,
            start=gap.start,
            end=gap.end,
            ordinal=head.ordinal,
            read=0,
            written=0,
            lost=(gap,),
            incarnation=head.incarnation,
        )
        key = layout.manifest(
            self._pipeline.id, head.epoch, partition.text, self._context.ids.new()
        )
        put_same(self._context.store, key, seal_json(manifest))
        now_ms = self._context.clock.now_ms()
        commit = Commit(key, gap.start, gap.end, 0, 0, 0, now_ms)
        totals = msgspec.structs.replace(
            head.totals.plus(manifest, now_ms),
            lost=head.totals.lost,  # the source has lost nothing
            lost_ms=head.totals.lost_ms,
        )
        gaps = joined_gaps(head.gaps, (gap,))
        moved = msgspec.structs.replace(head, position=to, gaps=gaps, totals=totals)
        row = Put(layout.commit_row(head.ordinal, gap.start), encode_row(commit), expect=ABSENT)
        self._put_head(state, moved, row)

    def _back(self, state: SourceState, to: str) -> None:
        """Undoes earlier seeks, then moves back over what was read, if anything is left."""
        skips = _Skips(self._context, self._pipeline, state.partition, state.head)
        source = self._pipeline.source
        while source.before(to, state.head.position):
            found = skips.ending_at(state.head.position)
            if found is None:
                self._put_head(state, self._begun_at(_moved_back(state.head, to, source.before)))
                return
            name, gap = found
            moved = _moved_back(state.head, gap.start, source.before)
            # A seek is not counted as lost.
            totals, lost = moved.totals, gap.is_loss and gap.reason != "seek"
            totals = msgspec.structs.replace(
                totals, commits=totals.commits - 1, lost=totals.lost - lost
            )
            moved = msgspec.structs.replace(moved, totals=totals)
            self._put_head(state, moved, Delete(name))

    def _begun_at(self, head: Progress) -> Progress:
        """Returns a head that begins at its position, if that is before its begin."""
        if _first_read(self._pipeline.source, head, head.position) == head.position:
            return head
        begin = Begin(head.position, "explicit", self._context.clock.now_ms())
        return msgspec.structs.replace(head, begin=begin)

    def _put_head(self, state: SourceState, head: Progress, *others: Change) -> None:
        put = Put("head", encode_row(head), expect=state.head_version)
        write_id = self._context.ids.new()
        none = Check("intent", ABSENT)
        self._context.catalog.write(state.where, put, none, *others, write_id=write_id)
        state.head, state.head_version = head, write_id


def _moved_back(head: Progress, to: str, before: Callable[[str, str], bool]) -> Progress:
    """Returns a head at an earlier position, without the gaps after it: these are read again."""
    gaps: list[Gap] = []
    for gap in head.gaps:
        if gap.is_scattered and before(gap.start, to):  # what is undone has none of it
            gaps.append(gap)
        elif before(to, gap.end) and before(gap.start, to):  # neighbors of one reason were joined
            offsets = min(gap.offsets, offsets_between(gap.start, to) or 0)
            gaps.append(Gap(gap.start, to, gap.reason, offsets))
        elif not before(to, gap.end):
            gaps.append(gap)
    undone = sum(gap.offsets for gap in head.gaps) - sum(gap.offsets for gap in gaps)
    totals = msgspec.structs.replace(head.totals, skipped=head.totals.skipped - undone)
    return msgspec.structs.replace(head, position=to, gaps=tuple(gaps), totals=totals)
