"""The catalog in one SQLite file: the default, for any number of processes of one machine.

``catalog`` has the rows, ``connections`` keeps one connection for each thread and none across a
fork.
"""
