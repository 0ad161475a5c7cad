"""Kafka: the client, and Kafka topics as a source and as sinks.

``client`` turns an address into librdkafka's properties. ``source`` lists partitions and plans
ranges, ``reader`` turns messages into batches, and ``records`` preserves headers exactly. ``sink``
writes ranges exactly once through ``transactions``, and plays events back in order.
"""
