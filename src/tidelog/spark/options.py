"""What a query of the data source asks for: its options, and the filters that Spark passes.

**Options** are parsed and checked before anything else happens. Spark passes option names in lower
case. An unknown option, or one that does not apply to this use, is refused with the nearest valid
one.

**Filters** of Spark's ``where`` say which partitions, offsets, times and rows a query wants. Spark
passes the parts of a ``where`` that are joined by AND. What is understood here exactly is taken
over, and Spark does not check it again. A list of offsets or times narrows the read, and Spark
checks the rows. Everything else stays with Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.journal_file import RowGroup
from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.model.decoding import check_json_depth
from tidelog.model.times import moment_ms
from tidelog.model.topic import Run, check_topic_name

__all__ = [
    "ALL_TIMES",
    "BATCH_READ",
    "BATCH_WRITE",
    "EVERYTHING",
    "STREAM_READ",
    "STREAM_WRITE",
    "DataSourceUse",
    "EventTimes",
    "Offsets",
    "PushedFilter",
    "ReadOptions",
    "WriteOptions",
    "check_not_table",
    "is_pattern",
    "push",
    "read_columns",
    "read_options",
    "write_options",
]

Offsets = str | dict[str, dict[int, int]]
"""``earliest``, ``latest``, or offsets of partitions by topic; "" is the only topic of a read."""

_SINK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SPARKS_OWN = ("checkpointlocation",)  # Spark passes it on to the sink


@dataclass(frozen=True, slots=True)
class DataSourceUse:
    """One way to use the data source, and its options."""

    name: str
    takes: tuple[str, ...]


_PLACE = ("home", "topic")
_READ = (*_PLACE, "columns", "startOffsets", "startTime", "endTime", "bytesPerTask")
BATCH_READ = DataSourceUse("batch read", (*_READ, "endOffsets", "pushFilters"))
STREAM_READ = DataSourceUse(
    "streaming read", (*_READ, "maxEventsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss")
)
BATCH_WRITE = DataSourceUse(
    "batch write", (*_PLACE, "usePartition", "sink", "batch", "acceptRepeat")
)
STREAM_WRITE = DataSourceUse("streaming write", (*_PLACE, "usePartition", "sink", "acceptRepeat"))
_ANY_READ = DataSourceUse("read", tuple(dict.fromkeys((*BATCH_READ.takes, *STREAM_READ.takes))))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read, and in which portions."""

    home: str  # a folder or a config string
    topics: tuple[str, ...]  # names, and patterns of names
    start_offsets: Offsets = "earliest"
    end_offsets: Offsets = "latest"
    start_time: str | None = None  # ISO 8601, or relative such as `-15m`
    end_time: str | None = None
    task_bytes: int | None = None  # stored bytes of one task; None: from the total
    push_filters: bool = False  # the table serves one query, whose filters Spark passes
    trigger_events: int | None = None  # of one micro-batch
    trigger_bytes: int | None = None  # stored bytes of one micro-batch
    fail_on_loss: bool = True  # when events were trimmed before a stream had read them

    @property
    def what(self) -> str:
        """Returns the topics as they were given."""
        return ",".join(self.topics)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where to write, and under which name."""

    home: str
    topic: str
    use_partition: bool = False  # use the column `partition`, not the key
    sink: str | None = None  # under this name, a repeated batch is stored once
    batch: int | None = None  # the number of a batch write under that name
    accept_repeat: int | None = None  # a batch that counts as stored, though a repeat of it differs


def read_columns(given: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the columns to read, in order; all of them by default."""
    text = _known(given, _ANY_READ).get("columns")
    if text is None:
        return tuple(EVENT_SCHEMA.names)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in EVENT_SCHEMA.names:
            raise InvalidError(
                f"option columns: unknown column `{name}`{nearest(name, EVENT_SCHEMA.names)}: "
                f"events have {', '.join(EVENT_SCHEMA.names)}"
            )
    if len(set(names)) < len(names):
        raise InvalidError(f"option columns: `{text}` names a column twice: name each once")
    return names


