"""Where a playback puts its events: topics, files, standard output, HTTP, Kafka, Kinesis, nowhere.

Events come in lots, by time, and a lot is out of our hands when ``put`` returns. Ids, keys, types,
times and headers stay as they are. A lot bears the number of its first event, and is put again,
with the same number, by whoever resumes a playback that died with it. Events of it may have been
deleted or updated meanwhile, so nothing counts events inside of a lot: what a sink takes by one
transaction, or one request, is a lot of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from tidelog.clock import Clock, SystemClock, system_random
from tidelog.codec.event_json import batch_lines
from tidelog.codec.sizes import slices
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.address import Address, nearest, parse_address
from tidelog.model.backoff import Backoff
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.playback import Cursor, PlaybackPin, PlaybackState

__all__ = [
    "PIECE_BYTES",
    "PIECE_EVENTS",
    "PLAYBACK_SCHEMES",
    "Lot",
    "NullSink",
    "PlaybackSink",
    "SinkContext",
    "StreamSink",
    "check_playback_sink",
    "lot_pieces",
    "lots_of",
    "open_playback_sink",
    "remade",
]

PLAYBACK_SCHEMES = ("topic", "file", "stdout", "http", "https", "kafka", "kinesis", "null")
PIECE_BYTES = 1 << 20  # of a lot that is turned into text at once
PIECE_EVENTS = 1_000


@dataclass(frozen=True, slots=True)
class Lot:
    """Events that are put together, in event columns, by time; never empty."""

    number: int  # of its first event in this playback
    batch: pa.RecordBatch
    intended: int | None = None  # the end that was intended for it; events may be gone since

    @property
    def end(self) -> int:
        """The number after its last event's."""
        return self.number + int(self.batch.num_rows) if self.intended is None else self.intended

    @property
    def last(self) -> Cursor:
        """The place of its last event."""
        row = self.batch.num_rows - 1
        time_ms = self.batch.column("timestamp").cast(pa.int64())[row].as_py()
        places = (self.batch.column(name)[row].as_py() for name in ("partition", "offset"))
        return Cursor(time_ms, *places)


class PlaybackSink(Protocol):
    """One place, opened for one playback."""

    @property
    def lot_events(self) -> int:
        """How many events a lot may have: what comes again after a crash, at worst."""
        ...

    @property
    def lot_bytes(self) -> int | None:
        """How many bytes a lot may have, unless it is one event; None: any number."""
        ...

    def put(self, lot: Lot) -> int | None:
        """Put a lot after those before it; on return it is there, or handed over for good.

        How many of its events were left out, since they were erased from the target.
        """
        ...

    def reached(self) -> int:
        """How long a file is, so that whoever resumes can cut it there; 0 for others."""
        ...

    def close(self, failed: bool = False) -> None:
        """Finish; after a failure what is unfinished is left out. Twice is fine."""
        ...


class NamedState(Protocol):
    """What a sink needs to know of a playback with a name."""

    label: str
    state: PlaybackState


@dataclass(frozen=True)
class SinkContext:
    """What a sink may need of the process it is opened in, and whose it is."""

    environ: Mapping[str, str]
    id: str  # of the playback; the same when it is resumed
    name: str | None = None  # of one that can be resumed
    target: str = ""  # incarnation of the topic that it began to play into; empty: any
    resumed: bool = False  # a process before has intended a lot
    reached: int = 0  # how long its file was then
    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=system_random)
    backoff: Backoff = field(default_factory=Backoff)
    context: Context | None = None  # of the home whose topics ``topic:`` names

    @classmethod
    def of(cls, context: Context, environ: Mapping[str, str], id: str) -> SinkContext:
        """That of this process, for a playback without a name."""
        return cls(
            environ=environ,
            id=id,
            clock=context.clock,
            random=context.random,
            backoff=context.backoff,
            context=context,
        )

    @classmethod
    def of_named(
        cls, context: Context, environ: Mapping[str, str], named: NamedState, pinned: PlaybackPin
    ) -> SinkContext:
        """That of this process, for a playback with a name that it has taken."""
        state = named.state
        return replace(
            cls.of(context, environ, f"{pinned.pin.incarnation}-{named.label}"),
            name=named.label,
            target=pinned.target,
            resumed=state.until is not None or state.cursor is not None,
            reached=state.reached,
        )


