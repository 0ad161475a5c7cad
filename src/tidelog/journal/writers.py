"""The named writers of a topic, which send again what a restored catalog has forgotten of them."""

from __future__ import annotations

from collections.abc import Collection

from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.producers import pipeline_of, writer_name, writer_words
from tidelog.model.run import decode_row
from tidelog.model.topic import Topic

__all__ = ["any_writer", "in_words"]


def any_writer(log: Log, topic: Topic, partition: int) -> str:
    """A named writer that has a row in a partition; an empty text if there is none."""
    where = layout.topic_partition(topic.incarnation, partition)
    rows = log.catalog.scan(where, *layout.producer_rows())
    return next((name for row in rows if (name := writer_name(layout.producer_of(row.row)))), "")


def in_words(log: Log, writers: Collection[str]) -> list[str]:
    """Names writers as users know them; a pump or restore by its name, if its row is there."""
    pipelines = {pipeline for writer in writers if (pipeline := pipeline_of(writer))}
    names: dict[str, str] = {}
    for row in log.catalog.scan(layout.REGISTRY, *layout.pipeline_rows()) if pipelines else ():
        found = decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
        names[found.incarnation] = found.name
    told = set()
    for writer in writers:
        pipeline = pipeline_of(writer)
        if pipeline is None:
            told.add(writer_words(writer))
        elif pipeline in names:
            told.add(f"pump or restore `{names[pipeline]}`")
        else:
            told.add("a pump or restore that the catalog does not know")
    return sorted(told)
