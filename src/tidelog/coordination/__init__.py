"""Coordination: which process works on what, and which names exist.

``ownership`` is a row that one process holds at a time, with an epoch that fences the one before.
``registry`` adds and removes names so that no delayed repeat brings one back. ``tokens`` are the
server's credentials. ``pipeline_rows`` reads what the catalog knows about pipelines, and
``commits`` what they have committed. ``members`` share work, as consumers and the drivers of a
pipeline do. ``jobs`` are what runs for a home, ``audit`` records who did what. ``trusted_time``
compares times when clocks disagree. ``outcome`` words what a call that failed midway has stored.
"""
