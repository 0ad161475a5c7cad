"""Archives: as a sink, whose files a pipeline writes, and as a source.

``sink`` sorts events into folders. ``dead_letters`` keeps those that no restore could write back,
each with its reason. ``staging`` uploads files, and publishes them under their final names.
``source`` reads the files of an archive's commits in offset order.
"""
