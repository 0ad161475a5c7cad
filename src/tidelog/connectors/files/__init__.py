"""Files of a folder: as a source of events, and as a place to play events to.

``source`` reads backups of archives by the names of their files, and any other files row by row.
``row_tracking`` recognises a file after it was rotated, by the marks of ``row_marks``. Kept
simple, so that a new connector can be copied from it.
"""
