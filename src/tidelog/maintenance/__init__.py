"""Maintenance: one turn of everything that a home needs.

``turn`` compiles, erases from archives and sweeps. ``Home``, the scribe, the commands and the
Lambda function call it, and have no logic of their own. ``erase`` has whole erasures: it deletes
events, removes their bytes at once, and proves it. ``pipeline_sweep`` deletes what pipelines no
longer need, ``follower`` runs every archive and pump of a home in one process, and
``up_supervisor`` keeps the processes of ``tidelog up`` running. This room must not know HTTP or the
command line.
"""
