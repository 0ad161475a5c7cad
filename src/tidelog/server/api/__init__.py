"""The operations of the API: events in and out, by offset, time and id.

``ingest`` and ``pixel`` append, ``forward`` sends events on to Kafka or Kinesis. ``read``, ``tail``
and ``sql`` read, ``by_id`` reads and amends. ``openapi`` describes them all; a test walks the
description.
"""
