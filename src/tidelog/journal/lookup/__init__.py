"""Lookup: finds events by id or by key, exactly, among any number of them.

``lookup`` finds them. ``id_cache`` keeps the id indexes of runs and journals in memory, so that
most lookups read only the objects that contain the events.
"""
