"""Lists names that people chose and that have an erased id or key in them.

A device or a customer may have a producer, a consumer or an archive of its own, with its id or key
as the name. Such a name is in rows, and some are in objects and their paths. No erasure changes it,
since what has the name still works under it. So a proof lists these names as out of its reach, with
what ends them. It shows ``[erased]`` in place of the id or key, as in reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.archive.archive import removed_archives
from tidelog.archive.erased_events import Deletions
from tidelog.catalog.base import prefix_end
from tidelog.context import Context
from tidelog.coordination.audit import ACTIONS_KEPT_MS, Action, read_actions
from tidelog.coordination.pipeline_rows import list_archives, list_pipelines
from tidelog.coordination.tokens import list_tokens
from tidelog.erasure.redaction import Words
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.topic import UNNAMED, Topic

__all__ = ["chosen_names"]

_PRODUCER = "rows keep it until the topic is deleted, and segments until they are compiled"
_CONSUMER = "rows keep it until the topic is deleted, also after `tidelog consumer delete`"
_QUERY = "rows keep it, and paths of what the query staged"
_TOPIC = "rows and the home's audit keep it; `tidelog topic delete` deletes the topic"
_ARCHIVE = (
    "rows, paths of its files and the home's audit keep it; `tidelog archive delete` ends the "
    "archive, and with `--delete-files` removes the paths"
)
_REMOVED = "a row and the home's audit keep it"
_PIPELINE = (
    "rows and the home's audit keep it; `tidelog pipeline delete` deletes the pipeline and its row"
)
_PLAYBACK = "rows and the home's audit keep it; `tidelog playback --forget` deletes its rows"
_TOKEN = "a row and the home's audit keep it; `tidelog token revoke` deletes the row"  # noqa: S105
_DAYS = ACTIONS_KEPT_MS // 86_400_000


def chosen_names(context: Context, topics: Iterable[Topic], sought: Deletions) -> Iterator[str]:
    """Yields messages about such names in rows of some topics, and in the home.

    The home's audit counts too: it keeps the names of what was deleted.
    """
    words = Words(sought)
    found = [(each, "") for each in _registered(context)]
    for topic in topics:
        found += [
            (each, f" of topic `{words.replaced(topic.name)}`") for each in _rows(context, topic)
        ]
    for (kind, name, kept), where in found:
        if words.quoted(name):
            shown = f"{kind} `{words.replaced(name)}`{where}"
            yield f"{shown}: has one of them in its name: {kept}"
    records = sum(any(map(words.quoted, _names_in(each))) for each in read_actions(context))
    if records:
        counted = "1 record has" if records == 1 else f"{records:,} records have"
        yield (
            f"audit of the home: {counted} one of them in a name: a sweep deletes records after "
            f"{_DAYS} days, except those that say where events were copied to"
        )


def _rows(context: Context, topic: Topic) -> Iterator[tuple[str, str, str]]:
    """Yields kinds and names in the rows of a topic, with what keeps them."""
    for kind, names, kept in (
        ("producer", _producers(context, topic), _PRODUCER),
        ("consumer", _consumers(context, topic), _CONSUMER),
        ("Spark query", _queries(context, topic), _QUERY),
    ):
        for name in sorted(names):
            yield kind, name, kept


def _producers(context: Context, topic: Topic) -> set[str]:
    """Returns the names in rows of producers, except unnamed ones, of which there may be many."""
    first, last = layout.producer_rows()
    unnamed = layout.producer_row(UNNAMED)
    after = unnamed[:-1] + chr(ord(UNNAMED) + 1)
    return {
        layout.producer_of(row.row)
        for partition in range(topic.partitions)
        for bounds in ((first, unnamed), (after, last))
        for row in context.catalog.scan(
            layout.topic_partition(topic.incarnation, partition), *bounds
        )
    }


def _consumers(context: Context, topic: Topic) -> set[str]:
    where, prefix = layout.consumers_partition(topic.incarnation), layout.consumer_row("")
    rows = context.catalog.scan(where, prefix, prefix_end(prefix))
    return {row.row.removeprefix(prefix) for row in rows}


def _queries(context: Context, topic: Topic) -> set[str]:
    prefix = layout.sink_target_row(topic.name, "")
    rows = context.catalog.scan(layout.REGISTRY, prefix, prefix_end(prefix))
    where, own = layout.topic_partition(topic.incarnation, 0), layout.sink_row("")
    found = {row.row.removeprefix(own) for row in context.catalog.scan(where, own, prefix_end(own))}
    return found | {row.row.removeprefix(prefix) for row in rows}


def _registered(context: Context) -> Iterator[tuple[str, str, str]]:
    """Yields kinds and names in the registry, with what keeps them."""
    for topic in list_topics(context):
        yield "topic", topic.name, _TOPIC
    for archive in list_archives(context):
        yield "archive", archive.name, _ARCHIVE
    for archive in removed_archives(context):
        yield "deleted archive", archive.name, _REMOVED
    for pipeline in list_pipelines(context):
        yield "pipeline", pipeline.name, _PIPELINE
    for row in context.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        yield "playback", row.value.decode(), _PLAYBACK
    for token in list_tokens(context):
        yield f"token `{token.id}` with label", token.label, _TOKEN


def _names_in(action: Action) -> tuple[str, ...]:
    """Returns the texts of a record without a reason, which an erasure redacts."""
    note = action.with_why("").note if action.why else action.note
    return action.who, action.what, note
