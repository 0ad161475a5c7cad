"""Topics of a home: as a source and as a sink of pipelines and playbacks.

``source`` reads runs by offset. ``sink`` appends ranges exactly once, as segments that ``segments``
stages; events that were erased from the topic stay out.
"""
