"""Coordination: which process works on what, and which names exist.

``ownership`` is a row that one process holds at a time, with an epoch that fences the one before,
and members that share work, as those of consumers and the drivers of a pipeline do. ``registry``
adds and removes names so that no delayed repeat brings one back; ``tokens`` are those of the
server. ``pipeline_rows`` reads what the catalog knows about pipelines, and ``commits`` what they
have committed. ``jobs`` are what runs for a home, ``audit`` records who did what. ``trusted_time``
compares times when clocks disagree. ``outcome`` words what a call that failed midway has stored.
"""
