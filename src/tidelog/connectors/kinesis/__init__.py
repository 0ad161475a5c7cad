"""Kinesis: its client, and streams as a source and as sinks.

``client`` repeats calls and translates errors, ``source`` and ``reader`` read shards by the
positions of ``position``. ``sink`` and ``playback_sink`` write at least once through ``writer``,
in the order of each partition key, since Kinesis cannot tell repeats apart.
"""
