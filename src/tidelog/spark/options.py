"""The options of the data source: parsed and checked before anything else happens.

Spark passes option names in lower case. An unknown option, or one that does not apply to this use,
is refused with the nearest valid one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.model.decoding import check_json_depth
from tidelog.model.times import moment_ms
from tidelog.model.topic import check_topic_name

__all__ = [
    "BATCH_READ",
    "BATCH_WRITE",
    "STREAM_READ",
    "STREAM_WRITE",
    "DataSourceUse",
    "Offsets",
    "ReadOptions",
    "WriteOptions",
    "check_not_table",
    "is_pattern",
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
