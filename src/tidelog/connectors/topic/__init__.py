"""Topics of a home: as a source and as a sink of pipelines and playbacks.

``source`` reads runs by offset. ``sink`` appends ranges exactly once, as segments that ``segments``
stages. Both sinks skip events that were erased from the topic.
"""