def check_not_table(given: Mapping[str, str]) -> None:
    """Raises for a table in Spark's own catalog, which could not be read afterwards."""
    if any(name.lower().startswith("option.") for name in given):
        raise InvalidError(
            "CREATE TABLE: Spark keeps no options with a table of a Python source, so that it "
            "could not be read: use CREATE TEMPORARY VIEW … USING tidelog OPTIONS (…)"
        )


def read_options(given: Mapping[str, str], use: DataSourceUse) -> ReadOptions:
    """Parses the options of a read."""
    said = _known(given, use)
    options = ReadOptions(
        home=_required(said, "home", "a folder or a config string"),
        topics=_topics(said),
        start_offsets=_offsets(said, "startOffsets", "earliest"),
        end_offsets=_offsets(said, "endOffsets", "latest"),
        start_time=said.get("startTime"),
        end_time=said.get("endTime"),
        task_bytes=_number(said, "bytesPerTask"),
        push_filters=_flag(said, "pushFilters"),
        trigger_events=_number(said, "maxEventsPerTrigger"),
        trigger_bytes=_number(said, "maxBytesPerTrigger"),
        fail_on_loss=_flag(said, "failOnDataLoss", "true"),
    )
    _check_offsets(options)
    if options.trigger_events and options.trigger_bytes:
        raise InvalidError(
            "options maxEventsPerTrigger and maxBytesPerTrigger: Spark knows one limit: give one"
        )
    if use is STREAM_READ and options.start_time and "startOffsets" in said:
        raise InvalidError(
            "options startOffsets and startTime: both say where the stream begins: give one"
        )
    if use is STREAM_READ and options.end_time is not None:
        _check_end_time(options.end_time)
    return options


def write_options(given: Mapping[str, str], use: DataSourceUse) -> WriteOptions:
    """Parses the options of a write."""
    said = _known(given, use)
    sink = said.get("sink")
    if sink is None and use is STREAM_WRITE:
        raise InvalidError(
            "option sink: is missing: give a name that this query keeps over restarts, "
            "so that a replayed micro-batch is known"
        )
    if sink is not None and not _SINK.fullmatch(sink):
        raise InvalidError(
            f"option sink: `{sink[:80]}`: give 1 to 200 letters, digits, `.`, `_` or `-`, "
            "beginning with a letter, a digit or `_`"
        )
    batch = _number(said, "batch", least=0)
    if use is BATCH_WRITE and (sink is None) != (batch is None):
        raise InvalidError(
            "options sink and batch: make a batch write repeatable together: give both or none"
        )
    return WriteOptions(
        home=_required(said, "home", "a folder or a config string"),
        topic=_topic(said),
        use_partition=_flag(said, "usePartition"),
        sink=sink,
        batch=batch,
        accept_repeat=_number(said, "acceptRepeat", least=0),
    )


def _known(given: Mapping[str, str], use: DataSourceUse) -> dict[str, str]:
    """Returns the options under their proper names."""
    names = {name.lower(): name for name in use.takes}
    said: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() in _SPARKS_OWN:
            continue
        if name.lower() == "path":
            raise InvalidError(
                f"path `{value}`: a topic has no path: give option `topic`, and load or save "
                "without an argument"
            )
        proper = names.get(name.lower())
        if proper is None:
            hint = nearest(name.lower(), names)
            close = next((names[n] for n in names if f"`{n}`" in hint), None)
            hint = f" (did you mean `{close}`?)" if close else ""
            raise InvalidError(
                f"tidelog {use.name}: unknown option `{name}`{hint}: "
                f"it takes {', '.join(use.takes)}"
            )
        said[proper] = value
    return said


def _required(said: Mapping[str, str], name: str, wanted: str) -> str:
    value = said.get(name)
    if not value:
        raise InvalidError(
            f"option {name}: is missing: give {wanted} (Spark keeps no options with a table of "
            "CREATE TABLE or saveAsTable: use `CREATE TEMPORARY VIEW`, or `format` and `options`)"
        )
    return value


def _topic(said: Mapping[str, str]) -> str:
    name = _required(said, "topic", "the topic's name")
    check_topic_name(name)
    return name


def _topics(said: Mapping[str, str]) -> tuple[str, ...]:
    text = _required(said, "topic", "the topic's name, several, or a pattern: `orders-*`")
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        check_topic_name(name if not is_pattern(name) else re.sub(r"[*?]", "x", name))
    if len(set(names)) < len(names):
        raise InvalidError(f"option topic: `{text}` names a topic twice: name each once")
    return names


