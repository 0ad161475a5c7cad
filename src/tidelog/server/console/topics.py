"""Pages of topics and their consumers.

The overview lists what a person should look at first, the worst first, with the page that helps. A
topic has its timeline, and can be played into another topic of the home, as a job: a page must not
make the server write files, or reach out to other hosts. A consumer shows who reads and how far
behind it is, and its cursor can be moved after a look at what that skips or repeats.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from tidelog.api.consumers import ConsumerHandle
from tidelog.errors import InvalidError, TidelogError
from tidelog.home import Home
from tidelog.log.consumer.seek import CursorMove
from tidelog.log.timeline import Timelines
from tidelog.model.event import to_iso
from tidelog.model.playback import Pin
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic, check_topic_name
from tidelog.playback.play import SlotCount, check_speed
from tidelog.server.api.read import partition_of
from tidelog.server.console.archives import Pipelines, PipelinesSeen
from tidelog.server.console.charts import line_chart
from tidelog.server.console.format import duration, number, url
from tidelog.server.console.jobs import Job, JobRunner, Work
from tidelog.server.console.sampler import ConsumerSample, Sampler, Snapshot, TopicSample
from tidelog.server.console.session import Answer, Data, Redirect, ShownPage, Visit
from tidelog.server.http.errors import shape
from tidelog.server.http.metrics import Metrics

__all__ = [
    "ConsumerPages",
    "ListPage",
    "Notice",
    "TopicPages",
    "notices",
    "part_of",
    "play_to_topic",
]

_A_PAGE = 50
_PARTITIONS_MOVED_MAX = 500  # by one form
_PARTITIONS_A_PAGE = 100
_BUSIEST = 8  # topics on the overview
_ORDERS = ("name", "events", "rate", "bytes", "lag")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a list, and where the others are."""

    rows: Sequence[Any]
    number: int  # from 1 on
    pages: int
    total: int


