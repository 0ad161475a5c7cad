"""Maintenance with tasks that work ahead: the same results, whatever tasks repeat or lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import AT, a_home, an_archive, drive, value
from tests.support.inline_tasks import InlineTasks
from tidelog import Event, Home
from tidelog.archive.archive import committed_files
from tidelog.archive.read import ReadRequest, archived_rows
from tidelog.archive.verify import _VerifyLook, verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.erasure.delete import delete_events
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased
from tidelog.erasure.rewrite import PartitionRewriter, erase_from_archives
from tidelog.erasure.rewrite_range import stage_here
from tidelog.erasure.updates import update_archives
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.lookup import Lookups
from tidelog.journal.scribe import ScribeOptions
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.maintenance.verify import verify_topic
from tidelog.maintenance.erase import purge
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic
from tidelog.testing.scheduler import Crash

WHY = Why("a person", "asked")
MODES = [{}, {"twice": True}, {"lose": True}]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        for first in range(0, 60, 20):
            fill(made, range(first, first + 20))
            fill(made, range(first // 2, first // 2 + 10), partition=1)
        yield made


@pytest.fixture(params=MODES, ids=["plain", "twice", "lossy"])
def tasks(request: pytest.FixtureRequest) -> InlineTasks:
    return InlineTasks(**request.param)


def fill(home: Home, numbers: range, partition: int = 0) -> None:
    events = [Event(value(n), timestamp=n, id=f"{partition}-{n}") for n in numbers]
    home.append("t", events, partition=partition)


def with_tasks(home: Home, tasks: InlineTasks) -> Context:
    return replace(home.context, tasks=tasks)


def search(context: Context, topic: Topic, ids: list[str]) -> Proof:
    """What a search finds, whenever that is."""
    return replace(prove_erased(context, topic, ids), searched_ms=0)


def an_archive_of_ranges(home: Home, **options: Any) -> Archive:
    """An archive with several ranges in each source partition."""
    archive = an_archive(home, **options)
    drive(home, archive)
    fill(home, range(60, 80))
    drive(home, archive)
    return home.archives.get(archive.name).info


def damage(home: Home, archive: Archive) -> None:
    """One file loses its end, and another one is deleted."""
    targets = [file.target for _, file in committed_files(home.context, archive)]
    root = Path(home.store.url.removeprefix("file://"))
    (root / targets[0]).write_bytes((root / targets[0]).read_bytes()[:-9])
    (root / targets[1]).unlink()


def held(home: Home, archive: Archive) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for batch in archived_rows(home.context, archive, ReadRequest()):
        found.update(
            zip(*(batch.column(n).to_pylist() for n in ("partition", "offset")), strict=True)
        )
    return found


@pytest.mark.parametrize("damaged", [False, True])
def test_topic_is_verified_the_same(home: Home, tasks: InlineTasks, damaged: bool) -> None:
    if damaged:
        keys = [info.key for info in home.store.list("") if "/segments/" in info.key]
        path = Path(home.store.url.removeprefix("file://")) / keys[0]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    topic, told = home.topic("t"), [0]
    expected = verify_topic(home.context, topic)
    assert bool(expected.errors) == damaged
    found = verify_topic(
        with_tasks(home, tasks), topic, progress=lambda size: told.append(told.pop() + size)
    )
    assert found == expected
    assert told == [expected.bytes], "each byte was reported once"
    assert tasks.done["_is_healthy"] >= expected.runs - 1


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("damaged", [False, True])
def test_archive_is_verified_the_same(
    home: Home, tasks: InlineTasks, damaged: bool, deep: bool
) -> None:
    archive = an_archive_of_ranges(home, parser=AT)
    if damaged:
        damage(home, archive)
    expected = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=deep))
    assert bool(expected.problem_count) == damaged
    told: list[int] = []
    how = ArchiveVerifyOptions(deep=deep, progress=told.append)
    assert verify_archive(with_tasks(home, tasks), archive, how) == expected
    assert sum(told) == expected.bytes
    assert tasks.done["check_range"] >= 2


@pytest.mark.parametrize("deep", [True, False])
def test_files_that_an_erasure_rewrites_during_a_verify_are_not_damaged(
    home: Home, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    archive, first = an_archive_of_ranges(home, parser=AT), iter([{3}, {5}])
    check_files = _VerifyLook._check_files

    def erase() -> None:
        erase_from_archives(home.context, home.topic("t"), {0: next(first, set())})

    class Slow(InlineTasks):
        def run(self, *args: Any) -> Iterator[tuple[Any, Any]]:
            found = list(super().run(*args))
            erase()  # after the listing
            yield from found

    def check(*args: Any) -> None:
        erase()  # after the rows were read
        check_files(*args)

    monkeypatch.setattr(_VerifyLook, "_check_files", check)
    how = ArchiveVerifyOptions(deep=deep)
    assert verify_archive(with_tasks(home, Slow()), archive, how).problems == []
    assert next(first, None) is None, "both were erased"
    damage(home, archive)
    kinds = sorted(each.kind for each in verify_archive(home.context, archive, how).problems)
    assert kinds == ["missing", "size"]


def test_files_that_tasks_have_read_are_not_read_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive_of_ranges(home)
    context = with_tasks(home, InlineTasks())
    monkeypatch.setattr("tidelog.archive.verify.read_offsets", None)
    assert verify_archive(context, archive, ArchiveVerifyOptions(deep=True)).is_clean
    monkeypatch.setattr("tidelog.log.maintenance.verify_partition.problem_of_object", None)
    assert verify_topic(context, home.topic("t")).is_clean


def test_erasure_and_its_proof_are_the_same(home: Home, tasks: InlineTasks) -> None:
    archive = an_archive_of_ranges(home, parser=AT)
    trimmed = {0: 20, 1: 0}
    home.trim("t", ToOffsets(trimmed), past_readers=True)
    before = held(home, archive)
    context, topic = with_tasks(home, tasks), home.topic("t")
    ids = ["0-3", "0-7", "0-41", "1-5", "0-61"]
    known = {event.id for event in home.read("t", 0, 20)}
    assert "0-41" in known
    assert not search(context, topic, ids).is_erased
    deleted = delete_events(context, home.amender("t", WHY), ids)
    assert (deleted.events, deleted.archived, deleted.missing) == (3, 2, ())
    plain = search(home.context, topic, ids)
    assert search(context, topic, ids) == plain
    assert not plain.is_erased
    done = purge(context, topic, grace_ms=0)
    assert sum(each.events for each in done.archives) == 5
    gone = {(0, 3), (0, 7), (0, 41), (1, 5), (0, 61)} & before.keys()  # 7 is a dead letter
    assert held(home, archive) == before - Counter(gone)
    proof = search(context, topic, ids)
    assert proof == search(home.context, topic, ids)
    assert proof.is_erased
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
    assert not list(home.store.list("staging/"))
    for name in ("_is_clean_file", "_is_clean_object", "holds_here", "stage_here", "replace_here"):
        assert tasks.done[name], name


def test_files_that_tasks_have_rewritten_are_only_committed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive_of_ranges(home)
    before = held(home, archive)
    monkeypatch.setattr("tidelog.erasure.rewrite.replace_file", None)
    context = with_tasks(home, InlineTasks())
    report = erase_from_archives(context, home.topic("t"), {0: {3, 65}, 1: {2}})[0]
    assert (report.events, report.files, report.ranges) == (3, 3, 3)
    assert held(home, archive) == before - Counter({(0, 3): 1, (0, 65): 1, (1, 2): 1})


def test_event_that_others_erase_while_tasks_stage_stays_erased(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, topic = an_archive_of_ranges(home), home.topic("t")
    before = held(home, archive)

    def stop(*_: Any) -> None:
        raise Crash

    class Slow(InlineTasks):
        def run(self, *args: Any) -> Iterator[tuple[Any, Any]]:
            found = list(super().run(*args))
            if args[1] is stage_here:
                erase_from_archives(home.context, topic, {0: {5}})
                with monkeypatch.context() as patch:
                    patch.setattr(
                        PartitionRewriter, "_carry_out", stop
                    )  # another one that has begun
                    with pytest.raises(Crash):
                        erase_from_archives(home.context, topic, {0: {7}})
            yield from found

    erase_from_archives(with_tasks(home, Slow()), topic, {0: {3}})
    erase_from_archives(home.context, topic, {0: {3, 5, 7}})
    assert held(home, archive) == before - Counter([(0, 3), (0, 5), (0, 7)])
    assert not list(home.store.list("staging/"))


def test_archive_without_a_topic_is_erased_the_same(home: Home, tasks: InlineTasks) -> None:
    archive = an_archive_of_ranges(home)
    home.delete_topic("t")
    before = held(home, archive)
    found = erase_archived(with_tasks(home, tasks), archive, WHY, ["0-3", "1-9", "never"])
    assert (found.events, found.ids) == (2, {"0-3", "1-9"})
    assert held(home, archive) == before - Counter({(0, 3): 1, (1, 9): 1})


def test_archived_values_are_updated_the_same(home: Home, tasks: InlineTasks) -> None:
    archive = an_archive_of_ranges(home)
    home.update("t", "0-3", b"corrected")
    lookup = Lookups(home.context).of(home.topic("t"))
    done = update_archives(with_tasks(home, tasks), lookup, ["0-3"])
    assert [each.events for each in done] == [1]
    assert tasks.done["stage_here"] == 1
    rows = archived_rows(home.context, archive, ReadRequest())
    values = [value for batch in rows for value in batch.column("value").to_pylist()]
    assert values.count(b"corrected") == 1
    assert len(values) == 110


def test_scribe_compiles_and_erases_by_tasks(home: Home, tasks: InlineTasks) -> None:
    archive = an_archive_of_ranges(home)
    home.delete("t", ["0-3", "1-2"])
    how = ScribeOptions(policy=CompilePolicy.everything(), grace_ms=0, sweep_every_ms=0)
    turn = home.scribe(how, tasks=tasks).once()
    assert turn is not None
    assert turn.succeeded
    assert (turn.compiled.partitions, turn.compiled.events, turn.erased) == (2, 108, 2)
    assert tasks.done["_make"] == 2
    assert sum(held(home, archive).values()) == 108
    assert home.verify("t").errors == 0
    assert home.compile_bytes(["t"]) == 0


def test_events_that_tasks_cannot_see_are_found_all_the_same(
    home: Home, tasks: InlineTasks
) -> None:
    """Files without ids: no task can call them clean, and the proof names each."""
    an_archive_of_ranges(home, format_settings={"schema": "n BIGINT"})
    home.append("t", [Event(b"{}", id="x")])
    home.delete("t", ["x"])
    topic = home.topic("t")
    expected = search(home.context, topic, ["x"])
    assert search(with_tasks(home, tasks), topic, ["x"]) == expected
