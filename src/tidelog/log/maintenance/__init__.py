"""Upkeep of topics: trim, sweep and verify.

``trim`` deletes the oldest events, ``sweep`` deletes objects that no row needs, by what
``references`` and ``unused`` say; ``losses`` and ``strays`` notice what a restored catalog has
forgotten. ``verify`` checks every layer against the others. No threads and no locks here.
"""
