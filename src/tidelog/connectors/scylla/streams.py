"""Generations of streams in a change log, and positions in them.

Clusters publish generations in three ways:

========== ==================================================== ================================
shape      tables                                               since
========== ==================================================== ================================
tablets    ``system.cdc_timestamps``, ``system.cdc_streams``    2025.4, for tables with tablets
two tables ``system_distributed.cdc_generation_timestamps``,    4.4
           ``…cdc_streams_descriptions_v2``
one table  ``system_distributed.cdc_streams_descriptions``      before
========== ==================================================== ================================

A change is in the generation that was the newest at the change's own time. A generation is
published before it begins, so a list of generations is complete up to the time it was read. Streams
are divided into groups that are the same in all generations: by vnode, which has all streams of a
token range, otherwise by the id of the stream.

A position is ``<generation>:<time>``, both in milliseconds and padded so that texts sort like
numbers. All changes before that time are read, and none from it on. So a position is the end of one
window and the start of the next. Times are those of the changes.

``^<time>`` after the first position of a group says how far back the log reaches. A position is
before such a one if changes after it may have expired, not just if it is earlier.

A limit is ``until:`` and a position. ``,<n>`` after it ends a range after the window with about n
changes. The end of a log is a limit that follows the clock. It is before no position, because a
clock that was set back deletes nothing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from tidelog.connectors.scylla.session import ScyllaAddress, ScyllaSession
from tidelog.errors import InvalidError, NotFoundError

__all__ = [
    "ChangePosition",
    "Generations",
    "Streams",
    "group_of",
    "is_before",
    "queries_of",
]

_STREAMS_AT_ONCE = 32  # in one statement; Scylla allows 100
_STATEMENTS_MIN = 4  # of a group: the next one runs while the rows of one are used
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the driver's times are UTC and do not say so
_MILLISECOND = timedelta(milliseconds=1)
_VERSION_BITS = 4
_VNODE_BITS = 22

Streams = tuple[tuple[bytes, ...], ...]  # of one group: the streams of each statement


class _Shape(Protocol):
    """How a cluster publishes its generations."""

    @property
    def by_vnode(self) -> bool:
        """Returns whether streams are grouped by vnode."""
        ...

    def times(self) -> list[int]:
        """Returns when generations begin, in ms, in order."""
        ...

    def streams(self, time_ms: int) -> list[bytes]:
        """Returns the streams of a generation."""
        ...


@dataclass(frozen=True)
class _Tablets:
    session: ScyllaSession
    keyspace: str
    place: ScyllaAddress
    by_vnode: bool = False  # each stream belongs to a tablet

    def times(self) -> list[int]:
        rows = self.session.rows(
            f'SELECT "timestamp" FROM "{self.keyspace}".cdc_timestamps '  # noqa: S608 - checked
            "WHERE keyspace_name = ? AND table_name = ?",
            (self.place.keyspace, self.place.table),
        )
        return sorted(_ms(time) for (time,) in rows)

    def streams(self, time_ms: int) -> list[bytes]:
        rows = self.session.rows(
            f'SELECT stream_id FROM "{self.keyspace}".cdc_streams '  # noqa: S608 - checked
            'WHERE keyspace_name = ? AND table_name = ? AND "timestamp" = ? AND stream_state = 0',
            (self.place.keyspace, self.place.table, _datetime(time_ms)),
        )
        return [stream for (stream,) in rows]


@dataclass(frozen=True)
class _TwoTables:
    session: ScyllaSession
    keyspace: str
    by_vnode: bool = True

    def times(self) -> list[int]:
        rows = self.session.rows(
            f'SELECT "time" FROM "{self.keyspace}".cdc_generation_timestamps '  # noqa: S608
            "WHERE key = 'timestamps'"
        )
        return sorted(_ms(time) for (time,) in rows)

    def streams(self, time_ms: int) -> list[bytes]:
        rows = self.session.rows(
            f'SELECT streams FROM "{self.keyspace}".cdc_streams_descriptions_v2 '  # noqa: S608
            'WHERE "time" = ?',
            (_datetime(time_ms),),
        )
        return [stream for (some,) in rows for stream in some or ()]


@dataclass(frozen=True)
class _OneTable:
    session: ScyllaSession
    keyspace: str
    by_vnode: bool = True

    def times(self) -> list[int]:
        rows = self.session.rows(
            f'SELECT "time" FROM "{self.keyspace}".cdc_streams_descriptions'  # noqa: S608
        )
        return sorted(_ms(time) for (time,) in rows)

    def streams(self, time_ms: int) -> list[bytes]:
        rows = self.session.rows(
            f'SELECT streams FROM "{self.keyspace}".cdc_streams_descriptions '  # noqa: S608
            'WHERE "time" = ?',
            (_datetime(time_ms),),
        )
        return [stream for (some,) in rows for stream in some or ()]


class Generations:
    """The generations of a table, and the streams of each in groups."""

    def __init__(self, session: ScyllaSession, groups: int) -> None:
        self._session = session
        self._groups = groups
        self._shape: _Shape | None = None
        self._streams: dict[int, list[Streams]] = {}

    def times(self) -> list[int]:
        """Reads when they begin, in ms, in order. Raises ``NotFoundError`` if there are none."""
        if self._shape is None:
            self._shape = _shape_of(self._session)
        times = self._shape.times()
        if not times:
            raise _no_generations(self._session.place)
        return times

    def streams(self, time_ms: int, group: int) -> Streams:
        """Returns the streams of a generation in a group.

        Raises ``NotFoundError`` if it is deleted.
        """
        if time_ms not in self._streams:
            if self._shape is None:
                self._shape = _shape_of(self._session)
            found = self._shape.streams(time_ms)
            if not found:
                raise NotFoundError(
                    f"change log of `{self._session.place.label}`: the cluster has no generation "
                    f"of streams that began at {time_ms} ms: is the position from another cluster? "
                    "Start a new pipeline",
                    generation=time_ms,
                )
            self._streams[time_ms] = _group_streams(found, self._groups, self._shape.by_vnode)
        return self._streams[time_ms][group]

    def forget(self) -> None:
        """Looks up the shape of the tables again next time."""
        self._shape = None


def group_of(stream: bytes, groups: int, by_vnode: bool = True) -> int:
    """Returns the group of a stream."""
    low = int.from_bytes(stream[8:16], "big")
    if by_vnode and len(stream) == 16 and low & 0xF == 1:
        return ((low >> _VERSION_BITS) & ((1 << _VNODE_BITS) - 1)) % groups
    return zlib.crc32(stream) % groups


def queries_of(streams: Iterable[bytes]) -> Streams:
    """Groups streams for statements: those of one vnode together, up to the limit."""

    def vnode(stream: bytes) -> tuple[int, bytes]:
        return int.from_bytes(stream[8:16], "big") & (
            (1 << _VERSION_BITS + _VNODE_BITS) - 1
        ), stream

    some = sorted(streams, key=vnode)
    at_once = min(_STREAMS_AT_ONCE, -(-len(some) // _STATEMENTS_MIN) or 1)
    starts = range(0, len(some), at_once)
    return tuple(tuple(some[first : first + at_once]) for first in starts)


def _group_streams(streams: Sequence[bytes], groups: int, by_vnode: bool) -> list[Streams]:
    found: list[list[bytes]] = [[] for _ in range(groups)]
    for stream in streams:
        found[group_of(stream, groups, by_vnode)].append(stream)
    return [queries_of(each) for each in found]


def _shape_of(session: ScyllaSession) -> _Shape:
    """Returns how this cluster publishes the generations of this table."""
    place = session.place
    own = place.generations
    tablets, distributed = own or "system", own or "system_distributed"
    names = {
        keyspace: {
            table
            for (table,) in session.rows(
                "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ?", (keyspace,)
            )
        }
        for keyspace in {tablets, distributed}
    }
    if {"cdc_timestamps", "cdc_streams"} <= names[tablets]:
        by_tablets = _Tablets(session, tablets, place)
        if by_tablets.times():
            return by_tablets
    if {"cdc_generation_timestamps", "cdc_streams_descriptions_v2"} <= names[distributed]:
        return _TwoTables(session, distributed)
    if "cdc_streams_descriptions" in names[distributed]:
        return _OneTable(session, distributed)
    raise _no_generations(place)


def _no_generations(place: ScyllaAddress) -> NotFoundError:
    return NotFoundError(
        f"change log of `{place.label}`: the cluster lists no generations of streams"
        f"{f' in keyspace {place.generations}' if place.generations else ''}: is it Scylla, with "
        "change data capture on?"
    )


def _ms(time: Any) -> int:
    return int((time.replace(tzinfo=None) - _EPOCH) // _MILLISECOND)


def _datetime(time_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC).replace(tzinfo=None) + timedelta(milliseconds=time_ms)


_DIGITS = 15
_PLACE = re.compile(r"(until:)?(\d{15}):(\d{15})(?:\^(\d{15}))?(?:,(\d{1,15}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ChangePosition:
    """Where reading resumes, or where it ends."""

    generation_ms: int
    time_ms: int
    held_ms: int | None = None  # changes before this have expired
    events: int | None = None  # of a limit
    is_limit: bool = False

    @property
    def text(self) -> str:
        held = "" if self.held_ms is None else f"^{self.held_ms:0{_DIGITS}}"
        events = "" if self.events is None else f",{self.events}"
        until = "until:" if self.is_limit else ""
        return f"{until}{self.generation_ms:0{_DIGITS}}:{self.time_ms:0{_DIGITS}}{held}{events}"

    @property
    def order(self) -> tuple[int, int]:
        """Returns a key that rises along a change log."""
        return self.time_ms, self.generation_ms

    @property
    def plain(self) -> ChangePosition:
        """Returns only the place."""
        return ChangePosition(self.generation_ms, self.time_ms)

    def held(self, held_ms: int) -> ChangePosition:
        """Returns the same as a first position, with how far back the log reaches."""
        return ChangePosition(self.generation_ms, self.time_ms, held_ms)

    def limit(self, events: int | None = None) -> ChangePosition:
        """Returns the same as a limit, optionally after this many events."""
        return ChangePosition(self.generation_ms, self.time_ms, events=events, is_limit=True)

    @classmethod
    def parse(cls, text: str) -> ChangePosition:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise InvalidError(
                f"position `{text}`: is none of a change log: give <generation>:<time>, each in "
                f"{_DIGITS} digits of milliseconds"
            )
        held, events = (None if part is None else int(part) for part in match.group(4, 5))
        return cls(int(match[2]), int(match[3]), held, events, match[1] is not None)


def is_before(one: str, other: str) -> bool:
    """Returns whether a position is strictly before another one of the same log."""
    here, there = ChangePosition.parse(one), ChangePosition.parse(other)
    if there.held_ms is not None:
        return here.time_ms < there.held_ms
    if here.is_limit and not there.is_limit:
        return False
    return here.order < there.order
