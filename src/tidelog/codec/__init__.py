"""Bytes to events and back: Arrow from end to end.

``events`` turns events into Arrow batches in the event columns and back, ``segment`` packs batches
of several partitions into one object and checks what it reads. It promises that what was packed
comes out, or ``CorruptError``. It must not know stores, catalogs or offsets.
"""
