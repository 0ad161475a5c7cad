"""Sources that lack events inside of what they hold: a promote loses none that is archived."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.archive import test_fill
from tests.archive.test_fill import Halving
from tests.sim.transforms_world import Losing
from tests.support.archive_look import AT, a_home, an_archive, fill
from tidelog import Event, Home
from tidelog.archive.account import read_account
from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.archive.coverage import alike_ranges
from tidelog.archive.fill import FillSource
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.archive.status import Limits, troubles
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.codec.event_batch import EVENT_SCHEMA, table_of, with_position
from tidelog.connectors import by_url
from tidelog.connectors.archive.reader import CompletedReader
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import Chunk, Source, SourcePartition, SourceRange
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import limits
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import Gap, Manifest, Progress, joined_gaps
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import late_head

T0 = SourcePartition("t", "0")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def drive(home: Home, name: str, generation: int | None = None) -> int:
    pipeline = open_pipeline(home.context, home.archives.get(name).info, Halving(), generation)
    return Driver(home.context, pipeline, DriverOptions()).run()


def build(home: Home, name: str, **written_as: object) -> None:
    """Build another generation, up to the live one."""
    _, number = begin_backfill(home.context, name, ArchiveFormat(**written_as))  # type: ignore[arg-type]
    drive(home, name, number)


def objects(home: Home) -> Path:
    return Path(home.store.url.removeprefix("file://"))


def held(home: Home, name: str) -> list[int]:
    """The offsets in all files and dead letters of the live generation, by a plain listing."""
    archive = home.archives.get(name).info
    number = archive.generation
    data = (objects(home) / archive.folder()).glob("**/*.parquet")
    dead = (objects(home) / archive.dead).glob(f"**/{number}_*.parquet")
    files = [pq.ParquetFile(path) for path in (*data, *dead)]
    return sorted(n for file in files for n in file.read(["offset"]).column(0).to_pylist())


def problems(home: Home, name: str) -> list[str]:
    found = verify_archive(
        home.context, home.archives.get(name).info, ArchiveVerifyOptions(deep=True)
    )
    return [each.what for each in found.problems]


def copied(home: Home, name: str) -> Path:
    """A copy of the folder of an archive, as it is now."""
    target = objects(home).parent / f"copy-{name}"
    shutil.copytree(objects(home) / home.archives.get(name).info.folder(), target)
    return target


def trim(home: Home, offset: int) -> None:
    home.trim("t", ToOffsets({0: offset}), past_readers=True)


@pytest.fixture
def holed(home: Home) -> Path:
    """A copy of archive `raw`, of 30 events in three files, that lacks the second file."""
    an_archive(home, "raw")
    for number in range(3):
        fill(home, range(number * 10, number * 10 + 10))
        drive(home, "raw")
    trim(home, 30)
    copy = copied(home, "raw")
    sorted(copy.glob("**/*.parquet"))[1].unlink()
    return copy


def test_what_a_backup_lacks_comes_from_the_live_generation(home: Home, holed: Path) -> None:
    build(home, "raw", source=f"file:{holed}")
    promoted = promote(home.context, "raw")
    assert held(home, "raw") == list(range(30))
    assert problems(home, "raw") == []
    account = read_account(home.context, promoted.pipeline(), "t/0")
    assert account is not None
    assert (account.archived, account.absent) == (30, 0)
    assert {m.completed for m in read_manifests(home.context, promoted.pipeline(), "t/0")} == {1}
    drop_generation(home.context, "raw", 1)
    assert held(home, "raw") == list(range(30))


def test_dead_letters_are_kept_though_a_copied_folder_has_none(home: Home) -> None:
    fill(home, range(1, 31))
    an_archive(home, "daily", parser=AT)
    an_archive(home, "raw")
    for name in ("daily", "raw"):
        drive(home, name)
    trim(home, 30)
    copy = copied(home, "daily")
    for name, parser in (("daily", AT), ("raw", "")):
        build(home, name, source=f"file:{copy}", parser=parser)
        promote(home.context, name)
        assert held(home, name) == list(range(30))
        assert problems(home, name) == []


def test_holes_that_only_output_of_a_transform_could_fill_refuse_a_promote(
    home: Home, holed: Path
) -> None:
    fill(home, range(30, 40))
    an_archive(home, "late", start="latest", transform="m:f")
    build(home, "late", source=f"file:{holed}", start="earliest", transform="m:f")
    drive(home, "late")
    promote(home.context, "late")  # nothing before 40 was archived, and so nothing is lost
    an_archive(home, "half", source="archive:raw", transform="m:f")
    drive(home, "half")
    build(home, "half", source=f"file:{holed}")
    with pytest.raises(InvalidError, match=re.escape("lacks what generation 1 has: `t/0` from 10")):
        promote(home.context, "half")
    assert promote(home.context, "half", force=True).forced[0].ranges == (("t/0", "10", "19"),)
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 10 to 19")):
        drop_generation(home.context, "half", 1)


def archive_of_files(home: Home) -> Path:
    """Archives ``raw``, of 40 files of one event, and ``half`` of it; returns a copy of ``raw``."""
    an_archive(home, "raw")
    an_archive(home, "half", source="archive:raw", transform="m:f")
    for number in range(40):
        home.append("t", [Event(b"%d" % number, id=f"id-{number}")], partition=0)
        drive(home, "raw")
    drive(home, "half")
    return copied(home, "raw")


@pytest.mark.parametrize("missing", [range(20, 28), [20]])
def test_dropped_events_excuse_none_that_a_source_lacks(home: Home, missing: Sequence[int]) -> None:
    """The range lists eight holes and counts the others, as Kafka counts compacted records."""
    copy = archive_of_files(home)
    files = sorted(copy.glob("**/*.parquet"))
    for number in [*range(1, 17, 2), *missing]:
        files[number].unlink()
    build(home, "half", source=f"file:{copy}", transform="m:f")
    with pytest.raises(InvalidError, match=re.escape("lacks what generation 1 has: `t/0` from 20")):
        promote(home.context, "half")
    assert held(home, "half") == list(range(0, 40, 2))


@pytest.mark.parametrize("is_there", [True, False])
def test_dropped_events_are_not_lacking_while_the_source_shows_that_they_were_read(
    home: Home, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = archive_of_files(home)
    files = sorted(copy.glob("**/*.parquet"))
    for number in range(1, 40, 2):
        files[number].unlink()
    monkeypatch.setattr(test_fill._Even, "drops", 3)
    build(home, "half", source=f"file:{copy}", transform="m:f")
    if is_there:
        promote(home.context, "half")
        assert held(home, "half") == list(range(0, 40, 4))
        return
    files[22].unlink()  # the backfill has read it, but nothing shows that now
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 2 to 39")):
        promote(home.context, "half")


def test_restore_says_that_the_archive_has_events_now_that_a_transform_had_dropped(
    home: Home,
) -> None:
    home.append("t", [Event(b"%d" % n, id=f"id-{n}") for n in range(20)], partition=0)
    home.create_topic("back", 1)
    an_archive(home, "half", transform="m:f")
    drive(home, "half")
    half = home.archives.get("half")
    assert half.restore(to="topic:back").events == 10
    build(home, "half", transform="m:f", codec="gzip")
    promote(home.context, "half")
    home.delete("t", ["id-1", "id-2"])
    assert half.restore(to="topic:back").events == 0, "the same events were dropped again"
    build(home, "half", codec="zstd")
    promote(home.context, "half")
    with pytest.raises(InvalidError, match="is past events in `t/0` from 0 to 20, which the arch"):
        half.restore(to="topic:back")


def test_generations_with_the_same_holes_lack_only_dropped_events() -> None:
    def ranges(*given: tuple[int, int, int], lost: tuple[Gap, ...] = ()) -> list[Manifest]:
        return [
            Manifest("p", "t/0", str(start), str(end), 0, 0, 0, absent=absent, lost=lost)
            for start, end, absent in given
        ]

    old = ranges((0, 10, 1), (10, 30, 2), (30, 40, 0))
    assert alike_ranges(old, ranges((0, 10, 1), (10, 30, 1))) == {("0", "10"), ("10", "30")}
    assert alike_ranges(old, ranges((0, 10, 2), (10, 40, 1))) == set()
    some = (Gap("0", "10", "transform", 3),)
    assert alike_ranges(old, ranges((0, 10, 0), lost=some)) == set()
    filled = [msgspec.structs.replace(each, filled=1) for each in old]
    assert alike_ranges(old, filled) == alike_ranges(filled, old) == set()
    assert alike_ranges([], old) == alike_ranges(old, []) == set()


@pytest.mark.parametrize("comes_back", [False, True])
def test_as_many_lost_events_of_another_source_excuse_none(
    home: Home, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live generation misses offset 5, which is dropped anyway, and the new one offset 2.

    That may come back after it was read, as into an archive that another generation completes.
    """
    lost: dict[str, set[tuple[int, int]]] = {"t": {(0, 5)}, "b": {(0, 2)}}

    def losing(url: str, **how: Any) -> Source:
        kind, _, name = url.partition(":")
        if kind == "losing":
            return Losing(how["open_context"], name, lost[name])
        return open_source(url, **how)

    monkeypatch.setattr(by_url, "open_source", losing)
    an_archive(home, "half", source="losing:t", transform="m:f")
    fill(home, range(8))
    drive(home, "half")
    build(home, "half", source="losing:b", transform="m:f")
    if comes_back:
        lost["b"].clear()
    with pytest.raises(InvalidError, match=re.escape("lacks what generation 1 has: `t/0` from 2")):
        promote(home.context, "half")


