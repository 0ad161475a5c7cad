# ruff: noqa: PLC0415 - one lazy import for each scheme
"""The protocols of sinks: those of pipelines, and those of playbacks.

**Pipelines.** A writer stages each range, and ``publish`` makes it visible.

**Playbacks** write to topics, files, standard output, HTTP, Kafka, Kinesis, or nothing. Events
arrive in lots, ordered by time. When ``put`` returns, the sink has the lot for good. Ids, keys,
types, times and headers do not change. A lot carries the number of its first event. A process that
resumes a playback puts the unfinished lot again, with the same number.

Between the two attempts, events of the lot may be deleted or updated. So no sink counts events
within a lot: each transaction or request carries exactly one lot.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pyarrow as pa

from tidelog.clock import Clock, SystemClock, system_random
from tidelog.codec.event_json import batch_lines
from tidelog.codec.formats.batches import slices
from tidelog.codec.parsers import FolderSettings
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.address import Address, nearest, parse_address
from tidelog.model.event import Event
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.playback import Cursor, PlaybackPin, PlaybackState
from tidelog.model.times import Backoff
from tidelog.plugins import needs_extra

__all__ = [
    "PIECE_BYTES",
    "PIECE_EVENTS",
    "CopyingSink",
    "FileSink",
    "JudgingSink",
    "Lot",
    "NullSink",
    "PlaybackSink",
    "RangeWriter",
    "RecordRefusedError",
    "Sink",
    "SinkContext",
    "StreamSink",
    "TargetSink",
    "WriterResult",
    "check_playback_sink",
    "lot_pieces",
    "lots_of",
    "open_playback_sink",
    "remade",
]


@dataclass(frozen=True, slots=True)
class WriterResult:
    """What a writer staged for one range."""

    files: tuple[FileEntry, ...] = ()
    events: int = 0  # in files of data
    dead: int = 0
    left_out: int = 0  # because they were erased from the target
    first_dead: int = -1  # offset of the first dead letter that was found; -1: none
    why_dead: str = ""  # its error, which may quote it


class RecordRefusedError(InvalidError):
    """A record that is not a valid event. ``offset`` is its offset in its source partition.

    ``read`` is the number of events in the batches before its own.
    """

    kind = "refused"


class RangeWriter(Protocol):
    """Writes the events of one range, in order."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Stages events in event columns. Raises ``RecordRefusedError`` for one it cannot store."""
        ...

    def close(self) -> WriterResult:
        """Closes all files; they are durable in staging."""
        ...


