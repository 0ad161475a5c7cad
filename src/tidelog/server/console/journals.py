"""Pages of journals: what waits to be compiled in, who amended what, and erasing with its proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tidelog.api.upkeep import EraseOptions
from tidelog.codec.event_json import id_line, ids_of_lines, text_of_line
from tidelog.erasure.proof import Proof
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.journal.audit import WHY_MAX, newest_records
from tidelog.journal.lookup import check_id
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.search import SearchQuery, pending_amendments, search_partition
from tidelog.server.console.archives import Job, Jobs
from tidelog.server.console.format import url
from tidelog.server.console.sampler import Sampler, TopicSample
from tidelog.server.console.session import Answer, Data, Redirect, Shown, Visit
from tidelog.server.console.topics import part_of

__all__ = ["JournalPages", "Proven"]

_PENDING_MAX = 100  # amendments on one page, of each partition
_RECORDS_MAX = 50  # of the audit on one page
_IDS_MAX = 1_000  # by one form
_LOOK_S = 0.2  # in which events of a key are counted


@dataclass(frozen=True, slots=True)
class ErasureForm:
    """Whose events are to be erased, and why."""

    ids: tuple[str, ...]
    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Proven:
    """What an erasure has come to."""

    asked: ErasureForm
    topic: str
    deleted: int
    missing: tuple[str, ...]
    journals: int
    files: int
    swept: int
    proof: Proof
    at_ms: int


class JournalPages:
    """What is shown of journals, and the way to erase."""

    def __init__(self, home: Home, sampler: Sampler, jobs: Jobs) -> None:
        self._home = home
        self._context = home.context
        self._sampler = sampler
        self._jobs = jobs

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
        return Shown("journals.html", values)

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
        return Shown("journal.html", values)

    def erase(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/erase``: first what would be done; ``sure`` does it"""
        topic = self._home.topic(visit.path["topic"])
        lines = visit.form.get("ids", "").replace("\r\n", "\n")  # browsers send every line end so
        ids = tuple(dict.fromkeys(ids_of_lines(lines, "ids")))
        asked = ErasureForm(ids, text_of_line(visit.exact("key"), "key:"), visit.text("why"))
        if bool(asked.ids) == bool(asked.key):
            raise InvalidError("erase: give ids, or a key: one of both")
        if len(ids) > _IDS_MAX:
            raise InvalidError(
                f"erase: {len(ids)} ids at once: give {_IDS_MAX} at most here, or use "
                "`tidelog delete --ids-file`"
            )
        if not 0 < len(asked.why) <= WHY_MAX:
            raise InvalidError(f"erase: say why, in up to {WHY_MAX} characters: the audit keeps it")
        for each in ids:
            check_id(each)
        if not visit.form.get("sure"):
            again = {"ids": "\n".join(map(id_line, ids)), "key": id_line(asked.key)}
            values = {"topic": topic, "asked": asked, "again": again}
            return Shown("erase.html", {**values, **self._told(topic, asked)})
        name = visit.session.who or None  # by the id, as several tokens may have one label
        job = self._jobs.start(
            f"erasure from {topic.name}: {asked.why}"[:200],
            url("/console/topics", topic.name, "journals"),
            self._work(topic, asked, name),
        )
        return Redirect(url("/console/proofs", job.id))

    def proof(self, visit: Visit) -> Answer:
        """``GET /console/proofs/{job}``"""
        job = self._jobs.find(visit.path["job"])
        if visit.query.get("download"):
            if not isinstance(job.result, Proven):
                raise NotFoundError("proof: is not there yet: wait for its end")
            headers = {"content-disposition": f'attachment; filename="proof-{job.id}.json"'}
            return Data(msgspec.json.encode(job.result), "application/json", headers)
        return Shown("proof.html", {"job": job, "proven": job.result})

    def _work(self, topic: Topic, asked: ErasureForm, who: str | None) -> Callable[[Job], str]:
        """Delete, let the bytes go from topic and archives, and search for what is left."""

        def work(job: Job) -> str:
            home, why = self._home, asked.why
            job.says = "deleting"
            keys = [asked.key.encode()] if asked.key else []
            how = EraseOptions(who=who, incarnation=topic.incarnation)
            amended = (
                home.erase(topic.name, key=keys[0], why=why, prove=False, **how)
                if keys
                else home.erase(topic.name, ids=asked.ids, why=why, prove=False, **how)
            )
            job.says = "compiling, rewriting archives, sweeping"
            done = home.purge(topic.name)
            job.says = "searching every object for what is left"
            proof = home.prove_erased(topic.name, ids=asked.ids, keys=keys)
            job.result = Proven(
                asked=asked,
                topic=topic.name,
                deleted=amended.events + amended.archived,
                missing=amended.missing,
                journals=done.compiled.journals,
                files=sum(each.files for each in done.archives),
                swept=done.swept.objects_deleted + done.staging.objects_deleted,
                proof=proof,
                at_ms=self._context.clock.now_ms(),
            )
            left = "nothing is left" if proof.is_erased else f"{len(proof.traces)} traces are left"
            if not proof.known:
                left += "; but not all of it was ever deleted here"
            deleted = amended.events + amended.archived
            return f"{deleted:,} events deleted, {proof.objects:,} objects searched: {left}"

        return work

    def _told(self, topic: Topic, asked: ErasureForm) -> dict[str, Any]:
        """How many events that would be, as far as a short look can tell."""
        if asked.ids:
            events = [event for each in asked.ids if (event := self._found(topic, each))]
            return {"count": len(events), "is_whole": True, "events": events[:10]}
        key = asked.key.encode()
        partition = partition_for(key, topic.partitions)
        most = (500, _LOOK_S)
        found = search_partition(self._context, topic, partition, None, SearchQuery(key), most)
        whole = found.next is None and topic.partitions == 1
        return {"count": len(found.events), "is_whole": whole, "events": found.events[:10]}

    def _found(self, topic: Topic, event_id: str) -> Any:
        try:
            return self._home.get(topic.name, event_id)
        except NotFoundError:
            return None


def _amended(sample: TopicSample) -> int:
    return sum(head.amendments for head in sample.heads)
