"""Pages of journals: what waits to be compiled in, who amended what, and erasing with its proof."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidelog import Erasure, ErasureWatch, Event
from tidelog.api.erasure import EraseOptions, ProveOptions
from tidelog.codec.event_json import id_line, ids_of_lines, text_of_line
from tidelog.coordination.audit import WHY_MAX, newest_records
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.proof import Proof
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.journal.lookup import check_id
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.pages import SearchQuery, pending_amendments, search_partition
from tidelog.server.console.format import url
from tidelog.server.console.jobs import Job, JobRunner, Work, check_incarnation
from tidelog.server.console.sampler import Sampler, TopicSample
from tidelog.server.console.session import Answer, Data, Redirect, ShownPage, Visit
from tidelog.server.console.topics import part_of

__all__ = ["ErasureResult", "JournalPages"]

_PENDING_MAX = 100  # amendments on one page, of each partition
_RECORDS_MAX = 50  # of the audit on one page
_IDS_MAX = 1_000  # by one form
_WAIT = "10m"  # for ranges of archives under way
_REWRITTEN = ("journals", "files", "swept")  # figures of a purge
_LOOK_S = 0.2  # in which events of a key are counted
_COUNTED_MAX = 500  # of these events
_SHOWN_MAX = 10  # events on the page that asks


@dataclass(frozen=True, slots=True)
class ErasureForm:
    """Which events to erase, and why."""

    ids: tuple[str, ...]
    key: str
    why: str


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """The result of an erasure, or of another proof of it."""

    asked: ErasureForm
    proof: Proof
    missing: int = 0  # ids that had no event
    again: bool = False  # nothing was deleted this time


class JournalPages:
    """Pages of journals and erasures."""

    def __init__(self, home: Home, sampler: Sampler, jobs: JobRunner) -> None:
        self._home = home
        self._context = home.context
        self._sampler = sampler
        self._jobs = jobs
        jobs.register("erasure", self._purge_only)
        jobs.register("proof", self._purge_only)

    def journals(self, visit: Visit) -> Answer:
        """``GET /console/journals``"""
        snapshot = self._sampler.look()
        wanted = visit.text("q").lower()
        found = [
            each
            for each in snapshot.topics.values()
            if each.heads and wanted in each.topic.name.lower()
        ]
        found.sort(key=lambda each: (-_amended(each), each.topic.name))
        part = part_of(found, visit.number("page", 1, 10**6))
        rows = [
            {
                "topic": each.topic,
                "events": each.events,
                "amendments": _amended(each),
                "waits": any(head.amended is not None for head in each.heads),
                "journaled": sum(max(0, head.journaled - head.start) for head in each.heads),
            }
            for each in part.rows
        ]
        values = {"part": part, "rows": rows, "q": visit.text("q"), "snapshot": snapshot}
        return ShownPage("journals.html", values)

    def journal(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/journals``"""
        topic = self._home.topic(visit.path["topic"])
        waiting = [
            {"partition": partition, "offset": offset, "mark": mark}
            for partition, offset, mark in pending_amendments(self._context, topic, _PENDING_MAX)
        ]
        values = {
            "topic": topic,
            "waiting": waiting,
            "more_wait": len(waiting) >= _PENDING_MAX,
            "records": newest_records(self._context, topic, _RECORDS_MAX),
            "ids": id_line(visit.exact("id")),
            "key": id_line(visit.exact("key")),
        }
        return ShownPage("journal.html", values)

    def erase(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/erase``: first what would be done; ``sure`` does it"""
        topic = self._home.topic(visit.path["topic"])
        asked = _asked(visit)
        if not visit.form.get("sure"):
            values = {"topic": topic, "asked": asked, "again": _again(asked)}
            return ShownPage("erase.html", {**values, **self._told(topic, asked)})
        work = functools.partial(self._erase, topic, asked, visit.session.who or None)
        what = f"erasure from {topic.name}"
        return self._begin("erasure", what, topic, visit, work)

    def prove(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/prove``: searches again for what was erased before"""
        topic = self._home.topic(visit.path["topic"])
        asked = _asked(visit)
        work = functools.partial(self._prove, topic, asked, visit.session.who or None)
        return self._begin("proof", f"proof of an erasure from {topic.name}", topic, visit, work)

    def proof(self, visit: Visit) -> Answer:
        """``GET /console/proofs/{job}``"""
        job = self._jobs.find(visit.path["job"])
        proven = job.result if isinstance(job.result, ErasureResult) else None
        if visit.query.get("download"):
            if proven is None:
                raise NotFoundError(
                    "proof: is not there: wait for its end; after a restart of the server, prove "
                    "it again"
                )
            headers = {"content-disposition": f'attachment; filename="proof-{job.id}.json"'}
            return Data(proven.proof.as_json(), "application/json", headers)
        again = _again(proven.asked) if proven else {"ids": "", "key": ""}
        values = {"job": job, "topic": job.args.get("topic", ""), "proven": proven, "again": again}
        return ShownPage("proof.html", {**values, "figures": job.figures})

    def _begin(self, kind: str, what: str, topic: Topic, visit: Visit, work: Work) -> Answer:
        args = {"topic": topic.name, "incarnation": topic.incarnation}
        who = self._home.reason(who=visit.session.who or None).who
        job = self._jobs.start(kind, what, args, who, work)
        return Redirect(url("/console/proofs", job.id))

    def _erase(self, topic: Topic, asked: ErasureForm, who: str | None, job: Job) -> str:
        """Deletes, removes the bytes from topic and archives, and searches for what is left."""
        job.tell("step 1 of 3: deleting", 0)
        watch = _JobWatch(job, self._bytes_of(topic))
        how = EraseOptions(who=who, incarnation=topic.incarnation, wait=_WAIT, watch=watch)
        key = asked.key.encode() if asked.key else None
        proof = self._home.erase(topic.name, asked.ids, key=key, why=asked.why, **how)
        result = _report(job, asked, proof)
        return f"{int(job.figures['deleted']):,} events deleted, {result}"

    def _prove(self, topic: Topic, asked: ErasureForm, who: str | None, job: Job) -> str:
        keys = [asked.key.encode()] if asked.key else []
        how = ProveOptions(who=who, wait=_WAIT, watch=_JobWatch(job, self._bytes_of(topic)))
        proof = self._home.purge_and_prove(topic.name, asked.ids, keys=keys, why=asked.why, **how)
        return _report(job, asked, proof)

    def _purge_only(self, args: Mapping[str, str], who: str) -> Work:
        """Returns the work that a server can resume, without ids and keys: none are stored."""
        topic = self._home.topic(args["topic"])
        check_incarnation(f"topic `{topic.name}`", args, topic.incarnation)

        def work(job: Job) -> str:
            if job.kind == "erasure" and "deleted" not in job.figures:
                return "the server ended before the delete was complete: erase them again"
            self._home.purge(topic.name, wait=_WAIT, watch=_JobWatch(job))
            return "the bytes of all deleted events are removed; prove it again to see that"

        return work

    def _bytes_of(self, topic: Topic) -> int:
        sample = self._sampler.look().topics.get(topic.name)
        return (sample.bytes if sample else 0) or 0

    def _told(self, topic: Topic, asked: ErasureForm) -> dict[str, Any]:
        """Returns how many events of the topic that would be, as far as a short search shows."""
        if asked.ids:
            count = self._home.plan_erase(topic.name, asked.ids, archives=False).events
            some = asked.ids[:_SHOWN_MAX]
            events = [event for each in some if (event := self._found(topic, each))]
            return {"count": count, "is_whole": True, "events": events}
        key = asked.key.encode()
        first = partition_for(key, topic.partitions)  # producers may have chosen another one
        others = (each for each in range(topic.partitions) if each != first)
        clock, events, is_whole = self._context.clock, list[Event](), True
        until_s = clock.monotonic_s() + _LOOK_S
        for partition in (first, *others):
            most = _COUNTED_MAX - len(events), until_s - clock.monotonic_s()
            is_whole = is_whole and min(most) > 0
            if not is_whole:
                break
            found = search_partition(self._context, topic, partition, None, SearchQuery(key), most)
            events += found.events
            is_whole = found.next is None
        return {"count": len(events), "is_whole": is_whole, "events": events[:_SHOWN_MAX]}

    def _found(self, topic: Topic, event_id: str) -> Any:
        try:
            return self._home.get(topic.name, event_id)
        except NotFoundError:
            return None


class _JobWatch(ErasureWatch):
    """Shows in a job how far an erasure is."""

    def __init__(self, job: Job, total: int = 0) -> None:
        self._job = job
        self._total = total  # bytes of the topic
        self._read = 0
        # A resumed job adds to what the server did before it ended.
        self._before = Counter({name: int(job.figures.get(name, "0")) for name in _REWRITTEN})

    def deleted(self, result: DeleteResult) -> None:
        self._job.figures = {"deleted": str(result.found)}

    def purging(self) -> None:
        self._read = 0
        self._job.tell("step 2 of 3: compiling, rewriting archives, sweeping", 10)

    def purged(self, done: Erasure) -> None:
        super().purged(done)
        total = self.total or done
        counts = total.compiled.journals, total.files, total.objects_deleted
        for name, count in zip(_REWRITTEN, counts, strict=True):
            self._job.figures[name] = str(self._before[name] + count)

    def waiting(self, archive: str) -> None:
        self._job.tell(f"step 2 of 3: waiting for a range of archive {archive} to be committed")

    def searched(self, size: int) -> None:
        self._read += size
        percent = 40 + 60 * self._read / self._total if self._total else None
        self._job.tell("step 3 of 3: searching every object for what is left", percent)

    def is_stopped(self) -> bool:
        return self._job.stop.is_set()


def _asked(visit: Visit) -> ErasureForm:
    """Returns whose events a form names, and why. Raises ``InvalidError``."""
    lines = visit.form.get("ids", "").replace("\r\n", "\n")  # browsers send every line end so
    ids = tuple(dict.fromkeys(ids_of_lines(lines, "ids")))
    asked = ErasureForm(ids, text_of_line(visit.exact("key"), "key:"), visit.text("why"))
    if bool(asked.ids) == bool(asked.key):
        raise InvalidError("erase: has both ids and a key, or neither: give ids or a key")
    if len(ids) > _IDS_MAX:
        raise InvalidError(
            f"erase: {len(ids)} ids at once: give {_IDS_MAX} at most here, or use "
            "`tidelog delete --ids-file`"
        )
    if not 0 < len(asked.why) <= WHY_MAX:
        raise InvalidError(f"erase: say why, in up to {WHY_MAX} characters: the audit keeps it")
    for each in ids:
        check_id(each)
    return asked


def _report(job: Job, asked: ErasureForm, proof: Proof) -> str:
    """Gives a job the result of an erasure, and returns it in words."""
    deleted = proof.deleted
    missing = len(deleted.missing) if deleted else 0
    if deleted:
        job.figures["deleted"] = str(deleted.found)
    job.result = ErasureResult(asked, proof, missing, again=deleted is None)
    job.figures |= {
        "verdict": proof.verdict,
        "objects": str(proof.objects),
        "bytes": str(proof.bytes),
        "traces": str(len(proof.traces)),
        "missing": str(missing),
        "sha256": proof.sha256,
        "searched_ms": str(proof.searched_ms),
    }
    traces = len(proof.traces)
    some = "1 trace is left" if traces == 1 else f"{traces:,} traces are left"
    left = some if traces else "nothing is left"
    if not proof.known:
        left += "; but not all of it was ever deleted here"
    return f"{proof.objects:,} objects searched: {left}"


def _again(asked: ErasureForm) -> dict[str, str]:
    """Returns the fields by which a form names the same events."""
    return {"ids": "\n".join(map(id_line, asked.ids)), "key": id_line(asked.key)}


def _amended(sample: TopicSample) -> int:
    return sum(head.amendments for head in sample.heads)
