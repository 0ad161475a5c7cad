"""Kinesis: the client, and streams as a source and as sinks.

``client`` retries calls and translates errors. ``source`` and ``reader`` read shards by positions.
``sink`` writes at least once, in the order of each partition key, because Kinesis cannot detect
repeats; so does its playback sink.
"""
