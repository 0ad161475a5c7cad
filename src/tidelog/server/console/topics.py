"""Pages of topics: the overview, the list, one topic with its timeline, and a playback from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.times import moment_ms
from tidelog.model.topic import check_topic_name
from tidelog.server.console.attention import notices
from tidelog.server.console.charts import line_chart
from tidelog.server.console.jobs import Jobs
from tidelog.server.console.pipelines import Pipelines
from tidelog.server.console.playing import play_to_topic
from tidelog.server.console.sampler import Sampler
from tidelog.server.console.samples import Snapshot, TopicSample
from tidelog.server.console.showing import url
from tidelog.server.console.timeline import Timelines
from tidelog.server.console.visit import Answer, Data, Moved, Shown, Visit
from tidelog.server.metrics import Metrics

__all__ = ["Part", "TopicPages", "part_of"]

_A_PAGE = 50
_PARTITIONS_A_PAGE = 100
_BUSIEST = 8  # topics on the overview
_ORDERS = ("name", "events", "rate", "bytes", "lag")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """One page of a list, and where the others are."""

    rows: Sequence[Any]
    number: int  # from 1 on
    pages: int
    total: int


def part_of(rows: Sequence[T], number: int, size: int = _A_PAGE) -> Part:
    """The page of a list; the last one where there are not so many."""
    pages = max(1, -(-len(rows) // size))
    number = min(max(1, number), pages)
    return Part(rows[(number - 1) * size : number * size], number, pages, len(rows))


class TopicPages:
    """What is shown of topics."""

    def __init__(
        self, home: Home, sampler: Sampler, pipelines: Pipelines, jobs: Jobs, metrics: Metrics
    ) -> None:
        self._home = home
        self._sampler = sampler
        self._pipelines = pipelines
        self._jobs = jobs
        self._metrics = metrics
        self._timelines = Timelines(home.log)

    def overview(self, visit: Visit) -> Answer:
        """``GET /``"""
        snapshot, pipelines = self._sampler.look(), self._pipelines.look()
        with self._sampler.lock:
            rates_in, rates_out = snapshot.ends.rates(), snapshot.cursors.rates()
            charts = {"in": line_chart(rates_in, 320, 56), "out": line_chart(rates_out, 320, 56)}
            speeds = {"in": snapshot.ends.rate(), "out": snapshot.cursors.rate()}
            ready = [each for each in snapshot.topics.values() if each.heads]
            busiest = sorted(ready, key=lambda each: (-(each.rate or 0), -(each.events or 0)))
            shown = [self._row(each) for each in busiest[:_BUSIEST]]
        values = {
            "snapshot": snapshot,
            "pipelines": pipelines,
            "charts": charts,
            "speeds": speeds,
            "busiest": shown,
            "lag": max((each.lag for each in snapshot.consumers), default=None),
            "notices": notices(snapshot, pipelines, self._sampler.trouble, visit.now_ms),
            "tails": self._metrics.waiting,
            "jobs": [job for job in self._jobs.all() if job.state == "running"],
        }
        return Shown("overview.html", values)

    def topics(self, visit: Visit) -> Answer:
        """``GET /console/topics``"""
        snapshot = self._sampler.look()
        wanted, order = visit.text("q").lower(), visit.text("order", "name")
        if order not in _ORDERS:
            raise InvalidError(f"order `{order[:40]}`: give one of {', '.join(_ORDERS)}")
        found = [each for each in snapshot.topics.values() if wanted in each.topic.name.lower()]
        if order != "name":
            found.sort(key=lambda each: -(getattr(each, order) or 0))
        part = part_of(found, visit.number("page", 1, 10**6))
        with self._sampler.lock:
            rows = [self._row(each) for each in part.rows]
        values = {"part": part, "rows": rows, "q": visit.text("q"), "order": order}
        return Shown("topics.html", {**values, "snapshot": snapshot})

    def topic(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}``"""
        topic = self._home.topic(visit.path["topic"])
        snapshot = self._sampler.look()
        sample = snapshot.topics.get(topic.name)
        if sample is None or sample.topic.incarnation != topic.incarnation:
            sample = TopicSample(topic, (), snapshot.ends)
        states = self._states(sample)
        with self._sampler.lock:
            chart = line_chart(sample.ends.rates()) if sample.heads else None
            consumers = [
                {"consumer": each, "chart": line_chart(each.lags, 120, 28)}
                for each in sample.consumers
            ]
        values = {
            "topic": topic,
            "sample": sample,
            "snapshot": snapshot,
            "part": part_of(states, visit.number("page", 1, 10**6), _PARTITIONS_A_PAGE),
            "chart": chart,
            "consumers": consumers,
            "targets": self._targets(snapshot, topic.name),
            "start": visit.text("start"),
            "end": visit.text("end"),
        }
        return Shown("topic.html", values)

    def timeline(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/timeline``, for the script"""
        topic = self._home.topic(visit.path["topic"])
        start, end = (self._moment(visit, name) for name in ("start", "end"))
        found = self._timelines.histogram(topic, start, end)
        shown = {
            "start": found.start_ms,
            "end": found.end_ms,
            "width": found.width_ms,
            "counts": found.counts,
            "first": found.first_ms,
            "last": found.last_ms,
            "exact": found.is_exact,
            "whole": found.is_whole,
            "now": visit.now_ms,
        }
        return Data(msgspec.json.encode(shown))

    def play(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/playback``"""
        topic = self._home.topic(visit.path["topic"])
        target = visit.text("target")
        check_topic_name(target)
        if target == topic.name:
            raise InvalidError(f"playback: `{target}` would be played into itself: choose another")
        self._home.topic(target)
        start, end = visit.text("start"), visit.text("end")
        for text in (start, end):
            if text:
                moment_ms(text, visit.now_ms)
        speed = visit.text("speed", "max")
        work = play_to_topic(self._home, topic.name, target, (start, end), speed)
        what = f"playback of {topic.name} to {target}, {start or 'beginning'} to {end or 'now'}"
        self._jobs.start(what, url("/console/topics", topic.name), work)
        return Moved("/console/jobs")

    def _row(self, sample: TopicSample) -> dict[str, Any]:
        """A topic in a list; its chart is made of series, so hold the lock."""
        chart = line_chart(sample.ends.rates(), 120, 28) if sample.heads else None
        return {"sample": sample, "topic": sample.topic, "chart": chart}

    def _states(self, sample: TopicSample) -> list[dict[str, Any]]:
        """What is known of each partition."""
        totals = self._sampler.totals(sample.topic)
        return [
            {"partition": number, "head": head, "totals": totals.get(number)}
            for number, head in enumerate(sample.heads)
        ]

    def _targets(self, snapshot: Snapshot, own: str) -> list[str]:
        """Topics that a playback may go to; a person types others."""
        ready = (each.topic.name for each in snapshot.topics.values() if each.heads)
        return [name for name in ready if name != own][:200]

    def _moment(self, visit: Visit, name: str) -> int | None:
        text = visit.text(name)
        if not text:
            return None
        return int(text) if text.isdigit() and len(text) < 16 else moment_ms(text, visit.now_ms)
