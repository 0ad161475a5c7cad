"""Kafka: its client, and topics of Kafka as a source and as sinks.

``client`` turns an address into librdkafka's properties, ``source`` lists partitions and plans
ranges, ``reader`` turns messages into batches, and ``records`` keeps headers as they are. ``sink``
writes ranges exactly once by ``transactions``; ``playback_sink`` plays events back in order.
"""
