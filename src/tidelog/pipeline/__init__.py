"""Pipelines: read a range of a source, write files or runs, and commit both ends at once.

It promises P4: what a range produces is decided once, published under final names, and counted
once, whatever crashes and however many drivers run. The catalog is the only truth: Spark's
checkpoints are not used. It must not import pyspark: Spark's workers are in ``spark.workers``.

``base`` has the values and protocols, and workers of this process; ``cycle`` has the steps and
their crash table; ``driver`` runs cycles; ``pump`` copies a source into a topic; ``registry`` has
named pipelines; ``endpoints`` opens sources, sinks and stores by their URLs.
"""
