"""The calls that erase take ids and keys in the same way."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from tidelog import CompileReport, Erasure, ErasureWatch, Event, Home, SweepReport
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.rewrite import ArchiveErasure
from tidelog.errors import AlreadyExistsError, InvalidError, NotFoundError
from tidelog.maintenance.erase import TopicEvents, erase_and_prove
from tidelog.maintenance.pipeline_sweep import PipelineSweep


@pytest.fixture
def topic(tidelog_home: Home) -> Home:
    home = tidelog_home
    home.create_topic("t")
    home.append("t", [Event(b"%d" % n, id=f"e{n}", key=b"k%d" % n) for n in range(9)])
    return home


def test_ids_are_the_second_argument_of_all_calls(topic: Home) -> None:
    assert topic.plan_erase("t", ["e0", "e1"]).events == 2
    assert topic.delete("t", ["e0"]).events == 1
    deleted = topic.delete("t", "e1")
    assert topic.purge_and_prove("t", ["e1"], deleted=deleted).is_clean
    assert topic.erase("t", ["e2", "e3"]).verdict == "erased"
    assert topic.prove_erased("t", ["e0", "e1", "e2", "e3"]).is_clean


def test_watch_gets_what_was_deleted_before_bytes_are_removed(topic: Home) -> None:
    heard: list[str] = []

    class Watch(ErasureWatch):
        def deleted(self, result: DeleteResult) -> None:
            heard.append(f"deleted {result.events}")

        def purging(self) -> None:
            heard.append("purging")

    assert topic.erase("t", key=b"k5", watch=Watch()).is_clean
    assert heard == ["deleted 1", "purging"]


def test_watch_sums_what_several_removals_did() -> None:
    def removal(number: int, *archives: ArchiveErasure) -> Erasure:
        swept = SweepReport(topics=number, objects_deleted=number, bytes_deleted=10 * number)
        compiled = CompileReport(journals=number)
        return Erasure(compiled, list(archives), swept, PipelineSweep(objects_deleted=100))

    first = removal(1, ArchiveErasure("a", 1, files=2, waiting=1), ArchiveErasure("b", 1, files=4))
    watch = ErasureWatch()
    watch.purged(first)
    watch.purged(removal(2, ArchiveErasure("b", 1, files=8, waiting=3)))
    total = watch.total
    assert total is not None
    assert (total.compiled.journals, total.files, total.objects_deleted) == (3, 14, 203)
    assert total.waiting == 3, "what was under way before has ended, or is there again"
    assert (total.swept.topics, total.swept.bytes_deleted) == (2, 30)
    assert (first.files, first.waiting) == (6, 1), "what a watch was given stays"


def test_delete_takes_a_key(topic: Home) -> None:
    assert topic.delete("t", key=b"k5").events == 1
    for given in ({}, {"ids": ["e1"], "key": b"k1"}):
        with pytest.raises(InvalidError, match="give ids or a key"):
            topic.delete("t", **given)  # type: ignore[arg-type]
    assert topic.delete("t", []).events == 0
    with pytest.raises(NotFoundError, match="nor have its archives: nothing was deleted"):
        topic.delete("t", "")  # an id as a dead letter of an archive may have it
    assert len(list(topic.read("t"))) == 8


@pytest.mark.parametrize("given", [((), (b"k1", b"k2")), (("e3",), (b"k1",)), ((), ())])
def test_erasure_takes_ids_or_one_key(
    topic: Home, given: tuple[tuple[str, ...], tuple[bytes, ...]]
) -> None:
    open_amender, events = partial(topic.amender, "t", topic.reason()), TopicEvents(*given)
    with pytest.raises(InvalidError, match="give ids or one key"):
        erase_and_prove(topic.context, open_amender, events, 0, ErasureWatch(), lambda _: None)
    assert len(list(topic.read("t"))) == 9


def test_delete_takes_the_options_of_an_erasure_that_it_needs(topic: Home) -> None:
    for shown in ({"ids": ["e1"]}, {"key": b"k1"}):
        with pytest.raises(NotFoundError, match="made again"):
            topic.delete("t", incarnation="another", **shown)  # type: ignore[arg-type]
    seen: list[int] = []
    own = topic.topic("t").incarnation
    assert topic.delete("t", key=b"k1", incarnation=own, progress=seen.append).events == 1
    assert sum(seen) > 0
    with pytest.raises(InvalidError, match="unknown option `wait`"):
        topic.delete("t", ["e2"], wait="1s")  # type: ignore[call-arg]
    with pytest.raises(InvalidError, match="unknown option `prove`"):
        topic.erase("t", ["e2"], prove=False)  # type: ignore[call-arg]


def test_unknown_option_of_a_trim_names_what_there_is(topic: Home) -> None:
    with pytest.raises(InvalidError, match=r"`before` \(a time\), `to` \(tidelog.ToOffsets"):
        topic.trim("t", offsets={0: 5})  # type: ignore[call-arg]


def test_time_of_an_event_may_be_text(topic: Home) -> None:
    text, zone = "2026-11-18T10:53:03+00:00", datetime(2026, 11, 18, 10, 53, 3, tzinfo=UTC)
    topic.append("t", [Event(b"a", id="a", timestamp=text)])
    with topic.producer("t") as producer:
        producer.send(b"b", id="b", timestamp=text)
        producer.send_json({"c": 1}, id="c", timestamp="2026-11-18T11:53:03+01:00")
    assert [topic.get("t", each).time for each in "abc"] == [zone] * 3
    assert Event(b"", timestamp=text).time == zone
    with pytest.raises(InvalidError, match="is not ISO 8601"):
        topic.append("t", [Event(b"", timestamp="yesterday")])


def test_proof_replaces_no_file(topic: Home, tmp_path: Path) -> None:
    proof = topic.erase("t", ["e1"])
    proof.save(tmp_path / "proof.json")
    with pytest.raises(AlreadyExistsError, match="exists already"):
        proof.save(tmp_path / "proof.json")
