"""The operations of the API: events in and out, by offset, time and id.

``ingest`` and ``pixel`` write, ``read``, ``by_id`` and ``tail`` read, ``openapi``
describes them all; a test walks the description.
"""
