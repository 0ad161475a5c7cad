"""Scylla: the change log of a table, as a source.

``address`` parses the URL, ``session`` connects, ``streams`` finds generations of streams and the
positions in them, ``reader`` reads windows of changes, ``changes`` makes events of rows, ``schema``
and ``types`` decode columns.
"""
