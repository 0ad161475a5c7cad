"""The operations of the API: events in and out, by offset, time and id.

``ingest`` and ``pixel`` write, ``by_offset``, ``by_time``, ``by_id`` and ``tail`` read, ``openapi``
describes them all; a test walks the description.
"""