def test_rollback_to_a_generation_that_lacks_what_a_transform_dropped_is_refused(
    home: Home,
) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(20)], partition=0)
    an_archive(home, "half", transform="m:f")
    drive(home, "half")
    an_archive(home, "raw")
    an_archive(home, "chain", source="archive:half", transform="m:f")
    for name in ("raw", "chain"):
        drive(home, name)
    assert held(home, "chain") == list(range(0, 20, 2))
    build(home, "chain", source="archive:raw")
    promote(home.context, "chain")
    assert held(home, "chain") == list(range(20))
    with pytest.raises(InvalidError, match=re.escape("lacks what generation 2 has: `t/0` from 1")):
        rollback(home.context, "chain")
    assert held(home, "chain") == list(range(20))


@pytest.mark.parametrize("live", [0, 10])
def test_backup_is_read_no_further_than_the_live_generation_where_the_source_holds_the_rest(
    home: Home, live: int
) -> None:
    """The backup lacks events that the topic holds; nothing of the archive tells of them."""
    home.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
    an_archive(home, "slow")
    if live:
        drive(home, "slow")
    home.append("t", [Event(b"%d" % n) for n in range(10, 30)], partition=0)
    an_archive(home, "half", transform="m:f")
    drive(home, "half")
    backup = copied(home, "half")
    build(home, "slow", source=f"file:{backup}")
    promote(home.context, "slow")
    drive(home, "slow")
    assert held(home, "slow") == list(range(30))
    assert problems(home, "slow") == []


