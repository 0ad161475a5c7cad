"""Converts events to bytes and back, with Arrow from end to end.

``event_batch`` turns events into Arrow batches and back. ``segment`` packs batches of several
partitions into one object, and ``journal_file`` is a compiled run. ``formats`` and ``parsers``
serve archives. What was packed comes out again, or ``CorruptError`` is raised. This room must not
know stores, catalogs or offsets.
"""
