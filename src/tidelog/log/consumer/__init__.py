"""Consumers: named readers whose members share the partitions of a topic.

``leases`` divides the partitions, fences members that lost one, and reads one partition under one
lease, ``consumer`` polls and commits, ``handler`` runs a function over the events with retries,
``seek`` moves cursors from outside, ``delete`` deletes consumers.
"""