def is_pattern(name: str) -> bool:
    """Returns whether a name of the option ``topic`` stands for any number of topics."""
    return "*" in name or "?" in name


def _check_offsets(options: ReadOptions) -> None:
    """Raises for offsets that do not name their topic, where there may be several."""
    several = len(options.topics) > 1 or is_pattern(options.topics[0])
    for name, given in (
        ("startOffsets", options.start_offsets),
        ("endOffsets", options.end_offsets),
    ):
        if several and isinstance(given, dict) and "" in given:
            raise InvalidError(
                f'option {name}: there may be several topics: name them: {{"orders": {{"0": 17}}}}'
            )


def _check_end_time(text: str) -> None:
    if text == "now" or text.startswith("-"):
        raise InvalidError(
            f"option endTime: is `{text}`: a stream would end elsewhere after each restart: give a "
            "time in ISO 8601"
        )
    moment_ms(text, 0)


def _number(said: Mapping[str, str], name: str, least: int = 1) -> int | None:
    text = said.get(name)
    if text is None:
        return None
    if not text.isdecimal() or not least <= int(text) < 1 << 63:
        raise InvalidError(f"option {name}: is `{text}`: give a whole number, {least} or more")
    return int(text)


def _flag(said: Mapping[str, str], name: str, usual: str = "false") -> bool:
    text = said.get(name, usual).lower()
    if text not in ("true", "false"):
        raise InvalidError(f"option {name}: is `{text}`: give true or false")
    return text == "true"


def _offsets(said: Mapping[str, str], name: str, usual: str) -> Offsets:
    text = said.get(name, usual).strip()
    if text in ("earliest", "latest"):
        return text
    wrong = InvalidError(
        f'option {name}: is `{text}`: give earliest, latest, or offsets as JSON: {{"0": 17}}'
    )
    check_json_depth(text, f"option {name}")
    try:
        found = json.loads(text)
    except ValueError:
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    by_topic = all(isinstance(each, dict) for each in found.values()) and found
    parsed: dict[str, dict[int, int]] = {}
    for topic, offsets in found.items() if by_topic else (("", found),):
        for partition, offset in offsets.items():
            if not partition.isdecimal() or type(offset) is not int or offset < 0:
                raise wrong
        parsed[topic] = {int(partition): offset for partition, offset in offsets.items()}
    return parsed


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALWAYS = ("topic", "partition", "offset", "timestamp")  # columns that are never null
_SETS = {"topic": "topics", "partition": "partitions", "id": "ids", "key": "keys"}
_MEMBERS_MAX = 10_000  # of a list that tasks check; Spark itself checks a longer one


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Event times ``[start, end)``; None is open."""

    start_ms: int | None = None
    end_ms: int | None = None

    def miss(self, run: Run | RowGroup) -> bool:
        """Returns whether no event of a run or row group is within."""
        start_ms, end_ms = self.start_ms, self.end_ms
        if start_ms is not None and end_ms is not None and start_ms >= end_ms:
            return True
        before = start_ms is not None and run.last_ms < start_ms
        return before or (end_ms is not None and run.first_ms >= end_ms)

    def hold(self, run: Run) -> bool:
        """Returns whether every event of a run is within."""
        after = self.start_ms is None or run.first_ms >= self.start_ms
        return after and (self.end_ms is None or run.last_ms < self.end_ms)

    def within(self, other: EventTimes) -> EventTimes:
        """Returns the times that are in both."""
        return EventTimes(*_tighter(self.start_ms, self.end_ms, other.start_ms, other.end_ms))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns which events of a batch are within."""
        moments = batch.column("timestamp").cast(pa.int64())
        mask = pa.repeat(pa.scalar(True), batch.num_rows)
        if self.start_ms is not None:
            mask = pc.and_(mask, pc.greater_equal(moments, self.start_ms))
        if self.end_ms is not None:
            mask = pc.and_(mask, pc.less(moments, self.end_ms))
        return mask


ALL_TIMES = EventTimes()