def test_range_is_completed_no_further_than_the_live_generation_is(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that archives later is compared: it may have what the backup lacks there."""
    monkeypatch.setattr(FillSource, "_until_own", lambda *given: given[-1])  # as if it held nothing
    home.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
    an_archive(home, "slow")
    drive(home, "slow")
    home.append("t", [Event(b"%d" % n) for n in range(10, 20)], partition=0)
    an_archive(home, "half", transform="m:f")
    drive(home, "half")
    build(home, "slow", source="archive:half")
    drive(home, "slow")
    assert held(home, "slow") == list(range(20))
    with pytest.raises(InvalidError, match=re.escape("lacks what generation 1 has: `t/0` from 11")):
        promote(home.context, "slow")
    assert held(home, "slow") == list(range(20))


@pytest.fixture
def three(home: Home) -> Home:
    """Archives ``a`` with a transform, ``b`` of that, and ``c`` of ``b``, with typed columns."""
    columns = {"schema": "n INT", "keep_value": False}
    home.append("t", [Event(b'{"n": %d}' % n) for n in range(30)], partition=0)
    an_archive(home, "a", transform="m:f")
    an_archive(home, "b", source="archive:a")
    an_archive(home, "c", source="archive:b", format_settings=columns)
    for name in "abc":
        drive(home, name)
    return home


def test_what_a_transform_dropped_is_not_a_gap_of_all_offsets_further_down(three: Home) -> None:
    head = read_progress(three.context, find_archive(three.context, "c").pipeline(), "t/0")
    assert head is not None
    assert head.gaps == (Gap("0", "30", "transform", 15),)
    assert problems(three, "c") == []
    found = [three.archives.get("b").find("t/0", offset).status for offset in (4, 5)]
    assert found == ["archived", "gap"]


def test_chain_never_stops_for_what_a_transform_drops_now_and_then(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second range loses an event; ranges between them lose none."""
    monkeypatch.setattr(limits, "GAPS_MAX", 2)
    an_archive(home, "half", transform="m:f")
    an_archive(home, "chain", source="archive:half")
    for _ in range(8):
        home.append("t", [Event(b"x")], partition=0)
        drive(home, "half")
        drive(home, "chain")
    head = read_progress(home.context, home.archives.get("chain").info.pipeline(), "t/0")
    assert head is not None
    assert head.gaps == (Gap("1", "8", "transform", 4),)
    assert head.totals.skipped == 4
    chain = home.archives.get("chain")
    (account,) = [each.account for each in chain.status().partitions]
    assert account is not None
    assert (account.archived, account.adds_up) == (4, True)
    assert troubles(chain.status(), Limits()) == [], "no operator accepted a loss"
    report = chain.verify(deep=True, source=True)
    assert report.problems == []
    assert [(note.kind, note.what[:10]) for note in report.notes] == [("dropped", "4 offsets ")]


def test_partial_gaps_are_one_for_each_reason() -> None:
    gaps = joined_gaps((), (Gap("0", "5", "upstream", 5), Gap("0", "9", "transform", 2)))
    gaps = joined_gaps(gaps, (Gap("5", "6", "upstream", 1), Gap("20", "21", "transform", 1)))
    gaps = joined_gaps(gaps, (Gap("30", "40", "files", 3),))
    assert gaps == (
        Gap("0", "6", "upstream", 6),
        Gap("0", "21", "transform", 3),
        Gap("30", "40", "files", 3),
    )
    shards = joined_gaps((Gap("s1", "s3", "transform", 2),), (Gap("s7", "s9", "transform", 1),))
    assert shards == (Gap("s1", "s9", "transform", 3),)


def test_late_ranges_add_no_gap_each_for_what_a_transform_dropped() -> None:
    head = Progress("90", 0, 1, gaps=(Gap("0", "60", "upstream", 60),))
    for start in (0, 20, 40):
        lost = (Gap(str(start), str(start + 20), "transform", 1),)
        late = Manifest("p", "t/0", str(start), str(start + 20), head.ordinal, 19, 19, lost=lost)
        head = late_head(head, late, head.totals.plus(late, 0))
    assert head.gaps == (Gap("0", "60", "transform", 3),)
    assert (head.totals.skipped, head.ordinal) == (3, 57)


def test_what_is_left_beside_dropped_events_fills_a_gap_of_the_live_generation(home: Home) -> None:
    an_archive(home, "half", transform="m:f")
    an_archive(home, "copy", source="archive:half")
    an_archive(home, "daily")
    for number in range(3):
        fill(home, range(number * 10, number * 10 + 10))
        for name in ("half", "copy", "daily"):
            if (number, name) != (1, "daily"):
                drive(home, name)
        if number == 1:
            home.archives.get("daily").seek("latest", why="asked")
    trim(home, 30)
    build(home, "daily", source="archive:copy")
    promote(home.context, "daily")
    assert held(home, "daily") == [*range(10), *range(10, 20, 2), *range(20, 30)]
    assert problems(home, "daily") == []


def test_promote_and_drop_count_events_beside_those_that_a_transform_dropped(three: Home) -> None:
    three.append("t", [Event(b'{"n": %d}' % n) for n in range(30, 40)], partition=0)
    trim(three, 30)
    an_archive(three, "late")
    drive(three, "late")
    build(three, "c", source="archive:late")
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 0 to 30")):
        promote(three.context, "c")
    promote(three.context, "c", force=True)
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 0 to 30")):
        drop_generation(three.context, "c", 1)


def test_range_that_ends_inside_of_a_commit_counts_what_its_transform_dropped(home: Home) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(20)], partition=0)
    an_archive(home, "half", transform="m:f")
    an_archive(home, "chain", source="archive:half")
    for name in ("half", "chain"):
        drive(home, name)
    trim(home, 13)
    an_archive(home, "late")
    drive(home, "late")
    build(home, "chain", source="archive:late")  # its ranges meet at 13
    promoted = promote(home.context, "chain")
    account = read_account(home.context, promoted.pipeline(), "t/0")
    assert account is not None
    assert (account.archived, account.adds_up) == (7 + 7, True)
    assert problems(home, "chain") == []


