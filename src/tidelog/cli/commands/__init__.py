"""The commands, one file for each group.

A command parses its arguments, calls ``Home`` and formats the result. What several commands share
is in ``tidelog.cli``; logic that a library user needs is in the library.
"""
