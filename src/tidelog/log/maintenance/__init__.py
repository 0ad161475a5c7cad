"""Maintenance of topics: trim, sweep and verify.

``trim`` deletes the oldest events. ``sweep`` deletes objects that no row needs, by what
``object_references``, ``strays`` and ``unfinished_writes`` find; ``lost_commits`` detects what a
restored catalog has lost. ``verify`` checks every layer against the others. Starts no threads and
takes no locks.
"""
