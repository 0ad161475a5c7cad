"""An archive as a source: the events that its pipeline wrote, in the order they arrived.

Source partitions and positions are those of the archive's own source, from its commits. So a
pipeline that has read an archive to its end continues with the live source at the same position,
without gap or overlap. Dead letters are events too, in their place.

An archive may be behind a reader of it: one that was filled from elsewhere, or that read another
generation. Positions mean the same, so the reader waits for it.

Ranges begin and end where commits do, or anywhere if positions are offsets. A driver plans a range,
and reading the plan needs only the store.

A range may begin and end inside a commit, and may have fewer events than offsets. Gaps are cut
exactly. A commit counts only in total how many offsets were dropped or never held an event. So a
part of a commit counts as many of them as fit, dropped ones first; the rest was erased. The sum is
always the range. A pipeline corrects this by the offsets that it knows were erased
(``pipeline.manifest.missing_from``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tidelog.concurrency import Pool
from tidelog.connectors.archive.reader import PlannedCommits, is_number, plan_commits
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    CountedRange,
    DividingSource,
    ExplainingSource,
    MissingOffsets,
    Source,
    SourcePartition,
    SourceRange,
    check_incarnation,
)
from tidelog.context import Context, OpenContext
from tidelog.coordination.commits import (
    load_manifest,
    manifest_of_range,
    read_commits,
    read_commits_to,
)
from tidelog.coordination.pipeline_rows import (
    Replays,
    read_archive,
    read_partitions,
    read_progress,
)
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.model.address import Address
from tidelog.model.archive import Archive, check_archive_name
from tidelog.model.pipeline import (
    BeginReason,
    Commit,
    Gap,
    GapReason,
    Manifest,
    Progress,
    joined_gaps,
    offsets_between,
)

__all__ = [
    "ArchiveSource",
    "cut_gap",
    "missing_in_commits",
    "open_archive",
]

_AT_ONCE = 8  # heads and manifests to read in parallel; each is a round trip


def open_archive(address: Address, open_context: OpenContext) -> ArchiveSource:
    """Opens the source at ``archive:NAME?generation=N``; by default the live generation."""
    given = address.take_options(("generation",)).get("generation")
    if address.host:
        raise InvalidError(f"source `{address.text}`: give archive:NAME, without slashes")
    if given is not None and not (given.isascii() and given.isdecimal()):
        raise InvalidError(
            f"source `{address.text}`: `{given}` is not a valid generation: give a whole number"
        )
    return ArchiveSource(open_context, address.path, None if given is None else int(given))


class _History:
    """The commits of a source partition in order, and the borders between them."""

    def __init__(self, pipeline: str, commits: Sequence[Commit], head: Progress) -> None:
        self.pipeline = pipeline
        self.commits = commits
        self.end = head.position  # of the last commit, or where the first will begin
        self.first = commits[0].start if commits else self.end
        self.incarnation = head.incarnation
        self.gaps = head.gaps
        self.begins: BeginReason = head.begin.reason if head.begin is not None else "earliest"
        self.borders = {
            border: place for place, border in enumerate([*(c.start for c in commits), self.end])
        }

    def between(self, start: str, end: str) -> Sequence[Commit] | None:
        """Returns the commits between two borders; None unless both are borders, in this order."""
        first, last = self.borders.get(start), self.borders.get(end)
        if first is None or last is None or first > last:
            return None
        return self.commits[first:last]


class _RangePlan(NamedTuple):
    """A range as it was planned, with the manifests of its generation."""

    range: SourceRange
    pipeline: str
    manifests: Sequence[Manifest]

    def within(self, range: SourceRange) -> list[Manifest] | None:
        """Returns those of a part of the range; None if it is not a part."""
        if not (is_number(range.start) and is_number(range.limit)):
            whole = (range.start, range.limit) == (self.range.start, self.range.limit)
            return list(self.manifests) if whole else None
        start, limit = int(range.start), int(range.limit)
        if start < int(self.range.start) or int(self.range.limit) < limit:
            return None
        return [m for m in self.manifests if int(m.start) < limit and start < int(m.end)]


class ArchiveSource:
    """A generation of an archive of the home that ``open_context`` opens."""

    def __init__(self, open_context: OpenContext, name: str, generation: int | None = None) -> None:
        check_archive_name(name)
        self._open_context = open_context
        self._name = name
        self._generation = generation
        self._known: dict[SourcePartition, _History] = {}  # as last seen
        self._planned: dict[SourcePartition, _RangePlan] = {}  # the last range of each

    @property
    def url(self) -> str:
        chosen = "" if self._generation is None else f"?generation={self._generation}"
        return f"archive:{self._name}{chosen}"

    def partitions(self) -> list[SourcePartition]:
        """Lists the ones that the archive has begun, also if its own source no longer has them."""
        with self._open_context() as context:
            return sorted(self._histories(context, self._archive(context), None))

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        with self._open_context() as context:
            found = self._histories(context, self._archive(context), partitions)
        return {
            each: Bounds(
                h.first,
                h.end,
                h.incarnation,
                begins=h.begins,
                gaps=h.gaps,
                may_be_behind=bool(h.incarnation),
            )
            for each, h in found.items()
        }

    def gaps(self, partition: SourcePartition) -> tuple[Gap, ...]:
        """Returns what the archive itself lacks of a source partition."""
        with self._open_context() as context:
            return self._histories(context, self._archive(context), [partition])[partition].gaps

    def counted(self, range: SourceRange) -> CountedRange:
        """Returns what the commits of a range counted. The range must consist of whole commits."""
        with self._open_context() as context:
            archive = self._archive(context)
            history = self._histories(context, archive, [range.partition])[range.partition]
            found, _ = _manifests(context, history, range)
        lost = tuple(gap for each in found for gap in each.lost)
        return CountedRange(
            read=sum(each.read for each in found),
            dropped=sum(each.dropped for each in found),
            note=b"".join(each.note for each in found),
            missing=MissingOffsets(
                sum(each.absent for each in found), sum(each.deleted for each in found), lost
            ),
        )

    def missing(
        self, range: SourceRange, read: int, reason: GapReason | None = "upstream"
    ) -> MissingOffsets:
        """Returns what the archive lacks in a range, from the counts of its commits.

        Its gaps, and what its transform dropped, are gaps with the given reason. Without one, each
        keeps its own. If another generation was promoted since the range was planned, the one that
        was read counts: the other may have events in its gaps, which nothing has read.
        """
        planned = self._planned.get(range.partition)
        with self._open_context() as context:
            archive = self._archive(context)
            if planned is not None and planned.pipeline != archive.pipeline(self._generation):
                manifests = planned.within(range)
                if manifests is not None:
                    return missing_in_commits(range, read, manifests, reason)
            history = self._histories(context, archive, [range.partition])[range.partition]
            return missing_in_commits(range, read, _manifests(context, history, range)[0], reason)

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The last position is always the limit.

        In a commit whose positions are not offsets, the position of a chunk is the commit's start.
        Raises ``CorruptError`` for a file that is missing or differs from its manifest.
        """
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> PlannedCommits:
        """Returns the range with the files that hold its events. Raises the errors of ``read``.

        Raises ``InvalidError`` for a range that begins or ends inside a commit if positions are not
        offsets. Raises ``NotFoundError`` for a range that the archive does not hold.
        """
        with self._open_context() as context:
            archive = self._archive(context)
            history = self._histories(context, archive, [range.partition])[range.partition]
            check_incarnation(range, history.incarnation)
            manifests, commits = _manifests(context, history, range)
            self._planned[range.partition] = _RangePlan(range, history.pipeline, manifests)
            replays = Replays(context, history.pipeline, range.partition.text)
            written_as = archive.format_of(self._generation)
            plan = plan_commits(range, manifests, written_as, archive.store, replays)
            every = (*commits, *replays.commits)
            # In the last step, when only tables are corrected, the files do not change any more.
            rewrites = {each.rewrite for each in every if each.rewrite != each.manifest}
            return replace(plan, rewrites=tuple(sorted(rewrites - {""})))

    def commits_from(self, partition: SourcePartition, start: str) -> Sequence[Commit]:
        """Returns the commits of a source partition from a border on. Raises ``NotFoundError``."""
        with self._open_context() as context:
            history = self._histories(context, self._archive(context), [partition])[partition]
        commits = history.between(start, history.end)
        if commits is None:
            raise NotFoundError(
                f"source partition `{partition.text}`: archive `{self._name}` has no commit that "
                f"begins at {start}",
                partition=partition.text,
            )
        return commits

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns the end of the last commit that fits, or of the first if none fits."""
        cuts = set()
        for commits in self._between(start, end):
            at, left = start, events
            for commit in commits:
                left -= commit.events
                if left < 0 and at != start:
                    break
                at = commit.end
            cuts.add(at)
        if len(cuts) == 1:
            return cuts.pop()
        if not is_number(start) or not is_number(end):
            return end
        # Any offset is a valid cut.
        return str(min(map(int, cuts), default=min(int(end), int(start) + events)))

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        """Cuts where commits end, so that no file is read by two tasks."""
        if range.partition not in self._known:
            self.bounds([range.partition])
        commits = self._known[range.partition].between(range.start, range.limit) or ()
        total = sum(each.events for each in commits)
        cuts: list[str] = []
        seen, part = 0, 1
        for commit in commits[:-1]:
            seen += commit.events
            if total and seen * parts >= total * part:
                cuts.append(commit.end)
                part = seen * parts // total + 1
        return tuple(cuts)

    def before(self, one: str, other: str) -> bool:
        if is_number(one) and is_number(other):
            return int(one) < int(other)
        if self._between(one, other):
            return one != other
        if self._between(other, one):
            return False
        raise InvalidError(
            f"positions `{one}` and `{other}`: no source partition of archive `{self._name}` has "
            "commits that begin or end at both: ask the source for its bounds"
        )

    def count(self, start: str, end: str) -> int | None:
        """Returns the exact count between ends of commits; else an upper bound for offsets."""
        counts = {sum(each.events for each in found) for found in self._between(start, end)}
        if len(counts) == 1:
            return counts.pop()
        numbers = is_number(start) and is_number(end)
        return max(0, int(end) - int(start)) if numbers else None

    def count_in(self, partition: SourcePartition, start: str, end: str) -> int | None:
        """Returns how many events the commits of a source partition counted between two borders."""
        if partition not in self._known:
            self.bounds([partition])
        commits = self._known[partition].between(start, end)
        return None if commits is None else sum(each.events for each in commits)

    def _between(self, start: str, end: str) -> list[Sequence[Commit]]:
        """Returns the commits between two borders, for each source partition that has both."""
        if not self._known:
            self.partitions()
        found = (history.between(start, end) for history in self._known.values())
        return [commits for commits in found if commits is not None]

    def _archive(self, context: Context) -> Archive:
        archive = read_archive(context, self._name)
        archive.format_of(self._generation)
        return archive

    def _histories(
        self, context: Context, archive: Archive, wanted: Sequence[SourcePartition] | None
    ) -> dict[SourcePartition, _History]:
        """Returns what was committed in some source partitions, or in all."""
        pipeline = archive.pipeline(self._generation)
        if wanted is None:
            asked = list(map(SourcePartition.named, read_partitions(context, pipeline)))
        else:
            asked = list(wanted)
        with Pool(_AT_ONCE) as pool:
            found = list(pool.map(lambda each: self._history(context, pipeline, each), asked))
        histories = {each: history for each, history in zip(asked, found, strict=True) if history}
        missing = [each for each in asked if each not in histories]
        if missing and wanted is not None:
            raise NotFoundError(
                f"source partition `{missing[0].text}`: archive `{self._name}` has none of that "
                "name: ask the source for its partitions",
                partition=missing[0].text,
            )
        self._known = {**self._known, **histories}
        return histories

    def _history(
        self, context: Context, pipeline: str, partition: SourcePartition
    ) -> _History | None:
        before = None
        while True:
            head = read_progress(context, pipeline, partition.text)
            if head is None:
                return None
            if head.closed:
                raise NotFoundError(
                    f"source `{self.url}`: its generation is retired, and its files "
                    "go: read the promoted one"
                )
            known = self._known.get(partition)
            if known is not None and (known.pipeline, known.end) == (pipeline, head.position):
                return known
            commits = list(read_commits_to(context, pipeline, partition.text, head.position))
            torn = _find_torn(partition, commits, head)
            if torn is None:
                return _History(pipeline, commits, head)
            if before == (head, commits):
                raise torn
            before = head, commits  # a person may move the archive's position meanwhile

    def __reduce__(self) -> tuple[Any, ...]:
        return ArchiveSource, (self._open_context, self._name, self._generation)

    def __repr__(self) -> str:
        return f"ArchiveSource({self._open_context!r}, {self._name!r}, {self._generation!r})"


def _manifests(
    context: Context, history: _History, range: SourceRange
) -> tuple[list[Manifest], list[Commit]]:
    """Returns the current manifests of the commits in a range: an erasure replaces them."""
    commits = _read_again(context, history, range.partition, _commits_in(history, range))
    with Pool(_AT_ONCE) as pool:
        while True:
            try:
                keys = list(dict.fromkeys(each.manifest for each in commits))
                found = dict(
                    zip(keys, pool.map(lambda key: _manifest(context, key), keys), strict=True)
                )
                return [manifest_of_range(found[each.manifest], each) for each in commits], commits
            except CorruptError:
                known, commits = commits, _read_again(context, history, range.partition, commits)
                if commits == known:
                    raise


def _read_again(
    context: Context, history: _History, partition: SourcePartition, commits: Sequence[Commit]
) -> list[Commit]:
    """Returns the same commits as their rows are now.

    Raises ``UnavailableError`` if a person has moved the archive's position back before them, and
    ``NotFoundError`` if their generation was dropped.
    """
    if not commits:
        return []
    before = history.commits[: history.borders[commits[0].start]]
    fresh: dict[str, Commit] = {}
    for commit in read_commits(
        context, history.pipeline, partition.text, sum(each.events for each in before)
    ):
        fresh[commit.start] = commit
        if commit.start == commits[-1].start:
            break
    if any(fresh.get(each.start, each).end != each.end for each in commits):
        raise _moved(partition)
    if commits[-1].start not in fresh:
        head = read_progress(context, history.pipeline, partition.text)
        if head is None or head.closed:
            raise NotFoundError(
                f"source partition `{partition.text}`: the generation that it was planned for is "
                "retired: read the promoted one",
                partition=partition.text,
            )
        if head.position != history.end:
            raise _moved(partition)
    return [fresh.get(each.start, each) for each in commits]


def _moved(partition: SourcePartition) -> UnavailableError:
    return UnavailableError(
        f"source partition `{partition.text}`: the archive's position was moved meanwhile: read "
        "it again",
        partition=partition.text,
    )


def _manifest(context: Context, key: str) -> Manifest:
    try:
        return load_manifest(context.store, key)
    except NotFoundError as exc:
        raise CorruptError(
            f"manifest `{key}`: is not there: find out who deleted it, and restore it from a copy",
            manifest=key,
        ) from exc


def _commits_in(history: _History, range: SourceRange) -> Sequence[Commit]:
    """Returns the commits that a range touches. Raises if they are not there."""
    start, limit = range.start, range.limit
    whole = history.between(start, limit)
    if whole is not None:
        return whole
    if start in history.borders and limit in history.borders:
        raise _backwards(range)
    if not all(map(is_number, (start, limit, *history.borders))):
        raise InvalidError(
            f"source partition `{range.partition.text}`: a commit of the archive neither begins "
            f"nor ends at both `{start}` and `{limit}`, which are not offsets: ask the source to "
            "cut a range"
        )
    if int(start) > int(limit):
        raise _backwards(range)
    _check_held(history, range)
    return [
        commit
        for commit in history.commits
        if int(commit.end) > int(start) and int(commit.start) < int(limit)
    ]


def _check_held(history: _History, range: SourceRange) -> None:
    what, start, limit = range.partition.text, int(range.start), int(range.limit)
    first, end = int(history.first), int(history.end)
    if start < first:
        raise NotFoundError(
            f"source partition `{what}`: the archive begins at offset {first}, asked was {start}: "
            f"continue from {first} if that loss is acceptable",
            lost_from=start,
            first=first,
        )
    if limit > end:
        raise NotFoundError(
            f"source partition `{what}`: the archive ends at offset {end}, asked was up to "
            f"{limit}: ask the source for its bounds",
            lost_from=min(start, end),
            first=first,
            end=end,
        )


def _backwards(range: SourceRange) -> InvalidError:
    return InvalidError(
        f"source partition `{range.partition.text}`: range [{range.start}, {range.limit}) runs "
        "backwards: give start <= limit"
    )


def _find_torn(
    partition: SourcePartition, commits: Sequence[Commit], head: Progress
) -> CorruptError | None:
    """Returns the error of commits that do not follow each other up to the head, or None."""
    starts = [*(commit.start for commit in commits[1:]), head.position]
    for commit, start in zip(commits, starts, strict=False):
        if commit.end != start:
            return CorruptError(
                f"source partition `{partition.text}`: its commits end at {commit.end} and "
                f"continue at {start}: restore the catalog from a copy",
                partition=partition.text,
            )
    return None


_source: type[Source] = ArchiveSource
_explaining: type[ExplainingSource] = ArchiveSource
_dividing: type[DividingSource] = ArchiveSource


def missing_in_commits(
    range: SourceRange,
    read: int,
    manifests: Sequence[Manifest],
    reason: GapReason | None = "upstream",
) -> MissingOffsets:
    """Returns why a range has fewer events than offsets, from the manifests that it touches.

    Gaps get the given reason, or keep their own without one. What a folder of files lacked keeps
    that reason. Offsets that a transform dropped, here or in an archive upstream, are only some of
    a range and keep that reason.
    """
    span = offsets_between(range.start, range.limit)
    if span is None:
        span = sum(_numbers(each) for each in manifests)
    left = span - read
    gaps: tuple[Gap, ...] = ()
    scattered: tuple[Gap, ...] = ()
    some = [each.dropped for each in manifests]  # gaps that are only some offsets of a range
    for manifest in manifests:
        for gap in manifest.lost:
            cut = cut_gap(gap, range.start, range.limit, reason=reason if gap.is_loss else None)
            if cut is not None and gap.is_scattered:
                # Its own positions: a range inside may have no event, and is no known gap.
                scattered = joined_gaps(scattered, (Gap(gap.start, gap.end, "files", cut.offsets),))
            elif cut is not None and gap.is_partial:
                some.append(cut.offsets)
            elif cut is not None:
                gaps = joined_gaps(gaps, (cut,))
    left -= sum(gap.offsets for gap in gaps)
    for gap in scattered:
        if unknown := min(max(0, left), gap.offsets):
            gaps = (*gaps, Gap(gap.start, gap.end, gap.reason, unknown))
            left -= unknown
    dropped = min(max(0, left), sum(some))
    if dropped:
        gaps = (*gaps, Gap(range.start, range.limit, "transform", dropped))
        left -= dropped
    absent = min(max(0, left), sum(each.absent for each in manifests))
    return MissingOffsets(absent, left - absent, gaps)


def cut_gap(gap: Gap, start: str, end: str, reason: GapReason | None = None) -> Gap | None:
    """Returns the part of a gap between two positions; None if there is none.

    A gap with offsets spread over its range keeps as many as fit.
    """
    why = gap.reason if reason is None else reason
    whole = offsets_between(gap.start, gap.end)
    if whole is None or offsets_between(start, end) is None:
        return Gap(gap.start, gap.end, why, gap.offsets)
    first, last = max(int(gap.start), int(start)), min(int(gap.end), int(end))
    if first >= last:
        return None
    return Gap(str(first), str(last), why, min(gap.offsets, last - first))


def _numbers(manifest: Manifest) -> int:
    """Returns how many numbers a range used, if its positions are not offsets."""
    skipped = sum(gap.offsets for gap in manifest.lost)
    return manifest.read + manifest.deleted + manifest.absent + skipped