@dataclass(frozen=True)
class Lists:
    """A reader of some offsets, in chunks; each chunk ends at a position."""

    range: SourceRange
    chunks: tuple[tuple[Sequence[int], int], ...]
    name: str

    def read(self) -> Iterator[Chunk]:
        for offsets, end in self.chunks:
            events = [Event(f"{self.name}{n}".encode()) for n in offsets]
            rows = pa.RecordBatch.from_pylist([], EVENT_SCHEMA)
            if events:
                rows = with_position(table_of(events, 0).to_batches()[0], "t", 0, 0)
                place = EVENT_SCHEMA.get_field_index("offset")
                rows = rows.set_column(place, "offset", pa.array(offsets, pa.int64()))
            batch = rows.cast(EVENT_SCHEMA)
            yield Chunk(batch, str(end), b"note")


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ([(range(10), 10)], [(range(10), 10)]),
        ([([], 10)], [(range(10), 10)]),
        ([([3, 4], 5), ([5], 10)], [(range(2), 2), (range(2, 7), 7), (range(7, 10), 10)]),
        ([([0, 9], 10)], [(range(1, 9, 2), 10)]),
        ([(range(5), 5), ([6, 8], 10)], [(range(10), 10)]),
        ([(range(0, 10, 3), 10)], [([], 10)]),
        ([([9], 10)], [([0], 1), ([2], 3), ([4], 10)]),
    ],
)
def test_completed_range_has_each_offset_once_and_in_order(
    source: Sequence[tuple[Sequence[int], int]], files: Sequence[tuple[Sequence[int], int]]
) -> None:
    range_ = SourceRange(T0, "0", "10")
    own = Lists(range_, tuple(source), "s")
    reader = CompletedReader(own, Lists(range_, tuple(files), "f"), 1)
    chunks = list(reader.read())
    rows = [row for each in chunks for row in each.batch.to_pylist()]
    given = {n for offsets, _ in source for n in offsets}
    known = {n for offsets, _ in files for n in offsets}
    assert [row["offset"] for row in rows] == sorted(given | known)
    assert all(row["value"][:1] == (b"s" if row["offset"] in given else b"f") for row in rows)
    assert chunks[-1].position == "10"
    positions = [int(each.position) for each in chunks]
    assert positions == sorted(positions)


@pytest.mark.parametrize("has_run", [True, False])
def test_backup_of_a_topic_that_had_the_name_before_is_refused(home: Home, has_run: bool) -> None:
    fill(home, range(20))
    an_archive(home, "old")
    drive(home, "old")
    copy = copied(home, "old")
    home.delete_topic("t")
    home.create_topic("t", 1)
    fill(home, range(100, 130))
    an_archive(home, "new")
    if has_run:
        drive(home, "new")
    with pytest.raises(InvalidError, match="as of a topic that had this name before"):
        build(home, "new", source=f"file:{copy}", start="earliest")
    drop_generation(home.context, "new", 2)
    drive(home, "new")
    assert held(home, "new") == list(range(30))
