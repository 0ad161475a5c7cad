"""Every offset of a source partition is accounted for, from a recorded beginning."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import msgspec
import pyarrow.parquet as pq
import pytest

from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tests.support.cli_run import run_here
from tests.support.fake_pipelines import LinesSink, ListSource
from tidelog import Event, Home
from tidelog.archive.account import note_before, read_account
from tidelog.archive.archive import choose_start, create_archive, open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.metrics import status_text
from tidelog.archive.status import ArchiveStatus, Limits, PartitionStatus, read_status, troubles
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions, ArchiveVerifyReport
from tidelog.catalog.base import Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.connectors.source import RangeReader, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.commits import read_commit_rows, read_manifests
from tidelog.coordination.pipeline_rows import read_listed, read_progress
from tidelog.erasure.rewrite import erase_from_archives
from tidelog.errors import AlreadyExistsError, InvalidError, UnavailableError, UnknownOutcomeError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.archive import Account, Archive, ArchiveFormat
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Begin, Gap, Manifest
from tidelog.model.topic import encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import RemadeError
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import LogSettings
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

T0 = SourcePartition("t", "0")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        fill(made, range(100))
        yield made


@pytest.fixture
def context() -> Context:
    return Context(
        MemoryStore(SystemClock()),
        MemoryCatalog(),
        SystemClock(),
        RandomIds(),
        random.Random(1),
        LogSettings(lease_ttl_ms=300),
    )


def account(home: Home, archive: Archive, partition: str = "t/0") -> Account:
    found = read_account(home.context, archive.pipeline(), partition)
    assert found is not None
    assert found.adds_up, found.problem
    return found


def range_sum(manifest: Manifest) -> int:
    """What a manifest counts, in all."""
    files = sum(file.events + file.erased for file in manifest.files if file.kind != "sidecar")
    skipped = sum(gap.offsets for gap in manifest.lost)
    return files + manifest.dropped + manifest.deleted + manifest.absent + skipped


def drive_list(context: Context, source: ListSource, **how: object) -> int:
    pipeline = Pipeline("a", "inc", source, LinesSink(context.store), LocalWorkers(2))
    return Driver(context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]


def appear(source: ListSource, name: str, count: int) -> SourcePartition:
    """A partition that the source did not have before."""
    partition = SourcePartition("t", name)
    source.events[partition] = {n: f"{name}:{n}" for n in range(count)}
    source.ends[partition], source.firsts[partition] = count, 0
    return partition


def test_partition_that_appears_later_begins_at_its_first_event(context: Context) -> None:
    source = ListSource(1, 60)
    assert drive_list(context, source, start="latest") == 0
    later = appear(source, "1", 100)
    assert drive_list(context, source, start="latest") == 100
    head = read_progress(context, "inc", later.text)
    assert head is not None
    assert head.begin is not None
    assert (head.begin.position, head.begin.reason) == ("0", "earliest")
    first = read_progress(context, "inc", "t/0")
    assert first is not None
    assert first.begin is not None
    assert (first.begin.position, first.begin.reason) == ("60", "latest")


def test_partition_that_appears_while_a_driver_follows_begins_at_its_first_event(
    context: Context,
) -> None:
    source = ListSource(1, 60)
    pipeline = Pipeline("a", "inc", source, LinesSink(context.store), LocalWorkers(2))
    driver = Driver(context, pipeline, DriverOptions(start="latest"))
    assert driver.run() == 0
    appear(source, "1", 100)
    assert driver.run() == 100


def test_latest_means_the_ends_that_create_saw(home: Home) -> None:
    archive = an_archive(home, "daily")
    fill(home, range(100, 120))
    assert drive(home, archive, start="latest") == 20
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("100", "latest")
    assert (found.span, found.archived) == (20, 20)


def test_start_of_an_archive_is_that_of_its_creation(home: Home) -> None:
    """Whatever runs it: a command, `up`, or a program of yours."""
    archive = an_archive(home, "daily", start="latest")
    fill(home, range(100, 120))
    assert drive(home, archive) == 20
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("100", "latest")


def test_start_changes_only_before_an_archive_has_begun(home: Home) -> None:
    archive = an_archive(home, "daily")
    archive = choose_start(home.context, "daily", "latest")
    assert home.archives.get("daily").info.start == "latest"
    fill(home, range(100, 120))
    assert drive(home, archive) == 20
    assert choose_start(home.context, "daily", "latest") == archive
    with pytest.raises(InvalidError, match="began at latest, and --start earliest no longer"):
        choose_start(home.context, "daily", "earliest")
    assert home.archives.get("daily").info.start == "latest"


def test_new_generation_of_an_archive_with_a_late_start_begins_where_the_live_one_does(
    home: Home,
) -> None:
    archive = an_archive(home, "daily", start="latest")
    fill(home, range(100, 120))
    drive(home, archive)
    begin_backfill(home.context, "daily", ArchiveFormat(format="avro"))
    promoted = promote(home.context, "daily")
    assert promoted.generation == 2
    fill(home, range(120, 130))
    assert drive(home, promoted) == 10
    found = read_account(home.context, promoted.pipeline(), "t/0")
    assert found is not None
    assert found.begin is not None
    assert int(found.begin.position) <= 100
    assert found.end == "130"


def test_topic_made_again_since_create_begins_at_its_first_event(home: Home) -> None:
    archive = an_archive(home, "daily")
    home.delete_topic("t", past_readers=True)
    home.create_topic("t", 2)
    fill(home, range(30))
    assert drive(home, archive, start="latest") == 30
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("0", "earliest")


def test_begin_behind_a_trim_differs_from_the_first_event(home: Home) -> None:
    home.trim("t", ToOffsets({0: 40}))
    archive = an_archive(home, "daily")
    drive(home, archive)
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("40", "retention")
    assert (found.span, found.archived) == (60, 60)


def test_accepted_loss_is_a_gap_with_its_reason(home: Home) -> None:
    archive = an_archive(home, "daily")
    drive(home, archive)
    fill(home, range(100, 150))
    home.trim("t", ToOffsets({0: 130}), past_readers=True)
    drive(home, archive, accept_loss=True)
    found = account(home, archive)
    assert found.gaps == (Gap("100", "130", "retention", 30),)
    assert (found.span, found.archived, found.skipped) == (150, 120, 30)
    for manifest in read_manifests(home.context, archive.pipeline(), "t/0"):
        assert range_sum(manifest) == int(manifest.end) - int(manifest.start)


def test_events_deleted_before_they_were_read_count_as_erased(home: Home) -> None:
    home.append("t", [Event(b"x", id=name) for name in ("a", "b", "c")], partition=0)
    home.delete("t", ["a", "c"], why="asked")
    archive = an_archive(home, "daily")
    drive(home, archive)
    found = account(home, archive)
    assert (found.span, found.archived, found.erased, found.absent) == (103, 101, 2, 0)


def test_offsets_without_events_count_as_never_there(context: Context) -> None:
    source = ListSource(1, 70)
    drive_list(context, source)
    found = read_account(context, "inc", "t/0")
    assert found is not None
    assert found.adds_up, found.problem
    assert (found.span, found.archived, found.absent) == (70, 60, 10)


def test_erasures_and_replays_keep_the_sums_right(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT)
    drive(home, archive)
    before = account(home, archive)
    assert before.dead
    topic = home.topic("t")
    erase_from_archives(home.context, topic, {0: [1, 50, 99]})
    erased = account(home, archive)
    assert erased.erased == 3
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
    replayed = account(home, archive)
    assert (replayed.erased, replayed.dead, replayed.archived) == (3, 15, 82)
    erase_from_archives(home.context, topic, {0: [1, 50, 51, 98, 99]})
    again = account(home, archive)
    assert (again.erased, again.dead, again.archived) == (5, 14, 81), "51 is data now, 98 is dead"


def test_chain_carries_gaps_of_its_archive(home: Home) -> None:
    first = an_archive(home, "first")
    drive(home, first)
    fill(home, range(100, 150))
    home.trim("t", ToOffsets({0: 130}), past_readers=True)
    drive(home, first, accept_loss=True)
    erase_from_archives(home.context, home.topic("t"), {0: [3, 140]})
    second = an_archive(home, "second", source="archive:first")
    drive(home, second)
    found = account(home, second)
    assert found.gaps == (Gap("100", "130", "upstream", 30),)
    assert (found.span, found.archived, found.erased, found.absent) == (150, 118, 2, 0)


class DeafCatalog(MemoryCatalog):
    """A catalog that never writes a head, and whose replies are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, partition: str, *changes: object, write_id: str) -> None:
        if any(getattr(change, "row", "") == "head" for change in changes):
            self.writes += 1
            raise UnknownOutcomeError("the reply was lost")
        super().write(partition, *changes, write_id=write_id)  # type: ignore[arg-type]


