"""Where pipelines write: files of an archive, topics, Kafka, Kinesis.

A sink stages what a range produces and publishes it when the pipeline has recorded a manifest. It
promises that publishing twice, or by two drivers at once, publishes once, where its target can know
that, and that nothing that is only staged can be seen. It must not know sources or pipelines.

``base`` has the interface. ``files`` lays down archives, by ``publish``, which copies staged files
to their final names; ``topic``, ``kafka`` and ``kinesis`` bring events into a log, by ``segments``.
Other packages may add one by the entry point group ``tidelog.sinks``.
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
    """The sink that a URL names; its target must be there. ``NotFoundError``.

    ``open_context`` opens the home in whose store events are staged, and whose topics ``topic:``
    names, in the process that calls it; a sink that goes to other processes needs one that pickles.
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
