"""Archives: as a sink, whose files a pipeline writes, and as a source.

``sink`` sorts events into folders and writes dead letters. ``staging`` refuses events that no
restore could write back, uploads files, and publishes them under their final names. ``source``
reads the files of an archive's commits in offset order.
"""
