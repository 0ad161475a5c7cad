"""What dead writers left: staged batches of Spark, and uploads in parts.

A Spark write that was killed leaves staged segments that nothing names. A batch is deleted when all
of it is older than a day and than the grace period: a Spark job may run for hours before it
commits. The steps:

1. List what is staged; choose batches that are completely old.
2. Raise ``swept`` in the topic's ``staged`` row to the topic's generation, which the sweep has just
   raised. From here on, no batch with segments of an older generation can be decided, unless they
   are younger than half a day, so that no sweep can have chosen them.
3. Read the rows of sinks: keep a batch that is decided and not yet in the topic.
4. Delete the chosen segments of older generations, and the manifests beside them.

| crash after | what it leaves                            | repair                     |
|-------------|-------------------------------------------|----------------------------|
| 1           | no change                                 | none needed                |
| 2           | batches that can no longer commit         | Spark runs the batch again |
| 4, partly   | fewer objects                             | the next sweep             |

A driver decides a batch by a write that expects the ``staged`` row as it has read it. So either the
batch was decided before step 2, and step 3 sees it, or the driver reads that its segments may be
deleted. A write without a name has no row to decide by: it reads ``staged`` first, and fails if a
segment is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from tidelog.catalog.base import Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.codec.event_batch import Contents
from tidelog.context import Context
from tidelog.coordination.trusted_time import is_old, trusted_now_ms
from tidelog.errors import (
    InvalidError,
    NotFoundError,
    TidelogError,
)
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.topic import Topic, decode_row, encode_row
from tidelog.store.base import ObjectInfo, Store

__all__ = [
    "SinkState",
    "abort_uploads",
    "are_young",
    "is_decided",
    "left_by_sinks",
    "read_swept",
]


STAGED_MS = 24 * 3_600_000  # a younger staged batch may belong to a running job


class SinkState(Persisted, frozen=True):
    """The row of a sink: its latest batch."""

    query: str  # the Spark query; "" for batch writes
    batch: int  # the number from Spark or from the user
    ordinal: int  # how many batches were decided before it
    manifest: str  # key of the object that lists its contents
    done: bool = False  # whether all of it is in the topic
    left_out: int = 0  # events of all its batches that were erased from the topic before
    contents: Contents = Contents()  # of the batch, as its tasks got it


class SweptStaging(Persisted, frozen=True):
    """The topic's ``staged`` row."""

    swept: int = 0  # segments that were staged in a lower generation may be deleted


def read_swept(context: Context, topic: Topic) -> tuple[SweptStaging, str | None]:
    """Returns the topic's ``staged`` row and its version; None as version if there is none."""
    where = layout.topic_partition(topic.incarnation, 0)
    return _swept_of(context.catalog.get(where, layout.STAGED_ROW))


def _swept_of(row: Row | None) -> tuple[SweptStaging, str | None]:
    if row is None:
        return SweptStaging(), None
    return decode_row(row.value, SweptStaging, f"row `{row.row}`"), row.version


def are_young(context: Context, keys: Sequence[str]) -> bool:
    """Returns whether staged segments exist and are so young that no sweep can have chosen them.

    A stream may stage under a generation that it read long ago. Both ages are by the store's time.
    """
    now_ms = trusted_now_ms(context)
    try:
        return all(now_ms - context.store.head(key).modified_ms < STAGED_MS // 2 for key in keys)
    except NotFoundError:
        return False


def left_by_sinks(context: Context, topic: Topic, now_ms: int, grace_ms: int) -> list[ObjectInfo]:
    """Steps 1 to 3: returns what can be deleted, after the sweep has raised the generation."""
    chosen = list(_old_batches(context, topic, now_ms, max(grace_ms, STAGED_MS)))
    if not chosen:
        return []
    _raise_swept(context, topic)
    undone = set(_undone(context, topic))
    return [
        info
        for place, infos in chosen
        if place not in undone
        for info in infos
        if _is_below(info.key, topic.generation)
    ]


def _old_batches(
    context: Context, topic: Topic, now_ms: int, age_ms: int
) -> Iterator[tuple[tuple[str, str], list[ObjectInfo]]]:
    """Step 1: yields old objects by sink and batch."""
    staged = context.store.list(layout.sinks(topic.incarnation, "")[:-1])
    for place, found in groupby(staged, lambda info: tuple(info.key.split("/")[3:5])):
        infos = list(found)
        if all(is_old(now_ms, info.modified_ms, age_ms) for info in infos):
            yield (place[0], place[-1]), infos


def _raise_swept(context: Context, topic: Topic) -> None:
    """Step 2."""
    where = layout.topic_partition(topic.incarnation, 0)

    def decide(rows: Rows) -> Decision[None]:
        found, _ = _swept_of(rows[layout.STAGED_ROW])
        if found.swept >= topic.generation:
            return Decision(None)
        raised = encode_row(msgspec.structs.replace(found, swept=topic.generation))
        return Decision(None, [rows.put(layout.STAGED_ROW, raised)])

    update(context, where, [layout.STAGED_ROW], decide, f"topic `{topic.name}`")


def _undone(context: Context, topic: Topic) -> Iterator[tuple[str, str]]:
    """Step 3: yields the sinks and batches that are decided and not yet in the topic."""
    where = layout.topic_partition(topic.incarnation, 0)
    for row in context.catalog.scan(where, layout.sink_row(""), "sink0"):
        state = decode_row(row.value, SinkState, f"row `{row.row}`")
        if not state.done:
            yield row.row.partition("/")[2], f"{state.batch:020}"


def is_decided(context: Context, topic: Topic, key: str) -> bool:
    """Returns whether a staged object is of a batch that its sink still has to store.

    No sweep deletes such an object.
    """
    sink, batch = layout.sink_batch(key)
    where = layout.topic_partition(topic.incarnation, 0)
    row = context.catalog.get(where, layout.sink_row(sink))
    if row is None:
        return False
    state = decode_row(row.value, SinkState, f"row `{row.row}`")
    return not state.done and state.batch == batch


def _is_below(key: str, generation: int) -> bool:
    """Returns whether a segment was staged in an older generation; manifests count as older.

    False for a name that is not ours.
    """
    if key.endswith(".json"):
        return True
    try:
        return layout.sink_generation(key) < generation
    except ValueError:
        return False


def abort_uploads(store: Store, before_ms: int, unlisted: list[TidelogError]) -> int:
    """Aborts uploads that started before a time; returns how many.

    ``unlisted`` gets an error if our credentials may not list or abort uploads. Then the bucket's
    own rule aborts them, as in the template of ``deploy/aws``. No proof of an erasure is clean
    there, since parts contain events.
    """
    try:
        return store.abort_uploads(before_ms)
    except InvalidError as exc:
        unlisted.append(
            InvalidError(
                f"store `{store.url}`: uploads that did not end were not removed ({exc}): give "
                "these credentials the rights s3:ListBucketMultipartUploads and "
                "s3:AbortMultipartUpload",
                store=store.url,
            )
        )
        return 0
