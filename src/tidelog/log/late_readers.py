"""Late readers: those that still need events which a trim or a delete would remove.

The catalog knows these readers: consumers by their cursors, archives and pumps by their committed
positions, and named playbacks that have not finished. A consumer, an archive or a pump that has not
started on a partition needs all of it. An archive or a pump needs nothing if it has retired or
ended, or if it committed events of a deleted topic of the same name (``Progress.will_read``).
Readers that keep their own offsets, such as a Spark stream or a client of the server, are unknown
here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_archives, list_pipelines, read_progress
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.consumer.leases import read_lease
from tidelog.log.status import consumer_names
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.address import nearest, parse_address
from tidelog.model.playback import PlaybackPin, PlaybackState
from tidelog.model.topic import Topic, decode_row

__all__ = ["Past", "check_all_read", "check_readers", "readers_behind"]


_NAMED = 5  # readers that an error lists; the others are counted


@dataclass(frozen=True, slots=True)
class LateReader:
    """A reader that has not read everything that a trim or a delete would remove."""

    reader: str  # for example: consumer `billing`
    name: str  # for example: consumer:billing
    partition: int
    position: int  # the first offset that it still needs
    start: int  # where the partition would start afterwards


Past = bool | str | Iterable[str]


"""Which readers may be passed: all, none, or those of these names."""


def check_readers(context: Context, topic: Topic, past: Past, starts: Mapping[int, int]) -> None:
    """Raises ``InvalidError`` if a trim would remove events that a reader needs.

    The error lists readers and positions. ``past`` lists readers to ignore, as ``billing`` or
    ``consumer:billing``. Raises ``NotFoundError`` for a name that no reader of the topic has.
    """
    if past is not True:
        found = readers_behind(context, topic, starts, past)
        _refuse(topic, f"trim of `{topic.name}`", found, "trim")


def check_all_read(context: Context, topic: Topic, past: Past = False) -> None:
    """Raises ``InvalidError`` if a reader has not read the topic to its end."""
    if past is not True:
        ends = {each: read_head(context, topic, each)[0].next for each in range(topic.partitions)}
        found = readers_behind(context, topic, ends, past)
        _refuse(topic, f"delete of topic `{topic.name}`", found, "delete it")


def _refuse(topic: Topic, what: str, behind: list[LateReader], again: str) -> None:
    if not behind:
        return
    parts = []
    for reader, same in groupby(behind, key=lambda each: each.reader):
        places = [f"{each.partition}:{each.position}" for each in same]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        parts.append(f"{reader} at {', '.join(places[:3])}{more}")
    named = "; ".join(parts[:_NAMED])
    if len(parts) > _NAMED:
        named += f"; and {len(parts) - _NAMED} more"
    raise InvalidError(
        f"{what}: would delete events that have not been read, by partition and "
        f"offset: {named}: let them read on, {_ways_on(topic, behind)}or {again} with "
        f"`--past-reader {behind[0].name}`, or past all of them with --past-readers",
        readers=[
            {
                "reader": each.reader,
                "name": each.name,
                "partition": each.partition,
                "position": each.position,
            }
            for each in behind
        ],
    )


def _ways_on(topic: Topic, behind: list[LateReader]) -> str:
    """Returns the command that removes the first reader, if one command can remove it."""
    for each in behind:
        kind, _, name = each.name.partition(":")
        commands = {
            "archive": ["archive", "delete", name],
            "consumer": ["consumer", "delete", topic.name, name],
            "pump": ["pipeline", "delete", name],
            "playback": ["playback", "--forget", name],
        }
        if kind in commands:
            command = shlex.join(["tidelog", *commands[kind]])
            return f"remove one that is not used any more (`{command}`), "
    return ""


def readers_behind(
    context: Context, topic: Topic, starts: Mapping[int, int], past: Past = False
) -> list[LateReader]:
    """Returns the readers that need an offset below where a partition would start, by reader.

    Leaves out the readers in ``past``. Raises ``NotFoundError`` for a name that no reader has, and
    ``InvalidError`` for one that several have.
    """
    passed = _names_to_ignore(context, topic, past)
    raised = {}
    for partition, start in starts.items():
        head, _ = read_head(context, topic, partition)
        if start > head.start:
            raised[partition] = start
    if not raised:
        return []
    found = [
        LateReader(reader.text, reader.full, partition, position, raised[partition])
        for reader, partition, position in _needs(context, topic, sorted(raised))
        if position is not None and position < raised[partition] and reader.full not in passed
    ]
    return sorted(found, key=lambda each: (each.reader, each.partition))


@dataclass(frozen=True, slots=True)
class _Reader:
    """The kind and the name of a reader."""

    kind: str
    name: str
    more: str = ""

    @property
    def full(self) -> str:
        """Returns its full name, as in ``past_readers``."""
        return f"{self.kind}:{self.name}"

    @property
    def text(self) -> str:
        """Returns its name, as in errors."""
        return f"{self.kind} `{self.name}`{self.more}"


# A reader, a partition, and the first offset that it needs there; None if it needs none.
_Need = tuple[_Reader, int, int | None]


def _names_to_ignore(context: Context, topic: Topic, past: Past) -> set[str]:
    """Returns the full names of the readers to ignore."""
    if isinstance(past, bool):
        return set()
    found: set[str] = set()
    wanted = [past] if isinstance(past, str) else list(past)
    known = {reader.full: reader for reader, _, _ in _needs(context, topic, [0])} if wanted else {}
    for name in wanted:
        same = [name] if name in known else [e for e, one in known.items() if one.name == name]
        if not same:
            names = {one.name for one in known.values()} | set(known)
            raise NotFoundError(
                f"reader `{name[:80]}` of topic `{topic.name}`: not found{nearest(name, names)}: "
                "give the name of a consumer, an archive, a pump or a playback that reads it"
            )
        if len(same) > 1:
            raise InvalidError(
                f"reader `{name}` of topic `{topic.name}`: {len(same)} have this name: give one of "
                f"{', '.join(sorted(same))}"
            )
        found.update(same)
    return found


def _needs(context: Context, topic: Topic, partitions: list[int]) -> Iterator[_Need]:
    for name in consumer_names(context, topic):
        for partition in partitions:
            found = read_lease(context, topic, name, partition)
            yield _Reader("consumer", name), partition, found[0].cursor if found else 0
    for reader, pipeline in _pipelines(context, topic.name):
        for partition in partitions:
            yield reader, partition, _position(context, pipeline, topic, partition)
    yield from _playbacks(context, topic, partitions)


def _pipelines(context: Context, topic: str) -> Iterator[tuple[_Reader, str]]:
    """Yields the archives and pumps that read a topic, with the incarnation of their pipelines."""
    for archive in list_archives(context):
        if archive.state == "ready" and _reads(archive.source, topic):
            for generation in archive.in_state("live", "building"):
                is_live = generation == archive.generation
                more = "" if is_live else f" (generation {generation})"
                reader = _Reader("archive", archive.name, more)
                yield reader, archive.pipeline(generation)
    for named in list_pipelines(context):
        if named.state == "ready" and _reads(named.source, topic):
            yield _Reader("pump", named.name), named.incarnation


def _reads(source: str, topic: str) -> bool:
    address = parse_address(source)
    return address.scheme == "topic" and address.path == topic


def _position(context: Context, pipeline: str, topic: Topic, partition: int) -> int | None:
    """Returns the first offset that a pipeline needs; None if it never reads this topic again."""
    progress = read_progress(context, pipeline, f"{topic.name}/{partition}")
    if progress is None:
        return 0  # it has not started
    if not progress.will_read(topic.incarnation):
        return None
    if not progress.is_of(topic.incarnation):
        return 0  # it starts again once a person accepts that the previous topic was deleted
    return int(progress.position) if progress.position.isdecimal() else 0


def _playbacks(context: Context, topic: Topic, partitions: list[int]) -> Iterator[_Need]:
    for row in context.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        name = row.value.decode()
        where = layout.playback_partition(name)
        pin_row = context.catalog.get(where, layout.PLAYBACK_PIN)
        if pin_row is None:
            continue
        pin = decode_row(pin_row.value, PlaybackPin, f"playback `{name}`").pin
        state_row = context.catalog.get(where, layout.PLAYBACK_STATE)
        state = PlaybackState()
        if state_row is not None:
            state = decode_row(state_row.value, PlaybackState, f"playback `{name}`")
        if pin.incarnation != topic.incarnation:
            continue
        reached_ms = state.cursor.time_ms if state.cursor else pin.range.start_ms
        for partition in partitions:
            needed = None if state.finished_ms else pin.floors[partition].needed(reached_ms)
            yield _Reader("playback", name), partition, needed
