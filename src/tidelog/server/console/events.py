"""Pages of events: found by place, time, key, id, fields or SQL; one event in all its views.

A search reads for a fraction of a second and then shows what it has, with the way to go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidelog.api.sql_process import SqlLimits
from tidelog.api.topics import LookBack
from tidelog.codec.event_json import event_lines
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.status import partition_ends
from tidelog.model.event import Event
from tidelog.model.playback import time_range
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.pages import (
    DeletedOffsets,
    KnownAmendment,
    RangeCursor,
    SearchQuery,
    SearchResult,
    begin_range,
    read_known_amendments,
    search_partition,
    search_range,
    with_gaps,
)
from tidelog.server.api.read import partition_of
from tidelog.server.api.sql import SqlRunner
from tidelog.server.api.tail import parse_cursors
from tidelog.server.console.format import Bytes, url
from tidelog.server.console.session import Answer, Data, ShownPage, Visit
from tidelog.server.http import limits
from tidelog.server.http.errors import BusyError, status_of
from tidelog.server.http.metrics import Metrics

__all__ = ["EventPages", "SqlPages"]


_WAYS = ("newest", "offset", "time", "key", "id")
_DONE = ("appended", "corrected")
_VIEWS = ("json", "text", "hex")
_LIMITS = (20, 50, 100, 500)
_SEARCH_S = 0.07
_NEWEST_PARTITIONS = 64  # whose ends are read for the newest events; of more, one is shown
_NEWEST_LOOKED = 2_000  # events that are looked at for a text or a field


@dataclass(frozen=True, slots=True)
class _SearchForm:
    """A search as the form gives it."""

    by: str
    partition: int
    limit: int
    sought: SearchQuery
    fields: dict[str, str]


@dataclass(slots=True)
class _Result:
    """The result of a search."""

    found: SearchResult
    says: str = ""
    before: dict[str, Any] | None = None  # the query that leads there
    after: dict[str, Any] | None = None
    more: bool = False  # the search has not come to its end
    marks: dict[tuple[int, int], KnownAmendment] = field(default_factory=dict)
    bounds: tuple[int, int] | None = None  # offsets that are shown, one after another
    rows: Sequence[Event | DeletedOffsets] = ()


class EventPages:
    """Pages of events."""

    def __init__(self, home: Home, metrics: Metrics) -> None:
        self._home = home
        self._context = home.context
        self._metrics = metrics

    def events(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/events``"""
        topic = self._home.topic(visit.path["topic"])
        asked = _asked(topic, visit)
        result, trouble = _Result(SearchResult()), ""
        try:
            result = self._find(topic, asked, visit)
        except (InvalidError, NotFoundError) as exc:
            if visit.query.get("download"):
                raise
            trouble = exc.message
        self._metrics.events_out += len(result.found.events)
        if visit.query.get("download"):
            headers = {"content-disposition": f'attachment; filename="{topic.name}.jsonl"'}
            lines = event_lines(result.found.events)
            return Data(lines, "application/x-ndjson", headers)
        path = url("/console/topics", topic.name) + "/events"
        values = {
            "topic": topic,
            "asked": asked,
            "result": result,
            "trouble": trouble,
            "before": url(path, **result.before) if result.before else "",
            "after": url(path, **result.after) if result.after else "",
            "download": url(path, **{**dict(visit.query), "download": "1"}),
            "limits": _LIMITS,
            "ways": _WAYS,
        }
        return ShownPage("events.html", values, 400 if trouble else 200)

    def event(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/events/{partition}/{offset}``"""
        topic, event = self.event_at(visit)
        partition, offset = event.position.partition, event.position.offset
        first, end = self._ends(topic, partition)
        value = Bytes(event.value)
        view = visit.text("view", value.best)
        if view not in _VIEWS:
            raise InvalidError(f"view `{view[:40]}`: give one of {', '.join(_VIEWS)}")
        where = url("/console/topics", topic.name, "events", str(partition))
        values = {
            "topic": topic,
            "event": event,
            "value": value,
            "key_text": _text(event.key),
            "view": view,
            "done": next((each for each in _DONE if visit.query.get(each)), ""),
            "views": [each for each in _VIEWS if each != "json" or value.json is not None],
            "mark": read_known_amendments(self._context, topic, partition, offset, offset + 1).get(
                (partition, offset)
            ),
            "where": f"{where}/{offset}",
            "before": f"{where}/{offset - 1}" if offset > first else "",
            "after": f"{where}/{offset + 1}" if offset + 1 < end else "",
            "line": event_lines([event]).decode() if len(event.value or b"") <= 65_536 else "",
        }
        return ShownPage("event.html", values)

    def value(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/events/{partition}/{offset}/value``"""
        topic, event = self.event_at(visit)
        at = event.position
        name = f"{topic.name}-{at.partition}-{at.offset}.bin"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Data(event.value or b"", "application/octet-stream", headers)

    def event_at(self, visit: Visit) -> tuple[Topic, Event]:
        """Returns the event that the path names. Raises ``InvalidError``, ``NotFoundError``."""
        topic = self._home.topic(visit.path["topic"])
        partition = partition_of(topic, visit.path["partition"])
        text = visit.path["offset"]
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise InvalidError(f"offset `{text[:40]}`: give a whole number")
        found = search_partition(
            self._context, topic, partition, int(text), SearchQuery(), (1, 5.0)
        )
        if not found.events or found.events[0].offset != int(text):
            _, end = self._ends(topic, partition)
            what = (
                "was deleted: see the topic's journals"
                if int(text) < end
                else f"is not there yet: the next event of the partition gets offset {end}"
            )
            raise NotFoundError(f"event `{topic.name}/{partition}/{text}`: {what}")
        return topic, found.events[0]

    def _ends(self, topic: Topic, partition: int) -> tuple[int, int]:
        """Returns the first offset of a partition, and its next one."""
        return partition_ends(self._context, topic, [partition])[partition]

    def _find(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        asked.sought.check()
        ways = {
            "newest": self._newest,
            "time": self._by_time,
            "key": self._by_key,
            "id": self._by_id,
        }
        result = ways.get(asked.by, self._by_offset)(topic, asked, visit)
        events = result.found.events
        spans = {asked.partition: result.bounds} if result.bounds else _spans(events)
        for partition, (start, end) in spans.items():
            result.marks.update(read_known_amendments(self._context, topic, partition, start, end))
        result.rows = events
        if result.bounds:
            result.rows = with_gaps(asked.partition, events, result.marks, result.bounds)
        return result

    def _newest(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        """Returns the newest events of all partitions, or those below offsets, newest first."""
        most = asked.limit if asked.sought.is_all else _NEWEST_LOOKED
        text = visit.query.get("before", "")
        look = LookBack(self._home, topic.name, _offsets(text, topic))
        events, looked = look.page(asked.sought, asked.limit, most)
        which = "older events" if text else "the newest"
        found = SearchResult(events, looked=looked)
        result = _Result(found, f"{which} of all partitions, newest first")
        if look.has_more:
            ends = ",".join(f"{partition}:{end}" for partition, end in look.ends.items())
            result.after = {**_query(asked), "before": ends}
            result.more = not asked.sought.is_all and len(events) < asked.limit
        if text:
            result.before = _query(asked)
        return result

    def _by_offset(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        first, end = self._ends(topic, asked.partition)
        newest = max(first, end - asked.limit)
        start = visit.number("offset", newest if asked.sought.is_all else first)
        start = min(start, end)
        most = (asked.limit, _SEARCH_S)
        found = search_partition(self._context, topic, asked.partition, start, asked.sought, most)
        query = _query(asked, partition=asked.partition)
        result = _Result(found, f"offsets {first:,} to {end:,} are there")
        if found.next is not None:
            result.after = {**query, "offset": found.next}
            result.more = not asked.sought.is_all and len(found.events) < asked.limit
        if asked.sought.is_all:
            result.bounds = (start, end if found.next is None else found.next)
        if asked.sought.is_all and start > first:
            result.before = {**query, "offset": max(first, start - asked.limit)}
        return result

    def _by_time(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        text = visit.query.get("cursor", "")
        if text:
            cursor = RangeCursor.of_text(text)
        else:
            given = visit.text("start") or "-15m", visit.text("end") or None
            cursor = begin_range(self._context, topic, time_range(*given, visit.now_ms))
        found = search_range(self._context, topic, cursor, asked.sought, (asked.limit, _SEARCH_S))
        result = _Result(found)
        if found.cursor is not None:
            result.after = {**_query(asked), "cursor": found.cursor.text()}
            result.more = not asked.sought.is_all and len(found.events) < asked.limit
        return result

    def _by_id(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        """Finds the newest event with an id, in any partition."""
        try:
            event = self._home.get(topic.name, asked.sought.id or "")
        except NotFoundError:
            return _Result(
                SearchResult(), "no event has this id; it may have been deleted or trimmed"
            )
        return _Result(SearchResult([event]), "the newest with this id")

    def _by_key(self, topic: Topic, asked: _SearchForm, visit: Visit) -> _Result:
        """Searches the partition that the key goes to, or another one that is given."""
        partition = asked.partition
        first, _ = self._ends(topic, partition)
        start = max(visit.number("at", first), first)
        most = (asked.limit, _SEARCH_S)
        found = search_partition(self._context, topic, partition, start, asked.sought, most)
        says = f"in partition {partition}, from offset {start:,} on"
        result = _Result(found, says)
        query = _query(asked, partition=partition)
        if found.next is not None:
            result.after = {**query, "at": found.next}
            result.more = len(found.events) < asked.limit
        return result


def _asked(topic: Topic, visit: Visit) -> _SearchForm:
    is_small = topic.partitions <= _NEWEST_PARTITIONS
    somewhere = visit.text("partition") or visit.text("offset")
    by = visit.text("by", "newest" if is_small and not somewhere else "offset")
    if by not in _WAYS:
        raise InvalidError(f"by `{by[:40]}`: give one of {', '.join(_WAYS)}")
    names = ("partition", "offset", "start", "end", "key", "id", "contains", "where")
    fields = {name: visit.text(name) for name in names}
    limit = visit.number("limit", 50, 500)
    key = fields["key"].encode("utf-8", "surrogateescape") if by == "key" else None
    if by in ("key", "id") and not fields[by]:
        raise InvalidError(f"{by}: give the {by} to look for")
    wanted_id = fields["id"] if by == "id" else None
    sought = SearchQuery(key, wanted_id, fields["contains"], fields["where"])
    partition = 0
    if fields["partition"]:
        partition = partition_of(topic, fields["partition"])
    elif key is not None:
        partition = partition_for(key, topic.partitions)
    return _SearchForm(by, partition, max(1, limit), sought, fields)


def _offsets(text: str, topic: Topic) -> dict[int, int]:
    """Returns the offset of each partition that an address names as ``0:17,1:20``."""
    try:
        return parse_cursors(text, list(range(topic.partitions)))
    except InvalidError as exc:
        raise InvalidError("before: is not a place in this topic: begin with the newest") from exc


def _text(key: bytes | None) -> str:
    """Returns a key as a person can type it; empty for others."""
    try:
        return (key or b"").decode()
    except UnicodeDecodeError:
        return ""


def _spans(events: Sequence[Event]) -> dict[int, tuple[int, int]]:
    """Returns the first offset of the events in each partition, and the one after the last."""
    spans: dict[int, tuple[int, int]] = {}
    for at in (event.position for event in events):
        first, end = spans.get(at.partition, (at.offset, 0))
        spans[at.partition] = (min(first, at.offset), max(end, at.offset + 1))
    return spans


def _query(asked: _SearchForm, **more: Any) -> dict[str, Any]:
    """Returns the query of the same search in another place."""
    names = ("start", "end", "key", "id", "contains", "where")
    kept = {name: asked.fields[name] for name in names}
    kept = {name: value for name, value in kept.items() if value}
    return {"by": asked.by, **kept, "limit": asked.limit, **more}


ROWS_MAX = 500
_SQL_LIMITS = SqlLimits(limits.SQL_S, limits.SQL_CPU_S, rows=ROWS_MAX, result_bytes=2 << 20)
_EXAMPLES = (
    "select type, count(*) as events from {name} group by 1 order by 2 desc",
    "select * from {name} where timestamp >= now() - interval 1 hour order by timestamp desc",
    "select date_trunc('hour', timestamp) as hour, count(*) as events from {name} group by all",
    "select as_json(value)->>'field' as field, count(*) as events from {name} group by 1",
)


class SqlPages:
    """Pages of SQL: the form, and the rows of a query."""

    def __init__(self, home: Home, runner: SqlRunner) -> None:
        self._home = home
        self._runner = runner

    def sql(self, visit: Visit) -> Answer:
        """``GET /console/sql``"""
        return self._show(visit, visit.text("q"))

    def query(self, visit: Visit) -> Answer:
        """``POST /console/sql``: it changes nothing, but costs a processor for seconds"""
        query = visit.text("q")
        if not query:
            raise InvalidError("sql: there is no query: write one")
        token = visit.session.token
        client = "console" if token is None else token.id
        try:
            found = self._runner.run(query, token, client, visit.query_end, bounds=_SQL_LIMITS)
        except (BusyError, InvalidError, NotFoundError) as exc:
            return self._show(visit, query, status_of(exc), trouble=exc.message)
        names = [column["name"] for column in found.columns]
        rows = [[_cell(row.get(name)) for name in names] for row in map(json.loads, found.lines)]
        return self._show(visit, query, columns=names, rows=rows, is_whole=found.is_whole)

    def _show(self, visit: Visit, query: str, status: int = 200, **more: Any) -> Answer:
        session = visit.session
        topics = [
            each.name
            for each in self._home.topics()
            if each.state == "ready" and session.may("read", each.name)
        ]
        archives = [each.name for each in self._home.archives.list()] if session.may("read") else []
        name = _quoted((topics or archives or ["orders"])[0])
        values = {
            "query": query,
            "topics": topics,
            "archives": archives,
            "examples": [each.format(name=name) for each in _EXAMPLES],
            "rows_max": ROWS_MAX,
            "cpu_seconds": limits.SQL_CPU_S,
            "columns": None,
            "rows": [],
            "is_whole": True,
            "trouble": "",
        }
        return ShownPage("sql.html", {**values, **more}, status)


def _quoted(name: str) -> str:
    is_plain = name.replace("_", "a").isalnum() and not name[:1].isdigit()
    return name if is_plain else f'"{name}"'


def _cell(value: Any) -> str | None:
    """Returns a value as text; lists and objects as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
