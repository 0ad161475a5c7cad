"""Files of a folder: as a source of events, and as a playback sink.

``source`` reads backups of archives by the names of their files, and any other files row by row.
``row_tracking`` recognizes a rotated file by the marks of ``row_marks``. This connector is simple
on purpose: copy it to start a new one.
"""