def part_of(rows: Sequence[T], number: int, size: int = _A_PAGE) -> ListPage:
    """Returns a page of a list; the last one if there are fewer."""
    pages = max(1, -(-len(rows) // size))
    number = min(max(1, number), pages)
    return ListPage(rows[(number - 1) * size : number * size], number, pages, len(rows))


class TopicPages:
    """Pages of topics."""

    def __init__(
        self, home: Home, sampler: Sampler, pipelines: Pipelines, jobs: JobRunner, metrics: Metrics
    ) -> None:
        self._home = home
        self._sampler = sampler
        self._pipelines = pipelines
        self._jobs = jobs
        self._metrics = metrics
        self._timelines = Timelines(home.context)
        jobs.register("playback", self._playback)

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
        found = notices(snapshot, pipelines, self._sampler.trouble, visit.now_ms)
        values = {
            "snapshot": snapshot,
            "pipelines": pipelines,
            "charts": charts,
            "speeds": speeds,
            "busiest": shown,
            "lag": max((each.lag for each in snapshot.consumers), default=None),
            "notices": found,
            "problems": sum(each.grade == "bad" for each in found),
            "tails": self._metrics.waiting,
            "jobs": [job for job in self._jobs.own() if job.state == "running"],
        }
        return ShownPage("overview.html", values)

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
        return ShownPage("topics.html", {**values, "snapshot": snapshot})

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
        return ShownPage("topic.html", values)

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
            "sizes": found.sizes,
            "first": found.first_ms,
            "last": found.last_ms,
            "exact": found.is_exact,
            "whole": found.is_whole,
            "now": visit.now_ms,
        }
        return Data(msgspec.json.encode(shown))

    def play(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/playback``: first what it would do; ``sure`` starts it"""
        topic = self._home.topic(visit.path["topic"])
        target = visit.text("target")
        check_topic_name(target)
        if target == topic.name:
            raise InvalidError(f"playback: `{target}` would be played into itself: choose another")
        self._home.topic(target)
        start_ms, end_ms = (self._moment(visit, name) for name in ("start", "end"))
        start = "" if start_ms is None else to_iso(start_ms)
        end = "" if end_ms is None else to_iso(end_ms)
        speed = visit.text("speed", "max")
        factor = check_speed(speed)
        args = {"topic": topic.name, "target": target, "start": start, "end": end, "speed": speed}
        if not visit.form.get("sure"):
            found = self._timelines.histogram(topic, start_ms, end_ms)
            first = max(found.first_ms or 0, start_ms or 0)
            last = min(found.last_ms or 0, visit.now_ms if end_ms is None else end_ms)
            values = {
                "topic": topic,
                "args": args,
                "events": sum(found.counts),
                "bytes": sum(found.sizes),
                "is_whole": found.is_whole,
                "takes_ms": None if factor is None else max(0, last - first) / factor,
            }
            return ShownPage("playback.html", values)
        what = f"playback of {topic.name} to {target}, {start or 'beginning'} to {end or 'now'}"
        args["name"] = f"console-{self._home.context.ids.new()[:12]}"
        who = self._home.reason(who=visit.session.who or None).who
        self._jobs.start("playback", what, args, who)
        return Redirect("/console/jobs")

    def _playback(self, args: Mapping[str, str], who: str) -> Work:
        """Returns the work of a playback; it has a name, so that a restart goes on with it."""
        return lambda job: play_to_topic(self._home, job, args, who)

    def _row(self, sample: TopicSample) -> dict[str, Any]:
        """Returns a topic for a list. Hold the lock, since its chart reads series."""
        chart = line_chart(sample.ends.rates(), 120, 28) if sample.heads else None
        return {"sample": sample, "topic": sample.topic, "chart": chart}

    def _states(self, sample: TopicSample) -> list[dict[str, Any]]:
        """Returns what is known about each partition."""
        totals = self._sampler.totals(sample.topic)
        return [
            {"partition": number, "head": head, "totals": totals.get(number)}
            for number, head in enumerate(sample.heads)
        ]

    def _targets(self, snapshot: Snapshot, own: str) -> list[str]:
        """Returns topics to offer as targets of a playback; a person may type others."""
        ready = (each.topic.name for each in snapshot.topics.values() if each.heads)
        return [name for name in ready if name != own][:200]

    def _moment(self, visit: Visit, name: str) -> int | None:
        text = visit.text(name)
        if not text:
            return None
        is_number = text.isascii() and text.isdigit() and len(text) < 16
        return int(text) if is_number else moment_ms(text, visit.now_ms)


def play_to_topic(home: Home, job: Job, args: Mapping[str, str], who: str) -> str:
    """Plays a range of times to a topic and returns what was played."""
    times: list[int] = []  # the first one, and the end
    name = args["name"]
    known = (each.state.number for each in home.playbacks.list() if each.name == name)
    played = next(known, 0)  # before a restart

    def on_begin(_: Topic, pin: Pin) -> None:
        if args["start"]:
            times.append(pin.range.start_ms)
        times.append(min(pin.range.end_ms, home.context.clock.now_ms()))

    def on_slot(slot: SlotCount) -> None:
        nonlocal played
        played += slot.events
        if len(times) == 1:
            times.insert(0, slot.slot_ms)
        first, end = times
        percent = 100 * (slot.slot_ms - first) / max(1, end - first)
        job.tell(f"{played:,} events so far, up to {to_iso(slot.slot_ms)}", percent)

    done = home.playback(
        args["topic"],
        args["start"] or to_iso(0),
        args["end"] or None,
        to=f"topic:{args['target']}",
        name=name,
        speed=args["speed"],
        who=who,
        stop=job.stop,
        on_begin=on_begin,
        on_slot=on_slot,
    )
    if done.finished or job.is_cancelled:
        job.after = functools.partial(home.playbacks.forget, name)
    return f"{played:,} events played"


_SHOWN_MAX = 50
_EACH_MAX = 3  # of one archive
_OLD_MS = 90_000  # figures older than this are told to be old
_WAITING = 1  # events that no consumer handles: the number that needs attention


@dataclass(frozen=True, slots=True)
class Notice:
    """One problem that a person should look at."""

    grade: Literal["bad", "warn"]
    text: str
    link: str = ""
    what: str = ""  # that the link opens


def notices(
    snapshot: Snapshot, pipelines: PipelinesSeen, trouble: TidelogError | None, now_ms: int
) -> list[Notice]:
    """Returns all problems, the worst first; only the worst of very many."""
    found = [*_of_home(snapshot, pipelines, trouble, now_ms)]
    for topic in snapshot.topics.values():
        if topic.topic.state != "ready":
            says = f"topic `{topic.topic.name}`: its {topic.topic.state[:-3]}ion did not finish"
            does = {"creating": "create", "deleting": "delete"}[topic.topic.state]
            found.append(Notice("warn", f"{says}: {does} it again to finish"))
        for consumer in topic.consumers:
            found.extend(_of_consumer(consumer))
    for seen in pipelines.archives:
        link = url("/console/archives", seen.archive.name)
        shown, others = seen.troubles[:_EACH_MAX], len(seen.troubles) - _EACH_MAX
        found.extend(Notice("bad", text, link, "the archive") for text in shown)
        if others > 0:
            more = f"archive `{seen.archive.name}`: {others} more problems"
            found.append(Notice("bad", more, link, "the archive"))
    for pump in pipelines.pumps:
        if pump.error:
            link = url("/console/pumps", pump.named.name)
            text = f"pump `{pump.named.name}`: {pump.error}"
            found.append(Notice("bad", text, link, "the pump"))
    found.extend(
        Notice("bad", f"`{part.name}` of `tidelog up` on {keeper.host} fails: {part.error}")
        for keeper in pipelines.keepers
        for part in keeper.parts
        if part.state == "failed"
    )
    return sorted(found, key=lambda notice: notice.grade)[:_SHOWN_MAX]


def _of_home(
    snapshot: Snapshot, pipelines: PipelinesSeen, trouble: TidelogError | None, now_ms: int
) -> Iterator[Notice]:
    if trouble is not None:
        says = shape(trouble)["error"]["message"]
        yield Notice("bad", f"the catalog cannot be read: {says}")
    elif now_ms - snapshot.read_ms > _OLD_MS:
        old = duration(now_ms - snapshot.read_ms)
        yield Notice("warn", f"these figures are {old} old: the catalog answers slowly")
    if pipelines.store_error:
        yield Notice("bad", f"the store does not answer: {pipelines.store_error}")


def _of_consumer(consumer: ConsumerSample) -> Iterator[Notice]:
    what = f"consumer `{consumer.name}` of `{consumer.topic}`"
    link = url("/console/consumer", topic=consumer.topic, name=consumer.name)
    if consumer.trimmed:
        yield Notice(
            "bad",
            f"{what}: {number(consumer.trimmed)} events were trimmed before it handled them: "
            "seek to the start to accept that",
            link,
            "the consumer",
        )
    if consumer.lag >= _WAITING and not consumer.alive:
        waiting = number(consumer.lag)
        text = f"{what}: {waiting} events wait, and no member is alive"
        yield Notice("warn", text, link, "the consumer")


class ConsumerPages:
    """Pages of consumers."""

    def __init__(self, home: Home, sampler: Sampler) -> None:
        self._home = home
        self._sampler = sampler

    def consumers(self, visit: Visit) -> Answer:
        """``GET /console/consumers``"""
        snapshot = self._sampler.look()
        wanted = visit.text("q").lower()
        found = [
            each
            for each in snapshot.consumers
            if wanted in each.name.lower() or wanted in each.topic.lower()
        ]
        found.sort(key=lambda each: (-each.lag, each.topic, each.name))
        part = part_of(found, visit.number("page", 1, 10**6))
        with self._sampler.lock:
            rows = [
                {
                    "consumer": each,
                    "chart": line_chart(each.lags, 120, 28),
                    "rate": each.cursors.rate(),
                }
                for each in part.rows
            ]
        values = {"part": part, "rows": rows, "q": visit.text("q"), "snapshot": snapshot}
        return ShownPage("consumers.html", values)

    def consumer(self, visit: Visit) -> Answer:
        """``GET /console/consumer?topic=…&name=…``"""
        topic = self._home.topic(visit.text("topic"))
        name = visit.query.get("name", "")
        self._home.consumers(topic.name).get(name)
        consumer = self._sampler.consumer(topic, name)
        with self._sampler.lock:
            chart, rate = line_chart(consumer.lags), consumer.cursors.rate()
        values = {
            "topic": topic,
            "consumer": consumer,
            "part": part_of(consumer.held, visit.number("page", 1, 10**6), _PARTITIONS_A_PAGE),
            "chart": chart,
            "rate": rate,
            "snapshot": self._sampler.look(),
            "ttl_ms": self._home.context.log_settings.lease_ttl_ms,
        }
        return ShownPage("consumer.html", values)

    def move(self, visit: Visit) -> Answer:
        """``POST /console/consumer/move``: first what would be done, and with ``moves`` does it"""
        topic = self._home.topic(visit.text("topic"))
        name = visit.form.get("name", "")
        consumer = self._home.consumers(topic.name).get(name)
        if "moves" in visit.form:
            return self._do(visit, consumer)
        to = visit.text("where")
        to = visit.text("to") if to in ("", "at") else to
        if not to:
            raise InvalidError("seek: names no place: give earliest, latest, an offset or a time")
        given = visit.text("partition")
        chosen = range(topic.partitions) if given in ("", "all") else [partition_of(topic, given)]
        if len(chosen) > _PARTITIONS_MOVED_MAX:
            raise InvalidError(
                f"seek: {len(chosen)} partitions at once: choose one, or use the library for all"
            )
        moves = [consumer.plan_seek(to, each) for each in chosen]
        values = {
            "topic": topic,
            "name": name,
            "to": to,
            "moves": moves,
            "again": sum(each.again for each in moves),
            "skipped": sum(each.skipped for each in moves),
            "owned": sum(bool(each.owner) for each in moves),
            "packed": " ".join(map(_text, moves)),
        }
        return ShownPage("move.html", values)

    def _do(self, visit: Visit, consumer: ConsumerHandle) -> Answer:
        moved: list[str] = []
        overtaken: list[str] = []
        for text in visit.form["moves"].split():
            done = consumer.move(*_parse(text), who=visit.session.who)
            (moved if done else overtaken).append(text.partition(":")[0])
        self._sampler.expire()
        says = f"The cursors of {len(moved)} partitions were moved." if moved else ""
        if overtaken:
            says += (
                f" In partitions {', '.join(overtaken)} the consumer was faster: its lease has "
                "changed since you looked. Nothing was moved there; look again."
            )
        values = {
            "title": "Cursor moved" if moved else "Nothing was moved",
            "says": says.strip(),
            "link": url("/console/consumer", topic=consumer.topic.name, name=consumer.name),
            "link_text": f"Back to {consumer.name}",
            "grade": "warn" if overtaken else "good",
        }
        return ShownPage("done.html", values, 409 if overtaken and not moved else 200)


def _text(move: CursorMove) -> str:
    """Returns a move as a form carries it."""
    return f"{move.partition}:{move.to}:{move.version}"


def _parse(text: str) -> tuple[int, int, str]:
    parts = text.split(":", 2)
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,19}", each) for each in parts[:2]):
        raise InvalidError("move: is not a valid move: start again")
    return int(parts[0]), int(parts[1]), parts[2]
