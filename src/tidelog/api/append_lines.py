"""Appends the lines of a file or a pipe to a topic: ``Home.append_lines``.

Lines are read in batches (``input_lines``), parsed, checked with their numbers, stored and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, Literal, Protocol, TypedDict, Unpack

import msgspec
import pyarrow as pa

from tidelog.api.base import HomeBase
from tidelog.api.input_lines import InputLines, LinesReader
from tidelog.codec.event_json import event_of_line
from tidelog.codec.fields import CsvRows, FieldPaths, JsonLines
from tidelog.codec.numbers import bytes_array
from tidelog.errors import FailedError, InvalidError, PartialAppendError, TidelogError
from tidelog.log.producer.flush import SendFuture
from tidelog.log.topics import find_target
from tidelog.model.decoding import decode_msgpack
from tidelog.model.event import Event, Headers, check_event, check_timestamp
from tidelog.settings import check_options

__all__ = ["LineCalls", "LineCounts", "LineOptions", "line_appender"]

_LINGER_LEAST_S = 0.05  # what a pipe gives within this time travels together
_LINE_FACTOR = 8  # an event as JSON may be this many times as long as the event


@dataclass
class LineCounts:
    """What was stored so far of an input."""

    topic: str
    events: int = 0
    repeated: int = 0  # lines that a named producer had stored before
    last_line: int = 0
    seconds: float = 0.0
    read_bytes: int = 0
    unended: int | None = None  # the number of a last line that has no newline yet, under a name
    ends: dict[int, int] = field(default_factory=dict)  # partition → offset after our last event

    def stored(self) -> str:
        """Returns a text that says how many events are stored, and up to which line."""
        return self.count() + (f", up to line {self.last_line}" if self.last_line else "")

    def count(self) -> str:
        """Returns a text that says how many events are stored."""
        return f"{self.events} {'event is' if self.events == 1 else 'events are'} stored"

    def add(self, partition: int, end: int, events: int = 1) -> None:
        """Counts events of a partition that are stored before an offset."""
        self.events += events
        self.ends[partition] = max(end, self.ends.get(partition, 0))


class LineOptions(TypedDict, total=False):
    """What ``Home.append_lines`` accepts besides the topic and the input."""

    format: Literal["lines", "json", "csv", "events"]
    """lines: each line is a value. json: each is a JSON object. csv: each row becomes a JSON object
    of texts, with the names of the header. events: as printed with --json."""
    key_field: str
    id_field: str
    type_field: str
    time_field: str
    name: str | None
    if_absent: bool
    stopped: Callable[[], bool]  # called between batches
    progress: Callable[[LineCounts], None]  # called with the same counts at each step


class LineCalls(HomeBase):
    """The part of ``Home`` that appends lines."""

    def append_lines(
        self, topic: str, source: BinaryIO, **options: Unpack[LineOptions]
    ) -> LineCounts:
        """Appends the lines of a file or a pipe as events, and returns what was stored.

        ``format`` says what a line is: a value (``lines``), a JSON object (``json``), a row of CSV
        below a header, stored as a JSON object of texts (``csv``), or an event as ``tidelog consume
        --json`` prints it (``events``). ``key_field``, ``id_field``, ``type_field`` and
        ``time_field`` are paths in a JSON object, or names in the header. With a ``name`` lines are
        counted: the same input again, or a longer one, adds only what is not stored yet. With
        ``if_absent`` events are refused whose ids the topic has. Raises ``FailedError`` for an
        invalid line, with its number; the lines before it are stored.

        >>> import io
        >>> home.append_lines("orders", io.BytesIO(b"one\\ntwo\\n")).events
        2
        """
        check_options("append of lines", options, LineOptions)
        name, if_absent = options.get("name"), options.get("if_absent", False)
        parse = _parser(options)
        if if_absent and name is not None:
            raise InvalidError("append: --if-absent goes by ids, --name by lines: give one of them")
        if if_absent and parse is None:
            raise InvalidError("append: plain lines have no ids: give --format json --id-field F")
        clock = self.context.clock
        counts, progress = LineCounts(topic), options.get("progress") or _no_progress
        with line_appender(self, topic, name, parse, if_absent) as into:
            reader = LinesReader(
                source,
                clock,
                options.get("stopped", lambda: False),
                self.context.log_settings.event_bytes_max * _LINE_FACTOR,
                CsvRows() if options.get("format") == "csv" else None,
            )
            began_s = clock.monotonic_s()
            progress(counts)
            try:
                self._append_all(reader, into, counts, progress, is_named=name is not None)
            finally:
                counts.seconds = clock.monotonic_s() - began_s
                counts.unended = reader.unended
        return counts

    def _append_all(
        self,
        reader: LinesReader,
        into: LineAppender,
        counts: LineCounts,
        progress: Callable[[LineCounts], None],
        *,
        is_named: bool,
    ) -> None:
        """Stores all lines of a reader; under a name, only those that have their newline."""
        linger_s = max(_LINGER_LEAST_S, self.context.log_settings.linger_ms / 1000)
        last = 0
        try:
            for lines in reader.batches(linger_s, only_ended=is_named):
                into.store(lines, counts)
                last = lines.first + len(lines.lines) - 1
                counts.read_bytes = reader.read_bytes
                progress(counts)
            if reader.has_ended:
                into.finish(last)
        except FailedError as exc:
            if "events" in exc.context:
                raise
            more = {**exc.context, "events": counts.events}
            do = _after_bad_line(counts, reader, is_named=is_named) if "line" in more else ""
            raise FailedError(f"{exc}: {counts.stored()}{do}", **more) from exc
        except TidelogError as exc:
            if not counts.events:
                raise
            raise FailedError(f"{counts.stored()}, then: {exc}", events=counts.events) from exc


def _after_bad_line(counts: LineCounts, reader: LinesReader, *, is_named: bool) -> str:
    """Returns what to do about a line that is not valid, so that no line is stored twice."""
    if is_named:
        return ": fix the line, and produce the input again under the same name"
    if counts.last_line:
        header = "the header, and " if reader.has_header else ""
        rest = f"{header}the input from line {counts.last_line + 1} on"
        return f": fix the line, and produce {rest}"
    return ": fix the line or the options, and produce the input again"


def _no_progress(counts: LineCounts) -> None:
    """For callers that want none."""


def _parser(options: LineOptions) -> Parse | None:
    """Returns what makes events of lines; None where a line is the value as it is."""
    names = ("key_field", "id_field", "type_field", "time_field")
    fields = FieldPaths(*(str(options.get(name, "")) for name in names))
    kind = options.get("format", "lines")
    if kind not in ("lines", "json", "csv", "events"):
        raise InvalidError(f"format `{kind[:80]}`: give lines, json, csv or events")
    if fields.given() and kind not in ("json", "csv"):
        raise InvalidError(
            f"append: lines of format {kind} have no fields: give --format json or csv too"
        )
    if kind == "lines":
        return None
    return _events_of_lines if kind == "events" else JsonLines(fields).events


def _events_of_lines(lines: Sequence[bytes]) -> list[Event | InvalidError]:
    return [_event_of_line(line) for line in lines]


def _event_of_line(line: bytes) -> Event | InvalidError:
    try:
        return event_of_line(line)
    except InvalidError as exc:
        return exc


_DIGEST_BYTES = 16  # of the digest of an input's lines
_HELD_BYTES = 64 << 20  # of lines that wait in memory

Parse = Callable[[Sequence[bytes]], Sequence[Event | InvalidError]]
"""Returns for each line, none of which is blank, its event or the error why it has none."""


class LineAppender(Protocol):
    """A way to store lines."""

    def store(self, lines: InputLines, tally: LineCounts) -> None:
        """Stores all lines, in order; they are durable on return.

        ``FailedError`` for a line that cannot be taken; those before it are stored.
        """
        ...

    def finish(self, count: int) -> None:
        """Checks an input that ended after ``count`` lines. Raises ``FailedError``."""
        ...


@contextlib.contextmanager
def line_appender(
    home: LineCalls, topic: str, name: str | None, parse: Parse | None, if_absent: bool = False
) -> Iterator[LineAppender]:
    """Yields what stores lines under a name or without one; without ``parse`` a line is a value.

    With ``if_absent``, which goes without a name, events are refused whose ids are there.
    """
    find_target(home.context, topic)  # raises before any input is read
    if name is None:
        yield _BatchWriter(home, topic, parse, if_absent)
    else:
        with contextlib.closing(_NamedWriter(home, topic, name, parse)) as sent:
            yield sent


class _BatchWriter:
    """Many at a time; plain lines do not even become events one by one."""

    def __init__(self, home: LineCalls, topic: str, parse: Parse | None, if_absent: bool) -> None:
        self._home = home
        self._topic = topic
        self._parse = parse
        self._if_absent = if_absent
        self._bytes_max = home.context.log_settings.event_bytes_max

    def store(self, lines: InputLines, tally: LineCounts) -> None:
        if self._parse is None and max(map(len, lines.lines)) <= self._bytes_max:
            table = pa.table({"value": bytes_array(lines.lines)})
            self._append(table, range(lines.first, lines.first + len(lines.lines)), tally)
            return
        numbers, events, failure = _parsed(lines, self._parse, self._bytes_max)
        if events:
            self._append(events, numbers, tally)
        if failure is not None:
            raise failure

    def finish(self, count: int) -> None:
        """Checks nothing: without a name, earlier inputs are unknown."""

    def _append(self, events: Any, numbers: Sequence[int], tally: LineCounts) -> None:
        try:
            positions = self._home.append(self._topic, events, if_absent=self._if_absent)
        except PartialAppendError as exc:
            for position in filter(None, exc.positions):
                tally.add(position.partition, position.offset + 1)
            raise _broken_off(self._topic, tally, numbers, exc) from exc
        for partition in set(positions.partitions.tolist()):
            offsets = positions.offsets[positions.partitions == partition]
            tally.add(partition, int(offsets[-1]) + 1, len(offsets))
        tally.last_line = numbers[-1]


class _NamedWriter:
    """Stores lines one by one by a named producer; a line's number from 0 is its sequence.

    The mark of each line is a digest of all lines up to it, and of the keys that they give, since
    a key decides which partition knows the sequence. An input counts as the one that was stored
    before when it gives the marks that are stored. Until then none of its lines is stored: those
    that a process left out when it died wait in ``_held``.
    """

    def __init__(self, home: LineCalls, topic: str, name: str, parse: Parse | None) -> None:
        self._parse = parse
        self._bytes_max = home.context.log_settings.event_bytes_max
        self._name = name
        self._producer = home.producer(topic, name)
        self._before = self._producer.last_sequence + 1  # lines that earlier inputs had
        self._marks = self._producer.marks()
        self._digest = b""  # of all lines so far
        self._held = _WaitingLines()

    def store(self, lines: InputLines, tally: LineCounts) -> None:
        numbers, events, refused = _parsed(lines, self._parse, self._bytes_max)
        futures: list[tuple[int, SendFuture]] = []
        failure: TidelogError | None = refused
        found = dict(zip(numbers, events, strict=True))
        end = len(lines.lines) if refused is None else refused.context["line"] - lines.first
        for number, line in enumerate(lines.lines[:end], lines.first):
            event = found.get(number)
            mark = self._next_mark(number, line, event)
            waiting = self._held.take() if number == self._before else iter(())
            if event is None:  # a blank line
                pass
            elif self._producer.is_stored(number - 1, event.key):
                tally.repeated += 1
            elif number < self._before:
                self._held.add(_pending(number, mark, event))
            else:
                waiting = chain(waiting, [_pending(number, mark, event)])
            try:
                futures.extend((each.number, self._send(each)) for each in waiting)
            except TidelogError as exc:  # told once those before it are counted
                failure = exc
                break
        for number, future in futures:
            position = future.result()
            tally.add(position.partition, position.offset + 1)
            tally.last_line = number
        if failure is not None:
            raise failure

    def finish(self, count: int) -> None:
        """Refuses an input that cannot be the earlier one: its lines were taken for stored ones."""
        if count < self._before:
            raise FailedError(
                f"name `{self._name}`: the input ends after line {count}, but {self._before} lines "
                "were stored under this name: is it another file, or a new one after a rotation? "
                "give it a --name of its own",
                line=count,
            )

    def close(self) -> None:
        self._held.close()
        with contextlib.suppress(TidelogError):  # the future of each event has raised it
            self._producer.close()

    def _next_mark(self, number: int, line: bytes, event: Event | None) -> bytes:
        """Returns the mark of the next line. Raises ``FailedError`` if another one is stored."""
        key = None if event is None else event.key
        parts = msgspec.msgpack.encode((self._digest, line, key))
        self._digest = hashlib.sha256(parts).digest()[:_DIGEST_BYTES]
        if self._marks.get(number - 1, self._digest) != self._digest:
            raise FailedError(
                f"name `{self._name}`: the input's first lines, up to line {number}, are not those "
                "that were stored under this name: give this input a --name of its own, or give "
                "the same input, which may have grown, with the same options",
                line=number,
            )
        return self._digest

    def _send(self, line: _PendingLine) -> SendFuture:
        return self._producer.send(
            line.value,
            line.key,
            id=line.id,
            timestamp=line.time_ms,
            type=line.type,
            headers=line.headers,
            sequence=line.number - 1,
            mark=line.mark,
        )


class _PendingLine(msgspec.Struct, frozen=True):
    """A line that is not stored yet, with the fields of its event as a file can hold them."""

    number: int
    mark: bytes
    value: bytes | None
    key: bytes | None
    id: str | None
    time_ms: int | None
    type: str | None
    headers: Headers


def _pending(number: int, mark: bytes, event: Event) -> _PendingLine:
    time_ms = None if event.timestamp is None else check_timestamp(event.timestamp)
    fields = (event.value, event.key, event.id, time_ms, event.type, event.headers)
    return _PendingLine(number, mark, *fields)


class _WaitingLines:
    """Lines that wait, in order: in memory, or in a temporary file if there are many."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115 - see close

    def add(self, line: _PendingLine) -> None:
        data = msgspec.msgpack.encode(line)
        self._file.write(len(data).to_bytes(8, "big") + data)

    def take(self) -> Iterator[_PendingLine]:
        """Returns all lines, once."""
        self._file.seek(0)
        while size := self._file.read(8):
            yield decode_msgpack(self._file.read(int.from_bytes(size, "big")), _PendingLine)

    def close(self) -> None:
        self._file.close()


