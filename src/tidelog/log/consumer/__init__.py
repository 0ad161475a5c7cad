"""Consumers: named readers whose members share the partitions of a topic.

``leases`` divides the partitions and fences members that lost one, ``consumer`` polls and commits,
``fetcher`` reads one partition under one lease, ``handler`` runs a function over the events with
retries, ``delete`` removes a consumer.
"""
