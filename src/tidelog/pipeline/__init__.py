"""Pipelines: read a range of a source, write files or runs, and commit both ends at once.

This room keeps promise P4: the content of a range is decided once, published under final names, and
counted once, whatever crashes and however many drivers run. Only the catalog decides: Spark's
checkpoints are not used. It must not import pyspark: Spark's workers are in ``spark.workers``.

``pipeline`` has a pipeline's parts, ``tasks`` what runs on workers, ``source_state`` what a
driver knows of a source partition, and ``manifest`` what a range produced. ``cycle`` has the steps
and their crash table. ``driver`` runs cycles, ``pump`` copies a source into a topic, ``stream``
passes one to a handler, ``ranges`` decides when a range is due and how it is cut,
``forgotten_ranges`` sets aside those that a restored catalog does not know, ``gaps`` records what a
source lost, ``failures`` what a person should see, and ``registry`` has named pipelines.
"""
