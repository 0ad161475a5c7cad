"""Pipelines: read a range of a source, write files or runs, and commit both ends at once.

It promises P4: what a range produces is decided once, published under final names, and counted
once, whatever crashes and however many drivers run. The catalog is the only truth: Spark's
checkpoints are not used. Beside ``spark`` it is the only room that may import pyspark.

``base`` has the values and protocols, ``cycle`` the steps, ``workers`` runs tasks in this process.
"""
