"""Jobs of the console: progress, cancelling, and what outlives a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.console.test_pages import eventually
from tests.support.serving import Served, serving
from tests.support.visits import Browser, text_of
from tests.support.waiting import until
from tidelog import Event, Home, InvalidError, Proof, TidelogError, Trace
from tidelog.context import Context
from tidelog.coordination.jobs import JOBS_KEPT_MAX, JobRecord, change_jobs, read_jobs
from tidelog.erasure.proof_search import prove_erased
from tidelog.erasure.rewrite import ArchiveErasure
from tidelog.home import World, create_home
from tidelog.maintenance import erase as whole_erasure
from tidelog.server.console import jobs as module
from tidelog.server.console.actions import ActionPages
from tidelog.server.console.archives import Pipelines
from tidelog.server.console.jobs import Job, JobRunner, Work
from tidelog.server.console.topics import play_to_topic
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    given = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(given, world=World(environ={}))[0] as found:
        yield found


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUSY_S", 0.05)
    monkeypatch.setattr(module, "_IDLE_S", 0.05)


def runner(
    context: Context, work: Work, report: Callable[[TidelogError], object] = print
) -> JobRunner:
    found = JobRunner(context, report)

    def resume(args: Mapping[str, str], who: str) -> Work:
        assert args == {"topic": "t"}
        return work

    found.register("slow", resume)
    found.open()
    return found


def until_stopped(job: Job) -> str:
    job.tell("half of it", 50)
    job.stop.wait(60)
    return "interrupted"


def the_job(home: Home, fits: Callable[[JobRecord], bool]) -> JobRecord:
    """The only job, once it is as it should be."""
    until(lambda: bool(read_jobs(home.context)) and fits(read_jobs(home.context)[0]))
    (found,) = read_jobs(home.context)
    return found


def test_the_next_server_goes_on_with_jobs_of_one_that_stopped(home: Home) -> None:
    first = runner(home.context, until_stopped)
    started = first.start("slow", "slow work", {"topic": "t"}, "token 1")
    record = the_job(home, lambda job: job.percent == 50)
    assert (record.says, record.who, record.state) == ("half of it", "token 1", "running")
    first.close()
    assert the_job(home, lambda job: not job.owner).state == "running"
    second = runner(home.context, lambda job: f"done by another, from {job.percent} on")
    record = the_job(home, lambda job: job.state == "done")
    assert (record.id, record.percent) == (started.id, 100)
    assert record.says == "done by another, from 50 on"
    assert [job.says for job in second.all()] == [record.says]
    second.close()


class Processes:
    """Knows one process that has ended."""

    def mark(self) -> str:
        return "alive"

    def is_dead(self, mark: str) -> bool:
        return mark == "dead"


def test_jobs_of_a_server_that_died_are_taken_over_and_those_of_others_are_not(home: Home) -> None:
    context = replace(home.context, processes=Processes())
    lost = JobRecord("lost", "slow", "w", {"topic": "t"}, 1, owner="other", mark="dead")
    kept = JobRecord("kept", "slow", "w", {"topic": "t"}, 2, owner="other", mark="alive")
    unknown = JobRecord("new", "unheard-of", "w", {}, 3)
    change_jobs(context, lambda _: (lost, kept, unknown))
    ran: list[str] = []
    found = runner(context, lambda job: ran.append(job.id) or "done")  # type: ignore[func-returns-value]
    until(lambda: read_jobs(context)[0].state == "done")
    assert ran == ["lost"]
    assert read_jobs(context)[1:] == (kept, unknown)
    found.close()


def test_jobs_are_watched_on_after_any_error(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[TidelogError] = []
    found = runner(home.context, until_stopped, reported.append)
    real = module.read_jobs

    def read(context: Context) -> tuple[JobRecord, ...]:
        if len(reported) < 2:
            raise MemoryError
        return real(context)

    monkeypatch.setattr(module, "read_jobs", read)
    until(lambda: len(reported) == 2)
    waits = JobRecord("waits", "slow", "w", {"topic": "t"}, 1)
    change_jobs(home.context, lambda _: (waits,))
    assert the_job(home, lambda job: job.percent == 50).id == "waits"
    found.close()


def test_a_job_without_a_thread_begins_once_there_is_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = runner(home.context, lambda job: "done later")
    real, refused = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal refused
        if thread.name == "tidelog-job" and refused < 3:
            refused += 1
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TidelogError, match="no thread could be started: it begins later"):
        found.start("slow", "slow work", {"topic": "t"})
    assert the_job(home, lambda job: job.state == "done").says == "done later"
    assert refused == 3
    found.close()


def test_a_job_is_stopped_from_another_server(home: Home) -> None:
    found = runner(home.context, until_stopped)
    job = found.start("slow", "slow work", {"topic": "t"})
    with pytest.raises(InvalidError, match="stop it first"):
        home.jobs.forget(job.id)
    home.jobs.stop(job.id)
    assert the_job(home, lambda job: job.state == "stopped").says == "interrupted"
    home.jobs.forget(job.id)
    assert home.jobs.list() == []
    found.close()


def test_a_job_that_another_server_has_taken_ends_here_and_writes_nothing(home: Home) -> None:
    found = runner(home.context, until_stopped)
    job = found.start("slow", "slow work", {"topic": "t"})
    the_job(home, lambda job: job.percent == 50)
    taken = JobRecord(job.id, "slow", "taken", {"topic": "t"}, 1, owner="another", percent=70)
    change_jobs(home.context, lambda _: (taken,))
    assert job.thread is not None
    job.thread.join(60)
    assert not job.thread.is_alive()
    assert read_jobs(home.context) == (taken,)
    found.close()


def test_what_failed_is_shown_and_not_stored(home: Home) -> None:
    def fails(job: Job) -> str:
        raise InvalidError("value `somebody's words`: is wrong: fix it")

    found = runner(home.context, fails)
    job = found.start("slow", "slow work", {"topic": "t"})
    record = the_job(home, lambda job: job.state == "failed")
    assert "somebody's words" in found.find(job.id).says
    assert "somebody" not in repr(record)
    found.close()


def test_jobs_that_ended_long_ago_make_room(home: Home) -> None:
    many = [JobRecord(str(n), "slow", "w", {}, n, "done") for n in range(JOBS_KEPT_MAX + 9)]
    running = JobRecord("r", "slow", "w", {}, 0)
    kept = change_jobs(home.context, lambda _: (running, *many))
    assert [job.id for job in kept] == ["r", *(str(n) for n in range(10, JOBS_KEPT_MAX + 9))]


def test_a_playback_goes_on_after_a_restart_and_plays_each_event_once(home: Home) -> None:
    home.create_topic("orders")
    home.create_topic("copy")
    home.append("orders", [Event(b"%d" % n, timestamp=1_000 * n) for n in range(1, 41)])
    args = {"topic": "orders", "target": "copy", "start": "", "end": "", "speed": "max"}
    args |= {"name": "console-1"}

    class Interrupted(Job):
        def tell(self, says: str, percent: float | None = None) -> None:
            super().tell(says, percent)
            self.stop.set()

    first = Interrupted("1", "playback", "w", args, 0)
    play_to_topic(home, first, args, "")
    second = Job("1", "playback", "w", args, 0)
    said = play_to_topic(home, second, args, "")
    assert said == "40 events played"
    assert [event.value for event in home.read("copy")] == [b"%d" % n for n in range(1, 41)]
    assert second.after is not None
    second.after()
    assert home.playbacks.list() == []


def test_the_page_shows_percentages_and_clears_what_ended(tmp_path: Path) -> None:
    def first(home: Home) -> None:
        done = JobRecord("a", "replay", "replay of x", {"archive": "x"}, 1_000, "done", "2 tried")
        half = JobRecord("b", "elsewhere", "work elsewhere", {"topic": "t"}, 2_000, percent=42)
        change_jobs(home.context, lambda _: (done, half))

    with serving(tmp_path, first=first) as served, Browser(served) as browser:
        page = browser.get("/console/jobs")
        assert "work elsewhere running 42 %" in text_of(page)
        assert '<progress max="100" value="42"' in page
        assert browser.send(page, "/console/jobs/forget").status_code == 303
        page = browser.get("/console/jobs")
        assert "replay of x" not in page
        assert browser.send(page, "/console/jobs/stop").status_code == 303
        assert served.home.jobs.list()[0].stop


def test_an_erasure_waits_for_a_range_under_way_and_is_proved_again_after_a_restart(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.maintenance.erase._LOOK_AGAIN_S", 0.05)
    home = served.home
    home.append("t", [Event(b"words", id="a", key=b"ann"), Event(b"other", id="b")])
    looks: list[str] = []
    once = whole_erasure._remove_bytes

    def slow(*given: Any) -> object:
        done = once(*given)
        looks.append("look")
        if len(looks) == 1:  # as if a driver had planned a range before the delete
            return replace(done, archives=[ArchiveErasure("daily", 1, waiting=1)])
        return done

    monkeypatch.setattr("tidelog.maintenance.erase._remove_bytes", slow)
    page = browser.get("/console/topics/t/journals")
    asked = browser.send(page, "/console/topics/t/erase", key="ann", why="request 7")
    begun = browser.send(asked.text, "/console/topics/t/erase").headers["location"]
    page = eventually(lambda: browser.get(begun), "Erased: nothing is left")
    assert len(looks) == 2
    assert "Events deleted 1" in text_of(page)
    again = browser.send(page, "/console/topics/t/prove").headers["location"]
    assert again != begun
    eventually(lambda: browser.get(again), "Erased: nothing is left")
    verdicts = [each.proof.verdict for each in home.audit("t") if each.proof]
    assert verdicts == ["erased", "erased"]
    assert "ann" not in repr(read_jobs(home.context)), "jobs keep no keys of what is erased"


@pytest.mark.parametrize(
    ("figures", "said"),
    [({}, "erase them again"), ({"deleted": "1"}, "the bytes of all deleted events are removed")],
)
def test_an_erasure_whose_server_died_is_finished_without_its_ids(
    tmp_path: Path, figures: dict[str, str], said: str
) -> None:
    def first(home: Home) -> None:
        home.append("t", [Event(b"words", id="a")])
        home.delete("t", "a")
        args = {"topic": "t", "incarnation": home.topic("t").incarnation}
        lost = JobRecord("e", "erasure", "erasure from t", args, 1, result=figures)
        change_jobs(home.context, lambda _: (lost,))

    with serving(tmp_path, first=first) as served, Browser(served) as browser:
        page = eventually(lambda: browser.get("/console/proofs/e"), said)
        assert "Not proven yet" in text_of(page)
        fields = {"ids": "a", "why": "again"}
        again = browser.send(page, "/console/topics/t/prove", **fields).headers["location"]
        eventually(lambda: browser.get(again), "Erased: nothing is left")
        file = served.home.context.store.url.removeprefix("file://")
        assert not any(b"words" in each.read_bytes() for each in Path(file).rglob("*.arrow"))


def test_a_proof_beside_appends_under_way_looks_again(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.maintenance.erase._LOOK_AGAIN_S", 0.05)
    home = served.home
    home.append("t", [Event(b"words", id="a")])
    found: list[str] = []

    def trace(*given: Any) -> Proof:
        proof = prove_erased(*given)
        if not found:  # the segment of an append that is not committed yet
            proof.traces.append(Trace("topics/x", "no row names it", "sweep"))
        found.append(proof.verdict)
        return proof

    monkeypatch.setattr("tidelog.maintenance.erase.prove_erased", trace)
    page = browser.get("/console/topics/t/journals")
    asked = browser.send(page, "/console/topics/t/erase", ids="a", why="request 8")
    begun = browser.send(asked.text, "/console/topics/t/erase").headers["location"]
    eventually(lambda: browser.get(begun), "Erased: nothing is left")
    assert found == ["not erased", "erased"]
    assert [each.proof.verdict for each in home.audit("t") if each.proof] == ["erased"]


def left_over(home: Home, kind: str, **args: str) -> JobRecord:
    """A job whose server ended; returns it as the next server leaves it."""
    archive = home.archives.get("daily").info
    given = {"archive": "daily", "incarnation": archive.incarnation, **args}
    record = JobRecord(f"left-{kind}", kind, "w", given, 1)
    change_jobs(home.context, lambda _: (record,))
    runs = JobRunner(home.context, print)
    ActionPages(home, Pipelines(home, lambda _: None), runs)
    runs.open()
    done = the_job(home, lambda job: job.state != "running")
    runs.close()
    return done


NOTHING = {"parser": "", "granularity": "", "format": "", "start": ""}
NO_PART = {"dates": "", "topics": "t", "partitions": "", "parser": ""}


def test_job_that_is_resumed_late_does_no_more_than_a_person_meant(home: Home) -> None:
    home.create_topic("t", 1)
    home.append("t", [Event(b"%d" % n) for n in range(5)])
    archive = home.archives.create("daily", source="topic:t", parser="timestamp")
    archive.run()
    assert left_over(home, "backfill", generation="2", **NOTHING).state == "done"
    assert archive.reload().building == 2
    assert left_over(home, "promote", generation="2").says == "generation 2 is the live one"
    for kind, given in (("backfill", NOTHING), ("redo", NO_PART)):
        done = left_over(home, kind, generation="2", **given)
        assert done.says == "generation 2 was promoted since: nothing is left to do"
        assert archive.reload().building is None
    archive.backfill(codec="gzip")  # by a person, who looks at it before a promote
    assert left_over(home, "promote", generation="2").state == "done"
    assert (archive.reload().generation, archive.reload().building) == (2, 3)
    archive.drop(3)
    assert "generation 3 is not being built" in left_over(home, "promote", generation="3").says
    assert "generation 3 was dropped" in left_over(home, "redo", generation="3", **NO_PART).says
    done = left_over(home, "rollback", generation="1", live="2")
    assert done.says == "generation 1 is the live one"
    assert left_over(home, "rollback", generation="1", live="2").says == done.says
    archive.backfill()
    archive.promote()
    done = left_over(home, "rollback", generation="1", live="2")
    assert (done.state, archive.reload().generation) == ("failed", 4)
