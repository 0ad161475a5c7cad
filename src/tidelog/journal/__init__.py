"""Journals: find events by id, update and erase them, and compile runs into journals.

Promise P5: every reader that starts after an update or a delete returned sees it, and no older one
ever undoes it. Readers apply amendments themselves (``log.run_reader``). This room writes
amendments and compiles them into journals in the background. It must not know Spark, HTTP or
commands.
"""
