"""Producers: events into a topic, from a buffer to their offsets.

``producer`` collects events, ``flush`` is what travels together, ``flush_queue`` uploads segments
side by side and in order, ``append`` commits a segment to the partitions by ``append_plan``.
``staged`` has segments that other processes put into the store, and ``copier`` appends them, except
erased events. ``idempotent_append`` stores a repeated request once.
"""