def test_claim_ends_when_replies_stay_lost(context: Context) -> None:
    deaf = DeafCatalog()
    slept: list[float] = []

    class Sleepless(SystemClock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    context = Context(
        context.store, deaf, Sleepless(), context.ids, context.random, context.log_settings
    )
    pipeline = Pipeline("a", "inc", ListSource(1, 10), LinesSink(context.store), LocalWorkers(1))
    with pytest.raises(UnavailableError, match="replies stay lost"):
        Cycle(context, pipeline, "one").claim(T0, Begin("0", "earliest"))
    assert deaf.writes <= 20
    assert sum(slept) > 1


def test_verify_recounts_from_files_and_not_from_manifests(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    (first,) = verified(home, archive).accounts[:1]
    assert first == account(home, archive), "rows and files say the same"
    # A manifest that counts an event which no file holds.
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    file = next(each for each in manifest.files if each.kind == "data")
    table = pq.read_table(io.BytesIO(home.store.get(file.target)))
    shorter = io.BytesIO()
    pq.write_table(table.slice(1), shorter)
    data = shorter.getvalue()
    home.store.delete([file.target])
    home.store.put(file.target, data)
    changed = msgspec.structs.replace(file, size=len(data), crc=crc32c.crc32c(data))
    files = tuple(changed if each == file else each for each in manifest.files)
    replace_manifest(home, archive, msgspec.structs.replace(manifest, files=files))
    for deep in (False, True):
        found = verified(home, archive, deep=deep)
        assert [each.kind for each in found.problems] == ["contents"]
        assert not found.accounts[0].adds_up
    fewer = msgspec.structs.replace(changed, events=file.events - 1)
    files = tuple(fewer if each == file else each for each in manifest.files)
    lying = msgspec.structs.replace(
        manifest, files=files, written=manifest.written - 1, dropped=manifest.dropped - 1
    )
    replace_manifest(home, archive, lying)
    assert "counts" in {each.kind for each in verified(home, archive).problems}


def test_verify_notices_a_range_whose_offsets_do_not_add_up(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    replace_manifest(home, archive, msgspec.structs.replace(manifest, absent=1))
    assert {each.kind for each in verified(home, archive).problems} == {"account"}


def test_verify_notices_a_head_that_forgot_a_gap(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    head = read_progress(home.context, archive.pipeline(), "t/0")
    assert head is not None
    begin = Begin("10", "explicit")
    for wrong in ({"gaps": (Gap("3", "5", "retention", 2),)}, {"begin": begin}):
        change = Put("head", encode_row(msgspec.structs.replace(head, **wrong)))
        home.catalog.write(where, change, write_id=home.context.ids.new())
        assert {each.kind for each in verified(home, archive).problems} == {"account"}


def test_promoted_generation_is_compared_with_the_one_before(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    home.trim("t", ToOffsets({0: 40}))
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat(parser=AT_OR_WHEN))
    pipeline = open_pipeline(home.context, built, LocalWorkers(1), generation)
    Driver(home.context, pipeline, DriverOptions()).run()
    fresh = read_account(home.context, built.pipeline(generation), "t/0")
    assert fresh is not None
    assert fresh.begin is not None
    note_before(home.context, (1, archive.pipeline()), built.pipeline(generation), 0)
    problems = verified(home, built, generation=generation).problems
    if fresh.begin.position == "0":  # filled from the generation before
        assert problems == []
        return
    assert [each.kind for each in problems] == ["account"]
    assert "generation 1 accounted for 0 to 40" in problems[0].what
    note_before(home.context, (1, archive.pipeline()), built.pipeline(generation), 0, "--force")
    found = verified(home, built, generation=generation)
    assert found.problems == []
    assert "let-go" in {each.kind for each in found.notes}


def test_status_check_and_metrics_show_the_account(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    erase_from_archives(home.context, home.topic("t"), {0: [1, 50]})
    status = read_status(home.context, archive)
    assert of(status).account == account(home, archive)
    text = status_text([status])
    assert 'tidelog_archive_offsets_erased{archive="daily",partition="t/0"} 2' in text
    assert 'tidelog_archive_offsets_unaccounted{archive="daily",partition="t/0"} 0' in text
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    head = read_progress(home.context, archive.pipeline(), "t/0")
    assert head is not None
    totals = msgspec.structs.replace(head.totals, absent=3)
    change = Put("head", encode_row(msgspec.structs.replace(head, totals=totals)))
    home.catalog.write(where, change, write_id=home.context.ids.new())
    said = "\n".join(troubles(read_status(home.context, archive), Limits(max_dead=100)))
    assert "does not add up: 100 offsets" in said


def test_commands_show_begins_gaps_and_that_all_adds_up(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    command = run_here(monkeypatch, capfdbinary, tmp_path)

    def run(*words: str) -> str:
        done = command("--home", home.config, *words)
        assert done.code == 0, done.err
        return done.out.decode()

    archive = an_archive(home)
    drive(home, archive)
    fill(home, range(100, 150))
    home.trim("t", ToOffsets({0: 130}), past_readers=True)
    drive(home, archive, accept_loss=True)
    (line, _) = run("archive", "status", "daily", "--json").splitlines()
    found = json.loads(line)["account"]
    gap = {"start": "100", "end": "130", "reason": "retention", "offsets": 30}
    assert found["gaps"] == [gap]
    assert found["adds_up"]
    assert (found["begin"], found["begin_reason"], found["never_there"]) == ("0", "earliest", 0)
    again = json.loads(run("archive", "verify", "daily", "--json"))["accounts"]
    assert again[0] == {"partition": "t/0", **found}
    for name in ("status", "verify"):
        text = run("archive", name, "daily")
        assert "gap from 100 to 130, 30 offsets: retention" in text
        assert "adds up" in text
        assert "NO" not in text


def of(status: ArchiveStatus) -> PartitionStatus:
    return next(each for each in status.partitions if each.partition == "t/0")


def verified(home: Home, archive: Archive, **how: Any) -> ArchiveVerifyReport:
    return verify_archive(home.context, archive, ArchiveVerifyOptions(**how))


def replace_manifest(home: Home, archive: Archive, manifest: Manifest) -> None:
    """Let the one commit of a partition have another manifest."""
    (row,) = read_commit_rows(home.context, archive.pipeline(), "t/0")
    home.store.delete([row.committed.manifest])
    home.store.put(row.committed.manifest, seal_json(manifest))


def test_create_that_dies_after_any_call_lists_what_is_there(home: Home) -> None:
    real, died = home.context, True
    for call in range(1, 60):
        if not died:
            break
        name = f"a{call}"
        wanted = msgspec.structs.replace(
            an_archive_of(name), incarnation=real.ids.new(), store=home.store.url
        )
        faults = Faults(crash_after_call=call)
        home.context = replace(real, catalog=FaultyCatalog(real.catalog, faults, real.clock))
        died = False
        try:
            create_archive(home.context, wanted)
        except Crash:
            died = True
        home.context = real
        if died:
            fill(home, range(10))
            with contextlib.suppress(AlreadyExistsError):
                create_archive(home.context, wanted)
        archive = home.archives.get(name).info
        seen = read_listed(home.context, archive.pipeline())
        assert set(seen) == {"t/0", "t/1"}
        assert all(each.end for each in seen.values())
        fill(home, range(7))
        head = read_head(home.context, home.topic("t"), 0)[0]
        assert drive(home, archive, start="latest") == head.next - int(seen["t/0"].end) >= 7
    assert not died, "the last of those calls is beyond the end"


def test_erasure_that_dies_after_any_call_counts_each_event_once(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    real, topic = home.context, home.topic("t")
    for call in range(1, 60):
        faults = Faults(crash_after_call=call)
        store = FaultyStore(real.store, faults)
        home.context = replace(
            real, store=store, catalog=FaultyCatalog(real.catalog, faults, real.clock)
        )
        died = False
        try:
            erase_from_archives(home.context, topic, {0: [call]})
        except Crash:
            died = True
        home.context = real
        erase_from_archives(home.context, topic, {0: [call]})
        found = account(home, archive)
        assert found.erased == call, "another event each time, of which some are dead letters"
        if not died:
            break
    assert not died, "the last of those calls is beyond the end"
    (found, *_) = verified(home, archive, deep=True).accounts
    assert found == account(home, archive)


def an_archive_of(name: str) -> Archive:
    return Archive(
        name=name,
        incarnation="",
        source="topic:t",
        kind="backup",
        store="",
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat()},
    )


def test_topic_made_again_between_look_and_plan_is_not_mixed_in(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    fill(home, range(100, 150))
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
    reader = pipeline.source.reader

    def remaking(planned: SourceRange) -> RangeReader:
        if home.topic("t").incarnation == planned.incarnation:
            home.delete_topic("t", past_readers=True)
            home.create_topic("t", 2)
            fill(home, range(1_000, 1_300))
        return reader(planned)

    pipeline.source.reader = remaking  # type: ignore[method-assign]
    with pytest.raises(RemadeError, match="create a new archive"):  # it is planned again
        Driver(home.context, pipeline, DriverOptions()).run()
    assert account(home, archive).archived == 100
    status = read_status(home.context, archive)
    assert "was deleted and made again" in of(status).remade
    assert drive(home, archive, accept_loss=True) == 0
    assert drive(home, archive) == 0, "it has ended"
    found = account(home, archive)
    assert (found.archived, found.gaps) == (100, (Gap("100", "150", "remade"),))
    assert found.adds_up
    assert verified(home, archive, deep=True).problems == []
    again = an_archive(home, "again")
    assert drive(home, again) == 300
    home.trim("t", ToOffsets({0: 1}))  # the first archive never reads the new topic
