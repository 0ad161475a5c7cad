"""Consumers: named readers whose members share the partitions of a topic.

``leases`` divides the partitions and fences members that lost one, ``delivery`` reads a partition
under a lease and knows what the caller has got, ``consumer`` polls and commits, ``handler`` runs a
function over the events with retries, ``seek`` moves cursors from outside, ``delete`` deletes
consumers.
"""
