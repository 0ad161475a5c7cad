"""What a person should look at first, worst first: a line each, with the page that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tidelog.errors import TidelogError
from tidelog.server.answers import shape
from tidelog.server.console.pipelines import PipelinesSeen
from tidelog.server.console.samples import ConsumerSample, Snapshot
from tidelog.server.console.showing import duration, number, url

__all__ = ["Notice", "notices"]

_SHOWN_MAX = 50
_EACH_MAX = 3  # of one archive
_OLD_MS = 90_000  # figures older than this are told to be old
_WAITING = 1  # events that nobody handles: from so many on


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that is not as it should be."""

    grade: Literal["bad", "warn"]
    text: str
    link: str = ""


def notices(
    snapshot: Snapshot, pipelines: PipelinesSeen, trouble: TidelogError | None, now_ms: int
) -> list[Notice]:
    """All of them, the bad ones first; the worst of very many."""
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
        found.extend(Notice("bad", text, link) for text in shown)
        if others > 0:
            found.append(Notice("bad", f"archive `{seen.archive.name}`: {others} more there", link))
    for pump in pipelines.pumps:
        if pump.error:
            link = url("/console/pumps", pump.named.name)
            found.append(Notice("bad", f"pump `{pump.named.name}`: {pump.error}", link))
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
        )
    if consumer.lag >= _WAITING and not consumer.alive:
        waiting = number(consumer.lag)
        yield Notice("warn", f"{what}: {waiting} events wait, and no member is alive", link)
