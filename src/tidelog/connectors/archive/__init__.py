"""Archives: as a sink, whose files a pipeline writes, and as a source.

``sink`` lays events out in folders and writes dead letters, ``staging`` uploads files and publishes
them under their final names, ``acceptance`` refuses what no restore could put back. ``source``
reads the files of an archive's commits in the order of their offsets.
"""
