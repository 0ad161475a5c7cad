"""Lists the journals and runs of a topic, and where they are, for readers without Tidelog.

A journal is a Parquet object. A run is a piece of an Arrow file: the bytes of ``schema`` followed
by those of its own range are an Arrow stream. Each entry lists the offsets that were amended since,
so that a reader ignores deleted events and old values. A compile applies them. :func:`read_journal`
is such a reader: it needs an entry with a URL, and neither a home nor credentials.

:func:`covering` yields the rows that cover a partition from its start to its end.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import crc32c
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.catalog.base import Row
from tidelog.catalog.update import read_stable
from tidelog.codec.event_batch import events_of
from tidelog.codec.segment import SCHEMA_RANGE
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.partition_reader import Reader
from tidelog.log.status import read_heads
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.decoding import decode_json
from tidelog.model.event import Event, to_iso
from tidelog.model.playback import TimeRange
from tidelog.model.topic import Amendment, Head, Run, Topic, decode_row

__all__ = [
    "JournalEntry",
    "MovedError",
    "UpdatedValue",
    "amendments_waiting",
    "covering",
    "fetch_url",
    "is_settled",
    "list_journals",
    "read_journal",
    "read_row",
]

_TIMEOUT_S = 60.0  # without a byte, of a URL


class UpdatedValue(msgspec.Struct, frozen=True):
    """The new value of an event: itself, or an object that is the value."""

    offset: int
    value: bytes | None
    url: str | None = None


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A journal or a run of a topic, with what a reader needs."""

    topic: str
    partition: int
    base: int  # the first offset
    end: int  # the offset after the last
    start: int  # ignore lower offsets: they were trimmed, or listed before
    events: int
    first: str  # earliest and latest event time
    last: str
    format: str  # parquet or arrow
    object: str
    byte_start: int
    byte_end: int
    crc32c: int  # of these bytes
    schema: tuple[int, int] | None  # bytes of the object to put first; None for Parquet
    deleted: tuple[int, ...]  # offsets to ignore
    updated: tuple[int, ...]  # offsets that have another value now
    values: tuple[UpdatedValue, ...] = ()  # these values, if URLs were asked for
    url: str | None = None


def list_journals(
    context: Context,
    topic: Topic,
    times: TimeRange | None = None,
    begin: tuple[int, int] = (0, 0),
    expires_s: int | None = None,
) -> Iterator[JournalEntry]:
    """Yields those that hold events of a range of times, by partition and offset, as they are now.

    Starts at the partition and offset ``begin``. With ``expires_s``, each has a URL that anyone can
    use for that long. Lazy.
    """
    for partition in range(begin[0], topic.partitions):
        head, _ = read_head(context, topic, partition)
        at = max(head.start, begin[1] if partition == begin[0] else 0)
        while at < head.next:
            at, runs, amended = _page(context, topic, partition, at)
            if not runs:
                break
            for run in runs:
                if run.events and _overlaps(run, times):
                    entry = _entry(topic, partition, (run, max(at, run.base)), amended.of(run))
                    yield (
                        entry
                        if expires_s is None
                        else _signed(context, entry, run, amended, expires_s)
                    )
                at = run.end


