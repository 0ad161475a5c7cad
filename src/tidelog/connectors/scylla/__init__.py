"""Scylla: the change log of a table, as a source.

``session`` parses the URL and connects, ``streams`` finds generations of streams and positions in
them, ``reader`` reads windows of changes, ``changes`` turns rows into events, and ``types`` decodes
columns.
"""