@dataclass(frozen=True, slots=True)
class PushedFilter:
    """What a query wants of a topic; None is everything."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int | None = None  # offsets, half open
    end: int | None = None
    times: EventTimes = ALL_TIMES
    ids: frozenset[str] | None = None
    keys: frozenset[bytes] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns that tasks need in order to check rows."""
        wanted = (("id", self.ids), ("key", self.keys))
        return tuple(name for name, members in wanted if members is not None)

    def mask(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Returns which events of a batch have a wanted id and key; None for all."""
        mask = None
        for name in self.columns:
            column = batch.column(name)
            members: frozenset[Any] = (self.ids if name == "id" else self.keys) or frozenset()
            found = pc.is_in(column, value_set=pa.array(sorted(members), column.type))
            mask = found if mask is None else pc.and_(mask, found)
        return mask


EVERYTHING = PushedFilter()


def push(filters: Sequence[Filter]) -> tuple[PushedFilter, list[Filter]]:
    """Returns what the filters say together, and those that Spark still has to check."""
    pushed, rest = EVERYTHING, []
    for each in filters:
        found, is_exact = _narrowed(pushed, each)
        pushed = found
        if not is_exact:
            rest.append(each)
    return pushed, rest


def _narrowed(pushed: PushedFilter, given: Filter) -> tuple[PushedFilter, bool]:
    """Returns the narrower filter, and whether it says all that ``given`` says."""
    path = getattr(given, "attribute", None)
    if not isinstance(path, tuple) or len(path) != 1:
        return pushed, False
    name, value = path[0], getattr(given, "value", None)
    if isinstance(given, IsNotNull):
        return pushed, name in _ALWAYS
    if isinstance(given, In):
        members = [each for each in value or () if each is not None]  # null is equal to nothing
        return _one_of(pushed, name, members)
    if name in _SETS and value is not None and isinstance(given, EqualTo | EqualNullSafe):
        return _one_of(pushed, name, [value])
    return _compared(pushed, given, name, value)


def _compared(
    pushed: PushedFilter, given: Filter, name: str, value: Any
) -> tuple[PushedFilter, bool]:
    """Narrows offsets and times by a comparison."""
    if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        bounds = _bounds(given, (value - _EPOCH) // timedelta(microseconds=1), 1_000)
        times = EventTimes(*(bounds or (None, None)))
        return replace(pushed, times=pushed.times.within(times)), bounds is not None
    if name == "offset" and isinstance(value, int):
        bounds = _bounds(given, value, 1)
        start, end = _tighter(pushed.start, pushed.end, *(bounds or (None, None)))
        return replace(pushed, start=start, end=end), bounds is not None
    return pushed, False


def _one_of(pushed: PushedFilter, name: str, members: list[Any]) -> tuple[PushedFilter, bool]:
    if name in _SETS:
        if len(members) > _MEMBERS_MAX:
            return pushed, False
        before = getattr(pushed, _SETS[name])
        wanted: Any = frozenset(members) if before is None else before & frozenset(members)
        change: dict[str, Any] = {_SETS[name]: wanted}
        return replace(pushed, **change), True
    if not members or name not in ("offset", "timestamp"):
        return pushed, False
    low, _ = _narrowed(pushed, GreaterThanOrEqual((name,), min(members)))
    both, _ = _narrowed(low, LessThanOrEqual((name,), max(members)))
    return both, len(members) == 1


def _bounds(given: Filter, value: int, unit: int) -> tuple[int | None, int | None] | None:
    """Returns the ``[start, end)`` of a comparison, in units of the column."""
    up, down = -(-value // unit), value // unit
    if isinstance(given, EqualTo | EqualNullSafe):
        return up, down + 1  # empty if the column has no such value
    if isinstance(given, GreaterThan):
        return down + 1, None
    if isinstance(given, GreaterThanOrEqual):
        return up, None
    if isinstance(given, LessThan):
        return None, up
    if isinstance(given, LessThanOrEqual):
        return None, down + 1
    return None


def _tighter(
    start: int | None, end: int | None, other_start: int | None, other_end: int | None
) -> tuple[int | None, int | None]:
    starts = [each for each in (start, other_start) if each is not None]
    ends = [each for each in (end, other_end) if each is not None]
    return max(starts, default=None), min(ends, default=None)
