"""Amendments: update and delete events, and insert events only if their ids are new.

``amend`` finds the events and decides. ``amendment_writer`` writes a few rows at a time together
with the partition's head, so that every reader that starts afterwards sees them.
"""
