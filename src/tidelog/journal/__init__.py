"""Journals: events that are found by id, corrected, erased, and compiled.

It promises P5: an update or a delete is seen by every reader that starts after it returned, and is
never undone by an older one. Readers apply amendments themselves (``log.reader.amendments``); here
they are made, and compiled into journals in the background. It must not know Spark, HTTP or
commands.
"""