class Sink(Protocol):
    """Settings of a sink; picklable. Each call opens stores in the process where it runs."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        """Returns a writer for a range of a source partition. Its files go below ``staging``."""
        ...

    def publish(self, manifest: Manifest) -> int:
        """Makes the files of a manifest visible. Idempotent, also when two drivers call it at once.

        Returns how many events were skipped because they were erased from the target in the
        meantime. Raises ``CorruptError`` if a file is neither staged nor correctly published.
        """
        ...

    def discard(self, manifest: Manifest) -> None:
        """Deletes the staged files after the commit. Idempotent."""
        ...


@runtime_checkable
class FileSink(Protocol):
    """A sink of files, which it can set aside, where readers do not list them."""

    def published(self, manifest: Manifest) -> list[FileEntry]:
        """Returns the files of a manifest that have their final names and the right bytes."""
        ...

    def with_suffix(self, suffix: str) -> Sink:
        """Returns the same sink with a further part in the names of its files."""
        ...

    def aside(self, file: FileEntry, name: str) -> str:
        """Returns where to set aside a file of the range with this name."""
        ...

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        """Moves files there. Idempotent, also if another process already moved them."""
        ...

    def folders(self) -> FolderSettings:
        """Returns how the folders of its files are named."""
        ...

    def folder(self, file: FileEntry) -> str:
        """Returns the folder of a file, below the folder of its generation."""
        ...

    def has_success(self, folder: str) -> bool:
        """Returns whether a folder has a marker that declares it complete."""
        ...


@runtime_checkable
class JudgingSink(Protocol):
    """A sink that refuses a range after all of it was staged."""

    def judge(self, partition: str, staged: WriterResult) -> None:
        """Raises ``InvalidError`` if this may not be published as a range of a source partition."""
        ...


@runtime_checkable
class CopyingSink(Protocol):
    """A sink that stages files of another generation by copies on the server."""

    def copy(self, files: Sequence[FileEntry], staging: str) -> tuple[FileEntry, ...]:
        """Copies each file from its ``staged`` key to one below ``staging``; returns the copies.

        Raises ``NotFoundError`` or ``CorruptError`` for a file that is missing or has another size.
        """
        ...


class TargetSink(Sink, Protocol):
    """A sink with a URL: a topic, or a stream of another system."""

    @property
    def url(self) -> str:
        """Returns the address that opens this sink again; never contains a secret."""
        ...

    @property
    def incarnation(self) -> str:
        """Returns the id of the target; it changes if the target is deleted and created again."""
        ...

    def check(self, partitions: Sequence[str]) -> None:
        """Raises ``InvalidError`` if the target has no place for events of these partitions."""
        ...


PLAYBACK_SCHEMES = ("topic", "file", "stdout", "http", "https", "kafka", "kinesis", "null")
PIECE_BYTES = 1 << 20  # the most of a lot that becomes text in one step
PIECE_EVENTS = 1_000


@dataclass(frozen=True, slots=True)
class Lot:
    """Events that a sink stores together, in event columns, ordered by time; never empty."""

    number: int  # number of its first event in this playback
    batch: pa.RecordBatch
    intended: int | None = None  # its end as first planned; some events may be deleted since then

    @property
    def end(self) -> int:
        """Returns the number after that of its last event."""
        return self.number + int(self.batch.num_rows) if self.intended is None else self.intended

    @property
    def last(self) -> Cursor:
        """Returns the position of its last event."""
        row = self.batch.num_rows - 1
        time_ms = self.batch.column("timestamp").cast(pa.int64())[row].as_py()
        places = (self.batch.column(name)[row].as_py() for name in ("partition", "offset"))
        return Cursor(time_ms, *places)


class PlaybackSink(Protocol):
    """A target, opened for one playback."""

    @property
    def lot_events(self) -> int:
        """Returns the most events a lot may have, which is the most that a crash can repeat."""
        ...

    @property
    def lot_bytes(self) -> int | None:
        """Returns the most bytes a lot of several events may have; None for no limit."""
        ...

    def put(self, lot: Lot) -> int | None:
        """Stores a lot after the lots before it. On return the target has it for good.

        Returns how many of its events were skipped because they were erased from the target.
        """
        ...

    def reached(self) -> int:
        """Returns the length of a file, where a resumed playback truncates it; 0 for others."""
        ...

    def close(self, failed: bool = False) -> None:
        """Finishes. After a failure, drops what is unfinished. A second call does nothing."""
        ...


class ForwardSink(PlaybackSink, Protocol):
    """A target to which events are forwarded as they come."""

    def check(self, event: Event, now_ms: int) -> None:
        """Raises ``InvalidError`` for an event that the target is known to refuse. Sends nothing.

        Any thread may call it.
        """
        ...


class NamedState(Protocol):
    """What a sink needs to know about a playback with a name."""

    label: str
    state: PlaybackState


@dataclass(frozen=True)
class SinkContext:
    """What a sink needs from its process and its playback."""

    environ: Mapping[str, str]
    id: str  # of the playback; stays the same when it is resumed
    name: str | None = None  # set for a playback that can be resumed
    target: str = ""  # incarnation of the topic it first played into; empty: any
    resumed: bool = False  # an earlier process planned a lot
    in_doubt: bool = False  # the last lot that it planned may be out, or not
    reached: int = 0  # how long the file was at that time
    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=system_random)
    backoff: Backoff = field(default_factory=Backoff)
    context: Context | None = None  # of the home that ``topic:`` refers to
    is_brief: bool = False  # a caller waits for each put: raise soon if the target is away

    @classmethod
    def of(cls, context: Context, environ: Mapping[str, str], id: str) -> SinkContext:
        """Returns the context of this process for a playback without a name."""
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
        """Returns the context of this process for a named playback that it owns."""
        state = named.state
        return replace(
            cls.of(context, environ, f"{pinned.pin.incarnation}-{named.label}"),
            name=named.label,
            target=pinned.target,
            resumed=state.until is not None or state.cursor is not None,
            in_doubt=state.until is not None,
            reached=state.reached,
        )


class NullSink:
    """Discards every event, to measure what happens before the sink."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def put(self, lot: Lot) -> None:
        """Discards the lot."""

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Does nothing: there is nothing to release."""


class StreamSink:
    """Writes JSON lines to an open stream, and flushes it after each lot."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def put(self, lot: Lot) -> None:
        for piece in lot_pieces(lot.batch):
            left = memoryview(batch_lines(piece))
            while left:  # an unbuffered write may be partial
                left = left[self._stream.write(left) :]
        self._stream.flush()

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Does nothing: the caller owns the stream."""


def lots_of(batch: pa.RecordBatch, sink: PlaybackSink) -> Iterator[pa.RecordBatch]:
    """Yields slices of a batch that the sink can store as one lot each, without a copy."""
    if sink.lot_bytes is not None:
        yield from slices(batch, sink.lot_bytes, sink.lot_events)
        return
    for first in range(0, batch.num_rows, sink.lot_events):
        yield batch.slice(first, sink.lot_events)


def lot_pieces(batch: pa.RecordBatch, events: int = PIECE_EVENTS) -> Iterator[pa.RecordBatch]:
    """Yields slices of a batch small enough to become text; the same ones for the same batch.

    Only a single event can exceed the size. JSON needs at most six characters for a byte, so the
    text of a slice stays below the 8 MiB that a Tidelog server accepts.
    """
    return slices(batch, PIECE_BYTES, events)


def check_playback_sink(url: str, *, named: bool) -> Address:
    """Raises ``InvalidError`` if the URL is not a valid sink. Does not open it."""
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
        from tidelog.connectors.http import check_http

        check_http(address)
    return address


def open_playback_sink(url: str, setting: SinkContext) -> PlaybackSink:
    """Opens the sink at a URL. Raises ``NotFoundError`` if its target does not exist."""
    address = check_playback_sink(url, named=setting.name is not None)
    if address.scheme == "null":
        return NullSink()
    if address.scheme == "stdout":
        return StreamSink(sys.stdout.buffer)
    opener: Any
    if address.scheme == "file":
        from tidelog.connectors.files.playback_sink import open_file as opener
    elif address.scheme == "topic":
        from tidelog.connectors.topic.sink import open_topic_playback as opener
    elif address.scheme in ("http", "https"):
        from tidelog.connectors.http import open_http as opener
    elif address.scheme == "kafka":
        opener = _optional_opener("kafka", "confluent_kafka", "kafka")
    else:
        opener = _optional_opener("kinesis", "boto", "aws")
    sink: PlaybackSink = opener(address, setting)
    return sink


def open_forward_sink(url: str, setting: SinkContext) -> ForwardSink:
    """Opens the Kafka topic or Kinesis stream at a URL. Raises ``NotFoundError``."""
    address = parse_address(url)
    package, extra = ("confluent_kafka", "kafka") if address.scheme == "kafka" else ("boto", "aws")
    sink: ForwardSink = _optional_opener(address.scheme, package, extra)(address, setting)
    return sink


def remade(name: str, role: str) -> InvalidError:
    """Returns the error for a playback whose topic or target was deleted and created again."""
    return InvalidError(
        f"playback `{name}`: its {role} was deleted and made again since it began: "
        "begin another one, under another name"
    )


def _optional_opener(kind: str, package: str, extra: str) -> Any:
    """Returns the function that opens a sink whose client is an optional package."""
    with needs_extra(f"{kind} sink", package, extra):
        if kind == "kafka":
            from tidelog.connectors.kafka.sink import open_kafka_playback

            return open_kafka_playback
        from tidelog.connectors.kinesis.sink import open_kinesis_playback
    return open_kinesis_playback


_: tuple[type[PlaybackSink], ...] = (NullSink, StreamSink)