class _AmendedOffsets:
    """Which offsets were amended, and how."""

    def __init__(self, rows: Sequence[tuple[int, Amendment]]) -> None:
        self._rows = rows  # by offset

    def of(self, run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the deleted and the updated offsets that a run does not contain yet."""
        here = self._waiting(run)
        deleted = tuple(offset for offset, each in here if each.kind == "delete")
        return deleted, tuple(offset for offset, each in here if each.kind == "update")

    def updates(self, run: Run) -> list[tuple[int, Amendment]]:
        """Returns the updates that a run does not contain yet."""
        return [each for each in self._waiting(run) if each[1].kind == "update"]

    def _waiting(self, run: Run) -> list[tuple[int, Amendment]]:
        applied = 0 if run.journal is None else run.journal.applied
        first, last = (
            bisect_left(self._rows, at, key=lambda row: row[0]) for at in (run.base, run.end)
        )
        return [each for each in self._rows[first:last] if each[1].sequence > applied]


def _page(
    context: Context, topic: Topic, partition: int, at: int
) -> tuple[int, list[Run], _AmendedOffsets]:
    """Returns some runs and their amendments, read without a swap or a trim in between.

    A trim deletes amendments with their runs. Returns the first offset too, which may be trimmed
    to.
    """
    where = layout.topic_partition(topic.incarnation, partition)

    def read() -> tuple[int, list[Run], _AmendedOffsets] | None:
        nonlocal at
        before, _ = read_head(context, topic, partition)
        at = max(at, before.start)
        runs = _runs_from(context, topic, partition, at)
        rows: list[tuple[int, Amendment]] = []
        if runs and before.amended is not None:
            first, end = layout.amend_row(runs[0].base), layout.amend_row(runs[-1].end)
            for row in context.catalog.scan(where, first, end):
                found = decode_row(row.value, Amendment, f"row `{row.row}` of `{topic.name}`")
                rows.append((layout.amend_offset(row.row), found))
        after, _ = read_head(context, topic, partition)
        return (at, runs, _AmendedOffsets(rows)) if _is_same(before, after, at) else None

    busy = UnavailableError(
        f"partition `{topic.name}/{partition}`: is compiled or trimmed again and again: try again"
    )
    return read_stable(context, read, busy)


def _is_same(before: Head, after: Head, at: int) -> bool:
    """Returns whether rows from an offset on, read between two heads, belong together."""
    return after.compiled == before.compiled and after.start <= at


def _runs_from(context: Context, topic: Topic, partition: int, at: int) -> list[Run]:
    """Returns some runs from an offset on; none if a trim has passed the offset just now."""
    try:
        return Reader(context, topic, partition).runs(at)
    except NotFoundError as exc:
        if "start" not in exc.context:  # the topic was deleted
            raise
        return []


def _overlaps(run: Run, times: TimeRange | None) -> bool:
    return times is None or (run.first_ms < times.end_ms and run.last_ms >= times.start_ms)


def _entry(
    topic: Topic,
    partition: int,
    part: tuple[Run, int],
    amended: tuple[tuple[int, ...], tuple[int, ...]],
) -> JournalEntry:
    run, start = part
    is_piece = run.journal is None
    return JournalEntry(
        topic=topic.name,
        partition=partition,
        base=run.base,
        end=run.end,
        start=start,
        events=run.events,
        first=to_iso(run.first_ms),
        last=to_iso(run.last_ms),
        format="arrow" if is_piece else "parquet",
        object=run.object,
        byte_start=run.byte_start,
        byte_end=run.byte_end,
        crc32c=run.crc,
        schema=SCHEMA_RANGE if is_piece else None,
        deleted=amended[0],
        updated=amended[1],
    )


def _signed(
    context: Context, entry: JournalEntry, run: Run, amended: _AmendedOffsets, expires_s: int
) -> JournalEntry:
    """Returns an entry with all that a reader without a home needs, for a while."""
    presign = context.store.presign
    values = tuple(
        UpdatedValue(
            offset, each.value, None if each.object is None else presign(each.object, expires_s)
        )
        for offset, each in amended.updates(run)
    )
    return msgspec.structs.replace(entry, values=values, url=presign(run.object, expires_s))


def read_journal(entry: JournalEntry | Mapping[str, object]) -> Iterator[Event]:
    """Yields the events of a journal or run that was listed with URLs, in order of offsets.

    Deleted and trimmed events are left out, and updated ones have their new value, all as it was
    when the entry was listed. The entry may be the JSON object that ``tidelog journals --json`` or
    the HTTP API gives. Needs no home and no credentials. Raises ``NotFoundError`` if a URL has
    expired or its object is gone, ``UnavailableError`` if it cannot be reached, ``CorruptError``,
    and ``InvalidError`` for an entry without a URL.

    >>> [entry] = home.journals("orders", presign="1h")
    >>> [event.id for event in tidelog.read_journal(entry)]
    ['order-1', 'order-2', 'order-3']
    """
    found = _decoded(entry)
    what = f"journal `{found.topic}/{found.partition}/{found.base}`"
    if found.url is None:
        raise InvalidError(f"{what}: has no URL: list it with presign")
    values = {each.offset: each for each in found.values}
    unknown = set(found.updated) - set(values)
    if unknown:
        raise InvalidError(f"{what}: lacks the new value of offset {min(unknown)}: list it again")
    gone = set(found.deleted)
    for event in _events(found, what):
        offset = event.offset or 0
        if offset < found.start or offset in gone:
            continue
        if offset in values:
            new = values[offset]
            value = new.value if new.url is None else fetch_url(new.url, what)
            yield msgspec.structs.replace(event, value=value)
        else:
            yield event


def _decoded(entry: JournalEntry | Mapping[str, object]) -> JournalEntry:
    if isinstance(entry, JournalEntry):
        return entry
    try:
        return decode_json(msgspec.json.encode(entry), JournalEntry)
    except (msgspec.MsgspecError, TypeError) as exc:
        raise InvalidError(f"journal: {exc}: give an entry of `tidelog journals --json`") from exc


def _events(entry: JournalEntry, what: str) -> Iterator[Event]:
    data = fetch_url(entry.url or "", what, entry.byte_start, entry.byte_end)
    if len(data) != entry.byte_end - entry.byte_start or crc32c.crc32c(data) != entry.crc32c:
        raise CorruptError(f"{what}: its bytes do not fit their checksum: list it again")
    try:
        if entry.schema is None:
            table = pq.read_table(pa.BufferReader(data))
        else:
            front = fetch_url(entry.url or "", what, *entry.schema)
            table = pa.ipc.open_stream(pa.BufferReader(front + data)).read_all()
    except (pa.ArrowInvalid, OSError, EOFError) as exc:
        raise CorruptError(f"{what}: does not decode ({exc}): list it again") from exc
    at = entry.base
    for batch in table.to_batches():
        has_offsets = "offset" in batch.schema.names
        offsets = batch.column("offset").to_numpy() if has_offsets else at
        yield from events_of(batch, entry.topic, entry.partition, offsets)
        at += batch.num_rows


def fetch_url(url: str, what: str, start: int = 0, end: int | None = None) -> bytes:
    """Returns the bytes ``[start, end)`` of what a URL leads to: http(s), file or data."""
    if url.partition(":")[0] not in ("http", "https", "file", "data"):
        raise InvalidError(f"{what}: its URL is of another kind than http, https, file or data")
    headers = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the same
            data: bytes = answer.read()
            is_part = getattr(answer, "status", None) == 206
    except urllib.error.HTTPError as exc:
        exc.close()
        said = f"{what}: its URL answers {exc.code} {exc.reason}"
        if exc.code in (429, 500, 502, 503, 504):
            raise UnavailableError(f"{said}: try again") from exc
        raise NotFoundError(f"{said}: it has expired, or is gone: list it again") from exc
    except (OSError, http.client.HTTPException) as exc:
        if isinstance(getattr(exc, "reason", exc), FileNotFoundError):
            raise NotFoundError(f"{what}: its object is gone: list it again") from exc
        raise UnavailableError(f"{what}: no answer ({exc}): try again") from exc
    return data if is_part else data[start:end]


def amendments_waiting(context: Context, topic: Topic) -> int:
    """Returns how many updates and deletes no journal has; 0 for a topic that was deleted."""
    try:
        heads = read_heads(context, topic)
        if all(head.amended is None for head in heads):
            return 0
        found = list_journals(context, topic)
        return sum(len(each.deleted) + len(each.updated) for each in found)
    except NotFoundError:
        return 0


class MovedError(CorruptError):
    """Rows were swapped or trimmed since the head was read: read it again and start over."""

    kind = "moved"


def covering(
    context: Context,
    topic: Topic,
    partition: int,
    head: Head,
    bounds: tuple[int, int] | None = None,
) -> Iterator[Run]:
    """Yields the journals and runs that hold some offsets, in order and without a gap.

    By default those of all readable offsets. Raises ``MovedError`` if they have changed since the
    head was read.
    """
    at, end = bounds or (0, head.next)
    at, end = max(at, head.start), min(end, head.next)
    for kind, until in (("journal", min(end, head.journaled)), ("run", end)):
        if at >= until:
            continue
        for row in _rows(context, topic, partition, kind, (at, until)):
            run = decode_row(row.value, Run, f"row `{row.row}` of `{topic.name}/{partition}`")
            if run.base > at or run.end <= at:
                break
            at = run.end
            yield run
        if at < until:
            raise _moved_error(topic, partition, at)


def read_row(context: Context, topic: Topic, partition: int, head: Head, base: int) -> Run:
    """Returns the journal or run that begins at an offset. Raises ``MovedError`` if it is gone."""
    where = layout.topic_partition(topic.incarnation, partition)
    name = layout.journal_row(base) if base < head.journaled else layout.run_row(base)
    row = context.catalog.get(where, name)
    if row is None:
        raise _moved_error(topic, partition, base)
    return decode_row(row.value, Run, f"row `{name}` of `{topic.name}/{partition}`")


def is_settled(context: Context, topic: Topic, partition: int, seen: Head, first: int) -> bool:
    """Returns whether nothing was compiled, or trimmed from an offset on, since a head was read.

    If so, every amendment of these offsets still has its row.
    """
    head, _ = read_head(context, topic, partition)
    return head.compiled == seen.compiled and head.start <= max(seen.start, first)


def _rows(
    context: Context, topic: Topic, partition: int, kind: str, bounds: tuple[int, int]
) -> Iterator[Row]:
    """Yields the rows of one kind, from the one that holds the first offset on."""
    where = layout.topic_partition(topic.incarnation, partition)
    named = layout.journal_row if kind == "journal" else layout.run_row
    first, end = named(bounds[0]), named(bounds[1])
    for row in context.catalog.scan(where, f"{kind}/", named(bounds[0] + 1), 1, reverse=True):
        first = row.row
    return context.catalog.scan(where, first, end)


def _moved_error(topic: Topic, partition: int, offset: int) -> MovedError:
    return MovedError(
        f"partition `{topic.name}/{partition}`: no row holds offset {offset}: keep the catalog, "
        "and run `tidelog verify`"
    )
