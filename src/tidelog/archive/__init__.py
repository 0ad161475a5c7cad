"""Archives: the events of a source as files, each event exactly once, in generations.

This room keeps promises P4 and P4a: every offset from an archive's begin to its position is
accounted for, and no operation loses an accounted event silently. It must not know HTTP, the
command line or Spark.

``archive`` creates and opens archives, ``generations`` builds, promotes and rolls back, ``fill``
reads what the source no longer has, ``account`` and ``coverage`` count, ``verify`` recounts from
the files, ``read`` finds events, ``dead_letters`` replays, ``finalize`` marks complete folders,
``tables`` registers the files with Delta Lake and Iceberg, and ``delete`` ends an archive.
"""