def _broken_off(
    topic: str, tally: LineCounts, numbers: Sequence[int], partial: PartialAppendError
) -> FailedError:
    """Returns the error of an append that stored a part: the first lines that may be missing."""
    said = [f"topic `{topic}`: {tally.count()}"]
    context: dict[str, Any] = {"events": tally.events}
    if partial.remainder:
        context["line"] = line = numbers[partial.remainder[0]]
        said.append(f"line {line} is the first that is not")
    if partial.unknown:
        context["unknown_line"] = line = numbers[partial.unknown[0]]
        context["unknown"] = len(partial.unknown)
        lines = "line" if len(partial.unknown) == 1 else "lines"
        said.append(f"{len(partial.unknown)} {lines} from line {line} on may be stored")
    return FailedError(f"{', '.join(said)}: {partial.__cause__}", **context)


def _parsed(
    lines: InputLines, parse: Parse | None, bytes_max: int
) -> tuple[list[int], list[Event], FailedError | None]:
    """Returns the events of lines, with the lines' numbers, up to the first bad line.

    A parser skips blank lines; without a parser every line is a value.
    """
    given = list(enumerate(lines.lines, lines.first))
    if parse is not None:
        given = [(number, line) for number, line in given if line.strip()]
    texts = [line for _, line in given]
    found = parse(texts) if parse and texts else [Event(text) for text in texts]
    numbers: list[int] = []
    events: list[Event] = []
    for (number, _), event in zip(given, found, strict=True):
        try:
            if isinstance(event, InvalidError):
                raise event
            check_event(event, bytes_max)
        except InvalidError as exc:
            failure = FailedError(f"line {number}: {exc}", line=number)
            failure.__cause__ = exc
            return numbers, events, failure
        numbers.append(number)
        events.append(event)
    return numbers, events, None
