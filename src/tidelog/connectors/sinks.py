"""Opens the sinks of pipelines by URL: topics, Kafka, Kinesis.

A sink stages the output of a range and publishes it after the pipeline recorded a manifest. Its
promise: publishing twice, or from two drivers at once, publishes once, wherever the target can
detect that. Staged files are never visible. A sink must not know sources or pipelines.

``sink`` defines the protocols. ``archive.sink`` writes the files of archives. ``topic.sink``,
``kafka.sink`` and ``kinesis.sink`` write events to a log, staged by ``topic.segments``. Other
packages add a sink through the entry point group ``tidelog.sinks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from tidelog.connectors.sink import RangeWriter, Sink, TargetSink, Written
from tidelog.context import OpenContext
from tidelog.errors import InvalidError
from tidelog.model.address import nearest, parse_address

__all__ = ["SINK_SCHEMES", "RangeWriter", "Sink", "TargetSink", "Written", "open_sink"]

SINK_SCHEMES = ("kafka", "kinesis", "topic")


def open_sink(url: str, *, environ: Mapping[str, str], open_context: OpenContext) -> TargetSink:
    """Opens the sink at a URL. Raises ``NotFoundError`` if its target does not exist.

    ``open_context`` opens the home that stages the events and that ``topic:`` refers to, in the
    process that calls it. It must pickle if the sink goes to other processes.
    """
    address = parse_address(url)
    if address.scheme == "topic":
        from tidelog.connectors.topic.sink import open_topic

        return open_topic(address, open_context)
    with open_context() as context:
        store = context.store.url
    if address.scheme == "kafka":
        try:
            from tidelog.connectors.kafka.sink import open_kafka
        except ModuleNotFoundError as exc:
            if exc.name and exc.name.startswith("confluent_kafka"):
                text = "kafka sink is not installed: pip install 'tidelog[kafka]'"
                raise InvalidError(text) from exc
            raise
        return open_kafka(address, environ=environ, store=store)
    if address.scheme == "kinesis":
        try:
            from tidelog.connectors.kinesis.sink import open_kinesis
        except ModuleNotFoundError as exc:
            if exc.name and exc.name.startswith("boto"):
                text = "kinesis sink is not installed: pip install 'tidelog[aws]'"
                raise InvalidError(text) from exc
            raise
        return open_kinesis(address, environ=environ, store=store)
    for entry in entry_points(group="tidelog.sinks", name=address.scheme):
        sink: TargetSink = entry.load()(address, environ=environ, store=store)
        return sink
    raise InvalidError(
        f"sink `{url}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, SINK_SCHEMES)}: give one of {', '.join(SINK_SCHEMES)}"
    )
