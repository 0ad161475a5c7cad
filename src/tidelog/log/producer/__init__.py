"""Producers: events into a topic, from a buffer to their offsets.

``producer`` collects events, ``flush`` is what travels together, ``uploader`` uploads segments
side by side and in order, ``append`` commits a segment to the partitions by ``append_plan``,
which also has segments that other processes staged. ``idempotent_append`` stores a repeated request
once.
"""