class NullSink:
    """Takes everything and keeps nothing, to measure what comes before."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def put(self, lot: Lot) -> None:
        """Forget it."""

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Nothing to release."""


class StreamSink:
    """JSON lines into an open stream, flushed with each lot."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def put(self, lot: Lot) -> None:
        for piece in lot_pieces(lot.batch):
            left = memoryview(batch_lines(piece))
            while left:  # unbuffered, one write may take a part only
                left = left[self._stream.write(left) :]
        self._stream.flush()

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """The stream is somebody else's."""


def lots_of(batch: pa.RecordBatch, sink: PlaybackSink) -> Iterator[pa.RecordBatch]:
    """Returns a batch in parts that a sink takes as one lot each; without a copy."""
    if sink.lot_bytes is not None:
        yield from slices(batch, sink.lot_bytes, sink.lot_events)
        return
    for first in range(0, batch.num_rows, sink.lot_events):
        yield batch.slice(first, sink.lot_events)


def lot_pieces(batch: pa.RecordBatch, events: int = PIECE_EVENTS) -> Iterator[pa.RecordBatch]:
    """Returns a batch in pieces that are small enough to be text; the same ones for the same batch.

    Only a single event is more than a piece. JSON writes a byte with six characters at most, so
    the text of a piece stays below the 8 MiB that a server of Tidelog accepts.
    """
    return slices(batch, PIECE_BYTES, events)


def check_playback_sink(url: str, *, named: bool) -> Address:
    """Refuse an address that names no sink, without opening it. ``InvalidError``."""
    address = parse_address(url)
    if address.scheme not in PLAYBACK_SCHEMES:
        raise InvalidError(
            f"sink `{url}`: unknown scheme `{address.scheme}`"
            f"{nearest(address.scheme, PLAYBACK_SCHEMES)}: "
            f"give one of {', '.join(PLAYBACK_SCHEMES)}"
        )
    if address.scheme in ("null", "stdout"):
        address.take_options(())
        if address.path or address.host:
            raise InvalidError(f"sink `{url}`: give {address.scheme}: and nothing else")
    if address.scheme == "file":
        from tidelog.connectors.files.playback_sink import check_file

        check_file(address, named=named)
    if address.scheme in ("http", "https"):
        from tidelog.connectors.http.playback_sink import check_http

        check_http(address)
    return address


def open_playback_sink(url: str, setting: SinkContext) -> PlaybackSink:
    """The sink that a URL names; its target must be there. ``NotFoundError``."""
    address = check_playback_sink(url, named=setting.name is not None)
    if address.scheme == "null":
        return NullSink()
    if address.scheme == "stdout":
        return StreamSink(sys.stdout.buffer)
    opener: Any
    if address.scheme == "file":
        from tidelog.connectors.files.playback_sink import open_file as opener
    elif address.scheme == "topic":
        from tidelog.connectors.topic.playback_sink import open_topic as opener
    elif address.scheme in ("http", "https"):
        from tidelog.connectors.http.playback_sink import open_http as opener
    elif address.scheme == "kafka":
        opener = _installed("kafka", "confluent_kafka", "kafka")
    else:
        opener = _installed("kinesis", "boto", "aws")
    sink: PlaybackSink = opener(address, setting)
    return sink


def remade(name: str, role: str) -> InvalidError:
    """The error of a playback whose topic, or the one that it plays into, is another one by now."""
    return InvalidError(
        f"playback `{name}`: its {role} was deleted and made again since it began: "
        "begin another one, under another name"
    )


def _installed(kind: str, package: str, extra: str) -> Any:
    """How to open a sink whose client is an extra."""
    try:
        if kind == "kafka":
            from tidelog.connectors.kafka.playback_sink import open_kafka

            return open_kafka
        from tidelog.connectors.kinesis.playback_sink import open_kinesis
    except ModuleNotFoundError as exc:
        if exc.name and exc.name.startswith(package):
            text = f"{kind} sink is not installed: pip install 'tidelog[{extra}]'"
            raise InvalidError(text) from exc
        raise
    return open_kinesis


_: tuple[type[PlaybackSink], type[PlaybackSink]] = (NullSink, StreamSink)
