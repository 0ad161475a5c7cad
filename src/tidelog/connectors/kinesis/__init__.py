"""Kinesis: the client, and streams as a source and as sinks.

``client`` retries calls and translates errors. ``source`` and ``reader`` read shards by the
positions of ``position``. ``sink`` and ``playback_sink`` write at least once through ``writer``, in
the order of each partition key, because Kinesis cannot detect repeats.
"""
